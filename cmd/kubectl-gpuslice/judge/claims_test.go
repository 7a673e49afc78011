package judge

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

const (
	driver   = "gpu.nvidia.com"
	migClass = "mig.nvidia.com"
	slice    = "nvidia.com/slice" // the extended resource of migClass
)

// add creates the object, as a cluster has it.
func add(w *world, object runtime.Object) {
	w.T.Helper()
	if err := w.Client.Tracker().Add(object); err != nil {
		w.T.Fatal(err)
	}
}

// serves has NVIDIA's DRA driver offer these devices of the node, each a MIG device but those whose name is of a whole GPU.
func serves(w *world, node string, names ...string) {
	w.T.Helper()
	s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-slice"}, Spec: resourcev1.ResourceSliceSpec{
		Driver: driver, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1},
	}}
	for _, name := range names {
		kind := "mig"
		if !strings.Contains(name, "mig") {
			kind = "gpu"
		}
		s.Spec.Devices = append(s.Spec.Devices, resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: &kind}}})
	}
	add(w, s)
}

// claim makes a claim of one MIG device, which has that device and is reserved for these pods.
func claim(w *world, name, node, device string, pods ...string) {
	w.T.Helper()
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)}}
	c.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{
		DeviceClassName: migClass, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
	}}}
	c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
		Results: []resourcev1.DeviceRequestAllocationResult{{Request: "r", Driver: driver, Pool: node, Device: device}},
	}}
	for _, pod := range pods {
		uid := types.UID("of-" + pod)
		if p, err := w.Client.CoreV1().Pods("team").Get(w.T.Context(), pod, metav1.GetOptions{}); err == nil {
			uid = p.UID
		}
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: uid})
	}
	add(w, c)
}

// asksBy has a pod of gpu-1 ask by the claim, or by one that was made for it from a template.
func asksBy(w *world, pod, claim string, made bool) {
	w.T.Helper()
	w.AsksBy(pod, func(p *corev1.Pod) {
		p.UID = types.UID("uid-" + pod)
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		if made {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("slices")}}
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim}}
		}
	})
}

// asksForSlice has a pod of gpu-1 ask for one extended resource.
func asksForSlice(w *world, pod string) {
	w.T.Helper()
	w.AsksBy(pod, func(p *corev1.Pod) {
		p.UID = types.UID("uid-" + pod)
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{slice: resource.MustParse("1")}, Requests: corev1.ResourceList{slice: resource.MustParse("1")}}
	})
}

// Claims find devices as kube-scheduler would find them: by class, by what is free once the pods have left, by taints; and no allocatable says so.
func TestPodsWithClaimsHaveADeviceElsewhereOrNot(t *testing.T) {
	const (
		both  = "gpu-1: 2 pods have a place on other nodes: team/a; team/b\n"
		onlyA = "gpu-1: 1 pod has a place on other nodes: team/a\ngpu-1: team/b fits on no other node: 1 node: no free devices for its claims\n"
		none  = "gpu-1: team/a fits on no other node: 1 node: no free devices for its claims\n"
	)
	own := func(w *world) {
		for pod, device := range map[string]string{"a": "gpu-0-mig-0", "b": "gpu-0-mig-1"} {
			asksBy(w, pod, pod+"-gpu", true)
			claim(w, pod+"-gpu", "gpu-1", device, pod)
		}
	}
	byResource := func(w *world) { asksForSlice(w, "a"); asksForSlice(w, "b") }
	for name, row := range map[string]struct {
		asks func(w *world)
		gpu2 func(w *world)
		want string
	}{
		"free devices":             {own, func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0", "gpu-0-mig-1") }, both},
		"one free device":          {own, func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0") }, onlyA},
		"a whole GPU":              {own, func(w *world) { serves(w, "gpu-2", "gpu-0") }, none},
		"no devices":               {own, func(*world) {}, none},
		"one that another pod has": {own, func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0"); claim(w, "other", "gpu-2", "gpu-0-mig-0", "other") }, none},
		"one that a rule has closed": {own, func(w *world) {
			serves(w, "gpu-2", "gpu-0-mig-0", "gpu-0-mig-1")
			add(w, &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "closed"}, Spec: resourcev1.DeviceTaintRuleSpec{
				DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: new(driver), Pool: new("gpu-2"), Device: new("gpu-0-mig-1")},
				Taint:          resourcev1.DeviceTaint{Key: "example.com/sick", Effect: resourcev1.DeviceTaintEffectNoSchedule},
			}})
		}, onlyA},
		"a claim of both": {
			func(w *world) {
				asksBy(w, "a", "shared", false)
				asksBy(w, "b", "shared", false)
				claim(w, "shared", "gpu-1", "gpu-0-mig-0", "a", "b")
			},
			func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0") }, both,
		},
		"a claim that a pod which stays has, too": {
			func(w *world) {
				asksBy(w, "a", "shared", false)
				claim(w, "shared", "gpu-1", "gpu-0-mig-0", "a", "stays")
			},
			func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0") },
			"gpu-1: team/a fits on no other node: 1 node: its claim shared has devices of another node, as other pods use it\n",
		},
		"a resource of a class": {byResource, func(w *world) { serves(w, "gpu-2", "gpu-0-mig-0") }, onlyA},
		"a resource of a plugin": {byResource, func(w *world) {
			w.Edit("gpu-2", func(n *corev1.Node) { n.Status.Allocatable[slice] = resource.MustParse("1") })
		}, "gpu-1: 1 pod has a place on other nodes: team/a\ngpu-1: team/b fits on no other node: 1 node: too little free nvidia.com/slice\n"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				add(w, &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: migClass}, Spec: resourcev1.DeviceClassSpec{
					ExtendedResourceName: new(slice),
					Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
						Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'",
					}}},
				}})
				w.Edit("gpu-2", func(n *corev1.Node) { offers(n, "0") })
				row.asks(w)
				row.gpu2(w)
				pods := []string{"team/a"}
				if _, err := w.Client.CoreV1().Pods("team").Get(w.T.Context(), "b", metav1.GetOptions{}); err == nil {
					pods = append(pods, "team/b")
				}
				if said, _ := leave(w, pods...); !strings.HasPrefix(said, row.want) {
					t.Errorf("want\n%s, got\n%s", row.want, said)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}

// Where the devices of claims are not known, it is not known whether the pods of a budget leave. The verdict is then neither that they do nor that they do not.
func TestAnUnknownPlaceIsNoVerdict(t *testing.T) {
	forbidden := func(what string) func(w *world) {
		return func(w *world) {
			asksBy(w, "a", "a-gpu", true)
			asksBy(w, "b", "b-gpu", true)
			w.Client.PrependReactor("list", what, func(k8stesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: what}, "", nil)
			})
		}
	}
	for name, row := range map[string]struct {
		asks   func(w *world)
		budget int32
		want   string // of what is not known; empty if the verdict is known
	}{
		"no right to list the classes": {forbidden("deviceclasses"), 1, "it is not known where pods with a budget would go: team/a (the devices of its claims are not known)"},
		"no right to list the claims":  {forbidden("resourceclaims"), 1, "it is not known where pods with a budget would go: team/a (the devices of its claims are not known)"},
		"no right to list the slices":  {forbidden("resourceslices"), 1, "it is not known where pods with a budget would go: team/a (the devices of its claims are not known)"},
		"a claim that is not made": {
			func(w *world) { asksBy(w, "a", "a-gpu", true); asksBy(w, "b", "b-gpu", true) }, 1,
			"it is not known where pods with a budget would go: team/a (the devices of its claims are not known)",
		},
		"a budget that lets both go": {forbidden("resourceclaims"), 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Edit("gpu-2", func(n *corev1.Node) { offers(n, "0") })
				row.asks(w)
				budget(w, "x", "x", row.budget)
				said, verdict := judged(w, "team/a", "team/b")
				if verdict.Stuck != "" || !strings.HasPrefix(verdict.Unknown, row.want) || row.want == "" && verdict.Unknown != "" {
					t.Errorf("want %q, got %+v:\n%s", row.want, verdict, said)
				}
				if strings.Contains(said, " place on other nodes") || strings.Contains(said, "fits on no other node") || !strings.Contains(said, "whether 2 pods more would fit elsewhere is not known") {
					t.Errorf("it says that they fit, or that they do not:\n%s", said)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}
