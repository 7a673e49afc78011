package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Impossible is a wish that no arrangement on the GPU grants.
type Impossible struct {
	Reason   string   // the proof: "2x 3g.40gb take all 8 memory slices; 1g.10gb needs 1 more"
	Possible []string // up to three wishes next to it that fit, each like "1x 3g.40gb + 4x 1g.10gb"
}

// Error is one sentence: why it cannot be, and what could be instead.
func (e *Impossible) Error() string {
	if len(e.Possible) == 0 {
		return e.Reason
	}
	return e.Reason + "; possible: " + strings.Join(e.Possible, ", or ")
}

// explain proves that a wish does not fit, and looks for those next to it that do.
func explain(g GPU, wish []wanted) *Impossible {
	reason := excess(g, groupByProfile(wish))
	if reason == "" {
		reason = noPlace(g, wish)
	}
	return &Impossible{Reason: reason, Possible: nearest(g, wish)}
}

// excess names what the groups need more of than the GPU has, wherever they stand; empty if there is enough of everything.
func excess(g GPU, groups []group) string {
	return cmp.Or(tooMany(groups), tooMuchMemory(g, groups), tooMuchCompute(g, groups), tooManyEngines(g, groups))
}

func tooMany(groups []group) string {
	for _, gr := range groups {
		most := gr.profile.Max
		switch {
		case !gr.unpackable && gr.instances() <= most:
		case len(gr.lines) > 1:
			return fmt.Sprintf("%s need more than %s of %s, and at most %d %s", lines(gr.lines), plural(most, "instance"),
				gr.profile.Name, most, fits(most))
		default:
			line := gr.lines[0]
			if !line.whole() {
				most *= min(line.compute.Max, line.profile.Slices/max(1, line.compute.Slices))
			}
			return fmt.Sprintf("at most %dx %s %s, not %d", most, line.name(), fits(most), line.count)
		}
	}
	return ""
}

func tooMuchMemory(g GPU, groups []group) string {
	total := g.MemorySlices()
	taken, over := 0, 0
	var first, rest []wanted
	for _, gr := range groups {
		size := memorySize(gr.profile)
		n := min(gr.instances(), (total-taken)/max(1, size))
		if over > 0 || n < gr.instances() && gr.divided > 0 {
			n = 0
		}
		if n == gr.instances() {
			first = append(first, gr.lines...)
		} else {
			first = append(first, some(gr, n)...)
			rest = append(rest, some(gr, gr.instances()-n)...)
		}
		taken += n * size
		over += (gr.instances() - n) * size
	}
	switch {
	case over == 0:
		return ""
	case len(first) == 0:
		return fmt.Sprintf("%s %s %d memory slices, and %s has %d", lines(rest), needs(rest), over, model(g), total)
	case taken == total:
		return fmt.Sprintf("%s %s all %d memory slices; %s %s %d more", lines(first), takes(first), total,
			subject(rest), needs(rest), over)
	default:
		return fmt.Sprintf("%s %s %d of the %d memory slices; %s %s %d", lines(first), takes(first), taken, total,
			subject(rest), needs(rest), over)
	}
}

// some is n instances of a group as lines. A divided group is taken as a whole or not at all.
func some(gr group, n int) []wanted {
	switch {
	case n == 0:
		return nil
	case gr.divided > 0:
		return gr.lines
	default:
		return []wanted{{profile: gr.profile, count: n}}
	}
}

func tooMuchCompute(g GPU, groups []group) string {
	total, need := 0, 0
	for _, p := range g.Profiles {
		total = max(total, p.Slices)
	}
	for _, gr := range groups {
		need += gr.instances() * gr.profile.Slices
	}
	if need <= total {
		return ""
	}
	return fmt.Sprintf("%s need %d compute slices, and %s has %d", lines(allLines(groups)), need, model(g), total)
}

func tooManyEngines(g GPU, groups []group) string {
	for _, engine := range []struct {
		name  string
		count func(Engines) int
	}{
		{"copy", func(e Engines) int { return e.Copy }},
		{"decoder", func(e Engines) int { return e.Decoder }},
		{"encoder", func(e Engines) int { return e.Encoder }},
		{"JPEG", func(e Engines) int { return e.JPEG }},
		{"OFA", func(e Engines) int { return e.OFA }},
	} {
		// The library does not say what the whole GPU has. It has at least what as many instances of a profile take
		// as it holds; on some GPUs the largest one is said to take less than its parts do together.
		total, need := 0, 0
		for _, p := range g.Profiles {
			total = max(total, p.Max*engine.count(p.Engines))
		}
		var takers []wanted
		for _, gr := range groups {
			if n := engine.count(gr.profile.Engines); n > 0 {
				need += gr.instances() * n
				takers = append(takers, gr.lines...)
			}
		}
		if need > total {
			return fmt.Sprintf("%s need %d %s engines, and %s has %d", lines(takers), need, engine.name, model(g), total)
		}
	}
	return ""
}

// noPlace proves for a wish that the GPU has enough of everything for, that there is still no arrangement. It names
// only lines that it takes for that.
func noPlace(g GPU, wish []wanted) string {
	core := slices.Clone(wish)
	for i := range core {
		for core[i].count > 0 {
			core[i].count--
			if _, ok := arrange(g, present(core)); ok {
				core[i].count++
				break
			}
		}
	}
	core = present(core)
	var where []string
	for _, gr := range groupByProfile(core) {
		where = append(where, fmt.Sprintf("%s can stand only at %s", gr.profile.Name, starts(gr.profile)))
	}
	return fmt.Sprintf("no arrangement of %s fits: %s", lines(core), strings.Join(where, ", "))
}

func starts(p Profile) string {
	var out []string
	for _, at := range p.Placements {
		out = append(out, fmt.Sprint(at.Start))
	}
	switch n := len(out); n {
	case 0:
		return "no place"
	case 1:
		return out[0]
	default:
		return strings.Join(out[:n-1], ", ") + " or " + out[n-1]
	}
}

// nearest lists what would fit instead of a wish: the largest parts of it, those that drop the fewest instances first,
// at most three. The room that a dropped instance leaves is given to the other lines, the largest first.
func nearest(g GPU, wish []wanted) []string {
	wish = slices.Clone(wish)
	for i, w := range wish {
		wish[i].count = min(w.count, 1+w.profile.Max*max(1, w.compute.Max)) // what is beyond fits in no case
	}
	fitting := subWishes(g, wish)
	dropped := func(counts []int) int {
		n := 0
		for i, c := range counts {
			n += wish[i].count - c
		}
		return n
	}
	slices.SortStableFunc(fitting, func(a, b []int) int {
		return cmp.Or(cmp.Compare(dropped(a), dropped(b)), slices.Compare(b, a))
	})
	var largest [][]int
	var out []string
	for _, counts := range fitting {
		if slices.ContainsFunc(largest, func(l []int) bool { return within(counts, l) }) {
			continue
		}
		largest = append(largest, counts)
		if s := lines(present(fillUp(g, wish, counts))); s != "" && !slices.Contains(out, s) {
			out = append(out, s)
		}
		if len(out) == 3 {
			break
		}
	}
	return out
}

// subWishes is every choice of counts, none above the wish, that fits.
func subWishes(g GPU, wish []wanted) [][]int {
	var out [][]int
	part := slices.Clone(wish)
	for i := range part {
		part[i].count = 0
	}
	var choose func(i int)
	choose = func(i int) {
		if i == len(part) {
			out = append(out, counts(part))
			return
		}
		// More of a line never makes fit what does not fit with less.
		for n := 0; n <= wish[i].count; n++ {
			part[i].count = n
			if _, ok := arrange(g, present(part)); !ok {
				break
			}
			choose(i + 1)
		}
		part[i].count = 0
	}
	choose(0)
	return out
}

// fillUp gives the memory slices of what was dropped from a wish to the lines of whole instances that kept all of theirs.
func fillUp(g GPU, wish []wanted, counts []int) []wanted {
	out := slices.Clone(wish)
	freed := 0
	for i, c := range counts {
		out[i].count = c
		freed += (wish[i].count - c) * memorySize(wish[i].profile)
	}
	for i := range out {
		for counts[i] == wish[i].count && wish[i].whole() && memorySize(out[i].profile) <= freed {
			out[i].count++
			if _, ok := arrange(g, present(out)); !ok {
				out[i].count--
				break
			}
			freed -= memorySize(out[i].profile)
		}
	}
	return out
}

// within reports whether no count of a is above that of b.
func within(a, b []int) bool {
	for i := range a {
		if a[i] > b[i] {
			return false
		}
	}
	return true
}

func present(wish []wanted) []wanted {
	return slices.DeleteFunc(slices.Clone(wish), func(w wanted) bool { return w.count == 0 })
}

func allLines(groups []group) []wanted {
	var out []wanted
	for _, gr := range groups {
		out = append(out, gr.lines...)
	}
	return out
}

// lines writes a wish as people do: "2x 3g.40gb + 1x 1g.10gb".
func lines(wish []wanted) string {
	var out []string
	for _, w := range wish {
		out = append(out, fmt.Sprintf("%dx %s", w.count, w.name()))
	}
	return strings.Join(out, " + ")
}

// subject is lines, but a single instance goes by its name alone.
func subject(wish []wanted) string {
	if single(wish) {
		return wish[0].name()
	}
	return lines(wish)
}

func single(wish []wanted) bool { return len(wish) == 1 && wish[0].count == 1 }

func takes(wish []wanted) string {
	if single(wish) {
		return "takes"
	}
	return "take"
}

func needs(wish []wanted) string {
	if single(wish) {
		return "needs"
	}
	return "need"
}

func fits(n int) string {
	if n == 1 {
		return "fits"
	}
	return "fit"
}

func plural(n int, noun string) string {
	if n == 1 {
		return fmt.Sprintf("%d %s", n, noun)
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
