package node_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// A profile that cuts nothing, and puts labels and taints on the node beside those that stand there.
const cleanupProfiles = `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  whole:
    mig: [{gpus: {all: true}, enabled: false}]
    labels: {example.com/size: whole, tier: inference}
    taints: [{key: example.com/gpu, value: whole, effect: PreferNoSchedule}]
`

// Promise 13, to the end: where gpuslice has been, the node object is as before, but for its version, for times, and for what kubelet reports. The
// labels and taints of users and of other tools stay, and so does what an administrator has asked for.
func TestCleanupLeavesTheNodeAsItWas(t *testing.T) {
	t.Parallel()
	name := "cleanup-" + strconv.FormatUint(rand.Uint64(), 36)
	r := newRig(t, oneA100, "profiles: {name: "+name+"}\n")
	r.configMapOf(name, map[string]string{"profiles.yaml": cleanupProfiles})
	r.awaitOffered("nvidia.com/gpu", 1)
	r.label("tier", "inference") // as the profile will have it
	r.kubectl("taint", "node", r.Name, "example.com/users=own:PreferNoSchedule")
	before := r.node()
	if out := r.onNode(0, "cleanup", "--dry-run"); !strings.Contains(out, "record.json, if it is there") || strings.Contains(out, "label ") {
		t.Errorf("a dry run on a node that has had no agent says:\n%s", out)
	}

	r.run()
	r.label(config.LabelProfile, "whole")
	r.awaitConverged("whole")
	during := r.node()
	if during.Labels["example.com/size"] != "whole" || during.Annotations[config.AnnotationStatus] == "" {
		t.Fatalf("the agent has not written what this test is about: %v %v", during.Labels, during.Annotations)
	}
	if out := r.onNode(1, "cleanup"); !strings.Contains(out, "an agent runs on this node") {
		t.Errorf("beside an agent it says:\n%s", out)
	}
	r.kubectl("label", "node", r.Name, config.LabelProfile+"-")
	r.awaitReason(config.ReasonNotRequested)
	r.await("a word about the GPUs' health", func(n *corev1.Node) bool {
		return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUUnhealthy })
	})
	r.kill()

	would := r.onNode(0, "cleanup", "--dry-run")
	out := r.onNode(0, "cleanup")
	for _, want := range []string{
		"label nvidia.com/mig.config.state", "annotation gpuslice.io/status", "annotation gpuslice.io/published", "label example.com/size",
		"taint example.com/gpu=whole:PreferNoSchedule", "condition GPUPartitionReady", "condition GPUUnhealthy", "record.json", "health.json",
	} {
		if !strings.Contains(out, "removed: "+want) && !strings.Contains(out, want) || !strings.Contains(would, want) {
			t.Errorf("%s is not named.\nA dry run says:\n%s\nthe command says:\n%s", want, would, out)
		}
	}
	after := r.await("the end of the cordon's taint", func(n *corev1.Node) bool { return !closed(n) })
	if diff := cmp.Diff(asCompared(t, before), asCompared(t, after)); diff != "" {
		t.Errorf("the node is not as before (-before +after):\n%s", diff)
	}
	if left, err := os.ReadDir(filepath.Join(r.Dir, "state")); err != nil || len(left) > 0 {
		t.Errorf("on the host is left: %v, %v", left, err)
	}
	if out := r.onNode(0, "cleanup"); !strings.Contains(out, "nothing of gpuslice is on this node") {
		t.Errorf("a second time it says:\n%s", out)
	}
}

// An agent that has died in a change has left the node fenced. The GPUs are brought to where they were, or to where they should be, first.
func TestCleanupGivesTheNodeBackFirst(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kill()
	if out := r.onNode(1, "cleanup", "--dry-run"); !strings.Contains(out, "gpuslice.io/journal") || strings.Contains(out, "nothing of gpuslice") {
		t.Errorf("a dry run says:\n%s", out)
	}
	if out := r.onNode(0, "cleanup"); !strings.Contains(out, "left: label nvidia.com/mig.config=all-balanced") {
		t.Errorf("the label that stays is not named:\n%s", out)
	}
	n := r.await("the end of the cordon's taint", func(n *corev1.Node) bool { return !closed(n) })
	if n.Spec.Unschedulable || len(n.Spec.Taints) > 0 {
		t.Errorf("the node is still fenced: %+v", n.Spec)
	}
	for key := range n.Annotations {
		if strings.HasPrefix(key, "gpuslice.io/") {
			t.Errorf("annotation %s is left", key)
		}
	}
	if slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUPartitionReady }) {
		t.Error("the condition is left")
	}
	if got := n.Labels[config.LabelMIGConfig]; got != "all-balanced" {
		t.Errorf("the user's label is %q", got)
	}
	r.awaitOffered("nvidia.com/mig-3g.40gb", 2)
}

// asCompared is the node without its version and times, and with those of its fields of which the API server says that an agent wrote them.
func asCompared(t *testing.T, n *corev1.Node) map[string]any {
	t.Helper()
	n = n.DeepCopy()
	n.ResourceVersion = ""
	for i := range n.ManagedFields {
		n.ManagedFields[i].Time = nil
	}
	// The list of taints is one field, of the manager that was the last to write any of them.
	n.ManagedFields = slices.DeleteFunc(n.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
		return !strings.HasPrefix(e.Manager, "gpuslice") || e.FieldsV1.GetRawString() == `{"f:spec":{"f:taints":{}}}`
	})
	for i := range n.Status.Conditions {
		n.Status.Conditions[i].LastHeartbeatTime.Reset()
	}
	text, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]any
	if err := json.Unmarshal(text, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// As its page has it: the DaemonSet's pods run it in place of the agents. Kubelet takes a pod for ready when its node is clean.
func TestCleanupStaysInPlaceOfTheAgent(t *testing.T) {
	t.Parallel()
	r := newRig(t, oneA100, "")
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, r.Parts.Agent, append(append([]string{"cleanup"}, r.flags()...), "--stay")...)
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir())
	var out bytes.Buffer
	cmd.Stdout = &out
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(log)
	for waits := false; !waits; waits = strings.Contains(lines.Text(), "waiting for another agent to end") {
		if !lines.Scan() {
			t.Fatalf("it does not wait for the agent: %v, %v, and has said:\n%s", lines.Err(), cmd.Wait(), out.String())
		}
	}
	go func() { _, _ = io.Copy(io.Discard, log) }()
	r.kill()
	for said := []byte(nil); !strings.Contains(string(said), "the node is clean"); {
		var err error
		said, err = exec.CommandContext(ctx, r.Parts.Agent, append([]string{"health", "--ready"}, r.flags()...)...).CombinedOutput()
		if ctx.Err() != nil {
			t.Fatalf("the probe says %s: %v", said, err)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(out.String(), "removed: condition GPUPartitionReady") {
		t.Errorf("it ends with %v, and has said:\n%s", err, out.String())
	}
}
