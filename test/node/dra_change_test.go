package node_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

// claimStage is a node on which NVIDIA's DRA driver gives out the GPUs as they are cut. GPUs 0 and 1 are cut the same way, GPU 2 is whole, and pods have
// all of it by claims of each kind. Its configs change GPU 0 alone.
type claimStage struct {
	*rig
	namespace string
	leave     []*corev1.Pod          // what has GPU 0
	stay      map[string]*corev1.Pod // what has the other GPUs
	devices   map[string][]string    // of those that stay
	cuts      []string               // how the GPUs were cut at first
}

const claimConfigs = `version: v1
mig-configs:
  one: [{devices: [0], mig-enabled: true, mig-devices: {7g.80gb: 1}}]
  three: [{devices: [0], mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 1, 1g.10gb: 1}}]
`

func newClaimStage(t *testing.T, settings string) *claimStage {
	t.Helper()
	configs := "claims-" + strings.ToLower(t.Name()[len(t.Name())-12:])
	s := &claimStage{
		rig:  newDRARig(t, "gpus: [{model: H100-80GB, count: 3}]", "migConfigMap: {name: "+configs+"}\n"+settings, node.DRAStatic),
		stay: map[string]*corev1.Pod{}, devices: map[string][]string{},
	}
	s.configMap(configs, claimConfigs)
	s.awaitPublished(s.wholeAndCut())
	for gpu := range 2 {
		s.cutGPU(gpu, "3g.40gb@4", "2g.20gb@0", "1g.10gb@2")
	}
	s.restartDRADriver()
	s.awaitPublished(s.wholeAndCut())
	for _, gpu := range s.snapshot() {
		s.cuts = append(s.cuts, gpu.Geometry().String())
	}
	s.namespace = clustertest.NamespaceOf(t, s.cluster)
	for gpu := range 2 {
		s.class(s.slicesOf(gpu), fmt.Sprintf("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig' && "+
			"device.attributes['gpu.nvidia.com'].parentUUID == '%s'", s.snapshot()[gpu].UUID))
		s.template(s.namespace, fmt.Sprintf("gpu-%d", gpu), s.classOf(gpu), "")
		of := []*corev1.Pod{
			s.claimant(s.namespace, fmt.Sprintf("template-%d", gpu), fmt.Sprintf("gpu-%d", gpu)),
			s.pod(s.namespace, fmt.Sprintf("resource-%d", gpu), map[string]string{s.slicesOf(gpu): "1"}),
			s.pod(s.namespace, fmt.Sprintf("class-%d", gpu), map[string]string{"deviceclass.resource.kubernetes.io/" + s.classOf(gpu): "1"}),
		}
		if gpu == 0 {
			s.leave = of
			continue
		}
		for _, pod := range of {
			s.stay[pod.Name] = pod
		}
	}
	s.stay["whole"] = s.pod(s.namespace, "whole", map[string]string{"nvidia.com/gpu": "1"})
	for _, pod := range s.leave {
		s.awaitRunning(s.namespace, pod.Name)
	}
	for name := range s.stay {
		s.awaitRunning(s.namespace, name)
		s.devices[name] = s.given(s.namespace, name)
	}
	return s
}

// slicesOf is the extended resource that stands for a MIG device of the GPU, and classOf its DeviceClass.
func (r *rig) slicesOf(gpu int) string { return fmt.Sprintf("example.com/%s-gpu-%d", r.Name, gpu) }

func (r *rig) classOf(gpu int) string { return strings.ReplaceAll(r.slicesOf(gpu), "/", "-") }

// verified recognizes a node that is as the label asks, and given back. It fails the test if the node ever says True beside slices of the driver that differ from
// the GPUs.
func (r *rig) verified(name string) func(*corev1.Node) bool {
	agrees := func() string {
		want := r.wholeAndCut()
		slices.Sort(want)
		return cmp.Diff(want, r.publishedNow())
	}
	return func(n *corev1.Node) bool {
		says := func(n *corev1.Node) bool { // of a config; an agent that has just been killed leaves that of a node of which none was asked
			c := condition(n)
			return c != nil && c.Status == corev1.ConditionTrue && c.Reason == string(config.ReasonConverged)
		}
		if says(n) && agrees() != "" {
			// What the watch shows may be over. What is so before and after a read is so at the time of it.
			if says(r.node()) {
				if diff := agrees(); diff != "" {
					r.t.Errorf("the node says %s, and the driver's devices are (-want +got):\n%s", words(n), diff)
				}
			}
		}
		return converged(name)(n)
	}
}

// publishedNow are the devices in the driver's slices for the node.
func (r *rig) publishedNow() []string {
	list, err := r.client.ResourceV1().ResourceSlices().List(r.t.Context(), metav1.ListOptions{FieldSelector: "spec.driver=" + draDriver + ",spec.nodeName=" + r.Name})
	if err != nil {
		r.t.Error(err)
		return nil
	}
	var all []string
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			all = append(all, published(d))
		}
	}
	slices.Sort(all)
	return all
}

// check holds the node against what is to be the end of each change: GPU 0 is cut as this, the driver offers it, the node is given back, these pods were
// evicted (if any are named), and no other was disturbed.
func (s *claimStage) check(n *corev1.Node, cut string, evicted []*corev1.Pod) {
	s.t.Helper()
	s.givenBack(n)
	s.awaitPublished(s.wholeAndCut())
	for i, gpu := range s.snapshot() {
		want := s.cuts[i]
		if i == 0 {
			want = cut
		}
		if got := gpu.Geometry().String(); got != want {
			s.t.Errorf("GPU %d is cut as %s, want %s", i, got, want)
		}
	}
	if evicted != nil {
		want := map[types.UID]string{}
		for _, pod := range evicted {
			want[pod.UID] = pod.Name
		}
		if diff := cmp.Diff(want, s.evictions(s.namespace)); diff != "" {
			s.t.Errorf("evicted (-want +got):\n%s", diff)
		}
	}
	for name, pod := range s.stay {
		s.undisturbedClaimant(pod, s.devices[name])
	}
}

// three is how GPU 0 is cut. It fails the test unless that is config three, of which several placements fit.
func (s *claimStage) three() string {
	s.t.Helper()
	gpu := s.snapshot()[0]
	if diff := cmp.Diff(counts(s.snapshot()[1]), counts(gpu)); diff != "" {
		s.t.Errorf("GPU 0 is to be cut as GPU 1 is (-want +got):\n%s", diff)
	}
	return gpu.Geometry().String()
}

// undisturbedClaimant fails the test unless the pod is the one from before, on the same devices, never restarted.
func (r *rig) undisturbedClaimant(pod *corev1.Pod, devices []string) {
	r.t.Helper()
	now, err := r.client.CoreV1().Pods(pod.Namespace).Get(r.t.Context(), pod.Name, metav1.GetOptions{})
	if err != nil {
		r.t.Errorf("pod %s: %v", pod.Name, err)
		return
	}
	if now.UID != pod.UID || !running(now) || now.Status.ContainerStatuses[0].RestartCount != 0 {
		r.t.Errorf("pod %s was disturbed: it was %s, and is %s %s, restarted %+v", pod.Name, pod.UID, now.UID, now.Status.Phase, now.Status.ContainerStatuses)
	}
	if got := r.given(pod.Namespace, pod.Name); !slices.Equal(got, devices) {
		r.t.Errorf("pod %s had %v, and has %v", pod.Name, devices, got)
	}
}

// Promises 3 to 5, 9 and 23, of pods by claims of each kind. It is the test of NVIDIA's DRA driver in make test.
func TestExactlyTheClaimantsOfTheCutGPULeave(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "")
	s.budget(s.namespace, "resource-0", 1)
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	s.awaitReason(config.ReasonEvictionBlocked)
	s.neverFenced()
	if evicted := s.evictions(s.namespace); len(evicted) > 0 {
		t.Errorf("pods leave before the budget lets all of them go: %v", evicted)
	}
	s.relax(s.namespace, "resource-0")
	s.check(s.await("config one", s.verified("one")), "7g.80gb@0", s.leave)

	successor := s.claimant(s.namespace, "successor", "gpu-0")
	s.awaitRunning(s.namespace, "successor")
	s.label(config.LabelMIGConfig, "three")
	s.check(s.await("config three", s.verified("three")), s.three(), append(s.leave, successor))
}

// Promise 8, after each step of a change on a node of NVIDIA's DRA driver: one agent does each step.
func TestKilledAfterEachStepOfAChangeUnderDRAItEndsTheSame(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "")
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	arrived := make(chan *corev1.Node, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	go func() {
		n, ok := s.seek(ctx, s.verified("one")) //nolint:contextcheck // what it looks at has the test's context
		if !ok {
			t.Errorf("waiting for config one: %v; the node says:\n%s", context.Cause(ctx), words(n))
		}
		arrived <- n
	}()
	var deaths []string
	for {
		select {
		case n := <-arrived:
			t.Logf("%d deaths: %s", len(deaths), strings.Join(deaths, "; "))
			for _, kind := range []string{"fence", "evict", "destroy", "create", "evict dra-driver", "release"} {
				if !slices.ContainsFunc(deaths, func(step string) bool { return strings.Contains(step, kind) }) {
					t.Errorf("no agent died after a step of the kind %q", kind)
				}
			}
			s.check(n, "7g.80gb@0", nil) // an agent that was killed after a request leaves it to the next one to ask again
			return
		case step, runs := <-s.agents.running.steps:
			if !runs {
				t.Fatalf("the agent ended by itself after %v", deaths)
			}
			deaths = append(deaths, step)
			s.kill()
			s.run()
		}
	}
}

// Promises 8 and 9: the driver, or all that it has published, is away for a while between the cut and its verification, or since the fence. What no slice shows
// makes no pod leave.
func TestTheDRADriverIsAwayInAChange(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "")
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	away := func() { // until kubelet has deleted its slices
		s.labels(map[string]any{node.DRADriverLabel: nil})
		s.awaitPublished(nil)
		s.labels(map[string]any{node.DRADriverLabel: node.DRAStatic})
	}
	evicted := s.leave
	for i, row := range []struct {
		name  string
		after string // the step; "" for the fence
		does  func()
	}{
		{"its process is killed", "GPU 0: create", func() {
			if err := syscall.Kill(s.driverPID(), syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}},
		{"its DaemonSet lets go of the node", "GPU 0: create", away},
		{"its DaemonSet lets go of the node before the cut", "", away},
		{"kubelet is restarted", "GPU 0: create", func() {
			if err := s.Kubelet.Restart(t.Context()); err != nil {
				t.Error(err)
			}
		}},
	} {
		name, cut := "one", "7g.80gb@0"
		if i%2 > 0 {
			name = "three"
		}
		if i > 0 {
			pod := s.claimant(s.namespace, fmt.Sprintf("user-%d", i), "gpu-0")
			s.awaitRunning(s.namespace, pod.Name)
			evicted = append(evicted, pod)
		}
		for len(s.agents.running.steps) > 0 { // those of the row before, in which the agent may have closed the node twice
			<-s.agents.running.steps
		}
		s.label(config.LabelMIGConfig, name)
		s.awaitStep("fence")
		if row.after != "" {
			s.awaitStep(row.after)
		}
		began := time.Now()
		row.does()
		n := s.await("config "+name, s.verified(name))
		t.Logf("%s: done %s after", row.name, time.Since(began).Round(100*time.Millisecond))
		if name == "three" {
			cut = s.three()
		}
		s.check(n, cut, evicted)
	}
}

// Promise 5. Kubelet ends a pod with claims only while the driver runs, and its DaemonSet may replace the driver's pod at any time. So at each step of a
// change the successor starts, and pods that take longer to end than the driver can end.
func TestTheDRADriversPodIsReplacedAtEachStepOfAChange(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "")
	s.deletePod(s.namespace, s.leave[0].Name)
	evicted := s.leave[1:]
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	deleted := func(options metav1.DeleteOptions) func() {
		return func() {
			for _, pod := range s.pods() {
				if pod.Spec.Containers[0].Image != node.DRADriverImage || pod.DeletionTimestamp != nil {
					continue
				}
				if err := s.client.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, options); err != nil && !apierrors.IsNotFound(err) {
					t.Error(err)
				}
			}
		}
	}
	for i, row := range []struct {
		name string
		does func()
		most int // how often: kubelet waits ever longer before it starts a container again
	}{
		{"deleted, as in a roll-out", deleted(metav1.DeleteOptions{}), 1000},
		{"deleted at once", deleted(metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}), 1000},
		{"killed", func() {
			if err := syscall.Kill(s.driverPID(), syscall.SIGKILL); err != nil {
				t.Error(err)
			}
		}, 1},
	} {
		name, cut := "one", "7g.80gb@0"
		if i%2 > 0 {
			name = "three"
		}
		slow := s.slow(fmt.Sprintf("slow-%d", i))
		s.awaitRunning(s.namespace, slow.Name)
		evicted = append(evicted, slow)
		s.label(config.LabelMIGConfig, name)
		s.awaitStep("fence")
		s.awaitPod(s.namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + slow.Name}, func(p *corev1.Pod) bool { return p.DeletionTimestamp != nil })
		began, times := time.Now(), 1
		row.does()
		n := s.atEachStep(name, func() {
			if times < row.most {
				times++
				row.does()
			}
		})
		t.Logf("%s %d times: done %s after", row.name, times, time.Since(began).Round(100*time.Millisecond))
		if name == "three" {
			cut = s.three()
		}
		s.check(n, cut, evicted)
	}
}

// Promise 9. The driver reads the GPUs once, at its start. One that starts while the last call cuts a GPU has read too early: the agent restarts it as the
// one that ran before the change, and does not wait for half of timeouts.capacity.
func TestADRADriverThatStartsWithinTheLastCallOfACutIsRestarted(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "timeouts: {capacity: 20m}\n")
	if err := s.GPUs.Delay(gpusim.CreateGpuInstanceWithPlacement, 15*time.Second); err != nil {
		t.Fatal(err)
	}
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	for range 3 {
		s.awaitStep("GPU 0: destroy")
	}
	s.restartDRADriver()
	s.check(s.await("config one", s.verified("one")), "7g.80gb@0", s.leave)
}

// atEachStep does something after each step of the agent until the node has the config, and returns the node.
func (s *claimStage) atEachStep(name string, do func()) *corev1.Node {
	s.t.Helper()
	arrived := make(chan *corev1.Node, 1)
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	go func() {
		n, ok := s.seek(ctx, s.verified(name)) //nolint:contextcheck // what it looks at has the test's context
		if !ok {
			s.t.Errorf("waiting for config %s: %v; the node says:\n%s", name, context.Cause(ctx), words(n))
		}
		arrived <- n
	}()
	for {
		select {
		case n := <-arrived:
			return n
		case step, runs := <-s.agents.running.steps:
			if !runs {
				s.t.Fatal("the agent ended by itself")
			}
			if !strings.HasPrefix(step, "release") {
				do()
			}
		}
	}
}

// slow makes a pod for a device of GPU 0 that takes twelve seconds to end.
func (s *claimStage) slow(name string) *corev1.Pod {
	s.t.Helper()
	spec, template := s.podSpec(nil), "gpu-0"
	spec.TerminationGracePeriodSeconds = new(int64(12))
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	pod, err := s.client.CoreV1().Pods(s.namespace).Create(s.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{kubelet.TerminationDelayAnnotation: "1h"}}, Spec: spec,
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return pod
}

// driverPID is the process of NVIDIA's DRA driver on the node.
func (r *rig) driverPID() int {
	r.t.Helper()
	pid, runs := r.driverProcess()
	if !runs {
		r.t.Fatalf("no process of NVIDIA's DRA driver on node %s", r.Name)
	}
	return pid
}

// driverProcess is driverPID, if the driver runs.
func (r *rig) driverProcess() (pid int, runs bool) {
	r.t.Helper()
	lines, err := filepath.Glob(filepath.Join(r.ProcRoot(), "[0-9]*", "cmdline"))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, line := range lines {
		text, err := os.ReadFile(line)
		if pid, bad := strconv.Atoi(filepath.Base(filepath.Dir(line))); err == nil && bad == nil && bytes.Contains(text, []byte("gpu-kubelet-plugin")) {
			return pid, true
		}
	}
	return 0, false
}

// Promise 19. A claim is written before its pod is bound, so that pods come to devices that the change has just taken away, however the node is fenced.
func TestPodsThatAreBoundInAChangeRunOnNoDeviceThatIsGone(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "")
	if err := s.GPUs.Delay(gpusim.CreateGpuInstanceWithPlacement, 3*time.Second); err != nil {
		t.Fatal(err)
	}
	device := s.given(s.namespace, "template-0")[0]
	for i := range 3 { // the scheduler gives them whatever becomes free
		pod := s.tolerant(fmt.Sprintf("tolerant-%d", i))
		s.leave = append(s.leave, pod)
	}
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	for range 3 {
		s.awaitStep("GPU 0: destroy")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var bound []*corev1.Pod
	var binding sync.WaitGroup
	binding.Go(func() {
		every := time.NewTicker(50 * time.Millisecond)
		defer every.Stop()
		for ctx.Err() == nil && !t.Failed() {
			bound = append(bound, s.bind(fmt.Sprintf("bound-%d", len(bound)), device)) //nolint:contextcheck // a pod that is begun is bound, by the test's context
			<-every.C
		}
	})
	s.awaitStep("evict dra-driver")
	cancel()
	binding.Wait()
	n := s.await("config one", s.verified("one"))
	s.givenBack(n)
	t.Logf("%d pods were bound to %s", len(bound), device)
	if len(bound) < 3 { // twenty a second, where the machine has nothing else to do
		t.Errorf("%d pods were bound in the change", len(bound))
	}
	evicted := s.evictions(s.namespace)
	for _, pod := range bound {
		if evicted[pod.UID] == "" {
			t.Errorf("pod %s has a device that is gone, and was not evicted", pod.Name)
		}
		if now, err := s.client.CoreV1().Pods(s.namespace).Get(t.Context(), pod.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("pod %s is still there: %s %v", pod.Name, now.Status.Phase, err)
		}
	}
	s.awaitEvent(s.namespace, bound[0].Name, config.ReasonEvicting, "this pod for the change of node "+s.Name+" to one")
	offers := s.offeredNames()
	for pod, devices := range s.claimed(s.namespace) {
		for _, d := range devices {
			if !slices.Contains(offers, d) {
				t.Errorf("pod %s has %s, which the driver does not offer", pod, d)
			}
		}
	}
	for name, pod := range s.stay {
		s.undisturbedClaimant(pod, s.devices[name])
	}
}

// offeredNames are the names of the devices in the driver's slices for the node.
func (r *rig) offeredNames() []string {
	r.t.Helper()
	list, err := r.client.ResourceV1().ResourceSlices().List(r.t.Context(), metav1.ListOptions{FieldSelector: "spec.driver=" + draDriver + ",spec.nodeName=" + r.Name})
	if err != nil {
		r.t.Fatal(err)
	}
	var names []string
	for _, s := range list.Items {
		for _, d := range s.Spec.Devices {
			names = append(names, d.Name)
		}
	}
	return names
}

// tolerant makes a pod for a device of GPU 0 that the fence does not keep away.
func (s *claimStage) tolerant(name string) *corev1.Pod {
	s.t.Helper()
	spec, template := s.podSpec(nil), "gpu-0"
	spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	pod, err := s.client.CoreV1().Pods(s.namespace).Create(s.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return pod
}

// bind does with a pod what a scheduler does whose slices are behind: it writes the device into the claim, and binds the pod.
func (s *claimStage) bind(name, device string) *corev1.Pod {
	ctx, claims, pods := s.t.Context(), s.client.ResourceV1().ResourceClaims(s.namespace), s.client.CoreV1().Pods(s.namespace)
	one := resourcev1.ExactDeviceRequest{DeviceClassName: s.classOf(0)}
	claim, err := claims.Create(ctx, &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{resourcev1.Finalizer}},
		Spec:       resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &one}}}},
	}, metav1.CreateOptions{})
	if err != nil {
		s.t.Error(err)
		return &corev1.Pod{}
	}
	spec := s.podSpec(nil)
	spec.SchedulerName = "late"
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	pod, err := pods.Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		s.t.Error(err)
		return &corev1.Pod{}
	}
	claim.Status = resourcev1.ResourceClaimStatus{
		Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
			Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: draDriver, Pool: s.Name, Device: device}},
		}},
		ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.UID}},
	}
	if _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		s.t.Error(err)
	}
	if err := pods.Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name, UID: pod.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: s.Name},
	}, metav1.CreateOptions{}); err != nil {
		s.t.Error(err)
	}
	return pod
}

// Promise 10, under NVIDIA's DRA driver.
func TestACutThatFailsUnderDRAIsUndone(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "retry: {failures: 2, first: 1s}\n")
	before := s.GPUs.Calls()[gpusim.CreateComputeInstance]
	if err := s.GPUs.Fail(gpusim.CreateComputeInstance, gpusim.Fault{Return: gpusim.Unknown, Times: 2}); err != nil {
		t.Fatal(err)
	}
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	n := s.awaitGivenUp(config.ReasonHardwareFailure, "given up after 2 attempts")
	s.check(n, s.cuts[0], s.leave)
	if made := s.GPUs.Calls()[gpusim.CreateComputeInstance] - before; made < 2+3 {
		t.Errorf("%d compute instances were asked for, want two that fail and the former three", made)
	}
}

// Promises 2 and 3 at the size of a whole node: 56 pods have an instance each by a claim, and one GPU of eight is cut otherwise.
func TestOneOfEightGPUsIsCutUnderFiftySixClaims(t *testing.T) {
	t.Parallel()
	const gpus, each = 8, 7
	r := newDRARig(t, fmt.Sprintf("gpus: [{model: H100-80GB, count: %d}]", gpus), "migConfigMap: {name: fifty-six}\n", node.DRAStatic)
	r.configMap("fifty-six", "version: v1\nmig-configs:\n  again: [{devices: [3], mig-enabled: true, mig-devices: {7g.80gb: 1}}]\n")
	r.awaitPublished(r.wholeAndCut())
	for gpu := range gpus {
		var all []string
		for at := range each {
			all = append(all, fmt.Sprintf("1g.10gb@%d", at))
		}
		r.cutGPU(gpu, all...)
	}
	r.restartDRADriver()
	r.awaitPublished(r.wholeAndCut())
	namespace := clustertest.NamespaceOf(t, r.cluster)
	r.template(namespace, "one-slice", "mig.nvidia.com", "")
	pods := map[string]*corev1.Pod{}
	for i := range gpus * each {
		name := fmt.Sprintf("user-%d", i)
		pods[name] = r.claimant(namespace, name, "one-slice")
	}
	for name := range pods {
		r.awaitRunning(namespace, name)
	}
	claimed, want := r.claimed(namespace), map[types.UID]string{}
	for name, devices := range claimed {
		if strings.HasPrefix(devices[0], "gpu-3-mig-") {
			want[pods[name].UID] = name
		}
	}
	if len(claimed) != gpus*each || len(want) != each {
		t.Fatalf("%d pods have devices, and %d of GPU 3", len(claimed), len(want))
	}

	r.run()
	r.awaitReason(config.ReasonNotRequested)
	labelled := time.Now()
	r.label(config.LabelMIGConfig, "again")
	r.awaitStep("GPU 3: create")
	cut := time.Now()
	r.awaitPublished(r.wholeAndCut())
	published := time.Now()
	r.givenBack(r.await("config again", r.verified("again")))
	t.Logf("from the label to the last call of the library %s, to the slices %s, to the verification %s", cut.Sub(labelled), published.Sub(cut), time.Since(published))
	if took := published.Sub(cut); took > 10*time.Second {
		t.Errorf("the slices show the GPUs %s after the last call, want 10 s", took)
	}
	if diff := cmp.Diff(want, r.evictions(namespace)); diff != "" {
		t.Errorf("evicted (-want +got):\n%s", diff)
	}
	for uid, name := range want {
		if pods[name].UID == uid {
			delete(pods, name)
		}
	}
	r.keepClaims(namespace, pods, claimed)
}

// keepClaims fails the test unless these pods run on as they did, on the devices that they had.
func (r *rig) keepClaims(namespace string, pods map[string]*corev1.Pod, claimed map[string][]string) {
	t := r.t
	t.Helper()
	after := r.claimed(namespace)
	now := map[string]corev1.Pod{}
	for _, pod := range r.pods() {
		if pod.Namespace == namespace {
			now[pod.Name] = pod
		}
	}
	for _, name := range slices.Sorted(maps.Keys(pods)) {
		is := now[name]
		if is.UID != pods[name].UID || !running(&is) || is.Status.ContainerStatuses[0].RestartCount != 0 || !slices.Equal(after[name], claimed[name]) {
			t.Errorf("pod %s was disturbed: it had %v, and has %v, %s", name, claimed[name], after[name], is.Status.Phase)
		}
	}
}

// Promise 7. DCGM's exporter of the GPU Operator has a claim to all GPUs by admin access. Its pod would not end without the driver, so it makes way before
// anything else, and comes back in the end.
func TestOperandsWithClaimsByAdminAccessMakeWay(t *testing.T) {
	t.Parallel()
	const label = config.LabelOperandPrefix + "dcgm-exporter-dra"
	s := newClaimStage(t, "")
	s.labels(map[string]any{label: "true"})
	namespace := clustertest.NamespaceOf(t, s.cluster)
	s.mayReadAllGPUs(namespace)
	template, labels := "all-gpus", map[string]string{"app": "exporter"}
	spec := s.podSpec(nil)
	spec.NodeSelector[label] = "true"
	spec.Containers[0].Image = node.DCGMImage
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	if _, err := s.client.AppsV1().DaemonSets(namespace).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "exporter"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	exporter := s.awaitPod(namespace, metav1.ListOptions{LabelSelector: "app=exporter"}, running)
	if got := s.given(namespace, exporter.Name); !slices.Equal(got, []string{"gpu-2"}) {
		t.Fatalf("the exporter has %v, want all whole GPUs", got)
	}
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	n := s.await("config one", s.verified("one"))
	s.check(n, "7g.80gb@0", s.leave)
	if got := n.Labels[label]; got != "true" {
		t.Errorf("label %s is %q, want it as before", label, got)
	}
	s.awaitPod(namespace, metav1.ListOptions{LabelSelector: "app=exporter"}, func(p *corev1.Pod) bool { return running(p) && p.UID != exporter.UID })
	if evicted := s.evictions(namespace); len(evicted) > 0 {
		t.Errorf("the operator's pod was evicted, and its label deploys it: %v", evicted)
	}
	steps := s.kill()
	at := func(prefix string) int {
		return slices.IndexFunc(steps, func(step string) bool { return strings.HasPrefix(step, prefix) })
	}
	if !(0 <= at("pause "+label) && at("pause "+label) < at("GPU 0: destroy") && at("GPU 0: destroy") < at("evict dra-driver") && at("evict dra-driver") < at("resume "+label)) {
		t.Errorf("want the operand paused before the cut and resumed after it; done were:\n%s", strings.Join(steps, "\n"))
	}
}
