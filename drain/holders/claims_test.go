package holders_test

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// offered is a device of a slice, by its attributes.
func offered(name string, attributes ...string) resourcev1.Device {
	d := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
	for i := 0; i < len(attributes); i += 2 {
		d.Attributes[resourcev1.QualifiedName(attributes[i])] = resourcev1.DeviceAttribute{StringValue: &attributes[i+1]}
	}
	return d
}

// slice is one of so many of a pool "node" in its generation.
func slice(name string, generation, count int64, devices ...resourcev1.Device) resourcev1.ResourceSlice {
	return resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcev1.ResourceSliceSpec{
		Driver: holders.ClaimDriver, Pool: resourcev1.ResourcePool{Name: "node", Generation: generation, ResourceSliceCount: count}, Devices: devices,
	}}
}

// offers are the slices of the tables: two GPUs, the second of which is cut.
var offers = []resourcev1.ResourceSlice{slice("1", 1, 1,
	offered("gpu-0", "uuid", "GPU-a", "type", "gpu"),
	offered("gpu-1-mig-1g10gb-19-0", "gpu.nvidia.com/uuid", "MIG-b", "gpu.nvidia.com/parentUUID", "GPU-b"),
	offered("gpu-1-mig-1g10gb-19-1", "parentUUID", "GPU-b"), // as of a driver that makes it for a claim
	offered("nameless", "uuid", "0000:17:00.0"),
	offered("twice", "uuid", "GPU-a"), offered("twice", "uuid", "GPU-b"), offered("twice", "uuid", "GPU-a"),
)}

// allocated is what a claim has got: "gpu-0", "dra.net/eth0", "admin gpu-0".
func allocated(device string) resourcev1.DeviceRequestAllocationResult {
	name, admin := strings.CutPrefix(device, "admin ")
	out := resourcev1.DeviceRequestAllocationResult{Request: "r", Driver: holders.ClaimDriver, Pool: "node", Device: name}
	if driver, name, other := strings.Cut(name, "/"); other {
		out.Driver, out.Device = driver, name
	}
	if admin {
		out.AdminAccess = &admin
	}
	return out
}

// claimOf is the claim "c" with these devices, which is reserved for team/a.
func claimOf(devices ...string) *resourcev1.ResourceClaim {
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"}}
	c.Status.Allocation = &resourcev1.AllocationResult{}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, allocated(d))
	}
	c.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "a", UID: "uid-a"}}
	return c
}

// reserved has others use the claim, beside team/a or in its place.
func reserved(c *resourcev1.ResourceClaim, by ...resourcev1.ResourceClaimConsumerReference) *resourcev1.ResourceClaim {
	c.Status.ReservedFor = by
	return c
}

// kinds are the three ways by which a pod has the claim "c".
var kinds = map[string]func(*corev1.Pod){
	"by name": claims("c"), "by template": madeFor(ptr.To("c")), "for an extended resource": func(p *corev1.Pod) {
		container(limits(gpu, 1))(p)
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
			ResourceClaimName: "c", RequestMappings: []corev1.ContainerExtendedResourceRequest{{ContainerName: "main", ResourceName: gpu, RequestName: "r"}},
		}
	},
}

func TestWhichGPUsAPodHoldsByAClaim(t *testing.T) {
	const none = "nothing"
	me := resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "a", UID: "uid-a"}
	many := make([]string, resourcev1.AllocationResultsMaxSize+1)
	for i := range many {
		many[i] = "gpu-0"
	}
	for _, row := range []struct {
		name     string
		claim    *resourcev1.ResourceClaim // nil if it could not be read
		slices   []resourcev1.ResourceSlice
		prepared []string // what kubelet has prepared of it
		want     string   // devices of the pod; "nothing" if it holds no GPU, and "any" if it may hold any
	}{
		{"a whole GPU", claimOf("gpu-0"), offers, nil, "GPU-a"},
		{"a MIG device and a GPU", claimOf("gpu-1-mig-1g10gb-19-0", "gpu-0"), offers, nil, "GPU-a MIG-b"},
		{"a MIG device that has no UUID yet", claimOf("gpu-1-mig-1g10gb-19-1"), offers, nil, "GPU-b"},
		{"a GPU that kubelet has prepared", claimOf("gpu-0"), offers, []string{"gpu.nvidia.com/node/gpu-0"}, "GPU-a"},
		{"more than the claim says is prepared", claimOf("gpu-0"), offers, []string{"gpu.nvidia.com/node/gpu-1-mig-1g10gb-19-0"}, "GPU-a MIG-b"},
		{"more than is offered is prepared", claimOf("gpu-0"), offers, []string{"gpu.nvidia.com/node/gpu-9"}, "GPU-a any"},
		{"a device that no slice has", claimOf("gpu-0", "gpu-7"), offers, nil, "GPU-a any"},
		{"a device of no UUID", claimOf("nameless"), offers, nil, "any"},
		{"a device that slices do not agree on", claimOf("twice"), offers, nil, "any"},
		{"there are no slices", claimOf("gpu-0"), nil, nil, "any"},
		{"a slice is missing", claimOf("gpu-0"), []resourcev1.ResourceSlice{slice("1", 1, 2, offered("gpu-0", "uuid", "GPU-a"))}, nil, "any"},
		{"the slices are of another driver", claimOf("gpu-0"), func() []resourcev1.ResourceSlice {
			other := *offers[0].DeepCopy()
			other.Spec.Driver = "example.com"
			return []resourcev1.ResourceSlice{other}
		}(), nil, "any"},
		{"not allocated", &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"}}, offers, nil, none},
		{"not allocated, and kubelet has prepared it", &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"}}, offers, []string{"gpu.nvidia.com/node/gpu-0"}, "GPU-a any"},
		{"more devices than a claim has", claimOf(many...), offers, nil, "any"},
		{"could not be read", nil, offers, nil, "any"},
		{"could not be read, and kubelet has prepared it", nil, offers, []string{"gpu.nvidia.com/node/gpu-0"}, "GPU-a any"},
		{"could not be read, and kubelet has prepared other devices", nil, offers, []string{"dra.net/node/eth0"}, none},
		{"of other devices", claimOf("dra.net/eth0"), offers, []string{"dra.net/node/eth0"}, none},
		{"of other devices, not prepared", claimOf("dra.net/eth0"), nil, nil, none},
		{"of both", claimOf("dra.net/eth0", "gpu-0"), offers, []string{"dra.net/node/eth0"}, "GPU-a"},
		{"by admin access", claimOf("admin gpu-0"), offers, []string{"gpu.nvidia.com/node/gpu-0"}, none},
		{"by admin access, slices away", claimOf("admin gpu-0"), nil, nil, none},
		{"one of two by admin access", claimOf("admin gpu-0", "gpu-1-mig-1g10gb-19-0"), offers, nil, "MIG-b"},
		{"one device in both ways", claimOf("admin gpu-0", "gpu-0"), offers, nil, "GPU-a"},
		{"shared with another pod", reserved(claimOf("gpu-0"), resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "b", UID: "uid-b"}, me), offers, nil, "GPU-a"},
		{"not reserved for it", reserved(claimOf("gpu-0")), offers, nil, "any"},
		{"reserved for its predecessor", reserved(claimOf("gpu-0"), resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "a", UID: "uid-former"}), offers, nil, "any"},
		{"reserved for a group of pods, too", reserved(claimOf("gpu-0"), me,
			resourcev1.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "g"}), offers, nil, "any"},
		{"reserved for pods of another kind", reserved(claimOf("gpu-0"), me, resourcev1.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "pods", UID: "x"}), offers, nil, "any"},
	} {
		for kind, has := range kinds {
			for state, change := range map[string]func(*corev1.Pod){"runs": func(*corev1.Pod) {}, "is being deleted": func(p *corev1.Pod) {
				p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
			}} {
				t.Run(fmt.Sprintf("%s %s, the pod %s", row.name, kind, state), func(t *testing.T) {
					assigned := holders.Assignments{}
					if row.prepared != nil {
						assigned = given("a", "claim c", row.prepared...)
					}
					claimed := holders.Claimed{}
					if row.claim != nil {
						claimed.Claims = holders.Claims{{Pod: "uid-a", Name: "c"}: holders.ReadClaim(row.claim)}
					}
					if current, complete := holders.CurrentSlices(row.slices); complete {
						claimed.UUIDs = holders.UUIDs(current)
					}
					got := holders.GPUPods([]corev1.Pod{pod("a", has, change)}, assigned, nil, claimed, nil)
					if kind == "for an extended resource" && row.want == none && len(got) == 1 {
						return // the resource is one of GPUs, by whichever driver
					}
					if text := devicesOf(got); text != row.want {
						t.Errorf("the pod holds %s, want %s", text, row.want)
					}
				})
			}
		}
	}
}

// Promise 3. Whoever may create a pod can have it name a claim that no scheduler allocates: that forbids no change, as long as nothing of the pod has run.
func TestAClaimWithoutADeviceHoldsNothingUntilItsPodHasStarted(t *testing.T) {
	free := holders.ReadClaim(&resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"}})
	for name, change := range map[string]func(*corev1.PodStatus){
		"runs": func(s *corev1.PodStatus) { s.ContainerStatuses[0].State.Running = &corev1.ContainerStateRunning{} },
		"has ended": func(s *corev1.PodStatus) {
			s.ContainerStatuses[0].State.Terminated = &corev1.ContainerStateTerminated{}
		},
		"ended before": func(s *corev1.PodStatus) {
			s.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{}
		},
		"ran an init once": func(s *corev1.PodStatus) {
			s.InitContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}}
		},
		"waits for its claim": nil,
	} {
		for kind, names := range map[string]func(*corev1.Pod){
			"by name": claims("c"), "by a template that is not there": madeFor(nil), "by name, beside one that is not read": func(p *corev1.Pod) { claims("b")(p); claims("c")(p) },
		} {
			p := pod("a", names)
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
			want := "nothing"
			if change != nil {
				change(&p.Status)
				want = "any"
			}
			p.Status.ResourceClaimStatuses = nil
			read := holders.Claimed{Claims: holders.Claims{{Pod: "uid-a", Name: "c"}: free}}
			if text := devicesOf(holders.GPUPods([]corev1.Pod{p}, holders.Assignments{}, nil, read, nil)); text != want {
				t.Errorf("a pod that %s, %s: it holds %s, want %s", name, kind, text, want)
			}
			if text := devicesOf(holders.GPUPods([]corev1.Pod{p}, nil, nil, read, nil)); text != "any" {
				t.Errorf("a pod that %s, %s, while kubelet is silent: it holds %s, want any", name, kind, text)
			}
			prepared := given("a", "claim d", "gpu.nvidia.com/node/gpu-0")
			if text := devicesOf(holders.GPUPods([]corev1.Pod{p}, prepared, nil, read, nil)); text != "any" {
				t.Errorf("a pod that %s, %s, and kubelet has prepared another claim: it holds %s, want any", name, kind, text)
			}
		}
	}
}

// A claim that is reserved for the pod counts all the same: it starts as soon as the other one is there.
func TestAClaimWithADeviceCountsBesideOneWithout(t *testing.T) {
	read := holders.Claimed{UUIDs: holders.UUIDs(offers), Claims: holders.Claims{
		{Pod: "uid-a", Name: "b"}: {Free: true}, {Pod: "uid-a", Name: "c"}: holders.ReadClaim(claimOf("gpu-0")),
	}}
	if text := devicesOf(holders.GPUPods([]corev1.Pod{pod("a", claims("b"), claims("c"))}, holders.Assignments{}, nil, read, nil)); text != "GPU-a" {
		t.Errorf("the pod holds %s, want GPU-a", text)
	}
}

// started is a pod of which a container runs.
func started(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
}

// devicesOf says what the only pod holds.
func devicesOf(pods []holders.Pod) string {
	if len(pods) == 0 {
		return "nothing"
	}
	out := pods[0].Devices
	if !pods[0].DevicesKnown {
		out = append(out, "any")
	}
	return strings.Join(out, " ")
}

// A claim that the scheduler makes for an extended resource is all that the pod has of it, and one that kubelet has prepared counts whatever the pod names.
func TestKubeletAndTheClaimNameTheSamePod(t *testing.T) {
	read := holders.Claimed{Claims: holders.Claims{{Pod: "uid-a", Name: "c"}: holders.ReadClaim(claimOf("gpu-0"))}, UUIDs: holders.UUIDs(offers)}
	for _, row := range []struct {
		name     string
		pod      corev1.Pod
		assigned holders.Assignments
		want     string
	}{
		{"by an extended resource", pod("a", kinds["for an extended resource"]), given("a", "claim c"), "GPU-a"},
		{"another resource, of which kubelet lists none", pod("a", kinds["for an extended resource"], container(limits(mig1g, 1))), given("a", "claim c"), "GPU-a any"},
		{"prepared, not named by the pod", pod("a"), given("a", "claim c", "gpu.nvidia.com/node/gpu-0"), "GPU-a"},
		{"prepared, named by no pod, and not read", pod("a"), given("a", "claim other", "gpu.nvidia.com/node/gpu-0"), "GPU-a any"},
		{"prepared and started, not read", pod("a", claims("other"), started), given("a", "claim other", "gpu.nvidia.com/node/gpu-0"), "GPU-a"},
		{"prepared and started, reserved for another", pod("b", claims("c"), started), given("b", "claim c", "gpu.nvidia.com/node/gpu-0"), "GPU-a"},
		{"prepared and started, in no slice", pod("a", claims("other"), started), given("a", "claim other", "gpu.nvidia.com/node/gpu-9"), "any"},
		{"started, and one of two is not prepared", pod("a", claims("other"), claims("third"), started), given("a", "claim other", "gpu.nvidia.com/node/gpu-0"), "GPU-a any"},
		{"listed by kubelet, named by no pod, not prepared", pod("a"), given("a", "claim other"), "any"},
		{"other devices, named by no pod", pod("a"), given("a", "claim other", "dra.net/node/eth0"), "nothing"},
		{"listed by kubelet alone", pod("cpu-only"), given("a", "claim c", "gpu.nvidia.com/node/gpu-0"), "GPU-a"},
		{"listed by kubelet alone, of a pool with slashes", pod("cpu-only"), given("a", "claim c", "gpu.nvidia.com/rack/node/gpu-0"), "any"},
		{"listed by kubelet alone, not prepared", pod("cpu-only"), given("a", "claim c"), "any"},
		{"has ended", pod("a", claims("c"), phase(corev1.PodFailed)), holders.Assignments{}, "nothing"},
	} {
		if got := devicesOf(holders.GPUPods([]corev1.Pod{row.pod}, row.assigned, nil, read, nil)); got != row.want {
			t.Errorf("%s: the pod holds %s, want %s", row.name, got, row.want)
		}
	}
}

// A pod that has GPUs by admin access alone is no holder.
func TestWhoReadsGPUsByAdminAccess(t *testing.T) {
	for _, row := range []struct {
		name  string
		claim *resourcev1.ResourceClaim
		want  bool
	}{
		{"all by admin access", claimOf("admin gpu-0", "admin gpu-7"), true},
		{"one not", claimOf("admin gpu-0", "gpu-7"), false},
		{"a device of another driver besides", claimOf("admin gpu-0", "dra.net/eth0"), true},
		{"a device of another driver", claimOf("admin dra.net/eth0"), false},
		{"not reserved for it", reserved(claimOf("admin gpu-0")), false},
	} {
		p := pod("a", claims("c"))
		read := holders.Claimed{Claims: holders.Claims{{Pod: "uid-a", Name: "c"}: holders.ReadClaim(row.claim)}}
		if got := read.AsAdmin(&p); got != row.want {
			t.Errorf("%s: %t, want %t", row.name, got, row.want)
		}
		if unread := (holders.Claimed{}); unread.AsAdmin(&p) {
			t.Errorf("%s: of a claim that could not be read it is known", row.name)
		}
	}
}

func TestSlicesAreCompleteOrAPodMayHoldAnything(t *testing.T) {
	gpu := offered("gpu-0", "uuid", "GPU-a")
	other := slice("o", 7, 1, gpu)
	other.Spec.Pool.Name = "other"
	for _, row := range []struct {
		name     string
		slices   []resourcev1.ResourceSlice
		current  []string
		complete bool
	}{
		{"none", nil, nil, false},
		{"one of one", []resourcev1.ResourceSlice{slice("a", 1, 1, gpu)}, []string{"a"}, true},
		{"one without a device", []resourcev1.ResourceSlice{slice("a", 1, 1)}, []string{"a"}, true},
		{"one of two", []resourcev1.ResourceSlice{slice("a", 1, 2, gpu)}, []string{"a"}, false},
		{"two of two, sorted", []resourcev1.ResourceSlice{slice("b", 1, 2), slice("a", 1, 2, gpu)}, []string{"a", "b"}, true},
		{"two of one", []resourcev1.ResourceSlice{slice("a", 1, 1, gpu), slice("b", 1, 1)}, []string{"a", "b"}, false},
		{"they do not agree", []resourcev1.ResourceSlice{slice("a", 1, 2, gpu), slice("b", 1, 3)}, []string{"a", "b"}, false},
		{"one of an older generation", []resourcev1.ResourceSlice{slice("a", 1, 1, gpu), slice("b", 2, 1)}, []string{"b"}, false},
		{"the newer generation comes first", []resourcev1.ResourceSlice{slice("b", 2, 1), slice("a", 1, 1, gpu)}, []string{"b"}, false},
		{"one of an older generation of another pool", []resourcev1.ResourceSlice{slice("a", 9, 1, gpu), other}, []string{"a", "o"}, true},
		{"the newer generation lacks one", []resourcev1.ResourceSlice{slice("a", 1, 1, gpu), slice("b", 2, 2)}, []string{"b"}, false},
		{"of two pools", []resourcev1.ResourceSlice{slice("a", 1, 1, gpu), other}, []string{"a", "o"}, true},
		{"one of two pools lacks one", []resourcev1.ResourceSlice{slice("a", 1, 2, gpu), other}, []string{"a", "o"}, false},
		{"a negative count", []resourcev1.ResourceSlice{slice("a", 1, -1, gpu)}, []string{"a"}, false},
		{"a count of zero", []resourcev1.ResourceSlice{slice("a", 1, 0, gpu)}, []string{"a"}, false},
		{"a negative generation", []resourcev1.ResourceSlice{slice("a", math.MinInt64, 1, gpu)}, []string{"a"}, true},
	} {
		current, complete := holders.CurrentSlices(row.slices)
		var names []string
		for _, s := range current {
			names = append(names, s.Name)
		}
		if diff := cmp.Diff(row.current, names); diff != "" || complete != row.complete {
			t.Errorf("%s: complete %t, want %t; current (-want +got):\n%s", row.name, complete, row.complete, diff)
		}
	}
}

// Whatever slices say, what is kept of them is bounded, and what was cut off makes them incomplete or leaves a device without a UUID.
func TestSlicesAreBoundedBeforeTheyCount(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	huge := slice("huge", 1, 1)
	attributes := offered("", "uuid", "GPU-a", "gpu.nvidia.com/productName", long, "example.com/"+long, long).Attributes
	for i := range 10_000 {
		d := resourcev1.Device{Name: fmt.Sprintf("gpu-%d", i), Attributes: attributes}
		d.ConsumesCounters = make([]resourcev1.DeviceCounterConsumption, 1000)
		d.Taints = slices.Repeat([]resourcev1.DeviceTaint{{Key: "example.com/none", Effect: resourcev1.DeviceTaintEffectNone}}, 1000)
		d.Taints = append(d.Taints, resourcev1.DeviceTaint{Key: "gpu.nvidia.com/xid", Value: long, Effect: resourcev1.DeviceTaintEffectNoExecute})
		huge.Spec.Devices = append(huge.Spec.Devices, d)
	}
	huge.Spec.SharedCounters = make([]resourcev1.CounterSet, 1000)
	huge.Annotations = map[string]string{"a": long}
	holders.ShortenSlice(&huge)
	current, complete := holders.CurrentSlices([]resourcev1.ResourceSlice{huge})
	if size := huge.Size(); complete || len(current) != 1 || size > 64<<10 {
		t.Errorf("of a slice of 10,000 devices %d bytes are kept, complete %t", size, complete)
	}
	kept := huge.Spec.Devices[0]
	if diff := cmp.Diff([]int{1, 1, 1}, []int{len(huge.Spec.SharedCounters), len(kept.ConsumesCounters), len(kept.Taints)}); diff != "" {
		t.Errorf("counters and taints that are kept (-want +got):\n%s", diff)
	}
	if key := kept.Taints[0].Key; key != "gpu.nvidia.com/xid" {
		t.Errorf("the taint %s is kept", key)
	}

	texts := slice("texts", 1, 1, offered("gpu-0", "uuid", "GPU-"+long), offered("gpu-1", "gpu.nvidia.com/uuid", "GPU-a", "gpu.nvidia.com/profile", "1g.10gb"), offered(long, "uuid", "GPU-b"))
	holders.ShortenSlice(&texts)
	if current, complete := holders.CurrentSlices([]resourcev1.ResourceSlice{texts}); !complete || texts.Size() > 4<<10 {
		t.Errorf("%d bytes are kept of three devices, complete %t", texts.Size(), complete)
	} else if diff := cmp.Diff(map[holders.Device]string{{Driver: holders.ClaimDriver, Pool: "node", Name: "gpu-1"}: "GPU-a"}, holders.UUIDs(current)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if *texts.Spec.Devices[1].Attributes["profile"].StringValue != "1g.10gb" {
		t.Error("an attribute is lost")
	}

	many := make([]resourcev1.ResourceSlice, 100_000)
	for i := range many {
		many[i] = slice("s", int64(i%2), int64(len(many)))
	}
	if current, complete := holders.CurrentSlices(many); complete || len(current) > holders.MaxSlices {
		t.Errorf("of 100,000 slices %d count, complete %t", len(current), complete)
	}
}

// What tenants and drivers write takes neither long nor much memory, and a pod whose claim is not known to be free may hold anything.
func FuzzClaims(f *testing.F) {
	f.Add("node", "gpu-0", "GPU-a", "c", "uid-a", int64(1), int64(1), 1, true)
	f.Add("", "", "", "", "", int64(-1), int64(math.MinInt64), 300, false)
	f.Add("a/b", "x/y", "MIG-", "c", "uid-b", int64(math.MaxInt64), int64(2), 40, false)
	f.Fuzz(func(t *testing.T, pool, device, uuid, claim, uid string, generation, count int64, n int, admin bool) {
		n = min(max(n, -n, 0), 2000)
		s := slice("s", generation, count)
		s.Spec.Pool.Name = pool
		c := claimOf()
		c.Name = claim
		for range n {
			s.Spec.Devices = append(s.Spec.Devices, offered(device, "uuid", uuid))
			c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
				resourcev1.DeviceRequestAllocationResult{Driver: holders.ClaimDriver, Pool: pool, Device: device, AdminAccess: &admin})
		}
		c.Status.ReservedFor[0].UID = types.UID(uid)
		holders.ShortenSlice(&s)
		if size := s.Size(); size > 1<<17 {
			t.Errorf("%d bytes are kept of a slice", size)
		}
		current, complete := holders.CurrentSlices([]resourcev1.ResourceSlice{s})
		if complete && (count != 1 || n > resourcev1.ResourceSliceMaxDevices) {
			t.Errorf("a slice of %d devices is the only one of %d, and they are complete", n, count)
		}
		claimed := holders.Claimed{Claims: holders.Claims{{Pod: "uid-a", Name: claim}: holders.ReadClaim(c)}}
		if complete {
			claimed.UUIDs = holders.UUIDs(current)
		}
		got := holders.GPUPods([]corev1.Pod{pod("a", claims(claim))}, given("a", "claim "+claim, pool+"/"+device), nil, claimed, nil)
		runtime.KeepAlive(s)
		settled := uid == "uid-a" && n <= resourcev1.AllocationResultsMaxSize
		none := settled && (n == 0 || admin)                                                                  // it has none, or reads from it
		other := !settled && pool != holders.ClaimDriver && !strings.HasPrefix(pool, holders.ClaimDriver+"/") // kubelet has prepared something else
		heldAtMost(t, got, none || other, settled && complete, uuid)
	})
}

// heldAtMost fails the test if the pod holds nothing although it may, or is known to hold something else than that device, or without ground.
func heldAtMost(t *testing.T, pods []holders.Pod, mayBeNone, grounded bool, uuid string) {
	t.Helper()
	if len(pods) == 0 {
		if !mayBeNone {
			t.Error("the pod holds nothing")
		}
		return
	}
	devices := pods[0].Devices
	if pods[0].DevicesKnown && (!grounded || slices.ContainsFunc(devices, func(d string) bool { return d != uuid }) || len(devices) > 1) {
		t.Errorf("the pod is known to hold %q of %q", devices, uuid)
	}
}
