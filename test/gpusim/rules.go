package gpusim

import (
	"math"
	"slices"
	"sync"

	"github.com/gpuslice/gpuslice/nvml"
)

// room reports whether an instance of the profile can stand at start: nothing of it is taken, and the compute slices
// and the engines that are left are enough.
func (g *gpu) room(p *profile, start int) bool {
	if !slices.Contains(p.Starts, start) {
		return false
	}
	want := nvml.Span{Start: start, Size: p.Size}
	sliceCount, used := p.Slices, p.Engines
	for _, i := range g.Instances {
		q := g.profileOf(i)
		if want.Overlaps(nvml.Span{Start: i.Start, Size: q.Size}) {
			return false
		}
		sliceCount += q.Slices
		used = addEngines(used, q.Engines)
	}
	m := g.model()
	return sliceCount <= m.Slices && fitEngines(used, m.Engines)
}

func addEngines(a, b nvml.Engines) nvml.Engines {
	return nvml.Engines{
		Copy: a.Copy + b.Copy, Decoder: a.Decoder + b.Decoder, Encoder: a.Encoder + b.Encoder,
		JPEG: a.JPEG + b.JPEG, OFA: a.OFA + b.OFA,
	}
}

func fitEngines(a, all nvml.Engines) bool {
	return a.Copy <= all.Copy && a.Decoder <= all.Decoder && a.Encoder <= all.Encoder && a.JPEG <= all.JPEG && a.OFA <= all.OFA
}

// starts are the places where an instance of the profile could be created now.
func (g *gpu) starts(p *profile) []int {
	var out []int
	for _, s := range p.Starts {
		if g.room(p, s) {
			out = append(out, s)
		}
	}
	return out
}

// choose is where the driver puts an instance when the caller gives no place: where it leaves the most places open for
// others, and of equal ones the lowest. It gives the orders of instance ids that NVIDIA's MIG user guide prints. It
// also gives the order that the guide warns of: after two 1g and a 2g there is no room for a 3g.
func (g *gpu) choose(p *profile) (start int, ok bool) {
	best := -1
	for _, s := range g.starts(p) {
		after := g.clone()
		after.Instances = append(after.Instances, &instance{Profile: p.ID, Start: s})
		left := 0
		for i := range g.model().Profiles {
			left += len(after.starts(&g.model().Profiles[i]))
		}
		if left > best {
			best, start, ok = left, s, true
		}
	}
	return start, ok
}

// capacity is how many more instances of the profile fit.
func (g *gpu) capacity(p *profile) int {
	rest := g.clone()
	n := 0
	// All places of a profile are of one size and none overlaps half of another, so taking the first is never worse.
	for _, s := range p.Starts {
		if rest.room(p, s) {
			rest.Instances = append(rest.Instances, &instance{Profile: p.ID, Start: s})
			n++
		}
	}
	return n
}

// instanceID is the id that the driver gives an instance by its place: 0 for the whole GPU, 1 and 2 for the halves,
// and so on to the smallest parts. On 7-slice GPUs ids end at 14, which the static list of minor numbers relies on.
func (m *model) instanceID(size, start int) int {
	parts := m.MemorySlices / size
	return parts - 1 + start/size
}

// computeProfile is one way to take compute slices of a GPU instance.
type computeProfile struct {
	ID     int // also the index it is asked by
	Slices int
	SMs    int
	Starts []int
}

// computeKinds is the number of compute instance profiles that the driver knows the names of.
const computeKinds = 8

// computeSlices are the sizes of the compute instance profiles by id. The other ids are for GPUs that none of the
// models is.
var computeSlices = []int{1, 2, 3, 4, 7}

// computeProfiles of a GPU instance, as `nvidia-smi mig -lcip` and `-lcipp` print them.
func (m *model) computeProfiles(p *profile) []computeProfile {
	known, _ := computeProfilesOf.Load(p)
	if list, ok := known.([]computeProfile); ok {
		return list
	}
	out := m.listComputeProfiles(p)
	computeProfilesOf.Store(p, out)
	return out
}

// computeProfilesOf remembers the list for each *profile of the models: each look at a GPU takes one for each of its profiles.
var computeProfilesOf sync.Map

func (m *model) listComputeProfiles(p *profile) []computeProfile {
	base := m.profileOfKind(kind1).SMs
	var out []computeProfile
	for id, n := range computeSlices {
		if n > p.Slices || (n == 3 && p.Slices == 4) {
			continue
		}
		c := computeProfile{ID: id, Slices: n, SMs: n * base}
		if n == p.Slices {
			c.SMs = p.SMs
		}
		step := 1
		for step < n { // a compute instance starts at a multiple of its size, rounded up to a power of two
			step *= 2
		}
		for s := 0; s+n <= p.Slices; s += step {
			c.Starts = append(c.Starts, s)
		}
		out = append(out, c)
	}
	return out
}

func (m *model) computeProfile(p *profile, id int) (computeProfile, bool) {
	for _, c := range m.computeProfiles(p) {
		if c.ID == id {
			return c, true
		}
	}
	return computeProfile{}, false
}

// computeStarts are the places where a compute instance could be created now.
func (g *gpu) computeStarts(i *instance, c computeProfile) []int {
	var out []int
	for _, s := range c.Starts {
		want := nvml.Span{Start: s, Size: c.Slices}
		free := !slices.ContainsFunc(i.Compute, func(o *compute) bool {
			return want.Overlaps(nvml.Span{Start: o.Start, Size: computeSlices[o.Profile]})
		})
		if free {
			out = append(out, s)
		}
	}
	return out
}

// lowestFree is the smallest number from 0 that is not taken.
func lowestFree(taken []int) int {
	for n := range math.MaxInt {
		if !slices.Contains(taken, n) {
			return n
		}
	}
	return 0
}

// freeSlot is the index that a new MIG device of the GPU gets.
func (g *gpu) freeSlot() int {
	var taken []int
	for _, i := range g.Instances {
		for _, c := range i.Compute {
			taken = append(taken, c.Slot)
		}
	}
	return lowestFree(taken)
}

// computeName is the name of the MIG device: "3g.40gb", or "1c.3g.40gb" for a part of it.
func computeName(p *profile, c computeProfile) string {
	if c.Slices == p.Slices {
		return p.Name
	}
	return string(rune('0'+c.Slices)) + "c." + p.Name
}
