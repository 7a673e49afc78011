package kubelet_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
)

const gpu = "nvidia.com/gpu"

// lone is a kubelet without an API server to speak of, under a clock that stands still.
type lone struct {
	*kubelet.Kubelet
	client *fake.Clientset
	clock  *clocktesting.FakeClock
}

func startLone(t *testing.T, o kubelet.Options, reactors ...clienttesting.Reactor) *lone {
	t.Helper()
	client := fake.NewClientset()
	client.ReactionChain = append(reactors, client.ReactionChain...) // before anything runs: the chain has no lock
	l := &lone{client: client, clock: clocktesting.NewFakeClock(time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC))}
	o.Node, o.Client, o.Clock, o.ReportAtOnce = "node-a", l.client, l.clock, true
	if o.Dir == "" {
		o.Dir = shortDir(t)
	}
	k, err := kubelet.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	l.Kubelet = k
	return l
}

// shortDir is a directory for sockets: the one of t.TempDir has the test's name in it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func (l *lone) expect(t *testing.T, resource string, capacity, allocatable int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := l.WaitResource(ctx, resource, capacity, allocatable); err != nil {
		t.Fatal(err)
	}
}

func (l *lone) status(t *testing.T) corev1.NodeStatus {
	t.Helper()
	node, err := l.client.CoreV1().Nodes().Get(t.Context(), "node-a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return node.Status
}

func TestDevicesOfAPluginBecomeCapacityAndTheHealthyOnesAllocatable(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a", "b", "c")
	l.expect(t, gpu, 3, 3)

	p.report(append(healthy("a", "b"), &v1beta1.Device{ID: "c", Health: v1beta1.Unhealthy}))
	l.expect(t, gpu, 3, 2)
	p.report(healthy("a"))
	l.expect(t, gpu, 1, 1)
}

func TestAPluginThatGoesAwayLeavesItsCapacityAndNothingAllocatable(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a", "b")
	l.expect(t, gpu, 2, 2)
	p.stop()
	l.expect(t, gpu, 2, 0)

	again := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a::0", "a::1", "b::0", "b::1")
	l.expect(t, gpu, 4, 4)
	again.stop()
	l.expect(t, gpu, 4, 0)
	l.clock.Step(4*time.Minute + 50*time.Second)
	servePlugin(t, l.DevicePluginDir(), "mark.sock", "example.com/mark", "x") // its report tells that one was made
	l.expect(t, "example.com/mark", 1, 1)
	l.expect(t, gpu, 4, 0)
}

func TestAResourceWhosePluginStaysAwayIsAGhostForEver(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a", "b")
	l.expect(t, gpu, 2, 2)
	p.stop()
	l.expect(t, gpu, 2, 0)
	l.clock.Step(5*time.Minute + time.Second)
	l.expect(t, gpu, 0, 0)
	if _, shown := l.status(t).Capacity[gpu]; !shown {
		t.Errorf("%s left the node's status, where kubelet keeps it as 0", gpu)
	}

	// An administrator who removes the key is not overruled.
	if _, err := l.client.CoreV1().Nodes().Patch(t.Context(), "node-a", types.JSONPatchType,
		[]byte(`[{"op":"remove","path":"/status/capacity/nvidia.com~1gpu"}]`), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	// Another plugin makes the kubelet write, once more without the ghost.
	servePlugin(t, l.DevicePluginDir(), "other.sock", "example.com/other", "x")
	l.expect(t, "example.com/other", 1, 1)
	status := l.status(t)
	_, capacity := status.Capacity[gpu]
	_, allocatable := status.Allocatable[gpu]
	if capacity || allocatable {
		t.Errorf("%s came back after it was removed: capacity %v, allocatable %v", gpu, capacity, allocatable)
	}
}

func TestARenamedResourceLeavesTheOldNameAtNothingAllocatable(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "nvidia-gpu.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)
	p.stop()
	servePlugin(t, l.DevicePluginDir(), "nvidia-gpu.shared.sock", gpu+".shared", "a::0", "a::1")
	l.expect(t, gpu+".shared", 2, 2)
	l.expect(t, gpu, 1, 0)
	l.clock.Step(5*time.Minute + time.Second)
	l.expect(t, gpu, 0, 0)
	l.expect(t, gpu+".shared", 2, 2)
}

func TestTwoPluginsOfOneResourceOutliveEachOther(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	old := servePlugin(t, l.DevicePluginDir(), "old.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)
	servePlugin(t, l.DevicePluginDir(), "new.sock", gpu, "a", "b")
	l.expect(t, gpu, 2, 2)
	old.stop()
	servePlugin(t, l.DevicePluginDir(), "mark.sock", "example.com/mark", "x")
	l.expect(t, "example.com/mark", 1, 1)
	l.expect(t, gpu, 2, 2)
}

func TestAPluginThatRegistersTwiceOnItsSocketIsOnePlugin(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)
	if err := p.register(t); err != nil {
		t.Fatal(err)
	}
	p.report(healthy("a", "b"))
	l.expect(t, gpu, 2, 2)
	p.stop()
	l.expect(t, gpu, 2, 0)
}

func TestRestartRemovesSocketsAndZeroesDevicesUntilPluginsRegisterAgain(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a", "b")
	l.expect(t, gpu, 2, 2)
	if err := l.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.expect(t, gpu, 0, 0)
	var sockets []string
	entries, err := os.ReadDir(l.DevicePluginDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 {
			sockets = append(sockets, e.Name())
		}
	}
	if diff := cmp.Diff([]string{"kubelet.sock"}, sockets); diff != "" {
		t.Errorf("sockets after a restart (-want +got):\n%s", diff)
	}
	servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a", "b")
	l.expect(t, gpu, 2, 2)
}

func TestAKubeletOfANewNodeUnderAnOldNameZeroesItsDevices(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)
	l.Stop()
	k, err := kubelet.Start(t.Context(), kubelet.Options{Node: "node-a", Dir: shortDir(t), Client: l.client})
	if err != nil {
		t.Fatal(err)
	}
	defer k.Stop()
	l.Kubelet = k
	l.expect(t, gpu, 0, 0)
}

func TestRegistrationsThatCannotBeAreRefusedWithTheReason(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	long := strings.Repeat("x", 107)
	for _, c := range []struct{ about, endpoint, resource, says string }{
		{"a name without a domain", "p.sock", "gpu", "domain/name"},
		{"a name of Kubernetes' own", "p.sock", "kubernetes.io/gpu", "domain/name"},
		{"a socket that Linux cannot take", long, gpu, "choose a shorter directory"},
	} {
		p := &plugin{dir: l.DevicePluginDir(), endpoint: c.endpoint, resource: c.resource}
		if err := p.register(t); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got error %v, which says nothing of %q", c.about, err, c.says)
		}
	}
}

func TestADirectoryTooLongForSocketsIsAnError(t *testing.T) {
	_, err := kubelet.Start(t.Context(), kubelet.Options{
		Node: "node-a", Dir: filepath.Join(t.TempDir(), strings.Repeat("d", 100)), Client: fake.NewClientset(),
	})
	if err == nil || !strings.Contains(err.Error(), "choose a shorter directory") {
		t.Errorf("got error %v, which does not say what to do", err)
	}
}

func TestReportsLeaveWhatOthersWroteIntoTheNode(t *testing.T) {
	l := startLone(t, kubelet.Options{Labels: map[string]string{"pool": "gpu"}})
	if _, err := l.client.CoreV1().Nodes().Patch(t.Context(), "node-a", types.StrategicMergePatchType, []byte(`{
		"metadata": {"labels": {"theirs": "yes"}, "annotations": {"theirs": "too"}},
		"spec": {"unschedulable": true},
		"status": {
			"conditions": [{"type": "GPUPartitionReady", "status": "True", "reason": "Converged"}],
			"capacity": {"example.com/licence": "7"}
		}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)

	node, err := l.client.CoreV1().Nodes().Get(t.Context(), "node-a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	conditions := map[corev1.NodeConditionType]corev1.ConditionStatus{}
	for _, c := range node.Status.Conditions {
		conditions[c.Type] = c.Status
	}
	got := []any{
		node.Labels["pool"], node.Labels["theirs"], node.Annotations["theirs"], node.Spec.Unschedulable,
		conditions["GPUPartitionReady"], conditions[corev1.NodeReady], node.Status.Capacity.Name("example.com/licence", "").Value(),
	}
	want := []any{"gpu", "yes", "too", true, corev1.ConditionTrue, corev1.ConditionTrue, int64(7)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("node after a report (-want +got):\n%s", diff)
	}
}

func TestAPodThatAsksForAGhostIsRejected(t *testing.T) {
	l := startLone(t, kubelet.Options{})
	p := servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "a")
	l.expect(t, gpu, 1, 1)
	p.stop()
	l.expect(t, gpu, 1, 0)
	l.clock.Step(5*time.Minute + time.Second)
	l.expect(t, gpu, 0, 0)
	l.pod(t, "late", wanting(gpu, 1))
	rejected := l.until(t, "late", hasFailed)
	if rejected.Status.Reason != "OutOf"+gpu {
		t.Errorf("rejected for %s: %s", rejected.Status.Reason, rejected.Status.Message)
	}
}

func TestAForcedDeletionFreesDevicesWhenThePodHasEnded(t *testing.T) {
	told := &usage{more: make(chan struct{})}
	l := startLone(t, kubelet.Options{OnFree: told.freed})
	servePlugin(t, l.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	l.expect(t, gpu, 1, 1)
	l.pod(t, "first", func(pod *corev1.Pod) {
		wanting(gpu, 1)(pod)
		pod.Annotations = map[string]string{kubelet.TerminationDelayAnnotation: "1h"}
	})
	l.until(t, "first", isReady)
	if err := l.client.CoreV1().Pods("default").Delete(t.Context(), "first", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// It is gone from the API server and still uses its GPU: what the scheduler sends now is refused.
	l.pod(t, "early", wanting(gpu, 1))
	l.until(t, "early", hasFailed)
	l.passing(t, func() { told.await(t, "free first GPU-a") })
	l.pod(t, "late", wanting(gpu, 1))
	l.until(t, "late", isReady)
}

// passing lets time go by until f returns.
func (l *lone) passing(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	for {
		select {
		case <-done:
			return
		case <-time.After(10 * time.Millisecond):
			l.clock.Step(100 * time.Millisecond)
		}
	}
}

// pod makes a pod that is bound to the node.
func (l *lone) pod(t *testing.T, name string, change func(*corev1.Pod)) {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)}, Spec: corev1.PodSpec{
		NodeName: "node-a", Containers: []corev1.Container{{Name: "main"}},
	}}
	change(pod)
	if _, err := l.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (l *lone) until(t *testing.T, name string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	pod, err := l.WaitPod(ctx, "default", name, wanted)
	if err != nil {
		t.Fatal(err)
	}
	return pod
}
