package kubelet_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/cluster/timeline"
)

const gpu = "nvidia.com/gpu"

// joined is a kubelet that joined the package's control plane with a node's own rights.
type joined struct {
	*kubelet.Kubelet
	admin     kubernetes.Interface
	namespace string
	options   kubelet.Options
	usage     *usage
}

// usage records what OnAllocate and OnFree are given.
type usage struct {
	mu  sync.Mutex
	log []string
}

func (u *usage) allocated(pod *corev1.Pod, ids []string) { u.note("allocate", pod, ids) }

func (u *usage) freed(pod *corev1.Pod, ids []string) { u.note("free", pod, ids) }

func (u *usage) note(what string, pod *corev1.Pod, ids []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.log = append(u.log, what+" "+pod.Name+" "+strings.Join(ids, ","))
}

func (u *usage) lines() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Clone(u.log)
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

// join starts a kubelet for a node that is named after the test's namespace.
func join(t *testing.T, o kubelet.Options) *joined {
	t.Helper()
	plane := clustertest.Start(t)
	j := &joined{admin: clustertest.Client(t), namespace: clustertest.Namespace(t), usage: &usage{}}
	o.Node = "node-" + j.namespace
	o.Dir = shortDir(t)
	credentials, err := plane.ConfigFor("system:node:"+o.Node, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	if o.Config != nil { // it may have a say in each request
		credentials.WrapTransport = o.Config.WrapTransport
	}
	o.Config, o.ReportAtOnce = credentials, true
	o.OnAllocate, o.OnFree = j.usage.allocated, j.usage.freed
	o.RestartDelay = 10 * time.Millisecond
	j.options = o
	j.start(t.Context(), t)
	t.Cleanup(func() { j.Stop() })
	return j
}

func (j *joined) start(ctx context.Context, t *testing.T) {
	t.Helper()
	k, err := kubelet.Start(context.WithoutCancel(ctx), j.options)
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

// oneGPU has a pod ask for a GPU.
func oneGPU(pod *corev1.Pod) {
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{gpu: resource.MustParse("1")}
}

// until waits for a state of the pod.
func (j *joined) until(t *testing.T, name string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	t.Helper()
	var pod *corev1.Pod
	clustertest.Eventually(t, "pod "+name+" is as wanted", func(ctx context.Context) (done bool, err error) {
		pod, err = j.admin.CoreV1().Pods(j.namespace).Get(ctx, name, metav1.GetOptions{})
		return err == nil && wanted(pod), err
	})
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

// serve has a device plugin offer GPUs, and waits until the node does.
func (j *joined) serve(t *testing.T, endpoint string, ids ...string) *timeline.Plugin {
	t.Helper()
	p, err := timeline.ServePlugin(t.Context(), j.DevicePluginDir(), endpoint, gpu, ids...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	j.expect(t, len(ids), len(ids))
	return p
}

// expect waits until the node has so many GPUs.
func (j *joined) expect(t *testing.T, capacity, allocatable int) {
	t.Helper()
	clustertest.Eventually(t, fmt.Sprintf("%d GPUs are allocatable, of %d", allocatable, capacity), func(ctx context.Context) (bool, error) {
		node, err := j.admin.CoreV1().Nodes().Get(ctx, j.options.Node, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		has, free := node.Status.Capacity[gpu], node.Status.Allocatable[gpu]
		return int(has.Value()) == capacity && int(free.Value()) == allocatable, nil
	})
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

// assigned lists the devices of each pod as PodResources reports them.
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

func TestRunningPodsKeepTheirDevicesOverARestart(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	j.serve(t, "gpu.sock", "GPU-a", "GPU-b")
	j.pod(t, "user", oneGPU)
	before := j.until(t, "user", isReady)
	if err := j.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	j.expect(t, 0, 0)
	want := map[string][]string{"user": {gpu + "=GPU-a"}}
	if diff := cmp.Diff(want, j.assigned(t)); diff != "" {
		t.Errorf("devices after Restart (-want +got):\n%s", diff)
	}

	j.Stop() // and a kubelet that was away for longer
	j.start(t.Context(), t)
	j.serve(t, "gpu.sock", "GPU-a", "GPU-b")
	if diff := cmp.Diff(want, j.assigned(t)); diff != "" {
		t.Errorf("devices after Start (-want +got):\n%s", diff)
	}
	j.pod(t, "other", oneGPU)
	j.until(t, "other", isReady)
	after := j.until(t, "user", isReady)
	if diff := cmp.Diff(before.Status.ContainerStatuses, after.Status.ContainerStatuses); diff != "" {
		t.Errorf("containers of a pod that survived (-before +after):\n%s", diff)
	}
	log := []string{"allocate user GPU-a", "allocate user GPU-a", "allocate other GPU-b"}
	if diff := cmp.Diff(log, j.usage.lines()); diff != "" {
		t.Errorf("what the hooks were given (-want +got):\n%s", diff)
	}
}

func TestDevicesOfAPodThatWentWhileTheKubeletWasAwayAreFreed(t *testing.T) {
	t.Parallel()
	j := join(t, kubelet.Options{})
	j.serve(t, "gpu.sock", "GPU-a")
	j.pod(t, "user", oneGPU)
	j.until(t, "user", isReady)
	j.Stop()
	now := int64(0)
	j.remove(t, "user", metav1.DeleteOptions{GracePeriodSeconds: &now})
	j.start(t.Context(), t)
	if diff := cmp.Diff([]string{"allocate user GPU-a", "free user GPU-a"}, j.usage.lines()); diff != "" {
		t.Errorf("what the hooks were given (-want +got):\n%s", diff)
	}
}
