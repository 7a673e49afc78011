package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/nvml"
)

var update = flag.Bool("update", false, "rewrite testdata")

// The command as a person runs it on a node without a cluster, through the real library path.
func TestPlanOffline(t *testing.T) {
	configs := filepath.Join("testdata", "configs.yaml")
	pools := filepath.Join("..", "..", "deploy", "examples", "configmap-pools.yaml")
	for _, row := range []struct{ name, args string }{
		{"balanced", "--mig-config all-balanced"},
		{"profile", "--profile recommended -f " + configs},
		{"impossible", "--mig-config two-3g-and-a-1g -f " + configs},
		{"unknown", "--mig-config all-1g.5gb"},
		{"nothing", "--mig-config all-disabled"},
		{"manifest", "--mig-config three-parts -f " + filepath.Join("testdata", "manifests.yaml")},
		{"shared-pool", "--profile research -f " + pools},
		{"single-pool", "--profile small-inference -f " + pools + " -f " + configs},
		{"mps", "--profile mps-2 --profiles " + filepath.Join("testdata", "manifests.yaml")},
		{"plugin-config", "--device-plugin-config any -f " + filepath.Join("testdata", "manifests.yaml")},
		{"both-labels", "--mig-config three-parts --device-plugin-config slices -f " + filepath.Join("testdata", "manifests.yaml")},
		{"no-such-key", "--device-plugin-config some -f " + filepath.Join("testdata", "manifests.yaml")},
		{"positions", "--mig-config large-node -f " + configs},
		{"positions-of-no-gpu", "--mig-config large-node-as-it-is -f " + configs},
		{"profile-and-config", "--profile research --mig-config all-disabled -f " + pools},
		{"twice", "--profile research -f " + pools + " -f " + pools},
		{"foreign", "--mig-config all-disabled -f " + filepath.Join("..", "..", "deploy", "base", "namespace.yaml")},
	} {
		t.Run(row.name, func(t *testing.T) {
			root, gpus := simulated(t, "usr/lib64")
			before := gpus.String()
			got := prints(t, "", append([]string{"plan", "--offline", "--driver-root", root}, strings.Fields(row.args)...)...)
			got = regexp.MustCompile(`GPU-[0-9a-f-]{36}`).ReplaceAllString(got, "GPU-<uuid>")
			golden := filepath.Join("testdata", row.name+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, gpus.String()); diff != "" {
				t.Errorf("the plan changed the GPU (-before +after):\n%s", diff)
			}
		})
	}
}

// With --driver-root / or what stands for it, the driver may be in the container of the GPU Operator.
func TestAPlanFindsTheDriverOfAContainer(t *testing.T) {
	root, _ := simulated(t, "run/nvidia/driver/usr/lib64")
	got := prints(t, "", "plan", "--offline", "--driver-root", root, "--mig-config", "all-disabled")
	if !strings.HasPrefix(got, "GPU 0  NVIDIA A100") || strings.Contains(got, "error") {
		t.Errorf("it says %q", got)
	}
}

// The driver is at fault, and no config.
func TestAPlanWithoutADriverBlamesNoConfig(t *testing.T) {
	got := prints(t, "", "plan", "--offline", "--driver-root", t.TempDir(), "--mig-config", "all-balanced")
	if !strings.HasPrefix(got, "error: the GPUs cannot be seen, so nothing is known of all-balanced: ") || strings.Contains(got, "cannot be:") {
		t.Errorf("it says %q", got)
	}
}

// Only the agent's own verdict is a refusal: what keeps the command from asking says nothing of the config.
func TestAPlanThatCannotAskRefusesNothing(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	refusing := filepath.Join(t.TempDir(), "kubeconfig")
	text := "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]}"
	if err := os.WriteFile(refusing, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]string{
		"--node= --kubeconfig " + refusing:                                  "--node",
		"--node n --kubeconfig=":                                            "KUBERNETES_SERVICE_HOST",
		"--node n --kubeconfig /none/such":                                  "/none/such",
		"--node n --settings /none/such --kubeconfig " + refusing:           "/none/such",
		"--node n --state-dir " + t.TempDir() + " --kubeconfig " + refusing: "connection refused",
	} {
		_, err := runs(t, "", append([]string{"plan", "--mig-config", "all-balanced"}, strings.Fields(args)...)...)
		if err == nil || cli.ExitCode(err) != 1 || strings.Contains(err.Error(), "refused:") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: exit code %d: %v", args, cli.ExitCode(err), err)
		}
	}
}

func TestAPlanEndsByTheVerdictOfTheAgent(t *testing.T) {
	for want, errs := range map[int][]error{
		cli.ExitHeldUp: {&outcome.Stalled{Message: "no MIG config has the name"}, &plan.Refused{Err: nvml.ErrLost}, &api.Failure{Message: "it has failed"}},
		1:              {io.ErrUnexpectedEOF, &outcome.UnseenError{Err: io.ErrUnexpectedEOF}, nvml.ErrNoDriver},
	} {
		for _, cause := range errs {
			err := unplanned("all-balanced", fmt.Errorf("planning: %w", cause), false)
			if cli.ExitCode(err) != want || strings.Contains(err.Error(), "would be refused: ") != (want == cli.ExitHeldUp) {
				t.Errorf("%T: exit code %d, want %d: %v", cause, cli.ExitCode(err), want, err)
			}
		}
	}
}

// The error of a plan says no more than its first line.
func TestTheErrorOfAPlanIsItsVerdict(t *testing.T) {
	steps := []plan.Step{{Kind: plan.Fence}}
	for name, row := range map[string]struct {
		plan preview.Result
		said string
		code int
	}{
		"it begins":            {preview.Result{Steps: steps}, "", 0},
		"it is held up":        {preview.Result{Steps: steps, HeldUp: "audit"}, "all-1g.10gb would be held up", cli.ExitHeldUp},
		"it may begin in vain": {preview.Result{Steps: steps, Unsure: "GPU 0"}, "all-1g.10gb would begin, and perhaps not end", cli.ExitUnknown},
	} {
		err := (&options{}).say(io.Discard, "all-1g.10gb", row.plan, false)
		if cli.ExitCode(err) != row.code || row.code != 0 && err.Error() != row.said {
			t.Errorf("%s: exit code %d, %v; want %d, %s", name, cli.ExitCode(err), err, row.code, row.said)
		}
	}
}

// A name that no label can have would forge lines of what is printed.
func TestNamesOfTheCommandLineForgeNoLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "a\nFAKE")
	if err := os.WriteFile(file, []byte("version: v1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"plan", "--offline", "--mig-config", "any", "-f", "no\nFAKE"},
		{"plan", "--offline", "--mig-config", "any", "-f", file, "-f", file},
		{"plan", "--offline", "--mig-config", "a\nFAKE"},
		{"plan", "--offline", "--profile", "a\nFAKE"},
		{"plan", "--mig-config", "a", "--device-plugin-config", "a\nFAKE"},
	} {
		if said := prints(t, "", args...); strings.Contains(said, "\nFAKE") {
			t.Errorf("%q: a line is forged: %s", args, said)
		}
	}
}

func TestAPlanReadsStandardInput(t *testing.T) {
	manifests, err := os.ReadFile(filepath.Join("testdata", "manifests.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	known, err := manifest.ReadConfigs([]string{"-"}, bytes.NewReader(manifests))
	if err != nil || len(known.MIG) != 1 || len(known.Profiles) != 1 || len(known.Plugin) != 2 {
		t.Errorf("read %d MIG configs, %d profiles and %d configs of the device plugin, error %v", len(known.MIG), len(known.Profiles), len(known.Plugin), err)
	}
}

func TestAPlanNamesProcessesOnWhatGoes(t *testing.T) {
	p := preview.Result{Steps: []plan.Step{{Kind: plan.Fence}}, Holders: []preview.Holder{{Index: 1, PIDs: []int{41, 42}}}}
	var out bytes.Buffer
	if err := printPlan(&out, "all-balanced", p, true, func(pid int) string { return map[int]string{42: "python3"}[pid] }); err != nil {
		t.Fatal(err)
	}
	if want := "GPU 1: NVML shows processes 41, 42 (python3) on what the change takes away; "; !strings.Contains(out.String(), want) {
		t.Errorf("the plan does not say %q:\n%s", want, out.String())
	}
}

// If the agent reboots the node, all pods leave, not only those of the first eviction.
func TestAPlanCountsEachPodThatHasToLeaveOnce(t *testing.T) {
	a, b, c := plan.Pod{Name: "a"}, plan.Pod{Name: "b"}, plan.Pod{Name: "c"}
	for want, evictions := range map[string][][]plan.Pod{
		"No pod has to leave.":  nil,
		"1 pod has to leave.":   {{a}, {a}},
		"3 pods have to leave.": {{a}, {b, a, c}},
	} {
		steps := []plan.Step{{Kind: plan.Fence}}
		for _, pods := range evictions {
			steps = append(steps, plan.Step{Kind: plan.Evict, Pods: pods}, plan.Step{Kind: plan.SetMode})
		}
		if got := podsToEvict(steps, false); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestAPlanSaysWhatWaitsForAReboot(t *testing.T) {
	gpus := []nvml.GPU{{Index: 0, UUID: "GPU-a"}, {Index: 1, UUID: "GPU-b"}}
	reboot := []plan.Step{{Kind: plan.Reboot}}
	for want, p := range map[string]preview.Result{
		"Nothing to do: the GPUs are as all-balanced asks.":                                   {},
		"GPUs 0, 1 turn MIG on at the node's next reboot; the change to all-balanced goes on": {AtReboot: gpus},
		"GPU 1 turns MIG on at the node's next reboot; the change to all-balanced goes on":    {AtReboot: gpus[1:], Steps: nil},
		"The change takes a reboot of the node.":                                              {Steps: reboot, Reboot: true},
	} {
		p.Before, p.After = gpus, gpus
		var out bytes.Buffer
		if err := printPlan(&out, "all-balanced", p, false, func(int) string { return "" }); err != nil {
			t.Fatal(err)
		}
		text := out.String()
		if !strings.Contains(text, want) || len(p.AtReboot) > 0 && strings.Contains(text, "as all-balanced asks") {
			t.Errorf("the plan does not say %q:\n%s", want, text)
		}
		if n := strings.Count(text, "the same, until the node's next reboot"); n != len(p.AtReboot) {
			t.Errorf("%d GPUs are said to wait, want %d:\n%s", n, len(p.AtReboot), text)
		}
	}
}
