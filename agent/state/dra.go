package state

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// DRA is what NVIDIA's DRA driver offers of the node's GPUs, and what resource claims have got of it. It is zero where nothing shows that the
// driver is or was on the node: the agent then asks the API server for none of it.
type DRA struct {
	// Slices are the driver's ResourceSlices for the node (spec.driver gpu.nvidia.com, spec.nodeName), sorted by name: of each pool those of its
	// highest generation, cut by holders.ShortenSlice. It keeps the name of each device and its attributes uuid, parentUUID, type and profile, by these
	// names; of SharedCounters and ConsumesCounters no more than that there are some.
	Slices []resourcev1.ResourceSlice
	// Complete says that there are slices, and that each pool has as many as it is to have: a device that is in none of them is not offered.
	// While the driver starts, and after a restart of kubelet, there are none.
	Complete bool
	Err      error // why the agent does not know the slices; they are then nil

	Claims holders.Claims // the resource claims of the node's pods, as far as the agent has read them
	Unread error          // why it could not read all of them
}

// Claimed is what holders.GPUPods needs of it. Where the slices are not complete, no device is known.
func (d DRA) Claimed() holders.Claimed {
	out := holders.Claimed{Claims: d.Claims}
	if d.Complete {
		out.UUIDs = holders.UUIDs(d.Slices)
	}
	return out
}

// Offered returns the devices of the complete slices, by the names under which a device plugin would offer them with the MIG strategy mixed. A device
// without a UUID is one of "".
func (d DRA) Offered() capacity.Resources {
	out := capacity.Resources{}
	if !d.Complete {
		return out
	}
	for _, s := range d.Slices {
		for _, device := range s.Spec.Devices {
			if !slices.Contains([]string{"", "gpu", "mig"}, textOf(device, "type")) {
				continue // the same GPU once more, as one for virtual machines
			}
			name := nvml.ResourceGPU
			if profile := textOf(device, "profile"); profile != "" {
				name = nvml.ResourceMIGPrefix + strings.ReplaceAll(profile, "+", ".")
			}
			out[name] = append(out[name], textOf(device, "uuid"))
		}
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// DevicesOf returns the names of the devices of the complete slices that are of these GPUs, or are one of them, sorted; those of the pool alone. It goes by
// UUIDs: the names have minor numbers, which change when the node is rebooted.
func (d DRA) DevicesOf(pool string, gpus map[nvml.UUID]bool) (names []string) {
	if !d.Complete {
		return nil
	}
	for _, s := range d.Slices {
		for _, device := range s.Spec.Devices {
			of := nvml.UUID(cmp.Or(textOf(device, "parentUUID"), textOf(device, "uuid")))
			if of != "" && gpus[of] && s.Spec.Pool.Name == pool && device.Name != "" && !slices.Contains(names, device.Name) {
				names = append(names, device.Name)
			}
		}
	}
	slices.Sort(names)
	return names
}

// Closable are the devices of each GPU, where NVIDIA's DRA driver gives out just what the GPUs have; nil elsewhere, and on a node that is closed already.
func (s *Observed) Closable() map[nvml.UUID][]string {
	if s.Owner.Kind != api.OwnerDRAStatic || s.Node.Spec.Unschedulable || s.Marks.Fenced || len(s.DRA.disagreements(s.GPUs)) > 0 {
		return nil
	}
	out := map[nvml.UUID][]string{}
	for _, gpu := range s.GPUs {
		if devices := s.DRA.DevicesOf(s.Node.Name, map[nvml.UUID]bool{gpu.UUID: true}); len(devices) > 0 {
			out[gpu.UUID] = devices
		}
	}
	return out
}

// IsReplaced reports whether a pod in the place of this one would have to get devices by claims of its own. One that names a claim has what that has, as
// the pod before it; one without claims may open any GPU. A pod that came although claims were kept from what it holds shows that they are not.
func (s *Observed) IsReplaced(p holders.Pod) bool {
	i := slices.IndexFunc(s.Pods, func(pod corev1.Pod) bool { return pod.UID == p.UID })
	if i < 0 || len(p.DeviceClaims) == 0 {
		return p.Unlisted // it comes no more
	}
	pod := s.Pods[i]
	named := slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.ResourceClaimTemplateName == nil })
	came := s.Journal != nil && len(s.Journal.Closed) > 0 && pod.CreationTimestamp.After(s.Journal.Started)
	return !named && !came
}

// byClass names by its DeviceClass and profile what a device plugin offers by this name, which has points where a profile has signs: "mig.nvidia.com
// 1g.10gb+me".
func byClass(resource string) string {
	profile, mig := strings.CutPrefix(resource, nvml.ResourceMIGPrefix)
	if !mig {
		return classGPU
	}
	const memory = "gb"
	size, attributes, _ := strings.Cut(profile, memory)
	if size == profile {
		return classMIG + " " + sanitize.Cut(profile, longestID)
	}
	return classMIG + " " + sanitize.Cut(size+memory+strings.Replace(attributes, ".", "+", 1), longestID)
}

// The DeviceClasses of NVIDIA's charts.
const (
	classGPU = "gpu.nvidia.com"
	classMIG = "mig.nvidia.com"
)

func textOf(d resourcev1.Device, attribute resourcev1.QualifiedName) string {
	if value := d.Attributes[attribute].StringValue; value != nil {
		return *value
	}
	return ""
}

// missingInSlices says how the ResourceSlices and the GPUs disagree. Where the driver cuts the GPUs itself, they have nothing to agree on.
func (s *Observed) missingInSlices() []string {
	switch {
	case s.Owner.Kind == api.OwnerDRADynamic:
		return nil
	case s.DRA.unknown() != nil:
		return []string{s.DRA.unknown().Error()}
	case !s.ClaimDriver(): // its slices outlast it by half a minute
		return []string{"NVIDIA's DRA driver does not run on this node"}
	default:
		return s.DRA.disagreements(s.GPUs)
	}
}

// unknown returns why the agent does not know what the driver offers; nil if it does.
func (d DRA) unknown() error {
	switch {
	case d.Err != nil:
		return fmt.Errorf("the ResourceSlices of NVIDIA's DRA driver cannot be read: %w", d.Err)
	case !d.Complete:
		return errors.New("NVIDIA's DRA driver has not published all of its ResourceSlices for this node")
	default:
		return nil
	}
}

// disagreements says how the complete slices differ from the GPUs, device by device; empty if they do not.
func (d DRA) disagreements(gpus []nvml.GPU) []string {
	expected, offered := capacity.Expected(gpus, config.MIGStrategyMixed), d.Offered()
	all := maps.Clone(expected)
	maps.Copy(all, offered)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch {
		case len(offered[name]) != len(expected[name]):
			out = append(out, fmt.Sprintf("%s: the GPUs have %d, the ResourceSlices %d", byClass(name), len(expected[name]), len(offered[name])))
		case !slices.Equal(offered[name], expected[name]):
			out = append(out, fmt.Sprintf("%s: the ResourceSlices still have devices that no longer exist", byClass(name)))
		}
	}
	return out
}

// gone returns the pods whose claims have a device that no complete slice has: NVIDIA's DRA driver was started again since, and such a pod cannot start,
// or runs on what is there no more.
func (s *Observed) gone() []Withdrawn {
	if !s.DRA.Complete || s.Owner.Kind != api.OwnerDRAStatic {
		return nil
	}
	offered := map[holders.Device]bool{}
	for _, slice := range s.DRA.Slices {
		for _, d := range slice.Spec.Devices {
			offered[holders.Device{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Name: d.Name}] = true
		}
	}
	var out []Withdrawn
	for _, pod := range s.Holders.Pods {
		w := Withdrawn{Pod: pod}
		for _, name := range pod.DeviceClaims {
			claim := s.DRA.Claims[holders.PodClaim{Pod: pod.UID, Name: name}]
			if !claim.IsSettledFor(pod.UID) {
				continue
			}
			for _, d := range claim.Devices {
				if d.Driver == holders.ClaimDriver && !d.Admin && !offered[d.Device] {
					w.Gone = append(w.Gone, fmt.Sprintf("%s by claim %s", sanitize.Cut(d.Name, longestID), name))
				}
			}
		}
		if len(w.Gone) > 0 {
			out = append(out, w)
		}
	}
	return out
}
