package nvml

import (
	"cmp"
	"slices"
	"strings"
)

// group is all that is wished of one profile, and into how many GPU instances it goes.
type group struct {
	profile    Profile
	lines      []wanted
	whole      int        // instances that are not divided
	divided    int        // instances that hold the parts: as few as possible
	layouts    [][]layout // the ways of dividing them: for each, the layouts and how many instances have one
	unpackable bool       // the parts fit into no number of instances that a GPU holds
}

// layout is a number of instances that are divided alike.
type layout struct {
	compute string
	count   int
}

func (g group) instances() int { return g.whole + g.divided }

// groupByProfile collects the lines of a wish by their GPU instance profile, and packs their parts.
func groupByProfile(wish []wanted) []group {
	var groups []group
	for _, w := range wish {
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
	var parts []wanted
	total := 0
	for _, w := range g.lines {
		if w.whole() {
			g.whole += w.count
			continue
		}
		parts = append(parts, w)
		total += min(w.count, 1+g.profile.Max*w.compute.Max) * w.compute.Slices
	}
	if len(parts) == 0 {
		return
	}
	slices.SortFunc(parts, func(a, b wanted) int { return cmp.Compare(a.compute.Slices, b.compute.Slices) })
	p := packing{parts: parts, room: g.profile.Slices}
	for n := (total + p.room - 1) / max(1, p.room); n <= g.profile.Max; n++ {
		if p.fill(counts(parts), n, nil); len(p.found) > 0 {
			g.divided, g.layouts = n, p.found
			return
		}
	}
	g.unpackable = true
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
	parts []wanted
	room  int     // compute slices of one instance
	used  [][]int // what the instances divided so far hold: a count for each part
	found [][]layout
}

// fill divides the parts left among exactly n further instances, none of which holds more than the one before, so that
// every division is found once.
func (p *packing) fill(left []int, n int, before []int) {
	need := 0
	for i, c := range left {
		need += c * p.parts[i].compute.Slices
	}
	switch {
	case need == 0 && n == 0:
		p.found = append(p.found, p.layouts())
		return
	case need < n || need > n*p.room:
		return
	}
	p.eachHolding(left, make([]int, len(left)), 0, p.room, func(held []int) {
		if before != nil && slices.Compare(held, before) > 0 {
			return
		}
		rest := slices.Clone(left)
		for i, c := range held {
			rest[i] -= c
		}
		p.used = append(p.used, held)
		p.fill(rest, n-1, held)
		p.used = p.used[:len(p.used)-1]
	})
}

// eachHolding calls yield with everything that one instance can hold of the parts left, from part i on.
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

// layouts writes what the instances hold as Placed.Compute does, equal ones counted.
func (p *packing) layouts() []layout {
	var out []layout
	for _, held := range p.used {
		var names []string
		for i, n := range held {
			names = append(names, slices.Repeat([]string{p.parts[i].compute.Name}, n)...)
		}
		compute := strings.Join(names, "+")
		if last := len(out) - 1; last >= 0 && out[last].compute == compute {
			out[last].count++
			continue
		}
		out = append(out, layout{compute: compute, count: 1})
	}
	return out
}

// eachPacking calls yield with the instances that a wish comes to, once for every way of dividing them.
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
