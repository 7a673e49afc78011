package nvml

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// Solution is the cheapest way from the existing instances to the wanted ones. Each list is in the order of ComparePlaced.
type Solution struct {
	Target  Geometry // the final geometry: Keep, Change and Create together
	Keep    []Placed // existing instances that are wanted, and stay untouched
	Change  []Change // existing instances that stay in their place, and are divided otherwise
	Destroy []Placed // existing instances that have to go
	Create  []Placed // instances that are missing
}

// Change divides a GPU instance that stays otherwise than it is. Its compute instances that are in neither list stay untouched.
// Each list is in order of place.
type Change struct {
	Instance Placed // as it is now
	Destroy  []Part // compute instances that have to go; they go first
	Create   []Part // compute instances that are missing
}

// Solve finds places for the wanted MIG devices, counted by their names ("1g.10gb", "1c.3g.40gb"), at most MaxDevices each.
//
// Of all arrangements that the GPU admits it takes the one that destroys the fewest busy MIG devices (held, or with a process). It breaks ties in
// this order: the fewest destroyed MIG devices; the fewest GPU and compute instances to destroy and create; the fewest memory slices of destroyed GPU
// instances; the most even division of instances, since their parts share memory; the lowest places. It never destroys a GPU instance at a requested
// place if its missing compute instances fit next to those that stay.
//
// The solution depends on the arguments only. After any part of it has been performed a further Solve has the same target, so that an interrupted
// change continues instead of starting over.
//
// The error is *Impossible: the GPU does not offer a device of the request, or no arrangement has all of them.
func Solve(g GPU, devices map[string]int) (Solution, error) {
	request, refused := readRequest(g, devices)
	if refused != nil {
		return Solution{}, refused
	}
	target, ok := arrange(g, request)
	if !ok {
		return Solution{}, explain(g, request)
	}
	return Restore(g, target), nil
}

// Restore gives the way from the existing instances to exactly the target, each instance at its place: for undoing a change.
func Restore(g GPU, target Geometry) Solution {
	s := Solution{Target: slices.Clone(target)}
	s.Target.Sort()
	missing := slices.Clone(s.Target)
	for _, i := range g.Instances {
		at := slices.IndexFunc(missing, func(p Placed) bool { return i.Profile == p.Profile && i.Span == p.Span })
		if at < 0 {
			s.Destroy = append(s.Destroy, i.Placed)
			continue
		}
		d, ok := divide(g, i, missing[at].Compute)
		switch {
		case !ok && i.HalfMade(): // to create it there is to finish it
			continue
		case !ok:
			s.Destroy = append(s.Destroy, i.Placed)
			continue
		case len(d.destroy)+len(d.create) == 0:
			s.Keep = append(s.Keep, i.Placed)
		default:
			s.Change = append(s.Change, Change{Instance: i.Placed, Destroy: d.destroy, Create: d.create})
		}
		missing = slices.Delete(missing, at, at+1)
	}
	s.Create = missing
	slices.SortFunc(s.Keep, ComparePlaced)
	slices.SortFunc(s.Change, func(a, b Change) int { return ComparePlaced(a.Instance, b.Instance) })
	slices.SortFunc(s.Destroy, ComparePlaced)
	return s
}

// arrange gives the best geometry for a request, or false if none fits.
func arrange(g GPU, request []wanted) (Geometry, bool) {
	groups := groupByProfile(request)
	for i := range groups {
		if groups[i].unpackable {
			return nil, false
		}
		groups[i].spread(g)
	}
	all := budgetOf(g)
	kept := newWorths(g)
	var best Geometry
	worth, found := 0, false
	eachPacking(groups, func(kinds []kind) {
		if !all.covers(kinds) {
			return
		}
		target, w, ok := place(g.MemorySlices(), kinds, kept.of)
		if !ok {
			return
		}
		w -= len(target) * worthCall // each instance takes a call, unless it is kept
		order := cmp.Or(cmp.Compare(worth, w), cmp.Compare(unevenness(target), unevenness(best)), slices.CompareFunc(target, best, ComparePlaced))
		if !found || order < 0 {
			best, worth, found = target, w, true
		}
	})
	return best, found
}

// unevenness is the smaller the more evenly devices are spread over instances.
func unevenness(target Geometry) int {
	n := 0
	for _, p := range target {
		n += len(p.Devices()) * len(p.Devices())
	}
	return n
}

// possible reports whether a request has an arrangement at all on an empty GPU. That takes less time than finding the best one: the
// division of instances does not matter, nor which of them are where, if all have the same possible places.
func possible(g GPU, request []wanted) bool {
	var kinds, alike []kind
	for _, gr := range groupByProfile(request) {
		if gr.unpackable {
			return false
		}
		k := kind{profile: gr.profile, count: gr.instances()}
		kinds = append(kinds, k)
		at := slices.IndexFunc(alike, func(o kind) bool { return slices.Equal(o.profile.Placements, k.profile.Placements) })
		if at < 0 {
			alike = append(alike, k)
		} else {
			alike[at].count += k.count
		}
	}
	if !budgetOf(g).covers(kinds) {
		return false
	}
	_, _, ok := place(g.MemorySlices(), alike, func(Placed) int { return 0 })
	return ok
}

// budget has the amounts of the resources that a GPU has for instances, whatever their places.
type budget struct {
	memory, compute int // slices
	engines         Engines
}

// budgetOf derives the budget from the profiles. The library does not report the engines of the whole GPU. The GPU has at least those of as many
// instances of a profile as it holds; on some GPUs the library gives the largest profile fewer than its parts have together. But if no smaller plain
// profile has an engine, the GPU has no more of it than the largest: some profiles with an attribute take it, and the library may count too many of
// these.
func budgetOf(g GPU) budget {
	b := budget{memory: g.MemorySlices()}
	var largest Profile
	for _, p := range g.Profiles {
		all := p.Engines.times(min(p.Max, places(p)))
		b.compute = max(b.compute, p.Slices)
		b.engines = b.engines.each(all, func(a, b int) int { return max(a, b) })
		if p.plain() && p.Slices > largest.Slices {
			largest = p
		}
	}
	var smaller Engines
	for _, p := range g.Profiles {
		if p.plain() && p.Slices < largest.Slices {
			smaller = smaller.each(p.Engines, func(a, b int) int { return max(a, b) })
		}
	}
	alone := largest.Engines.each(smaller, func(of, parts int) int {
		if parts > 0 || of == 0 {
			return math.MaxInt
		}
		return of
	})
	b.engines = b.engines.each(alone, func(a, b int) int { return min(a, b) })
	return b
}

// plain reports whether the profile has no attribute, as "+me" is one.
func (p Profile) plain() bool { return !strings.ContainsAny(p.Name, "+-") }

// places counts the instances of a profile that fit next to each other.
func places(p Profile) int {
	if len(p.Placements) == 0 {
		return p.Max // the driver reports no places
	}
	n, end := 0, 0
	for _, at := range slices.SortedFunc(slices.Values(p.Placements), func(a, b Span) int { return cmp.Compare(a.End(), b.End()) }) {
		if at.Start >= end {
			n, end = n+1, at.End()
		}
	}
	return n
}

// Holds returns how many instances of the profile an empty GPU holds: the library's number, bounded by places, slices and engines. The library counts
// wrongly on some GPUs (NVIDIA's mig-parted has its own table for the A30).
func (g GPU) Holds(p Profile) int {
	b := budgetOf(g)
	n := min(p.Max, places(p), share(b.compute, p.Slices), share(b.memory, memorySize(p)))
	e := b.engines.each(p.Engines, share)
	return min(n, e.Copy, e.Decoder, e.Encoder, e.JPEG, e.OFA)
}

// Largest returns the largest profile that one more instance can have next to the present ones; false if there is no place for any.
func (g GPU) Largest() (Profile, bool) {
	for _, p := range slices.SortedFunc(slices.Values(g.Profiles), func(a, b Profile) int { return compareProfiles(b, a) }) {
		if g.Further(p) > 0 {
			return p, true
		}
	}
	return Profile{}, false
}

// Further returns how many more instances of the profile fit next to the present ones. It is 0 if the driver does not know the profile of one of these.
func (g GPU) Further(p Profile) int {
	p.Placements = slices.DeleteFunc(slices.Clone(p.Placements), func(at Span) bool {
		return slices.ContainsFunc(g.Instances, func(i Instance) bool { return i.Overlaps(at) })
	})
	if len(p.Placements) == 0 {
		return 0
	}
	kinds := []kind{{profile: p, count: places(p)}}
	for _, i := range g.Instances {
		of, known := g.Profile(i.Profile)
		if !known {
			return 0
		}
		kinds = append(kinds, kind{profile: of, count: 1})
	}
	for all := budgetOf(g); kinds[0].count > 0 && !all.covers(kinds); {
		kinds[0].count--
	}
	return kinds[0].count
}

// FreeSlices returns how many memory slices no instance has. It is 0 if the instances have all compute slices: seven of one slice each leave one of eight memory
// slices, which no instance can use.
func (g GPU) FreeSlices() int {
	left := budgetOf(g)
	for _, i := range g.Instances {
		p, _ := g.Profile(i.Profile)
		left.memory -= i.Size
		left.compute -= p.Slices
	}
	if left.compute <= 0 {
		return 0
	}
	return max(0, left.memory)
}

// share is how often the part is in all of it.
func share(all, part int) int {
	if part <= 0 {
		return math.MaxInt
	}
	return all / part
}

// covers reports whether the budget has enough of each resource for the instances, and the GPU holds so many of each profile.
func (b budget) covers(kinds []kind) bool {
	for i, k := range kinds {
		n := k.count
		for _, o := range kinds[:i] {
			if o.profile.Name == k.profile.Name {
				n += o.count
			}
		}
		if n > k.profile.Max {
			return false
		}
		b.memory -= k.count * memorySize(k.profile)
		b.compute -= k.count * k.profile.Slices
		takes := k.profile.Engines.times(k.count)
		b.engines.Copy -= takes.Copy
		b.engines.Decoder -= takes.Decoder
		b.engines.Encoder -= takes.Encoder
		b.engines.JPEG -= takes.JPEG
		b.engines.OFA -= takes.OFA
	}
	return min(b.memory, b.compute, b.engines.Copy, b.engines.Decoder, b.engines.Encoder, b.engines.JPEG, b.engines.OFA) >= 0
}

// each combines the numbers of each kind of engine.
func (e Engines) each(with Engines, of func(a, b int) int) Engines {
	return Engines{
		Copy: of(e.Copy, with.Copy), Decoder: of(e.Decoder, with.Decoder), Encoder: of(e.Encoder, with.Encoder),
		JPEG: of(e.JPEG, with.JPEG), OFA: of(e.OFA, with.OFA),
	}
}

func (e Engines) times(n int) Engines {
	return Engines{Copy: n * e.Copy, Decoder: n * e.Decoder, Encoder: n * e.Encoder, JPEG: n * e.JPEG, OFA: n * e.OFA}
}

// kind is a number of equal instances that want places.
type kind struct {
	profile Profile
	compute string // as in Placed
	count   int
}

// search walks the memory slices from the lowest. For each slice and each set of instances still without a place it remembers the worth of the best
// arrangement from there on.
type search struct {
	options [][]option // by first memory slice, each in the order of ComparePlaced
	radix   []int      // the weight of one instance of a kind in the number of a set of instances
	left    []int      // instances of a kind that are still without a place
	memory  int        // memory slices that these need at least
	memo    []cell     // by set and memory slice
}

// option is one kind of instance at one of its places.
type option struct {
	kind   int
	placed Placed
	worth  int // of the part of it that exists; 0 if none does
}

// cell is the result for one state of the search.
type cell struct {
	seen   bool
	worth  int // unplaceable if nothing fits
	choice int // index of the option taken, or leaveFree
}

const (
	unplaceable = -1
	leaveFree   = -1
)

// place finds the best places for instances of the given kinds on so many slices, and their worth, given the worth of
// each instance at its place.
func place(slots int, kinds []kind, worth func(Placed) int) (Geometry, int, bool) {
	s := search{options: make([][]option, slots+1)}
	states := 1
	for k, want := range kinds {
		s.radix = append(s.radix, states)
		s.left = append(s.left, want.count)
		s.memory += want.count * memorySize(want.profile)
		states *= want.count + 1
		for _, at := range want.profile.Placements {
			p := Placed{Profile: want.profile.Name, Span: at, Compute: want.compute}
			s.options[at.Start] = append(s.options[at.Start], option{kind: k, placed: p, worth: worth(p)})
		}
	}
	for _, o := range s.options {
		slices.SortFunc(o, func(a, b option) int { return ComparePlaced(a.placed, b.placed) })
	}
	s.memo = make([]cell, states*(slots+1))
	all := states - 1
	total := s.best(0, all)
	if total == unplaceable {
		return nil, 0, false
	}
	return s.chosen(all), total, true
}

// best gives the worth of the best arrangement of a set of instances from a memory slice on.
// Since it takes the first of equal options and leaves a slice free only if that is better, it finds the lowest one.
func (s *search) best(slot, set int) int {
	if set == 0 {
		return 0
	}
	if slot+s.memory > len(s.options)-1 {
		return unplaceable
	}
	c := &s.memo[set*len(s.options)+slot]
	if c.seen {
		return c.worth
	}
	*c = cell{seen: true, worth: unplaceable, choice: leaveFree}
	for i, o := range s.options[slot] {
		if s.left[o.kind] == 0 {
			continue
		}
		s.left[o.kind]--
		s.memory -= o.placed.Size
		rest := s.best(o.placed.End(), set-s.radix[o.kind])
		s.memory += o.placed.Size
		s.left[o.kind]++
		if rest != unplaceable && rest+o.worth > c.worth {
			c.worth, c.choice = rest+o.worth, i
		}
	}
	if rest := s.best(slot+1, set); rest > c.worth {
		c.worth, c.choice = rest, leaveFree
	}
	return c.worth
}

// chosen reads the best arrangement of a set from the memory of the search.
func (s *search) chosen(set int) Geometry {
	var out Geometry
	for slot := 0; set != 0; {
		c := s.memo[set*len(s.options)+slot]
		if c.choice == leaveFree {
			slot++
			continue
		}
		o := s.options[slot][c.choice]
		out = append(out, o.placed)
		set -= s.radix[o.kind]
		slot = o.placed.End()
	}
	return out
}

// The weights of a solution. One kept busy device outweighs all idle ones, one device all calls into the driver, and one call all memory slices (each
// weighs 1): no GPU has a thousand of either.
const (
	worthCall   = 1000
	worthDevice = 1000 * worthCall
	worthBusy   = 1000 * worthDevice
)

// worths gives the worth of keeping an existing instance, by its wanted division. It remembers its results.
type worths struct {
	gpu   GPU
	known map[Placed]int
}

func newWorths(g GPU) worths { return worths{gpu: g, known: map[Placed]int{}} }

// of returns the worth of the existing part of an instance at its place. It counts the GPU instance, which would take a call to destroy and one to
// create, and its devices.
func (w worths) of(p Placed) int {
	if worth, asked := w.known[p]; asked {
		return worth
	}
	worth := 0
	at := slices.IndexFunc(w.gpu.Instances, func(i Instance) bool { return i.Profile == p.Profile && i.Span == p.Span })
	if at >= 0 {
		if d, ok := divide(w.gpu, w.gpu.Instances[at], p.Compute); ok || w.gpu.Instances[at].HalfMade() {
			worth = d.worth + 2*worthCall + p.Size
		}
	}
	w.known[p] = worth
	return worth
}

// memorySize gives the fewest memory slices that an instance takes; on all known GPUs it is the same at each place.
func memorySize(p Profile) int {
	size := 0
	for i, at := range p.Placements {
		if i == 0 || at.Size < size {
			size = at.Size
		}
	}
	return size
}

// sameName compares profile names. In a label's value NVIDIA writes "." for "+", which is not allowed there.
func sameName(a, b string) bool {
	return strings.ReplaceAll(a, "+", ".") == strings.ReplaceAll(b, "+", ".")
}
