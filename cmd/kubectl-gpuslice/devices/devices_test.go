package devices_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
)

// slice is one of a node's pool, whose devices are GPUs but for those with a profile.
func slice(node string, generation, of int64, more ...func(*resourcev1.ResourceSlice)) resourcev1.ResourceSlice {
	s := resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{
		Driver: devices.Driver, NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, Generation: generation, ResourceSliceCount: of},
	}}
	for _, change := range more {
		change(&s)
	}
	return s
}

func has(name, profile string) func(*resourcev1.ResourceSlice) {
	return func(s *resourcev1.ResourceSlice) {
		d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"type": {StringValue: new("gpu")}}}
		if profile != "" {
			d.Attributes["type"] = resourcev1.DeviceAttribute{StringValue: new("mig")}
			d.Attributes["gpu.nvidia.com/profile"] = resourcev1.DeviceAttribute{StringValue: &profile}
		}
		s.Spec.Devices = append(s.Spec.Devices, d)
	}
}

func consuming(s *resourcev1.ResourceSlice) {
	s.Spec.Devices[len(s.Spec.Devices)-1].ConsumesCounters = []resourcev1.DeviceCounterConsumption{{CounterSet: "gpu-0-counter-set"}}
}

func shared(s *resourcev1.ResourceSlice) {
	s.Spec.SharedCounters = []resourcev1.CounterSet{{Name: "gpu-0-counter-set"}}
}

// of gives the last device the type.
func of(kind string) func(*resourcev1.ResourceSlice) {
	return func(s *resourcev1.ResourceSlice) {
		s.Spec.Devices[len(s.Spec.Devices)-1].Attributes["type"] = resourcev1.DeviceAttribute{StringValue: &kind}
	}
}

func inPool(name string) func(*resourcev1.ResourceSlice) {
	return func(s *resourcev1.ResourceSlice) { s.Spec.Pool.Name = name }
}

func by(driver string) func(*resourcev1.ResourceSlice) {
	return func(s *resourcev1.ResourceSlice) { s.Spec.Driver = driver }
}

var (
	whole = devices.Kind{Class: "gpu.nvidia.com"}
	third = devices.Kind{Class: "mig.nvidia.com", Profile: "3g.40gb"}
)

func TestNodesOfferWhatTheirSlicesSay(t *testing.T) {
	for name, row := range map[string]struct {
		slices []resourcev1.ResourceSlice
		want   map[string]devices.Node
	}{
		"static": {
			[]resourcev1.ResourceSlice{slice("a", 1, 1, has("gpu-0", ""), has("gpu-1-mig-3g40gb-9-0", "3g.40gb"), has("gpu-1-mig-3g40gb-9-4", "3g.40gb"))},
			map[string]devices.Node{"a": {Complete: true, Offers: map[devices.Kind]int{whole: 1, third: 2}}},
		},
		"counters in a slice of their own": {
			[]resourcev1.ResourceSlice{slice("a", 1, 2, shared), slice("a", 1, 2, has("gpu-0", ""))},
			map[string]devices.Node{"a": {Dynamic: true, Complete: true, Offers: map[devices.Kind]int{whole: 1}}},
		},
		"a device that takes of counters": {
			[]resourcev1.ResourceSlice{slice("a", 1, 2, has("gpu-0", ""), consuming)},
			map[string]devices.Node{"a": {Dynamic: true, Offers: map[devices.Kind]int{whole: 1}}},
		},
		"an older generation": {
			[]resourcev1.ResourceSlice{slice("a", 2, 1, has("gpu-0", "")), slice("a", 1, 1, has("gpu-0", ""), has("gpu-1", ""))},
			map[string]devices.Node{"a": {Complete: true, Offers: map[devices.Kind]int{whole: 1}}},
		},
		"a GPU that is offered to virtual machines, too": {
			[]resourcev1.ResourceSlice{slice("a", 1, 1, has("gpu-0", ""), has("gpu-vfio-0", ""), of("vfio"))},
			map[string]devices.Node{"a": {Complete: true, Offers: map[devices.Kind]int{whole: 1}}},
		},
		"a later generation of another node's pool of the same name": {
			[]resourcev1.ResourceSlice{slice("a", 1, 1, has("gpu-0", "")), slice("b", 9, 1, has("gpu-0", ""), inPool("a"))},
			map[string]devices.Node{
				"a": {Complete: true, Offers: map[devices.Kind]int{whole: 1}}, "b": {Complete: true, Offers: map[devices.Kind]int{whole: 1}},
			},
		},
		"another driver, and one of no node": {
			[]resourcev1.ResourceSlice{slice("a", 1, 1, has("gpu-0", ""), by("compute-domain.nvidia.com")), slice("", 1, 1, has("gpu-0", ""))},
			map[string]devices.Node{},
		},
	} {
		if diff := cmp.Diff(row.want, devices.ByNode(row.slices)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestResourcesAreNamedAsTheDevicePluginNamesThem(t *testing.T) {
	for kind, want := range map[devices.Kind]string{
		whole: "nvidia.com/gpu", third: "nvidia.com/mig-3g.40gb", {Class: "mig.nvidia.com", Profile: "1g.10gb+me"}: "nvidia.com/mig-1g.10gb.me",
	} {
		if got := kind.Resource(); got != want {
			t.Errorf("%v: %s, want %s", kind, got, want)
		}
	}
}
