// Package diagnosis explains the state of a node from one observation: the causes, what the agent will do, and what a user can do. It changes
// nothing, and sends no request.
package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/managed"
	"github.com/gpuslice/gpuslice/nvml"
)

// Evidence is everything that a diagnosis follows from: one observation of the node, and what else the agent has found out.
type Evidence struct {
	*state.Observed
	Now      time.Time
	Running  bool // an agent runs on this machine
	Settings config.Settings

	Want           state.Desired
	Steps          []plan.Step      // steps that are left, if the observation was complete
	Refused        error            // why the desired state is impossible
	RefusedAs      config.Reason    // of Refused, as in the node's condition; empty if that may pass by itself
	Verdicts       []drain.Verdict  // on the pods that have to leave for the steps
	Driver         string           // why the agent could not see the GPUs
	Sick           []api.Finding    // about GPUs that cannot be used or trusted, by the watch of their health
	NotYet         *outcome.Waiting // why the agent does not begin the steps yet
	PluginAdvice   string           // what a user can do about a node without a device plugin; empty if there is one
	StrategyAdvice string           // which MIG strategy explains what the device plugin advertises, if it is not the expected one

	Unreadable string // why the agent cannot read the journal
	Unseen     []string

	// In the words of the diagnosis.

	KubeletSeen api.KubeletSeen
	Agent       api.AgentSeen
	cordon      *api.CordonSeen
	others      []api.ToolSeen
	Processes   []api.ProcessSeen // that are in the way of the steps
	Users       []api.ProcessSeen // others that compute on a GPU, and are of no pod that holds one
	paused      []api.OperandSeen
	leftover    []string
}

// Of draws the conclusions from the evidence.
func Of(e *Evidence) api.Diagnosis {
	d := api.Diagnosis{
		At: e.Now, Agent: e.Agent, Kubelet: e.KubeletSeen, Cordon: e.cordon, PendingRestore: e.toRestore(), Left: e.leftover, Others: e.others,
		Taints: e.taints(), Pods: e.podsSeen(), Processes: slices.Concat(e.Processes, e.Users), Operands: e.paused, Owner: e.Owner.OfDRA(), Capacity: e.Capacity.Missing, Unseen: e.Unseen,
		Failed: e.Record.Learnt.Failed,
		GPUs:   api.GPUsSeen{Asked: e.Want.Name, Label: e.Want.Label, Now: report.GPUs(e.GPUs), Unasked: e.DevicePlugin.Unpicked},
		Causes: []api.Finding{},
	}
	if e.Owner.Kind == api.OwnerDRADynamic {
		e.addRoom(d.GPUs.Now)
	}
	if e.Node != nil {
		d.Node = e.Node.Name
		d.Causes = append(d.Causes, e.causes()...)
	}
	if e.Refused != nil {
		d.GPUs.Refused = e.Refused.Error()
	}
	for _, s := range e.Steps {
		d.GPUs.Steps = append(d.GPUs.Steps, s.String())
	}
	d.Outcome = e.outcome(d.Causes)
	return d
}

// ReadNode puts the node object into words.
func (e *Evidence) ReadNode() {
	e.KubeletSeen = describeKubelet(e.Node, e.Kubelet.Err)
	last := e.Record.Learnt.Reported
	e.Agent = api.AgentSeen{Runs: e.Running, Phase: last.Phase}
	if c := report.PartitionReady(e.Node); c != nil {
		e.Agent.Wrote, e.Agent.Reason, e.Agent.Message = c.LastHeartbeatTime.Time, config.Reason(c.Reason), c.Message
		e.Agent.Phase = api.Status{Phase: last.Phase, Reason: last.Reason}.PhaseBeside(e.Agent.Reason)
	}
	if by, since, on := managed.Cordoner(e.Node); on {
		_, kept := e.Node.Annotations[config.AnnotationKeepCordoned]
		e.cordon = &api.CordonSeen{By: by, Ours: !e.ForeignCordon(), Kept: kept, Since: since}
	}
	for _, m := range e.Marks.Tools {
		e.others = append(e.others, api.ToolSeen{Tool: m.Tool, Sign: m.Sign, Since: m.Since, Cordons: m.Cordons, Planned: m.Planned, Ends: m.Done})
	}
	e.paused = e.pausedOperands()
	e.leftover = e.leftOnNode()
}

func describeKubelet(node *corev1.Node, silent error) api.KubeletSeen {
	out := api.KubeletSeen{Ready: corev1.ConditionUnknown, Says: "kubelet has never reported it"}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out = api.KubeletSeen{Ready: c.Status, Since: c.LastTransitionTime.Time, Says: c.Message}
		}
	}
	if out.Ready == corev1.ConditionTrue {
		out.Says = ""
	}
	if silent != nil {
		out.Silent = silent.Error()
	}
	return out
}

// The tools that pause operands, by the values that they write.
const (
	toolOurs = "gpuslice"

	pausedPrefix = "paused-for-"
)

// pausedOperands returns the operands that a tool has paused by a label, without those that a user has switched off.
func (e *Evidence) pausedOperands() []api.OperandSeen {
	var out []api.OperandSeen
	for _, label := range slices.Sorted(maps.Keys(e.Node.Labels)) {
		value := e.Node.Labels[label]
		if !strings.HasPrefix(label, config.LabelOperandPrefix) || !strings.Contains(value, pausedPrefix) {
			continue
		}
		o := api.OperandSeen{Label: label, Value: value, By: "a tool that writes " + value}
		switch {
		case strings.Contains(value, fence.PausedForDriverUpgrade): // even if another tool had paused it before
			o.By = fence.ToolDriverManager
		case value == fence.PausedForMIGChange:
			o.By = fence.ToolMIGManager
		case value == fence.PausedValue:
			o.By = toolOurs
		}
		if e.Journal != nil {
			_, o.PendingRestore = e.Journal.Paused[label]
		}
		out = append(out, o)
	}
	return out
}

// leftOnNode lists the agent's marks on the node without a journal, and those that it adopts.
func (e *Evidence) leftOnNode() []string {
	if e.Journal != nil || e.Unreadable != "" {
		return nil
	}
	var out []string
	if e.Leftovers.Orphan.Cordon {
		out = append(out, "the cordon"+since(e.cordon.Since, e.Now))
	}
	if e.Marks.Fenced {
		out = append(out, "the taint "+config.TaintRepartitioning)
	}
	if e.Record.StrangeJournal {
		out = append(out, "the annotation "+config.AnnotationJournal)
	}
	for _, key := range e.Leftovers.Orphan.Kept {
		out = append(out, "the annotation "+key)
	}
	for _, unit := range e.Leftovers.Orphan.Host.Stopped {
		out = append(out, "the stop of "+unit)
	}
	for _, gpu := range e.Leftovers.Orphan.Host.Persistent {
		out = append(out, "persistence mode of GPU "+string(gpu)+", which is off")
	}
	for _, label := range slices.Sorted(maps.Keys(e.Leftovers.Orphan.Labels)) {
		out = append(out, fmt.Sprintf("the label %s=%s", label, e.Node.Labels[label]))
	}
	return out
}

// UnownedProcesses returns the processes that hold a device which the steps remove, unless their pod leaves or their unit stops.
func (e *Evidence) UnownedProcesses() []api.ProcessSeen {
	leaves, stops := map[types.UID]bool{}, map[string]bool{}
	for _, s := range e.Steps {
		for _, p := range s.Pods {
			leaves[types.UID(p.UID)] = true
		}
		stops[s.Unit] = s.Unit != ""
	}
	return e.processes(e.Holders.Processes, func(c holders.Client) bool { return leaves[c.PodUID] || stops[c.Unit] })
}

// UsersOfNoListedPod returns those of the processes that neither hold up the steps nor are of a pod that holds a GPU, as far as that shows without them.
func (e *Evidence) UsersOfNoListedPod(users []holders.Client) []api.ProcessSeen {
	pods, of := map[types.UID]bool{}, holders.PodsOf(users, e.Pods)
	for _, p := range e.Holders.Pods {
		pods[p.UID] = true
	}
	return e.processes(users, func(c holders.Client) bool {
		return of[c.PID] != nil && pods[of[c.PID].UID] || slices.ContainsFunc(e.Processes, func(p api.ProcessSeen) bool { return p.PID == c.PID })
	})
}

// processes describes the clients, without the agent's own and those to leave out.
func (e *Evidence) processes(clients []holders.Client, leaveOut func(holders.Client) bool) []api.ProcessSeen {
	var out []api.ProcessSeen
	names := holders.NameClients(clients, e.Pods)
	for i, c := range clients {
		if c.Self || c.Sibling || leaveOut(c) {
			continue
		}
		p := api.ProcessSeen{PID: c.PID, Name: names[i], Unit: c.Unit, Remedy: c.Remedy()}
		for _, d := range c.Devices {
			p.Holds = append(p.Holds, e.DeviceName(d))
		}
		for _, s := range c.Sources {
			p.FoundBy = append(p.FoundBy, string(s))
		}
		out = append(out, p)
	}
	return out
}

// toRestore returns the journal for the diagnosis.
func (e *Evidence) toRestore() *api.PendingRestore {
	if e.Unreadable != "" {
		return &api.PendingRestore{Unreadable: e.Unreadable}
	}
	j := e.Journal
	if j == nil {
		return nil
	}
	o := &api.PendingRestore{
		Operation: j.Operation, Target: j.Target, Since: j.Started, Cordon: j.Cordoned, WasCordoned: j.WasUnschedulable,
		Paused: j.Paused, Stopped: j.Stopped, Before: j.LayoutsBefore(e.GPUs), Undo: j.Undo,
	}
	if len(e.Steps) > 0 {
		o.Phase = report.WaitingPhase(e.Observed, e.Steps[0].Kind, e.Want)
	}
	if e.evicts() && !e.Want.Undo {
		o.Deadline = e.deadline()
	}
	return o
}

// evicts reports whether pods have to leave.
func (e *Evidence) evicts() bool {
	return plan.Has(e.Steps, plan.Evict)
}

// deadline returns when the last of the pods must have left. It adds the time that a rule or the mode gives a pod to end by itself.
func (e *Evidence) deadline() time.Time {
	var granted []holders.Pod
	for _, v := range e.Verdicts {
		if v.By != "" {
			granted = append(granted, v.Pod)
		}
	}
	policy := decide.From(e.Settings)
	policy.Granted = e.Granted()
	return e.Journal.Started.Add(policy.Patience(granted, e.Journal.Started))
}

// taints returns the taints that keep pods away and that gpuslice sets, lifts or explains.
func (e *Evidence) taints() []api.TaintSeen {
	if e.Node == nil {
		return nil
	}
	var out []api.TaintSeen
	for _, t := range e.Node.Spec.Taints {
		seen := api.TaintSeen{Key: t.Key, Effect: t.Effect}
		if t.TimeAdded != nil {
			seen.Since = t.TimeAdded.Time
		}
		switch {
		case t.Key == config.TaintRepartitioning:
			seen.Means = "ours: the node is fenced"
		case t.Key == config.TaintGPUUnhealthy && t.Value == config.ValueGPUUnhealthy:
			seen.Means = "ours: a GPU cannot be used or trusted"
		case slices.ContainsFunc(e.Marks.Startup, func(s corev1.Taint) bool { return s.MatchTaint(&t) }):
			seen.Startup, seen.Means = true, "the node is new, and its capacity is not verified"
		case t.Key == corev1.TaintNodeUnschedulable && !e.Node.Spec.Unschedulable:
			seen.Means = "left behind by a lifted cordon"
		default:
			continue
		}
		out = append(out, seen)
	}
	return out
}

// stateMayGo is the state of a pod that may be evicted, and has not been yet.
const stateMayGo = "MayGo"

// stateWithdrawn is the state of a pod that no plan evicts, although kubelet allocates its devices to others or no ResourceSlice has them any more.
const stateWithdrawn = "Withdrawn"

// podsSeen lists the pods that hold a GPU and those that have to leave.
func (e *Evidence) podsSeen() []api.PodSeen {
	var out []api.PodSeen
	asked := map[types.UID]bool{}
	for _, v := range e.Verdicts {
		asked[v.Pod.UID] = true
		p := e.podSeen(v.Pod)
		p.Leaves, p.State, p.Budget, p.Message, p.Since = true, string(v.State), v.PDB, v.Message, v.Since
		if v.State == drain.Requested { // the eviction was a dry run
			p.State = stateMayGo
		}
		out = append(out, p)
	}
	for _, h := range e.Holders.Pods {
		if asked[h.UID] && h.UID != "" {
			continue
		}
		p := e.podSeen(h)
		if w := offer.WithdrawnFrom(e.Observed, h); w != nil {
			p.State, p.Message = stateWithdrawn, "kubelet allocates its devices to others"
			if len(w.Gone) > 0 {
				p.Message = "NVIDIA's DRA driver no longer advertises the devices of its claims"
			}
		}
		if h.Terminating {
			p.State, p.Since = string(drain.Terminating), h.GraceEnds
		}
		out = append(out, p)
	}
	return out
}

// addRoom adds which instances no claim has, if all claims are known, and what still fits, where NVIDIA's DRA driver makes the instances for claims.
func (e *Evidence) addRoom(gpus []api.StatusGPU) {
	held, known := map[nvml.UUID][]nvml.Placed{}, e.Kubelet.Err == nil && e.DRA.Err == nil && e.DRA.Complete
	for _, p := range e.Holders.Pods {
		parts, read := e.PartsOf(p)
		known = known && read
		for gpu, placed := range parts {
			held[gpu] = append(held[gpu], placed...)
		}
	}
	for i := range gpus {
		gpu, _ := e.GPU(gpus[i].UUID)
		if !gpu.Enabled || gpu.Lost {
			continue
		}
		gpus[i].Fits = api.FitsNone
		if p, fits := gpu.Largest(); fits {
			gpus[i].Fits = p.Name
		}
		for n := range gpus[i].Instances {
			one := &gpus[i].Instances[n]
			one.Left = known && !slices.ContainsFunc(held[gpu.UUID], func(p nvml.Placed) bool { return p.String() == one.Is })
		}
	}
}

func (e *Evidence) podSeen(p holders.Pod) api.PodSeen {
	out := api.PodSeen{Namespace: p.Namespace, Name: cmp.Or(p.Name, "with UID "+string(p.UID)), Operand: decide.IsOperand(e.Observed, p)}
	for _, s := range p.Sources {
		out.FoundBy = append(out.FoundBy, string(s))
	}
	var parts map[nvml.UUID][]nvml.Placed // in place of their GPUs
	if e.Owner.Kind == api.OwnerDRADynamic {
		parts, _ = e.PartsOf(p)
	}
	for _, d := range p.Devices {
		name := e.DeviceName(d)
		for _, placed := range parts[nvml.UUID(d)] {
			out.Devices = append(out.Devices, name+" "+placed.String())
		}
		if len(parts[nvml.UUID(d)]) == 0 {
			out.Devices = append(out.Devices, name)
		}
	}
	if !p.DevicesKnown && len(p.Sources) > 0 {
		out.Devices = append(out.Devices, "unknown; it counts as holding everything")
	}
	return out
}

// pluginCommand returns the command that shows the log of the device plugin of this node.
func (e *Evidence) pluginCommand() string {
	plugins := offer.Of(e.Observed).Pods()
	if len(plugins) == 0 {
		return "kubectl get pods -A --field-selector spec.nodeName=" + e.Node.Name
	}
	return fmt.Sprintf("kubectl logs -n %s %s", plugins[0].Namespace, plugins[0].Name)
}

// parked reports whether the change waits for a reboot on a released node.
func (e *Evidence) parked() bool {
	return e.Journal != nil && !e.Journal.KeepsPodsAway() && e.Complete && e.OnAtReboot(e.Want) != ""
}

// ours reports whether a mark of the agent keeps pods or operands away.
func (e *Evidence) ours() bool {
	return e.Unreadable != "" || e.Journal != nil && !e.parked() || len(e.leftover) > 0 || len(e.Marks.Startup) > 0
}

// stalled reports whether the agent has reported that it cannot continue.
func (e *Evidence) stalled() bool {
	return e.Journal != nil && e.Agent.Phase == api.PhaseStalled
}

// beforeVerify reports whether steps come first that change the capacity.
func (e *Evidence) beforeVerify() bool {
	return len(e.Steps) > 0 && e.Steps[0].Kind != plan.VerifyCapacity && e.Steps[0].Kind != plan.Release
}

// since adds a moment to a sentence, if it is known.
func since(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf(" since %s (%s)", t.UTC().Format(time.RFC3339), duration.HumanDuration(now.Sub(t)))
}
