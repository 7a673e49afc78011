package report

import (
	"cmp"
	"slices"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of the pods in the status, above what a node has: kubelet takes 110 pods by default, and 250 on large nodes.
const (
	mostHeld   = 512
	mostPlaces = 64 // of one pod
)

// Models returns the kinds of GPUs, each once, with the profiles that have a place: none for a GPU that cannot be cut. It leaves out lost GPUs, since
// nothing is known of them, and vGPUs: only the host cuts those.
func Models(gpus []nvml.GPU) []api.Model {
	var out []api.Model
	for _, gpu := range gpus {
		if gpu.Lost || gpu.Model == "" || gpu.Virtualization == nvml.VirtualGPU {
			continue
		}
		profiles := profilesOf(gpu)
		at := slices.IndexFunc(out, func(m api.Model) bool {
			return m.Name == gpu.Model && slices.EqualFunc(m.Profiles, profiles, sameProfile)
		})
		if at < 0 {
			at = len(out)
			out = append(out, api.Model{Name: gpu.Model, Profiles: profiles})
		}
		out[at].GPUs = append(out[at].GPUs, gpu.Index)
	}
	return out
}

// profilesOf returns the profiles of a GPU, as the driver orders them. It leaves out those without a place, and those with places of several sizes, which no
// known GPU has.
func profilesOf(gpu nvml.GPU) []api.Profile {
	out := []api.Profile{}
	for _, p := range gpu.Profiles {
		if len(p.Placements) == 0 || slices.ContainsFunc(p.Placements, func(at nvml.Span) bool { return at.Size != p.Placements[0].Size }) {
			continue
		}
		o := api.Profile{Name: p.Name, Slices: p.Slices, Size: p.Placements[0].Size, Max: gpu.Holds(p), Engines: p.Engines}
		for _, at := range p.Placements {
			o.At = append(o.At, at.Start)
		}
		out = append(out, o)
	}
	return out
}

func sameProfile(a, b api.Profile) bool {
	return a.Name == b.Name && a.Slices == b.Slices && a.Size == b.Size && a.Max == b.Max && a.Engines == b.Engines && slices.Equal(a.At, b.At)
}

// held returns the pods with what they have, in the order of their UIDs, which says nothing about them. A pod with more places than the status may have is one
// that may have any: without some of its places it would seem to leave them free. For the same reason there are all pods or none.
func held(holdings []decide.Holding) []api.Held {
	out := []api.Held{}
	for _, h := range holdings {
		if h.Pod.UID == "" {
			continue
		}
		o := api.Held{Pod: h.Pod.UID}
		if h.Known && len(h.On) <= mostPlaces {
			for _, place := range h.On {
				o.On = append(o.On, place.String())
			}
		}
		out = append(out, o)
	}
	if len(out) > mostHeld {
		return nil
	}
	slices.SortFunc(out, func(a, b api.Held) int { return cmp.Compare(a.Pod, b.Pod) })
	return out
}
