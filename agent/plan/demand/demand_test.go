package demand_test

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

var states = flag.Int("states", 300, "random states that are compared with brute force")

// models are a GPU of each model that can be cut, as its driver reports it.
func models(t testing.TB) map[string]nvml.GPU {
	t.Helper()
	out := map[string]nvml.GPU{}
	for _, model := range gpusim.Models() {
		n, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model}}})
		if err != nil {
			t.Fatal(err)
		}
		found, err := n.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if found[0].Capable {
			out[model] = found[0]
		}
	}
	return out
}

// gpu is a GPU of the model, cut and held as the text says: "off", "off:a", "1g.10gb@0:a,b 3g.40gb@4".
func gpu(t testing.TB, model nvml.GPU, text string) demand.GPU {
	t.Helper()
	g := demand.GPU{GPU: model, On: map[int][]string{}}
	if mode, pods, _ := strings.Cut(text, ":"); mode == "off" {
		g.All = names(pods)
		return g
	}
	g.Enabled = true
	for _, word := range strings.Fields(text) {
		place, pods, _ := strings.Cut(word, ":")
		name, start, _ := strings.Cut(place, "@")
		p, is := model.Profile(name)
		at := slices.IndexFunc(p.Placements, func(s nvml.Span) bool { return fmt.Sprint(s.Start) == start })
		if !is || at < 0 {
			t.Fatalf("%s has no %s", model.Model, place)
		}
		add(&g, nvml.Placed{Profile: name, Span: p.Placements[at]}, names(pods)...)
	}
	return g
}

func names(text string) []string {
	return slices.DeleteFunc(strings.Split(text, ","), func(s string) bool { return s == "" })
}

func add(g *demand.GPU, p nvml.Placed, pods ...string) {
	g.Instances = append(g.Instances, nvml.Instance{Placed: p, Devices: []nvml.Device{{Profile: p.Profile, Held: len(pods) > 0}}})
	if len(pods) > 0 {
		g.On[p.Start] = pods
	}
}

func TestTheCheapestChangeIsFound(t *testing.T) {
	h100 := models(t)["H100-80GB"]
	for _, row := range []struct {
		name, want, gpus, cuts, leave string
	}{
		{"an idle instance needs no change", "3g.40gb=1", "3g.40gb@0", "", ""},
		{"a free place is used, though another GPU is idle", "3g.40gb=1", "off; 3g.40gb@0:a", "1: 3g.40gb@0 3g.40gb@4", ""},
		{"idle instances go before those of pods", "3g.40gb=1", "1g.10gb@0:a 1g.10gb@1:a 1g.10gb@4 1g.10gb@5", "0: 1g.10gb@0 1g.10gb@1 3g.40gb@4", ""},
		{"the smallest part of a pod goes", "3g.40gb=1", "3g.40gb@0:a 1g.10gb@4:b 1g.10gb@5 1g.10gb@6", "0: 3g.40gb@0 3g.40gb@4", "b"},
		{
			"a pod that leaves has a place again", "3g.40gb=1", "1g.10gb@0:a 1g.10gb@4:b",
			"0: 1g.10gb@0 1g.10gb@1 3g.40gb@4", "b",
		},
		{"of two pods or one, one leaves", "3g.40gb=1", "1g.20gb@2:a,b 1g.20gb@6:c", "0: 1g.20gb@0 1g.20gb@2 3g.40gb@4", "c"},
		{"a whole GPU", "gpu=1", "1g.10gb@0:a; 1g.10gb@0", "1: off", ""},
		{"a whole GPU is free", "gpu=1", "off:a; off", "", ""},
		{"parts of two GPUs", "4g.40gb=2", "off; 3g.40gb@0:a; off:b", "0: 4g.40gb@0; 1: 4g.40gb@0 3g.40gb@4", "a"},
		{"two kinds", "2g.20gb=1 1g.10gb=1", "3g.40gb@0:a", "0: 3g.40gb@0 2g.20gb@4 1g.10gb@6", ""},
		{"the solver leaves a pod its own, and there is no other place", "3g.40gb=1 1g.10gb=2", "3g.40gb@0:a", "impossible", ""},
		{"what a GPU has once, and a pod has it", "1g.10gb+me=1", "1g.10gb+me@0:a", "impossible", ""},
		{"what a GPU has once, and no pod has it", "1g.10gb+me=1", "1g.10gb@0:a 1g.10gb+me@1 1g.10gb@4", "", ""},
		{"larger than the GPU", "4g.40gb=2", "off", "impossible", ""},
		{"no such profile", "1g.5gb=1", "off", "impossible", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			var gpus []demand.GPU
			for text := range strings.SplitSeq(row.gpus, "; ") {
				gpus = append(gpus, gpu(t, h100, text))
			}
			found, ok := demand.Asked(map[string]int{"1g.10gb": 1, demand.Whole: 1}).Find(gpus, want(row.want))
			found = found.Restored(gpus)
			if diff := cmp.Diff([]string{row.cuts, row.leave}, []string{cuts(found, ok), strings.Join(found.Pods, ",")}); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func want(text string) demand.Want {
	out := demand.Want{}
	for _, word := range strings.Fields(text) {
		name, n, _ := strings.Cut(word, "=")
		_, _ = fmt.Sscan(n, new(int))
		var count int
		_, _ = fmt.Sscan(n, &count)
		out[name] = count
	}
	return out
}

func cuts(r demand.Recut, ok bool) string {
	if !ok {
		return "impossible"
	}
	var out []string
	for _, c := range r.Cuts {
		after := "off"
		if c.Request.MIG {
			after = c.After.String()
		}
		out = append(out, fmt.Sprintf("%d: %s", c.GPU, after))
	}
	return strings.Join(out, "; ")
}

// TestNoChangeIsCheaper compares with brute force, which asks for every set of instances, and looks at what the solver makes of it.
func TestNoChangeIsCheaper(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	all := models(t)
	kinds := slices.Sorted(maps.Keys(all))
	impossible, taken, free := 0, 0, 0
	search := map[string]*demand.Search{}
	for range *states {
		model := kinds[r.IntN(len(kinds))]
		gpus := randomNode(r, all[model])
		asks := randomWant(r, all[model])
		if search[model] == nil {
			search[model] = demand.Asked(map[string]int{all[model].Profiles[0].Name: 3, demand.Whole: 1})
		}
		for _, fewest := range []bool{false, true} {
			s := search[model]
			if fewest {
				s = s.FewestPods()
			}
			got, ok := s.Find(gpus, asks)
			cost := got.Cost.Lost
			if fewest {
				cost = got.Cost.Pods
			}
			b := brute{solver: solver{}, fewest: fewest, of: priceOn(gpus, fewest)}
			least, can := b.least(gpus, 0, asks)
			if ok != can || ok && cost != least {
				t.Fatalf("%v on %s, fewest pods %t: found %t at cost %d, brute force %t at %d\n%s", asks, model, fewest, ok, cost, can, least, describe(gpus))
			}
			if ok && !fewest {
				carriesOut(t, gpus, asks, got)
				carriesOut(t, gpus, asks, got.Restored(gpus))
			}
			switch {
			case !ok:
				impossible++
			case cost > 0:
				taken++
			default:
				free++
			}
		}
	}
	t.Logf("%d impossible, %d take something from pods, %d take nothing", impossible, taken, free)
}

// carriesOut checks that the solver by which the agent cuts does what was found: pods that do not have to leave keep what they have, and the wanted devices
// are there, without a pod.
func carriesOut(t *testing.T, gpus []demand.GPU, asks demand.Want, got demand.Recut) {
	t.Helper()
	left := maps.Clone(asks)
	for i := range gpus {
		request := (*nvml.Request)(nil)
		if at := slices.IndexFunc(got.Cuts, func(c demand.Cut) bool { return c.GPU == i }); at >= 0 {
			request = &got.Cuts[at].Request
		}
		for _, kind := range available(t, &gpus[i], request, got.Pods) {
			left[kind]--
		}
	}
	for kind, n := range left {
		if n > 0 {
			t.Fatalf("%d of %s are missing after %s\n%s", n, kind, cuts(got, true), describe(gpus))
		}
	}
}

// available are the devices of a GPU that no pod has once these have left and the request, if there is one, is carried out.
func available(t *testing.T, g *demand.GPU, request *nvml.Request, leave []string) (out []string) {
	t.Helper()
	stays := func(pods []string) bool {
		return slices.ContainsFunc(pods, func(p string) bool { return !slices.Contains(leave, p) })
	}
	switch {
	case request == nil && !g.Enabled && stays(g.All):
		return nil
	case request == nil && !g.Enabled, request != nil && !request.MIG:
		return []string{demand.Whole}
	}
	s := nvml.Solution{Target: g.Geometry(), Keep: g.Geometry()}
	if request != nil {
		var err error
		if s, err = nvml.Solve(g.GPU, request.Devices); err != nil {
			t.Fatalf("%v: %v", request, err)
		}
	}
	for _, p := range s.Destroy {
		if stays(g.On[p.Start]) {
			t.Fatalf("%v takes %v from %v, who is not in %v", request, p, g.On[p.Start], leave)
		}
	}
	for _, p := range s.Target {
		if !slices.Contains(s.Keep, p) || !stays(g.On[p.Start]) {
			out = append(out, p.Profile)
		}
	}
	return out
}

func describe(gpus []demand.GPU) string {
	var b strings.Builder
	for _, g := range gpus {
		fmt.Fprintf(&b, "on=%t all=%v", g.Enabled, g.All)
		for _, i := range g.Instances {
			fmt.Fprintf(&b, " %s:%v", i.Placed, g.On[i.Start])
		}
		b.WriteString("\n")
	}
	return b.String()
}

func randomNode(r *rand.Rand, model nvml.GPU) []demand.GPU {
	var out []demand.GPU
	for i := range 1 + r.IntN(3) {
		g := demand.GPU{GPU: model, On: map[int][]string{}}
		if r.IntN(5) == 0 {
			if r.IntN(2) == 0 {
				g.All = []string{fmt.Sprint("whole-", i)}
			}
			out = append(out, g)
			continue
		}
		g.Enabled = true
		counts := map[string]int{}
		for range r.IntN(8) {
			p := model.Profiles[r.IntN(len(model.Profiles))]
			at := p.Placements[r.IntN(len(p.Placements))]
			counts[p.Name]++
			_, err := nvml.Solve(model, counts)
			if err != nil || slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Overlaps(at) }) {
				counts[p.Name]--
				continue
			}
			var pods []string
			if r.IntN(2) == 0 {
				pods = append(pods, fmt.Sprintf("%d@%d", i, at.Start))
			}
			if len(pods) > 0 && r.IntN(6) == 0 {
				pods = append(pods, fmt.Sprintf("shares-%d", i))
			}
			add(&g, nvml.Placed{Profile: p.Name, Span: at}, pods...)
		}
		slices.SortFunc(g.Instances, func(a, b nvml.Instance) int { return nvml.ComparePlaced(a.Placed, b.Placed) })
		out = append(out, g)
	}
	return out
}

func randomWant(r *rand.Rand, model nvml.GPU) demand.Want {
	w := demand.Want{}
	for range 1 + r.IntN(2) {
		if r.IntN(8) == 0 {
			w[demand.Whole] = 1 + r.IntN(2)
			continue
		}
		w[model.Profiles[r.IntN(len(model.Profiles))].Name] = 1 + r.IntN(2)
	}
	return w
}

// solver remembers what the solver makes of a request.
type solver map[string]*nvml.Solution

func (c solver) solve(i int, g *demand.GPU, counts map[string]int) *nvml.Solution {
	key := fmt.Sprint(i, counts)
	if _, is := c[key]; !is {
		c[key] = nil
		if s, err := nvml.Solve(g.GPU, counts); err == nil {
			c[key] = &s
		}
	}
	return c[key]
}

// price is the cost of pods that leave.
type price func(pods map[string]bool) int

func priceOn(gpus []demand.GPU, fewest bool) price {
	total := map[string]int{}
	for _, g := range gpus {
		for _, p := range g.All {
			total[p] += g.MemorySlices()
		}
		for _, i := range g.Instances {
			for _, p := range g.On[i.Start] {
				total[p] += i.Size
			}
		}
	}
	return func(pods map[string]bool) (n int) {
		for p := range pods {
			if fewest {
				n++
			} else {
				n += total[p]
			}
		}
		return n
	}
}

// brute tries everything.
type brute struct {
	solver
	fewest bool
	of     price
}

// least is the least cost over all ways to divide what is wanted among the GPUs from the i-th on, and all ways to have it on each.
func (b brute) least(gpus []demand.GPU, i int, left demand.Want) (best int, can bool) {
	if i == len(gpus) {
		for _, n := range left {
			if n > 0 {
				return 0, false
			}
		}
		return 0, true
	}
	for _, part := range parts(left) {
		here, ok := b.onGPU(i, &gpus[i], part)
		if !ok {
			continue
		}
		less := maps.Clone(left)
		for k, n := range part {
			less[k] -= n
		}
		if after, ok := b.least(gpus, i+1, less); ok && (!can || here+after < best) {
			best, can = here+after, true
		}
	}
	return best, can
}

func parts(left demand.Want) []demand.Want {
	out := []demand.Want{{}}
	for _, k := range slices.Sorted(maps.Keys(left)) {
		var next []demand.Want
		for _, w := range out {
			for n := range left[k] + 1 {
				with := maps.Clone(w)
				with[k] = n
				next = append(next, with)
			}
		}
		out = next
	}
	return out
}

// onGPU is the least cost of a part of what is wanted on one GPU.
func (b brute) onGPU(number int, g *demand.GPU, part demand.Want) (best int, can bool) {
	instances := maps.Clone(part)
	delete(instances, demand.Whole)
	maps.DeleteFunc(instances, func(_ string, n int) bool { return n == 0 })
	switch whole := part[demand.Whole]; {
	case whole == 0 && len(instances) == 0:
		return 0, true
	case whole == 0:
		return b.cut(number, g, instances)
	case whole > 1 || len(instances) > 0 || len(g.All) > 0 && !b.fewest:
		return 0, false
	}
	leave := set(g.All)
	for _, pods := range g.On {
		maps.Copy(leave, set(pods))
	}
	return b.of(leave), true
}

func set(pods []string) map[string]bool {
	out := map[string]bool{}
	for _, p := range pods {
		out[p] = true
	}
	return out
}

// cut requests every set of instances that are there, together with what is wanted.
func (b brute) cut(number int, g *demand.GPU, instances demand.Want) (best int, can bool) {
	gives := b.gives
	if b.fewest {
		gives = b.hasPlaces
	}
	for subset := range 1 << len(g.Instances) {
		counts := map[string]int(maps.Clone(instances))
		var kept []nvml.Instance
		for i, instance := range g.Instances {
			if subset&(1<<i) != 0 {
				counts[instance.Profile]++
				kept = append(kept, instance)
			}
		}
		if pods, ok := gives(number, g, counts, instances, kept); ok {
			maps.Copy(pods, set(g.All))
			if cost := b.of(pods); !can || cost < best {
				best, can = cost, true
			}
		}
	}
	return best, can
}

// gives returns the pods that leave for the request by the solver; false if it does not give the wanted devices.
func (c solver) gives(number int, g *demand.GPU, counts map[string]int, want demand.Want, _ []nvml.Instance) (map[string]bool, bool) {
	s := c.solve(number, g, counts)
	if s == nil {
		return nil, false
	}
	pods, without := map[string]bool{}, map[string]int{}
	for _, p := range s.Destroy {
		for _, pod := range g.On[p.Start] {
			pods[pod] = true
		}
	}
	for _, p := range s.Target {
		if len(g.On[p.Start]) == 0 || !slices.Contains(s.Keep, p) {
			without[p.Profile]++
		}
	}
	for k, n := range want {
		if without[k] < n {
			return nil, false
		}
	}
	return pods, true
}

// hasPlaces returns the pods of all instances but those that are kept at their places; false if there are no places for what is wanted beside these.
func (c solver) hasPlaces(_ int, g *demand.GPU, counts map[string]int, want demand.Want, kept []nvml.Instance) (map[string]bool, bool) {
	empty := *g
	empty.Instances = nil
	if c.solve(-1, &empty, counts) == nil {
		return nil, false
	}
	var spans []nvml.Span
	pods := map[string]bool{}
	for _, i := range g.Instances {
		if slices.ContainsFunc(kept, func(k nvml.Instance) bool { return k.Placed == i.Placed }) {
			spans = append(spans, i.Span)
			continue
		}
		for _, p := range g.On[i.Start] {
			pods[p] = true
		}
	}
	var asked []nvml.Profile
	for _, k := range slices.Sorted(maps.Keys(want)) {
		p, is := g.Profile(k)
		if !is {
			return nil, false
		}
		asked = append(asked, slices.Repeat([]nvml.Profile{p}, want[k])...)
	}
	return pods, haveRoom(asked, spans)
}

// haveRoom tries all places of the profiles beside the spans.
func haveRoom(asked []nvml.Profile, spans []nvml.Span) bool {
	if len(asked) == 0 {
		return true
	}
	return slices.ContainsFunc(asked[0].Placements, func(at nvml.Span) bool {
		return !slices.ContainsFunc(spans, at.Overlaps) && haveRoom(asked[1:], append(slices.Clone(spans), at))
	})
}
