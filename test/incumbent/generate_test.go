package incumbent_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// TestGeneratedConfigsAskTheSameAsTheIncumbents holds what the agent offers by itself against what NVIDIA's
// `nvidia-mig-parted generate-config` prints on the same GPUs: the same names, "." for "+" included, and under each the
// same instances on each GPU. How rules are written, and which filters they need, is each program's own affair.
//
// They differ on nodes where some GPUs cannot do MIG, as catalog.Generate says: NVIDIA's rules are not about those GPUs, or
// ask for MIG that they cannot do; ours ask for MIG off. Those GPUs stay as they are either way.
func TestGeneratedConfigsAskTheSameAsTheIncumbents(t *testing.T) {
	nodes := map[string]string{
		"A100-40GB and H100-80GB":            "[{model: A100-40GB}, {model: H100-80GB, count: 2}]",
		"A100-80GB, H100-80GB, same names":   "[{model: A100-80GB}, {model: H100-80GB}]",
		"A30 and H200 in turns":              "[{model: H200}, {model: A30}, {model: H200}, {model: A30}]",
		"A100-40GB and T4":                   "[{model: A100-40GB, count: 2}, {model: T4}]",
		"T4, H100-80GB, T4 and RTX-PRO-6000": "[{model: T4}, {model: H100-80GB}, {model: T4}, {model: RTX-PRO-6000}]",
	}
	var every []string
	for _, model := range gpusim.Models() {
		every = append(every, "{model: "+model+"}")
		if slices.Contains(gpusim.ModelsWithMIG(), model) {
			nodes[model] = "[{model: " + model + ", count: 2}]"
			nodes[model+" with MIG on"] = "[{model: " + model + ", mig: true}, {model: " + model + "}]"
		}
	}
	nodes["every model"] = "[" + strings.Join(every, ", ") + "]"

	programs := build(t)
	for name, gpus := range nodes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			host := newHost(t, programs, "gpus: "+gpus)
			seen, err := host.GPUs.Driver().Snapshot(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			printed, err := host.MIGParted(t.Context(), "generate-config")
			if err != nil {
				t.Fatal(err)
			}
			theirs, err := migparted.Parse([]byte(printed))
			if err != nil {
				t.Fatalf("reading what it prints: %v\n%s", err, printed)
			}
			ours := catalog.Generate(seen)
			capable := slices.DeleteFunc(slices.Clone(seen), func(g nvml.GPU) bool { return !g.Capable })
			if diff := gocmp.Diff(meaningOf(theirs, capable), meaningOf(ours, capable)); diff != "" {
				t.Errorf("asked of each GPU (-incumbent +gpuslice):\n%s", diff)
			}
			plain := slices.DeleteFunc(seen, func(g nvml.GPU) bool { return g.Capable })
			for name, gpus := range meaningOf(ours, plain) {
				for _, gpu := range plain {
					if gpus[gpu.Index] != "off" {
						t.Errorf("%s asks %q of GPU %d, which cannot do MIG", name, gpus[gpu.Index], gpu.Index)
					}
				}
			}
		})
	}
}

// meaningOf is what configs ask of each GPU of a node, by name of the config and index: "off", "on", "on 2x3g.40gb". The
// last rule that is about a GPU counts. What it reads of rules is the fields that mig-parted has too.
func meaningOf(configs map[string]catalog.MIGConfig, gpus []nvml.GPU) map[string]map[int]string {
	meaning := map[string]map[int]string{}
	for name, rules := range configs {
		meaning[name] = map[int]string{}
		for _, rule := range rules {
			for _, gpu := range gpus {
				if isAbout(rule, gpu) {
					meaning[name][gpu.Index] = asks(rule)
				}
			}
		}
	}
	return meaning
}

func isAbout(rule catalog.MIGRule, gpu nvml.GPU) bool {
	named := rule.All || slices.Contains(rule.Indices, gpu.Index)
	return named && (len(rule.DeviceFilter) == 0 || slices.ContainsFunc(rule.DeviceFilter, func(filter string) bool {
		return strings.EqualFold(filter, fmt.Sprintf("0x%X", gpu.DeviceID))
	}))
}

func asks(rule catalog.MIGRule) string {
	if !rule.MIG {
		return "off"
	}
	parts := []string{"on"}
	for _, device := range slices.Sorted(maps.Keys(rule.Devices)) {
		parts = append(parts, fmt.Sprintf("%dx%s", rule.Devices[device], device))
	}
	return strings.Join(parts, " ")
}
