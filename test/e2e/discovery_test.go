package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// What GPU feature discovery says of the node goes with what the device plugin offers, whose config it reads.
func TestFeatureDiscoveryLabelsSharedGPUs(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 2}]")
	r.startPlugin(fourEach)
	r.awaitAmount(gpu, 8, 8)
	cmd := sandbox.Command(t.Context(), programs.Sandbox, r.sees(), filepath.Join(programs.DevicePlugin, "gpu-feature-discovery"),
		"--oneshot", "--no-timestamp", "--use-node-feature-api=false", "--output-file="+r.file("features"), "--config-file="+r.file("plugin.yaml"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("running gpu-feature-discovery: %v\n%s", err, out)
	}
	text, err := os.ReadFile(r.file("features"))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "nvidia.com/gpu.count", "nvidia.com/gpu.replicas", "nvidia.com/gpu.product", "nvidia.com/gpu.sharing-strategy":
			got[key] = value
		}
	}
	want := map[string]string{
		"nvidia.com/gpu.count": "2", "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED",
		"nvidia.com/gpu.sharing-strategy": "time-slicing",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}
