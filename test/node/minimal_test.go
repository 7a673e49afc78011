package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	slice     = "nvidia.com/mig-1g.10gb"
	half      = "nvidia.com/mig-3g.40gb"
	perGPU    = 7
	crowdSize = 8 * perGPU
)

// Promises 2, 3 and 4: a full node of eight GPUs, of which one is cut again. Whoever holds a part of that one leaves through
// the Eviction API, once; no one else can notice that anything has happened.
func TestOneGPUOfEightIsRepartitionedAndTheOthersPodsNeverNotice(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus:\n- {model: H100-80GB, count: 8, mig: true}\n", "migConfigMap: {name: one-of-eight}\n")
	r.run()
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	r.awaitConverged("all-1g.10gb")
	namespace := clustertest.Namespace(t)
	r.crowd(namespace)
	pods := r.awaitPods(namespace, "a pod on each slice", func(pods map[types.UID]*corev1.Pod) bool {
		return len(pods) == crowdSize && all(pods, running)
	})
	gpus, devices := r.snapshot(), r.assignments(namespace)
	chosen := r.chooseGPU(gpus, pods, devices)
	leaves, stays := apart(gpus[chosen], pods, devices)
	if len(leaves) != perGPU || len(stays) != crowdSize-perGPU {
		t.Fatalf("%d pods hold slices of GPU %d and %d others, want %d and %d", len(leaves), chosen, len(stays), perGPU, crowdSize-perGPU)
	}
	if err := r.GPUs.ForgetCalls(); err != nil {
		t.Fatal(err)
	}

	r.configMap("one-of-eight", halved(chosen))
	r.label(config.LabelMIGConfig, "one-again")
	n := r.awaitConverged("one-again")

	r.givenBack(n)
	if diff := cmp.Diff(map[string]int{slice: crowdSize - perGPU, half: 2}, offered(n)); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(names(leaves), r.evictions(namespace)); diff != "" {
		t.Errorf("evicted pods (-those on GPU %d +asked for):\n%s", chosen, diff)
	}
	r.undisturbed(namespace, stays, devices)
	r.replaced(namespace, leaves, stays)
	r.onlyCut(gpus, chosen)
	r.pod(namespace, "large", map[string]string{half: "1"})
	r.awaitRunning(namespace, "large")
}

// halved is a config that cuts one of the GPUs in two halves.
func halved(chosen int) string {
	var others []string
	for i := range 8 {
		if i != chosen {
			others = append(others, fmt.Sprint(i))
		}
	}
	return fmt.Sprintf(`version: v1
mig-configs:
  one-again:
  - {devices: [%d], mig-enabled: true, mig-devices: {3g.40gb: 2}}
  - {devices: [%s], mig-enabled: true, mig-devices: {1g.10gb: 7}}
`, chosen, strings.Join(others, ", "))
}

// crowd makes a pod for each slice: those of a Deployment, those of a StatefulSet, and some without a controller. These are fewer
// than the slices of a GPU, so that each GPU has one of a controller's.
func (r *rig) crowd(namespace string) {
	r.t.Helper()
	const bare, ofStatefulSet = perGPU - 1, 24
	for i := range bare {
		r.pod(namespace, fmt.Sprintf("bare-%d", i), map[string]string{slice: "1"})
	}
	grace := int64(2)
	template := func(app string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}},
			Spec: corev1.PodSpec{
				NodeSelector: map[string]string{corev1.LabelHostname: r.Name}, TerminationGracePeriodSeconds: &grace,
				Containers: []corev1.Container{{Name: "c", Image: "team/app:1", Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{slice: resource.MustParse("1")},
				}}},
			},
		}
	}
	replicas := int32(ofStatefulSet)
	_, err := r.client.AppsV1().StatefulSets(namespace).Create(r.t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "stateful"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, PodManagementPolicy: appsv1.ParallelPodManagement,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "stateful"}}, Template: template("stateful"),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	rest := int32(crowdSize - bare - ofStatefulSet)
	_, err = r.client.AppsV1().Deployments(namespace).Create(r.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "deployed"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &rest,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "deployed"}}, Template: template("deployed"),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// awaitPods watches the pods of the namespace until done is satisfied with them.
func (r *rig) awaitPods(namespace, what string, done func(map[types.UID]*corev1.Pod) bool) map[types.UID]*corev1.Pod {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	pods := map[types.UID]*corev1.Pod{}
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{})
	}
	err := clustertest.Follow(ctx, open, func() { clear(pods) }, func(did watch.EventType, pod *corev1.Pod) bool {
		if pods[pod.UID] = pod; did == watch.Deleted {
			delete(pods, pod.UID)
		}
		return done(pods)
	})
	if err != nil {
		r.t.Fatalf("waiting for %s: %v; of %d pods %d run", what, err, len(pods), len(those(pods, running)))
	}
	return pods
}

func those(pods map[types.UID]*corev1.Pod, is func(*corev1.Pod) bool) map[types.UID]*corev1.Pod {
	out := maps.Clone(pods)
	maps.DeleteFunc(out, func(_ types.UID, pod *corev1.Pod) bool { return !is(pod) })
	return out
}

func all(pods map[types.UID]*corev1.Pod, are func(*corev1.Pod) bool) bool {
	return len(those(pods, are)) == len(pods)
}

func names(pods map[types.UID]*corev1.Pod) map[types.UID]string {
	out := map[types.UID]string{}
	for uid, pod := range pods {
		out[uid] = pod.Name
	}
	return out
}

// assignments are the devices of each pod of the namespace, as kubelet reports them.
func (r *rig) assignments(namespace string) map[string][]string {
	r.t.Helper()
	kubelet := holders.DialKubelet(r.Kubelet.PodResourcesSocket())
	defer kubelet.Close()
	given, err := kubelet.Assignments(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	out := map[string][]string{}
	for pod, resources := range given {
		if pod.Namespace == namespace {
			out[pod.Name] = slices.Concat(slices.Collect(maps.Values(resources))...)
		}
	}
	return out
}

// chooseGPU takes one with a bare pod on it, beside those of controllers.
func (r *rig) chooseGPU(gpus []nvml.GPU, pods map[types.UID]*corev1.Pod, devices map[string][]string) int {
	r.t.Helper()
	for i, gpu := range gpus {
		leaves, _ := apart(gpu, pods, devices)
		if !all(leaves, controlled) {
			return i
		}
	}
	r.t.Fatalf("no GPU has a pod without a controller: %v", devices)
	return 0
}

func controlled(pod *corev1.Pod) bool { return metav1.GetControllerOf(pod) != nil }

// apart distinguishes the pods that hold a part of the GPU from the others.
func apart(gpu nvml.GPU, pods map[types.UID]*corev1.Pod, devices map[string][]string) (on, off map[types.UID]*corev1.Pod) {
	parts := map[string]bool{}
	for _, instance := range gpu.Instances {
		for _, device := range instance.Devices {
			parts[device.UUID] = true
		}
	}
	holds := func(pod *corev1.Pod) bool {
		return slices.ContainsFunc(devices[pod.Name], func(id string) bool { return parts[id] })
	}
	return those(pods, holds), those(pods, func(pod *corev1.Pod) bool { return !holds(pod) })
}

// evictions are the pods of the namespace whose eviction anybody has asked for in earnest, by the UID that was named.
func (r *rig) evictions(namespace string) map[types.UID]string {
	r.t.Helper()
	events, err := r.cluster.Requests(func(e cluster.AuditEvent) bool {
		return e.Namespace == namespace && e.Resource == "pods/eviction"
	})
	if err != nil {
		r.t.Fatal(err)
	}
	out, accepted := map[types.UID]string{}, map[types.UID]bool{}
	for _, e := range events {
		var asked policyv1.Eviction
		if err := json.Unmarshal([]byte(e.Body), &asked); err != nil {
			r.t.Fatalf("reading %s: %v", e, err)
		}
		o := asked.DeleteOptions
		if o == nil || o.Preconditions == nil || o.Preconditions.UID == nil {
			r.t.Errorf("an eviction that names no UID: %s %s", e, e.Body)
			continue
		}
		if len(o.DryRun) > 0 {
			continue
		}
		if accepted[*o.Preconditions.UID] { // the API server also refuses some: NodeRestriction learns of a new pod from a watch
			r.t.Errorf("pod %s was evicted twice", e.Name)
		}
		out[*o.Preconditions.UID], accepted[*o.Preconditions.UID] = e.Name, e.Code < http.StatusBadRequest
	}
	return out
}

// undisturbed fails the test unless the pods are those from before, in the same containers on the same devices.
func (r *rig) undisturbed(namespace string, before map[types.UID]*corev1.Pod, devices map[string][]string) {
	r.t.Helper()
	now, assigned := r.podsOf(namespace), r.assignments(namespace)
	for uid, pod := range before {
		after := now[uid]
		if after == nil {
			r.t.Errorf("pod %s is gone", pod.Name)
			continue
		}
		if !running(after) {
			r.t.Errorf("pod %s does not run: %s, to be deleted %v", pod.Name, after.Status.Phase, after.DeletionTimestamp)
		}
		if n := after.Status.ContainerStatuses[0].RestartCount; n != 0 {
			r.t.Errorf("pod %s was restarted %d times", pod.Name, n)
		}
		if diff := cmp.Diff(pod.Status.ContainerStatuses, after.Status.ContainerStatuses); diff != "" {
			r.t.Errorf("the container of pod %s is another (-before +after):\n%s", pod.Name, diff)
		}
		if diff := cmp.Diff(devices[pod.Name], assigned[pod.Name]); diff != "" {
			r.t.Errorf("pod %s has other devices (-before +after):\n%s", pod.Name, diff)
		}
	}
}

// podsOf are the pods of the namespace.
func (r *rig) podsOf(namespace string) map[types.UID]*corev1.Pod {
	r.t.Helper()
	list, err := r.client.CoreV1().Pods(namespace).List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	out := map[types.UID]*corev1.Pod{}
	for i := range list.Items {
		out[list.Items[i].UID] = &list.Items[i]
	}
	return out
}

// replaced waits until each pod of a controller that has left is there again, as a pod for which the node has no room.
func (r *rig) replaced(namespace string, left, stayed map[types.UID]*corev1.Pod) {
	r.t.Helper()
	want := len(those(left, controlled))
	if want == 0 {
		r.t.Fatal("no pod of a controller was evicted")
	}
	r.awaitPods(namespace, fmt.Sprintf("%d pods without a slice", want), func(pods map[types.UID]*corev1.Pod) bool {
		others := maps.Clone(pods)
		maps.DeleteFunc(others, func(uid types.UID, _ *corev1.Pod) bool { return stayed[uid] != nil })
		return len(others) == want && all(others, func(pod *corev1.Pod) bool {
			return controlled(pod) && pod.Spec.NodeName == "" && lacks(pod, slice)
		})
	})
}

// lacks reports whether the scheduler says that no node has as much of the resource as the pod asks for.
func lacks(pod *corev1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable && strings.Contains(c.Message, "Insufficient "+name)
	})
}

// onlyCut fails the test unless the chosen GPU was cut with the fewest calls, and none was made for another.
func (r *rig) onlyCut(before []nvml.GPU, chosen int) {
	r.t.Helper()
	after, calls := r.snapshot(), r.GPUs.Calls()
	for i, gpu := range after {
		if i == chosen {
			if got, want := gpu.Geometry().String(), "3g.40gb@0 3g.40gb@4"; got != want {
				r.t.Errorf("GPU %d is cut as %s, want %s", i, got, want)
			}
			continue
		}
		if diff := cmp.Diff(before[i], gpu); diff != "" {
			r.t.Errorf("GPU %d or what runs on it is another (-before +after):\n%s", i, diff)
		}
	}
	for function, want := range map[string]int{
		gpusim.GpuInstanceDestroy: perGPU, gpusim.CreateGpuInstanceWithPlacement: 2, gpusim.SetMigMode: 0, gpusim.Reset: 0,
	} {
		if calls[function] != want {
			r.t.Errorf("%s was called %d times, want %d", function, calls[function], want)
		}
	}
}
