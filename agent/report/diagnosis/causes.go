package diagnosis

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/glossary"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/managed"
	"github.com/gpuslice/gpuslice/nvml"
)

// byHand has the field managers' prefixes of programs that people use.
var byHand = []string{"kubectl", "k9s", "oc", "node-fetch", "Mozilla", "dashboard", "headlamp", "lens"}

// causes looks for each cause, in a user's order. No node shows two causes of operators' lists: an uncordon that did not stick is the same as
// OwnCordonLeft, and a loop that cordons again would be a fault of the agent.
func (e *Evidence) causes() []api.Finding {
	var out []api.Finding
	for _, find := range []func() []api.Finding{
		e.sickGPUs, e.journalUnreadable, e.keptCordoned, e.cordonedByOthers, e.kubeletAway, e.driverAway, e.change, e.notAllowedYet, e.requestRefused,
		e.podsInTheWay, e.podsThatStay, e.processesInTheWay, e.left, e.operandsPaused, e.taintLeft, e.capacityMissing, e.failedBefore,
	} {
		out = append(out, find()...)
	}
	return out
}

// sickGPUs finds the GPUs that cannot be used or trusted: those that the watch of their health knows, and others that are lost by this observation.
func (e *Evidence) sickGPUs() []api.Finding {
	out := slices.Clone(e.Sick)
	for _, gpu := range e.GPUs {
		if !gpu.Lost || slices.ContainsFunc(e.Sick, func(f api.Finding) bool { return f.GPU == gpu.UUID }) {
			continue
		}
		out = append(out, api.Finding{
			Cause: api.Cause(config.ReasonGPULost), GPU: gpu.UUID, Evidence: fmt.Sprintf("GPU %d has fallen off the bus: it does not answer", gpu.Index),
			Agent: "does not recover it", You: "end its pods, then reboot the node; have the machine inspected if it happens again",
		})
	}
	return out
}

func (e *Evidence) journalUnreadable() []api.Finding {
	if e.Unreadable == "" {
		return nil
	}
	return []api.Finding{{
		Cause: api.CauseJournalUnreadable, Evidence: e.Unreadable,
		Agent: "touches nothing, since it does not know what to restore", Waits: true,
		You: "run the version of the agent that wrote it; or check that the GPUs are as desired, then remove the journal: " +
			"the agent then removes its own marks, and does not change the GPUs",
		Command: fmt.Sprintf("kubectl annotate node %s %s-", e.Node.Name, config.AnnotationJournal),
	}}
}

func (e *Evidence) keptCordoned() []api.Finding {
	value, kept := e.Node.Annotations[config.AnnotationKeepCordoned]
	if !kept || !e.Node.Spec.Unschedulable {
		return nil
	}
	return []api.Finding{{
		Cause: api.CauseKeepCordoned, Evidence: fmt.Sprintf("annotation %s=%q is on the node", config.AnnotationKeepCordoned, value),
		Agent: "finishes what it has begun, and leaves the cordon", Waits: e.cordon.Ours,
		You:     "when the reason is gone, remove the annotation; the agent then lifts the cordon if it set it",
		Command: fmt.Sprintf("kubectl annotate node %s %s-", e.Node.Name, config.AnnotationKeepCordoned),
	}}
}

func (e *Evidence) cordonedByOthers() []api.Finding {
	var out []api.Finding
	for _, m := range e.others {
		if !m.Cordons || e.cordon == nil && pausesOnly(m.Tool) {
			continue
		}
		out = append(out, api.Finding{
			Cause: api.CauseCordonedByTool, Evidence: m.Tool + " is at work here" + since(m.Since, e.Now) + ": " + m.Sign,
			Agent: "never lifts a cordon that it did not set, and begins nothing that takes a GPU from pods", You: m.Ends,
			Command: "kubectl describe node " + e.Node.Name,
		})
	}
	c := e.cordon
	if c == nil || c.Ours || len(out) > 0 {
		return out
	}
	f := api.Finding{
		Cause: api.CauseCordonedByTool, Evidence: "cordoned by " + c.By + since(c.Since, e.Now), Agent: "never lifts a cordon that it did not set",
		You: "see what it waits for; uncordon the node if it has ended", Command: "kubectl uncordon " + e.Node.Name,
	}
	switch {
	case c.By == "":
		f.Cause, f.Evidence = api.CauseCordonedByPerson, "cordoned"+since(c.Since, e.Now)+"; the API server does not say by whom"
	case slices.ContainsFunc(byHand, func(name string) bool { return strings.HasPrefix(c.By, name) }):
		f.Cause, f.You = api.CauseCordonedByPerson, "ask who did it; uncordon the node if the cordon is no longer needed"
	}
	return append(out, f)
}

// pausesOnly reports whether the tool shows itself by paused labels alone; see operandsPaused.
func pausesOnly(tool string) bool {
	return tool == fence.ToolMIGManager || tool == fence.ToolDriverManager
}

func (e *Evidence) kubeletAway() []api.Finding {
	k := e.KubeletSeen
	if k.Ready == corev1.ConditionTrue && k.Silent == "" {
		return nil
	}
	f := api.Finding{
		Cause: api.CauseNodeNotReady, Evidence: fmt.Sprintf("condition Ready is %s%s: %s", k.Ready, since(k.Since, e.Now), k.Says),
		Agent: "evicts nothing until kubelet answers, then continues", Waits: e.ours(),
		You: "bring kubelet back", Command: "systemctl status kubelet # on " + e.Node.Name,
	}
	if k.Ready == corev1.ConditionTrue {
		f.Evidence = "kubelet does not say which pod has which device: " + k.Silent
	}
	return []api.Finding{f}
}

func (e *Evidence) driverAway() []api.Finding {
	if e.Driver == "" {
		return nil
	}
	f := api.Finding{
		Cause: api.CauseDriverAway, Evidence: e.Driver, Agent: "waits for the driver, then continues", Waits: e.ours(),
		You: "see why the driver is not there", Command: "nvidia-smi # on " + e.Node.Name + ", or the log of the driver's pod",
	}
	if slices.ContainsFunc(e.paused, func(o api.OperandSeen) bool { return o.By == fence.ToolDriverManager }) {
		f.You, f.Command = "see how far the upgrade of the driver has come", "kubectl get pods -A --field-selector spec.nodeName="+e.Node.Name+" | grep driver"
	}
	return []api.Finding{f}
}

// change says how far the change in the journal has come.
func (e *Evidence) change() []api.Finding {
	j := e.Journal
	if j == nil {
		return nil
	}
	change := "change to " + j.Target + ", begun" + strings.Replace(since(j.Started, e.Now), "since", "at", 1)
	if j.Target == "" {
		change = "leftovers without a journal, found" + strings.Replace(since(j.Started, e.Now), "since", "at", 1)
	}
	var out []api.Finding
	switch {
	case j.Target == "":
		out = append(out, api.Finding{
			Cause: api.CauseOwnCordonLeft, Evidence: change, Agent: "verifies the capacity, and releases the node", Waits: e.stalled(), You: e.stalledAdvice(),
		})
	case e.parked():
		return []api.Finding{{
			Cause: api.CauseRebootAwaited, Evidence: change + ": MIG mode is pending until the node's next reboot; the node takes pods until then",
			Agent: "continues after the reboot, by you or by a tool", You: "reboot the node when it suits you",
			Command: "kubectl drain " + e.Node.Name + " --ignore-daemonsets",
		}}
	case e.cancellationCause() != "":
		out = append(out, api.Finding{
			Cause: api.CauseChangeFailed, Evidence: change + ": " + e.cancellationCause(),
			Agent: "gives the change up, restores the former GPUs, verifies them, and releases the node",
		})
	case j.Undo != nil:
		out = append(out, api.Finding{
			Cause: api.CauseChangeFailed, Evidence: change + ", was given up: " + j.Undo.Message,
			Agent: "restores the former GPUs, verifies them, and releases the node", Waits: e.stalled(),
			You: e.stalledAdvice(),
		})
	case e.Want.UndoCause != nil:
		cause := api.CauseRequestGone
		if errors.Is(e.Want.UndoCause, nvml.ErrLost) { // the label still requests it
			cause = api.CauseChangeFailed
		}
		out = append(out, api.Finding{
			Cause: cause, Evidence: change + ": " + e.Want.UndoCause.Error(),
			Agent: "restores the former GPUs, verifies them, and releases the node", Waits: e.stalled(),
			You: e.stalledAdvice(),
		})
	}
	if j.BootID != "" && e.Boot.ID != "" && j.BootID != e.Boot.ID {
		out = append(out, api.Finding{
			Cause: api.CauseRebootInTheMiddle, Evidence: change + " in boot " + j.BootID + "; this is boot " + e.Boot.ID,
			Agent: "recreates what the reboot removed, verifies the capacity, and releases the node",
		})
	}
	return append(out, e.alive(change, len(out) > 0)...)
}

// cancellationCause says why the agent is about to give up the change.
func (e *Evidence) cancellationCause() string {
	var failure *api.Failure
	if errors.As(e.Refused, &failure) {
		return failure.Message
	}
	return ""
}

// stalledAdvice names the agent's reported failure, once the agent has given up.
func (e *Evidence) stalledAdvice() string {
	if !e.stalled() {
		return ""
	}
	return "mend what the agent says it cannot do: " + e.Agent.Message
}

// alive says whether an agent works on the change.
func (e *Evidence) alive(change string, explained bool) []api.Finding {
	f := api.Finding{Cause: api.CauseChangeUnderWay, Evidence: change + e.stepsLeft(), Agent: "is at work"}
	switch {
	case e.Running && explained:
		return nil
	case e.Running:
		return []api.Finding{f}
	case e.draining():
		f.Cause = api.CauseAgentDiedInDrain
	default:
		f.Cause = api.CauseAgentDiedInChange
	}
	f.Agent = "is not running; the next one continues where this one stopped"
	f.You, f.Command, f.Waits = "start the agent, or have this done now", "gpuslice-agent recover --node "+e.Node.Name, true
	return []api.Finding{f}
}

func (e *Evidence) podsInTheWay() []api.Finding {
	var out []api.Finding
	for _, v := range e.Verdicts {
		f := api.Finding{Evidence: "pod " + v.Pod.String() + ": " + v.Message, Agent: e.patience(), Waits: e.Want.Undo && e.Journal != nil}
		pod := fmt.Sprintf("-n %s %s", v.Pod.Namespace, v.Pod.Name)
		switch v.State {
		case drain.Blocked:
			f.Cause, f.You = api.CauseBudgetBlocks, "add pods to the budget or make them healthy, so that it lets one go; or delete the pod yourself, which no budget prevents"
			f.Command = budgetCommand(v)
			switch {
			case v.Webhook != "":
				f.Cause, f.You = api.CausePodNotEvictable, "see what the program of this webhook waits for, or move the pod yourself"
				f.Command = "kubectl describe pod " + pod
			case v.Awaits != "":
				f.You, f.Command = e.roomAdvice(v), describePod(v.Awaits)
			}
		case drain.Failed:
			f.Cause, f.You, f.Command = api.CausePodNotEvictable, "move it yourself", "kubectl describe pod "+pod
		case drain.Waiting:
			f.Cause, f.Agent = api.CauseRuleWaits, "evicts it after that, if it has not ended"
			if v.Asked {
				f.Agent = "requests its eviction until it goes, or until then"
			}
			f.You, f.Command = "wait, or end it yourself", "kubectl describe pod "+pod
		case drain.Terminating:
			if !e.overstays(v.Pod) {
				continue
			}
			f = e.overstaying(v.Pod, f)
		case drain.Refused:
			f.Cause, f.You = api.CausePolicyRefuses, "move the pod yourself, or change drain in the settings"
			f.Command = "kubectl describe pod " + pod
			flags := drain.Flags([]drain.Verdict{v})
			if command := e.Want.ApplyCommand(e.Node.Name, flags...); len(flags) > 0 && command != "" {
				f.You, f.Command = "let this change evict it, or change drain in the settings or the profile, or move the pod yourself", command
			}
		case drain.Requested, drain.Deleted, drain.Gone, drain.Queued: // it goes
			continue
		}
		out = append(out, f)
	}
	return out
}

// roomAdvice says what helps where a budget lets no pod go before another one has started.
func (e *Evidence) roomAdvice(v drain.Verdict) string {
	text := "give " + v.Awaits + " room on another node"
	if e.Journal != nil && !e.Want.Undo && e.Want.Label != "" {
		text += "; or remove the label " + e.Want.Label + ": the pods then come back to this node"
	}
	return text
}

// describePod is the command that shows a pod, by its namespace and name.
func describePod(pod string) string {
	namespace, name, _ := strings.Cut(pod, "/")
	return fmt.Sprintf("kubectl describe pod -n %s %s", namespace, name)
}

// podsThatStay finds pods that overstay their grace period and that no plan needs to leave, as after the deadline.
func (e *Evidence) podsThatStay() []api.Finding {
	var out []api.Finding
	for _, p := range e.Holders.Pods {
		asked := slices.ContainsFunc(e.Verdicts, func(v drain.Verdict) bool { return v.Pod.UID == p.UID })
		if p.Terminating && !asked && e.overstays(p) {
			out = append(out, e.overstaying(p, api.Finding{
				Evidence: fmt.Sprintf("pod %s: terminating, its grace ended at %s", p, p.GraceEnds.UTC().Format(time.RFC3339)),
				Agent:    "waits for it only if a change needs its devices",
			}))
		}
	}
	return out
}

func (e *Evidence) overstays(p holders.Pod) bool {
	return p.Unlisted || !p.GraceEnds.IsZero() && e.Now.After(p.GraceEnds)
}

// overstaying says what keeps a pod that is past its grace period.
func (e *Evidence) overstaying(p holders.Pod, f api.Finding) api.Finding {
	f.Cause = api.CausePodKeepsTerminating
	f.You, f.Command = "see what keeps it", fmt.Sprintf("kubectl describe pod -n %s %s", p.Namespace, p.Name)
	switch away := offer.DriverAway(e.Observed); {
	case slices.Contains(p.Sources, holders.SourceClaim) && len(p.Running) == 0 && away != "":
		f.Cause = api.CauseClaimDriverGone
		f.You = "start NVIDIA's DRA driver on this node again: without it kubelet cannot unprepare the pod's claims" + named(p.DeviceClaims) + "; " + away
		f.Command = "kubectl get pods -A --field-selector spec.nodeName=" + e.Node.Name + " | grep dra"
	case len(p.Finalizers) > 0:
		f.You = "find out why the finalizers " + strings.Join(p.Finalizers, ", ") + " are still there, and remove them only if what they guard is done"
		f.Command = fmt.Sprintf("kubectl get pod -n %s %s -o jsonpath='{.metadata.finalizers}'", p.Namespace, p.Name)
	}
	return f
}

// named adds names to a sentence, if there are any.
func named(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " (" + strings.Join(names, ", ") + ")"
}

func (e *Evidence) processesInTheWay() []api.Finding {
	var out []api.Finding
	for _, p := range e.Processes {
		f := api.Finding{
			Cause: api.CauseProcessHoldsGPU, Evidence: fmt.Sprintf("%s holds %s", p.Name, strings.Join(p.Holds, ", ")), Agent: e.patience(),
			You: cmp.Or(p.Remedy, "end it, if it is not needed"), Command: fmt.Sprintf("kill %d # on %s", p.PID, e.Node.Name),
		}
		if strings.HasSuffix(p.Unit, ".service") {
			f.Command = fmt.Sprintf("systemctl stop %s # on %s", p.Unit, e.Node.Name)
		}
		out = append(out, f)
	}
	return out
}

// left finds marks of the agent that are in no journal.
func (e *Evidence) left() []api.Finding {
	if len(e.leftover) == 0 || e.Unreadable != "" {
		return nil
	}
	f := api.Finding{
		Cause: api.CauseOwnCordonLeft, Evidence: strings.Join(e.leftover, "; ") + ": the agent's own, without a journal",
		Agent: "verifies the capacity, and releases the node",
	}
	if e.Record.StrangeJournal {
		f.Evidence += "; the journal on the node is not from this host's agent, which ignores it"
	}
	if !e.Running {
		f.Agent = "is not running; the next one " + f.Agent
		f.You, f.Command, f.Waits = "start the agent, or have this done now", "gpuslice-agent recover --node "+e.Node.Name, true
	}
	return []api.Finding{f}
}

func (e *Evidence) operandsPaused() []api.Finding {
	var out []api.Finding
	for _, o := range e.paused {
		f := api.Finding{Cause: api.CauseOperandsPaused, Evidence: fmt.Sprintf("label %s=%s, paused by %s", o.Label, o.Value, o.By)}
		switch {
		case o.PendingRestore || o.By == toolOurs && e.Journal != nil:
			continue
		case o.By == toolOurs:
			f.Agent = "sets the label back to \"true\""
		case o.By == fence.ToolMIGManager && state.RunsMIGManager(e.Pods):
			f.Agent = "does not change it: mig-manager runs on this node, and manages its own labels"
			f.You, f.Command = "see what it does", "kubectl get pods -A -l app="+state.MIGManagerLabel+" --field-selector spec.nodeName="+e.Node.Name
		case o.By == fence.ToolMIGManager && slices.Contains(e.Settings.Recover.Adopt, config.AdoptMIGManager):
			f.Agent = "sets the label back to \"true\", since recover.adopt names " + config.AdoptMIGManager
		case o.By == fence.ToolMIGManager:
			f.Agent = "does not change it, unless recover.adopt names " + config.AdoptMIGManager
			f.You, f.Command = "if mig-manager no longer runs here, have its labels restored", "gpuslice-agent recover --adopt "+config.AdoptMIGManager
		default:
			f.Agent = "does not change it"
			f.You = "if " + o.By + " is not at work, restore the label"
			f.Command = fmt.Sprintf("kubectl label node %s %s=true --overwrite", e.Node.Name, o.Label)
		}
		out = append(out, f)
	}
	return out
}

func (e *Evidence) taintLeft() []api.Finding {
	taint := managed.CordonTaint(e.Node)
	if taint == nil || e.Node.Spec.Unschedulable {
		return nil
	}
	f := api.Finding{
		Cause: api.CauseUnschedulableTaintLeft, Evidence: "the node is not cordoned, and still has the taint " + taint.Key,
		Agent: "leaves it to the controller manager, which removes it within seconds of the uncordon",
		You:   "if it stays for a minute, see whether the controller manager works; or remove the taint",
		Waits: true, Command: fmt.Sprintf("kubectl taint node %s %s-", e.Node.Name, taint.Key),
	}
	if taint.TimeAdded != nil {
		f.Evidence += since(taint.TimeAdded.Time, e.Now)
	}
	return []api.Finding{f}
}

func (e *Evidence) capacityMissing() []api.Finding {
	if len(e.Capacity.Missing) == 0 || !e.Complete || e.Kubelet.Err != nil || e.beforeVerify() && e.PluginAdvice == "" {
		return nil
	}
	offers := offer.Of(e.Observed)
	f := api.Finding{
		Cause: api.CauseCapacityMissing, Evidence: strings.Join(e.Capacity.Missing, "; "), Waits: e.stalled() && e.ours(),
		You: offer.Advice(e.Observed), Command: e.pluginCommand(),
	}
	switch {
	case e.PluginAdvice != "":
		why, _ := offers.Absent()
		f.Evidence, f.You = why+": "+f.Evidence, e.PluginAdvice
	case e.StrategyAdvice != "":
		f.You = e.StrategyAdvice
	case len(e.Capacity.Withdrawn) == len(e.Capacity.Missing):
		f.You, f.Command = "delete these pods, or wait until they have ended", "kubectl get pods -A --field-selector spec.nodeName="+e.Node.Name
	}
	switch {
	case e.Journal != nil:
		f.Agent = fmt.Sprintf("waits for %s for %s, then undoes the change", offers.Name(), e.Settings.Timeouts.Capacity)
	case e.Want.Name != "":
		f.Agent = "waits for " + offers.Name() + ", without a limit, and disturbs nothing"
	default:
		f.Agent = "changes nothing: no label requests a config"
	}
	return []api.Finding{f}
}

// notAllowedYet finds a change that the agent does not begin, for a cause that no other finding names.
func (e *Evidence) notAllowedYet() []api.Finding {
	named := []config.Reason{config.ReasonEvictionBlocked, config.ReasonGPUInUse, config.ReasonOtherMaintenance}
	if e.NotYet == nil || slices.Contains(named, e.NotYet.Reason) {
		return nil
	}
	return []api.Finding{{
		Cause: api.CauseNotAllowedYet, Evidence: e.NotYet.Message,
		Agent: "does not change the node, and begins by itself when it may", You: e.NotYet.Advice,
	}}
}

// requestRefused finds a request that the agent refuses. sickGPUs has lost GPUs, and failedBefore has failed changes.
func (e *Evidence) requestRefused() []api.Finding {
	if e.RefusedAs == "" || e.Want.Label == "" || e.Journal != nil || errors.Is(e.Refused, nvml.ErrLost) || e.ReportedFailure(e.Want) != nil {
		return nil
	}
	f := api.Finding{
		Cause: api.CauseRequestRefused, Evidence: fmt.Sprintf("%s=%s, %s: %v", e.Want.Label, e.Want.Name, e.RefusedAs, e.Refused),
		Agent: "changes nothing for it, and tries again when the label, the configs or the GPUs change",
		You:   "to keep the GPUs as they are, remove the label", Command: fmt.Sprintf("kubectl label node %s %s-", e.Node.Name, e.Want.Label),
	}
	if known, is := glossary.Reasons().Find(string(e.RefusedAs)); is && known.YouCan != "" {
		f.You = known.YouCan + "; or " + f.You
	}
	return []api.Finding{f}
}

// failedBefore finds a failed or impossible request on a released node.
func (e *Evidence) failedBefore() []api.Finding {
	f := e.ReportedFailure(e.Want)
	if f == nil || e.Journal != nil {
		return nil
	}
	return []api.Finding{{
		Cause: api.CauseChangeFailed, Evidence: fmt.Sprintf("%s failed: %s", e.Want.Name, f.Message),
		Agent: "has restored the former GPUs, and does not retry by itself",
		You:   "when the reason is gone, remove the label and set it again",
		Command: fmt.Sprintf("kubectl label node %[1]s %[2]s- && kubectl label node %[1]s %[2]s=%[3]s",
			e.Node.Name, e.Want.Label, e.Want.Name),
	}}
}

// patience says what the agent does about a pod or a process in the way.
func (e *Evidence) patience() string {
	switch {
	case e.Journal == nil:
		return "asks again, and disturbs nothing until then; the node takes pods"
	case e.Want.Undo:
		return "asks again without a limit, since this is the undo"
	default:
		then := "it undoes the change and releases the node"
		if e.Settings.Drain.AfterDeadline == config.AfterDeadlineDelete {
			then = "it deletes the remaining pods"
		}
		return fmt.Sprintf("asks again until %s; then %s", e.deadline().UTC().Format(time.RFC3339), then)
	}
}

// stepsLeft names the step that comes next.
func (e *Evidence) stepsLeft() string {
	if len(e.Steps) == 0 {
		return ""
	}
	return fmt.Sprintf("; %s left, the next: %s", sanitize.Counted(len(e.Steps), "step"), e.Steps[0])
}

// draining reports whether something has to happen before a GPU is touched.
func (e *Evidence) draining() bool {
	return plan.Has(e.Steps, plan.Fence) || plan.Any(e.Steps, func(t plan.Traits) bool { return t.Stage == plan.StageDrain })
}

func budgetCommand(v drain.Verdict) string {
	names := strings.ReplaceAll(v.PDB, v.Pod.Namespace+"/", "")
	if names == "" {
		return fmt.Sprintf("kubectl get pdb -n %s", v.Pod.Namespace)
	}
	return fmt.Sprintf("kubectl get pdb -n %s %s", v.Pod.Namespace, strings.ReplaceAll(names, ", ", " "))
}
