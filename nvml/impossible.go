package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Impossible is a request that no arrangement on the GPU grants.
type Impossible struct {
	Reason   string   // why: "2x 3g.40gb take all 8 memory slices; 1g.10gb needs 1 more"
	Possible []string // up to three requests next to it that fit, each like "1x 3g.40gb + 4x 1g.10gb"
}

// Error has the reason and the possible requests in one sentence.
func (e *Impossible) Error() string {
	if len(e.Possible) == 0 {
		return e.Reason
	}
	return e.Reason + "; possible: " + strings.Join(e.Possible, ", or ")
}

// explain finds out why a request does not fit, and the nearest ones that do.
func explain(g GPU, request []wanted) *Impossible {
	reason := excess(g, groupByProfile(request))
	if reason == "" {
		reason = noPlace(g, request)
	}
	return &Impossible{Reason: reason, Possible: nearest(g, request)}
}

// excess names the resources that the GPU has too little of for the groups, at any places; empty if it has enough of all.
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

// some gives n instances of a group as lines. It takes a divided group as a whole or not at all.
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
	total, need := budgetOf(g).compute, 0
	for _, gr := range groups {
		need += gr.instances() * gr.profile.Slices
	}
	if need <= total {
		return ""
	}
	return fmt.Sprintf("%s need %d compute slices, and %s has %d", lines(allLines(groups)), need, model(g), total)
}

func tooManyEngines(g GPU, groups []group) string {
	has := budgetOf(g).engines
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
		total, need := engine.count(has), 0
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

// noPlace explains why a request has no arrangement although the GPU has enough of all resources for it. It names only the lines that matter.
func noPlace(g GPU, request []wanted) string {
	core := slices.Clone(request)
	for i := range core {
		for core[i].count > 0 {
			core[i].count--
			if possible(g, present(core)) {
				core[i].count++
				break
			}
		}
	}
	core = present(core)
	var where []string
	for _, gr := range groupByProfile(core) {
		where = append(where, fmt.Sprintf("%s fits only at %s", gr.profile.Name, starts(gr.profile)))
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

// nearest lists requests that would fit instead: the largest parts of the request, those that drop the fewest instances first,
// at most three. It gives the room of a dropped instance to the other lines, the largest first.
func nearest(g GPU, request []wanted) []string {
	request = slices.Clone(request)
	for i, w := range request {
		request[i].count = min(w.count, 1+w.profile.Max*max(1, w.compute.Max)) // no GPU has room for more
	}
	var out []string
	for _, counts := range largestParts(g, request, 3) {
		out = append(out, lines(present(fillUp(g, request, counts))))
	}
	return out
}

// largestParts returns so many choices of counts that fit. None exceeds the request, and none is part of another. Those that drop the fewest devices
// come first, and of these those that keep the most of the first lines.
func largestParts(g GPU, request []wanted, most int) [][]int {
	p := parts{gpu: g, request: request, part: slices.Clone(request), bounds: bounds(g, request), most: most}
	for i := range p.part {
		p.part[i].count = 0
	}
	memory := g.MemorySlices()
	for n := p.bounds[0][memory]; n > 0; n-- {
		p.choose(0, n, memory)
	}
	return p.found
}

// parts is a search for the largest parts of a request. It goes from many devices to few, so that none that it finds is part of a
// later one, and it ends after a few steps unless hardly anything fits.
type parts struct {
	gpu     GPU
	request []wanted
	part    []wanted // the request with the counts chosen so far
	bounds  [][]int
	most    int
	found   [][]int
}

// choose decides on exactly n devices of the lines from i on. The memory slices are those that are left for the profile
// of line i, less its undivided instances, and for all that follow.
func (p *parts) choose(i, n, memory int) {
	if len(p.found) == p.most || p.partOfAnother(i) {
		return
	}
	if i == len(p.request) {
		p.found = append(p.found, counts(p.part))
		return
	}
	for take := min(n, p.request[i].count); take >= 0; take-- {
		p.part[i].count = take
		left := p.left(i, memory)
		if left < 0 || take+p.bounds[i+1][left] < n {
			continue
		}
		// More of a line never makes fit what does not fit with less.
		if take == 0 || possible(p.gpu, present(p.part)) {
			p.choose(i+1, n-take, left)
		}
	}
	p.part[i].count = 0
}

// left is the memory that the choice for line i leaves. The divided instances of a profile are counted behind the last
// of its lines, since the parts of several lines may share one.
func (p *parts) left(i, memory int) int {
	w := p.part[i]
	if w.whole() {
		memory -= w.count * memorySize(w.profile)
	}
	if i+1 < len(p.part) && p.part[i+1].profile.Name == w.profile.Name {
		return memory
	}
	for _, gr := range groupByProfile(linesOf(p.part[:i+1], w.profile)) {
		memory -= gr.divided * memorySize(gr.profile)
	}
	return memory
}

// partOfAnother reports whether each choice for the lines from i on would give a part of one that the search has found.
func (p *parts) partOfAnother(i int) bool {
	all := append(counts(p.part[:i]), counts(p.request[i:])...)
	return slices.ContainsFunc(p.found, func(l []int) bool { return within(all, l) })
}

// bounds gives for each line and each number of memory slices how many devices of the lines from there on fit at most,
// wherever they may stand.
func bounds(g GPU, request []wanted) [][]int {
	total := g.MemorySlices()
	out := make([][]int, len(request)+1)
	out[len(request)] = make([]int, total+1)
	for i, w := range slices.Backward(request) {
		out[i] = make([]int, total+1)
		together, next := request[i:i+1], i+1
		if !w.whole() {
			together = linesOf(request[i:], w.profile)
			next = i + len(together)
		}
		size := max(1, memorySize(w.profile))
		for instances := 0; instances <= w.profile.Max && instances*size <= total; instances++ {
			devices := atMost(together, instances)
			for m := instances * size; m <= total; m++ {
				out[i][m] = max(out[i][m], devices+out[next][m-instances*size])
			}
		}
	}
	return out
}

// atMost bounds the devices of the lines, all of one profile, that so many instances of it can hold.
func atMost(together []wanted, instances int) int {
	if together[0].whole() {
		return min(together[0].count, instances)
	}
	n, room := 0, instances*together[0].profile.Slices
	for _, w := range slices.Backward(together) { // the smallest first
		take := min(w.count, instances*w.compute.Max, room/max(1, w.compute.Slices))
		n += take
		room -= take * w.compute.Slices
	}
	return n
}

// linesOf are the lines of one profile.
func linesOf(request []wanted, p Profile) []wanted {
	return slices.DeleteFunc(slices.Clone(request), func(w wanted) bool { return w.profile.Name != p.Name })
}

// fillUp gives the memory slices of the dropped devices to the lines of whole instances that kept all of theirs.
func fillUp(g GPU, request []wanted, counts []int) []wanted {
	out := slices.Clone(request)
	freed := 0
	for i, c := range counts {
		out[i].count = c
		freed += (request[i].count - c) * memorySize(request[i].profile)
	}
	for i := range out {
		for counts[i] == request[i].count && request[i].whole() && memorySize(out[i].profile) <= freed {
			out[i].count++
			if !possible(g, present(out)) {
				out[i].count--
				break
			}
			freed -= memorySize(out[i].profile)
		}
	}
	return out
}

// within reports whether no count of a exceeds b's.
func within(a, b []int) bool {
	for i := range a {
		if a[i] > b[i] {
			return false
		}
	}
	return true
}

func present(request []wanted) []wanted {
	return slices.DeleteFunc(slices.Clone(request), func(w wanted) bool { return w.count == 0 })
}

func allLines(groups []group) []wanted {
	var out []wanted
	for _, gr := range groups {
		out = append(out, gr.lines...)
	}
	return out
}

// lines writes a request as users do: "2x 3g.40gb + 1x 1g.10gb".
func lines(request []wanted) string {
	var out []string
	for _, w := range request {
		out = append(out, fmt.Sprintf("%dx %s", w.count, w.name()))
	}
	return strings.Join(out, " + ")
}

// subject is lines, but a single instance goes by its name alone.
func subject(request []wanted) string {
	if isSingle(request) {
		return request[0].name()
	}
	return lines(request)
}

func isSingle(request []wanted) bool { return len(request) == 1 && request[0].count == 1 }

func takes(request []wanted) string {
	if isSingle(request) {
		return "takes"
	}
	return "take"
}

func needs(request []wanted) string {
	if isSingle(request) {
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
