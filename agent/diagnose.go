package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// evidence is all that a diagnosis follows from: one look at the node, and what was asked besides.
type evidence struct {
	observed
	now      time.Time
	running  bool // an agent runs on this machine
	settings config.Settings

	want           desired
	steps          []plan.Step      // that are left, if the look was whole
	refused        error            // why what is asked for cannot be
	verdicts       []drain.Verdict  // on the pods that the steps need to leave
	driver         string           // why the GPUs were not seen
	notYet         *outcome.Waiting // why the steps are not begun, if they may not be yet
	pluginAdvice   string           // what people can do about a node where nobody offers the GPUs to kubelet; empty where somebody does
	strategyAdvice string           // why the device plugin offers what it does, where that is for its MIG strategy

	unreadable string // why the journal says nothing
	unseen     []string

	// In the words of the diagnosis.

	kubeletSeen api.KubeletSeen
	agent       api.AgentSeen
	cordon      *api.CordonSeen
	others      []api.ToolSeen
	processes   []api.ProcessSeen
	paused      []api.OperandSeen
	leftover    []string
}

// Diagnose says why the node is as it is, and changes nothing. Whether another process is this machine's agent is for the
// caller to say, who knows the lock. A look that ends early, for want of a driver, of kubelet or of an API server, gives a
// diagnosis of what was seen.
func (a *Agent) Diagnose(ctx context.Context, running bool) api.Diagnosis {
	e := a.evidence(ctx)
	e.running, e.agent.Runs = running, running
	return diagnose(e)
}

// diagnose is what the evidence says.
func diagnose(e evidence) api.Diagnosis {
	d := api.Diagnosis{
		At: e.now, Agent: e.agent, Kubelet: e.kubeletSeen, Cordon: e.cordon, Owed: e.owed(), Left: e.leftover, Others: e.others,
		Taints: e.taints(), Pods: e.podsSeen(), Processes: e.processes, Operands: e.paused, Capacity: e.capacity.missing, Unseen: e.unseen,
		Failed: e.record.status.Failed,
		GPUs:   api.GPUsSeen{Asked: e.want.name, Label: e.want.label, Now: statusGPUs(e.gpus), Unasked: e.devicePlugin.unpicked},
		Causes: []api.Finding{},
	}
	if e.node != nil {
		d.Node = e.node.Name
		d.Causes = append(d.Causes, e.causes()...)
	}
	if e.refused != nil {
		d.GPUs.Refused = e.refused.Error()
	}
	for _, s := range e.steps {
		d.GPUs.Steps = append(d.GPUs.Steps, s.String())
	}
	d.Outcome = e.outcome(d.Causes)
	return d
}

// evidence looks once.
func (a *Agent) evidence(ctx context.Context) evidence {
	seen, err := a.observe(ctx)
	e := evidence{observed: seen, now: a.now(), settings: a.settings}
	if err == nil {
		want, _ := a.resolve(ctx, &e.observed) // what cannot be is told elsewhere
		e.settings = a.settingsFor(want)
		a.prove(&e.observed, want.plugin)
	}
	switch {
	case seen.node == nil:
		e.unseen = append(e.unseen, err.Error())
		a.lookAtMachine(ctx, &e)
		return e
	case err != nil:
		a.lookFurther(ctx, &e, err)
	}
	e.readNode()
	asked, _ := a.asked(e.node)
	e.want.label, e.want.name = asked.label, asked.name
	if e.complete {
		e.want, e.steps, e.refused = a.plan(ctx, &e.observed)
		e.notYet = a.notYet(e)
		e.verdicts = a.evictable(ctx, e)
		e.processes = e.strangers()
		if e.lacksDevicePlugin() {
			e.pluginAdvice = a.devicePluginAdvice(e.observed)
		} else if under := e.runsUnder(); under != "" {
			e.strategyAdvice = a.otherStrategy(e.observed, under)
		}
	}
	if e.boot.err != nil {
		e.unseen = append(e.unseen, e.boot.err.Error())
	}
	if e.holders.err != nil {
		e.unseen = append(e.unseen, e.holders.err.Error())
	}
	return e
}

// notYet is why a change is not begun that nothing on the node is in the way of.
func (a *Agent) notYet(e evidence) *outcome.Waiting {
	var wait *outcome.Waiting
	switch {
	case e.journal != nil || len(e.steps) == 0:
	case errors.As(a.gate(e.observed, e.want, e.steps), &wait):
	case e.pool.slot.Paused != "":
		wait = a.poolPaused(e.observed, e.pool.slot.Paused)
	case e.pool.slot.Waiting:
		wait = &outcome.Waiting{Message: fmt.Sprintf("pool %s can do without %s at once, and other nodes have their turn", e.pool.Name, e.pool.MaxUnavailable)}
	}
	return wait
}

// lookFurther goes on where the look at the node has ended early: a driver that is away hides no pod from a person.
func (a *Agent) lookFurther(ctx context.Context, e *evidence, ended error) {
	var stalled *outcome.Stalled
	switch {
	case errors.As(ended, &stalled) && stalled.Journal:
		e.unreadable, _, _ = strings.Cut(ended.Error(), "; ")
	case e.gpus == nil && driverError(ended):
		e.driver = ended.Error()
	default:
		e.unseen = append(e.unseen, ended.Error())
	}
	if e.pods == nil {
		var err error
		if e.pods, err = a.listPods(ctx); err != nil {
			e.unseen = append(e.unseen, err.Error())
		}
	}
	if e.gpus == nil && e.driver == "" {
		var err error
		if e.gpus, err = a.snapshot(ctx); err != nil {
			e.driver = err.Error()
		}
	}
	if e.driver != "" {
		e.unseen = append(e.unseen, "the GPUs: "+e.driver)
	}
	a.observeKubelet(ctx, &e.observed, e.pods)
	a.observeOthers(&e.observed)
	if e.gpus == nil {
		e.capacity.missing = nil // there is nothing to compare it with
	}
}

// lookAtMachine looks at what is there without an API server.
func (a *Agent) lookAtMachine(ctx context.Context, e *evidence) {
	var err error
	if e.gpus, err = a.snapshot(ctx); err != nil {
		e.unseen = append(e.unseen, "the GPUs: "+err.Error())
	}
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	if _, err := a.kubelet.Assignments(call); err != nil {
		e.kubeletSeen.Silent = err.Error()
	}
}

// driverError reports whether the look ended for want of the driver.
func driverError(err error) bool {
	var waiting *outcome.Waiting
	return errors.Is(err, nvml.ErrNoDriver) || errors.Is(err, nvml.ErrUnresponsive) || errors.Is(err, nvml.ErrReplaced) ||
		errors.As(err, &waiting) && waiting.For == outcome.ForDriver
}

// readNode puts into words what the node object says.
func (e *evidence) readNode() {
	e.kubeletSeen = describeKubelet(e.node, e.kubelet.err)
	e.agent = api.AgentSeen{Runs: e.running, Phase: e.record.status.Phase}
	if c := partitionReady(e.node); c != nil {
		e.agent.Wrote, e.agent.Reason, e.agent.Message = c.LastHeartbeatTime.Time, config.Reason(c.Reason), c.Message
	}
	if by, since, on := fence.Cordoner(e.node); on {
		_, kept := e.node.Annotations[config.AnnotationKeepCordoned]
		e.cordon = &api.CordonSeen{By: by, Ours: !e.foreignCordon(), Kept: kept, Since: since}
	}
	for _, m := range e.marks.tools {
		e.others = append(e.others, api.ToolSeen{Tool: m.Tool, Sign: m.Sign, Since: m.Since, Cordons: m.Cordons, Planned: m.Planned, Ends: m.Done})
	}
	e.paused = e.pausedOperands()
	e.leftover = e.leftOnNode()
}

func describeKubelet(node *corev1.Node, deaf error) api.KubeletSeen {
	out := api.KubeletSeen{Ready: corev1.ConditionUnknown, Says: "kubelet has never said so"}
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out = api.KubeletSeen{Ready: c.Status, Since: c.LastTransitionTime.Time, Says: c.Message}
		}
	}
	if out.Ready == corev1.ConditionTrue {
		out.Says = ""
	}
	if deaf != nil {
		out.Silent = deaf.Error()
	}
	return out
}

// Who pauses operands, by the values that they write.
const (
	toolOurs = "gpuslice"

	pausedPrefix = "paused-for-"
)

// pausedOperands are the operands that somebody keeps away by a label, and not for good.
func (e *evidence) pausedOperands() []api.OperandSeen {
	var out []api.OperandSeen
	for _, label := range slices.Sorted(maps.Keys(e.node.Labels)) {
		value := e.node.Labels[label]
		if !strings.HasPrefix(label, config.LabelOperandPrefix) || !strings.Contains(value, pausedPrefix) {
			continue
		}
		o := api.OperandSeen{Label: label, Value: value, By: "somebody who writes " + value}
		switch {
		case strings.Contains(value, fence.PausedForDriverUpgrade): // also behind the pause of another
			o.By = fence.ToolDriverManager
		case value == fence.PausedForMIGChange:
			o.By = fence.ToolMIGManager
		case value == fence.PausedValue:
			o.By = toolOurs
		}
		if e.journal != nil {
			_, o.Owed = e.journal.Paused[label]
		}
		out = append(out, o)
	}
	return out
}

// leftOnNode are what is ours on the node, or to be adopted, though no journal says so.
func (e *evidence) leftOnNode() []string {
	if e.journal != nil || e.unreadable != "" {
		return nil
	}
	var out []string
	if e.leftovers.orphan.cordon {
		out = append(out, "the cordon"+since(e.cordon.Since, e.now))
	}
	if e.marks.fenced {
		out = append(out, "the taint "+config.TaintRepartitioning)
	}
	if e.record.forged {
		out = append(out, "the annotation "+config.AnnotationJournal)
	}
	for _, unit := range e.leftovers.orphan.host.Stopped {
		out = append(out, "the stop of "+unit)
	}
	for _, gpu := range e.leftovers.orphan.host.Persistent {
		out = append(out, "persistence mode of GPU "+string(gpu)+", which is off")
	}
	for _, label := range slices.Sorted(maps.Keys(e.leftovers.orphan.labels)) {
		out = append(out, fmt.Sprintf("the label %s=%s", label, e.node.Labels[label]))
	}
	return out
}

// evictable asks for each pod that the steps need to leave whether it would be let go now.
func (a *Agent) evictable(ctx context.Context, e evidence) []drain.Verdict {
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	var out []drain.Verdict
	for _, s := range e.steps {
		if s.Kind == plan.Evict {
			policy, _ := a.policy(e.observed, s, e.want)
			out = append(out, a.evictor.DryRun(all, e.drained(s.Pods), policy)...)
		}
	}
	return out
}

// strangers are the processes that hold what the steps take away, of which no pod that leaves and no unit that stops takes
// account.
func (e *evidence) strangers() []api.ProcessSeen {
	leaves, stops := map[types.UID]bool{}, map[string]bool{}
	for _, s := range e.steps {
		for _, p := range s.Pods {
			leaves[types.UID(p.UID)] = true
		}
		stops[s.Unit] = s.Unit != ""
	}
	var out []api.ProcessSeen
	names := holders.NameClients(e.holders.processes, e.pods)
	for i, c := range e.holders.processes {
		if c.Self || c.Sibling || leaves[c.PodUID] || stops[c.Unit] {
			continue
		}
		p := api.ProcessSeen{PID: c.PID, Name: names[i], Unit: c.Unit, Remedy: c.Remedy()}
		for _, d := range c.Devices {
			p.Holds = append(p.Holds, e.device(d))
		}
		for _, s := range c.Sources {
			p.FoundBy = append(p.FoundBy, string(s))
		}
		out = append(out, p)
	}
	return out
}

// owed is the journal in the words of the diagnosis.
func (e evidence) owed() *api.Owed {
	if e.unreadable != "" {
		return &api.Owed{Unreadable: e.unreadable}
	}
	j := e.journal
	if j == nil {
		return nil
	}
	o := &api.Owed{
		Operation: j.Operation, Target: j.Target, Since: j.Started, Cordon: j.Cordoned, WasCordoned: j.WasUnschedulable,
		Paused: j.Paused, Stopped: j.Stopped, Before: j.LayoutsBefore(e.places()), Undo: j.Undo,
	}
	if len(e.steps) > 0 {
		_, o.Phase = progress(e.steps[0].Kind, e.want)
	}
	if e.evicts() && !e.want.undo {
		o.Deadline = e.deadline()
	}
	return o
}

// places tells the GPUs' positions: those that are seen, or those of which the agent told last.
func (e evidence) places() map[nvml.UUID]int {
	out := map[nvml.UUID]int{}
	for _, gpu := range e.record.status.GPUs {
		out[gpu.UUID] = gpu.Index
	}
	for _, gpu := range e.gpus {
		out[gpu.UUID] = gpu.Index
	}
	return out
}

// evicts reports whether pods have to leave.
func (e evidence) evicts() bool {
	return plan.Has(e.steps, plan.Evict)
}

// deadline is when the last of the pods has to have left. What a rule or the mode lets a pod wait comes before its time.
func (e evidence) deadline() time.Time {
	var longest time.Duration
	policy := drainPolicy(e.settings)
	for _, v := range e.verdicts {
		if v.By == drainModeField {
			longest = max(longest, policy.EndFor)
		}
		for _, rule := range policy.Rules {
			if rule.Field == v.By && rule.Action == drain.Wait {
				longest = max(longest, rule.For)
			}
		}
	}
	return e.journal.Started.Add(e.settings.Timeouts.Drain + longest)
}

// taints are those that keep pods away and that we have a word on.
func (e evidence) taints() []api.TaintSeen {
	if e.node == nil {
		return nil
	}
	var out []api.TaintSeen
	for _, t := range e.node.Spec.Taints {
		seen := api.TaintSeen{Key: t.Key, Effect: t.Effect}
		if t.TimeAdded != nil {
			seen.Since = t.TimeAdded.Time
		}
		switch {
		case t.Key == config.TaintRepartitioning:
			seen.Means = "ours: the node is fenced"
		case t.Key == config.TaintNotReady:
			seen.Means = "the node is new, and its capacity is not proven"
		case t.Key == corev1.TaintNodeUnschedulable && !e.node.Spec.Unschedulable:
			seen.Means = "left behind by a cordon that is lifted"
		default:
			continue
		}
		out = append(out, seen)
	}
	return out
}

// stateMayGo is of a pod that nobody has asked to leave, and that would be let go.
const stateMayGo = "MayGo"

// podsSeen lists the pods that hold a GPU and those that have to leave.
func (e evidence) podsSeen() []api.PodSeen {
	var out []api.PodSeen
	asked := map[types.UID]bool{}
	for _, v := range e.verdicts {
		asked[v.Pod.UID] = true
		p := e.podSeen(v.Pod)
		p.Leaves, p.State, p.Budget, p.Message, p.Since = true, string(v.State), v.PDB, v.Message, v.Since
		if v.State == drain.Requested { // in a dry run
			p.State = stateMayGo
		}
		out = append(out, p)
	}
	for _, h := range e.holders.pods {
		if asked[h.UID] && h.UID != "" {
			continue
		}
		p := e.podSeen(h)
		if h.Terminating {
			p.State, p.Since = string(drain.Terminating), h.GraceEnds
		}
		out = append(out, p)
	}
	return out
}

func (e evidence) podSeen(p holders.Pod) api.PodSeen {
	out := api.PodSeen{Namespace: p.Namespace, Name: cmp.Or(p.Name, "with UID "+string(p.UID))}
	for _, s := range p.Sources {
		out.FoundBy = append(out.FoundBy, string(s))
	}
	for _, d := range p.Devices {
		out.Devices = append(out.Devices, e.device(d))
	}
	if !p.DevicesKnown && len(p.Sources) > 0 {
		out.Devices = append(out.Devices, "unknown, so that it counts as holding everything")
	}
	return out
}

// device names a GPU or an instance as people do.
func (e evidence) device(uuid string) string {
	for _, gpu := range e.gpus {
		if string(gpu.UUID) == uuid {
			return fmt.Sprintf("GPU %d", gpu.Index)
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				switch {
				case d.UUID != uuid:
				case i.Compute == "":
					return fmt.Sprintf("GPU %d %s", gpu.Index, i.Placed)
				default:
					return fmt.Sprintf("GPU %d %s in %s", gpu.Index, d.Part, i.Placed)
				}
			}
		}
	}
	if e.gpus == nil {
		return uuid
	}
	return uuid + ", which is gone"
}

// pluginCommand shows the log of the device plugin of this node.
func (e evidence) pluginCommand() string {
	if len(e.observed.devicePlugin.pods) == 0 {
		return "kubectl get pods -A --field-selector spec.nodeName=" + e.node.Name
	}
	p := e.observed.devicePlugin.pods[0]
	return fmt.Sprintf("kubectl logs -n %s %s", p.Namespace, p.Name)
}

// parked reports whether the change waits for a reboot on a node that is given back.
func (e evidence) parked() bool {
	return e.journal != nil && !e.journal.Cordoned && e.complete && e.onAtReboot(e.want) != ""
}

// ours reports whether anything of ours keeps pods or operands away.
func (e evidence) ours() bool {
	return e.unreadable != "" || e.journal != nil && !e.parked() || len(e.leftover) > 0 || e.marks.startup != nil
}

// stalled reports whether the agent has said that it can do no more.
func (e evidence) stalled() bool {
	return e.journal != nil && e.record.status.Phase == api.PhaseStalled
}

// beforeVerify reports whether the capacity is not to be expected yet.
func (e evidence) beforeVerify() bool {
	return len(e.steps) > 0 && e.steps[0].Kind != plan.VerifyCapacity && e.steps[0].Kind != plan.Release
}

// since adds a moment to a sentence, if it is known.
func since(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf(" since %s (%s)", t.UTC().Format(time.RFC3339), duration.HumanDuration(now.Sub(t)))
}

// listPods lists all pods of the node, without owners that they only pretend to have.
func (a *Agent) listPods(ctx context.Context) ([]corev1.Pod, error) {
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	pods, err := a.podList.List(api)
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", a.node, err)
	}
	return a.believe(api, pods)
}
