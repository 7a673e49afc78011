package migrate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// goes compares what a node's label asks for with what the node offers. They differ if mig-manager was off when the label was set, or if a user has divided
// the GPUs by hand. The first agent takes nothing for a label that is older than itself; it does so once the label is set again. A node loses nothing if its
// agent has made what the label asks for.
func (j *judge) goes(n corev1.Node, pods []corev1.Pod, note func(Verdict, string, ...any)) {
	name := n.Labels[config.LabelMIGConfig]
	if name == "" || n.Labels[config.LabelProfile] != "" {
		return
	}
	rules, m, there := j.rulesOf(n, name)
	if !there {
		return
	}
	asked, err := m.asks(name, rules)
	known := err == nil && len(asked) == len(m.gpus) // GPUs that the config leaves as they are may have any of what is offered
	what := "MIG devices"
	if known {
		what = describe(asked, m)
	}
	if cannot := unshown(rules, m, n.Labels[config.LabelMIGStrategy]); cannot != "" {
		note(Change, "give the device plugin another MIG strategy, or change the label: %s=%s asks for %s, and %s", config.LabelMIGConfig, name, what, cannot)
	}
	if !known {
		return
	}
	lost := loses(asked, m, offeredBy(n))
	if len(lost) == 0 || isAsAsked(&n) {
		return
	}
	var texts, holding []string
	for _, resource := range slices.Sorted(maps.Keys(lost)) {
		texts = append(texts, fmt.Sprintf("%s %d", resource, lost[resource]))
	}
	for i := range pods {
		if holds(&pods[i], lost) {
			holding = append(holding, pods[i].Namespace+"/"+pods[i].Name)
		}
	}
	who := "the pods on them (kubectl get pods -A --field-selector spec.nodeName=" + n.Name + ")"
	if len(holding) > 0 {
		who = "pods " + sanitize.Listed(holding)
	}
	note(Change, "set %s to what the GPUs are, or remove it, before gpuslice is installed: %s asks for %s, and the node offers %s. The agent takes nothing for a label that is older than itself, and says %s; "+
		"once the label is set again, %s go, and %s leave",
		config.LabelMIGConfig, name, what, cmp.Or(offeredText(offeredBy(n)), "nothing"), config.ReasonOlderRequest, sanitize.Listed(texts), who)
}

// isAsAsked reports whether the node's agent has made what the labels ask for, by its last report.
func isAsAsked(n *corev1.Node) bool {
	r := cluster.ReportOf(n)
	return r.Condition.Status == corev1.ConditionTrue && r.Status.Phase == api.PhaseIdle && r.Agrees() && r.Answers(n)
}

// rulesOf are the rules that count on the node under that name, without those for other models; there is false where labels do not say which they are. As long
// as a config of a name that agents make is not copied, the agent's own counts.
func (j *judge) rulesOf(n corev1.Node, name string) (rules catalog.MIGConfig, m machine, there bool) {
	rules, there = j.configs[name]
	devices := append(devicesOf(rules), deviceOf(name))
	for resource := range offeredBy(n) { // a config that the agent makes has the names of the model's devices
		if device, cut := strings.CutPrefix(resource, nvml.ResourceMIGPrefix); cut {
			devices = append(devices, deviceOf(device))
		}
	}
	m = machineOf(n.Labels, devices)
	if rules = m.rules(rules); there && !filtered(rules) {
		return rules, m, true
	}
	rules, there = m.made(name)
	return rules, m, there
}

// unshown says why a device plugin of the MIG strategy does not advertise the requested devices; empty if it does, or if the labels do not say so.
func unshown(rules catalog.MIGConfig, m machine, strategy string) string {
	sizes, whole, all := shownBy(rules, m)
	const single = "by the MIG strategy single, which the node's label says, it offers devices of one size alone"
	switch {
	case len(sizes) == 0:
		return ""
	case strategy == string(config.MIGStrategyNone):
		return "by the MIG strategy none, which the node's label says, it offers no MIG device"
	case strategy != string(config.MIGStrategySingle):
		return ""
	case whole || len(sizes) > 1:
		return single
	case !all && (!m.counted || len(positionsOf(rules, len(m.gpus))) < len(m.gpus)):
		return single + ", on all GPUs of the node: GPUs that the config does not name would have to be cut alike"
	default:
		return ""
	}
}

// shownBy is what rules ask of the machine's GPUs: the sizes of MIG devices, whether some GPU is to be whole, and whether a rule is about all of them.
func shownBy(rules catalog.MIGConfig, m machine) (sizes map[string]bool, whole, all bool) {
	sizes = map[string]bool{}
	for _, r := range rules {
		all = all || r.All
		if m.counted && !r.All && m.namesNone(catalog.MIGConfig{r}) {
			continue
		}
		whole = whole || !r.MIG
		for device := range r.Devices {
			sizes[device] = true
		}
	}
	return sizes, whole, all
}

// positionsOf are the positions of GPUs that rules name, of so many.
func positionsOf(rules catalog.MIGConfig, of int) map[int]bool {
	at := map[int]bool{}
	for _, r := range rules {
		for _, i := range r.Indices {
			if i < of {
				at[i] = true
			}
		}
	}
	return at
}

// offeredBy counts the GPUs and MIG devices that the node offers, by the resources of the MIG strategy mixed, and each once however often it is shared.
func offeredBy(n corev1.Node) map[string]int {
	out := map[string]int{}
	for name, quantity := range n.Status.Allocatable {
		resource := string(name)
		if !nvml.GPUResource(resource) {
			continue
		}
		count := int(quantity.Value())
		whole := strings.TrimSuffix(resource, nvml.SharedSuffix)
		if replicas, err := strconv.Atoi(n.Labels[whole+".replicas"]); err == nil && replicas > 1 {
			count /= replicas
		}
		if _, device, all := strings.Cut(n.Labels["nvidia.com/gpu.product"], "-MIG-"); all && whole == nvml.ResourceGPU { // strategy single
			whole = nvml.ResourceMIGPrefix + strings.TrimSuffix(device, "-SHARED")
		}
		if count > 0 {
			out[whole] += count
		}
	}
	return out
}

func offeredText(offered map[string]int) string {
	var out []string
	for _, resource := range slices.Sorted(maps.Keys(offered)) {
		out = append(out, fmt.Sprintf("%s %d", resource, offered[resource]))
	}
	return sanitize.Listed(out)
}

// loses counts what is offered and not asked for. Where the labels do not say how many GPUs there are, it counts only what is not asked for at all. Discovery
// describes one model of a node that has two: then the labels do not say how many GPUs there are, nor what is asked of those of the other model.
func loses(asked map[nvml.UUID]nvml.Request, m machine, offered map[string]int) map[string]int {
	stays, cuts := map[string]int{}, false
	for _, w := range asked {
		if !w.MIG {
			stays[nvml.ResourceGPU]++
		}
		for device, n := range w.Devices {
			stays[nvml.ResourceMIGPrefix+strings.ReplaceAll(device, "+", ".")] += n
			cuts = true
		}
	}
	others := slices.ContainsFunc(slices.Collect(maps.Keys(offered)), func(resource string) bool {
		device, cut := strings.CutPrefix(resource, nvml.ResourceMIGPrefix)
		return cut && len(m.shape.Lacks(map[string]int{deviceOf(device): 1})) > 0
	})
	counted := m.counted && !others && offered[nvml.ResourceGPU] <= len(m.gpus)
	out := map[string]int{}
	for resource, n := range offered {
		switch {
		case stays[resource] > 0 && !counted:
		case others && cuts && strings.HasPrefix(resource, nvml.ResourceMIGPrefix):
		case n > stays[resource]:
			out[resource] = n - stays[resource]
		}
	}
	return out
}

// podsOf are the pods of a node that have not ended.
func podsOf(node string, pods []corev1.Pod) []corev1.Pod {
	var out []corev1.Pod
	for _, p := range pods {
		if p.Spec.NodeName == node && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			out = append(out, p)
		}
	}
	return out
}

// holds reports whether a pod requests any of the resources, under its own name or its shared name.
func holds(pod *corev1.Pod, resources map[string]int) bool {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for name := range c.Resources.Limits {
			if resources[strings.TrimSuffix(string(name), nvml.SharedSuffix)] > 0 {
				return true
			}
		}
	}
	return false
}
