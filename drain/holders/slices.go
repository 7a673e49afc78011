package holders

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
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

// MaxSlices bounds how many slices of a node count. NVIDIA's driver makes one for each GPU, and one.
const MaxSlices = 128

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
	for _, key := range []resourcev1.QualifiedName{name, ClaimDriver + "/" + name} {
		if value := d.Attributes[key].StringValue; value != nil {
			return *value
		}
	}
	return ""
}

// ShortenSlice removes the fields of a slice that the agent does not use, and cuts it to an API server's limits. It keeps one device more than these
// allow, so that CurrentSlices sees that some are missing. It drops a UUID that is too long. Of a device's taints it
// keeps the first that keeps claims away. NVIDIA's attributes lose its domain.
func ShortenSlice(s *resourcev1.ResourceSlice) {
	s.ManagedFields, s.Annotations, s.Labels, s.OwnerReferences = nil, nil, nil, nil
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

// EmptySlice removes all that a slice says, but not that there is one: with it the slices are not complete.
func EmptySlice(s *resourcev1.ResourceSlice) {
	s.Spec = resourcev1.ResourceSliceSpec{Pool: resourcev1.ResourcePool{Name: bounded(s.Spec.Pool.Name), Generation: s.Spec.Pool.Generation}}
}

// IsEmptied reports whether EmptySlice has removed what the slice says.
func IsEmptied(s *resourcev1.ResourceSlice) bool { return s.Spec.Driver == "" }

// bounded returns a copy of a name, or none of one that no API server lets an object have.
func bounded(name string) string {
	if len(name) > maxName {
		return ""
	}
	return strings.Clone(name)
}
