package demand_test

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/nvml"
)

var (
	requests = flag.Int("requests", 100, "requests of each simulated trace")
	resume   = flag.Bool("resume", false, "pods that move go on where they were")
)

const (
	fleet   = 32      // GPUs
	perNode = 8       // of them
	bound   = 1.0 / 6 // hours after which a request that waits is withdrawn
	seeds   = 5
)

// The sizes are those of cluster-trace-gpu-v2023 in alibaba/clusterdata, published with Weng et al., "Beware of Fragmentation", USENIX ATC 2023: what asks
// for five or six sevenths gets 7g.80gb, and "gpu" is a GPU as a whole. Pods with several GPUs are left out. A pod of that trace's last ten days runs for an
// hour in the mean.
var mixes = []struct {
	name  string
	asked map[string]int
}{
	{"trace", map[string]int{"1g.10gb": 32, "2g.20gb": 280, "3g.40gb": 1288, "4g.40gb": 72, "7g.80gb": 1406, demand.Whole: 3911}},
	{"parts of the trace", map[string]int{"1g.10gb": 32, "2g.20gb": 280, "3g.40gb": 1288, "4g.40gb": 72, "7g.80gb": 1406}},
	// 3g.40gb has half of the memory, but three sevenths of the rest. Here what asks for more than these gets 4g.40gb.
	{"parts, 3g to 3/7", map[string]int{"1g.10gb": 32, "2g.20gb": 280, "3g.40gb": 389, "4g.40gb": 971, "7g.80gb": 1406}},
	{"40/25/25/10", map[string]int{"1g.10gb": 40, "2g.20gb": 25, "3g.40gb": 25, "7g.80gb": 10}},
}

// layouts are what the best static cut is made of.
var layouts = []string{
	"off", "7g.80gb@0", "4g.40gb@0 3g.40gb@4", "3g.40gb@0 3g.40gb@4", "4g.40gb@0 2g.20gb@4 1g.10gb@6", "2g.20gb@0 2g.20gb@2 3g.40gb@4",
	"2g.20gb@0 1g.10gb@2 1g.10gb@3 3g.40gb@4", "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 3g.40gb@4", "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6",
	"1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
}

// TestRequestsThatAreAccepted simulates a pool of H100s that is cut in four ways, and prints what becomes of the requests. Times are simulated, and a change
// takes none. Requests that wait are tried whenever a pod ends, the oldest first, and none holds up those behind it.
func TestRequestsThatAreAccepted(t *testing.T) {
	h100 := models(t)["H100-80GB"]
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 1, ' ', 0)
	fmt.Fprintln(w, "| requests\t| load\t| cut\t| at once\t| within 10 min\t| mean wait\t| F\t| re-cuts\t| moved\t|")
	fmt.Fprintln(w, "|---\t|---:\t|---\t|---:\t|---:\t|---:\t|---:\t|---:\t|---:\t|")
	for _, m := range mixes {
		for _, load := range []float64{0.75, 0.95} {
			var sum ways
			for seed := range uint64(seeds) {
				sum = sum.plus(inFourWays(t, h100, m.asked, traceOf(rand.New(rand.NewPCG(seed, 1)), m.asked, load)))
			}
			for i, way := range []string{"best static", "first fit", "advice", "advice, pods move"} {
				fmt.Fprintf(w, "| %s\t| %.2f\t| %s\t| %s\n", m.name, load, way, sum[i])
			}
			// The best static cut knows the trace before it comes.
			best, first, advice := sum[0], sum[1], sum[2]
			if float64(advice.accepted) < 0.99*float64(max(best.accepted, first.accepted)) || advice.recuts >= first.recuts {
				t.Errorf("%s at a load of %.2f: advice accepts %d by %d re-cuts; the best static cut %d, first fit %d by %d", m.name, load,
					advice.accepted, advice.recuts, best.accepted, first.accepted, first.recuts)
			}
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + table.String())
}

// ways are the best static cut, first fit, advice for which no pod has to leave, and advice for which pods move.
type ways [4]tally

func (w ways) plus(other ways) ways {
	for i := range w {
		w[i] = w[i].plus(other[i])
	}
	return w
}

func inFourWays(t *testing.T, model nvml.GPU, asked map[string]int, trace []arrival) ways {
	t.Helper()
	of := func(layouts []string) pool {
		p := pool{t: t, search: demand.Asked(asked)}
		for _, times := range asked {
			p.asked += times
		}
		for _, layout := range layouts {
			p.gpus = append(p.gpus, gpu(t, model, layout))
		}
		return p
	}
	whole := slices.Repeat([]string{"off"}, fleet)
	return ways{
		simulate(trace, &static{of(bestCut(t, model, trace))}),
		simulate(trace, &firstFit{of(whole)}),
		simulate(trace, &advice{pool: of(whole)}),
		simulate(trace, &advice{pool: of(whole), moves: true}),
	}
}

// arrival is a request for one device.
type arrival struct {
	kind      string
	at, lasts float64 // in hours
}

// traceOf draws requests by their shares, as many in an hour as give the load: of the fleet's memory slices, if each had its place at once.
func traceOf(r *rand.Rand, asked map[string]int, load float64) []arrival {
	kinds := slices.Sorted(maps.Keys(asked))
	total, size := 0, 0
	for _, k := range kinds {
		total += asked[k]
		size += asked[k] * sizeOf(k)
	}
	rate := load * fleet * float64(sizeOf(demand.Whole)*total) / float64(size)
	var out []arrival
	now := 0.0
	for range *requests {
		now += r.ExpFloat64() / rate
		n := r.IntN(total)
		kind := slices.IndexFunc(kinds, func(k string) bool {
			n -= asked[k]
			return n < 0
		})
		out = append(out, arrival{kind: kinds[kind], at: now, lasts: r.ExpFloat64()})
	}
	return out
}

// sizeOf is in memory slices of an H100.
func sizeOf(kind string) int {
	return map[string]int{"1g.10gb": 1, "2g.20gb": 2, "3g.40gb": 4, "4g.40gb": 4}[kind] + map[string]int{"7g.80gb": 8, demand.Whole: 8}[kind]
}

// cutting is a way to cut the pool. A pod has the number of its request.
type cutting interface {
	// place gives the pod a device, if it can. It returns the pods that moved for that.
	place(pod int, kind string) (moved []int, is bool)
	// leave ends the pod.
	leave(pod int)
	// counts returns how many GPUs were cut so far, and F: how many memory slices of a GPU are free and of no use to a request, in the mean over both.
	counts() (recuts int, fragments float64)
}

// tally is what became of the requests, without the first fifth: the pool is empty before these.
type tally struct {
	requests, atOnce, accepted, recuts, moved int
	waited, fragments, hours                  float64
}

func (a tally) plus(b tally) tally {
	return tally{
		requests: a.requests + b.requests, atOnce: a.atOnce + b.atOnce, accepted: a.accepted + b.accepted, recuts: a.recuts + b.recuts,
		moved: a.moved + b.moved, waited: a.waited + b.waited, fragments: a.fragments + b.fragments, hours: a.hours + b.hours,
	}
}

// String is a row of the table. A request that is withdrawn has waited as long as it could.
func (a tally) String() string {
	n := float64(a.requests)
	return fmt.Sprintf("%.1f %%\t| %.1f %%\t| %.1f min\t| %.2f\t| %.0f\t| %.1f %%\t|", 100*float64(a.atOnce)/n, 100*float64(a.accepted)/n, 60*a.waited/n,
		a.fragments/n, float64(a.recuts)/a.hours/fleet*100, 100*float64(a.moved)/float64(a.accepted))
}

// simulation is a trace that runs.
type simulation struct {
	tally

	trace   []arrival
	cutting cutting
	waiting []int           // requests, by age
	ends    []end           // by time, with those that no longer hold
	of      []float64       // when each pod ends
	first   int             // request that is counted
	tried   map[string]bool // kinds that have no place now
}

type end struct {
	at  float64
	pod int
}

func simulate(trace []arrival, c cutting) tally {
	s := simulation{trace: trace, cutting: c, of: make([]float64, len(trace)), first: len(trace) / 5, tried: map[string]bool{}}
	before := 0
	for i, a := range trace {
		s.until(a.at)
		recuts, fragments := c.counts()
		if i == s.first {
			before = recuts
		}
		if i >= s.first {
			s.requests++
			s.fragments += fragments
		}
		if !s.start(i, a.at) {
			s.waiting = append(s.waiting, i)
		}
	}
	recuts, _ := c.counts()
	s.recuts, s.hours = recuts-before, trace[len(trace)-1].at-trace[s.first].at
	s.until(math.Inf(1))
	return s.tally
}

// until ends the pods that end before then, and tries what waits after each.
func (s *simulation) until(then float64) {
	for len(s.ends) > 0 && s.ends[0].at <= then {
		e := s.ends[0]
		s.ends = slices.Delete(s.ends, 0, 1)
		if s.of[e.pod] != e.at {
			continue
		}
		s.cutting.leave(e.pod)
		clear(s.tried)
		s.waiting = slices.DeleteFunc(s.waiting, func(i int) bool {
			a := s.trace[i]
			if e.at-a.at > bound {
				s.wait(i, bound)
				return true
			}
			started := !s.tried[a.kind] && s.start(i, e.at)
			s.tried[a.kind] = !started
			return started
		})
	}
}

func (s *simulation) start(i int, now float64) bool {
	moved, is := s.cutting.place(i, s.trace[i].kind)
	if !is {
		return false
	}
	starts := []int{i}
	if !*resume {
		starts = append(starts, moved...)
	}
	for _, pod := range starts {
		s.of[pod] = now + s.trace[pod].lasts
		at, _ := slices.BinarySearchFunc(s.ends, s.of[pod], func(e end, at float64) int { return cmp.Compare(e.at, at) })
		s.ends = slices.Insert(s.ends, at, end{at: s.of[pod], pod: pod})
	}
	if i >= s.first {
		s.accepted++
		s.moved += len(moved)
		if now == s.trace[i].at {
			s.atOnce++
		}
	}
	s.wait(i, now-s.trace[i].at)
	return true
}

func (s *simulation) wait(i int, hours float64) {
	if i >= s.first {
		s.waited += hours
	}
}

// pool is the GPUs with their pods.
type pool struct {
	t      *testing.T
	search *demand.Search
	asked  int // how often, all profiles together
	gpus   []demand.GPU
	recuts int
}

func (p *pool) counts() (recuts int, fragments float64) {
	sum := 0
	for i := range p.gpus {
		sum += p.search.Fragments(&p.gpus[i])
	}
	return p.recuts, float64(sum) / float64(p.asked) / fleet
}

func (p *pool) leave(pod int) {
	name := fmt.Sprint(pod)
	for i := range p.gpus {
		if g := p.gpus[i]; has(g, name) {
			p.gpus[i] = with(g, g.Geometry(), without(g, []string{name}))
		}
	}
}

func has(g demand.GPU, pod string) bool {
	for _, pods := range g.On {
		if slices.Contains(pods, pod) {
			return true
		}
	}
	return slices.Contains(g.All, pod)
}

// idle gives the pod the first device of the kind that no pod has: as a scheduler and a device plugin do, which know of no better.
func (p *pool) idle(pod, kind string) bool {
	for i := range p.gpus {
		g := &p.gpus[i]
		if kind == demand.Whole && !g.Enabled && len(g.All) == 0 {
			g.All = []string{pod}
			return true
		}
		for _, instance := range g.Instances {
			if instance.Profile == kind && len(g.On[instance.Start]) == 0 {
				on := without(*g, nil)
				on[instance.Start] = []string{pod}
				*g = with(*g, g.Geometry(), on)
				return true
			}
		}
	}
	return false
}

// everywhere is the key of pods on all of a GPU, among first memory slices.
const everywhere = -1

// without returns the pods of the GPU but these, by the first memory slice.
func without(g demand.GPU, leave []string) map[int][]string {
	out := map[int][]string{}
	gone := func(pod string) bool { return slices.Contains(leave, pod) }
	if left := slices.DeleteFunc(slices.Clone(g.All), gone); len(left) > 0 {
		out[everywhere] = left
	}
	for at, pods := range g.On {
		if left := slices.DeleteFunc(slices.Clone(pods), gone); len(left) > 0 {
			out[at] = left
		}
	}
	return out
}

// with is the GPU with these instances and pods. It shares nothing that changes with the first.
func with(g demand.GPU, instances nvml.Geometry, on map[int][]string) demand.GPU {
	out := demand.GPU{GPU: g.GPU, All: on[everywhere], On: map[int][]string{}}
	out.Instances = nil
	for _, p := range instances {
		add(&out, p, on[p.Start]...)
	}
	return out
}

// static never cuts.
type static struct{ pool }

func (s *static) place(pod int, kind string) ([]int, bool) { return nil, s.idle(fmt.Sprint(pod), kind) }

// firstFit cuts at the lowest place of the first GPU that has one, and destroys what no pod has any longer, as NVIDIA's DRA driver does where it cuts by itself.
type firstFit struct{ pool }

func (f *firstFit) place(pod int, kind string) ([]int, bool) {
	if kind == demand.Whole {
		return nil, f.idle(fmt.Sprint(pod), kind)
	}
	for i := range f.gpus {
		g := &f.gpus[i]
		p, _ := g.Profile(kind)
		at := slices.IndexFunc(p.Placements, func(at nvml.Span) bool {
			return len(g.All) == 0 && !slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Overlaps(at) })
		})
		if at < 0 || g.Further(p) == 0 {
			continue
		}
		f.recuts++
		g.Enabled = true
		on := without(*g, nil)
		on[p.Placements[at].Start] = []string{fmt.Sprint(pod)}
		after := append(g.Geometry(), nvml.Placed{Profile: kind, Span: p.Placements[at]})
		after.Sort()
		*g = with(*g, after, on)
		return nil, true
	}
	return nil, false
}

func (f *firstFit) leave(pod int) {
	f.pool.leave(pod)
	for i := range f.gpus {
		g := &f.gpus[i]
		*g = with(*g, g.Held(), without(*g, nil))
		g.Enabled = len(g.Instances) > 0
	}
}

// advice takes what is idle, or else the cheapest change of any node. Pods move only if each has a place at once, without a further move.
type advice struct {
	pool

	moves bool
}

// mostTried bounds how many changes are looked at whose pods would have to move.
const mostTried = 8

func (a *advice) place(number int, kind string) (moved []int, is bool) {
	pod := fmt.Sprint(number)
	if a.idle(pod, kind) {
		return nil, true
	}
	found := a.changes(kind)
	switch {
	case len(found) == 0:
		return nil, false
	case found[0].Cost.Lost == 0:
		a.carryOut(found[0], pod, kind)
		return nil, true
	case !a.moves:
		return nil, false
	}
	for _, f := range found[:min(len(found), mostTried)] {
		tried := advice{pool: a.pool}
		tried.gpus = slices.Clone(a.gpus)
		tried.carryOut(f, pod, kind)
		moved = nil
		for _, p := range f.Pods {
			var number int
			if _, err := fmt.Sscan(p, &number); err != nil {
				a.t.Fatal(err)
			}
			if _, is := tried.place(number, kindOf(a.gpus, p)); is {
				moved = append(moved, number)
			}
		}
		if len(moved) == len(f.Pods) {
			a.pool = tried.pool
			return moved, true
		}
	}
	return nil, false
}

// kindOf is what the pod has.
func kindOf(gpus []demand.GPU, pod string) string {
	for _, g := range gpus {
		for _, i := range g.Instances {
			if slices.Contains(g.On[i.Start], pod) {
				return i.Profile
			}
		}
	}
	return demand.Whole
}

// change is one of a node, whose first GPU is given.
type change struct {
	demand.Recut

	first int
}

// changes are the cheapest change of each node, the cheapest first.
func (a *advice) changes(kind string) (out []change) {
	for first := 0; first < len(a.gpus); first += perNode {
		gpus := a.gpus[first:min(len(a.gpus), first+perNode)]
		if r, is := a.search.Find(gpus, demand.Want{kind: 1}); is {
			out = append(out, change{Recut: r, first: first})
		}
	}
	slices.SortStableFunc(out, func(b, c change) int { return b.Cost.Compare(c.Cost) })
	return out
}

// carryOut does what an agent does. It fails the test if a pod loses its device that does not have to leave.
func (a *advice) carryOut(c change, pod, kind string) {
	a.t.Helper()
	if (c.Cost.Lost == 0) != (len(c.Pods) == 0) {
		a.t.Fatalf("%v leave at a cost of %d", c.Pods, c.Cost.Lost)
	}
	gpus := a.gpus[c.first:min(len(a.gpus), c.first+perNode)]
	for _, cut := range c.Restored(gpus).Cuts {
		a.recuts++
		g := &gpus[cut.GPU]
		on := without(*g, c.Pods)
		var after nvml.Solution
		if cut.Request.MIG {
			var err error
			if after, err = nvml.Solve(g.GPU, cut.Request.Devices); err != nil || !slices.Equal(after.Target, cut.After) {
				a.t.Fatalf("%v becomes %v, not %v: %v", cut.Request, after.Target, cut.After, err)
			}
		}
		for at, pods := range on {
			if !slices.ContainsFunc(after.Keep, func(p nvml.Placed) bool { return p.Start == at }) {
				a.t.Fatalf("%v loses its device by %v, and does not have to leave", pods, cut.Request)
			}
		}
		if cut.Request.MIG {
			on[cut.Used[0].Start] = []string{pod}
		} else {
			on[everywhere] = []string{pod}
		}
		g.Enabled = cut.Request.MIG
		*g = with(*g, after.Target, on)
	}
	if len(c.Cuts) != 1 {
		a.t.Fatalf("%s takes %d changes", kind, len(c.Cuts))
	}
}

// bestCut looks for the layouts with which most requests of this very trace are accepted: from GPUs as a whole, it changes some at a time for as long as that
// helps.
func bestCut(t *testing.T, model nvml.GPU, trace []arrival) []string {
	t.Helper()
	has := map[string][]string{}
	for _, l := range layouts {
		has[l] = []string{demand.Whole}
		if g := gpu(t, model, l); g.Enabled {
			has[l] = nil
			for _, i := range g.Instances {
				has[l] = append(has[l], i.Profile)
			}
		}
	}
	numbers := map[string]int{layouts[0]: fleet}
	value := func(n map[string]int) tally {
		c := counted{free: map[string]int{}, has: map[int]string{}}
		for l, times := range n {
			for _, k := range has[l] {
				c.free[k] += times
			}
		}
		return simulate(trace, &c)
	}
	best := value(numbers)
	for step := fleet / 4; step > 0; {
		next, with := numbers, best
		for _, from := range layouts {
			for _, to := range layouts {
				if from == to || numbers[from] < step {
					continue
				}
				n := maps.Clone(numbers)
				n[from] -= step
				n[to] += step
				if v := value(n); cmp.Or(cmp.Compare(v.accepted, with.accepted), cmp.Compare(with.waited, v.waited)) > 0 {
					next, with = n, v
				}
			}
		}
		if with.accepted == best.accepted && with.waited == best.waited {
			step /= 2
		}
		numbers, best = next, with
	}
	var out []string
	for _, l := range layouts {
		out = append(out, slices.Repeat([]string{l}, numbers[l])...)
	}
	return out
}

// counted is a static cut of which only the numbers matter.
type counted struct {
	free map[string]int
	has  map[int]string
}

func (c *counted) place(pod int, kind string) ([]int, bool) {
	if c.free[kind] == 0 {
		return nil, false
	}
	c.free[kind]--
	c.has[pod] = kind
	return nil, true
}

func (c *counted) leave(pod int) { c.free[c.has[pod]]++ }

func (c *counted) counts() (int, float64) { return 0, 0 }
