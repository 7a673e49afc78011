package node_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	twoH100 = "gpus:\n- model: H100-80GB\n  count: 2\n"
	oneA100 = "gpus:\n- model: A100-80GB\n  count: 1\n"
)

// The change of the demo on two GPUs instead of eight.
func TestALabelDrainsRepartitionsAndGivesTheNodeBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	gpu := r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
	cpu := r.pod(namespace, "cpu", nil)
	r.awaitRunning(namespace, "gpu")
	r.awaitRunning(namespace, "cpu")

	r.run()
	r.awaitReason(config.ReasonNotRequested)
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")

	r.givenBack(n)
	want := map[string]int{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2}
	if diff := cmp.Diff(want, offered(n)); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[types.UID]string{gpu.UID: "gpu"}, r.evictions(namespace)); diff != "" {
		t.Errorf("evicted (-want +got):\n%s", diff)
	}
	if _, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "gpu", metav1.GetOptions{}); err == nil {
		t.Error("the pod whose GPU was cut is still there")
	}
	after, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "cpu", metav1.GetOptions{})
	if err != nil || after.UID != cpu.UID || after.DeletionTimestamp != nil || after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the pod without a GPU was disturbed: %v, %v", after, err)
	}
}

// Promise 8. The agent is killed as soon as it has said that the step is done, so that it dies on the border to the next
// step or within it; the next agent must finish.
func TestKilledAfterAnyStepItEndsTheSame(t *testing.T) {
	t.Parallel()
	steps := change(t, -1)
	t.Logf("the change has %d steps: %s", len(steps), strings.Join(steps, "; "))
	if len(steps) != 1+2+2*5+2 { // fence; pod and plugin; mode and four instances of each GPU; plugin back, release
		t.Fatalf("the change has %d steps", len(steps))
	}
	each := 1
	if testing.Short() {
		each = 6
	}
	for k, step := range steps {
		if k%each != 0 {
			continue
		}
		t.Run(fmt.Sprintf("step %d %s", k, strings.ReplaceAll(step, "/", " ")), func(t *testing.T) {
			t.Parallel()
			change(t, k)
		})
	}
}

// change cuts two GPUs while a pod holds one of them, kills the agent after the step with number k (not at all if negative),
// starts another, and checks the end. It returns the steps that the first agent said were done.
func change(t *testing.T, k int) []string {
	t.Helper()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "gpu")
	r.label(config.LabelMIGConfig, "all-balanced")
	p := r.run()
	var steps []string
	timeout := time.After(patience)
	for released := false; !released; {
		select {
		case step, ok := <-p.steps:
			if !ok {
				t.Fatalf("the agent ended by itself after %v", steps)
			}
			steps = append(steps, step)
			released = strings.HasPrefix(step, "release")
			if len(steps) == k+1 {
				r.kill()
				r.run()
				released = true
			}
		case <-timeout:
			t.Fatalf("the change takes too long; done: %v", steps)
		}
	}
	n := r.awaitConverged("all-balanced")
	r.givenBack(n)
	want := map[string]int{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2}
	if diff := cmp.Diff(want, offered(n)); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	for _, gpu := range r.snapshot() {
		const balanced = "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4"
		if got := gpu.Geometry().String(); got != balanced {
			t.Errorf("GPU %d is cut as %s, want %s", gpu.Index, got, balanced)
		}
	}
	return steps
}

// Promise 1.
func TestABadRequestDisturbsNothing(t *testing.T) {
	t.Parallel()
	const impossible = `version: v1
mig-configs:
  two-3g-and-a-1g:
    - devices: all
      mig-enabled: true
      mig-devices: {3g.40gb: 2, 1g.10gb: 1}
`
	for _, row := range []struct {
		name, label, configs string
		reason               config.Reason
		says                 []string
	}{
		{"an unknown name", "all-1g.5gb", impossible, config.ReasonUnknownConfig, []string{"all-1g.5gb", "all-1g.10gb"}},
		{
			"an impossible geometry", "two-3g-and-a-1g", impossible, config.ReasonImpossibleGeometry,
			[]string{"2x 3g.40gb take all 8 memory slices", "request 2x 3g.40gb"},
		},
		{
			"a malformed ConfigMap", "all-balanced", "version: v1\nmig-configs:\n  broken:\n    - devices: sometimes\n",
			config.ReasonInvalidCatalog,
			[]string{"ConfigMap gpuslice/", "config.yaml"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, oneA100, "migConfigMap: {name: requests-"+strings.ReplaceAll(strings.ToLower(row.label), ".", "-")+"}\n")
			r.configMap("requests-"+strings.ReplaceAll(strings.ToLower(row.label), ".", "-"), row.configs)
			r.awaitOffered("nvidia.com/gpu", 1)
			r.cut("3g.40gb@4", "1g.10gb@0")
			r.restartPlugin()
			r.awaitOffered("nvidia.com/mig-3g.40gb", 1)
			namespace := clustertest.Namespace(t)
			pod := r.pod(namespace, "user", map[string]string{"nvidia.com/mig-3g.40gb": "1"})
			r.awaitRunning(namespace, "user")
			before := r.GPUs.String()

			r.run()
			r.label(config.LabelMIGConfig, row.label)
			n := r.awaitReason(row.reason)

			for _, say := range row.says {
				if !strings.Contains(condition(n).Message, say) {
					t.Errorf("the message does not say %q: %s", say, condition(n).Message)
				}
			}
			if got := n.Labels[config.LabelMIGConfigState]; got != string(config.StateFailed) {
				t.Errorf("state label is %q, want failed", got)
			}
			r.givenBack(n)
			r.neverFenced()
			if diff := cmp.Diff(before, r.GPUs.String()); diff != "" {
				t.Errorf("the GPU was touched (-before +after):\n%s", diff)
			}
			after, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "user", metav1.GetOptions{})
			if err != nil || after.UID != pod.UID || after.DeletionTimestamp != nil {
				t.Errorf("the pod was disturbed: %v", err)
			}
			if evicted := r.evictions(namespace); len(evicted) > 0 {
				t.Errorf("evictions were asked for: %v", evicted)
			}
		})
	}
}

// Placed greedily at 0, the 3g would leave room for one 2g alone.
func TestOne3gAndTwo2gWorkAtTheFirstTry(t *testing.T) {
	t.Parallel()
	r := newRig(t, oneA100, "migConfigMap: {name: recommended}\n")
	r.configMap("recommended", "version: v1\nmig-configs:\n  recommended:\n    - devices: all\n      mig-enabled: true\n"+
		"      mig-devices: {3g.40gb: 1, 2g.20gb: 2}\n")
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.label(config.LabelMIGConfig, "recommended")
	n := r.awaitConverged("recommended")
	r.givenBack(n)
	if got, want := r.snapshot()[0].Geometry().String(), "2g.20gb@0 2g.20gb@2 3g.40gb@4"; got != want {
		t.Errorf("the GPU is cut as %s, want %s", got, want)
	}
	calls := r.GPUs.Calls()
	if made, destroyed := calls[gpusim.CreateGpuInstanceWithPlacement], calls[gpusim.GpuInstanceDestroy]; made != 3 || destroyed != 0 {
		t.Errorf("%d instances were created for 3, and %d destroyed: %v", made, destroyed, calls)
	}
}

// A system that keeps the node's label in git compares by a dry run of server-side apply. It finds no difference when the agent has taken the label over, has
// cut the node, and has written all that it writes.
func TestANodeThatIsKeptInGitDoesNotDrift(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile("../../deploy/examples/gitops.yaml")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	first, _, _ := strings.Cut(string(example), "\n---\n")
	manifest, err := yaml.YAMLToJSON([]byte(strings.Replace(first, "name: gpu-1", "name: "+r.Name, 1)))
	if err != nil {
		t.Fatal(err)
	}
	apply := func(dryRun ...string) *corev1.Node {
		t.Helper()
		n, err := r.client.CoreV1().Nodes().Patch(t.Context(), r.Name, types.ApplyPatchType, manifest, metav1.PatchOptions{FieldManager: "git", Force: new(true), DryRun: dryRun})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	apply()
	r.awaitConverged("all-balanced")
	for { // until nothing is written to the node between two looks at it
		before, dry, after := r.node(), apply(metav1.DryRunAll), r.node()
		if before.ResourceVersion != after.ResourceVersion {
			continue
		}
		if diff := cmp.Diff(before, dry); diff != "" {
			t.Errorf("the node differs from what git has (-cluster +git):\n%s", diff)
		}
		break
	}
}

// Promise 12.
func TestAConvergedAgentWritesItsHeartbeatAlone(t *testing.T) {
	t.Parallel()
	const heartbeat = 30 * time.Second
	watched, afterwards := 2*time.Minute, heartbeat+5*time.Second
	if testing.Short() {
		watched, afterwards = time.Minute, 10*time.Second
	}
	r := newRig(t, twoH100, "nodeHeartbeat: 30s\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	r.label(config.LabelMIGConfig, "all-3g.40gb")
	r.await("the last word on it", func(n *corev1.Node) bool { // the annotation is written after the condition
		return converged("all-3g.40gb")(n) && strings.Contains(n.Annotations[config.AnnotationStatus], string(config.ReasonConverged))
	})
	r.awaitEvent(metav1.NamespaceDefault, r.Name, config.ReasonConverged, "all-3g.40gb") // which another goroutine of the agent sends
	plugin, calls := r.plugin(), r.GPUs.Calls()
	settled := r.writes("")

	idle(t, watched)
	beats := r.writes("")[len(settled):]
	for _, w := range beats {
		if w.Resource != "nodes/status" {
			t.Errorf("a write that is no heartbeat: %s %s", w, w.Body)
		}
	}
	t.Logf("%d writes in %s with a heartbeat of %s", len(beats), watched, heartbeat)
	if n, want := len(beats), int(watched/heartbeat); n < want-1 || n > want {
		t.Errorf("%d writes in %s, want %d: %v", n, watched, want, beats)
	}

	r.kill()
	restarted := r.writes("")
	r.run()
	idle(t, afterwards)
	for _, w := range r.writes("")[len(restarted):] {
		if w.Resource != "nodes/status" {
			t.Errorf("the restarted agent wrote: %s %s", w, w.Body)
		}
	}
	if again := r.plugin(); again.UID != plugin.UID {
		t.Error("the device plugin was restarted")
	}
	if diff := cmp.Diff(calls, r.GPUs.Calls()); diff != "" {
		t.Errorf("the GPUs were touched (-before +after):\n%s", diff)
	}
}

// Promise 5: the node stays schedulable while a disruption budget holds a pod, and the change goes on when it lets go.
func TestABudgetIsAskedBeforeTheCordon(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "guarded", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "guarded")
	r.budget(namespace, "guarded", 1)

	r.run()
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	n := r.awaitReason(config.ReasonEvictionBlocked)
	r.givenBack(n)
	r.neverFenced()
	for _, say := range []string{"changes nothing until", namespace + "/guarded", "1"} {
		if !strings.Contains(condition(n).Message, say) {
			t.Errorf("the message does not say %q: %s", say, condition(n).Message)
		}
	}
	r.relax(namespace, "guarded")
	r.givenBack(r.awaitConverged("all-1g.10gb"))
}

// Promises 6 and 10: a label that is removed in the middle brings back what was before; an administrator's cordon stays.
func TestAWithdrawnRequestIsUndoneAndACordonStays(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	before := r.GPUs.String()
	r.kubectl("cordon", r.Name)
	if err := r.GPUs.Delay(gpusim.CreateGpuInstanceWithPlacement, 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	p := r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	for step := range p.steps {
		if strings.Contains(step, "GPU 0: create") {
			break
		}
	}
	r.label(config.LabelMIGConfig, "")
	n := r.awaitReason(config.ReasonNotRequested)
	if !n.Spec.Unschedulable {
		t.Error("the administrator's cordon was lifted")
	}
	if _, ok := n.Annotations[config.AnnotationJournal]; ok {
		t.Error("the journal is still there")
	}
	if diff := cmp.Diff(before, r.GPUs.String()); diff != "" {
		t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
	}
}

func counts(gpu nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, p := range gpu.Geometry() {
		for _, d := range p.Devices() {
			out[d]++
		}
	}
	return out
}

// idle lets real time pass, in which other processes must do nothing.
func idle(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}
