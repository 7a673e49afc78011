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
	if d.PendingRestore == nil || d.PendingRestore.Target != "all-balanced" || d.Cordon == nil || !d.Cordon.Ours || d.Outcome.Verdict != api.VerdictWaitsForYou {
		t.Errorf("the diagnosis is wrong about what is to be restored: %+v %+v %+v", d.PendingRestore, d.Cordon, d.Outcome)
	}
	if after := r.node(); after.ResourceVersion != before.ResourceVersion && after.Annotations[config.AnnotationJournal] != before.Annotations[config.AnnotationJournal] {
		t.Error("a dry run has changed the journal")
	}
	out := r.recover(exitGivenBack)
	if !strings.Contains(out, "AwaitingCapacity") || !strings.Contains(out, "the node takes pods") {
		t.Errorf("it does not say how it went:\n%s", out)
	}
	if closed(r.node()) { // which the controller manager takes away some time after the uncordon
		t.Error("recover says that the node takes pods, and the taint of its cordon is still there")
	}
	r.givenBack(r.awaitConverged("all-balanced"))
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
