package node_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// What gpuslice-agent recover ends with.
const (
	exitGivenBack = 0
	exitNotYet    = 1
	exitNotOurs   = 3
)

// The person on call finds a cordoned node without an agent. The first look changes nothing; then the command does the work.
func TestRecoverFinishesWhatADeadAgentHasBegun(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kill()
	before := r.node()
	d := r.diagnosis(exitGivenBack)
	if !slices.ContainsFunc(d.Causes, func(f api.Finding) bool { return f.Cause == api.CauseAgentDiedInChange }) || d.Agent.Runs {
		t.Errorf("the diagnosis does not say that the agent died in the change: %+v", d.Causes)
	}
	if d.Owed == nil || d.Owed.Target != "all-balanced" || d.Cordon == nil || !d.Cordon.Ours || d.Outcome.Verdict != api.VerdictWaitsForYou {
		t.Errorf("the diagnosis is wrong about what is owed: %+v %+v %+v", d.Owed, d.Cordon, d.Outcome)
	}
	if after := r.node(); after.ResourceVersion != before.ResourceVersion && after.Annotations[config.AnnotationJournal] != before.Annotations[config.AnnotationJournal] {
		t.Error("a dry run has changed the journal")
	}
	out := r.recover(exitGivenBack)
	if !strings.Contains(out, "AwaitingCapacity") || !strings.Contains(out, "the node takes pods") {
		t.Errorf("it does not say how it went:\n%s", out)
	}
	r.givenBack(r.awaitConverged("all-balanced"))
}

func TestRecoverWatchesTheAgentThatRuns(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	goOn := r.holdCreation()
	if out := r.recover(exitNotYet, "--timeout=1s"); !strings.Contains(out, "not given back in 1s; still owed: change to all-balanced") {
		t.Errorf("it does not say what is owed:\n%s", out)
	}
	r.stillInTheMiddle()
	goOn()
	out := r.recover(exitGivenBack)
	if !strings.Contains(out, "Repartitioning: all-balanced") {
		t.Errorf("it does not say how the agent went on:\n%s", out)
	}
	r.givenBack(r.node())
}

// To give back is not to begin.
func TestRecoverBeginsNoChange(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.label(config.LabelMIGConfig, "all-balanced")
	if out := r.recover(exitGivenBack); !strings.Contains(out, "The node takes pods, and is not as all-balanced asks.") {
		t.Errorf("it does not say that the node is not as asked:\n%s", out)
	}
	if writes := r.writes(""); len(writes) > 0 {
		t.Errorf("something was written: %+v", writes)
	}
}

func TestRecoverNamesWhoHasCordoned(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("cordon", r.Name)
	r.await("the taint of the cordon", func(n *corev1.Node) bool { return len(n.Spec.Taints) > 0 })
	for _, runs := range []bool{false, true} {
		if runs {
			r.run()
			r.awaitReason(config.ReasonNotRequested)
		}
		out := r.recover(exitNotOurs)
		for _, want := range []string{"error: not ours: cordoned by kubectl since 20", "$ kubectl uncordon " + r.Name} {
			if !strings.Contains(out, want) {
				t.Errorf("it does not say %q:\n%s", want, out)
			}
		}
		d := r.diagnosis(exitGivenBack)
		if d.Cordon == nil || d.Cordon.By != "kubectl" || d.Cordon.Ours || d.Cordon.Since.IsZero() || d.Agent.Runs != runs {
			t.Errorf("the diagnosis with an agent: %t is wrong about the cordon: %+v", runs, d.Cordon)
		}
	}
	if !r.node().Spec.Unschedulable {
		t.Error("the administrator's cordon was lifted")
	}
}

// Nobody has told the agent that runs to do so; the person on call does.
func TestRecoverRestoresWhatMIGManagerHasLeft(t *testing.T) {
	t.Parallel()
	const dcgm = config.LabelOperandPrefix + "dcgm"
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.label(dcgm, "paused-for-mig-change")
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	if out := r.recover(exitNotOurs); !strings.Contains(out, "$ gpuslice-agent recover --adopt mig-manager") {
		t.Errorf("it does not say what to do:\n%s", out)
	}
	if out := r.recover(exitGivenBack, "--adopt=mig-manager"); !strings.Contains(out, "restored: "+dcgm) {
		t.Errorf("it does not say what it has restored:\n%s", out)
	}
	if value := r.node().Labels[dcgm]; value != "true" {
		t.Errorf("label %s is %q, want true", dcgm, value)
	}
}

// recover runs the command as the person on call does, and gives all that it says.
func (r *rig) recover(want int, args ...string) string {
	r.t.Helper()
	return r.onNode(want, "recover", args...)
}

// onNode is what a command of the agent's program prints on the node.
func (r *rig) onNode(want int, command string, args ...string) string {
	r.t.Helper()
	var out bytes.Buffer
	cmd := exec.CommandContext(r.t.Context(), r.Parts.Agent, append(append([]string{command}, r.flags()...), args...)...)
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir())
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	if err := os.WriteFile(filepath.Join(r.Dir, command+".log"), out.Bytes(), 0o600); err != nil {
		r.t.Error(err)
	}
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		r.t.Fatal(err)
	}
	if code := cmd.ProcessState.ExitCode(); code != want {
		r.t.Fatalf("gpuslice-agent %s %s ends with %d, want %d:\n%s", command, strings.Join(args, " "), code, want, out.String())
	}
	return out.String()
}

// diagnosis is what the command says to programs.
func (r *rig) diagnosis(want int) api.Diagnosis {
	r.t.Helper()
	var d api.Diagnosis
	if err := json.Unmarshal([]byte(r.recover(want, "--dry-run", "-o=json")), &d); err != nil {
		r.t.Fatal(err)
	}
	return d
}

// node is the node as it is now.
func (r *rig) node() *corev1.Node {
	r.t.Helper()
	n, err := r.client.CoreV1().Nodes().Get(r.t.Context(), r.Name, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}
