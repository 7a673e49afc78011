// Package devices counts the GPUs and MIG devices that NVIDIA's DRA driver offers, by its ResourceSlices.
//
// It asks no cluster.
package devices

import (
	"strings"

	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Driver is the name of NVIDIA's DRA driver for GPUs.
const Driver = "gpu.nvidia.com"

// The driver's attributes, and values of the first.
const (
	attributeType    = "type"
	attributeProfile = "profile"
	typeGPU          = "gpu"
	typeMIG          = "mig"
)

// Classes are those of the driver's charts.
const (
	ClassGPU = "gpu.nvidia.com"
	ClassMIG = "mig.nvidia.com"
)

// Kind is a device by what a claim selects it by.
type Kind struct {
	Class   string `json:"deviceClass"`
	Profile string `json:"profile,omitempty"` // of a MIG device
}

// Resource is the device plugin's resource for the same device. The classes that render writes have it too.
func (k Kind) Resource() string {
	if k.Class == ClassGPU {
		return nvml.ResourceGPU
	}
	return nvml.ResourceMIGPrefix + strings.ReplaceAll(k.Profile, "+", ".")
}

// Node is what the driver offers of a node.
type Node struct {
	// Dynamic says that the driver makes MIG devices when claims request them: then each device counts that it could make, though some exclude others.
	Dynamic  bool
	Complete bool // each of its pools has as many slices as it says
	Offers   map[Kind]int
}

// longest bounds a name of a profile, in characters.
const longest = 63

// ByNode reads slices, and passes over those of other drivers. Of each pool those of its highest generation count, as they do for the scheduler.
func ByNode(all []resourcev1.ResourceSlice) map[string]Node {
	type key struct{ node, pool string } // a node may give its pool any name, as that of another one
	type pool struct {
		generation, want int64
		has              []*resourcev1.ResourceSlice
	}
	pools := map[key]*pool{}
	for i := range all {
		s := &all[i]
		if s.Spec.Driver != Driver || s.Spec.NodeName == nil || *s.Spec.NodeName == "" {
			continue
		}
		k := key{*s.Spec.NodeName, s.Spec.Pool.Name}
		p := pools[k]
		if p == nil || s.Spec.Pool.Generation > p.generation {
			p = &pool{generation: s.Spec.Pool.Generation, want: s.Spec.Pool.ResourceSliceCount}
			pools[k] = p
		}
		if s.Spec.Pool.Generation == p.generation {
			p.has = append(p.has, s)
		}
	}
	out := map[string]Node{}
	for k, p := range pools {
		n, known := out[k.node]
		if !known {
			n = Node{Complete: true, Offers: map[Kind]int{}}
		}
		n.Complete = n.Complete && int64(len(p.has)) == p.want
		for _, s := range p.has {
			n.add(s)
		}
		out[k.node] = n
	}
	return out
}

func (n *Node) add(s *resourcev1.ResourceSlice) {
	n.Dynamic = n.Dynamic || len(s.Spec.SharedCounters) > 0
	for _, d := range s.Spec.Devices {
		n.Dynamic = n.Dynamic || len(d.ConsumesCounters) > 0
		switch Text(d, attributeType) {
		case "", typeGPU:
			n.Offers[Kind{Class: ClassGPU}]++
		case typeMIG:
			n.Offers[Kind{ClassMIG, sanitize.Cut(Text(d, attributeProfile), longest)}]++
		default: // the same GPU once more, as one for virtual machines
		}
	}
}

// Text is an attribute of a device of the driver; empty if it is not there, or no text.
func Text(d resourcev1.Device, name string) string {
	for _, key := range []resourcev1.QualifiedName{resourcev1.QualifiedName(name), resourcev1.QualifiedName(Driver + "/" + name)} {
		if value := d.Attributes[key].StringValue; value != nil {
			return *value
		}
	}
	return ""
}
