package show

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// mostGPUs and mostInstances bound what the command draws of a status, which any user who can write the node can write. No
	// machine has more.
	mostGPUs      = 64
	mostInstances = 64
	// mostOffered bounds the shares of a resource.
	mostOffered = 1_000_000
)

// nodeView is what status prints of a node, for users and for programs.
type nodeView struct {
	Node     string                 `json:"node"`
	AskedFor string                 `json:"askedFor,omitempty"` // by its labels
	Agent    bool                   `json:"agent"`              // an agent has ever written anything
	Ready    corev1.ConditionStatus `json:"ready,omitempty"`    // of GPUPartitionReady
	Phase    api.Phase              `json:"phase,omitempty"`
	Reason   config.Reason          `json:"reason,omitempty"`
	Message  string                 `json:"message,omitempty"`
	Since    time.Time              `json:"since,omitzero"`
	Heard    time.Time              `json:"heard,omitzero"`       // heartbeat of the condition
	Silent   bool                   `json:"silent,omitempty"`     // the agent has said nothing for longer than two and a half of its heartbeats
	NotSeen  bool                   `json:"notSeenYet,omitempty"` // all but AskedFor is an answer to what was asked before
	Capacity string                 `json:"capacity,omitempty"`
	Owner    api.Owner              `json:"owner,omitempty"`  // who allocates the GPUs, where NVIDIA's DRA driver has a part in it
	Cordon   *api.CordonSeen        `json:"cordon,omitempty"` // by a user or another tool; nil if the node takes pods, or the agent has closed it
	Held     *string                `json:"held,omitempty"`   // why
	Begins   time.Time              `json:"begins,omitzero"`  // of the change that waits for its window
	Blockers []string               `json:"blockers,omitempty"`
	Health   *healthView            `json:"health,omitempty"` // nil if the agent does not report it
	GPUs     []gpuView              `json:"gpus,omitempty"`
	Offered  int                    `json:"offered,omitempty"` // devices, or shares of them, that the scheduler may allocate
	Pods     podsView               `json:"pods"`
}

// healthView is the condition GPUUnhealthy.
type healthView struct {
	Unhealthy corev1.ConditionStatus `json:"unhealthy"`
	Reason    string                 `json:"reason,omitempty"`
	Message   string                 `json:"message,omitempty"`
}

// gpuView is a GPU with its instances, and the pods that use them.
type gpuView struct {
	Index     int            `json:"index"`
	UUID      string         `json:"uuid"`
	MIG       bool           `json:"mig"`
	Model     string         `json:"model,omitempty"` // of a GPU that can be cut
	Geometry  string         `json:"geometry,omitempty"`
	Slices    int            `json:"slices,omitempty"`
	Pods      []string       `json:"pods,omitempty"` // on the whole of it
	Instances []instanceView `json:"instances,omitempty"`
	Health    *gpuHealth     `json:"health,omitempty"`  // nil if the GPU is well, or its health is not known
	Missing   bool           `json:"missing,omitempty"` // the driver does not list it
	Lost      bool           `json:"lost,omitempty"`    // it has fallen off the bus: neither its mode nor its instances are known
	Earlier   bool           `json:"earlier,omitempty"` // the agent cannot see it now: all is of an earlier pass
	PCI       string         `json:"pci,omitempty"`     // address of one that is missing
	Fits      string         `json:"fits,omitempty"`    // as in the diagnosis
}

// instanceView is a GPU instance, and the pods that use it.
type instanceView struct {
	api.StatusInstance
	Unhealthy config.Reason `json:"unhealthy,omitempty"` // why, if it is
	Pods      []string      `json:"pods,omitempty"`
}

// podsView is whether the pods that use the GPUs are known.
type podsView struct {
	Known    bool     `json:"known"`
	Why      string   `json:"why,omitempty"`      // why they are not known, or known by the agent's last report alone
	Asking   []string `json:"asking,omitempty"`   // pods of the node that request GPUs, if their instances are not known
	Anywhere []string `json:"anywhere,omitempty"` // pods that may hold any device, since theirs are not known
}

// viewOf returns the view of the node without its pods, as of now.
func viewOf(n *corev1.Node, now time.Time) nodeView {
	t := cluster.ReportOf(n)
	s := t.Status
	v := nodeView{
		Node: n.Name, AskedFor: cluster.Requested(n), Agent: !t.None(), Ready: t.Condition.Status, Phase: s.Phase,
		Reason: config.Reason(cmp.Or(t.Condition.Reason, string(s.Reason))), Message: t.Condition.Message, Heard: t.Condition.LastHeartbeatTime.UTC(),
		Capacity: s.Capacity, Owner: s.Owner, Begins: s.Next.UTC(), Blockers: s.Blockers,
		Silent: t.Silence(now) > 0, NotSeen: t.AnswersAnother(n),
	}
	if s.Reason == v.Reason {
		v.Since = s.Since.UTC()
	} else { // the rest is of a pass before
		v.Phase, v.Blockers, v.Begins = t.Phase(), nil, time.Time{}
	}
	if why, held := n.Annotations[config.AnnotationHold]; held {
		why = sanitize.Message(why, cluster.LongestWord)
		v.Held = &why
	}
	v.Cordon = cluster.CordonOf(n)
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUUnhealthy {
			v.Health = &healthView{c.Status, sanitize.Cut(c.Reason, cluster.LongestWord), sanitize.Message(c.Message, sanitize.Longest)}
		}
	}
	for _, g := range s.GPUs[:min(len(s.GPUs), mostGPUs)] {
		gpu := viewOfGPU(g)
		gpu.Earlier = v.Silent || t.StandsAlone()
		for _, m := range s.Models {
			if slices.Contains(m.GPUs, g.Index) && !g.Missing {
				gpu.Model = sanitize.Cut(m.Name, cluster.LongestWord)
			}
		}
		v.GPUs = append(v.GPUs, gpu)
	}
	for name, n := range n.Status.Allocatable {
		if nvml.GPUResource(string(name)) {
			v.Offered += int(min(max(0, n.Value()), mostOffered))
		}
	}
	return v
}

func viewOfGPU(g api.StatusGPU) gpuView {
	v := gpuView{
		Index: g.Index, UUID: sanitize.Cut(string(g.UUID), cluster.LongestWord), MIG: g.MIG, Geometry: sanitize.Message(g.Geometry, sanitize.Longest),
		Slices: max(0, min(g.Slices, output.MostSlices)), Missing: g.Missing, Lost: g.Lost, PCI: sanitize.Cut(g.PCI, cluster.LongestWord),
		Fits: sanitize.Cut(g.Fits, cluster.LongestWord),
	}
	for _, i := range g.Instances[:min(len(g.Instances), mostInstances)] {
		i.Is = sanitize.Cut(i.Is, cluster.LongestWord)
		v.Instances = append(v.Instances, instanceView{StatusInstance: i})
	}
	v.setHealth(healthOf(g.Health))
	return v
}

// unhealthy says what is wrong with the GPUs; empty if nothing is, or the agent does not report it.
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

// instances counts the instances of all GPUs.
func (v nodeView) instances() int {
	n := 0
	for _, g := range v.GPUs {
		if g.Geometry != "" {
			n += len(strings.Fields(g.Geometry))
		}
	}
	return n
}

// absent counts the GPUs that the driver does not list, and those that have fallen off the bus.
func (v nodeView) absent() (missing, lost int) {
	for _, g := range v.GPUs {
		switch {
		case g.Missing:
			missing++
		case g.Lost:
			lost++
		}
	}
	return missing, lost
}

// cutAsNow are the GPUs as a diagnosis has them now, with what the status says: of their health, and of those that are missing.
func cutAsNow(now []api.StatusGPU, said []gpuView) []gpuView {
	var out []gpuView
	for _, g := range now {
		one := viewOfGPU(g)
		for _, before := range said {
			if before.UUID != one.UUID {
				continue
			}
			if one.Model = before.Model; one.Health == nil {
				one.setHealth(before.Health)
			}
		}
		out = append(out, one)
	}
	for _, before := range said {
		if before.Missing && !slices.ContainsFunc(out, func(g gpuView) bool { return g.UUID == before.UUID }) {
			out = append(out, before)
		}
	}
	return out
}

// foundByNVML is how an agent names the source of a process that computes on a GPU.
const foundByNVML = "NVML"

// addDiagnosis adds the agent's present answer about the GPUs and their pods.
func (v *nodeView) addDiagnosis(d *api.Diagnosis) {
	v.Pods = podsView{Known: true}
	if len(d.GPUs.Now) > 0 {
		v.GPUs = cutAsNow(d.GPUs.Now[:min(len(d.GPUs.Now), mostGPUs)], v.GPUs)
	}
	for _, p := range d.Pods {
		if p.Operand { // it uses the GPUs for others
			continue
		}
		name := sanitize.Text(p.Namespace + "/" + p.Name)
		if p.State != "" {
			name += " (" + sanitize.Cut(p.State, cluster.LongestWord) + ")"
		}
		for _, device := range p.Devices {
			if !v.place(name, sanitize.Text(device)) && !slices.Contains(v.Pods.Anywhere, name) {
				v.Pods.Anywhere = append(v.Pods.Anywhere, name)
			}
		}
	}
	for _, p := range d.Processes {
		for _, device := range p.Holds {
			if slices.Contains(p.FoundBy, foundByNVML) {
				v.place(sanitize.Cut(p.Name, cluster.LongestWord), sanitize.Text(device))
			}
		}
	}
	if !slices.IsSorted(v.Pods.Anywhere) {
		slices.Sort(v.Pods.Anywhere)
	}
	for _, unseen := range d.Unseen {
		v.Pods.Known, v.Pods.Why = false, sanitize.Message(unseen, sanitize.Longest)
	}
}

// place puts a pod on the device that an agent names: "GPU 0", "GPU 0 1g.10gb@3", "GPU 0 1c@0 in 3g.40gb@4".
func (v *nodeView) place(pod, device string) bool {
	for g := range v.GPUs {
		gpu := &v.GPUs[g]
		if gpu.Missing { // another GPU may have its number now
			continue
		}
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
