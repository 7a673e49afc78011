package judge

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// offersByPlugin reports whether NVIDIA's device plugin offers the node's GPUs, now and after a change.
func (h *hardware) offersByPlugin() bool { return h.unknown == "" && !h.claims }

// named is what is wanted by the names of profiles that the node's GPUs have: a resource has "." for the "+" of a profile. Of devices that are shared, a part
// of one is enough.
func (h *hardware) named(want demand.Want) demand.Want {
	out := demand.Want{}
	for kind, count := range want {
		name := kind
		for _, g := range h.gpus {
			for _, p := range g.Profiles {
				if strings.ReplaceAll(p.Name, "+", ".") == kind {
					name = p.Name
				}
			}
		}
		if replicas := h.replicas[name]; replicas > 1 {
			count = (count + replicas - 1) / replicas
		}
		out[name] = count
	}
	return out
}

// replicasOn is how often the node's plugin offers each device of a kind, before any move.
func (h *hardware) replicasOn(n *corev1.Node) map[string]int {
	out := map[string]int{}
	for _, g := range h.gpus {
		if !g.Enabled && !g.Lost {
			out[demand.Whole]++
		}
		for _, i := range g.Instances {
			out[i.Profile]++
		}
	}
	for kind, devices := range out {
		offered := 0
		for _, name := range resourcesOf(kind) {
			of := n.Status.Allocatable[name]
			offered += int(min(of.Value(), nvml.MaxDevices))
		}
		out[kind] = max(1, offered/devices)
	}
	return out
}

// resourcesOf are the device plugin's names for a kind of device.
func resourcesOf(kind string) []corev1.ResourceName {
	name := nvml.ResourceGPU
	if kind != demand.Whole {
		name = nvml.ResourceMIGPrefix + strings.ReplaceAll(kind, "+", ".")
	}
	return []corev1.ResourceName{corev1.ResourceName(name), corev1.ResourceName(name + nvml.SharedSuffix)}
}

// freeResources are the free devices of the node, by resource. A resource without a free device has 0. NVIDIA's DRA driver offers no resources.
func (h *hardware) freeResources(n *corev1.Node) map[corev1.ResourceName]int {
	if h.claims {
		return nil
	}
	out := map[corev1.ResourceName]int{nvml.ResourceGPU: 0}
	resource := func(profile string) corev1.ResourceName {
		name := resourcesOf(profile)[0]
		if h.leavesOutAttributes(string(name), n) {
			return plain(name)
		}
		return name
	}
	for _, g := range h.gpus {
		for _, p := range g.Profiles {
			out[resource(p.Name)] += 0
		}
		if !g.Enabled && len(g.All) == 0 && !g.Lost {
			out[nvml.ResourceGPU]++
		}
		for _, i := range g.Instances {
			if len(g.On[i.Start]) == 0 && len(g.All) == 0 && !g.Lost && i.Compute == "" {
				out[resource(i.Profile)]++
			}
		}
	}
	return out
}

// plain is the resource without the attributes of its profile: "nvidia.com/mig-1g.10gb".
func plain(name corev1.ResourceName) corev1.ResourceName {
	size, _, is := strings.Cut(string(name), "gb")
	if !is {
		return name
	}
	return corev1.ResourceName(size + "gb")
}

// leavesOutAttributes reports whether the node's device plugin offers an instance of the resource's profile by the plain name, as plugins before v0.20 do. That
// is known only of a node that has such an instance.
func (h *hardware) leavesOutAttributes(name string, n *corev1.Node) bool {
	full := corev1.ResourceName(name)
	offered, shared := n.Status.Allocatable[full], n.Status.Allocatable[full+nvml.SharedSuffix]
	if plain(full) == full || !offered.IsZero() || !shared.IsZero() {
		return false
	}
	has := func(gpus []demand.GPU) bool {
		return slices.ContainsFunc(gpus, func(g demand.GPU) bool {
			return slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return resourcesOf(i.Profile)[0] == full })
		})
	}
	return !h.planned.changes && has(h.gpus)
}

// neverOffers returns why the node would not offer what the pod requests under that name, however its GPUs are cut; empty if it would. The error says why that is
// not known.
func (m *moves) neverOffers(h *hardware, p *corev1.Pod, n *corev1.Node) (why string, unknown error) {
	if !keepsLabels(n, p) {
		return "the pod's node selector asks for labels of profile " + sanitize.Cut(n.Labels[config.LabelProfile], longestKey) + ", and a change takes the node out of that", nil
	}
	why = m.otherName(h, p, n)
	if why != "" && h.claims && m.Unknown != nil { // a DeviceClass may have the resource
		return "", errNotKnown
	}
	return why, nil
}

// otherName returns why the node does not offer the resources that the pod requests; empty if it does.
func (m *moves) otherName(h *hardware, p *corev1.Pod, n *corev1.Node) string {
	for name := range m.countable(p, n) {
		kind, shared := strings.CutSuffix(string(name), nvml.SharedSuffix)
		if !nvml.GPUResource(string(name)) {
			continue
		}
		renamed := n.Status.Allocatable[corev1.ResourceName(kind+nvml.SharedSuffix)]
		switch {
		case h.claims:
			return "NVIDIA's DRA driver offers its GPUs, and no DeviceClass has the resource " + sanitize.Cut(string(name), longestKey)
		case shared == renamed.IsZero():
			return "its device plugin does not offer GPUs under the name " + sanitize.Cut(string(name), longestKey)
		case h.leavesOutAttributes(kind, n):
			return "its device plugin leaves the attributes of profiles out of names, and offers no " + sanitize.Cut(string(name), longestKey)
		case kind != nvml.ResourceGPU && n.Labels[config.LabelMIGStrategy] == string(config.MIGStrategyNone):
			return "the MIG strategy of its device plugin is none"
		}
	}
	return ""
}

// keepsLabels reports whether the pod's rules accept the node also when a command has taken it out of its profile, and of the labels of that.
func keepsLabels(n *corev1.Node, p *corev1.Pod) bool {
	fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(withoutProfile(n))
	return n.Labels[config.LabelProfile] == "" || err == nil && fits
}

// withoutProfile is the node when a command has taken it out of its profile, and of the labels and taints of that.
func withoutProfile(n *corev1.Node) *corev1.Node {
	if n.Labels[config.LabelProfile] == "" {
		return n
	}
	var published nodekeys.Keys
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationPublished]), &published) != nil {
		published = nodekeys.Keys{}
	}
	after := *n
	after.Labels = maps.Clone(n.Labels)
	maps.DeleteFunc(after.Labels, func(key, _ string) bool { _, is := published.Labels[key]; return is || key == config.LabelProfile })
	after.Spec.Taints = slices.DeleteFunc(slices.Clone(n.Spec.Taints), func(t corev1.Taint) bool {
		return slices.ContainsFunc(published.Taints, func(o corev1.Taint) bool { return o.MatchTaint(&t) })
	})
	return &after
}

// tainted names the taints of the node's devices.
func (m *moves) tainted(n *corev1.Node) string {
	var keys []string
	for _, s := range m.devices.slices {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != n.Name {
			continue
		}
		for _, d := range s.Spec.Devices {
			for _, t := range d.Taints {
				if key := sanitize.Cut(t.Key, longestKey); !slices.Contains(keys, key) {
					keys = append(keys, key)
				}
			}
		}
	}
	if len(keys) == 0 {
		return ""
	}
	slices.Sort(keys)
	return ": some have the taint " + sanitize.Listed(keys)
}
