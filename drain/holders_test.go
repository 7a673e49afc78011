package drain_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain"
)

const (
	gpu   = "nvidia.com/gpu"
	mig1g = "nvidia.com/mig-1g.10gb"
)

func limits(name string, n int64) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(n, resource.DecimalSI)}}
}

// pod is a running pod "team/<name>" with UID "uid-<name>".
func pod(name string, change ...func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

func container(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Resources: r}) }
}

func initContainer(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Resources: r})
	}
}

func sidecar(r corev1.ResourceRequirements) func(*corev1.Pod) {
	always := corev1.ContainerRestartPolicyAlways
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Resources: r, RestartPolicy: &always})
	}
}

func ephemeral(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers,
			corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Resources: r}})
	}
}

func claiming(p *corev1.Pod) {
	p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "gpu"})
}

func phase(ph corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = ph }
}

// given is what kubelet answers when it gave the ids of one resource to "team/<name>".
func given(name, resource string, ids ...string) drain.Assignments {
	return drain.Assignments{{Namespace: "team", Name: name}: {resource: ids}}
}

func TestGPUPodsFindsEveryPodThatMayHoldAGPU(t *testing.T) {
	requests := corev1.ResourceRequirements{Requests: limits(gpu, 1).Limits}
	nothing := drain.Assignments{}
	found := func(devices []string, known bool, requests map[string]int64, by ...drain.Source) []drain.Pod {
		return []drain.Pod{{Namespace: "team", Name: "a", UID: "uid-a", Devices: devices, DevicesKnown: known, Requests: requests, Sources: by}}
	}
	const spec, claim, kubelet = drain.SourceSpec, drain.SourceClaim, drain.SourceKubelet
	one := map[string]int64{gpu: 1}
	for _, c := range []struct {
		name     string
		pod      corev1.Pod
		assigned drain.Assignments
		want     []drain.Pod
	}{
		{"asks for no GPU", pod("a", container(limits("cpu", 4))), nothing, nil},
		{"asks for none of them", pod("a", container(limits(gpu, 0))), nothing, nil},
		{"asks for another vendor's", pod("a", container(limits("amd.com/gpu", 1))), nothing, nil},
		{
			"has what its limits ask for", pod("a", container(limits(gpu, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{
			"has what its requests ask for", pod("a", container(requests)), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{
			"has MIG devices, sorted", pod("a", container(limits(mig1g, 2))), given("a", mig1g, "MIG-2", "MIG-1"),
			found([]string{"MIG-1", "MIG-2"}, true, map[string]int64{mig1g: 2}, spec, kubelet),
		},
		{
			"has shares of one GPU, which is named once", pod("a", container(limits(gpu, 2))), given("a", gpu, "GPU-1::0", "GPU-1::13"),
			found([]string{"GPU-1"}, true, map[string]int64{gpu: 2}, spec, kubelet),
		},
		{
			"asks through containers, a sidecar and an init container that runs before them",
			pod("a", sidecar(limits(gpu, 1)), initContainer(limits(gpu, 2)), container(limits(gpu, 1)), container(limits(gpu, 2))),
			given("a", gpu, "GPU-1", "GPU-2", "GPU-3", "GPU-4"),
			found([]string{"GPU-1", "GPU-2", "GPU-3", "GPU-4"}, true, map[string]int64{gpu: 4}, spec, kubelet),
		},
		{
			"asks for most in an init container, beside the sidecar before it",
			pod("a", sidecar(limits(gpu, 1)), initContainer(limits(gpu, 4)), container(limits(gpu, 1))), nothing,
			found(nil, false, map[string]int64{gpu: 5}, spec),
		},
		{
			"asks in an init container only", pod("a", initContainer(limits(gpu, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{"asks in an ephemeral container", pod("a", ephemeral(limits(gpu, 1))), nothing, found(nil, false, one, spec)},
		{"was given one without asking", pod("a"), given("a", gpu, "GPU-1"), found([]string{"GPU-1"}, true, nil, kubelet)},
		{"was given a share without asking", pod("a"), given("a", gpu, "GPU-1::3"), found([]string{"GPU-1"}, true, nil, kubelet)},
		{"kubelet could not be asked", pod("a", container(limits(gpu, 1))), nil, found(nil, false, one, spec)},
		{"is bound and not yet admitted", pod("a", container(limits(gpu, 1)), phase(corev1.PodPending)), nothing, found(nil, false, one, spec)},
		{
			"lacks a device of one of its resources", pod("a", container(limits(gpu, 1)), container(limits(mig1g, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, false, map[string]int64{gpu: 1, mig1g: 1}, spec, kubelet),
		},
		{
			"has a device that is not named by UUID", pod("a", container(limits(gpu, 1))), given("a", gpu, "0"),
			found(nil, false, one, spec, kubelet),
		},
		{
			"has a device that is no GPU", pod("a", container(limits("nvidia.com/hostdev", 1))), given("a", "nvidia.com/hostdev", "0000:17:00.0"),
			found(nil, true, nil, kubelet),
		},
		{"has a claim", pod("a", claiming), nothing, found(nil, false, nil, claim)},
		{
			"has a claim and a device", pod("a", claiming, container(limits(gpu, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, false, one, spec, kubelet, claim),
		},
		{"has succeeded", pod("a", container(limits(gpu, 1)), phase(corev1.PodSucceeded)), given("a", gpu, "GPU-1"), nil},
		{"has failed", pod("a", container(limits(gpu, 1)), phase(corev1.PodFailed)), given("a", gpu, "GPU-1"), nil},
		{
			"is listed by kubelet alone", pod("cpu-only"), given("a", gpu, "GPU-1"),
			[]drain.Pod{{
				Namespace: "team", Name: "a", Sources: []drain.Source{kubelet}, Devices: []string{"GPU-1"}, DevicesKnown: true,
				Terminating: true, Unlisted: true,
			}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, drain.GPUPods([]corev1.Pod{c.pod}, c.assigned, nil)); diff != "" {
				t.Errorf("GPUPods (-want +got):\n%s", diff)
			}
		})
	}
}

func TestGPUPodsTellsHowAPodCanLeave(t *testing.T) {
	ends := metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	controller := true
	pods := []corev1.Pod{
		pod("static", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"}
		}),
		pod("daemon", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Name: "d", Controller: &controller}}
		}),
		pod("leaving", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.DeletionTimestamp, p.Finalizers, p.Labels = &ends, []string{"example.io/wait"}, map[string]string{"app": "web"}
		}),
		pod("owned", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "r", Controller: &controller}}
		}),
	}
	one, spec := map[string]int64{gpu: 1}, []drain.Source{drain.SourceSpec}
	want := []drain.Pod{
		{Namespace: "team", Name: "daemon", UID: "uid-daemon", Requests: one, Sources: spec, Daemon: true},
		{
			Namespace: "team", Name: "leaving", UID: "uid-leaving", Requests: one, Sources: spec, Labels: map[string]string{"app": "web"},
			Terminating: true, GraceEnds: ends.Time, Finalizers: []string{"example.io/wait"},
		},
		{Namespace: "team", Name: "owned", UID: "uid-owned", Requests: one, Sources: spec},
		{Namespace: "team", Name: "static", UID: "uid-static", Requests: one, Sources: spec, Mirror: true},
	}
	if diff := cmp.Diff(want, drain.GPUPods(pods, nil, nil)); diff != "" {
		t.Errorf("GPUPods (-want +got):\n%s", diff)
	}
}

func TestPodHoldsWhatItWasGivenAndEverythingIfNobodyKnows(t *testing.T) {
	known := drain.Pod{Devices: []string{"MIG-1", "MIG-2"}, DevicesKnown: true}
	unknown := drain.Pod{}
	for _, c := range []struct {
		name    string
		pod     drain.Pod
		devices map[string]bool
		want    bool
	}{
		{"one of its own", known, map[string]bool{"MIG-2": true, "MIG-9": true}, true},
		{"somebody else's", known, map[string]bool{"MIG-9": true}, false},
		{"one that the caller excludes", known, map[string]bool{"MIG-1": false}, false},
		{"any, if unknown", unknown, map[string]bool{"MIG-9": true}, true},
		{"nothing that is asked about, though unknown", unknown, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := c.pod.Holds(c.devices); got != c.want {
				t.Errorf("Holds is %v, want %v", got, c.want)
			}
		})
	}
}

func TestDrainableIsWhateverAnAPIRequestMovesAway(t *testing.T) {
	pod := func(name string, change func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
		change(&p)
		return p
	}
	owned := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "o", Controller: ptr.To(true)}}
		}
	}
	var names []string
	for _, p := range drain.Drainable([]corev1.Pod{
		pod("alone", func(*corev1.Pod) {}),
		pod("of-a-deployment", owned("ReplicaSet")),
		pod("of-a-daemonset", owned("DaemonSet")),
		pod("static", func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "hash"} }),
		pod("ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		pod("leaving", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }),
	}) {
		names = append(names, p.Name)
	}
	if diff := cmp.Diff([]string{"alone", "of-a-deployment", "leaving"}, names); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
}
