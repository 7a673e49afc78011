package nvml

import (
	"slices"
	"strings"
)

// Solution is the cheapest way from what stands to what is wanted. Each list is in the order of ComparePlaced.
type Solution struct {
	Target  Geometry // how the GPU is cut in the end: Keep and Create together
	Keep    []Placed // what stands as wanted, and stays untouched
	Destroy []Placed // what stands and has to go; half-made instances are always among it
	Create  []Placed // what is missing
}

// Solve finds places for the wanted MIG devices, counted by their names ("1g.10gb", "1c.3g.40gb").
//
// Of all arrangements that the GPU admits it takes the one that destroys the fewest busy instances, then the fewest
// instances, then the fewest memory slices, then the one that stands lowest. The answer depends on nothing but the
// arguments, and executing any part of it leaves the target of a further Solve the same, so that an interrupted change
// is resumed and not begun anew.
//
// The error is *Impossible: the wish names what the GPU does not offer, or cannot stand on it however it is arranged.
func Solve(g GPU, devices map[string]int) (Solution, error) {
	wish, refused := readWish(g, devices)
	if refused != nil {
		return Solution{}, refused
	}
	target, ok := arrange(g, wish)
	if !ok {
		return Solution{}, explain(g, wish)
	}
	return Restore(g, target), nil
}

// Restore is the way from what stands to exactly the target, each instance at its place: for undoing a change.
func Restore(g GPU, target Geometry) Solution {
	s := Solution{Target: slices.Clone(target)}
	s.Target.Sort()
	missing := slices.Clone(s.Target)
	for _, i := range g.Instances {
		at := slices.Index(missing, i.Placed)
		if at < 0 || i.HalfMade() {
			s.Destroy = append(s.Destroy, i.Placed)
			continue
		}
		s.Keep = append(s.Keep, i.Placed)
		missing = slices.Delete(missing, at, at+1)
	}
	s.Create = missing
	slices.SortFunc(s.Keep, ComparePlaced)
	slices.SortFunc(s.Destroy, ComparePlaced)
	return s
}

// arrange gives the best geometry for a wish, or false if none fits.
func arrange(g GPU, wish []wanted) (Geometry, bool) {
	groups := groupByProfile(wish)
	if excess(g, groups) != "" {
		return nil, false
	}
	var best Geometry
	worth, found := 0, false
	eachPacking(groups, func(kinds []kind) {
		target, w, ok := place(g, kinds)
		if !ok || found && w < worth {
			return
		}
		if !found || w > worth || slices.CompareFunc(target, best, ComparePlaced) < 0 {
			best, worth, found = target, w, true
		}
	})
	return best, found
}

// kind is a number of equal instances that want places.
type kind struct {
	profile Profile
	compute string // as in Placed
	count   int
}

// search walks the memory slices from the lowest, and remembers for each slice and each set of instances that are still
// without a place what the best arrangement from there on is worth.
type search struct {
	options [][]option // by first memory slice, each in the order of ComparePlaced
	radix   []int      // what one instance of a kind counts for in the number that stands for a set of instances
	left    []int      // instances of a kind that are still without a place
	memory  int        // memory slices that these need at least
	memo    []cell     // by set and memory slice
}

// option is one kind of instance at one of its places.
type option struct {
	kind   int
	placed Placed
	worth  int // what keeping it is worth; 0 if it does not stand
}

// cell is what is known about one state of the search.
type cell struct {
	seen   bool
	worth  int // unplaceable if nothing fits
	choice int // index of the option taken, or leaveFree
}

const (
	unplaceable = -1
	leaveFree   = -1
)

// place finds the best places for instances of the given kinds, and what keeping is worth in it.
func place(g GPU, kinds []kind) (Geometry, int, bool) {
	slots := g.MemorySlices()
	s := search{options: make([][]option, slots+1)}
	standing := worths(g)
	states := 1
	for k, want := range kinds {
		s.radix = append(s.radix, states)
		s.left = append(s.left, want.count)
		s.memory += want.count * memorySize(want.profile)
		states *= want.count + 1
		for _, at := range want.profile.Placements {
			p := Placed{Profile: want.profile.Name, Span: at, Compute: want.compute}
			s.options[at.Start] = append(s.options[at.Start], option{kind: k, placed: p, worth: standing[p]})
		}
	}
	for _, o := range s.options {
		slices.SortFunc(o, func(a, b option) int { return ComparePlaced(a.placed, b.placed) })
	}
	s.memo = make([]cell, states*(slots+1))
	all := states - 1
	worth := s.best(0, all)
	if worth == unplaceable {
		return nil, 0, false
	}
	return s.chosen(all), worth, true
}

// best is what the best arrangement of a set of instances from a memory slice on is worth.
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

// chosen reads the best arrangement of a set back out of what the search remembers.
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

// worths says what keeping each standing instance is worth. One busy instance outweighs all idle ones, and one instance
// outweighs all memory slices, as no GPU has a thousand of either.
func worths(g GPU) map[Placed]int {
	out := make(map[Placed]int, len(g.Instances))
	for _, i := range g.Instances {
		if i.HalfMade() {
			continue
		}
		w := 1000 + i.Size
		if len(i.Processes) > 0 {
			w += 1000 * 1000
		}
		out[i.Placed] = w
	}
	return out
}

// memorySize is the number of memory slices that an instance takes at least; of the GPUs known it is the same everywhere.
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
