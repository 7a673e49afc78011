package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gofrs/flock"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// The command on a node whose API server is away, through the real library path: it reports what it can see.
// The tests in test/node run it with a cluster.
func TestRecoverWithoutAnAPIServer(t *testing.T) {
	dir, kubeconfig := machine(t), nobodysKubeconfig(t)
	for name, args := range map[string]string{"recover": "", "recover-json": "-o json"} {
		t.Run(name, func(t *testing.T) {
			text, err := runRecover(t, dir, kubeconfig, "--dry-run "+args)
			if err != nil {
				t.Fatal(err)
			}
			for _, replace := range []struct{ what, by string }{
				{`GPU-[0-9a-f-]{36}`, "GPU-<uuid>"},
				{`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, "<time>"},
				{`rpc error: .*no such file or directory\\?"`, "<no such socket>"},
				{regexp.QuoteMeta(dir), "<dir>"},
			} {
				text = regexp.MustCompile(replace.what).ReplaceAllString(text, replace.by)
			}
			golden := filepath.Join("testdata", name+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), text); diff != "" {
				t.Errorf("the diagnosis (-want +got):\n%s", diff)
			}
		})
	}
	if _, err := os.Stat(filepath.Join(dir, "agent.lock")); err == nil {
		t.Error("a look without consequences has made a lock")
	}
}

// The command knows by the lock whether an agent runs. It only looks, and does not take the lock.
func TestRecoverKnowsTheAgentByItsLock(t *testing.T) {
	dir, kubeconfig := machine(t), nobodysKubeconfig(t)
	lock := flock.New(filepath.Join(dir, "agent.lock"))
	defer lock.Close()
	for _, runs := range []bool{true, false} {
		if runs {
			if ok, err := lock.TryLock(); err != nil || !ok {
				t.Fatal("no lock", err)
			}
		} else if err := lock.Unlock(); err != nil {
			t.Fatal(err)
		}
		text, err := runRecover(t, dir, kubeconfig, "--dry-run -o json")
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ Agent struct{ Runs bool } }
		if err := json.Unmarshal([]byte(text), &got); err != nil || got.Agent.Runs != runs {
			t.Errorf("the agent is said to run: %t, want %t (%v)", got.Agent.Runs, runs, err)
		}
	}
	if ok, err := lock.TryLock(); err != nil || !ok {
		t.Error("the look has kept the lock", err)
	}
}

func TestRecoverRefusesFlagsThatMeanNothing(t *testing.T) {
	dir, kubeconfig := machine(t), nobodysKubeconfig(t)
	for args, want := range map[string]string{
		"--dry-run -o yaml":       `flag --output is "yaml"`,
		"--dry-run --adopt kured": `flag --adopt is "kured"`,
	} {
		if _, err := runRecover(t, dir, kubeconfig, args); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", args, err, want)
		}
	}
}

func TestNewsIsReportedOnce(t *testing.T) {
	says := func(reason config.Reason, message string) *corev1.Node {
		return &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{
			Type: config.ConditionGPUPartitionReady, Reason: string(reason), Message: message,
			LastHeartbeatTime: metav1.NewTime(time.Date(2026, 11, 21, 3, 4, 5, 0, time.UTC)),
		}}}}
	}
	var out bytes.Buffer
	w := &progress{out: cli.Printer{W: &out}, last: nodeMessage{Reason: config.ReasonFencing, Message: "a"}}
	for _, n := range []*corev1.Node{{}, says(config.ReasonFencing, "a"), says(config.ReasonEvicting, "b"), says(config.ReasonEvicting, "b"), says(config.ReasonEvicting, "c")} {
		w.node(n)
	}
	if diff := cmp.Diff("03:04:05Z  Evicting: b\n03:04:05Z  Evicting: c\n", out.String()); diff != "" {
		t.Errorf("news (-want +got):\n%s", diff)
	}
	out.Reset()
	w.json = true
	w.node(says(config.ReasonConverged, "d"))
	w.restored([]string{"a label"})
	w.outcome(api.Outcome{Verdict: api.VerdictFree, Text: "free"}, false)
	decoder := json.NewDecoder(&out)
	for i := range 3 {
		var document map[string]any
		if err := decoder.Decode(&document); err != nil {
			t.Errorf("document %d: %v", i, err)
		}
	}
}

// machine is a driver root, over one simulated GPU.
func machine(t *testing.T) string {
	t.Helper()
	root, _ := simulated(t, "usr/lib64")
	return root
}

// simulated is a root with the simulated driver's library in that folder of it, and the GPU.
func simulated(t *testing.T, folder string) (root string, gpus *gpusim.Node) {
	t.Helper()
	library, err := binaries.Builder{Log: os.Stderr}.LibNVML(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	spec, err := gpusim.ParseSpec([]byte("gpus: [{model: A100-80GB}]"))
	if err != nil {
		t.Fatal(err)
	}
	if gpus, err = gpusim.Create(t.TempDir(), spec); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpus.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("GPUSIM_NODE", gpus.Dir())
	root = t.TempDir()
	if err := os.MkdirAll(filepath.Join(root, folder), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(library, filepath.Join(root, folder, "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
	return root, gpus
}

// runRecover is the command as kubectl exec starts it: where the pod has things is in its environment.
func runRecover(t *testing.T, dir, kubeconfig, args string) (string, error) {
	t.Helper()
	t.Setenv("GPUSLICE_DRIVER_ROOT", dir)
	t.Setenv("GPUSLICE_LOCK", filepath.Join(dir, "agent.lock"))
	t.Setenv("GPUSLICE_STATE_DIR", filepath.Join(dir, "state"))
	return runs(t, "", append([]string{
		"recover", "--node", "n", "--kubeconfig", kubeconfig, "--pod-resources", filepath.Join(dir, "kubelet.sock"),
	}, strings.Fields(args)...)...)
}
