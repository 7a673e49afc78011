package holders

import (
	"cmp"
	"slices"

	resourcev1 "k8s.io/api/resource/v1"
)

// maxSlices bounds the slices for one node: NVIDIA's driver makes one for each GPU, and one.
const maxSlices = 1024

// CurrentSlices returns the slices of each pool's highest generation, sorted by name, and whether they are complete: there are some, and each pool
// has as many as it says. Older ones are about to be deleted.
func CurrentSlices(all []resourcev1.ResourceSlice) (current []resourcev1.ResourceSlice, complete bool) {
	type pool struct {
		generation int64
		has, want  int64
	}
	pools := map[string]pool{}
	for _, s := range all[:min(len(all), maxSlices)] {
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
	complete = len(all) > 0 && len(all) <= maxSlices
	for _, p := range pools {
		complete = complete && p.has == p.want
	}
	for _, s := range all[:min(len(all), maxSlices)] {
		if s.Spec.Pool.Generation == pools[s.Spec.Pool.Name].generation {
			current = append(current, s)
			complete = complete && len(s.Spec.Devices) <= resourcev1.ResourceSliceMaxDevices
		}
	}
	slices.SortFunc(current, func(a, b resourcev1.ResourceSlice) int { return cmp.Compare(a.Name, b.Name) })
	return current, complete
}
