package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
)

// The tests of test/shipped hand these files to an API server, and to Kueue's reader of its config.
func TestRenderWritesWhatNVIDIAsDRADriverNeeds(t *testing.T) {
	pools := filepath.Join("..", "..", "deploy", "examples", "configmap-pools.yaml")
	const a100 = "NVIDIA-A100-SXM4-80GB"
	const cut = " --pool balanced-inference=3x8:" + a100 + " --pool small-inference=4x8:" + a100
	for _, row := range []struct{ golden, args string }{
		{"render/dra.yaml", "dra --to team" + cut + " -f " + filepath.Join("testdata", "dra-configs.yaml") + " --pool media=1x2 --pool whole=1x2"},
		{"render/kueue-dra.yaml", "kueue --dra" + cut},
		{"kueue-config/devices.yaml", "kueue-config" + cut + " -f " + filepath.Join("testdata", "dra-configs.yaml") + " --pool media=1x2 --pool whole=1x2"},
		{"kueue-config/counters.yaml", "kueue-config" + cut + " --pool small-inference=1x8:NVIDIA-A100-PCIe-80GB --counter memory --counter multiprocessors"},
	} {
		t.Run(row.golden, func(t *testing.T) {
			got := rendered(t, append([]string{"-f", pools}, strings.Fields(row.args)...)...)
			golden := filepath.Join("testdata", row.golden)
			isGolden(t, golden, got, *update)
		})
	}
}

// exampleHead begins deploy/examples/dra.yaml, whose templates go into the namespace that kubectl is given.
const exampleHead = "# DeviceClasses and templates of claims for the MIG devices of an H100 of 80 GB, on nodes of NVIDIA's DRA driver (deploy/DRA.md):\n" +
	"#\n#   kubectl apply -n team -f deploy/examples/dra.yaml\n#\n# kubectl gpuslice render dra writes those of your profiles.\n"

func TestTheExampleIsWhatRenderWrites(t *testing.T) {
	_, made, _ := strings.Cut(rendered(t, "dra", "--to", "team", "-f", filepath.Join("testdata", "dra-configs.yaml"), "--pool", "h100=1x7", "--pool", "whole=1x1"), "apiVersion:")
	made = exampleHead + "apiVersion:" + strings.ReplaceAll(made, "  namespace: team\n", "")
	example := filepath.Join("..", "..", "deploy", "examples", "dra.yaml")
	if *update {
		if err := os.WriteFile(example, []byte(made), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(example)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(text), made); diff != "" {
		t.Errorf("deploy/examples/dra.yaml (-is +would be):\n%s", diff)
	}
}

func TestRenderRefusesWhatNVIDIAsDRADriverDoesNotTake(t *testing.T) {
	from := []string{"-f", filepath.Join("..", "..", "deploy", "examples", "configmap-pools.yaml"), "-f", filepath.Join("testdata", "dra-configs.yaml")}
	for args, want := range map[string]string{
		"dra --to team --pool research=1x8:NVIDIA-A100":                    "pool research: it shares devices by time-slicing, and NVIDIA's DRA driver shares one by the config of its claim",
		"kueue-config --pool research=1x8:NVIDIA-A100":                     "pool research: it shares devices by time-slicing",
		"kueue --dra --pool research=1x8:NVIDIA-A100":                      "pool research: it shares devices by time-slicing",
		"dra --to team --pool parts=1x1":                                   "pool parts: it asks for 1c.3g.40gb, a part of a GPU instance, and NVIDIA's DRA driver does not start on a node that has one",
		"dra --pool media=1x1":                                             "name the namespace of the templates by --to",
		"dra --to Team --pool media=1x1":                                   `flag --to is "Team": write the name of a namespace`,
		"kueue-config --pool media=1x1 --counter memory":                   "pool media: counters are those of a model: name it",
		"kueue-config --pool media=1x1:NVIDIA-H100 --counter Memory/slice": `flag --counter is "Memory/slice": write the name of a counter`,
	} {
		if got := rendered(t, append(strings.Fields(args), from...)...); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, want) {
			t.Errorf("render %s: says\n%s\nwant %s", args, got, want)
		}
	}
}

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
	if err := yaml.Unmarshal([]byte(read(filepath.Join("..", "..", "deploy", "examples", "configmap-pools.yaml"))), &pools); err != nil {
		t.Fatal(err)
	}
	kubeconfig := kubeconfigOf(t, func(path string) any {
		switch path {
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": []any{
				node("a", "gpuslice.io/profile", "research"), node("b", "nvidia.com/mig.config", "parts"), node("c", "nvidia.com/mig.config", "media"),
				node("d", "gpuslice.io/profile", "small-inference"), node("e", "gpuslice.io/profile", "research"),
				node("f", "nvidia.com/device-plugin.config", "shared"),
				node("g", "nvidia.com/device-plugin.config", config.OwnPluginKey+"uid-0"), // an agent's, of which the agent makes nothing
			}}
		case "/apis/resource.k8s.io":
			return map[string]any{"kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": []any{map[string]any{"groupVersion": "resource.k8s.io/v1", "version": "v1"}}}
		case "/apis/resource.k8s.io/v1/resourceslices":
			return map[string]any{"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "items": []any{slice("a"), slice("b"), slice("c"), slice("d"), slice("f"), slice("g")}}
		case "/api/v1/namespaces/gpuslice/configmaps/gpuslice-profiles":
			return pools
		case "/api/v1/namespaces/gpuslice/configmaps/custom":
			return map[string]any{"kind": "ConfigMap", "apiVersion": "v1", "data": map[string]any{"config.yaml": read(filepath.Join("testdata", "dra-configs.yaml"))}}
		case "/api/v1/resourcequotas":
			return map[string]any{"kind": "List", "apiVersion": "v1", "items": []any{}}
		}
		return nil
	})
	got := validated(t, "", "validate", "--against-cluster", "--kubeconfig", kubeconfig)
	for _, want := range []string{
		"NVIDIA's DRA driver offers the GPUs as they are cut, and counts by its ResourceSlices: a; b; c; d; f; g\n",
		"drift  Node a: its label names profile research: it shares devices by time-slicing, and NVIDIA's DRA driver shares one by the config of its claim",
		"drift  Node f: its label nvidia.com/device-plugin.config=shared asks for a config of the device plugin, which NVIDIA's DRA driver does not have",
		"drift  Node b: its label names MIG config parts: it asks for 1c.3g.40gb, a part of a GPU instance, and NVIDIA's DRA driver does not start on a node that has one",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("it does not say %q:\n%s", want, got)
		}
	}
	if strings.Count(got, "drift  Node ") != 3 {
		t.Errorf("it says:\n%s", got)
	}
}
