package metrics

import (
	"maps"
	"regexp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/nvml"
)

// room is what the GPUs could offer beside what pods have. It is zero if the agent does not know what they have.
type room struct {
	possible      map[string]int        // devices, by the resource as kube-state-metrics names it
	fragmentation map[nvml.UUID]float64 // of the GPUs that can be cut
}

// unnamed are the characters that the value of kube-state-metrics' label resource does not have.
var unnamed = regexp.MustCompile(`[^a-zA-Z0-9_]`)

func resourceLabel(resource string) string { return unnamed.ReplaceAllString(resource, "_") }

// holdingsOf returns the pods with what they have; false if the agent does not know what any of them has.
func holdingsOf(seen *state.Observed) (all []decide.Holding, known bool) {
	if _, err := offer.HoldersUnknown(seen); err != nil {
		return nil, false
	}
	all = decide.Holdings(seen)
	return all, !slices.ContainsFunc(all, func(h decide.Holding) bool { return !h.Known })
}

func roomOf(seen *state.Observed, holdings []decide.Holding) room {
	held := map[decide.Place]bool{}
	for _, h := range holdings {
		for _, place := range h.On {
			held[place] = true
		}
	}
	out := room{map[string]int{}, map[nvml.UUID]float64{}}
	for _, gpu := range seen.GPUs {
		if !gpu.Lost {
			out.add(gpu, held)
		}
	}
	return out
}

// add counts a GPU. One that a pod has as a whole has room for nothing else. One that pods have instances of cannot be whole.
func (r room) add(gpu nvml.GPU, held map[decide.Place]bool) {
	whole := held[decide.Place{GPU: gpu.Index, Start: nvml.WholeGPU}]
	gpu = withHeld(gpu, held)
	if len(gpu.Instances) == 0 {
		r.possible[resourceLabel(nvml.ResourceGPU)]++
	}
	if !gpu.Capable || gpu.Virtualization == nvml.VirtualGPU {
		return
	}
	for _, p := range gpu.Profiles {
		n := 0
		for _, i := range gpu.Instances {
			if i.Profile == p.Name {
				n++
			}
		}
		if !whole {
			n += gpu.Further(p)
		}
		r.possible[resourceLabel(nvml.ResourceMIGPrefix+p.Name)] += n
	}
	r.fragmentation[gpu.UUID] = 0
	if free := gpu.FreeSlices(); free > 0 && !whole {
		largest, _ := gpu.Largest()
		r.fragmentation[gpu.UUID] = 1 - float64(sizeOf(largest))/float64(free)
	}
}

// withHeld is the GPU with the instances alone that pods have.
func withHeld(gpu nvml.GPU, held map[decide.Place]bool) nvml.GPU {
	gpu.Instances = slices.DeleteFunc(slices.Clone(gpu.Instances), func(i nvml.Instance) bool { return !held[decide.Place{GPU: gpu.Index, Start: i.Start}] })
	return gpu
}

// sizeOf is the memory slices of an instance; 0 of no profile.
func sizeOf(p nvml.Profile) int {
	if len(p.Placements) == 0 {
		return 0
	}
	return p.Placements[0].Size
}

// collect writes the room as metrics.
func (r room) collect(gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	names := slices.Sorted(maps.Keys(r.possible))
	for _, resource := range names[:min(len(names), mostResources)] {
		gauge(descPossible, float64(r.possible[resource]), resource)
	}
	for gpu, value := range r.fragmentation {
		gauge(descFragmentation, value, string(gpu))
	}
}
