package judge

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
)

// dra adds a node as node does, whose GPUs NVIDIA's DRA driver offers.
func (c *pool) dra(name string, gpus ...string) *corev1.Node {
	before := len(c.Pods)
	n := c.node(name, gpus...)
	c.status[name].Owner = api.OwnerDRAStatic
	for resourceName := range n.Status.Allocatable {
		if strings.HasPrefix(string(resourceName), "nvidia.com/") {
			delete(n.Status.Allocatable, resourceName)
		}
	}
	s := resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcev1.ResourceSliceSpec{
		Driver: driver, NodeName: &n.Name, Pool: resourcev1.ResourcePool{Name: name, ResourceSliceCount: 1},
	}}
	publish := func(device, kind, profile string) {
		d := resourcev1.Device{Name: device, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
			"type": {StringValue: &kind}, "productName": {StringValue: new(h100.Name)},
		}}
		if profile != "" {
			d.Attributes["profile"] = resourcev1.DeviceAttribute{StringValue: &profile}
		}
		s.Spec.Devices = append(s.Spec.Devices, d)
	}
	named := map[string]string{} // devices by place
	for _, g := range c.status[name].GPUs {
		if !g.MIG {
			named[fmt.Sprint(g.Index)] = fmt.Sprintf("gpu-%d", g.Index)
			publish(named[fmt.Sprint(g.Index)], "gpu", "")
		}
		for _, i := range g.Instances {
			profile, _, _ := strings.Cut(i.Is, "@")
			at := fmt.Sprintf("%d/%d", g.Index, i.At)
			named[at] = fmt.Sprintf("gpu-%d-mig-%d", g.Index, i.At)
			publish(named[at], "mig", profile)
		}
	}
	c.Slices = append(c.Slices, s)
	for i := before; i < len(c.Pods); i++ {
		p := &c.Pods[i]
		p.Spec.Containers[0].Resources.Requests = nil
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new(p.Name)}}
		one := claim(p.Name, name, named[c.status[name].Held[i-before].On[0]])
		one.Namespace, one.UID = p.Namespace, types.UID("claim-"+p.Namespace+"/"+p.Name)
		one.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: p.Name, UID: p.UID}}
		c.Claims = append(c.Claims, one)
	}
	return n
}

// claims makes the pod ask by a claim of its own, of a class and with a selector.
func (c *pool) claims(p *corev1.Pod, class, selector string) {
	p.Spec.Containers[0].Resources.Requests = nil
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("template")}}
	name := p.Name + "-gpu-x"
	p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &name}}
	one := resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID, Controller: new(true)}},
	}}
	exact := &resourcev1.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1}
	if selector != "" {
		exact.Selectors = []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: selector}}}
	}
	one.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "r", Exactly: exact}}
	c.Claims = append(c.Claims, one)
}

func ofProfile(name string) string {
	return "device.attributes['gpu.nvidia.com'].profile == '" + name + "'"
}

func TestWhatAPendingPodWithAClaimNeeds(t *testing.T) {
	for name, row := range map[string]struct {
		build           func(c *pool)
		class, selector string // empty for a MIG device of 3g.40gb
		want, says      string
	}{
		"an idle device": {build: func(c *pool) { c.dra("gpu-1", "3g.40gb@0") }, want: "WillFit gpu-1"},
		"idle slices": {
			build: func(c *pool) { c.dra("gpu-1", "1g.10gb@0:team/a 1g.10gb@4") }, want: "NeedsRecut gpu-1 0:1g.10gb@0+3g.40gb@4",
		},
		"a pod has to leave": {
			build: func(c *pool) { c.dra("gpu-1", "3g.40gb@0:team/a 1g.10gb@4:team/b") },
			want:  "NeedsDrain gpu-1 0:3g.40gb@0+3g.40gb@4 leave team/b (1)",
		},
		"a MIG device of any profile": {
			build: func(c *pool) { c.dra("gpu-1", "3g.40gb@0:team/a") }, class: migClass, selector: "true",
			want: "NeedsRecut gpu-1 0:3g.40gb@0+1g.10gb@4",
		},
		"a profile that no GPU has": {
			build: func(c *pool) { c.dra("gpu-1", "off") }, class: migClass, selector: ofProfile("3g.71gb"),
			want: "TooLarge", says: "7g.80gb",
		},
		"a class that is not there": {
			build: func(c *pool) { c.dra("gpu-1", "3g.40gb@0") }, class: "gpu.example.com", selector: "true",
			want: "NotGPU", says: "DeviceClass gpu.example.com, which is not there",
		},
		"a device with a taint": {
			build: func(c *pool) {
				c.dra("gpu-1", "3g.40gb@0")
				c.Slices[0].Spec.Devices[0].Taints = []resourcev1.DeviceTaint{{Key: "gpuslice.io/unhealthy", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
			},
			want: "NotGPU", says: "taint gpuslice.io/unhealthy",
		},
		"a plugin's node beside it": {
			build: func(c *pool) { c.node("gpu-1", "off"); c.dra("gpu-2", "off") }, want: "NeedsRecut gpu-2 0:3g.40gb@0",
		},
		"a pod that the agent has not seen yet": {
			build: func(c *pool) {
				c.dra("gpu-1", "1g.10gb@0:team/a 1g.10gb@4")
				c.status["gpu-1"].Held = []api.Held{}
			},
			want: "NotKnown", says: "which devices team/a has",
		},
		"claims that may not be read": {
			build: func(c *pool) { c.dra("gpu-1", "off"); c.Unknown = errNotKnown }, want: "NotKnown", says: "not known",
		},
		"no free device, and a silent agent": {
			build: func(c *pool) { c.dra("gpu-1", "3g.40gb@0:team/a"); c.status["gpu-1"] = &api.Status{} }, want: "NotKnown", says: "gpu-1: no agent has reported its GPUs",
		},
		"the driver cuts": {
			build: func(c *pool) {
				c.dra("gpu-1", "1g.10gb@0:team/a 1g.10gb@4:team/b 1g.10gb@5:team/c")
				c.status["gpu-1"].Owner = api.OwnerDRADynamic
			},
			want: "NeedsDrain gpu-1 leave team/a (1)", says: "NVIDIA's DRA driver cuts a GPU of node gpu-1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &pool{t: t, status: map[string]*api.Status{}}
			c.Classes = []resourcev1.DeviceClass{class()}
			row.build(c)
			if row.class == "" {
				row.class, row.selector = migClass, ofProfile("3g.40gb")
			}
			p := running1("team", "waits", "", "cpu")
			c.claims(p, row.class, row.selector)
			c.Pods = append(c.Pods, *p)
			got := c.moves(nil, p)[0]
			if line(got) != row.want || !strings.Contains(got.Reason, row.says) {
				t.Errorf("got %q, want %q: %s", line(got), row.want, got.Reason)
			}
		})
	}
}

// Where DeviceClasses may not be read, one may have the resource.
func TestAResourceIsNoClasssOnlyWhereAllClassesAreKnown(t *testing.T) {
	for unread, want := range map[error]string{nil: "NotGPU", errNotKnown: "NotKnown"} {
		c := &pool{t: t, status: map[string]*api.Status{}}
		c.dra("gpu-1", "3g.40gb@0")
		c.Slices, c.Unknown = nil, unread
		if got := c.moves(nil, running1("team", "a", "", "nvidia.com/mig-3g.40gb"))[0]; line(got) != want {
			t.Errorf("%v: %s, want %s: %s", unread, line(got), want, got.Reason)
		}
	}
}

// A node may have a resource from a plugin, and another by a class.
func TestAResourceOfAClassIsJudgedNodeByNode(t *testing.T) {
	c := &pool{t: t, status: map[string]*api.Status{}}
	mig := class()
	mig.Name, mig.Spec.ExtendedResourceName = "mig3", new("nvidia.com/mig-3g.40gb")
	mig.Spec.Selectors = append(mig.Spec.Selectors, resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: ofProfile("3g.40gb")}})
	c.Classes = []resourcev1.DeviceClass{mig}
	c.node("gpu-1", "3g.40gb@0:team/a 1g.10gb@4:team/a2")
	c.dra("gpu-2", "1g.10gb@0:team/b 1g.10gb@4")
	var pending []*corev1.Pod
	for i := range 3 {
		p := running1("team", fmt.Sprint("p", i), "", "nvidia.com/mig-3g.40gb")
		pending = append(pending, p)
		c.Pods = append(c.Pods, *p)
	}
	var got []string
	for _, m := range c.moves(nil, pending...) {
		got = append(got, line(m))
	}
	want := "NeedsRecut gpu-2 0:1g.10gb@0+3g.40gb@4\nNeedsDrain gpu-1 0:3g.40gb@0+3g.40gb@4 leave team/a2 (1)\nNeedsDrain gpu-2 0:3g.40gb@0+3g.40gb@4 leave team/b (1)"
	if strings.Join(got, "\n") != want {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
}
