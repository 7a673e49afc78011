package features_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
)

func TestWhatLabelsSayIsBounded(t *testing.T) {
	for name, test := range map[string]struct {
		product, count, memory string
		want                   features.GPUs
	}{
		"whole GPUs":       {"NVIDIA-A30", "4", "24576", features.GPUs{Model: "NVIDIA-A30", Count: 4, MemoryMiB: 24576}},
		"shared":           {"NVIDIA-A30-SHARED", "4", "24576", features.GPUs{Model: "NVIDIA-A30", Count: 4, MemoryMiB: 24576}},
		"all cut":          {"NVIDIA-A30-MIG-1g.6gb.me-SHARED", "16", "5952", features.GPUs{Model: "NVIDIA-A30"}},
		"cut unevenly":     {"NVIDIA-A30-MIG-INVALID", "0", "0", features.GPUs{Model: "NVIDIA-A30"}},
		"nothing":          {},
		"too many":         {"", "65", "4194305", features.GPUs{}},
		"less than none":   {"", "-1", "-1", features.GPUs{}},
		"beyond a number":  {"", "99999999999999999999", "1e3", features.GPUs{}},
		"text with spaces": {"", " 8", "8 ", features.GPUs{}},
	} {
		got := features.Of(map[string]string{"nvidia.com/gpu.product": test.product, "nvidia.com/gpu.count": test.count, "nvidia.com/gpu.memory": test.memory})
		if got != test.want {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}
