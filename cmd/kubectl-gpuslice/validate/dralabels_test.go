package validate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// The agent refuses them only when it sees the node; whoever looks before learns it by the cluster's own files.
func TestValidateSaysWhatNodesOfTheDRADriverCannotBe(t *testing.T) {
	node := func(name, label, value string) any {
		return map[string]any{"metadata": map[string]any{"name": name, "labels": map[string]any{label: value}}}
	}
	slice := func(node string) any {
		return map[string]any{"metadata": map[string]any{"name": node}, "spec": map[string]any{
			"driver": "gpu.nvidia.com", "nodeName": node, "pool": map[string]any{"name": node, "generation": 1, "resourceSliceCount": 1},
			"devices": []any{map[string]any{"name": "gpu-0", "attributes": map[string]any{"type": map[string]any{"string": "gpu"}}}},
		}}
	}
	read := func(file string) string {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var pools map[string]any
	if err := yaml.Unmarshal([]byte(read(filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"))), &pools); err != nil {
		t.Fatal(err)
	}
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch path {
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": []any{
				node("a", "gpuslice.io/profile", "research"), node("b", "nvidia.com/mig.config", "parts"), node("c", "nvidia.com/mig.config", "media"),
				node("d", "gpuslice.io/profile", "small-inference"), node("e", "gpuslice.io/profile", "research"),
				node("f", "nvidia.com/device-plugin.config", "shared"),
				node("g", "nvidia.com/device-plugin.config", config.OwnPluginKey+"uid-0"), // an agent's, of which the agent makes nothing
				node("h", "nvidia.com/mig.config", "gpu0_1c.3g.40gb"),
			}}
		case "/apis/resource.k8s.io":
			return map[string]any{"kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": []any{map[string]any{"groupVersion": "resource.k8s.io/v1", "version": "v1"}}}
		case "/apis/resource.k8s.io/v1/resourceslices":
			return map[string]any{"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "items": []any{slice("a"), slice("b"), slice("c"), slice("d"), slice("f"), slice("g"), slice("h")}}
		case "/api/v1/namespaces/gpuslice/configmaps/gpuslice-profiles":
			return pools
		case "/api/v1/namespaces/gpuslice/configmaps/custom":
			return map[string]any{"kind": "ConfigMap", "apiVersion": "v1", "data": map[string]any{"config.yaml": read(filepath.Join("..", "render", "testdata", "dra-configs.yaml"))}}
		case "/api/v1/resourcequotas":
			return map[string]any{"kind": "List", "apiVersion": "v1", "items": []any{}}
		}
		return nil
	})
	got := validated(t, "", "validate", "--against-cluster", "--kubeconfig", kubeconfig)
	for _, want := range []string{
		"NVIDIA's DRA driver advertises the GPUs by its ResourceSlices, which count: a; b; c; d; f; g; h\n",
		"drift  Node a: its label names profile research: it shares devices by time-slicing, and NVIDIA's DRA driver shares one by the config of its claim",
		"drift  Node f: its label nvidia.com/device-plugin.config=shared asks for a config of the device plugin, which NVIDIA's DRA driver does not have",
		"drift  Node b: its label names MIG config parts: it asks for 1c.3g.40gb, a part of a GPU instance, and NVIDIA's DRA driver does not start on a node that has one",
		"drift  Node h: its label names MIG config gpu0_1c.3g.40gb: it asks for 1c.3g.40gb, a part of a GPU instance",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("it does not say %q:\n%s", want, got)
		}
	}
	if strings.Count(got, "drift  Node ") != 4 {
		t.Errorf("it says:\n%s", got)
	}
}
