package render

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

// The tests of test/shipped hand these files to an API server, and to Kueue's reader of its config. OpenShift's operator asks for more than that reader.
func TestRenderWritesWhatNVIDIAsDRADriverNeeds(t *testing.T) {
	pools := filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml")
	const a100 = "NVIDIA-A100-SXM4-80GB"
	const cut = " --pool balanced-inference=3x8:" + a100 + " --pool small-inference=4x8:" + a100
	for _, row := range []struct{ golden, args string }{
		{"objects/dra.yaml", "dra --to team" + cut + " -f " + filepath.Join("testdata", "dra-configs.yaml") + " --pool media=1x2 --pool whole=1x2"},
		{"objects/kueue-dra.yaml", "kueue --dra" + cut},
		{"objects/kueue-openshift.yaml", "kueue --openshift --dra" + cut + " --local-queue team/large=balanced-inference --local-queue team/small=small-inference --local-queue production/small=small-inference"},
		{"objects/kueue-openshift-counter.yaml", "kueue-config --openshift" + cut + " --pool small-inference=1x8:NVIDIA-A100-PCIe-80GB --counter memory"},
		{"kueue-config/devices.yaml", "kueue-config" + cut + " -f " + filepath.Join("testdata", "dra-configs.yaml") + " --pool media=1x2 --pool whole=1x2"},
		{"kueue-config/counters.yaml", "kueue-config" + cut + " --pool small-inference=1x8:NVIDIA-A100-PCIe-80GB --counter memory --counter multiprocessors"},
	} {
		t.Run(row.golden, func(t *testing.T) {
			got := rendered(t, append([]string{"-f", pools}, strings.Fields(row.args)...)...)
			golden := filepath.Join("testdata", row.golden)
			agenttest.Golden(t, golden, got, *update)
		})
	}
}

// exampleHead begins deploy/examples/dra.yaml, whose templates go into the namespace that kubectl is given.
const exampleHead = "# Needs NVIDIA's DRA driver on the nodes (deploy/DRA.md). DeviceClasses and templates of claims for the MIG devices of an H100 of 80 GB:\n" +
	"#\n#   kubectl apply -n team -f deploy/examples/dra.yaml\n#\n# kubectl gpuslice render dra writes those of your profiles.\n"

func TestTheExampleIsWhatRenderWrites(t *testing.T) {
	_, made, _ := strings.Cut(rendered(t, "dra", "--to", "team", "-f", filepath.Join("testdata", "dra-configs.yaml"), "--pool", "h100=1x7", "--pool", "whole=1x1"), "apiVersion:")
	made = exampleHead + "apiVersion:" + strings.ReplaceAll(made, "  namespace: team\n", "")
	example := filepath.Join("..", "..", "..", "deploy", "examples", "dra.yaml")
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
	from := []string{"-f", filepath.Join("..", "..", "..", "deploy", "examples", "configmap-pools.yaml"), "-f", filepath.Join("testdata", "dra-configs.yaml")}
	for args, want := range map[string]string{
		"dra --to team --pool research=1x8:NVIDIA-A100":                                                    "pool research: it shares devices by time-slicing, and NVIDIA's DRA driver shares one by the config of its claim",
		"kueue-config --pool research=1x8:NVIDIA-A100":                                                     "pool research: it shares devices by time-slicing",
		"kueue --dra --pool research=1x8:NVIDIA-A100":                                                      "pool research: it shares devices by time-slicing",
		"dra --pool media=1x1":                                                                             "name the namespace of the templates by --to",
		"dra --to Team --pool media=1x1":                                                                   `flag --to is "Team": write the name of a namespace`,
		"kueue-config --pool media=1x1:NVIDIA-H100 --counter Memory/slice":                                 `flag --counter is "Memory/slice": write the name of a counter`,
		"kueue-config --openshift --pool media=1x1:NVIDIA-H100 --counter memory --counter multiprocessors": "flag --counter is given 2 times, and the operator's Kueue takes a DeviceClass in one mapping: name one counter",
	} {
		if got := rendered(t, append(strings.Fields(args), from...)...); !strings.HasPrefix(got, "error: ") || !strings.Contains(got, want) {
			t.Errorf("render %s: says\n%s\nwant %s", args, got, want)
		}
	}
}
