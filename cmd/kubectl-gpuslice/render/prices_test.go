package render

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestPricesBecomeRules(t *testing.T) {
	const file = "currency: USD\ndefault: 1.10\nmodels:\n  - model: NVIDIA H100 80GB HBM3\n    perHour: 2.49\n  - {model: NVIDIA A100-SXM4-80GB, perHour: \"0\"}\n"
	for name, row := range map[string]struct {
		file string
		args []string
	}{
		"prices":          {file, nil},
		"prices-opencost": {"models: [{model: NVIDIA H200, perHour: 3}]", []string{"--opencost", "--to", "monitoring", "--name", "gpus", "--label", "release=prom"}},
		"prices-default":  {"default: 2", nil},
	} {
		got := validated(t, row.file, append([]string{"render", "prices", "-f", "-"}, row.args...)...)
		agenttest.Golden(t, filepath.Join("testdata", "objects", name+".yaml"), got, *update)
	}
}

func TestPricesThatCannotBeAreRefusedWithTheirLine(t *testing.T) {
	many := "models:\n"
	for i := range mostPrices + 1 {
		many += fmt.Sprintf("- {model: NVIDIA %d, perHour: 1}\n", i)
	}
	for file, want := range map[string]string{
		"currency: USD\ncurency: EUR\ndefault: 1":   "line 2, column 1: curency: is unknown here: use currency, default, models",
		"default: 1\ncurrency: Dollars":             `line 2, column 1: currency: "Dollars" must be a currency`,
		"default: -1":                               `line 1, column 1: default: "-1" must be a price`,
		"default: 1e9":                              `must be a price`,
		"default: .nan":                             `must be a price`,
		"default: 1000000":                          `default: "1000000" must be a price`,
		"default: 0.0000001":                        `must be a price`,
		"default: 010":                              `line 1, column 1: default: "010" must be a price`,
		"default: \"010\"":                          `default: "010" must be a price`,
		"default: &a 0x10":                          `default: "0x10" must be a price`,
		"default: 1_000":                            `default: "1_000" must be a price`,
		"models: [{model: NVIDIA A, perHour: 0b1}]": `models[0].perHour: "0b1" must be a price`,
		"default: 1\ndefault: 2":                    `already set in map`,
		"models: [{model: NVIDIA-H100-80GB-HBM3, perHour: 1}]":            `models[0].model: "NVIDIA-H100-80GB-HBM3" is of the label nvidia.com/gpu.product`,
		"models: [{model: NVIDIA A, perHour: 1}, {model: NVIDIA A}]":      `models[1].model: "NVIDIA A" is there twice`,
		"models:\n- model: NVIDIA A\n  price: 1":                          "line 3, column 3: models[0].price: is unknown here: use model, perHour",
		"models:\n- model: NVIDIA A":                                      "models[0].perHour: is missing",
		"models:\n- perHour: 2":                                           "models[0].model: is missing",
		"models: [{model: \"A\\\"} or vector(1) #\", perHour: 1}]":        "must be a model as NVIDIA's driver writes it",
		"models: [{model: " + strings.Repeat("A", 129) + ", perHour: 1}]": "must be a model as NVIDIA's driver writes it",
		"models: {NVIDIA A: 1}":                                           `models: must be a list of "model" and "perHour"`,
		"models: []":                                                      `models: must have the price of a model, unless "default" has one for all`,
		"currency: USD":                                                   `models: must have the price of a model`,
		many:                                                              "models: may be at most 500",
		"":                                                                "write the prices as one document",
		"default: 1\n---\ndefault: 2":                                     "it has 2",
		"- 1":                                                             "not a mapping of fields to values",
	} {
		if got := validated(t, file, "render", "prices", "-f", "-"); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, want) {
			t.Errorf("%.80q says\n%.600s\nwant %s", file, got, want)
		}
	}
	for args, want := range map[string]string{
		"":                           "name the one file of prices with -f",
		"-f - -f -":                  "name the one file of prices with -f",
		"-f - --pool a=1x8":          "prices go by no flag --pool",
		"-f - --nodes a=b":           "prices go by no flag --nodes",
		"-f - --dra":                 "prices go by no flag --dra",
		"-f - --settings a.yaml":     "prices go by no flag --settings",
		"-f - --mig-strategy single": "prices go by no flag --mig-strategy",
		"-f - --by-instance-type":    "prices go by no flag --by-instance-type",
		"-f - --label app.kubernetes.io/name=own": `flag --label is "app.kubernetes.io/name=own": the label of this key is gpuslice`,
		"-f - --label a=b --label a=c":            `flag --label is "a=c": an earlier one has this key`,
		"-f - --label release":                    `flag --label is "release": write KEY=VALUE`,
		"-f - --label a=b/c":                      `flag --label is "a=b/c": write KEY=VALUE`,
		"-f - --to Monitoring":                    `flag --to is "Monitoring": write the name of a namespace`,
		"-f - --name gpu_prices":                  `flag --name is "gpu_prices": write a name`,
	} {
		if got := validated(t, "default: 1", append([]string{"render", "prices"}, strings.Fields(args)...)...); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, want) {
			t.Errorf("render prices %s says\n%s\nwant %s", args, got, want)
		}
	}
}
