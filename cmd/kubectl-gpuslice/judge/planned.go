package judge

import (
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/nvml"
)

// planned is what moves have changed of a node. Its GPUs are as after these moves.
type planned struct {
	changes   bool                // there is a change
	disturbs  bool                // by more than instances in free places
	before    map[int]*demand.GPU // the changed GPUs as the agent will find them, by index
	leave     []string            // pods that have to leave
	returning demand.Want         // what those of them request that come back to the node
	promised  demand.Want         // what the moves give by changes
	sure      demand.Want         // the open devices before the first move that does not come with the others; nil if all do
	stuck     bool                // one of the moves may never come, and so none after it
	given     map[string]string   // the pending pods that moves give a device, by its place: "3" or "3/4"
}

// remember copies a GPU before the first move changes it.
func (h *hardware) remember(g *demand.GPU) {
	if h.planned.before[g.Index] != nil {
		return
	}
	out := *g
	out.Instances, out.On, out.All = slices.Clone(g.Instances), maps.Clone(g.On), slices.Clone(g.All)
	for i := range out.Instances {
		out.Instances[i].Devices = slices.Clone(out.Instances[i].Devices)
	}
	h.planned.before[g.Index] = &out
}

// cut gives a GPU the geometry of a change: pods that leave have nothing any more, and the pod has what it gets.
func (h *hardware) cut(c demand.Cut, leave []string, pod string) {
	g := &h.gpus[c.GPU]
	h.remember(g)
	gone := func(p string) bool { return slices.Contains(leave, p) }
	before := g.On
	stays := map[nvml.Placed]nvml.Instance{}
	for _, i := range g.Instances {
		stays[i.Placed] = i
	}
	g.Enabled, g.Pending, g.Instances, g.On = c.Request.MIG, c.Request.MIG, nil, map[int][]string{}
	g.All = slices.DeleteFunc(slices.Clone(g.All), gone)
	if !c.Request.MIG {
		g.All = append(g.All, demand.Stays)
		h.planned.given[part(g, nil)] = pod
		return
	}
	for _, p := range c.After {
		i, kept := stays[p]
		if !kept {
			if !slices.Contains(c.Used, p) { // pods that leave may come back to it
				g.On[p.Start] = []string{demand.Stays}
			}
			i = nvml.Instance{Placed: p}
			for _, name := range p.Devices() {
				i.Devices = append(i.Devices, nvml.Device{Profile: name})
			}
		} else if pods := slices.DeleteFunc(slices.Clone(before[p.Start]), gone); len(pods) > 0 {
			g.On[p.Start] = pods
		}
		if slices.Contains(c.Used, p) {
			g.On[p.Start] = append(g.On[p.Start], demand.Stays)
			h.planned.given[part(g, &p)] = pod
		}
		for d := range i.Devices {
			i.Devices[d].Held = len(g.On[p.Start]) > 0
		}
		g.Instances = append(g.Instances, i)
	}
}

// take gives a pod free devices, so that no later change counts on them. Which ones the node's kubelet takes is not known.
func (h *hardware) take(want demand.Want, pod string) {
	for kind, n := range maps.Clone(want) {
		for i := range h.gpus {
			g := &h.gpus[i]
			if kind == demand.Whole && n > 0 && !g.Enabled && len(g.All) == 0 && !g.Lost {
				g.All, n = []string{demand.Stays}, n-1
				h.planned.given[part(g, nil)] = pod
			}
			for k := range g.Instances {
				if p := g.Instances[k]; n > 0 && p.Profile == kind && len(g.On[p.Start]) == 0 {
					g.On[p.Start], n = []string{demand.Stays}, n-1
					h.planned.given[part(g, &p.Placed)] = pod
					for d := range p.Devices {
						p.Devices[d].Held = true
					}
				}
			}
		}
	}
}

// asPlanned reports whether the agent would do to a GPU what the moves say. The agent solves from the GPU before all moves to the sum of them: it may make
// another pod leave, or leave a pod on what a move gives.
func (h *hardware) asPlanned(c demand.Cut, leave []string) bool {
	g := &h.gpus[c.GPU]
	before := h.planned.before[g.Index]
	if before == nil || !c.Request.MIG || len(before.All) > 0 {
		return true
	}
	solution, err := nvml.Solve(before.GPU, c.Request.Devices)
	if err != nil {
		return false
	}
	free := map[string]int{}
	for _, p := range solution.Target {
		free[p.Profile]++
	}
	for _, i := range before.Instances {
		pods := before.On[i.Start]
		switch goes := slices.Contains(solution.Destroy, i.Placed); {
		case goes && slices.ContainsFunc(pods, func(p string) bool { return !slices.Contains(leave, p) && !slices.Contains(h.planned.leave, p) }):
			return false
		case !goes && len(pods) > 0:
			free[i.Profile]--
		}
	}
	for _, p := range slices.Concat(c.Used, h.givenOn(g, before)) {
		free[p.Profile]--
	}
	return !slices.ContainsFunc(slices.Collect(maps.Values(free)), func(n int) bool { return n < 0 })
}

// givenOn are the instances of a GPU that moves have given to pods since it was as before.
func (h *hardware) givenOn(g, before *demand.GPU) (out []nvml.Placed) {
	for _, i := range g.Instances {
		_, given := h.planned.given[part(g, &i.Placed)]
		if given && slices.Contains(g.On[i.Start], demand.Stays) && !slices.Contains(before.On[i.Start], demand.Stays) {
			out = append(out, i.Placed)
		}
	}
	return out
}

// free are the devices that no pod has once a change is carried out and its pods have left; what it is for is among them, and what is restored for pods that
// come back.
func (h *hardware) free(r demand.Recut) demand.Want {
	stays := func(pods []string, on string) bool {
		_, given := h.planned.given[on]
		return slices.ContainsFunc(pods, func(p string) bool {
			return p == demand.Stays && given || p != demand.Stays && !slices.Contains(r.Pods, p)
		})
	}
	out := demand.Want{}
	for i := range h.gpus {
		g := &h.gpus[i]
		enabled, after := g.Enabled, g.Geometry()
		if at := slices.IndexFunc(r.Cuts, func(c demand.Cut) bool { return c.GPU == i }); at >= 0 {
			enabled, after = r.Cuts[at].Request.MIG, r.Cuts[at].After
		}
		switch {
		case g.Lost || stays(g.All, part(g, nil)):
		case !enabled:
			out[demand.Whole]++
		default:
			for _, p := range after {
				kept := slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Placed == p })
				if !kept || !stays(g.On[p.Start], part(g, &p)) {
					out[p.Profile]++
				}
			}
		}
	}
	return out
}
