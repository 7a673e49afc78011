package nvml

import (
	"cmp"
	"slices"
	"strings"
)

// group has the lines of a request for one profile, and the number of GPU instances that they need.
type group struct {
	profile    Profile
	lines      []wanted
	whole      int        // instances that are not divided
	divided    int        // the fewest instances that hold the parts
	unpackable bool       // the parts fit into no number of instances that a GPU holds
	layouts    [][]layout // the ways of dividing instances that are worth an observation, see pack and spread
}

// layout is a number of instances that are divided alike.
type layout struct {
	compute string
	count   int
}

func (g group) instances() int { return g.whole + g.divided }

// groupByProfile collects the lines of a request by their GPU instance profile, and counts the instances.
func groupByProfile(request []wanted) []group {
	var groups []group
	for _, w := range request {
		at := slices.IndexFunc(groups, func(g group) bool { return g.profile.Name == w.profile.Name })
		if at < 0 {
			groups = append(groups, group{profile: w.profile})
			at = len(groups) - 1
		}
		groups[at].lines = append(groups[at].lines, w)
	}
	for i := range groups {
		groups[i].pack()
	}
	return groups
}

// pack finds every way of dividing the fewest instances so that they hold all parts of the group.
func (g *group) pack() {
	for _, w := range g.lines {
		if w.whole() {
			g.whole += w.count
		}
	}
	p := packingOf(*g)
	if len(p.parts) == 0 {
		return
	}
	fewest := p.fewest(counts(p.parts), g.profile.Max)
	if len(fewest) == 0 {
		g.unpackable = true
		return
	}
	g.divided = len(fewest[0])
	for _, used := range fewest {
		g.layouts = append(g.layouts, p.layouts(used))
	}
}

// spread adds the ways of dividing more instances than the fewest. Parts stay in their places, though fewer instances would hold them, and missing
// ones may not fit between them. Each instance beyond the fewest exists already.
func (g *group) spread(gpu GPU) {
	if g.unpackable || g.divided == 0 {
		return
	}
	standing := 0
	for _, i := range gpu.Instances {
		if i.Profile == g.profile.Name {
			standing++
		}
	}
	p := packingOf(*g)
	most := min(g.profile.Max-g.whole, g.divided+standing, gpu.MemorySlices()/max(1, memorySize(g.profile)))
	for n := g.divided + 1; n <= most; n++ {
		p.found = nil
		p.fill(counts(p.parts), n, nil)
		for _, used := range p.found {
			g.layouts = append(g.layouts, p.layouts(used))
		}
	}
}

// without takes the parts of one instance away; false if they are not all there.
func without(left, held []int) ([]int, bool) {
	rest := slices.Clone(left)
	for i, n := range held {
		rest[i] -= n
		if rest[i] < 0 {
			return nil, false
		}
	}
	return rest, true
}

func counts(parts []wanted) []int {
	out := make([]int, len(parts))
	for i, w := range parts {
		out[i] = w.count
	}
	return out
}

// packing divides parts among instances of equal room.
type packing struct {
	parts []wanted // smallest first
	room  int      // compute slices of one instance
	used  [][]int  // the parts of each instance divided so far: a count for each kind
	found [][][]int
}

func packingOf(g group) *packing {
	p := &packing{room: g.profile.Slices}
	for _, w := range g.lines {
		if !w.whole() {
			p.parts = append(p.parts, w)
		}
	}
	slices.SortFunc(p.parts, func(a, b wanted) int { return cmp.Compare(a.compute.Slices, b.compute.Slices) })
	return p
}

// fewest gives every way of dividing the parts left among as few instances as possible, and nothing if those are more
// than most.
func (p *packing) fewest(left []int, most int) [][][]int {
	total := 0
	for i, c := range left {
		total += min(c, 1+most*p.parts[i].compute.Max) * p.parts[i].compute.Slices
	}
	p.found = nil
	for n := (total + p.room - 1) / max(1, p.room); n <= most && len(p.found) == 0; n++ {
		p.fill(left, n, nil)
	}
	return p.found
}

// fill divides the parts left among exactly n further instances. None holds more than the one before, so that every division is found once.
func (p *packing) fill(left []int, n int, before []int) {
	need := 0
	for i, c := range left {
		need += c * p.parts[i].compute.Slices
	}
	switch {
	case need == 0 && n == 0:
		p.found = append(p.found, slices.Clone(p.used))
		return
	case need < n || need > n*p.room:
		return
	}
	p.eachHolding(left, make([]int, len(left)), 0, p.room, func(held []int) {
		if before != nil && slices.Compare(held, before) > 0 {
			return
		}
		rest, _ := without(left, held) // held has only parts that are left
		p.used = append(p.used, held)
		p.fill(rest, n-1, held)
		p.used = p.used[:len(p.used)-1]
	})
}

// eachHolding calls yield with each set of the parts left, from part i on, that one instance can hold.
func (p *packing) eachHolding(left, held []int, i, room int, yield func([]int)) {
	if i == len(left) {
		if room < p.room {
			yield(slices.Clone(held))
		}
		return
	}
	c := p.parts[i].compute
	for n := 0; n <= min(left[i], c.Max) && n*c.Slices <= room; n++ {
		held[i] = n
		p.eachHolding(left, held, i+1, room-n*c.Slices, yield)
	}
	held[i] = 0
}

// layouts writes the parts of instances as Placed.Compute does, and counts equal ones.
func (p *packing) layouts(used [][]int) []layout {
	var out []layout
	for _, held := range used {
		var names []string
		for i, n := range held {
			names = append(names, slices.Repeat([]string{p.parts[i].compute.Name}, n)...)
		}
		compute := strings.Join(names, "+")
		at := slices.IndexFunc(out, func(l layout) bool { return l.compute == compute })
		if at < 0 {
			out = append(out, layout{compute: compute})
			at = len(out) - 1
		}
		out[at].count++
	}
	return out
}

// eachPacking calls yield with the instances that a request comes to, once for every way of dividing them.
func eachPacking(groups []group, yield func([]kind)) {
	if len(groups) == 0 {
		yield(nil)
		return
	}
	first := groups[0]
	eachPacking(groups[1:], func(rest []kind) {
		rest = slices.Clone(rest)
		if first.whole > 0 {
			rest = append(rest, kind{profile: first.profile, count: first.whole})
		}
		if first.divided == 0 {
			yield(rest)
			return
		}
		for _, division := range first.layouts {
			kinds := slices.Clone(rest)
			for _, l := range division {
				kinds = append(kinds, kind{profile: first.profile, compute: l.compute, count: l.count})
			}
			yield(kinds)
		}
	})
}
