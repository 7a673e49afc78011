package observe_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// claimServer is an API server with resource claims of namespace team, and with the slices of a driver that offers gpu-0 and gpu-1.
type claimServer struct {
	mu        sync.Mutex
	claims    map[string]*resourcev1.ResourceClaim // by name
	forbidden string                               // the resource that it lets no one read
	unserved  string                               // the resource that it does not have
	hangs     string                               // the claim that it never answers for
	slices    *resourcev1.ResourceSliceList        // of the node; nil for those of two GPUs and three devices for virtual machines
	asked     []string                             // what it was asked for since the last time, by resource and name
}

// ServeHTTP implements http.Handler.
func (s *claimServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.hangs != "" && strings.HasSuffix(r.URL.Path, "/"+s.hangs) {
		<-r.Context().Done()
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, asked, claim := strings.Cut(r.URL.Path, "/namespaces/team/")
	if !claim {
		asked = r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	}
	s.asked = append(s.asked, asked)
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	resource, name, _ := strings.Cut(asked, "/")
	has, is := s.claims[name]
	switch {
	case resource == s.forbidden:
		w.WriteHeader(http.StatusForbidden)
	case resource == s.unserved:
		http.Error(w, "404 page not found", http.StatusNotFound)
	case claim && !is:
		missing := apierrors.NewNotFound(resourcev1.Resource(resource), name).Status()
		missing.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		w.WriteHeader(http.StatusNotFound)
		_ = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(&missing, w) // as below
	case claim:
		_ = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(has, w) // a reader that has gone fails by itself
	case s.slices != nil:
		_ = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(s.slices, w) // as above
	default:
		_ = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(offers("gpu-0 GPU-a", "gpu-1 GPU-b", "gpu-vfio-1 "+sha1Of+" 0000:0F:00.0", "gpu-vfio-2 "+sha1Of+" 0000:17:00.0", "gpu-vfio-3 "+sha1Of+" x"), w) // as above
	}
}

// sha1Of is the kind of UUID that NVIDIA's driver makes for a device of a virtual machine, from the bus address.
const sha1Of = "1b4e28ba-2fa1-51d2-883f-0016d3cca427"

// offers are the slices of a driver that offers these devices, each by its name and UUID, and its bus address if it is for virtual machines.
func offers(devices ...string) *resourcev1.ResourceSliceList {
	slice := resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}}
	slice.Spec.Driver, slice.Spec.Pool = holders.ClaimDriver, resourcev1.ResourcePool{Name: "gpu-1", ResourceSliceCount: 1}
	for _, d := range devices {
		name, uuid, _ := strings.Cut(d, " ")
		uuid, bus, forMachines := strings.Cut(uuid, " ")
		device := resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"uuid": {StringValue: &uuid}}}
		if forMachines {
			device.Attributes["type"], device.Attributes["resource.kubernetes.io/pciBusID"] = resourcev1.DeviceAttribute{StringValue: new("vfio")}, resourcev1.DeviceAttribute{StringValue: &bus}
		}
		slice.Spec.Devices = append(slice.Spec.Devices, device)
	}
	return &resourcev1.ResourceSliceList{TypeMeta: metav1.TypeMeta{Kind: "ResourceSliceList", APIVersion: "resource.k8s.io/v1"}, Items: []resourcev1.ResourceSlice{slice}}
}

// claiming is what reads the claims of a node, by the server and a clock that stands still.
type claiming struct {
	*observe.Claims
	t      *testing.T
	server *claimServer
	clock  *clocktesting.FakeClock
}

func newClaiming(t *testing.T) *claiming {
	t.Helper()
	out := &claiming{t: t, server: &claimServer{claims: map[string]*resourcev1.ResourceClaim{}}, clock: clocktesting.NewFakeClock(time.Unix(1_800_000_000, 0))}
	server := httptest.NewServer(out.server)
	t.Cleanup(server.Close)
	client, err := kube.New(&rest.Config{Host: server.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	objects := watch.NewObjects(watch.Options{Node: "gpu-1", Client: client})
	out.Claims = &observe.Claims{Objects: objects, Client: client, Clock: monotonic.New(out.clock), Timeout: time.Minute}
	return out
}

// observes returns what an observation of these pods sees, and what it has asked the API server for.
func (c *claiming) observes(mayRead bool, assigned holders.Assignments, pods ...corev1.Pod) (*state.Observed, string) {
	c.t.Helper()
	seen := &state.Observed{Pods: pods, GPUs: []nvml.GPU{{UUID: "GPU-a", PCI: "0000:07:00.0"}, {UUID: "GPU-b", PCI: "0000:0f:00.0"}}}
	seen.Kubelet.Assigned = assigned
	if assigned == nil { // kubelet has answered, and lists none
		seen.Kubelet.Assigned = holders.Assignments{}
	}
	c.Observe(c.t.Context(), seen, mayRead)
	c.server.mu.Lock()
	defer c.server.mu.Unlock()
	slices.Sort(c.server.asked) // some are asked for side by side
	asked := strings.Join(c.server.asked, " ")
	c.server.asked = nil
	return seen, asked
}

// claimOf is a claim called c of these devices, reserved for these pods. A device has the name of its driver before its own, unless that is NVIDIA's.
func claimOf(devices []string, pods ...string) *resourcev1.ResourceClaim {
	out := &resourcev1.ResourceClaim{
		TypeMeta: metav1.TypeMeta{Kind: "ResourceClaim", APIVersion: "resource.k8s.io/v1"}, ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "c"},
	}
	if devices != nil {
		out.Status.Allocation = &resourcev1.AllocationResult{}
	}
	for _, d := range devices {
		name, admin := strings.CutPrefix(d, "admin ")
		driver := holders.ClaimDriver
		if other, device, is := strings.Cut(name, "/"); is {
			driver, name = other, device
		}
		out.Status.Allocation.Devices.Results = append(out.Status.Allocation.Devices.Results,
			resourcev1.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: "gpu-1", Device: name, AdminAccess: &admin})
	}
	for _, name := range pods {
		out.Status.ReservedFor = append(out.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: types.UID("uid-" + name)})
	}
	return out
}

// The ways in which a pod has a claim of this name.
var claimedBy = map[string]func(p *corev1.Pod, claim string){
	"by its name": func(p *corev1.Pod, claim string) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim}}
	},
	"by a template": func(p *corev1.Pod, claim string) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("one")}}
		p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: &claim}}
	},
	"for an extended resource": func(p *corev1.Pod, claim string) { // nothing of the pod's spec names NVIDIA's resources
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{
			ResourceClaimName: claim,
			RequestMappings: []corev1.ContainerExtendedResourceRequest{
				{ContainerName: "main", ResourceName: "deviceclass.resource.kubernetes.io/gpu.nvidia.com", RequestName: "container-0-request-0"},
			},
		}
	},
}

func claimant(name string, by func(*corev1.Pod, string), claim string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	by(&p, claim)
	return p
}

// prepared is what kubelet lists of a pod: that it has prepared these devices by the claim.
func prepared(pod, claim string, devices ...string) holders.Assignments {
	return holders.Assignments{{Namespace: "team", Name: pod}: {"claim " + claim: devices}}
}

// held says what each pod holds: its UUIDs, and "any" if it may hold any GPU.
func held(seen *state.Observed) string {
	var out []string
	for _, p := range holders.GPUPods(seen.Pods, seen.Kubelet.Assigned, nil, seen.DRA.Claimed(), nil) {
		devices := p.Devices
		for _, name := range p.DeviceClaims { // as steps and messages have them
			if len(name) > 260 || strings.Contains(name, "\n") {
				devices = append(devices, fmt.Sprintf("by a claim of %d bytes", len(name)))
			}
		}
		if !p.DevicesKnown {
			devices = append(devices, "any")
		}
		out = append(out, p.Name+": "+strings.Join(devices, " "))
	}
	return strings.Join(out, ", ")
}

// A claim that is not known to be the pod's, with devices that are known, counts as any GPU; nothing else does.
func TestWhatAPodHoldsByEachKindOfClaim(t *testing.T) {
	t.Parallel()
	const claim, slices = "resourceclaims/c", "resourceslices"
	long := strings.Repeat("x", 1<<20)
	for name, row := range map[string]struct {
		claim     *resourcev1.ResourceClaim // nil for none
		named     string                    // the claim that the pods name; empty for c
		forbidden string
		unserved  string
		assigned  holders.Assignments
		pods      []string // nil for a alone
		change    func(*corev1.Pod)
		want      string
		asked     string
		unread    string // begins what the agent says that it could not read
	}{
		"allocated to it":                 {claim: claimOf([]string{"gpu-0"}, "a"), want: "a: GPU-a", asked: claim + " " + slices},
		"a GPU for a virtual machine":     {claim: claimOf([]string{"gpu-vfio-1"}, "a"), want: "a: GPU-b", asked: claim + " " + slices},
		"a GPU that another driver has":   {claim: claimOf([]string{"gpu-vfio-2"}, "a"), want: "a: GPU-0000:17:00.0", asked: claim + " " + slices},
		"a GPU whose address is nonsense": {claim: claimOf([]string{"gpu-vfio-3"}, "a"), want: "a: any", asked: claim + " " + slices},
		"a device that no slice has":      {claim: claimOf([]string{"gpu-0", "gpu-9"}, "a"), want: "a: GPU-a any", asked: claim + " " + slices},
		"missing":                         {want: "", asked: claim},
		"forbidden": {
			claim: claimOf([]string{"gpu-0"}, "a"), forbidden: "resourceclaims", want: "a: any", asked: claim,
			unread: "grant the agent get on resourceclaims of the group resource.k8s.io, as deploy/base/rbac.yaml does: reading resource claim team/c: ",
		},
		"its API server lacks the resource": {
			claim: claimOf([]string{"gpu-0"}, "a"), unserved: "resourceclaims", want: "a: any", asked: claim, unread: "reading resource claim team/c: ",
		},
		"of another pod":     {claim: claimOf([]string{"gpu-0"}, "b"), want: "a: any", asked: claim + " " + slices},
		"of no pod any more": {claim: claimOf([]string{"gpu-0"}), want: "a: any", asked: claim + " " + slices},
		"of another driver":  {claim: claimOf([]string{"net.example/eth0"}, "a"), want: "", asked: claim + " " + slices},
		"of both drivers":    {claim: claimOf([]string{"net.example/eth0", "gpu-1"}, "a"), want: "a: GPU-b", asked: claim + " " + slices},
		"not allocated":      {claim: claimOf(nil, "a"), want: "", asked: claim},
		"by admin access":    {claim: claimOf([]string{"admin gpu-0", "admin gpu-1"}, "a"), want: "", asked: claim + " " + slices},
		"one by admin access": {
			claim: claimOf([]string{"admin gpu-0", "gpu-1"}, "a"), assigned: prepared("a", "c", "gpu.nvidia.com/gpu-1/gpu-0", "gpu.nvidia.com/gpu-1/gpu-1"),
			want: "a: GPU-b", asked: claim + " " + slices,
		},
		"a path for a name":   {named: "../secrets/c"},
		"lines for a name":    {named: "c\nTrue: all is well"},
		"a name of a million": {named: long},
		"shared by two pods":  {claim: claimOf([]string{"gpu-0"}, "a", "b"), pods: []string{"a", "b"}, want: "a: GPU-a, b: GPU-a", asked: claim + " " + claim + " " + slices},
		"shared, of one of them": {
			claim: claimOf([]string{"gpu-0"}, "a"), pods: []string{"a", "b"}, want: "a: GPU-a, b: any", asked: claim + " " + claim + " " + slices,
		},
		"kubelet has prepared it":       {claim: claimOf([]string{"gpu-0"}, "a"), assigned: prepared("a", "c", "gpu.nvidia.com/gpu-1/gpu-0"), want: "a: GPU-a", asked: claim + " " + slices},
		"kubelet has not prepared it":   {claim: claimOf([]string{"gpu-0"}, "a"), assigned: prepared("a", "c"), want: "a: GPU-a", asked: claim + " " + slices},
		"kubelet has prepared another":  {claim: claimOf([]string{"gpu-0"}, "a"), assigned: prepared("a", "c", "gpu.nvidia.com/gpu-1/gpu-1"), want: "a: GPU-a GPU-b", asked: claim + " " + slices},
		"kubelet names one more claim":  {claim: claimOf([]string{"gpu-0"}, "a"), assigned: prepared("a", "d", "gpu.nvidia.com/gpu-1/gpu-1"), want: "a: GPU-a GPU-b any", asked: claim + " " + slices},
		"missing, but prepared":         {assigned: prepared("a", "c", "gpu.nvidia.com/gpu-1/gpu-1"), want: "a: GPU-b any", asked: claim + " " + slices},
		"missing, prepared of another":  {assigned: prepared("a", "c", "net.example/gpu-1/eth0"), want: "", asked: claim + " " + slices},
		"the slices are forbidden":      {claim: claimOf([]string{"gpu-0"}, "a"), forbidden: slices, want: "a: any", asked: claim + " " + slices},
		"the pod is being deleted":      {claim: claimOf([]string{"gpu-0"}, "a"), change: func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, want: "a: GPU-a", asked: claim + " " + slices},
		"the pod has succeeded":         {claim: claimOf([]string{"gpu-0"}, "a"), change: func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }},
		"the pod has failed, unnamable": {named: long, change: func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }},
	} {
		for kind, by := range claimedBy {
			t.Run(name+", "+kind, func(t *testing.T) {
				t.Parallel()
				c := newClaiming(t)
				if row.claim != nil {
					c.server.claims["c"] = row.claim
				}
				c.server.forbidden, c.server.unserved = row.forbidden, row.unserved
				var pods []corev1.Pod
				for _, name := range row.pods {
					pods = append(pods, claimant(name, by, "c"))
				}
				if pods == nil {
					named := row.named
					if named == "" {
						named = "c"
					}
					pods = []corev1.Pod{claimant("a", by, named)}
				}
				if row.change != nil {
					row.change(&pods[0])
				}
				seen, asked := c.observes(true, row.assigned, pods...)
				if diff := cmp.Diff([]string{row.want, row.asked}, []string{held(seen), asked}); diff != "" {
					t.Errorf("what the pods hold, and what was asked for (-want +got):\n%s", diff)
				}
				c.says(seen.DRA.Unread, row.unread)
				if err := seen.DRA.Err; (err != nil) != (row.forbidden == slices) {
					t.Errorf("of the slices it says: %v", err)
				}
			})
		}
	}
}

// says fails the test unless the error begins so, and is no longer than a condition has room for.
func (c *claiming) says(err error, want string) {
	c.t.Helper()
	text := ""
	if err != nil {
		text = err.Error()
	}
	if (text == "") != (want == "") || !strings.HasPrefix(text, want) || len(text) > 512 || strings.Contains(text, "\n") {
		c.t.Errorf("it says %q, want %q", text[:min(len(text), 1000)], want)
	}
}

// A template's claim that is not made yet has no name to ask for.
func TestAClaimThatIsNotMadeYetCountsForNothing(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	pod := claimant("a", claimedBy["by a template"], "c")
	pod.Status.ResourceClaimStatuses = nil
	if seen, asked := c.observes(true, nil, pod); held(seen) != "" || asked != "" || seen.DRA.Unread != nil {
		t.Errorf("%s; asked for %s: %v", held(seen), asked, seen.DRA.Unread)
	}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu"}} // it needs none
	if seen, asked := c.observes(true, nil, pod); held(seen) != "" || asked != "" {
		t.Errorf("a pod without a claim: %s; asked for %s", held(seen), asked)
	}
}

// The devices of a claim are a pod's until it has ended: such a claim is read once. Each other is read again, but not in each pass.
func TestWhenAClaimIsReadAgain(t *testing.T) {
	t.Parallel()
	const read, slices = "resourceclaims/c", "resourceslices"
	mine, others, gone := claimOf([]string{"gpu-0"}, "a"), claimOf([]string{"gpu-0"}, "b"), (*resourcev1.ResourceClaim)(nil)
	type step struct {
		after   time.Duration
		is      *resourcev1.ResourceClaim // as the API server has the claim then
		forget  bool
		not     bool // the observation may not read
		without bool // the pod is not there
		started bool // a container of the pod has started
		readAll bool // a step needs it as it is now
		want    string
		asked   string
	}
	for name, steps := range map[string][]step{
		"its own, once": {
			{is: mine, want: "a: GPU-a", asked: read + " " + slices},
			{after: time.Hour, is: others, want: "a: GPU-a", asked: slices},
			{is: others, forget: true, want: "a: GPU-a", asked: slices},
		},
		"another's, after 10 seconds": {
			{is: others, want: "a: any", asked: read + " " + slices},
			{after: 9 * time.Second, is: mine, want: "a: any", asked: slices},
			{after: time.Second, is: mine, want: "a: GPU-a", asked: read + " " + slices},
		},
		"missing, after 10 seconds": {
			{is: gone, want: "", asked: read}, {after: 9 * time.Second, is: mine, want: ""}, {after: time.Second, is: mine, want: "a: GPU-a", asked: read + " " + slices},
		},
		"missing again and again, ever later": {
			{is: gone, asked: read},
			{after: 10 * time.Second, is: gone, asked: read},
			{after: 19 * time.Second, is: gone},
			{after: time.Second, is: gone, asked: read},
			{after: 39 * time.Second, is: gone},
			{after: time.Second, is: gone, asked: read},
			{after: time.Hour, is: gone, asked: read},
			{after: time.Hour, is: gone, asked: read},
			{after: time.Hour, is: gone, asked: read},
			{after: 299 * time.Second, is: gone},
			{after: time.Second, is: mine, want: "a: GPU-a", asked: read + " " + slices},
		},
		"before a step that rests on it": {
			{is: gone, asked: read}, {is: mine, readAll: true, want: "a: GPU-a", asked: read + " " + slices}, {is: gone, readAll: true, want: "a: GPU-a", asked: slices},
		},
		"when its pod has started": {
			{is: others, want: "a: any", asked: read + " " + slices}, {is: mine, started: true, want: "a: GPU-a", asked: read + " " + slices},
		},
		"missing, when its pod has started": {
			{is: gone, asked: read}, {is: gone, started: true, want: "a: any", asked: read}, {is: gone, started: true, want: "a: any"},
		},
		"at once where the clock was set": {
			{is: others, want: "a: any", asked: read + " " + slices}, {is: mine, forget: true, want: "a: GPU-a", asked: read + " " + slices},
		},
		"not at rest": {
			{is: mine, not: true, want: "a: any"}, {is: mine, want: "a: GPU-a", asked: read + " " + slices}, {after: time.Hour, is: gone, not: true, want: "a: GPU-a", asked: slices},
		},
		"again for a pod that has come again": {
			{is: mine, want: "a: GPU-a", asked: read + " " + slices},
			{is: others, without: true, want: "", asked: slices},
			{is: others, want: "a: any", asked: read + " " + slices},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClaiming(t)
			for i, s := range steps {
				c.clock.Step(s.after)
				delete(c.server.claims, "c")
				if s.is != nil {
					c.server.claims["c"] = s.is
				}
				if s.forget {
					c.Forget(c.clock.Now())
				}
				pods := []corev1.Pod{claimant("a", claimedBy["for an extended resource"], "c")}
				if s.started {
					pods[0].Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
				}
				if s.without {
					pods = nil
				}
				if s.readAll {
					c.FreshFor(true)
				}
				seen, asked := c.observes(!s.not, nil, pods...)
				if held(seen) != s.want || asked != s.asked {
					t.Errorf("step %d: %q, want %q; asked for %q, want %q", i+1, held(seen), s.want, asked, s.asked)
				}
			}
		})
	}
}

// However many pods name claims, one observation reads a bounded number of them. Those that it has not come to count as any GPU.
func TestAnObservationReadsABoundedNumberOfClaims(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	var pods []corev1.Pod
	for i := range 300 {
		name := fmt.Sprintf("p%03d", i)
		c.server.claims[name] = claimOf([]string{"net.example/eth0"}, name)
		pods = append(pods, claimant(name, claimedBy["by its name"], name))
	}
	for i, want := range []struct{ reads, any int }{{256, 44}, {44, 0}, {0, 0}} {
		seen, asked := c.observes(true, nil, pods...)
		if reads, any := strings.Count(asked, "resourceclaims/"), strings.Count(held(seen), "any"); reads != want.reads || any != want.any {
			t.Errorf("observation %d: %d reads, want %d; %d pods may have any GPU, want %d", i+1, reads, want.reads, any, want.any)
		}
	}
}

// However many claims are not settled yet, each claim is read in its turn.
func TestClaimsThatAreNotSettledKeepNoOtherFromBeingRead(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	var pods []corev1.Pod
	for i := range 300 {
		name := fmt.Sprintf("p%03d", i)
		c.server.claims[name] = claimOf(nil)
		pods = append(pods, claimant(name, claimedBy["by its name"], name))
	}
	for i, want := range []int{256, 256, 256} {
		_, asked := c.observes(true, nil, pods...)
		if n := len(strings.Fields(asked)); n != want {
			t.Errorf("observation %d: %d reads, want %d", i+1, n, want)
		}
		if last := strings.Contains(asked, "p299"); last != (i == 1) { // and the third reads again those that the second left out
			t.Errorf("observation %d reads the last claim: %t", i+1, last)
		}
		c.clock.Step(20 * time.Second)
	}
}

// A claim that the API server does not answer for is not known. The slices are read all the same, and so are the other claims.
func TestAClaimThatHangsIsAlone(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	c.Timeout = 2 * time.Second
	c.server.hangs = "a"
	c.server.claims["b"] = claimOf([]string{"gpu-0"}, "b")
	pods := []corev1.Pod{claimant("a", claimedBy["by its name"], "a"), claimant("b", claimedBy["by its name"], "b")}
	seen, _ := c.observes(true, nil, pods...)
	if seen.DRA.Err != nil || len(seen.DRA.Slices) == 0 || held(seen) != "a: any, b: GPU-a" {
		t.Errorf("%d slices, and %v; the pods hold %q", len(seen.DRA.Slices), seen.DRA.Err, held(seen))
	}
}

// Whoever may create pods decides how many claims they name. Of a pod that awaits a claim one is read, ever later, and those of others are read at once.
func TestClaimsOfAPodThatCannotStartCostLittle(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	var pods []corev1.Pod
	for i := range 4 {
		pod := claimant(fmt.Sprintf("p%02d", i), claimedBy["by its name"], "none")
		for j := range 500 {
			name := fmt.Sprintf("none-%d-%d", i, j)
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: name, ResourceClaimName: &name})
		}
		pods = append(pods, pod)
	}
	if _, asked := c.observes(true, nil, pods...); len(strings.Fields(asked)) > 4*16 {
		t.Errorf("the first observation reads %d claims", len(strings.Fields(asked)))
	}
	c.server.claims["c"] = claimOf([]string{"gpu-0"}, "z")
	pods = append(pods, claimant("z", claimedBy["by its name"], "c"))
	seen, asked := c.observes(true, nil, pods...)
	if !strings.Contains(asked, "resourceclaims/c") || held(seen) != "z: GPU-a" || seen.DRA.Unread != nil {
		t.Errorf("the pods hold %q: %v", held(seen), seen.DRA.Unread)
	}
	reads := 0
	for range 3600 / 15 { // an hour
		c.clock.Step(15 * time.Second)
		seen, asked = c.observes(true, nil, pods...)
		reads += strings.Count(asked, "resourceclaims/")
	}
	if reads > 4*20 || held(seen) != "z: GPU-a" {
		t.Errorf("%d reads in an hour; the pods hold %q", reads, held(seen))
	}
	c.FreshFor(true)
	if _, asked = c.observes(true, nil, pods...); strings.Count(asked, "resourceclaims/") > 4 {
		t.Errorf("before a step, the agent asks for %d claims of 4 pods that cannot start", strings.Count(asked, "resourceclaims/"))
	}
	for i := range pods { // kubelet starts none before it has read all claims
		pods[i].Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	}
	if seen, _ = c.observes(true, nil, pods[0]); held(seen) != "p00: any" {
		t.Errorf("a pod that has started holds %q", held(seen))
	}
}

// A pod keeps its GPU when the driver that it has it from stops, and that driver's slices go.
func TestDevicesOfOtherDriversStayAsLongAsPodsHaveThem(t *testing.T) {
	t.Parallel()
	const device = "hami.example/gpu-1/d"
	claim := claimOf([]string{"hami.example/d"}, "a")
	ofHAMi := offers("d GPU-b")
	ofHAMi.Items[0].Spec.Driver = "hami.example"
	for name, row := range map[string]struct {
		has      func(*claiming) holders.Assignments
		mayRead  bool
		afterPod string // what the node's other DRA drivers have once the slices are gone
	}{
		"prepared":         {has: func(*claiming) holders.Assignments { return prepared("a", "c", device) }, afterPod: "a: GPU-b any"},
		"allocated":        {has: func(c *claiming) holders.Assignments { c.server.claims["c"] = claim; return nil }, mayRead: true, afterPod: "a: GPU-b"},
		"of another claim": {has: func(*claiming) holders.Assignments { return prepared("a", "c", "net.example/gpu-1/eth0") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClaiming(t)
			c.server.slices = ofHAMi
			a := claimant("a", claimedBy["by its name"], "c")
			assigned := row.has(c)
			seen, _ := c.observes(row.mayRead, assigned, a)
			if len(seen.DRA.Others) != 1 || len(seen.DRA.Slices) != 0 || held(seen) != row.afterPod {
				t.Errorf("other drivers have %v, NVIDIA's %d slices, and the pods hold %q", seen.DRA.Others, len(seen.DRA.Slices), held(seen))
			}
			c.server.slices = offers()
			for range 2 {
				if seen, _ = c.observes(row.mayRead, assigned, a); held(seen) != row.afterPod || len(seen.DRA.Others) > 0 != (row.afterPod != "") {
					t.Errorf("without slices: other drivers have %v, and the pods hold %q", seen.DRA.Others, held(seen))
				}
			}
			if seen, _ = c.observes(row.mayRead, nil); len(seen.DRA.Others) != 0 {
				t.Errorf("without the pod: other drivers have %v", seen.DRA.Others)
			}
		})
	}
}

// Where NVIDIA's DRA driver allocates the GPUs, as they are cut or as it cuts them, only a claim shows that its pod has a device which is gone.
func TestClaimsAreReadAtRestWhereTheDriverAllocatesTheGPUs(t *testing.T) {
	t.Parallel()
	for gates, want := range map[string]string{"": "resourceclaims/c resourceslices", "DynamicMIG=true": "resourceclaims/c resourceslices", "no driver": ""} {
		t.Run(gates, func(t *testing.T) {
			t.Parallel()
			c := newClaiming(t)
			c.server.claims["c"] = claimOf([]string{"gpu-0"}, "a")
			pods := []corev1.Pod{claimant("a", claimedBy["for an extended resource"], "c")}
			if gates != "no driver" {
				pods = append(pods, corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{
						Namespace: "dra", Name: "driver", UID: "driver", OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "driver", UID: "set", Controller: new(true)}},
					},
					Spec: corev1.PodSpec{
						Volumes:    []corev1.Volume{{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"}}}},
						Containers: []corev1.Container{{Name: "gpus", Command: []string{"gpu-kubelet-plugin"}, Env: []corev1.EnvVar{{Name: "FEATURE_GATES", Value: gates}}}},
					},
				})
			}
			if _, asked := c.observes(false, nil, pods...); asked != want {
				t.Errorf("asked for %q, want %q", asked, want)
			}
		})
	}
}

// A node that never had a driver costs the API server nothing for slices; one that had it goes on to ask, so that the agent sees that they are gone.
func TestWhatShowsThatTheDriverIsOrWasOnTheNode(t *testing.T) {
	t.Parallel()
	runs := func(name string, command ...string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: command[:1], Args: command[1:]}}}}
	}
	mounting := func(folders ...string) corev1.Pod {
		p := runs("p", "plugin")
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: new(true)}}
		for _, f := range folders {
			p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: f}}})
		}
		return p
	}
	for name, row := range map[string]struct {
		pod      corev1.Pod
		assigned holders.Assignments
		want     bool
	}{
		"nothing":                      {pod: runs("p", "sleep", "1d")},
		"its program":                  {pod: runs("p", "gpu-kubelet-plugin"), want: true},
		"its program, by a shell":      {pod: runs("p", "bash", "-c", "set -e\n/usr/bin/gpu-kubelet-plugin -v 6"), want: true},
		"its program's name in a name": {pod: runs("p", "bash", "-c", "echo not-the-gpu-kubelet-plugin")},
		"kubelet has prepared its device": {
			pod: runs("p", "sleep", "1d"), assigned: prepared("p", "c", "gpu.nvidia.com/gpu-1/gpu-0"), want: true,
		},
		"kubelet has prepared another driver's": {pod: runs("p", "sleep", "1d"), assigned: prepared("p", "c", "net.example/gpu-1/eth0"), want: true},
		"another driver":                        {pod: mounting("/var/lib/kubelet/plugins_registry", "/var/run/cdi"), want: true},
		"a driver of volumes":                   {pod: mounting("/var/lib/kubelet/plugins_registry", "/var/lib/kubelet/plugins")},
		"a container toolkit":                   {pod: mounting("/var/run/cdi")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClaiming(t)
			seen, asked := c.observes(false, row.assigned, row.pod)
			if (asked == "resourceslices") != row.want || seen.DRA.Complete != row.want || len(seen.DRA.Slices) > 0 != row.want {
				t.Errorf("asked for %q; the slices are %+v", asked, seen.DRA.Slices)
			}
			if _, asked = c.observes(false, nil); (asked == "resourceslices") != row.want {
				t.Errorf("once it is gone: asked for %q", asked)
			}
		})
	}
}

// What the agent does not know of claims is in its log once, and again when that changes.
func TestWhatIsNotKnownOfClaimsIsSaidOnce(t *testing.T) {
	t.Parallel()
	c := newClaiming(t)
	c.server.forbidden = "resourceclaims"
	one := claimant("a", claimedBy["by its name"], "c")
	both := []corev1.Pod{one, claimant("b", claimedBy["by a template"], "d")}
	var said []string
	for _, pods := range [][]corev1.Pod{nil, {one}, {one}, both, both, {one}, nil, nil, {one}} {
		seen, _ := c.observes(true, nil, pods...)
		if err := c.News(seen); err != nil {
			said = append(said, err.Error()[strings.LastIndex(err.Error(), ")")+1:])
		}
	}
	if want := []string{"", "; one of 2 resource claims that cannot be read", "", ""}; !slices.Equal(said, want) {
		t.Errorf("it says %q, want %q", said, want)
	}
}
