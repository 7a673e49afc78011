package judge

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	driver   = "gpu.nvidia.com"
	migClass = "mig.nvidia.com"
	slice    = "nvidia.com/slice" // the extended resource of migClass
)

// class is the DeviceClass of MIG devices.
func class() resourcev1.DeviceClass {
	return resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: migClass}, Spec: resourcev1.DeviceClassSpec{
		ExtendedResourceName: new(slice),
		Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{
			Expression: "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'",
		}}},
	}}
}

// classFor is a DeviceClass that stands for the extended resource.
func classFor(resourceName string) resourcev1.DeviceClass {
	out := class()
	out.Name, out.Spec.ExtendedResourceName = "for", &resourceName
	return out
}

// devicesOn are what NVIDIA's DRA driver offers of the node, each a MIG device but those with the name of a whole GPU.
func devicesOn(node string, names ...string) resourcev1.ResourceSlice {
	s := resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-slice"}, Spec: resourcev1.ResourceSliceSpec{
		Driver: driver, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1},
	}}
	for _, name := range names {
		kind := "mig"
		if !strings.Contains(name, "mig") {
			kind = "gpu"
		}
		s.Spec.Devices = append(s.Spec.Devices, resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: &kind}}})
	}
	return s
}

// claim is a claim of one MIG device, which has that device and is reserved for these pods.
func claim(name, node, device string, pods ...string) resourcev1.ResourceClaim {
	c := resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)}}
	c.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{
		DeviceClassName: migClass, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
	}}}
	c.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
		Results: []resourcev1.DeviceRequestAllocationResult{{Request: "r", Driver: driver, Pool: node, Device: device}},
	}}
	for _, pod := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod, UID: types.UID("uid-" + pod)})
	}
	return c
}

// by has a pod ask by the claim; made is whether the claim was made for it from a template.
func by(claim string, made bool) func(p *corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
		if made {
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("slices")}}
			p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim}}
		}
	}
}

// byResource has a pod ask for one extended resource.
func byResource(p *corev1.Pod) {
	one := corev1.ResourceList{slice: resource.MustParse("1")}
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Limits: one, Requests: one}
}

// Claims find devices as kube-scheduler would find them: by class, by what is free once the pods have left, by taints; and no allocatable says so.
func TestPodsWithClaimsHaveADeviceElsewhereOrNot(t *testing.T) {
	const (
		both  = "2 pods have a place on other nodes: team/a; team/b\n"
		onlyA = "1 pod has a place on other nodes: team/a\nteam/b fits on no other node: 1 node: no free devices for its claims\n"
		none  = "team/a fits on no other node: 1 node: no free devices for its claims\n"
	)
	own := []corev1.Pod{pod("a", by("a-gpu", true)), pod("b", by("b-gpu", true))}
	claims := []resourcev1.ResourceClaim{claim("a-gpu", "gpu-1", "gpu-0-mig-0", "a"), claim("b-gpu", "gpu-1", "gpu-0-mig-1", "b")}
	for name, row := range map[string]struct {
		pods    []corev1.Pod
		claims  []resourcev1.ResourceClaim
		devices []string // of gpu-2
		change  func(c *Cluster)
		want    string
	}{
		"free devices":    {own, claims, []string{"gpu-0-mig-0", "gpu-0-mig-1"}, nil, both},
		"one free device": {own, claims, []string{"gpu-0-mig-0"}, nil, onlyA},
		"a whole GPU":     {own, claims, []string{"gpu-0"}, nil, none},
		"no devices":      {own, claims, nil, nil, none},
		"one that another pod has": {own, claims, []string{"gpu-0-mig-0"}, func(c *Cluster) {
			c.Claims = append(c.Claims[:2:2], claim("other", "gpu-2", "gpu-0-mig-0", "other"))
		}, none},
		"one that a rule has closed": {own, claims, []string{"gpu-0-mig-0", "gpu-0-mig-1"}, func(c *Cluster) {
			c.Rules = []resourcev1.DeviceTaintRule{{ObjectMeta: metav1.ObjectMeta{Name: "closed"}, Spec: resourcev1.DeviceTaintRuleSpec{
				DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: new(driver), Pool: new("gpu-2"), Device: new("gpu-0-mig-1")},
				Taint:          resourcev1.DeviceTaint{Key: "example.com/sick", Effect: resourcev1.DeviceTaintEffectNoSchedule},
			}}}
		}, onlyA},
		"a claim of both": {
			[]corev1.Pod{pod("a", by("shared", false)), pod("b", by("shared", false))},
			[]resourcev1.ResourceClaim{claim("shared", "gpu-1", "gpu-0-mig-0", "a", "b")},
			[]string{"gpu-0-mig-0"},
			nil, both,
		},
		"a claim that a pod which stays has, too": {
			[]corev1.Pod{pod("a", by("shared", false))},
			[]resourcev1.ResourceClaim{claim("shared", "gpu-1", "gpu-0-mig-0", "a", "stays")},
			[]string{"gpu-0-mig-0"},
			nil, "team/a fits on no other node: 1 node: its claim shared has devices of another node, as other pods use it\n",
		},
		"a resource of a class": {[]corev1.Pod{pod("a", byResource), pod("b", byResource)}, nil, []string{"gpu-0-mig-0"}, nil, onlyA},
		"a resource of a plugin": {[]corev1.Pod{pod("a", byResource), pod("b", byResource)}, nil, nil, func(c *Cluster) {
			c.Nodes[1].Status.Allocatable[slice] = resource.MustParse("1")
		}, "1 pod has a place on other nodes: team/a\nteam/b fits on no other node: 1 node: too little free nvidia.com/slice\n"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{
				Nodes: []corev1.Node{node("gpu-1", "0"), node("gpu-2", "0")}, Pods: row.pods, Claims: row.claims, Classes: []resourcev1.DeviceClass{class()},
				Slices: []resourcev1.ResourceSlice{devicesOn("gpu-2", row.devices...)},
			}
			if row.change != nil {
				row.change(c)
			}
			var names []string
			for _, p := range row.pods {
				names = append(names, p.Name)
			}
			if said, _ := leave(t, c, names...); !strings.HasPrefix(said, row.want) {
				t.Errorf("want\n%s, got\n%s", row.want, said)
			}
		})
	}
}

// Where the devices of claims are not known, it is not known whether the pods of a budget leave. The verdict is then neither that they do nor that they do not.
func TestAnUnknownPlaceIsNoVerdict(t *testing.T) {
	const unknown = "pods with a budget may have no place: team/a (the devices of its claims are not known)"
	for name, row := range map[string]struct {
		unread error
		budget int32
		want   string // of what is not known; empty if the verdict is known
	}{
		"no right to list them":      {errors.New("listing ResourceSlices: forbidden"), 1, unknown},
		"a claim that is not made":   {nil, 1, unknown},
		"a budget that lets both go": {nil, 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{
				Nodes: []corev1.Node{node("gpu-1", "0"), node("gpu-2", "0")}, Pods: []corev1.Pod{pod("a", by("a-gpu", true)), pod("b", by("b-gpu", true))},
				Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", row.budget)}, Unknown: row.unread,
			}
			said, of := leave(t, c, "a", "b")
			if of.Stuck != "" || !strings.HasPrefix(of.Unknown, row.want) || row.want == "" && of.Unknown != "" {
				t.Errorf("want %q, got %+v:\n%s", row.want, of, said)
			}
			if len(of.Placed)+len(of.Homeless) > 0 || !strings.Contains(said, "whether 2 pods more would fit elsewhere is not known") {
				t.Errorf("it says that they fit, or that they do not:\n%s", said)
			}
		})
	}
}
