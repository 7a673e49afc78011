package judge

import (
	"fmt"
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
	gpus     []demand.GPU
	replicas map[string]int // how often the node's plugin offers each device, by the kind
	anywhere []string       // pods that may have any device, as their agent does not know it
	dynamic  bool           // NVIDIA's DRA driver cuts them for claims
	claims   bool           // NVIDIA's DRA driver offers them
	none     bool           // the node shows no GPU at all
	unknown  string         // why it is not known how they can be cut, and what that would take; empty if it is
	planned  planned        // what moves have changed of this
}

// hardwareOf reads the status of a node. Pods are those on the node; all says that they are all of the cluster's, and claims are the pods that have a device of
// NVIDIA's DRA driver.
func hardwareOf(n *corev1.Node, s api.Status, pods []*corev1.Pod, all bool, claims map[types.UID]bool, known kinds) *hardware {
	h := &hardware{
		dynamic: s.Owner == api.OwnerDRADynamic, claims: s.Owner == api.OwnerDRAStatic || s.Owner == api.OwnerDRADynamic,
		planned: planned{given: map[string]string{}, promised: demand.Want{}, returning: demand.Want{}, before: map[int]*demand.GPU{}},
	}
	switch {
	case len(s.GPUs) == 0:
		return &hardware{unknown: "no agent has reported its GPUs"}
	case len(s.Models) == 0, s.Held == nil:
		return &hardware{unknown: "its agent does not report how its GPUs can be cut"}
	case s.Owner == api.OwnerBoth:
		return &hardware{unknown: "several programs offer its GPUs"}
	case !h.claims && n.Labels[config.LabelMIGStrategy] == string(config.MIGStrategySingle) && slices.ContainsFunc(s.Models, canBeCut):
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

// GPUsOf are the node's GPUs by its agent's last report; known is false if that does not say how they can be cut.
func GPUsOf(n *corev1.Node, s api.Status) (gpus []nvml.GPU, known bool) {
	h := hardwareOf(n, s, nil, false, nil, kinds{})
	for _, g := range h.gpus {
		gpus = append(gpus, g.GPU)
	}
	return gpus, h.unknown == ""
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

// canBeCut reports whether the driver offers instances on GPUs of the model.
func canBeCut(m api.Model) bool { return len(m.Profiles) > 0 }

// modelOf is a GPU of the model; false for one that no GPU can be.
func (k kinds) modelOf(m api.Model) (g nvml.GPU, ok bool) {
	g = nvml.GPU{Model: m.Name, DeviceID: k.of(m), Capable: canBeCut(m)}
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

// gpuOf is a GPU of the status; known says that the status has its model.
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
				pods[n] = h.planned.given[part(g, &i.Placed)]
			}
		}
		out = append(out, Instance{Is: i.Placed.String(), At: i.Start, Size: i.Size, Pods: pods})
	}
	return out
}
