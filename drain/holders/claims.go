package holders

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Claims are the readable resource claims of pods. A claim that several pods use is in it once for each of them.
type Claims map[PodClaim]Claim

// PodClaim is a claim that a pod has, by the claim's name. It is in the namespace of the pod.
type PodClaim struct {
	Pod  types.UID
	Name string
}

// Claim has the fields of a resource claim that count here.
type Claim struct {
	Allocated bool
	Free      bool            // it was read, and has no device: it does not exist, or the scheduler has allocated it none
	Devices   []ClaimedDevice // devices that the scheduler has allocated to it
	Pods      []types.UID     // pods that it is reserved for
	Others    bool            // it is reserved for more than pods, so that Pods does not say who uses it
}

// ClaimedDevice is a device that is allocated to a claim. Several claims may have shares of one device.
type ClaimedDevice struct {
	Device
	// Admin says that the claim has the device by admin access, for example for metrics: other claims can still have it.
	Admin bool
}

// Device names a device of a DRA driver as Kubernetes does. Its name says nothing of the hardware: minor numbers change with a reboot.
type Device struct{ Driver, Pool, Name string }

// Claimed is GPUPods's knowledge of resource claims, in addition to kubelet's.
type Claimed struct {
	Claims Claims
	UUIDs  map[Device]string // of the GPUs and MIG devices that DRA drivers offer: NVIDIA's, see UUIDs, and others, see OfOthers
}

// ReadClaim reads the fields of a claim that count. A claim with more devices or consumers than any API server allows is not known to have
// none.
func ReadClaim(of *resourcev1.ResourceClaim) Claim {
	var out Claim
	allocation := of.Status.Allocation
	if allocation == nil {
		out.Free = true
		return out
	}
	if len(allocation.Devices.Results) > resourcev1.AllocationResultsMaxSize ||
		len(of.Status.ReservedFor) > resourcev1.ResourceClaimReservedForMaxSize {
		return out
	}
	out.Allocated = true
	for _, r := range allocation.Devices.Results {
		out.Devices = append(out.Devices, ClaimedDevice{Device{r.Driver, r.Pool, r.Device}, r.AdminAccess != nil && *r.AdminAccess})
	}
	for _, consumer := range of.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			out.Others = true
			continue
		}
		out.Pods = append(out.Pods, consumer.UID)
	}
	return out
}

// IsSettledFor reports whether the claim's devices are those of the pod until the pod has ended: the claim is reserved for it, and for pods alone.
// The scheduler and kubelet release none of them before.
func (c Claim) IsSettledFor(pod types.UID) bool {
	return c.Allocated && !c.Others && pod != "" && slices.Contains(c.Pods, pod)
}

// Own returns the GPUs of NVIDIA's DRA driver that the claim has other than by admin access.
func (c Claim) Own() (devices []Device) {
	for _, d := range c.Devices {
		if d.Driver == ClaimDriver && !d.Admin {
			devices = append(devices, d.Device)
		}
	}
	return devices
}

// ClaimNames lists the names of the pod's existing claims. Kubelet may know more of them.
func ClaimNames(pod *corev1.Pod) []string {
	names := slices.DeleteFunc(claimsOf(pod), func(name string) bool { return name == "" })
	slices.Sort(names)
	return slices.Compact(names)
}

// AsAdmin reports whether the pod has GPUs by admin access alone: such a pod reads from them, as one for metrics, and holds none.
func (c Claimed) AsAdmin(pod *corev1.Pod) bool {
	admin := false
	for _, name := range ClaimNames(pod) {
		claim := c.Claims[PodClaim{pod.UID, name}]
		if !claim.IsSettledFor(pod.UID) {
			return false
		}
		for _, d := range claim.Devices {
			if c.isGPU(d.Device) && !d.Admin {
				return false
			}
			admin = admin || c.isGPU(d.Device)
		}
	}
	return admin
}

// Claimants names the pods that have not ended and surely have devices of NVIDIA's DRA driver, admin access aside. Kubelet has prepared one for the
// pod, or a claim reserved for it has one of its node. A claim that could not be read, and that kubelet has not prepared, says nothing.
func (c Claimed) Claimants(pods []corev1.Pod, assigned Assignments) []string {
	var out []string
	listed := map[types.NamespacedName]bool{}
	for i := range pods {
		pod := &pods[i]
		name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		listed[name] = true
		ended := pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
		if !ended && (c.isPrepared(pod, assigned[name]) || c.isSettled(pod)) {
			out = append(out, name.String())
		}
	}
	for name, given := range assigned {
		if !listed[name] && (Assignments{name: given}).GivesOut(ClaimDriver) {
			out = append(out, name.String())
		}
	}
	slices.Sort(out)
	return out
}

// isPrepared reports whether kubelet has prepared a device of the driver for the pod, other than by admin access.
func (c Claimed) isPrepared(pod *corev1.Pod, given map[string][]string) bool {
	_, claims := partClaims(given)
	for name, devices := range claims {
		claim := c.Claims[PodClaim{pod.UID, name}]
		if slices.ContainsFunc(devices, func(d Device) bool {
			return d.Driver == ClaimDriver && !slices.Contains(claim.Devices, ClaimedDevice{d, true})
		}) {
			return true
		}
	}
	return false
}

// isSettled reports whether a claim that is reserved for the pod has a device of the driver, other than by admin access. The driver's pools have the
// names of their nodes: a user can bind a pod to this node though its claim has a device of another.
func (c Claimed) isSettled(pod *corev1.Pod) bool {
	return slices.ContainsFunc(ClaimNames(pod), func(name string) bool {
		claim := c.Claims[PodClaim{pod.UID, name}]
		return claim.IsSettledFor(pod.UID) && slices.ContainsFunc(claim.Devices, func(d ClaimedDevice) bool {
			return d.Driver == ClaimDriver && d.Pool == pod.Spec.NodeName && !d.Admin
		})
	})
}

// Awaits reports whether the pod has no device by its claims, and gets none before one of them changes: no container of it has started, kubelet has prepared
// no device for it, and one of its claims has no device. Kubelet starts nothing before it has prepared all claims of a pod, and prepares none before all are
// reserved for the pod. It is false while kubelet does not answer.
func (c Claimed) Awaits(pod *corev1.Pod, assigned Assignments) bool {
	if assigned == nil || HasStarted(pod) {
		return false
	}
	_, claims := partClaims(assigned[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}])
	for _, prepared := range claims {
		if len(prepared) > 0 {
			return false
		}
	}
	return slices.ContainsFunc(claimsOf(pod), func(name string) bool { return name == "" || c.Claims[PodClaim{pod.UID, name}].Free })
}

// held is what a pod holds by one claim.
type held struct {
	gpus   bool     // it has GPUs, or may have
	uuids  []string // of those that are known
	known  bool     // these are all
	unread bool     // they are not, since the claim was not read
}

// by returns what the pod holds by the claim of that name, which kubelet has prepared as it says; whether kubelet lists the claim does not count. Awaits is
// what Awaits reports of the pod.
func (c Claimed) by(pod *Pod, name string, prepared []Device, awaits bool) held {
	claim, read := c.Claims[PodClaim{pod.UID, name}]
	settled := claim.IsSettledFor(pod.UID)
	if awaits && !settled {
		return held{}
	}
	// Kubelet has prepared all claims of a pod before the first container starts. It names the devices that containers have.
	byKubelet := len(prepared) > 0 && (pod.Unlisted || pod.Started)
	out := held{known: settled || byKubelet, unread: !read && !byKubelet && !pod.Unlisted}
	sought := c.soughtFor(claim, settled, prepared)
	// Kubelet names the drivers of a claim that it has prepared; without that it may be of any.
	out.gpus = len(sought) > 0 || !settled && len(prepared) == 0
	for _, d := range sought {
		uuid, is := c.UUIDs[d]
		if is = is && uuid != ""; !is {
			out.known = false
		} else {
			out.uuids = append(out.uuids, uuid)
		}
	}
	return out
}

// soughtFor returns the GPUs that a pod has by the claim, as kubelet has prepared it, and if it is settled for the pod as the scheduler has allocated it.
func (c Claimed) soughtFor(claim Claim, settled bool, prepared []Device) []Device {
	sought := slices.DeleteFunc(slices.Clone(prepared), func(d Device) bool {
		// Kubelet does not mark what the claim has by admin access.
		return !c.isGPU(d) || settled && slices.Contains(claim.Devices, ClaimedDevice{d, true})
	})
	if settled {
		for _, d := range claim.Devices {
			if c.isGPU(d.Device) && !d.Admin {
				sought = append(sought, d.Device)
			}
		}
	}
	return sought
}

// isGPU reports whether the device is a GPU or a part of one: each of NVIDIA's DRA driver for GPUs, and of another driver those that are this node's.
func (c Claimed) isGPU(d Device) bool {
	_, known := c.UUIDs[d]
	return known || d.Driver == ClaimDriver
}

// claim notes that the pod has GPUs by one of its claims, or may have. Those that kubelet has prepared count whether the pod's spec names them or not.
func (p *Pod) claim(names []string, prepared map[string][]Device, claimed Claimed, awaits bool) {
	names = slices.AppendSeq(slices.Clone(names), maps.Keys(prepared))
	slices.Sort(names)
	found := false
	for _, name := range slices.Compact(names) {
		has := claimed.by(p, name, prepared[name], awaits)
		if !has.gpus {
			continue
		}
		found = true
		p.Devices, p.DevicesKnown = append(p.Devices, has.uuids...), p.DevicesKnown && has.known
		if name == "" {
			continue
		}
		name = sanitize.Cut(name, maxName) // the API server takes any text in a pod's status
		p.DeviceClaims = append(p.DeviceClaims, name)
		if has.unread {
			p.UnreadClaims = append(p.UnreadClaims, name)
		}
	}
	slices.Sort(p.Devices)
	p.Devices = slices.Compact(p.Devices)
	if found {
		p.Sources = append(p.Sources, SourceClaim)
	}
}

// claimsOf lists the names of the pod's claims, "" for one that is still to be made from its template.
func claimsOf(pod *corev1.Pod) []string {
	var out []string
	for _, c := range pod.Spec.ResourceClaims {
		made := slices.IndexFunc(pod.Status.ResourceClaimStatuses, func(s corev1.PodResourceClaimStatus) bool { return s.Name == c.Name })
		switch {
		case c.ResourceClaimName != nil:
			out = append(out, *c.ResourceClaimName)
		case made < 0:
			out = append(out, "")
		case pod.Status.ResourceClaimStatuses[made].ResourceClaimName != nil: // otherwise the pod needs no claim
			out = append(out, *pod.Status.ResourceClaimStatuses[made].ResourceClaimName)
		}
	}
	// The scheduler makes it for extended resources that a device class offers, by any name: the spec has no word of it.
	if implicit := pod.Status.ExtendedResourceClaimStatus; implicit != nil {
		out = append(out, implicit.ResourceClaimName)
	}
	return out
}

// byClaim reports whether the scheduler gives the pod the resource by a claim, so that kubelet lists no device of the resource.
func byClaim(pod *corev1.Pod, resource string) bool {
	implicit := pod.Status.ExtendedResourceClaimStatus
	return implicit != nil && slices.ContainsFunc(implicit.RequestMappings,
		func(m corev1.ContainerExtendedResourceRequest) bool { return m.ResourceName == resource })
}

// partClaims splits a pod's assignments: devices by resource, and the prepared devices of claims by the claims' names.
func partClaims(given map[string][]string) (devices map[string][]string, claims map[string][]Device) {
	devices, claims = map[string][]string{}, map[string][]Device{}
	for name, ids := range given {
		claim, ok := strings.CutPrefix(name, claimPrefix)
		if !ok {
			devices[name] = ids
			continue
		}
		claims[claim] = nil
		for _, id := range ids {
			claims[claim] = append(claims[claim], deviceOf(id))
		}
	}
	return devices, claims
}

// GivesOut reports whether kubelet has prepared a device of the DRA driver for any pod; of any driver if it is empty.
func (a Assignments) GivesOut(driver string) bool {
	for _, given := range a {
		for name, ids := range given {
			if strings.HasPrefix(name, claimPrefix) && slices.ContainsFunc(ids, func(id string) bool { return driver == "" || deviceOf(id).Driver == driver }) {
				return true
			}
		}
	}
	return false
}

// id names the device in Assignments. A pool's name may have slashes, the two others have none.
func (d Device) id() string { return d.Driver + "/" + d.Pool + "/" + d.Name }

func deviceOf(id string) Device {
	driver, rest, _ := strings.Cut(id, "/")
	slash := max(strings.LastIndex(rest, "/"), 0)
	return Device{driver, rest[:slash], strings.TrimPrefix(rest[slash:], "/")}
}
