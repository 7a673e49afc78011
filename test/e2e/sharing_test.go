package e2e_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/test/cluster/timeline"
)

const (
	gpu    = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
)

// Configs of NVIDIA's device plugin.
const (
	unshared = "version: v1\n"
	twoEach  = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	fourEach = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	renamed  = "version: v1\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
)

// Who has to leave when only the sharing of a GPU changes follows from these answers. A pod may stay as long as kubelet knows
// its device under the new config, and not because it goes on running, which it does in any case.
func TestAPodHoldsADeviceWhileThePluginComesBackWithAnotherConfig(t *testing.T) {
	tests := []struct {
		name          string
		before, after string
		shares        int      // before
		held          []string // devices that pods keep
		resource      string   // after
		offered       int64    // of it
	}{
		{
			name: "more shares", before: twoEach, after: fourEach, shares: 2, held: []string{"GPU-0::1"}, resource: gpu, offered: 4,
		},
		{
			name: "fewer shares", before: fourEach, after: twoEach, shares: 4, held: []string{"GPU-0::1", "GPU-0::3"}, resource: gpu, offered: 2,
		},
		{
			name: "a whole GPU becomes shares", before: unshared, after: fourEach, shares: 1, held: []string{"GPU-0"}, resource: gpu, offered: 4,
		},
		{
			name: "shares become a whole GPU", before: fourEach, after: unshared, shares: 4, held: []string{"GPU-0::0"}, resource: gpu, offered: 1,
		},
		{
			name: "another name", before: fourEach, after: renamed, shares: 4, held: []string{"GPU-0::0"}, resource: shared, offered: 4,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, "gpus: [{model: H100-80GB, count: 1}]")
			r.startPlugin(test.before)
			q := &inquiry{rig: r, holders: r.hold(test.shares, test.held), resource: test.resource, offered: test.offered}

			r.plugin.reload(test.after)
			q.ask("the plugin has the new config")
			q.restartContainers()
			q.admitMore()
			before := time.Now()
			if err := r.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.awaitReport(before)
			q.ask("kubelet has restarted")
			q.restartContainers()
			r.plugin.stop()
			if err := r.Reboot(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.await("the rejection of all pods", func(s timeline.State) bool { return all(s, failed) })
			r.startPlugin(test.after)
			q.ask("the node has been rebooted")
			compare(t, "testdata/"+strings.ReplaceAll(test.name, " ", "-")+".txt", q.String())
		})
	}
}

// The scheduler counts pods, and kubelet takes the devices that its pods do not have: of a share that is gone, neither knows
// which GPU it was of.
func TestPodsThatStayOnSharesThatAreGoneOverloadTheirGPU(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 2}]")
	r.startPlugin(fourEach)
	r.hold(8, []string{"GPU-0::2", "GPU-0::3"})
	r.plugin.reload(twoEach)
	r.awaitAmount(gpu, 4, 4)
	for _, name := range []string{"third", "fourth"} { // NVIDIA's plugin takes one from each GPU
		r.pod(name, gpu)
		r.awaitPod(name, "to run", running)
	}
	r.await("four programs", func(timeline.State) bool { return r.processes() == 4 })
	seen, err := r.gpus.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := []int{len(seen[0].Processes), len(seen[1].Processes)}; !slices.Equal(got, []int{3, 1}) {
		t.Errorf("programs on the GPUs are %v, want 3 on the one of two shares whose pods stayed, and 1 on the other", got)
	}
}

// hold fills the GPUs with pods, and deletes those that were given other devices than wanted. It returns the names of the rest,
// by device: which share a pod is given is chance.
func (r *rig) hold(shares int, wanted []string) map[string]string {
	r.t.Helper()
	r.awaitAmount(gpu, int64(shares), int64(shares))
	var s timeline.State
	for n := range shares {
		name := fmt.Sprintf("pod-%d", n)
		r.pod(name, gpu)
		s = r.awaitPod(name, "to run", running)
	}
	holders, others := map[string]string{}, []string(nil)
	for name, p := range s.Pods {
		if len(p.Devices) == 0 {
			continue
		}
		device := strings.TrimPrefix(p.Devices[0], gpu+" ")
		if slices.Contains(wanted, device) {
			holders[device] = name
		} else {
			others = append(others, name)
		}
	}
	r.deletePods(others...)
	return holders
}

func all(s timeline.State, is func(timeline.Pod) bool) bool {
	for _, p := range s.Pods {
		if !is(p) {
			return false
		}
	}
	return true
}

// inquiry writes down what becomes of pods that hold devices.
type inquiry struct {
	*rig
	strings.Builder
	holders  map[string]string // names of pods by the device they were given
	resource string
	offered  int64
}

// ask notes what the node and kubelet say.
func (q *inquiry) ask(when string) {
	q.t.Helper()
	s := q.awaitAmount(q.resource, q.offered, q.offered)
	text := s.String()
	for device, name := range q.holders {
		text = strings.ReplaceAll(text, "pod "+name+" ", "the pod on "+device+" ")
	}
	lines := strings.SplitAfter(text, "\n")
	slices.Sort(lines)
	fmt.Fprintf(q, "%s:\n%s", when, strings.Join(lines, ""))
}

// restartContainers has the containers of all holders end, and notes whether they come back.
func (q *inquiry) restartContainers() {
	q.t.Helper()
	for _, name := range q.holders {
		pod, err := q.Client.CoreV1().Pods(q.Namespace).Get(q.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			q.t.Fatal(err)
		}
		// A kubelet that has just restarted may be about to start the container itself.
		q.await("a program of pod "+name, func(timeline.State) bool {
			pids, err := q.Processes(q.t.Context(), pod)
			return err == nil && len(pids) > 0
		})
		if err := q.kill(q.t.Context(), pod); err != nil {
			q.t.Fatal(err)
		}
		before := pod.Status.ContainerStatuses[0].RestartCount
		q.awaitPod(name, "to be started again", func(p timeline.Pod) bool { return p.Restarts > before && running(p) })
	}
	q.compute(len(q.holders))
	fmt.Fprintf(q, "containers that end are started again, on the device that they had\n")
}

// compute waits until so many programs do on the GPU, as NVML counts them.
func (q *inquiry) compute(programs int) {
	q.t.Helper()
	q.await(fmt.Sprintf("%d programs on the GPU", programs), func(timeline.State) bool { return q.processes() == programs })
}

// admitMore notes how many more pods run than those that hold devices, and lets them go.
func (q *inquiry) admitMore() {
	q.t.Helper()
	var names []string
	for n := 0; ; n++ {
		name := fmt.Sprintf("more-%d", n)
		names = append(names, name)
		q.pod(name, q.resource)
		s := q.awaitPod(name, "to be placed or not", func(p timeline.Pod) bool { return running(p) || failed(p) || pending(p) })
		if s.Pods[name].Phase == corev1.PodRunning {
			continue
		}
		q.compute(len(q.holders) + n)
		fmt.Fprintf(q, "%d more admitted: %d programs compute on the GPU; the next pod is %s\n", n, len(q.holders)+n, s.Pods[name].Reason)
		q.deletePods(names...)
		return
	}
}

// Five minutes after the last plugin of a resource has gone, kubelet forgets it.
func TestAContainerWhoseResourceIsForgottenCannotStartAgain(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for five minutes")
	}
	r := newRig(t, "gpus: [{model: H100-80GB, count: 1}]")
	r.startPlugin(fourEach)
	r.awaitAmount(gpu, 4, 4)
	r.pod("holder", gpu)
	r.awaitPod("holder", "to run", running)
	r.plugin.reload(renamed)
	r.awaitAmount(gpu, 4, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	s, err := r.Await(ctx, func(s timeline.State) bool { return s.Resources[gpu] == timeline.Amount{} })
	if err != nil {
		t.Fatalf("waiting for a ghost: %v\n%s", err, s)
	}
	t.Logf("forgotten:\n%s", s)
	pod, err := r.Client.CoreV1().Pods(r.Namespace).Get(t.Context(), "holder", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.kill(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	s = r.awaitPod("holder", "to be refused", func(p timeline.Pod) bool { return p.Reason != "" })
	t.Logf("its container has ended:\n%s", s)
	if err := r.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	s = r.awaitAmount(shared, 4, 4)
	t.Logf("kubelet has restarted:\n%s", s)
}
