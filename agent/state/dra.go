package state

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// DRA is what DRA drivers advertise of the node's GPUs, and what resource claims have of them. It is zero if nothing shows that a DRA driver is or was
// on the node: the agent then makes no request for it.
type DRA struct {
	// Slices are the ResourceSlices of NVIDIA's DRA driver for the node (spec.driver gpu.nvidia.com, spec.nodeName), sorted by name: of each pool those of its
	// highest generation, cut by holders.ShortenSlice. It keeps the name of each device, its taints, and its attributes uuid, parentUUID, type and
	// profile, by these names. A GPU for virtual machines has the UUID of the node's GPU: see holders.ByBus. Of SharedCounters and ConsumesCounters
	// it keeps only whether there are any.
	Slices []resourcev1.ResourceSlice
	// Complete says that there are slices, and that each pool has all of its slices: a device in none of them is not advertised. While the driver starts,
	// and after a restart of kubelet, there are none.
	Complete bool
	Err      error // why the agent does not know the slices; they are then nil
	// Others are the devices of other drivers that are GPUs of the node or parts of them, each with the UUID, or empty if it may be several: see
	// holders.OfOthers. Those of a driver without slices stay as long as pods have devices of it.
	Others map[holders.Device]string

	Claims holders.Claims // the resource claims of the node's pods, as far as the agent has read them
	Unread error          // why it could not read all of them

	// Closed are the devices that the agent's DeviceTaintRules close to claims during the change in the journal.
	Closed        []string
	RulesUnusable bool     // the agent can make no DeviceTaintRules
	Unclosable    []string // devices that it cannot close, since a rule of others has the name, or the API server refuses the rule
}

// Claimed returns what holders.GPUPods needs. If the slices are not complete, no device of NVIDIA's driver is known.
func (d DRA) Claimed() holders.Claimed {
	out := holders.Claimed{Claims: d.Claims, UUIDs: map[holders.Device]string{}}
	if d.Complete {
		out.UUIDs = holders.UUIDs(d.Slices)
	}
	maps.Copy(out.UUIDs, d.Others)
	return out
}

// DevicesOf returns the sorted names of the pool's devices that are one of these GPUs or a part of one; none unless the slices are complete. It compares
// UUIDs: the names have minor numbers, which change when the node is rebooted.
func (d DRA) DevicesOf(pool string, gpus map[nvml.UUID]bool) (names []string) {
	if !d.Complete {
		return nil
	}
	for _, s := range d.Slices {
		for _, device := range s.Spec.Devices {
			of := nvml.UUID(cmp.Or(Attribute(device, "parentUUID"), Attribute(device, "uuid")))
			if of != "" && gpus[of] && s.Spec.Pool.Name == pool && device.Name != "" {
				names = append(names, device.Name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// PartsOf returns the instances that claims of the pod have, by their GPUs, where NVIDIA's DRA driver makes them for claims; false if that is not known. Its
// slices say GPU and profile of a part, and the part's name ends with the place.
func (s *Observed) PartsOf(pod holders.Pod) (parts map[nvml.UUID][]nvml.Placed, known bool) {
	if !pod.DevicesKnown || !s.DRA.Complete {
		return nil, false
	}
	parts = map[nvml.UUID][]nvml.Placed{}
	for _, name := range pod.DeviceClaims {
		claim, read := s.DRA.Claims[holders.PodClaim{Pod: pod.UID, Name: name}]
		if !read {
			return nil, false
		}
		for _, d := range claim.Own() {
			gpu, profile := s.DRA.part(d)
			for _, i := range s.instancesOf(gpu) {
				if i.Profile == profile && strings.HasSuffix(d.Name, fmt.Sprintf("-%d", i.Start)) {
					parts[gpu] = append(parts[gpu], i.Placed)
				}
			}
		}
	}
	return parts, true
}

func (s *Observed) instancesOf(gpu nvml.UUID) []nvml.Instance {
	of, _ := s.GPU(gpu)
	return of.Instances
}

// part returns the GPU and the profile of a device that is a part; empty if no slice has it.
func (d DRA) part(named holders.Device) (nvml.UUID, string) {
	for _, s := range d.Slices {
		for _, device := range s.Spec.Devices {
			if device.Name == named.Name && s.Spec.Pool.Name == named.Pool {
				return nvml.UUID(Attribute(device, "parentUUID")), Attribute(device, "profile")
			}
		}
	}
	return "", ""
}

// Attribute returns the text of an attribute of a device in DRA.Slices; empty if the device has none.
func Attribute(d resourcev1.Device, name resourcev1.QualifiedName) string {
	if value := d.Attributes[name].StringValue; value != nil {
		return *value
	}
	return ""
}
