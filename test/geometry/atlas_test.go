package geometry_test

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// atlas is every way in which GPU instances can stand on one model, found by letting them stand there.
type atlas struct {
	gpu        nvml.GPU                   // empty, with MIG mode on
	geometries map[string][]nvml.Geometry // by what stands, wherever it does: see key; no instance is divided
	keys       []string                   // of the geometries, sorted; none for the empty GPU
}

// surveys are the atlases that were made, by model. The first test to ask for one makes it.
var surveys = struct {
	sync.Mutex
	of map[string]func() atlas
}{of: map[string]func() atlas{}}

// survey makes the atlas of a model, once.
func survey(t *testing.T, model string) atlas {
	t.Helper()
	surveys.Lock()
	once, ok := surveys.of[model]
	if !ok {
		once = sync.OnceValue(func() atlas { return explore(t, model) })
		surveys.of[model] = once
	}
	surveys.Unlock()
	return once()
}

func explore(t *testing.T, model string) atlas {
	t.Helper()
	node, err := gpusim.Create(t.TempDir(), specOf(model, 1))
	if err != nil {
		t.Fatal(err)
	}
	defer closeNode(t, node)
	gpus, err := node.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	a := atlas{gpu: gpus[0], geometries: map[string][]nvml.Geometry{}}
	l := node.Library()
	if r := l.Init(); r != gpusim.Success {
		t.Fatal(r)
	}
	device, r := l.DeviceByIndex(0)
	if r != gpusim.Success {
		t.Fatal(r)
	}
	ids := profileIDs(l, device)

	var stand nvml.Geometry
	var build func(from int)
	build = func(from int) {
		a.geometries[key(stand)] = append(a.geometries[key(stand)], slices.Clone(stand))
		for _, p := range a.gpu.Profiles {
			for _, at := range p.Placements {
				if at.Start < from {
					continue // each geometry is found once, from its lowest instance up
				}
				made, r := l.CreateGPUInstanceAt(device, ids[p.Name], at)
				if r == gpusim.InsufficientResources {
					continue
				}
				if r != gpusim.Success {
					t.Fatalf("%s at %d beside %v: %s", p.Name, at.Start, stand, r)
				}
				stand = append(stand, nvml.Placed{Profile: p.Name, Span: at})
				build(at.End())
				stand = stand[:len(stand)-1]
				if r := l.DestroyGPUInstance(made); r != gpusim.Success {
					t.Fatal(r)
				}
			}
		}
	}
	build(0)
	for k := range a.geometries {
		if k != "" {
			a.keys = append(a.keys, k)
		}
	}
	slices.Sort(a.keys)
	return a
}

func profileIDs(l *gpusim.Library, d gpusim.Device) map[string]int {
	out := map[string]int{}
	for kind := range 64 {
		if p, r := l.GPUInstanceProfile(d, kind); r == gpusim.Success {
			out[p.Name] = p.ID
		}
	}
	return out
}

// key names what stands, wherever it does: the profiles, sorted and joined by spaces.
func key(g nvml.Geometry) string {
	var names []string
	for _, p := range g {
		names = append(names, p.Profile)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// maximal are the keys of geometries to which nothing can be added.
func (a atlas) maximal() []string {
	part := map[string]bool{}
	for _, k := range a.keys {
		names := strings.Split(k, " ")
		for i := range names {
			part[strings.Join(slices.Delete(slices.Clone(names), i, i+1), " ")] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(a.keys), func(k string) bool { return part[k] })
}

// draw gives a random request that the empty GPU can grant. About every third instance that can be divided is.
func (a atlas) draw(r *rand.Rand) map[string]int {
	request := map[string]int{}
	for _, name := range strings.Split(a.keys[r.IntN(len(a.keys))], " ") {
		p, _ := a.gpu.Profile(name)
		parts := []string{name}
		if len(p.Compute) > 1 && r.IntN(3) == 0 {
			parts = drawParts(r, p)
		}
		for _, part := range parts {
			request[part]++
		}
	}
	return request
}

// drawParts divides an instance at random, and may leave some of it unused.
func drawParts(r *rand.Rand, p nvml.Profile) []string {
	var out []string
	count := map[string]int{}
	for left := p.Slices; left > 0 && (len(out) == 0 || r.IntN(5) > 0); {
		c := p.Compute[r.IntN(len(p.Compute))]
		if c.Slices > left || count[c.Name] == c.Max {
			continue
		}
		left -= c.Slices
		count[c.Name]++
		if c.Slices == p.Slices {
			return []string{p.Name}
		}
		out = append(out, c.Name+"."+p.Name)
	}
	return out
}

// cost is what a change costs, in the order in which the agent spares: busy devices destroyed, devices destroyed, calls that destroy or
// create, memory slices destroyed.
type cost [4]int

func (c *cost) add(o cost) {
	for n := range o {
		c[n] += o[n]
	}
}

// addDevice is what it costs to destroy a device.
func (c *cost) addDevice(d nvml.Device) {
	if len(d.Processes) > 0 {
		c[0]++
	}
	c[1]++
	c[2]++
}

// addInstance is what it costs to destroy an instance.
func (c *cost) addInstance(i nvml.Instance) {
	for _, d := range i.Devices {
		c.addDevice(d)
	}
	c[2]++
	c[3] += i.Size
}

// cheapest tries every way in which the request can stand. It is false if there is none.
func (a atlas) cheapest(from nvml.GPU, request map[string]int) (best cost, found bool) {
	known := map[nvml.Placed]cost{}
	for _, instances := range a.divisions(request) {
		for _, g := range a.geometries[key(instances)] {
			eachAssignment(g, instances, func(target nvml.Geometry) {
				var c cost
				for _, p := range target {
					at := slices.IndexFunc(from.Instances, func(i nvml.Instance) bool { return sameGPUInstance(i.Placed, p) })
					if at < 0 {
						c[2] += 1 + len(p.Devices())
						continue
					}
					if _, asked := known[p]; !asked {
						known[p] = a.divided(from.Instances[at], p)
					}
					c.add(known[p])
				}
				for _, i := range from.Instances {
					if !slices.ContainsFunc(target, func(p nvml.Placed) bool { return sameGPUInstance(i.Placed, p) }) {
						c.addInstance(i)
					}
				}
				if !found || slices.Compare(c[:], best[:]) < 0 {
					best, found = c, true
				}
			})
		}
	}
	return best, found
}

// sameGPUInstance reports whether both are of one profile at one place, however they are divided.
func sameGPUInstance(a, b nvml.Placed) bool { return a.Profile == b.Profile && a.Span == b.Span }

// divided is what it costs at least to divide an instance otherwise than it is. It tries every place of every part.
func (a atlas) divided(i nvml.Instance, want nvml.Placed) cost {
	profile, _ := a.gpu.Profile(i.Profile)
	var places [][]nvml.Span
	for _, device := range want.Devices() {
		name, _, part := strings.Cut(device, "c."+i.Profile)
		at := slices.IndexFunc(profile.Compute, func(c nvml.ComputeProfile) bool {
			return part && c.Name == name+"c" || !part && c.Slices == profile.Slices
		})
		places = append(places, profile.Compute[at].Placements)
	}
	var best cost
	found := false
	var put func(taken []nvml.Span)
	put = func(taken []nvml.Span) {
		if len(taken) < len(places) {
			for _, at := range places[len(taken)] {
				if !slices.ContainsFunc(taken, at.Overlaps) {
					put(append(slices.Clone(taken), at))
				}
			}
			return
		}
		c := cost{2: len(taken)} // to be made, but for those that are
		for _, d := range i.Devices {
			if slices.Contains(taken, d.Part.Span) { // of one size there is one kind
				c[2]--
			} else {
				c.addDevice(d)
			}
		}
		if !found || slices.Compare(c[:], best[:]) < 0 {
			best, found = c, true
		}
	}
	put(nil)
	return best
}

// divisions are the lists of instances, without places, that make the requested devices available.
func (a atlas) divisions(request map[string]int) []nvml.Geometry {
	out := []nvml.Geometry{nil}
	for _, p := range a.gpu.Profiles {
		var whole nvml.Geometry
		for range request[p.Name] {
			whole = append(whole, nvml.Placed{Profile: p.Name})
		}
		var parts []nvml.ComputeProfile
		for _, c := range p.Compute {
			for range request[c.Name+"."+p.Name] {
				parts = append(parts, c)
			}
		}
		var next []nvml.Geometry
		for _, divided := range sharings(p, parts) {
			for _, before := range out {
				next = append(next, slices.Concat(before, whole, divided))
			}
		}
		out = next
	}
	return out
}

// sharings are the distinct ways in which parts can share instances of a profile.
func sharings(p nvml.Profile, parts []nvml.ComputeProfile) []nvml.Geometry {
	distinct := map[string]nvml.Geometry{}
	var instances [][]string
	var used []int
	var put func(n int)
	put = func(n int) {
		if n == len(parts) {
			var out nvml.Geometry
			for _, names := range instances {
				out = append(out, nvml.Placed{Profile: p.Name, Compute: strings.Join(names, "+")})
			}
			out.Sort()
			distinct[out.String()] = out
			return
		}
		for i := range instances {
			if used[i]+parts[n].Slices > p.Slices {
				continue
			}
			instances[i], used[i] = append(instances[i], parts[n].Name), used[i]+parts[n].Slices
			put(n + 1)
			instances[i], used[i] = instances[i][:len(instances[i])-1], used[i]-parts[n].Slices
		}
		if len(instances) < p.Max {
			instances, used = append(instances, []string{parts[n].Name}), append(used, parts[n].Slices)
			put(n + 1)
			instances, used = instances[:len(instances)-1], used[:len(used)-1]
		}
	}
	put(0)
	return slices.Collect(maps.Values(distinct))
}

// eachAssignment puts the instances, whose profiles are those of g, onto the places of g in every way.
func eachAssignment(g, instances nvml.Geometry, yield func(nvml.Geometry)) {
	if !slices.ContainsFunc(instances, func(p nvml.Placed) bool { return p.Compute != "" }) {
		yield(g)
		return
	}
	target := slices.Clone(g)
	taken := make([]bool, len(g))
	var put func(n int)
	put = func(n int) {
		if n == len(instances) {
			yield(target)
			return
		}
		for i := range g {
			if taken[i] || g[i].Profile != instances[n].Profile {
				continue
			}
			taken[i], target[i].Compute = true, instances[n].Compute
			put(n + 1)
			taken[i] = false
			if instances[n].Compute == "" && !slices.ContainsFunc(instances, func(p nvml.Placed) bool {
				return p.Profile == instances[n].Profile && p.Compute != ""
			}) {
				return // none of this profile is divided: one place is as good as another
			}
		}
	}
	put(0)
}
