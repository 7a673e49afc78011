package kubelet_test

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
)

// patience is how long anything may take: a machine may have much else to do.
const patience = 5 * time.Minute

// joined is a kubelet that joined the package's control plane with a node's own rights.
type joined struct {
	*kubelet.Kubelet
	admin     kubernetes.Interface
	namespace string
	options   kubelet.Options
	usage     *usage
}

// usage records what OnAllocate and OnFree tell.
type usage struct {
	mu   sync.Mutex
	log  []string
	more chan struct{} // closed and replaced with each line
}

func (u *usage) allocated(pod *corev1.Pod, ids []string) { u.note("allocate", pod, ids) }

func (u *usage) freed(pod *corev1.Pod, ids []string) { u.note("free", pod, ids) }

func (u *usage) note(what string, pod *corev1.Pod, ids []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.log = append(u.log, what+" "+pod.Name+" "+strings.Join(ids, ","))
	close(u.more)
	u.more = make(chan struct{})
}

// await waits for a line.
func (u *usage) await(t *testing.T, line string) {
	t.Helper()
	for {
		u.mu.Lock()
		found, more := slices.Contains(u.log, line), u.more
		u.mu.Unlock()
		if found {
			return
		}
		select {
		case <-more:
		case <-time.After(patience):
			t.Fatalf("the hooks were not told %q", line)
		}
	}
}

func (u *usage) lines() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.log)
}

// join starts a kubelet for a node that is named after the test's namespace.
func join(t *testing.T, o kubelet.Options) *joined {
	t.Helper()
	plane := clustertest.Start(t)
	j := &joined{admin: clustertest.Client(t), namespace: clustertest.Namespace(t), usage: &usage{more: make(chan struct{})}}
	o.Node = "node-" + j.namespace
	o.Dir = shortDir(t)
	credentials, err := plane.ConfigFor("system:node:"+o.Node, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	o.Config, o.ReportAtOnce = credentials, true
	o.OnAllocate, o.OnFree = j.usage.allocated, j.usage.freed
	o.VolumeDelay, o.RestartDelay = 10*time.Millisecond, 10*time.Millisecond
	j.options = o
	j.start(t)
	t.Cleanup(func() { j.Stop() })
	return j
}

func (j *joined) start(t *testing.T) {
	t.Helper()
	k, err := kubelet.Start(context.WithoutCancel(t.Context()), j.options)
	if err != nil {
		t.Fatal(err)
	}
	j.Kubelet = k
}

// pod makes a pod that is bound to the node, as a DaemonSet's are but without the scheduler.
func (j *joined) pod(t *testing.T, name string, change func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	grace := int64(30)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: j.namespace, Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			NodeName: j.options.Node, TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "main", Image: "example.com/sleep"}},
		},
	}
	if change != nil {
		change(pod)
	}
	made, err := j.admin.CoreV1().Pods(j.namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func wanting(name string, count int64) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(count, resource.DecimalSI)}
	}
}

// until waits for a state of the pod.
func (j *joined) until(t *testing.T, name string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	pod, err := j.WaitPod(ctx, j.namespace, name, wanted)
	if err != nil {
		last, _ := j.admin.CoreV1().Pods(j.namespace).Get(t.Context(), name, metav1.GetOptions{})
		t.Fatalf("%v; its status: %+v", err, last.Status)
	}
	return pod
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func hasFailed(pod *corev1.Pod) bool { return pod.Status.Phase == corev1.PodFailed }

// gone waits until the object is removed.
func (j *joined) gone(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	clustertest.Eventually(t, "pod "+pod.Name+" is gone", func(ctx context.Context) (bool, error) {
		now, err := j.admin.CoreV1().Pods(j.namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID, nil
	})
}

func (j *joined) remove(t *testing.T, name string, o metav1.DeleteOptions) {
	t.Helper()
	if err := j.admin.CoreV1().Pods(j.namespace).Delete(t.Context(), name, o); err != nil {
		t.Fatal(err)
	}
}

func (j *joined) expect(t *testing.T, resource string, capacity, allocatable int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := j.WaitResource(ctx, resource, capacity, allocatable); err != nil {
		t.Fatal(err)
	}
}

func (j *joined) podResources(t *testing.T) podresourcesv1.PodResourcesListerClient {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+j.PodResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return podresourcesv1.NewPodResourcesListerClient(conn)
}

// assigned lists the devices of each pod as PodResources tells them.
func (j *joined) assigned(t *testing.T) map[string][]string {
	t.Helper()
	answer, err := j.podResources(t).List(t.Context(), &podresourcesv1.ListPodResourcesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for _, pod := range answer.PodResources {
		all[pod.Name] = nil
		for _, c := range pod.Containers {
			for _, d := range c.Devices {
				for _, id := range d.DeviceIds {
					all[pod.Name] = append(all[pod.Name], d.ResourceName+"="+id)
				}
			}
		}
		slices.Sort(all[pod.Name])
	}
	return all
}

func TestAPodWithoutAKnownImageRunsAndIsReady(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	j.pod(t, "a", nil)
	pod := j.until(t, "a", isReady)
	s := pod.Status.ContainerStatuses[0]
	if pod.Status.Phase != corev1.PodRunning || s.State.Running == nil || s.ContainerID == "" || pod.Status.PodIP == "" || pod.Status.StartTime == nil {
		t.Errorf("status of a running pod: %+v", pod.Status)
	}
	j.remove(t, "a", metav1.DeleteOptions{})
	j.gone(t, pod)
}

func TestPodsGetDevicesAndGiveThemBack(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	p := servePlugin(t, j.DevicePluginDir(), "mig.sock", "nvidia.com/mig-1g.10gb", "MIG-a", "MIG-b", "MIG-c")
	p.prefers = []string{"MIG-c", "MIG-b"}
	if err := p.register(t); err != nil { // it offers preferences only now
		t.Fatal(err)
	}
	j.expect(t, "nvidia.com/mig-1g.10gb", 3, 3)
	j.pod(t, "two", wanting("nvidia.com/mig-1g.10gb", 2))
	two := j.until(t, "two", isReady)
	j.pod(t, "none", nil)
	j.until(t, "none", isReady)

	want := map[string][]string{"two": {"nvidia.com/mig-1g.10gb=MIG-b", "nvidia.com/mig-1g.10gb=MIG-c"}, "none": nil}
	if diff := cmp.Diff(want, j.assigned(t)); diff != "" {
		t.Errorf("PodResources List (-want +got):\n%s", diff)
	}
	one, err := j.podResources(t).Get(t.Context(), &podresourcesv1.GetPodResourcesRequest{PodName: "two", PodNamespace: j.namespace})
	if err != nil || len(one.PodResources.Containers[0].Devices) != 2 {
		t.Errorf("PodResources Get: %v, %v", one, err)
	}
	if _, err := j.podResources(t).Get(t.Context(), &podresourcesv1.GetPodResourcesRequest{PodName: "nobody", PodNamespace: j.namespace}); err == nil {
		t.Error("PodResources Get of a pod that is not there is no error")
	}
	j.expect(t, "nvidia.com/mig-1g.10gb", 3, 3) // what pods have stays allocatable

	j.pod(t, "late", wanting("nvidia.com/mig-1g.10gb", 2))
	late := j.until(t, "late", hasFailed)
	message := "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/mig-1g.10gb. Requested: 2, Available: 1, which is unexpected"
	if diff := cmp.Diff([]string{"UnexpectedAdmissionError", message}, []string{late.Status.Reason, late.Status.Message}); diff != "" {
		t.Errorf("a pod that asks for too much (-want +got):\n%s", diff)
	}

	j.remove(t, "two", metav1.DeleteOptions{})
	j.gone(t, two)
	j.pod(t, "three", wanting("nvidia.com/mig-1g.10gb", 3))
	j.until(t, "three", isReady)
	log := []string{"allocate two MIG-b,MIG-c", "free two MIG-b,MIG-c", "allocate three MIG-a,MIG-b,MIG-c"}
	if diff := cmp.Diff(log, j.usage.lines()); diff != "" {
		t.Errorf("what the hooks were told (-want +got):\n%s", diff)
	}
}

func TestGetAllocatableResourcesTellsTheHealthyDevicesWhoeverHasThem(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	p := servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a::0", "GPU-a::1")
	j.expect(t, gpu, 2, 2)
	j.pod(t, "user", wanting(gpu, 1))
	j.until(t, "user", isReady)
	list := func() (ids []string) {
		answer, err := j.podResources(t).GetAllocatableResources(t.Context(), &podresourcesv1.AllocatableResourcesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range answer.Devices {
			ids = append(ids, d.DeviceIds...)
		}
		return ids
	}
	if diff := cmp.Diff([]string{"GPU-a::0", "GPU-a::1"}, list()); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	p.stop()
	j.expect(t, gpu, 2, 0)
	if ids := list(); len(ids) != 0 {
		t.Errorf("allocatable after the plugin is gone: %v", ids)
	}
}

func TestAPodBoundWhileThePluginIsAwayIsRejected(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	p := servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	p.stop()
	j.expect(t, gpu, 1, 0)
	j.pod(t, "early", wanting(gpu, 1))
	pod := j.until(t, "early", hasFailed)
	want := "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu, which is unexpected"
	if pod.Status.Reason != "UnexpectedAdmissionError" || pod.Status.Message != want {
		t.Errorf("rejected for %s: %s", pod.Status.Reason, pod.Status.Message)
	}
}

func TestTerminationTakesAsLongAsThePodSaysAndNoLongerThanItsGrace(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	slow := func(pod *corev1.Pod) {
		pod.Annotations = map[string]string{kubelet.TerminationDelayAnnotation: "1h"}
		pod.Spec.TerminationGracePeriodSeconds = new(int64(1800))
	}
	j.pod(t, "slow", slow)
	pod := j.until(t, "slow", isReady)
	j.remove(t, "slow", metav1.DeleteOptions{})
	j.until(t, "slow", func(p *corev1.Pod) bool { return p.DeletionTimestamp != nil })
	began, second := time.Now(), int64(1)
	j.remove(t, "slow", metav1.DeleteOptions{GracePeriodSeconds: &second}) // who is in a hurry shortens the grace
	j.gone(t, pod)
	if took := time.Since(began); took < 500*time.Millisecond || took > 10*time.Minute {
		t.Errorf("a pod that does not end by itself took %v with a grace of 1 s", took)
	}
}

func TestAFinalizerKeepsTheObjectOfAPodThatHasEnded(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	j.pod(t, "kept", func(pod *corev1.Pod) {
		wanting(gpu, 1)(pod)
		pod.Finalizers = []string{"example.com/keep"}
	})
	pod := j.until(t, "kept", isReady)
	j.remove(t, "kept", metav1.DeleteOptions{})
	j.until(t, "kept", func(p *corev1.Pod) bool {
		return p.DeletionGracePeriodSeconds != nil && *p.DeletionGracePeriodSeconds == 0 && p.Status.ContainerStatuses[0].State.Terminated != nil
	})
	if diff := cmp.Diff(map[string][]string{}, j.assigned(t)); diff != "" {
		t.Errorf("devices of a pod that has ended (-want +got):\n%s", diff)
	}
	if _, err := j.admin.CoreV1().Pods(j.namespace).Patch(t.Context(), "kept", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	j.gone(t, pod)
}

func TestABudgetHoldsAnEvictionUntilAnotherPodIsReady(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	app := func(pod *corev1.Pod) { pod.Labels = map[string]string{"app": "guarded"} }
	first := j.pod(t, "first", app)
	j.until(t, "first", isReady)
	one, atLeast := metav1.LabelSelector{MatchLabels: map[string]string{"app": "guarded"}}, intstr.FromInt32(1)
	if _, err := j.admin.PolicyV1().PodDisruptionBudgets(j.namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "guard"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &atLeast, Selector: &one},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	evict := func() error {
		return j.admin.PolicyV1().Evictions(j.namespace).Evict(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: j.namespace, Name: "first"}})
	}
	if err := evict(); !apierrors.IsTooManyRequests(err) {
		t.Fatalf("evicting the only ready pod: %v, want 429", err)
	}
	j.pod(t, "second", app)
	j.until(t, "second", isReady)
	open := func(ctx context.Context) (watch.Interface, error) {
		return j.admin.PolicyV1().PodDisruptionBudgets(j.namespace).Watch(ctx, metav1.ListOptions{})
	}
	err := clustertest.Follow(t.Context(), open, nil, func(_ watch.EventType, b *policyv1.PodDisruptionBudget) bool { return b.Status.DisruptionsAllowed == 1 })
	if err != nil {
		t.Fatal(err)
	}
	if err := evict(); err != nil {
		t.Fatal(err)
	}
	j.gone(t, first)
}

func TestRunningPodsKeepTheirDevicesOverARestart(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a", "GPU-b")
	j.expect(t, gpu, 2, 2)
	j.pod(t, "user", wanting(gpu, 1))
	before := j.until(t, "user", isReady)
	if err := j.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	j.expect(t, gpu, 0, 0)
	want := map[string][]string{"user": {gpu + "=GPU-a"}}
	if diff := cmp.Diff(want, j.assigned(t)); diff != "" {
		t.Errorf("devices after Restart (-want +got):\n%s", diff)
	}

	j.Stop() // and a kubelet that was away for longer
	j.start(t)
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a", "GPU-b")
	j.expect(t, gpu, 2, 2)
	if diff := cmp.Diff(want, j.assigned(t)); diff != "" {
		t.Errorf("devices after Start (-want +got):\n%s", diff)
	}
	j.pod(t, "other", wanting(gpu, 1))
	j.until(t, "other", isReady)
	after := j.until(t, "user", isReady)
	if diff := cmp.Diff(before.Status.ContainerStatuses, after.Status.ContainerStatuses); diff != "" {
		t.Errorf("containers of a pod that survived (-before +after):\n%s", diff)
	}
	log := []string{"allocate user GPU-a", "allocate user GPU-a", "allocate other GPU-b"}
	if diff := cmp.Diff(log, j.usage.lines()); diff != "" {
		t.Errorf("what the hooks were told (-want +got):\n%s", diff)
	}
}

func TestARebootEndsContainersAndRejectsPodsThatStartBeforeTheirPlugin(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{BootID: "first"})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	j.pod(t, "user", wanting(gpu, 1))
	j.until(t, "user", isReady)
	j.pod(t, "plain", nil)
	j.until(t, "plain", isReady)
	j.Stop()
	j.options.BootID = "second"
	j.start(t)
	user := j.until(t, "user", hasFailed)
	if user.Status.Reason != "UnexpectedAdmissionError" {
		t.Errorf("rejected for %s: %s", user.Status.Reason, user.Status.Message)
	}
	j.until(t, "plain", func(p *corev1.Pod) bool { return isReady(p) && p.Status.ContainerStatuses[0].RestartCount == 1 })
	node, err := j.admin.CoreV1().Nodes().Get(t.Context(), j.options.Node, metav1.GetOptions{})
	if err != nil || node.Status.NodeInfo.BootID != "second" {
		t.Errorf("boot id %q, %v", node.Status.NodeInfo.BootID, err)
	}
}

func TestDevicesOfAPodThatWentWhileTheKubeletWasAwayAreFreed(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	j.pod(t, "user", wanting(gpu, 1))
	j.until(t, "user", isReady)
	j.Stop()
	now := int64(0)
	j.remove(t, "user", metav1.DeleteOptions{GracePeriodSeconds: &now})
	j.start(t)
	if diff := cmp.Diff([]string{"allocate user GPU-a", "free user GPU-a"}, j.usage.lines()); diff != "" {
		t.Errorf("what the hooks were told (-want +got):\n%s", diff)
	}
}

func TestTheSchedulerPlacesPodsOnTheNode(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{Labels: map[string]string{"pool": filepath.Base(t.Name())}})
	servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "GPU-a")
	j.expect(t, gpu, 1, 1)
	j.pod(t, "user", func(pod *corev1.Pod) {
		wanting(gpu, 1)(pod)
		pod.Spec.NodeName, pod.Spec.NodeSelector = "", map[string]string{"pool": filepath.Base(t.Name())}
	})
	j.until(t, "user", isReady)
}

func TestANodeIsLeasedByItsKubelet(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	lease, err := j.admin.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), j.options.Node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if *lease.Spec.HolderIdentity != j.options.Node || time.Since(lease.Spec.RenewTime.Time) > time.Minute || len(lease.OwnerReferences) != 1 {
		t.Errorf("lease %+v of %+v", lease.Spec, lease.OwnerReferences)
	}
}

func TestInitContainersAndSidecarsOfAPodWithoutProcesses(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	always := corev1.ContainerRestartPolicyAlways
	j.pod(t, "inits", func(pod *corev1.Pod) {
		pod.Spec.InitContainers = []corev1.Container{
			{Name: "first", Image: "example.com/first"},
			{Name: "beside", Image: "example.com/beside", RestartPolicy: &always},
		}
	})
	pod := j.until(t, "inits", isReady)
	inits := pod.Status.InitContainerStatuses
	if len(inits) != 2 || inits[0].State.Terminated == nil || inits[1].State.Running == nil {
		t.Errorf("init containers of a running pod: %+v", inits)
	}
}
