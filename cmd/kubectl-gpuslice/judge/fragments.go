package judge

import (
	"cmp"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/nvml"
)

// Fragments is what the free memory slices of a node can be used for, and what stands in the way of more.
type Fragments struct {
	Node     string    `json:"node"`
	Unknown  string    `json:"unknown,omitempty"` // why there is nothing else
	Dynamic  bool      `json:"dynamic,omitempty"` // NVIDIA's DRA driver cuts the GPUs for claims
	GPUs     []Shares  `json:"gpus,omitempty"`
	Profiles []HasRoom `json:"profiles,omitempty"` // the largest first, and GPUs that are not divided as demand.Whole
}

// Shares are the memory slices of a GPU.
type Shares struct {
	GPU       int        `json:"gpu"` // by index
	Slices    int        `json:"slices"`
	Free      int        `json:"free"`              // those that no pod has
	Largest   string     `json:"largest,omitempty"` // the largest profile that fits if no pod leaves; empty for none
	Lost      int        `json:"lost"`              // free slices that the largest profile which fits cannot use
	Fragments int        `json:"fragments"`         // demand.Search.Fragments
	Instances []Instance `json:"instances"`         // null with MIG off
	Pods      []string   `json:"pods,omitempty"`    // on all of it
}

// HasRoom is how often a node could offer a profile.
type HasRoom struct {
	Profile  string   `json:"profile"`
	Idle     int      `json:"idle"`            // free devices now
	Possible int      `json:"possible"`        // devices that pods do not have, if the GPUs were cut for it and no pod left
	Leave    []string `json:"leave,omitempty"` // the fewest pods that have to leave for one, if Possible is 0
	Lost     int      `json:"slicesLost,omitempty"`
	Cuts     []Cut    `json:"cuts,omitempty"` // that make one; none where the driver cuts

	Request map[int]nvml.Request `json:"-"` // of Cuts
}

// Explain says of each node what its free slices can be used for. Pending pods of the question count as requests alone.
func Explain(q Question, nodes []*corev1.Node) []Fragments {
	m := movesOf(q)
	var out []Fragments
	for _, n := range nodes {
		out = append(out, m.explain(n))
	}
	return out
}

func (m *moves) explain(n *corev1.Node) Fragments {
	h := m.hardware[n.Name]
	out := Fragments{Node: n.Name}
	if h == nil || h.unknown != "" {
		out.Unknown = "no agent has reported its GPUs"
		if h != nil {
			out.Unknown = h.unknown
		}
		return out
	}
	out.Dynamic = h.dynamic
	sizes := map[string]int{}
	for i := range h.gpus {
		g := &h.gpus[i]
		if g.Lost || g.MemorySlices() == 0 {
			continue
		}
		out.GPUs = append(out.GPUs, m.shares(h, g))
		for _, p := range g.Profiles {
			if len(p.Placements) > 0 {
				sizes[p.Name] = max(sizes[p.Name], 100*p.Placements[0].Size+p.Slices)
			}
		}
	}
	for name := range sizes {
		out.Profiles = append(out.Profiles, m.hasRoom(h, name))
	}
	slices.SortFunc(out.Profiles, func(a, b HasRoom) int {
		return cmp.Or(cmp.Compare(sizes[b.Profile], sizes[a.Profile]), cmp.Compare(a.Profile, b.Profile))
	})
	if len(out.GPUs) > 0 {
		out.Profiles = append(out.Profiles, m.hasRoom(h, demand.Whole))
	}
	return out
}

// shares are the memory slices of one GPU.
func (m *moves) shares(h *hardware, g *demand.GPU) Shares {
	out := Shares{GPU: g.Index, Slices: g.MemorySlices(), Free: g.Free(), Fragments: m.search.Fragments(g), Instances: h.instances(g), Pods: g.All}
	used := 0
	for _, p := range g.Profiles {
		if len(p.Placements) == 0 || len(g.All) > 0 {
			continue
		}
		if size := p.Placements[0].Size; size > used && g.Further(p) > 0 {
			used, out.Largest = size, p.Name
		}
	}
	out.Lost = max(0, out.Free-used)
	return out
}

// hasRoom is how often the node could offer the profile, or a whole GPU.
func (m *moves) hasRoom(h *hardware, profile string) HasRoom {
	out := HasRoom{Profile: profile}
	for i := range h.gpus {
		if g := &h.gpus[i]; !g.Lost && len(g.All) == 0 {
			out.Idle += h.idle(g, profile)
			out.Possible += possible(g, profile)
		}
	}
	fewest, some := m.fewest.Find(h.gpus, demand.Want{profile: 1})
	found, can := m.search.Find(h.gpus, demand.Want{profile: 1})
	switch {
	case out.Idle > 0 || !some:
		return out
	case !can || h.dynamic || len(found.Pods) > len(fewest.Pods) || found.Cost.Lost > fewest.Cost.Lost: // these have to end by themselves: the agent cuts otherwise, or not at all
		out.Leave, out.Lost = fewest.Pods, fewest.Cost.Lost
		return out
	}
	found = found.Restored(h.gpus)
	out.Leave, out.Lost = found.Pods, found.Cost.Lost
	out.Request = map[int]nvml.Request{}
	for _, c := range found.Cuts {
		g := &h.gpus[c.GPU]
		cut := Cut{GPU: g.Index, Slices: g.MemorySlices(), Before: h.instances(g)}
		was := *g
		h.cut(c, found.Pods, "a new pod")
		cut.After = h.instances(g)
		*g = was
		out.Cuts, out.Request[g.Index] = append(out.Cuts, cut), c.Request
	}
	return out
}

// idle is how many free devices of the profile the GPU has now.
func (h *hardware) idle(g *demand.GPU, profile string) (n int) {
	if profile == demand.Whole && !g.Enabled {
		return 1
	}
	for _, i := range g.Instances {
		if i.Profile == profile && i.Compute == "" && len(g.On[i.Start]) == 0 && !h.dynamic { // the driver destroys one that no claim has
			n++
		}
	}
	return n
}

// possible is how many devices of the profile the GPU could have beside those of pods.
func possible(g *demand.GPU, profile string) int {
	if profile == demand.Whole {
		if len(g.Held()) == 0 {
			return 1
		}
		return 0
	}
	p, offers := g.Profile(profile)
	if !offers {
		return 0
	}
	return g.Further(p)
}
