package migrate

import (
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// What labels say of a model makes the same configs as the hardware itself does.
func TestLabelsMakeWhatTheHardwareMakes(t *testing.T) {
	for _, model := range gpusim.Models() {
		node, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model}, {Model: model}}})
		if err != nil {
			t.Fatal(err)
		}
		gpus, err := node.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		labels := map[string]string{
			"nvidia.com/gpu.product": strings.ReplaceAll(gpus[0].Model, " ", "-"), "nvidia.com/gpu.memory": strconv.Itoa(gpus[0].MemoryMiB),
			"nvidia.com/gpu.count": "2", "nvidia.com/mig.capable": strconv.FormatBool(gpus[0].Capable),
		}
		for name, want := range catalog.Generate(gpus) {
			m := machineOf(labels, append(devicesOf(want), deviceOf(name)))
			got, ok := m.made(name)
			if diff := cmp.Diff(want, got); !ok || diff != "" {
				t.Errorf("%s, %s (-hardware +labels):\n%s", model, name, diff)
			}
			if v, text := compared(name, want, labels); gpus[0].Capable && v != Taken {
				t.Errorf("%s: %s: %s", model, v, text)
			}
			if !isOfForm(name, want) {
				t.Errorf("%s: %s is not of the form of its name", model, name)
			}
		}
	}
}

func TestComparedSaysWhatWins(t *testing.T) {
	a100 := map[string]string{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.count": "2"}
	cut := map[string]string{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.memory": "9728", "nvidia.com/gpu.count": "14"}
	fill := func(filter string, n int, indices ...int) catalog.MIGRule {
		r := catalog.MIGRule{All: indices == nil, Indices: indices, MIG: true, Devices: map[string]int{"1g.10gb": n}}
		if filter != "" {
			r.DeviceFilter = []string{filter}
		}
		return r
	}
	for name, test := range map[string]struct {
		config  string
		rules   catalog.MIGConfig
		labels  map[string]string
		verdict Verdict
		want    string
	}{
		"the same":                        {"all-1g.10gb", catalog.MIGConfig{fill("", 7)}, a100, Taken, "gives 7x 1g.10gb on each GPU, as the agent's own"},
		"the same, by position":           {"all-1g.10gb", catalog.MIGConfig{fill("", 7, 0, 1, 2, 3)}, a100, Taken, "gives 7x 1g.10gb on each GPU"},
		"the same, all cut":               {"all-1g.10gb", catalog.MIGConfig{fill("", 7)}, cut, Taken, "gives 7x 1g.10gb on each GPU"},
		"one rule of several models":      {"all-1g.10gb", catalog.MIGConfig{fill("0x20B210DE", 7), fill("0x20B010DE", 4)}, a100, Change, "all-1g.10gb has a device-filter, and no label shows the PCI device ids of the GPUs: compare it with the agent's own of that name by gpuslice-agent plan --offline --mig-config all-1g.10gb on the node, without"},
		"a filter":                        {"all-1g.10gb", catalog.MIGConfig{fill("0x232110DE", 7)}, a100, Change, "Copied, it wins; the agent refuses it where no rule is about a GPU"},
		"a filter by a name of others":    {"all-mine", catalog.MIGConfig{fill("0x232110DE", 7)}, a100, Change, "all-mine has a device-filter"},
		"a filter next to a rule for all": {"all-1g.10gb", catalog.MIGConfig{fill("0x232110DE", 5), fill("", 7)}, a100, Change, "all-1g.10gb has a device-filter"},
		"fewer":                           {"all-1g.10gb", catalog.MIGConfig{fill("", 5)}, a100, Change, "gives 5x 1g.10gb on each GPU, and the agent's own of that name 7x 1g.10gb on each GPU: copy it, and it wins"},
		"on some":                         {"all-1g.10gb", catalog.MIGConfig{fill("", 7, 1)}, a100, Change, "gives GPU 0 left as they are, 7x 1g.10gb on GPU 1, and the agent's own"},
		"MIG in all-disabled":             {"all-disabled", catalog.MIGConfig{fill("", 7)}, nil, Change, "gives 7x 1g.10gb on each GPU, and the agent's own of that name MIG off on each GPU"},
		"all-disabled":                    {"all-disabled", catalog.MIGConfig{{All: true}}, nil, Taken, "gives MIG off on each GPU"},
		"a name of other GPUs":            {"all-mine", catalog.MIGConfig{fill("", 7)}, a100, Change, "the agent makes none of that name of these GPUs: copy it"},
		"devices of other GPUs":           {"all-1g.5gb", catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.5gb": 7}}}, a100, Change, "names 1g.5gb, which by its labels this model does not have: the agent refuses that"},
		"no labels":                       {"all-1g.10gb", catalog.MIGConfig{fill("", 7)}, nil, Change, "to compare them the labels"},
		"positions of all cut":            {"all-1g.10gb", catalog.MIGConfig{fill("", 7, 0, 1)}, cut, Change, "to compare them the labels"},
		"a rule of other models":          {"all-1g.12gb", catalog.MIGConfig{{DeviceFilter: []string{"0x232110DE"}, All: true, MIG: true, Devices: map[string]int{"1g.12gb": 7}}}, a100, Change, "has no rule for GPUs of this model"},
		"positions that are not":          {"all-1g.10gb", catalog.MIGConfig{fill("", 7, 4)}, a100, Change, "the agent would refuse it, even copied"},
	} {
		if v, text := compared(test.config, test.rules, test.labels); v != test.verdict || !strings.Contains(text, test.want) {
			t.Errorf("%s: %s: %s; want %s: %s", name, v, text, test.verdict, test.want)
		}
	}
}

func TestPositions(t *testing.T) {
	for want, of := range map[string][]int{
		"GPU 3": {3}, "GPUs 0 to 3 and 7": {0, 1, 2, 3, 7}, "GPUs 0, 2 and 4 to 5": {0, 2, 4, 5},
		"GPUs 0, 2, 4, 6, 8, 10, 12, 14 and 2 more": {0, 2, 4, 6, 8, 10, 12, 14, 16, 18},
	} {
		if got := positions(of); got != want {
			t.Errorf("%v are %q, want %q", of, got, want)
		}
	}
}
