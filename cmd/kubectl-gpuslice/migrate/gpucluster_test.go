package migrate

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// A GPUCluster leaves its users without any MIG manager.
func TestMigrateSaysWhatCountsUnderAGPUCluster(t *testing.T) {
	cluster := func(gates map[string]any) map[string]any {
		return map[string]any{
			"apiVersion": "nvidia.com/v1alpha1", "kind": "GPUCluster", "metadata": map[string]any{"name": "gpus"},
			"spec": map[string]any{
				"draDriver":  map[string]any{"featureGates": gates},
				"daemonsets": map[string]any{"tolerations": []any{map[string]any{"key": "nvidia.com/gpu", "operator": "Exists"}}},
			},
		}
	}
	with := func(gates map[string]any, env string) map[string]any {
		c := cluster(gates)
		driver := c["spec"].(map[string]any)["draDriver"].(map[string]any) //nolint:errcheck // made above
		driver["gpus"] = map[string]any{"kubeletPlugin": map[string]any{"env": []any{map[string]any{"name": "FEATURE_GATES", "value": env}}}}
		return c
	}
	policy := map[string]any{
		"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": map[string]any{"name": "p"},
		"spec": map[string]any{"migManager": map[string]any{"enabled": false}},
	}
	const (
		taken   = "  taken over  it deploys NVIDIA's DRA driver and no MIG manager: gpuslice divides the GPUs of its nodes by the same labels; deploy overlays/dra"
		ignored = "  ignored     MIG strategy and configs of the device plugin have no meaning on its nodes"
		itself  = "  change      draDriver.featureGates.DynamicMIG is true: the driver cuts the GPUs itself, so the agent leaves MIG alone"
		both    = "  change      ClusterPolicy p is there too, and the operator works with one of the two alone: delete the other"
		lacks   = "  change      daemonsets.tolerations lacks gpuslice.io/not-ready"
	)
	for name, row := range map[string]struct {
		objects   []any
		want, not []string
	}{
		"static":  {[]any{cluster(nil)}, []string{"GPUCluster gpus\n", taken, ignored, lacks}, []string{both, itself}},
		"dynamic": {[]any{cluster(map[string]any{"DynamicMIG": true})}, []string{itself, ignored}, []string{taken}},
		"all alpha gates": {
			[]any{cluster(map[string]any{"AllAlpha": true})}, []string{"draDriver.featureGates.AllAlpha is true: the driver cuts the GPUs itself"}, []string{taken},
		},
		"all alpha gates but one": {[]any{cluster(map[string]any{"AllAlpha": true, "DynamicMIG": false})}, []string{taken}, []string{itself}},
		"dynamic by a variable":   {[]any{with(nil, "PassthroughSupport=true, DynamicMIG=true")}, []string{"draDriver.gpus.kubeletPlugin.env: FEATURE_GATES DynamicMIG is true"}, []string{taken}},
		"static by a variable":    {[]any{with(map[string]any{"DynamicMIG": true}, "DynamicMIG=false")}, []string{taken}, []string{itself}},
		"both":                    {[]any{policy, cluster(map[string]any{"DynamicMIG": false})}, []string{both, taken}, nil},
		"no object":               {[]any{policy}, nil, []string{"GPUCluster"}},
	} {
		t.Run(name, func(t *testing.T) {
			kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
				of := map[string]string{"/apis/nvidia.com/v1/clusterpolicies": "ClusterPolicy", "/apis/nvidia.com/v1alpha1/gpuclusters": "GPUCluster"}[path]
				if of == "" && path != "/api/v1/nodes" {
					return nil
				}
				items := []any{}
				for _, o := range row.objects {
					if o.(map[string]any)["kind"] == of { //nolint:errcheck // made above
						items = append(items, o)
					}
				}
				return map[string]any{"kind": "List", "apiVersion": "v1", "items": items}
			})
			text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": row.objects})
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "list.json")
			if err := os.WriteFile(file, text, 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{{"--kubeconfig", kubeconfig}, {"-f", file}} {
				got, err := migrates(t, append([]string{"--dry-run"}, args...)...)
				if err != nil {
					t.Fatal(err)
				}
				for _, want := range row.want {
					if !strings.Contains(got, want) {
						t.Errorf("%s: it does not say %q:\n%s", args[0], want, got)
					}
				}
				for _, not := range row.not {
					if strings.Contains(got, not) {
						t.Errorf("%s: it says %q:\n%s", args[0], not, got)
					}
				}
			}
		})
	}
}

// What a user of a GPUCluster has to set, by the manifests of one: a request that its nodes cannot have is no part that gpuslice takes over.
func TestMigrateSaysWhatUsersOfAGPUClusterHaveToSet(t *testing.T) {
	const file, golden = "testdata/gpucluster.yaml", "testdata/gpucluster.txt"
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil {
		t.Fatal(err)
	}
	agenttest.Golden(t, golden, got, *update)
	page, err := os.ReadFile(filepath.Join("..", "..", "..", "deploy", "DRA.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, operand := range config.Default().Operands { // the page names those of a GPUCluster
		if name, is := strings.CutSuffix(strings.TrimPrefix(operand, config.LabelOperandPrefix), "-dra"); is && !strings.Contains(string(page), name+"-dra`") {
			t.Errorf("deploy/DRA.md does not name the operand %s", operand)
		}
	}
}
