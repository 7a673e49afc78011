package judge

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of what is read of a status, which any user who can write the node can write. No machine has more.
const (
	mostGPUs      = 64
	mostInstances = 8  // of one GPU
	mostPlaces    = 8  // of a profile
	mostProfiles  = 32 // of one model
	mostSlices    = 16 // of memory, and for computing
)

// hardware are the GPUs of a node by its agent's status, and which pods have what.
type hardware struct {
	gpus      []demand.GPU
	given     map[string]string   // pending pods by what moves have given them: "3" or "3/4"
	replicas  map[string]int      // how often the node's plugin offers each device, by the kind
	before    map[int]*demand.GPU // GPUs that moves have changed, as they are until these are carried out, by index
	leave     []string            // pods that have to leave for these
	got       demand.Want         // what moves have given pods by changes
	again     demand.Want         // what pods of DaemonSets request again that leave for that
	anywhere  []string            // pods that may have any device, as their agent does not know it
	planned   bool                // moves change the node
	disturbed bool                // by more than instances in free places
	dynamic   bool                // NVIDIA's DRA driver cuts them for claims
	claims    bool                // NVIDIA's DRA driver offers them
	unknown   string              // why it is not known how they can be cut, and what that would take; empty if it is
}

// hardwareOf reads the status of a node. Pods are those on the node; all says that they are all of the cluster's, and claims are the pods that have a device of
// NVIDIA's DRA driver.
func hardwareOf(n *corev1.Node, s api.Status, pods []*corev1.Pod, all bool, claims map[types.UID]bool, known kinds) *hardware {
	h := &hardware{given: map[string]string{}, got: demand.Want{}, before: map[int]*demand.GPU{}, dynamic: s.Owner == api.OwnerDRADynamic, claims: s.Owner == api.OwnerDRAStatic || s.Owner == api.OwnerDRADynamic}
	switch {
	case len(s.GPUs) == 0:
		return &hardware{unknown: "no agent has reported its GPUs"}
	case len(s.Models) == 0, s.Held == nil:
		return &hardware{unknown: "its agent does not report how its GPUs can be cut"}
	case s.Owner == api.OwnerBoth:
		return &hardware{unknown: "several programs offer its GPUs"}
	case !h.claims && n.Labels[config.LabelMIGStrategy] == string(config.MIGStrategySingle):
		return &hardware{unknown: "its MIG strategy is single: all its GPUs would have to be cut alike"}
	case len(s.GPUs) > mostGPUs:
		return &hardware{unknown: fmt.Sprintf("its status has more than %d GPUs", mostGPUs)}
	}
	model := map[int]nvml.GPU{}
	for _, m := range s.Models {
		g, ok := known.modelOf(m)
		if !ok {
			return &hardware{unknown: "its status has a model that cannot be"}
		}
		for _, index := range m.GPUs {
			model[index] = g
		}
	}
	for _, g := range s.GPUs {
		as, is := model[g.Index]
		out, ok := gpuOf(g, as, is)
		if !ok {
			return &hardware{unknown: fmt.Sprintf("its status has instances on GPU %d that cannot be", g.Index)}
		}
		h.gpus = append(h.gpus, out)
	}
	h.hold(s.Held, pods, all, claims)
	h.replicas = h.replicasOn(n)
	return h
}

// kinds number what models offer: a status may give a model's name to other profiles.
type kinds map[string]uint32

func (k kinds) of(m api.Model) uint32 {
	offers := fmt.Sprint(m.Profiles)
	if _, is := k[offers]; !is {
		k[offers] = uint32(min(len(k), math.MaxInt32))
	}
	return k[offers]
}

// modelOf is a GPU of the model; false for one that no GPU can be.
func (k kinds) modelOf(m api.Model) (g nvml.GPU, ok bool) {
	g = nvml.GPU{Model: m.Name, DeviceID: k.of(m), Capable: true}
	for _, p := range m.Profiles {
		out := nvml.Profile{Name: p.Name, Slices: p.Slices, Max: p.Max, Engines: p.Engines}
		for _, at := range p.At {
			out.Placements = append(out.Placements, nvml.Span{Start: at, Size: p.Size})
			if at < 0 || at > mostSlices {
				return g, false
			}
		}
		if p.Slices < 1 || p.Slices > mostSlices || p.Size < 1 || p.Size > mostSlices || p.Max < 0 || p.Max > mostInstances || len(p.At) > mostPlaces {
			return g, false
		}
		g.Profiles = append(g.Profiles, out)
	}
	return g, len(m.Profiles) <= mostProfiles && g.MemorySlices() <= mostSlices
}

// gpuOf is a GPU of the status, of a model that can be cut if known is set.
func gpuOf(g api.StatusGPU, model nvml.GPU, known bool) (out demand.GPU, ok bool) {
	out = demand.GPU{GPU: model, On: map[int][]string{}}
	out.Index, out.UUID, out.Lost = g.Index, g.UUID, g.Lost || g.Missing || !known && g.MIG
	out.Enabled, out.Pending = g.MIG, g.MIG
	if g.Health != nil && g.Health.Reason != "" { // what is not well is cut by no advice
		out.Lost = true
	}
	if len(g.Instances) > mostInstances || g.Geometry != "" && len(g.Instances) == 0 {
		return out, false
	}
	for _, i := range g.Instances {
		placed, ok := placedOf(i, model)
		if !ok || slices.ContainsFunc(out.Instances, func(o nvml.Instance) bool { return o.Overlaps(placed.Span) }) {
			return out, out.Lost
		}
		instance := nvml.Instance{Placed: placed, ID: i.ID}
		for _, name := range placed.Devices() {
			instance.Devices = append(instance.Devices, nvml.Device{Profile: name})
		}
		out.Instances = append(out.Instances, instance)
	}
	return out, true
}

// placedOf reads "3g.40gb(1c+2c)@4".
func placedOf(i api.StatusInstance, model nvml.GPU) (nvml.Placed, bool) {
	name, _, _ := strings.Cut(i.Is, "@")
	profile, compute, _ := strings.Cut(strings.TrimSuffix(name, ")"), "(")
	out := nvml.Placed{Profile: profile, Compute: compute, Span: nvml.Span{Start: i.At, Size: i.Size}}
	p, is := model.Profile(profile)
	return out, is && slices.Contains(p.Placements, out.Span) && strings.Count(compute, "+") < mostSlices
}

// hold notes which pods have what. A pod that has gone since the status was written has nothing.
func (h *hardware) hold(held []api.Held, pods []*corev1.Pod, all bool, claims map[types.UID]bool) {
	name := map[types.UID]string{}
	for _, p := range pods {
		name[p.UID] = p.Namespace + "/" + p.Name
	}
	seen := map[string]bool{}
	for _, one := range held {
		pod, is := name[one.Pod]
		switch {
		case !is && all:
			continue
		case !is:
			pod = "a pod of another namespace"
		case len(one.On) == 0:
			h.anywhere = append(h.anywhere, pod)
		}
		seen[pod] = true
		for _, on := range one.On {
			h.give(on, pod)
		}
	}
	for _, p := range pods {
		pod := p.Namespace + "/" + p.Name
		if has := claims[p.UID] || !h.claims && asksPlugin(p); has && !seen[pod] && h.unknown == "" {
			h.unknown = "its agent has not reported yet which devices " + pod + " has"
		}
	}
}

// give notes that the pod has a GPU, "3", or an instance of one, "3/4".
func (h *hardware) give(on, pod string) {
	index, start, isPart := strings.Cut(on, "/")
	for i := range h.gpus {
		g := &h.gpus[i]
		if strconv.Itoa(g.Index) != index {
			continue
		}
		if !isPart {
			g.All = append(g.All, pod)
			return
		}
		for n := range g.Instances {
			if strconv.Itoa(g.Instances[n].Start) == start {
				g.On[g.Instances[n].Start] = append(g.On[g.Instances[n].Start], pod)
				for d := range g.Instances[n].Devices {
					g.Instances[n].Devices[d].Held = true
				}
			}
		}
	}
}

// asksPlugin reports whether the pod requests devices of NVIDIA's device plugin.
func asksPlugin(p *corev1.Pod) bool {
	for name, n := range Requests(p) {
		if nvml.GPUResource(string(name)) && !n.IsZero() {
			return true
		}
	}
	return false
}

// empty are the GPUs without pods.
func (h *hardware) empty() []demand.GPU {
	out := slices.Clone(h.gpus)
	for i := range out {
		out[i].All, out[i].On = nil, nil
		out[i].Instances = slices.Clone(out[i].Instances)
		for n := range out[i].Instances {
			out[i].Instances[n].Devices = []nvml.Device{{Profile: out[i].Instances[n].Profile}}
		}
	}
	return out
}

// keeping are the GPUs with these pods as some that no change makes leave.
func (h *hardware) keeping(stay map[string]bool) []demand.GPU {
	if len(stay) == 0 {
		return h.gpus
	}
	named := func(pods []string) []string {
		pods = slices.Clone(pods)
		for n, p := range pods {
			if stay[p] {
				pods[n] = demand.Stays
			}
		}
		return pods
	}
	out := slices.Clone(h.gpus)
	for i := range out {
		on := map[int][]string{}
		for at, pods := range out[i].On {
			on[at] = named(pods)
		}
		out[i].All, out[i].On = named(out[i].All), on
	}
	return out
}

// differs reports whether the agent, which knows the end of all moves and none of them, makes another pod leave of a GPU, or lets one stay in what a move gives.
func (h *hardware) differs(c demand.Cut, leave []string) bool {
	g := &h.gpus[c.GPU]
	before := h.before[g.Index]
	if before == nil || !c.Request.MIG || len(before.All) > 0 {
		return false
	}
	solution, err := nvml.Solve(before.GPU, c.Request.Devices)
	if err != nil {
		return true
	}
	free := map[string]int{}
	for _, p := range solution.Target {
		free[p.Profile]++
	}
	for _, i := range before.Instances {
		pods := before.On[i.Start]
		switch goes := slices.Contains(solution.Destroy, i.Placed); {
		case goes && slices.ContainsFunc(pods, func(p string) bool { return !slices.Contains(leave, p) && !slices.Contains(h.leave, p) }):
			return true
		case !goes && len(pods) > 0:
			free[i.Profile]--
		}
	}
	for _, p := range slices.Concat(c.Used, h.givenOn(g, before)) {
		free[p.Profile]--
	}
	return slices.ContainsFunc(slices.Collect(maps.Values(free)), func(n int) bool { return n < 0 })
}

// givenOn are the instances of a GPU that moves have given to pods since it was as before.
func (h *hardware) givenOn(g, before *demand.GPU) (out []nvml.Placed) {
	for _, i := range g.Instances {
		_, given := h.given[part(g, &i.Placed)]
		if given && slices.Contains(g.On[i.Start], demand.Stays) && !slices.Contains(before.On[i.Start], demand.Stays) {
			out = append(out, i.Placed)
		}
	}
	return out
}

// remember copies a GPU before the first move changes it.
func (h *hardware) remember(g *demand.GPU) {
	if h.before[g.Index] != nil {
		return
	}
	out := *g
	out.Instances, out.On, out.All = slices.Clone(g.Instances), maps.Clone(g.On), slices.Clone(g.All)
	for i := range out.Instances {
		out.Instances[i].Devices = slices.Clone(out.Instances[i].Devices)
	}
	h.before[g.Index] = &out
}

// left are the devices that no pod has once a change is carried out and its pods have left; what it is for is among them, and what is restored for pods that
// come back.
func (h *hardware) left(r demand.Recut) demand.Want {
	stays := func(pods []string, on string) bool {
		_, given := h.given[on]
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
		h.given[part(g, nil)] = pod
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
			h.given[part(g, &p)] = pod
		}
		for d := range i.Devices {
			i.Devices[d].Held = len(g.On[p.Start]) > 0
		}
		g.Instances = append(g.Instances, i)
	}
}

// part is a GPU, "3", or an instance of it, "3/4".
func part(g *demand.GPU, p *nvml.Placed) string {
	if p == nil {
		return strconv.Itoa(g.Index)
	}
	return fmt.Sprintf("%d/%d", g.Index, p.Start)
}

// instances are those of a GPU with their pods; nil with MIG off.
func (h *hardware) instances(g *demand.GPU) []Instance {
	if !g.Enabled {
		return nil
	}
	out := []Instance{}
	for _, i := range g.Instances {
		pods := slices.Clone(g.On[i.Start])
		for n := range pods {
			if pods[n] == demand.Stays {
				pods[n] = h.given[part(g, &i.Placed)]
			}
		}
		out = append(out, Instance{Is: i.Placed.String(), At: i.Start, Size: i.Size, Pods: pods})
	}
	return out
}

// take gives a pod free devices, so that no later change counts on them. Which ones the node's kubelet takes is not known.
func (h *hardware) take(want demand.Want, pod string) {
	for kind, n := range maps.Clone(want) {
		for i := range h.gpus {
			g := &h.gpus[i]
			if kind == demand.Whole && n > 0 && !g.Enabled && len(g.All) == 0 && !g.Lost {
				g.All, n = []string{demand.Stays}, n-1
				h.given[part(g, nil)] = pod
			}
			for k := range g.Instances {
				if p := g.Instances[k]; n > 0 && p.Profile == kind && len(g.On[p.Start]) == 0 {
					g.On[p.Start], n = []string{demand.Stays}, n-1
					h.given[part(g, &p.Placed)] = pod
					for d := range p.Devices {
						p.Devices[d].Held = true
					}
				}
			}
		}
	}
}
