// Package demand says which change of geometry gives a pod the devices that it requests, and what that takes from the pods that run.
//
// It is pure: it depends on its arguments alone. A change is found by the solver that the agent cuts by, so that the agent does what is said here.
package demand

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Whole stands for a GPU that is not divided, among the names of profiles.
const Whole = "gpu"

// Stays stands for a pod that no change makes leave, among the names of pods.
const Stays = ""

// GPU is a GPU with the pods that have it.
type GPU struct {
	nvml.GPU
	All []string         // pods that have all of it
	On  map[int][]string // pods on an instance, by the first memory slice of that
}

// Want is how many devices of a node a pod requests, by the profile of the MIG device or Whole.
type Want map[string]int

// Recut is a change of geometry on one node after which a pod has its devices.
type Recut struct {
	Cuts []Cut    // in the order of the GPUs; none if the node has free devices
	Pods []string // that have to leave, sorted
	Cost Cost
}

// Cut is what one GPU becomes.
type Cut struct {
	GPU     int // its place among those of the call
	Request nvml.Request
	After   nvml.Geometry
	Used    []nvml.Placed // what the pod gets; none where it gets the GPU as a whole
}

// Cost orders changes: the first field that differs decides, and less is better.
type Cost struct {
	Pods      int // pods that have to leave, in a search for the fewest
	Lost      int // memory slices that the pods which have to leave have on the node
	Fragments int // Fragments of the GPUs afterwards, less those before
	Calls     int // instances to destroy and to create, and changes of MIG mode
	Free      int // memory slices that no pod has on these GPUs before
}

// Compare is negative if c is less than d.
func (c Cost) Compare(d Cost) int {
	return cmp.Or(cmp.Compare(c.Pods, d.Pods), cmp.Compare(c.Lost, d.Lost), cmp.Compare(c.Fragments, d.Fragments), cmp.Compare(c.Calls, d.Calls), cmp.Compare(c.Free, d.Free))
}

func (c Cost) plus(d Cost) Cost {
	return Cost{Pods: c.Pods + d.Pods, Lost: c.Lost + d.Lost, Fragments: c.Fragments + d.Fragments, Calls: c.Calls + d.Calls, Free: c.Free + d.Free}
}

// Search finds changes. It remembers what it has found for GPUs that are alike, so that one Search serves many nodes and pods. GPUs of one Model and DeviceID
// have to offer the same profiles. It is not safe for several goroutines.
type Search struct {
	asked  map[string]int
	fewest bool
	known  map[string][]option
	lacks  map[string]int // fragments, by model and held instances
	stop   func() bool
}

// Asked returns a search that weighs fragments by how often each profile, or Whole, is requested. Of all changes it takes that which takes the fewest
// memory slices from pods.
func Asked(times map[string]int) *Search {
	return &Search{asked: maps.Clone(times), known: map[string][]option{}, lacks: map[string]int{}}
}

// Until has the search end early when stop reports true. What it finds then is not all: the caller has to ask stop, too.
func (s *Search) Until(stop func() bool) { s.stop = stop }

func (s *Search) stopped() bool { return s.stop != nil && s.stop() }

// FewestPods returns a search for the fewest pods that have to leave. It knows no solver: a pod may leave so that another gets the same device, and instances
// that stay have their places.
func (s *Search) FewestPods() *Search {
	return &Search{asked: s.asked, fewest: true, known: map[string][]option{}, lacks: s.lacks, stop: s.stop}
}

// mostStates bounds the ways to divide what a pod requests among GPUs. Eight GPUs have 56 devices, and pods request one or two kinds.
const mostStates = 4096

// Find returns the change of least cost that gives a pod its devices on one node with these GPUs; false if none does, whatever leaves.
// Where a pod has parts of several GPUs that change, its memory slices count for each of them.
func (s *Search) Find(gpus []GPU, want Want) (Recut, bool) {
	kinds := slices.Sorted(maps.Keys(want))
	states := 1
	for _, k := range kinds {
		if want[k] < 0 || want[k] > nvml.MaxDevices || states > mostStates {
			return Recut{}, false
		}
		states *= want[k] + 1
	}
	if states > mostStates {
		return Recut{}, false
	}
	total := slicesOfPods(gpus)
	// best has the least cost for each part of what is wanted, by the GPUs before.
	best := make([]*way, states)
	best[0] = &way{}
	for i := range gpus {
		next := slices.Clone(best)
		for _, o := range s.options(&gpus[i], kinds, want, total) {
			for from, before := range best {
				to := from + o.state
				if before == nil || !within(from, o.state, kinds, want) {
					continue
				}
				cost := before.cost.plus(o.cost)
				if next[to] == nil || cost.Compare(next[to].cost) < 0 {
					next[to] = &way{cost: cost, before: before, gpu: i, option: o}
				}
			}
		}
		best = next
	}
	if best[states-1] == nil {
		return Recut{}, false
	}
	return best[states-1].recut(gpus), true
}

// way is a chain of options, the last GPU first.
type way struct {
	cost   Cost
	before *way // nil for the beginning
	gpu    int
	option option
}

func (w *way) recut(gpus []GPU) Recut {
	out := Recut{Cost: w.cost}
	for ; w.before != nil; w = w.before {
		g := &gpus[w.gpu]
		if w.option.changes {
			out.Cuts = append(out.Cuts, Cut{GPU: w.gpu, Request: w.option.request, After: w.option.after, Used: w.option.used})
		}
		if w.option.all {
			out.Pods = append(out.Pods, g.All...)
		}
		for _, at := range w.option.lost {
			out.Pods = append(out.Pods, g.On[at]...)
		}
	}
	slices.Reverse(out.Cuts)
	slices.Sort(out.Pods)
	out.Pods = slices.Compact(out.Pods)
	return out
}

// Restored returns the change with those instances again that pods lose by it, as far as they have a place elsewhere on their GPU: the pods may come back.
func (r Recut) Restored(gpus []GPU) Recut {
	r.Cuts = slices.Clone(r.Cuts)
	for i := range r.Cuts {
		c := &r.Cuts[i]
		g := &gpus[c.GPU]
		for _, instance := range g.Instances {
			leave := slices.ContainsFunc(g.On[instance.Start], func(p string) bool { return slices.Contains(r.Pods, p) })
			if p, is := g.Profile(instance.Profile); !leave || slices.Contains(c.After, instance.Placed) || !c.Request.MIG || !is || with(g, c.After).Further(p) == 0 {
				continue
			}
			more := maps.Clone(c.Request.Devices)
			for _, d := range instance.Placed.Devices() {
				more[d]++
			}
			solution, err := nvml.Solve(g.GPU, more)
			takes := slices.ContainsFunc(solution.Destroy, func(p nvml.Placed) bool {
				return slices.ContainsFunc(g.On[p.Start], func(pod string) bool { return !slices.Contains(r.Pods, pod) })
			})
			if err == nil && !takes && hasAll(solution.Target, c.Used) {
				c.Request.Devices, c.After = more, solution.Target
			}
		}
	}
	return r
}

func hasAll(all, some []nvml.Placed) bool {
	return !slices.ContainsFunc(some, func(p nvml.Placed) bool { return !slices.Contains(all, p) })
}

// within reports whether two parts together are a part of what is wanted.
func within(a, b int, kinds []string, want Want) bool {
	for _, k := range kinds {
		radix := want[k] + 1
		if a%radix+b%radix > want[k] {
			return false
		}
		a, b = a/radix, b/radix
	}
	return true
}

// slicesOfPods returns how many memory slices each pod has on the node.
func slicesOfPods(gpus []GPU) map[string]int {
	out := map[string]int{}
	for i := range gpus {
		g := &gpus[i]
		for _, p := range g.All {
			out[p] += max(1, g.MemorySlices())
		}
		for _, instance := range g.Instances {
			for _, p := range g.On[instance.Start] {
				out[p] += instance.Size
			}
		}
	}
	return out
}

// option is one way to have some of the wanted devices on a GPU.
type option struct {
	state   int // which of them, as a number with one digit for each kind
	cost    Cost
	changes bool
	request nvml.Request
	after   nvml.Geometry
	used    []nvml.Placed
	all     bool  // the pods on all of the GPU have to leave
	lost    []int // instances with pods that have to leave
}

// options returns the best way on the GPU for each part of what is wanted that it can have.
func (s *Search) options(g *GPU, kinds []string, want Want, total map[string]int) []option {
	if g.Lost {
		return nil
	}
	key := signature(g, kinds, want, total)
	if known, is := s.known[key]; is {
		return known
	}
	found := map[int]option{}
	note := func(o option) {
		if old, is := found[o.state]; !is || o.cost.Compare(old.cost) < 0 {
			found[o.state] = o
		}
	}
	if o, ok := s.whole(g, total); ok && want[Whole] > 0 {
		o.state = stateOf([]nvml.Placed{{Profile: Whole}}, kinds, want)
		note(o)
	}
	c := cutter{Search: s, gpu: g, total: total, solved: map[string]*option{}}
	each(g, kinds, want, nil, func(chosen []nvml.Placed) bool {
		for _, o := range c.cut(chosen) {
			o.state = stateOf(chosen, kinds, want)
			note(o)
		}
		return !s.stopped()
	})
	if s.stopped() {
		return nil
	}
	out := slices.SortedFunc(maps.Values(found), func(a, b option) int { return cmp.Compare(a.state, b.state) })
	s.known[key] = out
	return out
}

// signature is equal for GPUs with equal options.
func signature(g *GPU, kinds []string, want Want, total map[string]int) string {
	var b strings.Builder
	number := map[string]int{} // pods by the order in which they appear: their names do not matter
	held := func(pods []string) {
		for _, p := range pods {
			if _, is := number[p]; !is {
				number[p] = len(number)
			}
			fmt.Fprintf(&b, "#%d=%d %t", number[p], total[p], p == Stays)
		}
	}
	fmt.Fprintf(&b, "%s %x|%t%t|", g.Model, g.DeviceID, g.Capable, g.Enabled)
	for _, k := range kinds {
		fmt.Fprintf(&b, "%s=%d ", k, want[k])
	}
	held(g.All)
	for _, i := range g.Instances {
		fmt.Fprintf(&b, "|%s %d ", i.Placed, len(i.Devices))
		held(g.On[i.Start])
	}
	return b.String()
}

func stateOf(chosen []nvml.Placed, kinds []string, want Want) int {
	state, radix := 0, 1
	for _, k := range kinds {
		state += radix * count(chosen, k)
		radix *= want[k] + 1
	}
	return state
}

func count(chosen []nvml.Placed, profile string) (n int) {
	for _, p := range chosen {
		if p.Profile == profile {
			n++
		}
	}
	return n
}

// each yields every choice of places for some of the wanted devices, each once, until yield returns false. It returns false then.
func each(g *GPU, kinds []string, want Want, chosen []nvml.Placed, yield func([]nvml.Placed) bool) bool {
	for _, k := range kinds {
		p, offers := g.Profile(k)
		if !offers || count(chosen, k) >= min(want[k], p.Max) {
			continue
		}
		for _, at := range p.Placements {
			next := nvml.Placed{Profile: k, Span: at}
			if len(chosen) > 0 && nvml.ComparePlaced(chosen[len(chosen)-1], next) >= 0 || overlapsAny(chosen, at) {
				continue
			}
			with := append(slices.Clone(chosen), next)
			if !yield(with) || !each(g, kinds, want, with, yield) {
				return false
			}
		}
	}
	return true
}

func overlapsAny(chosen []nvml.Placed, at nvml.Span) bool {
	return slices.ContainsFunc(chosen, func(p nvml.Placed) bool { return p.Overlaps(at) })
}

// whole is the GPU without division.
func (s *Search) whole(g *GPU, total map[string]int) (option, bool) {
	if g.Enabled && !g.Capable || !g.Enabled && len(g.All) > 0 && !s.fewest {
		return option{}, false
	}
	o := option{all: len(g.All) > 0, changes: g.Enabled}
	leaves := slices.Clone(g.All)
	if g.Enabled {
		o.cost.Calls = 1 + len(g.Instances)
		for _, i := range g.Instances {
			if len(g.On[i.Start]) > 0 {
				o.lost = append(o.lost, i.Start)
				leaves = append(leaves, g.On[i.Start]...)
			}
		}
	}
	if slices.Contains(leaves, Stays) {
		return option{}, false
	}
	o.cost = s.leaving(leaves, total, o.cost)
	o.cost.Fragments = s.fragments(g, nil, true) - s.Fragments(g)
	o.cost.Free = g.Free()
	return o, true
}

// leaving adds to the cost that these pods have to leave.
func (s *Search) leaving(pods []string, total map[string]int, c Cost) Cost {
	slices.Sort(pods)
	pods = slices.Compact(pods)
	for _, p := range pods {
		c.Lost += total[p]
	}
	if s.fewest {
		c.Pods += len(pods)
	}
	return c
}

// cutter looks for ways to have instances on one GPU.
type cutter struct {
	*Search

	gpu    *GPU
	total  map[string]int
	solved map[string]*option // by request; nil for one that is impossible
}

// cut returns ways to have instances at these places, with as much as possible of what is there.
func (c *cutter) cut(chosen []nvml.Placed) (out []option) {
	g := c.gpu
	if !g.Capable || slices.Contains(g.All, Stays) {
		return nil
	}
	var keep []nvml.Placed
	for _, i := range g.Instances {
		gets := slices.Contains(chosen, i.Placed) && len(g.On[i.Start]) == 0
		if !gets && !overlapsAny(chosen, i.Span) && len(g.All) == 0 && !i.HalfMade() {
			keep = append(keep, i.Placed)
		}
	}
	// The solver counts devices that are in use, and not what their pods have: another request may cost these less.
	if o := c.solve(chosen, keep); o != nil && o.cost.Lost <= c.takes(chosen) {
		return []option{*o}
	}
	// Or a profile that the GPU holds once, or an engine that it has once, is in use elsewhere on it.
	all := c.gpu.Geometry()
	if c.fewest {
		all = keep
	}
	for set := range 1 << len(all) {
		if kept, is := chosenBy(set, all, !c.fewest); is {
			if o := c.solve(chosen, kept); o != nil {
				out = append(out, *o)
			}
		}
	}
	return out
}

// chosenBy returns the instances with a bit in the set. If only their kinds matter, it is false for all sets of the same kinds but one.
func chosenBy(set int, all []nvml.Placed, kinds bool) (out []nvml.Placed, is bool) {
	for i, p := range all {
		if set&(1<<i) != 0 {
			out = append(out, p)
			continue
		}
		for j := i + 1; kinds && j < len(all); j++ {
			if set&(1<<j) != 0 && all[j].Profile == p.Profile && all[j].Compute == p.Compute {
				return nil, false
			}
		}
	}
	return out, true
}

// takes is what instances at these places take from pods if all else stays where it is.
func (c *cutter) takes(chosen []nvml.Placed) int {
	leaves := slices.Clone(c.gpu.All)
	for _, i := range c.gpu.Instances {
		if overlapsAny(chosen, i.Span) {
			leaves = append(leaves, c.gpu.On[i.Start]...)
		}
	}
	return c.leaving(leaves, c.total, Cost{}).Lost
}

// solve returns what becomes of the GPU if it has these instances, wherever; nil if that is impossible.
func (c *cutter) solve(chosen, kept []nvml.Placed) *option {
	all := slices.Concat(chosen, kept)
	if tooMany(c.gpu, all) {
		return nil
	}
	request := nvml.Request{MIG: true, Devices: map[string]int{}}
	for _, p := range all {
		for _, d := range p.Devices() {
			request.Devices[d]++
		}
	}
	key := fmt.Sprint(request.Devices, len(chosen)) // maps print in the order of their keys
	for _, p := range chosen {
		key += " " + p.Profile
	}
	if c.fewest {
		key = fmt.Sprint(chosen, kept)
	}
	if known, is := c.solved[key]; is {
		return known
	}
	c.solved[key] = nil
	solution, err := c.solution(chosen, kept, request)
	if err != nil {
		return nil
	}
	o := c.outcome(chosen, solution)
	// The solver may leave a pod what it has, and give the other nothing.
	if len(o.used) < len(chosen) || slices.ContainsFunc(o.lost, func(at int) bool { return slices.Contains(c.gpu.On[at], Stays) }) {
		return nil
	}
	o.request = request
	c.solved[key] = &o
	return &o
}

// tooMany reports whether the instances have more slices than the GPU. The solver would say so too, but takes its time to find out what fits instead.
func tooMany(g *GPU, all []nvml.Placed) bool {
	memory, compute, most := 0, 0, 0
	for _, p := range all {
		of, _ := g.Profile(p.Profile)
		memory, compute = memory+p.Size, compute+of.Slices
	}
	for i := range g.Profiles {
		most = max(most, g.Profiles[i].Slices)
	}
	return memory > g.MemorySlices() || compute > most
}

// solution is what becomes of the GPU by the solver; in a search for the fewest pods what was chosen and kept, if the GPU has room for it.
func (c *cutter) solution(chosen, kept []nvml.Placed, request nvml.Request) (nvml.Solution, error) {
	if !c.fewest {
		return nvml.Solve(c.gpu.GPU, request.Devices)
	}
	if _, err := nvml.Solve(with(c.gpu, nil), request.Devices); err != nil {
		return nvml.Solution{}, err
	}
	out := nvml.Solution{Target: slices.Concat(chosen, kept), Keep: kept}
	out.Target.Sort()
	for _, i := range c.gpu.Instances {
		idle := len(c.gpu.On[i.Start]) == 0
		switch chosenHere := slices.Contains(chosen, i.Placed); {
		case slices.Contains(kept, i.Placed):
		case chosenHere && idle:
			out.Keep = append(out.Keep, i.Placed)
		default:
			out.Destroy = append(out.Destroy, i.Placed)
		}
	}
	for _, p := range out.Target {
		if !slices.Contains(out.Keep, p) {
			out.Create = append(out.Create, p)
		}
	}
	return out, nil
}

// outcome makes an option of a solution. The pod gets devices of the chosen profiles.
func (c *cutter) outcome(chosen []nvml.Placed, solution nvml.Solution) option {
	g := c.gpu
	o := option{after: solution.Target, all: len(g.All) > 0, changes: !g.Enabled || len(solution.Destroy)+len(solution.Create)+len(solution.Change) > 0}
	leaves := slices.Clone(g.All)
	for _, p := range solution.Destroy {
		if pods := g.On[p.Start]; len(pods) > 0 {
			o.lost = append(o.lost, p.Start)
			leaves = append(leaves, pods...)
		}
	}
	var held []nvml.Placed
	idle := slices.Clone(solution.Create)
	for _, p := range slices.Concat(solution.Keep, changed(solution)) {
		if len(g.On[p.Start]) > 0 {
			held = append(held, p)
		} else {
			idle = append(idle, p)
		}
	}
	slices.SortFunc(idle, nvml.ComparePlaced)
	for _, p := range chosen {
		if at := slices.IndexFunc(idle, func(i nvml.Placed) bool { return i.Profile == p.Profile && i.Compute == "" }); at >= 0 {
			o.used = append(o.used, idle[at])
			idle = slices.Delete(idle, at, at+1)
		}
	}
	o.cost = c.leaving(leaves, c.total, Cost{
		Calls: len(solution.Destroy) + len(solution.Create) + len(solution.Change), Free: g.Free(),
		Fragments: c.fragments(g, append(held, o.used...), false) - c.Fragments(g),
	})
	if !g.Enabled {
		o.cost.Calls++
	}
	return o
}

func changed(s nvml.Solution) (out []nvml.Placed) {
	for _, c := range s.Change {
		out = append(out, c.Instance)
	}
	return out
}

// Held are the instances that pods have.
func (g *GPU) Held() (out []nvml.Placed) {
	for _, i := range g.Instances {
		if len(g.On[i.Start]) > 0 {
			out = append(out, i.Placed)
		}
	}
	return out
}

// Free is how many memory slices pods could still have.
func (g *GPU) Free() int {
	if len(g.All) > 0 {
		return 0
	}
	return with(g, g.Held()).FreeSlices()
}

// Further is how many more instances of the profile there could be if no pod left.
func (g *GPU) Further(p nvml.Profile) int {
	if len(g.All) > 0 {
		return 0
	}
	return with(g, g.Held()).Further(p)
}

// with is the GPU with these instances alone.
func with(g *GPU, held []nvml.Placed) nvml.GPU {
	out := g.GPU
	out.Instances = nil
	for _, p := range held {
		out.Instances = append(out.Instances, nvml.Instance{Placed: p})
	}
	return out
}

// Fragments counts the free memory slices of the GPU once for each request that cannot use them. A request for 3g.40gb cannot use a free slice if no further
// 3g.40gb could have it; idle instances count as free. The measure follows Weng et al., "Beware of Fragmentation", USENIX ATC 2023.
func (s *Search) Fragments(g *GPU) int {
	return s.fragments(g, g.Held(), len(g.All) > 0)
}

// fragments is Fragments with these instances in use, or with all of it.
func (s *Search) fragments(g *GPU, held []nvml.Placed, all bool) (n int) {
	if all {
		return 0
	}
	key := g.Model + strconv.Itoa(int(g.DeviceID))
	for _, p := range held {
		key += " " + p.Profile + "@" + strconv.Itoa(p.Start)
	}
	if known, is := s.lacks[key]; is {
		return known
	}
	defer func() { s.lacks[key] = n }()
	alone := with(g, held)
	free := alone.FreeSlices()
	for profile, times := range s.asked {
		usable := 0
		p, offers := g.Profile(profile)
		switch {
		case profile == Whole && len(held) == 0:
			usable = free
		case offers && len(p.Placements) > 0:
			usable = alone.Further(p) * p.Placements[0].Size
		}
		n += times * (free - min(free, usable))
	}
	return n
}
