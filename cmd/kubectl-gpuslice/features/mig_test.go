package features_test

import (
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// The name of a model alone says what the hardware says, and no config that the agent makes for it is refused.
func TestAModelIsKnownByItsName(t *testing.T) {
	for _, model := range gpusim.Models() {
		node, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model}}})
		if err != nil {
			t.Fatal(err)
		}
		gpus, err := node.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		shape := features.GPUs{Model: strings.ReplaceAll(gpus[0].Model, " ", "-")}.Shape()
		if shape.Known() != gpus[0].Capable {
			t.Errorf("%s is known: %v", gpus[0].Model, shape.Known())
		}
		for _, profile := range gpus[0].Profiles {
			if why := shape.Refuses(map[string]int{profile.Name: profile.Max}); why != "" {
				t.Errorf("%s, %dx %s: %s", model, profile.Max, profile.Name, why)
			}
			if why := shape.Refuses(map[string]int{profile.Name: profile.Max + 1}); why == "" {
				t.Errorf("%s: %dx %s is not refused", model, profile.Max+1, profile.Name)
			}
		}
		for name, rules := range catalog.Generate(gpus) {
			for _, rule := range rules {
				if why := shape.Refuses(rule.Devices); why != "" {
					t.Errorf("%s, %s: %s", model, name, why)
				}
			}
		}
	}
}

func TestWhatNoModelHoldsIsRefused(t *testing.T) {
	for name, row := range map[string]struct {
		model    string // empty for all
		patterns []string
		devices  map[string]int
		want     string
	}{
		"a device of others":                  {"NVIDIA-A30", nil, map[string]int{"4g.40gb": 1, "1g.6gb": 1}, "has no 4g.40gb"},
		"too many":                            {"A30", nil, map[string]int{"1g.6gb": 5}, "holds at most 4 of 1g.6gb"},
		"too many together":                   {"NVIDIA-H100-80GB-HBM3", nil, map[string]int{"3g.40gb": 2, "1g.10gb": 1}, "has not the slices for all of them: 7 of 7 for computing, 9 of 8 of memory"},
		"as many as it holds":                 {"NVIDIA-H100-80GB-HBM3", nil, map[string]int{"3g.40gb": 1, "2g.20gb": 2}, ""},
		"parts of an instance":                {"NVIDIA-A100-SXM4-40GB", nil, map[string]int{"1c.3g.20gb": 6}, ""},
		"more parts than instances":           {"NVIDIA-A100-SXM4-40GB", nil, map[string]int{"1c.3g.20gb": 7}, "holds at most 2 of 3g.20gb"},
		"a model that is not known":           {"NVIDIA-X1", nil, map[string]int{"9g.90gb": 100}, ""},
		"a size of none":                      {"", nil, map[string]int{"9g.90gb": 1, "1g.10gb": 1}, "no model has 9g.90gb"},
		"more than any holds":                 {"", nil, map[string]int{"1g.10gb": 9}, "no model holds all of them on one GPU"},
		"as many as some model holds":         {"", nil, map[string]int{"1g.10gb": 7}, ""},
		"sizes of two models":                 {"", nil, map[string]int{"1g.10gb": 1, "1g.18gb": 1}, "no model holds all of them on one GPU"},
		"a pattern of one model":              {"", []string{"NVIDIA A30"}, map[string]int{"1g.10gb": 1}, "no such model has 1g.10gb"},
		"a pattern of several models":         {"", []string{"NVIDIA A100*", "NVIDIA H100*"}, map[string]int{"1g.5gb": 7}, ""},
		"a pattern of no model that is known": {"", []string{"NVIDIA X*"}, map[string]int{"9g.90gb": 1}, ""},
		"nothing":                             {"", nil, nil, ""},
	} {
		got := features.GPUs{Model: row.model}.Shape().Refuses(row.devices)
		if row.model == "" {
			got = features.AllRefuse(row.devices, row.patterns)
		}
		if got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
	// Those of the configs that mig-parted v0.14.4 ships.
	const shipped = "1g.5gb+me 1g.5gb 1g.6gb 1g.6gb+me 1g.10gb 1g.10gb+me 1g.12gb 1g.18gb 1g.20gb 1g.23gb 1g.24gb 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 1g.34gb 1g.35gb 1g.36gb 1g.45gb 1g.47gb " +
		"1g.67gb 1g.70gb 2g.10gb 2g.12gb 2g.12gb+me 2g.20gb 2g.24gb 2g.35gb 2g.36gb 2g.45gb 2g.47gb 2g.48gb 2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me 2g.67gb 2g.70gb 3g.20gb 3g.40gb 3g.47gb 3g.48gb " +
		"3g.71gb 3g.72gb 3g.90gb 3g.93gb 3g.95gb 3g.135gb 3g.139gb 4g.20gb 4g.24gb 4g.40gb 4g.47gb 4g.48gb 4g.71gb 4g.72gb 4g.90gb 4g.93gb 4g.95gb 4g.96gb 4g.96gb+gfx 4g.135gb 4g.139gb " +
		"7g.40gb 7g.80gb 7g.94gb 7g.96gb 7g.141gb 7g.144gb 7g.180gb 7g.186gb 7g.189gb 7g.269gb 7g.278gb"
	for device := range strings.FieldsSeq(shipped) {
		if why := features.AllRefuse(map[string]int{device: 1}, nil); why != "" {
			t.Errorf("%s: %s", device, why)
		}
	}
}
