package judge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"

	dra "github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// allocationTime bounds the search for the devices of one pod on one node: users write the selectors, which may be as slow as they like.
const allocationTime = time.Second

// allocatorFeatures are those of kube-scheduler 1.37 that are on by default. A cluster without one of them has no objects that use it.
var allocatorFeatures = structured.Features{AdminAccess: true, ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}

// devices are those that DRA drivers offer in the cluster, and the claims that have some.
type devices struct {
	classes classes
	slices  []*resourcev1.ResourceSlice // with the taints of DeviceTaintRules
	claims  map[types.NamespacedName]*resourcev1.ResourceClaim
	unknown bool // which of them there are
	cache   *cel.Cache
}

// devicesOf has the devices of the cluster.
func devicesOf(c *Cluster) *devices {
	d := &devices{
		classes: classesOf(c.Classes), claims: map[types.NamespacedName]*resourcev1.ResourceClaim{}, unknown: c.Unknown != nil,
		cache: cel.NewCache(100, cel.Features{EnableConsumableCapacity: true}),
	}
	for i := range c.Slices {
		d.slices = append(d.slices, tainted(&c.Slices[i], c.Rules))
	}
	for i := range c.Claims {
		claim := &c.Claims[i]
		d.claims[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}] = claim
	}
	return d
}

// offeredOn reports whether NVIDIA's DRA driver offers devices of the node.
func (d *devices) offeredOn(n *corev1.Node) bool {
	return slices.ContainsFunc(d.slices, func(s *resourcev1.ResourceSlice) bool {
		return s.Spec.Driver == dra.Driver && s.Spec.NodeName != nil && *s.Spec.NodeName == n.Name && len(s.Spec.Devices) > 0
	})
}

// classes are the DeviceClasses, by name. They implement structured.DeviceClassLister.
type classes map[string]*resourcev1.DeviceClass

// List implements structured.DeviceClassLister.
func (c classes) List() ([]*resourcev1.DeviceClass, error) {
	return slices.Collect(maps.Values(c)), nil
}

// Get implements structured.DeviceClassLister.
func (c classes) Get(name string) (*resourcev1.DeviceClass, error) {
	if class, is := c[name]; is {
		return class, nil
	}
	return nil, apierrors.NewNotFound(resourcev1.Resource("deviceclasses"), name)
}

// of returns the class that gives the scheduler devices for the extended resource; empty if none does. Of several classes, it takes the newest, then the first
// by name, as kube-scheduler does.
func (c classes) of(resource corev1.ResourceName) string {
	if name, is := strings.CutPrefix(string(resource), resourcev1.ResourceDeviceClassPrefix); is {
		return name
	}
	var found []*resourcev1.DeviceClass
	for _, class := range c {
		if class.Spec.ExtendedResourceName != nil && *class.Spec.ExtendedResourceName == string(resource) {
			found = append(found, class)
		}
	}
	if len(found) == 0 {
		return ""
	}
	return slices.MinFunc(found, func(a, b *resourcev1.DeviceClass) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	}).Name
}

func classesOf(list []resourcev1.DeviceClass) classes {
	out := classes{}
	for i := range list {
		out[list[i].Name] = &list[i]
	}
	return out
}

// tainted returns the slice with the taints that the rules give its devices.
func tainted(s *resourcev1.ResourceSlice, rules []resourcev1.DeviceTaintRule) *resourcev1.ResourceSlice {
	matches := func(asked *string, is string) bool { return asked == nil || *asked == is }
	out := s
	for _, rule := range rules {
		on := rule.Spec.DeviceSelector
		if on == nil || !matches(on.Driver, s.Spec.Driver) || !matches(on.Pool, s.Spec.Pool.Name) {
			continue
		}
		for i := range s.Spec.Devices {
			if !matches(on.Device, s.Spec.Devices[i].Name) {
				continue
			}
			if out == s {
				out = s.DeepCopy()
			}
			out.Spec.Devices[i].Taints = append(out.Spec.Devices[i].Taints, rule.Spec.Taint)
		}
	}
	return out
}

// allocation is what claims have of the devices, once pods have left a node and others have found a place.
type allocation struct {
	*devices

	leaves map[types.UID]bool
	taken  structured.AllocatedState
	at     map[types.NamespacedName]string // where claims go that a pod names and does not own
}

// without returns the allocation without the claims that only these pods have.
func (d *devices) without(pods []*corev1.Pod) *allocation {
	leaves := map[types.UID]bool{}
	for _, p := range pods {
		leaves[p.UID] = true
	}
	out := &allocation{devices: d, leaves: leaves, at: map[types.NamespacedName]string{}, taken: structured.AllocatedState{
		AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection(),
	}}
	for _, c := range d.claims {
		if c.Status.Allocation != nil && !onlyOf(c, leaves) {
			out.take(c.Status.Allocation)
		}
	}
	return out
}

// onlyOf reports whether the claim is reserved for these pods, and for nothing else.
func onlyOf(c *resourcev1.ResourceClaim, pods map[types.UID]bool) bool {
	return len(c.Status.ReservedFor) > 0 &&
		!slices.ContainsFunc(c.Status.ReservedFor, func(r resourcev1.ResourceClaimConsumerReference) bool { return r.Resource != "pods" || !pods[r.UID] })
}

func (a *allocation) take(given *resourcev1.AllocationResult) {
	for _, r := range given.Devices.Results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		switch {
		case r.AdminAccess != nil && *r.AdminAccess:
		case r.ShareID != nil:
			a.taken.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			a.taken.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		default:
			a.taken.AllocatedDevices.Insert(id)
		}
	}
}

// errNotKnown says that it is not known whether a pod's claims get devices.
var errNotKnown = errors.New("the devices of its claims are not known")

// place allocates the devices of the pod on the node, as kube-scheduler would. It returns why it cannot; empty if it can. The error is errNotKnown, or another
// reason for not knowing it.
func (a *allocation) place(ctx context.Context, n *corev1.Node, p *corev1.Pod) (why string, err error) {
	if a.unknown {
		return "", errNotKnown
	}
	wanted, named, err := a.claimsOf(p, n)
	if err != nil {
		return "", err
	}
	if name := a.elsewhere(named, n); name != "" {
		return "its claim " + name + " has devices of another node, as other pods use it", nil
	}
	wanted = slices.DeleteFunc(wanted, func(c *resourcev1.ResourceClaim) bool {
		return a.at[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] == n.Name
	})
	if len(wanted) == 0 {
		return "", nil
	}
	ctx, cancel := context.WithTimeout(ctx, allocationTime)
	defer cancel()
	allocator, err := structured.NewAllocator(ctx, allocatorFeatures, a.taken, a.classes, a.slices, a.cache)
	var given []resourcev1.AllocationResult
	if err == nil {
		given, err = allocator.Allocate(ctx, n, wanted)
	}
	switch {
	case ctx.Err() != nil:
		return "", errLate
	case errors.Is(err, structured.ErrFailedAllocationOnNode):
		return sanitize.Cut(err.Error(), longestKey), nil
	case err != nil:
		return "", errors.New(sanitize.Message(err.Error(), longestCause))
	case given == nil:
		return "no free devices for its claims", nil
	}
	for i := range given {
		a.take(&given[i])
	}
	for _, name := range named {
		a.at[name] = n.Name
	}
	return "", nil
}

// elsewhere returns the first of these claims that has, or gets, devices of another node; empty if there is none.
func (a *allocation) elsewhere(named []types.NamespacedName, n *corev1.Node) string {
	for _, name := range named {
		at, goes := a.at[name]
		if goes && at != n.Name || !goes && a.claims[name].Status.Allocation != nil && !onlyOf(a.claims[name], a.leaves) {
			return sanitize.Cut(name.Name, longestKey)
		}
	}
	return ""
}

// claimsOf returns the claims that a pod like this one needs on the node, without devices. It also returns the names of those that the pod does not own: another
// pod may have their devices, too.
func (a *allocation) claimsOf(p *corev1.Pod, n *corev1.Node) (wanted []*resourcev1.ResourceClaim, named []types.NamespacedName, err error) {
	for i := range p.Spec.ResourceClaims {
		ref := &p.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(p, ref)
		switch {
		case err != nil:
			return nil, nil, errNotKnown
		case name == nil:
			continue
		}
		key := types.NamespacedName{Namespace: p.Namespace, Name: *name}
		claim, is := a.claims[key]
		if !is {
			return nil, nil, errNotKnown
		}
		if ref.ResourceClaimName != nil {
			named = append(named, key)
		}
		wanted = append(wanted, &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name, UID: claim.UID}, Spec: claim.Spec})
	}
	if implicit := a.implicit(p, n); implicit != nil {
		wanted = append(wanted, implicit)
	}
	return wanted, named, nil
}

// implicit returns the claim that the scheduler makes for those extended resources of the pod that the node does not have from a device plugin; nil for none.
func (a *allocation) implicit(p *corev1.Pod, n *corev1.Node) *resourcev1.ResourceClaim {
	out := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}}
	needs := Requests(p)
	for _, name := range slices.Sorted(maps.Keys(needs)) {
		class := a.classes.of(name)
		if class == "" || fromPlugin(n, name) {
			continue
		}
		count := needs[name]
		out.Spec.Devices.Requests = append(out.Spec.Devices.Requests, resourcev1.DeviceRequest{
			Name: fmt.Sprintf("r%d", len(out.Spec.Devices.Requests)),
			Exactly: &resourcev1.ExactDeviceRequest{
				DeviceClassName: class, AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: count.Value(),
			},
		})
	}
	if len(out.Spec.Devices.Requests) == 0 {
		return nil
	}
	return out
}

// fromPlugin reports whether the node has the resource from a device plugin: the scheduler makes no claim for it there.
func fromPlugin(n *corev1.Node, name corev1.ResourceName) bool {
	has := n.Status.Allocatable[name]
	return !has.IsZero()
}

// countable returns the needs of a pod that the node's allocatable counts.
func (c classes) countable(needs corev1.ResourceList, n *corev1.Node) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, need := range needs {
		if c.of(name) == "" || fromPlugin(n, name) {
			out[name] = need
		}
	}
	return out
}
