package decide

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Holding is a pod with the GPUs and instances that it has.
type Holding struct {
	Pod   holders.Pod
	Known bool    // On is all that it has; otherwise it may have any
	On    []Place // in ascending order
}

// Place is a GPU or an instance of one. Values of Place can be compared.
type Place struct {
	GPU   int // its index
	Start int // first memory slice of the instance, or nvml.WholeGPU
}

// String is "3" for a GPU and "3/4" for an instance.
func (p Place) String() string {
	if p.Start == nvml.WholeGPU {
		return fmt.Sprint(p.GPU)
	}
	return fmt.Sprintf("%d/%d", p.GPU, p.Start)
}

// Holdings returns the pods that a plan counts as holders, each with what it has. Operands are not among them, and no pod that surely has nothing. An instance
// that the driver does not report, as after a reboot or on a lost GPU, may be any. A compute instance counts as its GPU instance.
func Holdings(seen *state.Observed) []Holding {
	at := placesOf(seen.GPUs)
	var out []Holding
	for _, p := range mayHaveToLeave(seen) {
		h := Holding{Pod: p, Known: p.DevicesKnown || offer.EndedByReboot(seen, p)}
		var parts map[nvml.UUID][]nvml.Placed // in place of their GPUs
		if seen.Owner.Kind == api.OwnerDRADynamic {
			parts, _ = seen.PartsOf(p)
		}
		for _, device := range p.Devices {
			on, is := at[device]
			h.Known = h.Known && is
			if is {
				h.On = append(h.On, divided(on, parts[nvml.UUID(device)])...)
			}
		}
		slices.SortFunc(h.On, func(a, b Place) int { return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.Start, b.Start)) })
		h.On = slices.Compact(h.On)
		if !h.Known || len(h.On) > 0 {
			out = append(out, h)
		}
	}
	return out
}

// placesOf returns where the node's GPUs and MIG devices are, by their UUIDs.
func placesOf(gpus []nvml.GPU) map[string]Place {
	out := map[string]Place{}
	for _, gpu := range gpus {
		out[string(gpu.UUID)] = Place{GPU: gpu.Index, Start: nvml.WholeGPU}
		for _, i := range present(gpu) {
			for _, d := range i.Devices {
				out[d.UUID] = Place{GPU: gpu.Index, Start: i.Start}
			}
		}
	}
	return out
}

// divided returns the parts of the GPU at the place; the place itself if there are none.
func divided(at Place, parts []nvml.Placed) []Place {
	if len(parts) == 0 {
		return []Place{at}
	}
	var out []Place
	for _, p := range parts {
		out = append(out, Place{GPU: at.GPU, Start: p.Start})
	}
	return out
}

// present returns the instances of a GPU; none of one that is lost, where they are from before.
func present(gpu nvml.GPU) []nvml.Instance {
	if gpu.Lost {
		return nil
	}
	return gpu.Instances
}
