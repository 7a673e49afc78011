package holders

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/nvml"
)

// Attributes of the devices that NVIDIA's DRA driver offers, by their names without its domain.
const (
	attributeUUID       = "uuid"
	attributeParentUUID = "parentUUID" // of the GPU that a MIG device is of
	attributeType       = "type"
	attributeProfile    = "profile"
)

// attributeBus is Kubernetes' own attribute of a PCI device.
const attributeBus resourcev1.QualifiedName = "resource.kubernetes.io/pciBusID"

// busAddress is the form of a PCI address.
var busAddress = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)

// MaxSlices bounds how many slices of a node count: those of NVIDIA's driver, and again those of all others. NVIDIA's driver makes one for each GPU, and one.
const MaxSlices = 128

// maxUUIDs bounds how many attributes of a device of another driver count: a MIG device shows its UUID and its GPU's.
const maxUUIDs = 4

// maxName bounds the name of a device or of a pool in bytes, as API servers have it.
const maxName = 253

// CurrentSlices returns the slices of each pool's highest generation, sorted by name, and whether they are complete: there are some, each pool has as
// many as it says, and none of an older generation. The driver deletes those within moments; while it has not, one forged slice could stand for all of
// its own.
func CurrentSlices(all []resourcev1.ResourceSlice) (current []resourcev1.ResourceSlice, complete bool) {
	type pool struct {
		generation int64
		has, want  int64
	}
	pools := map[string]pool{}
	for _, s := range all[:min(len(all), MaxSlices)] {
		p := s.Spec.Pool
		switch known, is := pools[p.Name]; {
		case !is || p.Generation > known.generation:
			pools[p.Name] = pool{p.Generation, 1, p.ResourceSliceCount}
		case p.Generation == known.generation:
			known.has++
			if known.want != p.ResourceSliceCount {
				known.want = -1 // they do not agree
			}
			pools[p.Name] = known
		}
	}
	complete = len(all) > 0 && len(all) <= MaxSlices
	for _, p := range pools {
		complete = complete && p.has == p.want
	}
	for _, s := range all[:min(len(all), MaxSlices)] {
		if s.Spec.Pool.Generation != pools[s.Spec.Pool.Name].generation {
			complete = false
			continue
		}
		current = append(current, s)
		complete = complete && len(s.Spec.Devices) <= resourcev1.ResourceSliceMaxDevices
	}
	slices.SortFunc(current, func(a, b resourcev1.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return current, complete
}

// ByBus returns the slices with the UUIDs of their GPUs for devices that are GPUs for virtual machines: NVIDIA's DRA driver gives these another UUID, and the
// bus address of the GPU. The keys of gpus are the bus addresses of the node's GPUs. A device at another address gets "GPU-" and the address:
// another driver has that GPU, and the agent cannot change it. The slices that are passed in are not changed.
func ByBus(all []resourcev1.ResourceSlice, gpus map[string]string) []resourcev1.ResourceSlice {
	out := slices.Clone(all)
	for i := range out {
		for j, d := range out[i].Spec.Devices {
			bus := strings.ToLower(attribute(d, attributeBus))
			if isUUID(cmp.Or(attribute(d, attributeParentUUID), attribute(d, attributeUUID))) || !busAddress.MatchString(bus) {
				continue
			}
			if &out[i].Spec.Devices[0] == &all[i].Spec.Devices[0] {
				out[i].Spec.Devices = slices.Clone(all[i].Spec.Devices)
			}
			d.Attributes = maps.Clone(d.Attributes)
			d.Attributes[attributeUUID] = resourcev1.DeviceAttribute{StringValue: new(cmp.Or(gpus[bus], "GPU-"+bus))}
			out[i].Spec.Devices[j] = d
		}
	}
	return out
}

// UUIDs returns the UUIDs of the GPUs and MIG devices that NVIDIA's DRA driver offers in its complete slices. Where the driver makes a MIG device only when a
// claim has it, the device stands for its GPU: it may be any part of that.
func UUIDs(complete []resourcev1.ResourceSlice) map[Device]string {
	out := map[Device]string{}
	for _, s := range complete {
		if s.Spec.Driver != ClaimDriver {
			continue
		}
		for _, d := range s.Spec.Devices {
			if uuid := cmp.Or(attribute(d, attributeUUID), attribute(d, attributeParentUUID)); isUUID(uuid) && d.Name != "" {
				device := Device{s.Spec.Driver, s.Spec.Pool.Name, d.Name}
				if former, twice := out[device]; twice && former != uuid {
					uuid = "" // it may be either
				}
				out[device] = uuid
			}
		}
	}
	maps.DeleteFunc(out, func(_ Device, uuid string) bool { return uuid == "" })
	return out
}

// attribute returns the text of one of NVIDIA's attributes. Its name may have the driver's domain.
func attribute(d resourcev1.Device, name resourcev1.QualifiedName) string {
	return cmp.Or(stringOf(d, name), stringOf(d, ClaimDriver+"/"+name))
}

// ShortenSlice removes the fields of a slice that the agent does not use, and cuts it to an API server's limits. It keeps one device more than these
// allow, so that CurrentSlices sees that some are missing. It drops a UUID that is too long. Of a device's taints it
// keeps the first that keeps claims away. NVIDIA's attributes lose its domain. Of a slice of another driver it keeps what OfOthers needs.
func ShortenSlice(s *resourcev1.ResourceSlice) {
	s.ManagedFields, s.Annotations, s.Labels, s.OwnerReferences = nil, nil, nil, nil
	if s.Spec.Driver != ClaimDriver {
		shortenOther(s)
		return
	}
	s.Spec.NodeSelector = nil
	s.Spec.Driver, s.Spec.Pool.Name = bounded(s.Spec.Driver), bounded(s.Spec.Pool.Name)
	if len(s.Spec.SharedCounters) > 0 {
		s.Spec.SharedCounters = []resourcev1.CounterSet{{}}
	}
	s.Spec.Devices = slices.Clone(s.Spec.Devices[:min(len(s.Spec.Devices), resourcev1.ResourceSliceMaxDevices+1)])
	for i := range s.Spec.Devices {
		of := &s.Spec.Devices[i]
		d := resourcev1.Device{Name: bounded(of.Name), Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
		for _, name := range []resourcev1.QualifiedName{attributeUUID, attributeParentUUID, attributeType, attributeProfile, attributeBus} {
			if value := attribute(*of, name); value != "" && len(value) <= resourcev1.DeviceAttributeMaxValueLength {
				value = strings.Clone(value) // so that the rest can be freed
				d.Attributes[name] = resourcev1.DeviceAttribute{StringValue: &value}
			}
		}
		for _, t := range of.Taints {
			if t.Effect == resourcev1.DeviceTaintEffectNoSchedule || t.Effect == resourcev1.DeviceTaintEffectNoExecute {
				d.Taints = []resourcev1.DeviceTaint{{Key: bounded(t.Key), Effect: resourcev1.DeviceTaintEffect(strings.Clone(string(t.Effect)))}}
				break
			}
		}
		if len(of.ConsumesCounters) > 0 {
			d.ConsumesCounters = []resourcev1.DeviceCounterConsumption{{}}
		}
		s.Spec.Devices[i] = d
	}
}

// shortenOther keeps of a slice of another driver than NVIDIA's for GPUs the devices that may be GPUs, with the attributes that show that. The pool's generation
// goes too: a driver of other devices that often publishes them concerns the agent no more than once.
func shortenOther(s *resourcev1.ResourceSlice) {
	devices, emptied := s.Spec.Devices, IsEmptied(s)
	s.Spec = resourcev1.ResourceSliceSpec{Driver: bounded(s.Spec.Driver), Pool: resourcev1.ResourcePool{Name: bounded(s.Spec.Pool.Name), ResourceSliceCount: 1}}
	if emptied {
		s.Spec.Pool.ResourceSliceCount = 0
	}
	for _, of := range devices[:min(len(devices), resourcev1.ResourceSliceMaxDevices)] {
		d := resourcev1.Device{Name: bounded(of.Name), Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{}}
		for _, name := range slices.Sorted(maps.Keys(of.Attributes)) {
			value, key := stringOf(of, name), resourcev1.QualifiedName(bounded(string(name)))
			if name == attributeBus {
				value = strings.ToLower(value)
			}
			shows := isUUID(value) && len(d.Attributes) < maxUUIDs || name == attributeBus && busAddress.MatchString(value)
			if shows && len(value) <= resourcev1.DeviceAttributeMaxValueLength {
				d.Attributes[key] = resourcev1.DeviceAttribute{StringValue: new(strings.Clone(value))}
			}
		}
		if len(d.Attributes) > 0 && d.Name != "" {
			s.Spec.Devices = append(s.Spec.Devices, d)
		}
	}
}

// OfOthers returns the devices of other drivers than NVIDIA's that are a GPU of the node or a part of one. Each has the UUID of the MIG device or the GPU; empty
// if it shows several GPUs. A UUID counts under any name, since each driver chooses the names of its attributes; the PCI address counts under Kubernetes' own. A
// device that shows neither counts as no GPU, as those of NVIDIA's driver of compute domains. Slices of older generations count too, until
// their driver has deleted them.
func OfOthers(all []resourcev1.ResourceSlice, gpus []nvml.GPU) map[Device]string {
	gpuOf := map[string]string{} // of each UUID and PCI address
	for _, gpu := range gpus {
		gpuOf[string(gpu.UUID)], gpuOf[gpu.PCI] = string(gpu.UUID), string(gpu.UUID)
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				gpuOf[d.UUID] = string(gpu.UUID)
			}
		}
	}
	delete(gpuOf, "")
	out := map[Device]string{}
	for _, s := range all {
		for _, d := range s.Spec.Devices {
			uuid, is := oneOf(d, gpuOf)
			if !is || s.Spec.Driver == ClaimDriver {
				continue
			}
			device := Device{s.Spec.Driver, s.Spec.Pool.Name, d.Name}
			if former, twice := out[device]; twice && former != uuid {
				uuid = ""
			}
			out[device] = uuid
		}
	}
	return out
}

// oneOf returns the UUID of the MIG device or the GPU that the device is, empty if it may be several, and whether it is any. The keys of gpuOf are the UUIDs and
// PCI addresses of this node.
func oneOf(d resourcev1.Device, gpuOf map[string]string) (uuid string, is bool) {
	gpus, parts := map[string]bool{}, map[string]bool{}
	for name := range d.Attributes {
		value := stringOf(d, name)
		gpu, of := gpuOf[value]
		if !of {
			continue
		}
		gpus[gpu], uuid = true, gpu
		if isUUID(value) && value != gpu {
			parts[value] = true
		}
	}
	switch {
	case len(gpus) > 1:
		return "", true
	case len(parts) == 1:
		for part := range parts {
			uuid = part
		}
	}
	return uuid, len(gpus) == 1
}

func stringOf(d resourcev1.Device, name resourcev1.QualifiedName) string {
	if value := d.Attributes[name].StringValue; value != nil {
		return *value
	}
	return ""
}

// EmptySlice removes all that a slice says but its driver and pool: with it the slices are not complete.
func EmptySlice(s *resourcev1.ResourceSlice) {
	s.Spec = resourcev1.ResourceSliceSpec{Driver: bounded(s.Spec.Driver), Pool: resourcev1.ResourcePool{Name: bounded(s.Spec.Pool.Name), Generation: s.Spec.Pool.Generation}}
}

// IsEmptied reports whether EmptySlice has removed what the slice says. API servers accept no slice of a pool without slices.
func IsEmptied(s *resourcev1.ResourceSlice) bool { return s.Spec.Pool.ResourceSliceCount == 0 }

// bounded returns a copy of a name, or none of one that no API server lets an object have.
func bounded(name string) string {
	if len(name) > maxName {
		return ""
	}
	return strings.Clone(name)
}
