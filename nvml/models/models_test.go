package models_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/models"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

func TestMain(m *testing.M) { gpusimtest.Main(m) }

// A plan for a model says what one for the hardware says: the simulator's tables are measured on it, or are NVIDIA's.
func TestModelsAreCutAsTheSimulatedOnes(t *testing.T) {
	byName := cmpopts.SortSlices(func(a, b nvml.Profile) bool { return a.Name < b.Name })
	rounded := cmpopts.IgnoreFields(nvml.Profile{}, "MemoryMiB")
	placed := cmpopts.IgnoreFields(nvml.ComputeProfile{}, "Placements")
	for _, name := range gpusim.Models() {
		if slices.Contains([]string{"T4", "L4"}, name) { // which cannot be cut
			continue
		}
		known, is := models.GPU(name)
		if !is {
			t.Errorf("%s is not known", name)
			continue
		}
		node := gpusimtest.Node(t, "gpus: [{model: "+name+"}]")
		seen, err := node.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(seen[0].Profiles, known.Profiles, byName, rounded, placed); diff != "" {
			t.Errorf("%s (-simulated +table):\n%s", name, diff)
		}
		if seen[0].Model != known.Model || seen[0].DeviceID != known.DeviceID || seen[0].ComputeCapability != known.ComputeCapability {
			t.Errorf("%s is %s %x %s, want %s %x %s", name, known.Model, known.DeviceID, known.ComputeCapability, seen[0].Model, seen[0].DeviceID, seen[0].ComputeCapability)
		}
	}
}

func TestModelsByName(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"H100-80GB": "NVIDIA H100 80GB HBM3", "h100-80gb": "NVIDIA H100 80GB HBM3", "H100 80GB": "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3": "NVIDIA H100 80GB HBM3",
		"NVIDIA-H100-80GB-HBM3": "NVIDIA H100 80GB HBM3", "A100-40GB": "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe", "rtx pro 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
		"H100": "", "A100": "", "": "", "T4": "",
	} {
		if g, known := models.GPU(name); known != (want != "") || g.Model != want {
			t.Errorf("%q is %q, want %q", name, g.Model, want)
		}
	}
	if names := models.Names(); !slices.Contains(names, "GB300") || len(names) < 18 {
		t.Errorf("the models are %q", names)
	}
	for _, name := range models.Names() { // each is cut in full by its smallest profile
		g, _ := models.GPU(name)
		if s, err := nvml.Solve(g, map[string]int{g.Profiles[0].Name: g.Profiles[0].Max}); err != nil || len(s.Target) != g.Profiles[0].Max {
			t.Errorf("%s: %v", name, err)
		}
	}
}
