package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
)

const (
	// longestHold is the number of characters of why a node is held, in a table.
	longestHold = 256
	// mostGPUs and mostInstances are what is drawn of a status, which others can write too: no machine has more.
	mostGPUs      = 64
	mostInstances = 64
	mostSlices    = 64
)

// nodeView is what status says of a node, to people and to programs.
type nodeView struct {
	Node     string                 `json:"node"`
	AskedFor string                 `json:"askedFor,omitempty"` // by its labels
	Agent    bool                   `json:"agent"`              // one has ever said anything
	Ready    corev1.ConditionStatus `json:"ready,omitempty"`    // of GPUPartitionReady
	Phase    api.Phase              `json:"phase,omitempty"`
	Reason   config.Reason          `json:"reason,omitempty"`
	Message  string                 `json:"message,omitempty"`
	Since    time.Time              `json:"since,omitzero"`
	Heard    time.Time              `json:"heard,omitzero"` // heartbeat of the condition
	Capacity string                 `json:"capacity,omitempty"`
	Held     *string                `json:"held,omitempty"`  // why
	Begins   time.Time              `json:"begins,omitzero"` // of the change that waits for its window
	Blockers []string               `json:"blockers,omitempty"`
	Health   *healthView            `json:"health,omitempty"` // nil: the agent says nothing of it
	GPUs     []gpuView              `json:"gpus,omitempty"`
	Pods     podsView               `json:"pods"`
}

// healthView is the condition GPUUnhealthy.
type healthView struct {
	Unhealthy corev1.ConditionStatus `json:"unhealthy"`
	Reason    string                 `json:"reason,omitempty"`
	Message   string                 `json:"message,omitempty"`
}

// gpuView is how a GPU is cut, and who uses it.
type gpuView struct {
	Index     int            `json:"index"`
	UUID      string         `json:"uuid"`
	MIG       bool           `json:"mig"`
	Geometry  string         `json:"geometry,omitempty"`
	Slices    int            `json:"slices,omitempty"`
	Pods      []string       `json:"pods,omitempty"` // on the whole of it
	Instances []instanceView `json:"instances,omitempty"`
	Health    *gpuHealth     `json:"health,omitempty"` // nil of one that is well, or of which nothing is known
}

// instanceView is a GPU instance, and who uses it.
type instanceView struct {
	api.StatusInstance
	Unhealthy config.Reason `json:"unhealthy,omitempty"` // why, if it is
	Pods      []string      `json:"pods,omitempty"`
}

// podsView is how far it is known which pods use the GPUs.
type podsView struct {
	Known    bool     `json:"known"`
	Why      string   `json:"why,omitempty"`      // they are not
	Asking   []string `json:"asking,omitempty"`   // pods of the node that ask for GPUs, where their instances are not known
	Anywhere []string `json:"anywhere,omitempty"` // pods of which nobody knows what they hold
}

// viewOf is the node without its pods.
func viewOf(n *corev1.Node) nodeView {
	t := agentReportOf(n)
	s := t.status
	v := nodeView{
		Node: n.Name, AskedFor: asks(n), Agent: !t.none(), Ready: t.condition.Status, Phase: s.Phase,
		Reason: config.Reason(cmp.Or(t.condition.Reason, string(s.Reason))), Message: t.condition.Message, Heard: t.condition.LastHeartbeatTime.UTC(),
		Capacity: s.Capacity, Begins: s.Next.UTC(), Blockers: s.Blockers,
	}
	if s.Reason == v.Reason {
		v.Since = s.Since.UTC()
	}
	if why, held := n.Annotations[config.AnnotationHold]; held {
		why = legible.Message(why, longestHold)
		v.Held = &why
	}
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUUnhealthy {
			v.Health = &healthView{c.Status, legible.Cut(c.Reason, longestWord), legible.Message(c.Message, legible.Longest)}
		}
	}
	for _, g := range s.GPUs[:min(len(s.GPUs), mostGPUs)] {
		v.GPUs = append(v.GPUs, viewOfGPU(g))
	}
	return v
}

func viewOfGPU(g api.StatusGPU) gpuView {
	v := gpuView{
		Index: g.Index, UUID: legible.Cut(string(g.UUID), longestWord), MIG: g.MIG, Geometry: legible.Message(g.Geometry, legible.Longest),
		Slices: max(0, min(g.Slices, mostSlices)),
	}
	for _, i := range g.Instances[:min(len(g.Instances), mostInstances)] {
		i.Is = legible.Cut(i.Is, longestWord)
		v.Instances = append(v.Instances, instanceView{StatusInstance: i})
	}
	v.setHealth(healthOf(g.Health))
	return v
}

// asks is what the node's labels ask for.
func asks(n *corev1.Node) string {
	if profile := n.Labels[config.LabelProfile]; profile != "" {
		return profile
	}
	var names []string
	for _, label := range []string{config.LabelMIGConfig, config.LabelDevicePluginConfig} {
		if name := n.Labels[label]; name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, api.DesiredSeparator)
}

// unhealthy says what is wrong with the GPUs; empty if nothing is, or nothing is said.
func (v nodeView) unhealthy() string {
	switch {
	case v.Health == nil || v.Health.Unhealthy == corev1.ConditionFalse:
		return ""
	case v.Health.Unhealthy == corev1.ConditionUnknown:
		return "not known (" + v.Health.Reason + ")"
	default:
		return v.Health.Reason
	}
}

// instances counts them.
func (v nodeView) instances() int {
	n := 0
	for _, g := range v.GPUs {
		if g.Geometry != "" {
			n += len(strings.Fields(g.Geometry))
		}
	}
	return n
}

// addDiagnosis takes in what the agent says of the GPUs and their pods just now.
func (v *nodeView) addDiagnosis(d *api.Diagnosis) {
	v.Pods = podsView{Known: true}
	if len(d.GPUs.Now) > 0 {
		said := v.GPUs
		v.GPUs = nil
		for _, g := range d.GPUs.Now[:min(len(d.GPUs.Now), mostGPUs)] {
			now := viewOfGPU(g)
			for _, before := range said { // the status has the health of the GPUs, a diagnosis has not
				if before.UUID == now.UUID && now.Health == nil {
					now.setHealth(before.Health)
				}
			}
			v.GPUs = append(v.GPUs, now)
		}
	}
	for _, p := range d.Pods {
		name := legible.Text(p.Namespace + "/" + p.Name)
		if p.State != "" {
			name += " (" + legible.Cut(p.State, longestWord) + ")"
		}
		for _, device := range p.Devices {
			if !v.place(name, legible.Text(device)) && !slices.Contains(v.Pods.Anywhere, name) {
				v.Pods.Anywhere = append(v.Pods.Anywhere, name)
			}
		}
	}
	if !slices.IsSorted(v.Pods.Anywhere) {
		slices.Sort(v.Pods.Anywhere)
	}
	for _, unseen := range d.Unseen {
		v.Pods.Known, v.Pods.Why = false, legible.Message(unseen, legible.Longest)
	}
}

// place puts a pod on the device that an agent names: "GPU 0", "GPU 0 1g.10gb@3", "GPU 0 1c@0 in 3g.40gb@4".
func (v *nodeView) place(pod, device string) bool {
	for g := range v.GPUs {
		gpu := &v.GPUs[g]
		whole := "GPU " + strconv.Itoa(gpu.Index)
		if device == whole {
			gpu.Pods = append(gpu.Pods, pod)
			return true
		}
		for i := range gpu.Instances {
			instance := &gpu.Instances[i]
			if device == whole+" "+instance.Is || strings.HasPrefix(device, whole+" ") && strings.HasSuffix(device, " in "+instance.Is) {
				instance.Pods = append(instance.Pods, pod)
				return true
			}
		}
	}
	return false
}
