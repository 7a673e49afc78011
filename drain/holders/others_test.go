package holders_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// ofOther is a slice of another driver than NVIDIA's, as the agent keeps it.
func ofOther(driver string, devices ...resourcev1.Device) resourcev1.ResourceSlice {
	s := slice("other", 3, 1, devices...)
	s.Spec.Driver = driver
	holders.ShortenSlice(&s)
	return s
}

// Another driver may name the attributes of its devices as it likes.
func TestWhichDevicesOfOtherDriversAreGPUs(t *testing.T) {
	t.Parallel()
	const hami, bus = "hami-core-gpu.project-hami.io", "resource.kubernetes.io/pciBusID"
	gpus := []nvml.GPU{{UUID: "GPU-a", PCI: "0000:07:00.0"}, {UUID: "GPU-b", PCI: "0000:0f:00.0", Instances: []nvml.Instance{
		{Devices: []nvml.Device{{UUID: "MIG-b"}}}, {Devices: []nvml.Device{{UUID: "MIG-c"}}},
	}}, {PCI: ""}}
	for name, row := range map[string]struct {
		slices []resourcev1.ResourceSlice
		want   string // what a pod with a claim of it holds
	}{
		"by its UUID":           {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "uuid", "GPU-a"))}, "GPU-a"},
		"by a UUID of any name": {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "example.com/gpuUUID", "GPU-b"))}, "GPU-b"},
		"by its PCI address":    {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", bus, "0000:0F:00.0"))}, "GPU-b"},
		"a MIG device":          {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "parentUUID", "GPU-b", "uuid", "MIG-b", bus, "0000:0f:00.0"))}, "MIG-b"},
		"two MIG devices":       {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "one", "MIG-c", "other", "MIG-b"))}, "GPU-b"},
		"two GPUs":              {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "one", "GPU-a", "other", "MIG-b"))}, "any"},
		"slices do not agree":   {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "uuid", "GPU-a")), ofOther(hami, offered("d", "uuid", "GPU-b"))}, "any"},
		"a GPU of another node": {[]resourcev1.ResourceSlice{ofOther(hami, offered("d", "uuid", "GPU-z", bus, "0000:99:00.0"))}, "nothing"},
		"a network device":      {[]resourcev1.ResourceSlice{ofOther("dra.net", offered("d", bus, "0000:17:00.0", "ifName", "eth0"))}, "nothing"},
		"a compute domain":      {[]resourcev1.ResourceSlice{ofOther("compute-domain.nvidia.com", offered("d", "type", "channel"))}, "nothing"},
		"of the same name, of another pool": {[]resourcev1.ResourceSlice{func() resourcev1.ResourceSlice {
			s := ofOther(hami, offered("d", "uuid", "GPU-a"))
			s.Spec.Pool.Name = "elsewhere"
			return s
		}()}, "nothing"},
		"too many slices": {[]resourcev1.ResourceSlice{func() resourcev1.ResourceSlice {
			s := slice("other", 1, 1, offered("d", "uuid", "GPU-a"))
			s.Spec.Driver = hami
			holders.EmptySlice(&s)
			holders.ShortenSlice(&s)
			if !holders.IsEmptied(&s) {
				t.Error("a slice that was emptied looks as if it had no device")
			}
			return s
		}()}, "nothing"},
	} {
		driver := row.slices[0].Spec.Driver
		read := holders.Claimed{UUIDs: holders.OfOthers(row.slices, gpus), Claims: holders.Claims{{Pod: "uid-a", Name: "c"}: holders.ReadClaim(claimOf(driver + "/d"))}}
		a := pod("a", claims("c"))
		for how, prepared := range map[string]holders.Assignments{"allocated": {}, "prepared": given("a", "claim c", driver+"/node/d")} {
			if got := devicesOf(holders.GPUPods([]corev1.Pod{a}, prepared, nil, read, nil)); got != row.want {
				t.Errorf("%s, %s: the pod holds %s, want %s", name, how, got, row.want)
			}
		}
		both := holders.Claimed{UUIDs: read.UUIDs, Claims: holders.Claims{{Pod: "uid-a", Name: "c"}: holders.ReadClaim(claimOf("admin gpu-0", driver+"/d"))}}
		if admin := both.AsAdmin(&a); admin != (row.want == "nothing") {
			t.Errorf("%s: a pod with admin access to another GPU only reads: %t", name, admin)
		}
	}
}

// Whoever publishes slices for the node decides what they say, and how often.
func TestOfSlicesOfOtherDriversLittleIsKept(t *testing.T) {
	t.Parallel()
	var devices []resourcev1.Device
	for i := range 3 * resourcev1.ResourceSliceMaxDevices {
		d := offered(fmt.Sprintf("d-%d", i), "uuid", "GPU-"+strings.Repeat("x", 1<<10), "text", "GPU-a\n", "z", strings.Repeat("z", 1<<10))
		for n := range 64 {
			d.Attributes[resourcev1.QualifiedName(fmt.Sprintf("a-%d", n))] = resourcev1.DeviceAttribute{StringValue: new(fmt.Sprintf("GPU-%d", n))}
		}
		devices = append(devices, d)
	}
	s := ofOther("example.com", devices...)
	if s.Size() > 64<<10 || len(s.Spec.Devices) != resourcev1.ResourceSliceMaxDevices || s.Spec.Pool.Generation != 0 {
		t.Errorf("%d devices in %d bytes, generation %d", len(s.Spec.Devices), s.Size(), s.Spec.Pool.Generation)
	}
	if diff := cmp.Diff(s, ofOther("example.com", devices...)); diff != "" {
		t.Errorf("the same slice is kept in two ways, so that it wakes the agent each time:\n%s", diff)
	}
	if named := ofOther(strings.Repeat("d", 1<<10), offered(strings.Repeat("d", 1<<10), "uuid", "GPU-a")); named.Size() > 256 {
		t.Errorf("of names of any length %d bytes are kept", named.Size())
	}
}
