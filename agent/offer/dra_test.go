package offer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// sliceOf is a slice of the pool "node" with devices "name uuid profile type"; "-" stands for no profile.
func sliceOf(devices ...string) resourcev1.ResourceSlice {
	out := resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{Driver: holders.ClaimDriver, Pool: resourcev1.ResourcePool{Name: "node", ResourceSliceCount: 1}}}
	for _, text := range devices {
		words := append(strings.Fields(text), "", "", "")
		d := resourcev1.Device{Name: words[0], Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
		for i, name := range []resourcev1.QualifiedName{"uuid", "profile", "type"} {
			if value := words[i+1]; value != "" && value != "-" {
				d.Attributes[name] = resourcev1.DeviceAttribute{StringValue: &value}
			}
		}
		out.Spec.Devices = append(out.Spec.Devices, d)
	}
	return out
}

// tainted is the slice with a taint on its first device.
func tainted(s resourcev1.ResourceSlice, effect resourcev1.DeviceTaintEffect) resourcev1.ResourceSlice {
	s.Spec.Devices[0].Taints = []resourcev1.DeviceTaint{{Key: "gpu.nvidia.com/xid", Effect: effect}}
	return s
}

func missingSlices(s *state.Observed) []string {
	missing, _ := driver{s}.Missing(nil, "")
	return missing
}

func TestSlicesAgreeWithTheGPUsDeviceByDevice(t *testing.T) {
	t.Parallel()
	runs := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Controller: new(true)}}},
		Spec: corev1.PodSpec{
			Volumes:    []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"}}}},
			Containers: []corev1.Container{{Name: "gpus", Command: []string{"gpu-kubelet-plugin"}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	whole := nvml.GPU{UUID: "GPU-a", Capable: true}
	cut := nvml.GPU{UUID: "GPU-b", Capable: true, Enabled: true, Instances: []nvml.Instance{
		{Devices: []nvml.Device{{UUID: "MIG-1", Profile: "1g.10gb"}}}, {Devices: []nvml.Device{{UUID: "MIG-2", Profile: "1g.10gb+me"}}},
	}}
	for name, row := range map[string]struct {
		gpus []nvml.GPU
		dra  state.DRA
		want string
	}{
		"the same": {
			[]nvml.GPU{whole, cut},
			state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-1-mig-1g10gb-me-20-1 MIG-2 1g.10gb+me", "gpu-0 GPU-a"), sliceOf("gpu-1-mig-1g10gb-19-0 MIG-1 1g.10gb")}},
			"",
		},
		"nothing cut yet, and nothing offered of it": {[]nvml.GPU{{UUID: "GPU-b", Enabled: true}}, state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf()}}, ""},
		"a GPU is offered to virtual machines, too":  {[]nvml.GPU{whole}, state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-0 GPU-a - gpu", "gpu-vfio-0 GPU-a - vfio")}}, ""},
		"a lost GPU is offered": {
			[]nvml.GPU{{UUID: "GPU-a", Lost: true}},
			state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-0 GPU-a")}},
			"gpu.nvidia.com: the GPUs have 0, the ResourceSlices 1",
		},
		"as before the cut": {
			[]nvml.GPU{cut},
			state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-1 GPU-b")}},
			"gpu.nvidia.com: the GPUs have 0, the ResourceSlices 1; mig.nvidia.com 1g.10gb: the GPUs have 1, the ResourceSlices 0; mig.nvidia.com 1g.10gb+me: the GPUs have 1, the ResourceSlices 0",
		},
		"as many, of a former cut": {
			[]nvml.GPU{cut},
			state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-1-mig-1g10gb-19-0 MIG-9 1g.10gb", "gpu-1-mig-1g10gb-me-20-1 MIG-2 1g.10gb+me")}},
			"mig.nvidia.com 1g.10gb: the ResourceSlices still have devices that no longer exist",
		},
		"a device without a UUID": {[]nvml.GPU{whole}, state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-0")}}, "gpu.nvidia.com: the ResourceSlices still have devices that no longer exist"},
		"tainted by the driver": {
			[]nvml.GPU{whole},
			state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{tainted(sliceOf("gpu-0 GPU-a"), resourcev1.DeviceTaintEffectNoSchedule)}},
			"NVIDIA's DRA driver keeps claims from gpu-0 (gpu.nvidia.com/xid)",
		},
		"tainted without an effect": {
			[]nvml.GPU{whole}, state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{tainted(sliceOf("gpu-0 GPU-a"), resourcev1.DeviceTaintEffectNone)}}, "",
		},
		"one of two slices": {[]nvml.GPU{whole}, state.DRA{Slices: []resourcev1.ResourceSlice{sliceOf("gpu-0 GPU-a")}}, "NVIDIA's DRA driver has not published all of its ResourceSlices for this node"},
		"not to be read":    {[]nvml.GPU{whole}, state.DRA{Err: errors.New("forbidden")}, "the ResourceSlices of NVIDIA's DRA driver cannot be read: forbidden"},
	} {
		s := state.Observed{GPUs: row.gpus, DRA: row.dra, Owner: state.Owner{Kind: api.OwnerDRAStatic}, Pods: []corev1.Pod{runs}}
		if diff := cmp.Diff(row.want, strings.Join(missingSlices(&s), "; ")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestAPodWhoseDeviceIsGoneIsNamed(t *testing.T) {
	t.Parallel()
	device := func(driver, name string, admin bool) holders.ClaimedDevice {
		return holders.ClaimedDevice{Device: holders.Device{Driver: driver, Pool: "node", Name: name}, Admin: admin}
	}
	for name, row := range map[string]struct {
		claim    holders.Claim
		offered  string
		complete bool
		want     string
	}{
		"offered no more": {
			holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{device(holders.ClaimDriver, "gpu-0", false), device(holders.ClaimDriver, "gpu-1", false)}},
			"gpu-1 GPU-b", true, "pod team/a has gpu-0 by claim c, which NVIDIA's DRA driver no longer advertises",
		},
		"offered": {holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{device(holders.ClaimDriver, "gpu-0", false)}}, "gpu-0 GPU-a", true, ""},
		"the slices are not complete": {
			holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{device(holders.ClaimDriver, "gpu-0", false)}}, "gpu-1 GPU-b", false, "",
		},
		"of another driver": {holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{device("net.example", "gpu-0", false)}}, "gpu-1 GPU-b", true, ""},
		"of another node": {
			holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{{Device: holders.Device{Driver: holders.ClaimDriver, Pool: "other", Name: "gpu-0"}}}},
			"gpu-1 GPU-b", true, "",
		},
		"by admin access":          {holders.Claim{Allocated: true, Pods: []types.UID{"a"}, Devices: []holders.ClaimedDevice{device(holders.ClaimDriver, "gpu-0", true)}}, "gpu-1 GPU-b", true, ""},
		"reserved for another pod": {holders.Claim{Allocated: true, Pods: []types.UID{"b"}, Devices: []holders.ClaimedDevice{device(holders.ClaimDriver, "gpu-0", false)}}, "gpu-1 GPU-b", true, ""},
		"not allocated":            {holders.Claim{Pods: []types.UID{"a"}}, "gpu-1 GPU-b", true, ""},
	} {
		s := state.Observed{
			Node:    &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}},
			Owner:   state.Owner{Kind: api.OwnerDRAStatic},
			Holders: state.Holders{Pods: []holders.Pod{{Namespace: "team", Name: "a", UID: "a", DeviceClaims: []string{"c", "unread"}}}},
			DRA: state.DRA{
				Complete: row.complete, Slices: []resourcev1.ResourceSlice{sliceOf(row.offered)},
				Claims: holders.Claims{{Pod: "a", Name: "c"}: row.claim},
			},
		}
		s.Capacity.Withdrawn = driver{&s}.Withdrawn(nil, state.Desired{})
		if got := strings.Join(WithdrawnTexts(&s), "; "); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
}

func TestDevicesAreNamedByClassAndProfile(t *testing.T) {
	t.Parallel()
	for resource, want := range map[string]string{
		"nvidia.com/gpu": "gpu.nvidia.com", "nvidia.com/mig-1g.10gb": "mig.nvidia.com 1g.10gb", "nvidia.com/mig-1g.10gb.me": "mig.nvidia.com 1g.10gb+me",
		"nvidia.com/mig-1g.24gb.me.all": "mig.nvidia.com 1g.24gb+me.all", "nvidia.com/mig-4g.96gb.gfx": "mig.nvidia.com 4g.96gb+gfx",
		"nvidia.com/mig-2g.48gb-me": "mig.nvidia.com 2g.48gb-me", "nvidia.com/mig-odd": "mig.nvidia.com odd",
	} {
		if got := byClass(resource); got != want {
			t.Errorf("%s: %s, want %s", resource, got, want)
		}
	}
	s := state.Observed{
		Owner: state.Owner{Kind: api.OwnerDRAStatic},
		DRA:   state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{sliceOf("gpu-0 GPU-a", "gpu-1-a MIG-1 1g.10gb", "gpu-1-b MIG-2 1g.10gb")}},
	}
	if got, want := Of(&s).Text(state.Desired{}), "gpu.nvidia.com 1, mig.nvidia.com 1g.10gb 2"; got != want {
		t.Errorf("the capacity is %s, want %s", got, want)
	}
	s.DRA.Slices[0] = tainted(s.DRA.Slices[0], resourcev1.DeviceTaintEffectNoExecute)
	if got, want := Of(&s).Text(state.Desired{}), "mig.nvidia.com 1g.10gb 2"; got != want {
		t.Errorf("the capacity without a tainted device is %s, want %s", got, want)
	}
	s.Owner.Kind = api.OwnerDRAStarting
	if got := Of(&s).Text(state.Desired{}); got != "none" {
		t.Errorf("while the driver starts, the capacity is %s", got)
	}
	s.DRA.Err = errors.New("forbidden")
	if got := Of(&s).Text(state.Desired{}); got != "not known" {
		t.Errorf("while its slices cannot be read, the capacity is %s", got)
	}
	s.Owner.Kind = api.OwnerDRADynamic
	if got := Of(&s).Text(state.Desired{}); got != "as claims ask" {
		t.Errorf("where the driver cuts the GPUs itself, the capacity is %s", got)
	}
	if got := Of(&state.Observed{Kubelet: state.Kubelet{Err: errors.New("silent")}}).Text(state.Desired{}); got != "not known" {
		t.Errorf("while kubelet is silent, the capacity is %s", got)
	}
	if got := state.PlannedPod(holders.Pod{Namespace: "team", Name: "a", DeviceClaims: []string{"a-gpu", "b"}}); len(got.Claims) != 2 {
		t.Errorf("the pod is planned as %+v", got)
	}
}

// Devices differ by their UUIDs alone, in whatever slice of the node's pool they are; of slices that are not complete none is known.
func TestTheDevicesOfGPUsAreThoseOfTheirUUIDs(t *testing.T) {
	device := func(name string, attributes ...string) resourcev1.Device {
		d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
		for i := 0; i < len(attributes); i += 2 {
			d.Attributes[resourcev1.QualifiedName(attributes[i])] = resourcev1.DeviceAttribute{StringValue: &attributes[i+1]}
		}
		return d
	}
	slice := func(pool string, devices ...resourcev1.Device) resourcev1.ResourceSlice {
		return resourcev1.ResourceSlice{Spec: resourcev1.ResourceSliceSpec{Driver: holders.ClaimDriver, Pool: resourcev1.ResourcePool{Name: pool}, Devices: devices}}
	}
	dra := state.DRA{Complete: true, Slices: []resourcev1.ResourceSlice{
		slice("gpu-1", device("gpu-1", "uuid", "GPU-a"), device("gpu-0", "uuid", "GPU-b"), device("gpu-2"), device("", "uuid", "GPU-a")),
		slice("gpu-1", device("gpu-0-mig-1", "uuid", "MIG-1", "parentUUID", "GPU-a"), device("gpu-1-mig-1", "uuid", "MIG-2", "parentUUID", "GPU-b")),
		slice("other", device("gpu-7", "uuid", "GPU-a")),
	}}
	if got, want := dra.DevicesOf("gpu-1", map[nvml.UUID]bool{"GPU-a": true, "MIG-2": true}), []string{"gpu-0-mig-1", "gpu-1"}; !slices.Equal(got, want) {
		t.Errorf("GPU-a has %v, want %v", got, want)
	}
	if got := dra.DevicesOf("gpu-1", map[nvml.UUID]bool{"": true}); len(got) > 0 {
		t.Errorf("a GPU without a UUID has %v", got)
	}
	many, ofA := state.DRA{Complete: true}, device("", "uuid", "GPU-a").Attributes
	for i := range 1024 { // in a time that grows with the devices, and not with their square
		devices := make([]resourcev1.Device, resourcev1.ResourceSliceMaxDevices)
		for j := range devices {
			devices[j] = resourcev1.Device{Name: fmt.Sprintf("gpu-%d-%d", i, j), Attributes: ofA}
		}
		many.Slices = append(many.Slices, slice("gpu-1", devices...), slice("gpu-1", devices[0]))
	}
	if got := many.DevicesOf("gpu-1", map[nvml.UUID]bool{"GPU-a": true}); len(got) != 1024*resourcev1.ResourceSliceMaxDevices {
		t.Errorf("GPU-a has %d devices", len(got))
	}
	dra.Complete = false
	if got := dra.DevicesOf("gpu-1", map[nvml.UUID]bool{"GPU-a": true}); len(got) > 0 {
		t.Errorf("slices that are not complete have %v", got)
	}
}

// A pod in the place of one that leaves has to get claims of its own, or what goes is not closed to it.
func TestAPodThatComesBackToItsDevicesIsNotReplaced(t *testing.T) {
	template, name := "gpu", "team-gpu"
	fenced := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for what, row := range map[string]struct {
		claims []corev1.PodResourceClaim
		has    []string // claims of GPUs
		came   time.Time
		open   bool // nothing is closed yet
		gone   bool // the API server lists the pod no more
		want   bool
	}{
		"by a template":              {claims: []corev1.PodResourceClaim{{Name: "a", ResourceClaimTemplateName: &template}}, has: []string{"a-1"}, want: true},
		"by an extended resource":    {has: []string{"implicit"}, want: true},
		"by a claim that it names":   {claims: []corev1.PodResourceClaim{{Name: "a", ResourceClaimName: &name}}, has: []string{name}},
		"by both":                    {claims: []corev1.PodResourceClaim{{Name: "a", ResourceClaimTemplateName: &template}, {Name: "b", ResourceClaimName: &name}}, has: []string{"a-1", name}},
		"without claims":             {},
		"came before":                {has: []string{"implicit"}, came: fenced.Add(-time.Second), want: true},
		"came all the same":          {has: []string{"implicit"}, came: fenced.Add(time.Second)},
		"came before another change": {has: []string{"implicit"}, came: fenced.Add(time.Second), open: true, want: true},
		"has ended":                  {gone: true, want: true},
	} {
		s := state.Observed{Journal: &journal.Journal{Started: fenced, Closed: []string{"gpu-0"}}}
		if row.open {
			s.Journal.Closed = nil
		}
		if !row.gone {
			s.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "a", CreationTimestamp: metav1.NewTime(row.came)}, Spec: corev1.PodSpec{ResourceClaims: row.claims}}}
		}
		if got := IsReplaced(&s, holders.Pod{UID: "a", DeviceClaims: row.has, Unlisted: row.gone}); got != row.want {
			t.Errorf("%s: %t, want %t", what, got, row.want)
		}
	}
}
