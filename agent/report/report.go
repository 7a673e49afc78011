// Package report puts a pass into words and writes them to the node: the conditions, the phase, the state label, the status annotation and their
// Events, each within its bounds. It says whether the loop goes on, for kubelet's probe.
package report

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// mostBlockers bounds what the status lists: all annotations of a node together may take 256 KiB.
const mostBlockers = 100

// Report is what the agent writes to the node after one pass.
type Report struct {
	Phase   api.Phase
	State   config.State           // empty: the label does not change
	Ready   corev1.ConditionStatus // of GPUPartitionReady
	Reason  config.Reason
	Message string
	// Converged: the node is as desired, and that is verified.
	Converged bool
	ForRoom   bool     // users have to let pods go
	GoesOn    bool     // by itself: a step is under way, or the agent retries what has failed
	Retries   bool     // the agent retries a failed step or observation
	Blockers  []string // what is in the way, one by one
	Left      int      // steps
	// BeforeTarget: the next step carries out a part of the request, so users read first that the node is changing.
	BeforeTarget bool
	Drain        DrainReport
	Planned      time.Time // when the change begins that waits for its window
	Until        time.Time // the deadline of a wait; zero if there is none
	Then         string    // what the agent does at the deadline
}

// Silent returns why the agent can say nothing about the GPUs; empty if it can.
func (r Report) Silent() string {
	if r.Ready != corev1.ConditionUnknown {
		return ""
	}
	return r.Message
}

// Of puts the pass into words. The state label does not answer a reset, since no label requests it. It answers "failed" to whoever waits for a label
// that the agent ignores: without an answer they would wait until their own timeout.
func Of(seen *state.Observed, want state.Desired, steps []plan.Step, err error, d outcome.Decision) Report {
	r := reportOf(seen, want, steps, err, d)
	r.GoesOn, r.Retries = goesOn(want, steps, err, d), err != nil && d.Waits == outcome.ForRetry
	if want.Unanswered && r.State == config.StateSuccess {
		r.State = config.StateFailed
	}
	if want.Name == state.ResetTarget {
		r.State = ""
	}
	return r
}

func reportOf(seen *state.Observed, want state.Desired, steps []plan.Step, err error, d outcome.Decision) Report {
	switch {
	case err == nil && len(steps) == 0:
		return idleReport(seen, want)
	case err == nil:
		reason, phase := Progress(steps, want)
		return Report{
			Phase: phase, Ready: corev1.ConditionFalse, Reason: reason, State: config.StatePending,
			Message:      headed(seen, want, fmt.Sprintf("%s left; done: %s", sanitize.Counted(len(steps)-1, "step"), steps[0])),
			BeforeTarget: len(steps) > 1 && steps[1].Traits().ReachesTarget,
		}
	case d.Stalled:
		r := Report{Phase: api.PhaseStalled, Ready: corev1.ConditionFalse, Reason: d.Reason, State: config.StateFailed, Message: stalled(seen, want, d)}
		if want.Name == "" && seen.Journal == nil {
			r.State = unrequestedState(seen)
		}
		return r
	case d.Waits == outcome.ForDriver:
		return Report{Phase: api.PhaseWaiting, Ready: corev1.ConditionUnknown, Reason: d.Reason, Message: d.Message}
	}
	r := Report{
		Phase: api.PhaseWaiting, Ready: corev1.ConditionFalse, Reason: d.Reason, State: config.StatePending, Message: d.Message,
		ForRoom: d.Waits == outcome.ForRoom,
	}
	if d.Waits == outcome.ForReboot {
		r.State = config.StateRebooting
	}
	if d.Waits == outcome.ForUser {
		r.State = config.StateFailed // tools must not wait for ever
	}
	if len(steps) > 0 {
		r.Phase = WaitingPhase(seen, steps[0].Kind, want)
		if !d.Named {
			r.Message = headed(seen, want, d.Message)
		}
	}
	if want.Name == "" && seen.Journal == nil {
		r.State = unrequestedState(seen)
	}
	return r
}

// unrequestedState returns the state of a node without a request. The state label stays unchanged, unless it says success and that is no longer true,
// since kubelet allocates a pod's devices to others. A mig-manager's label is its own.
func unrequestedState(seen *state.Observed) config.State {
	success := config.State(seen.Node.Labels[config.LabelMIGConfigState]) == config.StateSuccess
	if success && len(seen.Capacity.Withdrawn) > 0 && !seen.Leftovers.MIGManager {
		return config.StateFailed
	}
	return ""
}

// idleReport reports that there is nothing to do.
func idleReport(seen *state.Observed, want state.Desired) Report {
	if want.Name == "" {
		r := Report{
			Phase: api.PhaseIdle, Ready: corev1.ConditionTrue, Reason: config.ReasonNotRequested,
			Message: fmt.Sprintf("no label requests a config (%s, %s or %s); the GPUs stay unchanged",
				config.LabelProfile, config.LabelMIGConfig, config.LabelDevicePluginConfig) + cordonNote(seen),
		}
		if seen.DevicePlugin.Unpicked != "" {
			r.Message += "; " + seen.DevicePlugin.Unpicked
		}
		if state := config.State(seen.Node.Labels[config.LabelMIGConfigState]); state == config.StatePending || state == config.StateRebooting {
			r.State = config.StateFailed // the change has failed: tools that wait for it must not wait for ever
		}
		return r
	}
	if message := seen.OnAtReboot(want); message != "" {
		return Report{
			Phase: api.PhaseWaiting, Ready: corev1.ConditionFalse, Reason: config.ReasonNeedsReboot, State: rebootState(seen),
			Message: message,
		}
	}
	return Report{
		Phase: api.PhaseIdle, Ready: corev1.ConditionTrue, Converged: true, Reason: config.ReasonConverged, State: config.StateSuccess,
		Message: converged(seen, want),
	}
}

// rebootState returns the state label of a change that waits for a reboot. If a user has to reboot the node, that state makes tools stop waiting.
func rebootState(seen *state.Observed) config.State {
	if seen.Reboots.Policy == plan.RebootDelegate {
		return config.StateRebooting
	}
	return config.StateFailed
}

// longestCause bounds the cause in each message of an undo: the Event of the failure has all of it, and so has the last condition.
const longestCause = 160 // characters

// headed is a message with the steps' target before it. An undo's message ends with the cause.
func headed(seen *state.Observed, want state.Desired, text string) string {
	switch {
	case want.Undo && want.UndoCause != nil:
		return fmt.Sprintf("undoing the change: %s; the cause: %s", text, sanitize.Message(want.UndoCause.Error(), longestCause))
	case want.Undo:
		return fmt.Sprintf("undoing %s: %s; the cause: %s", want.Name, text, sanitize.Message(seen.Journal.Undo.Message, longestCause))
	case want.Name == "":
		return "no config requested: " + text
	default:
		return want.Name + ": " + text
	}
}

// progress is what the agent reports of a plan that begins with a step.
type progress struct {
	reason config.Reason
	phase  api.Phase // PhaseWaiting if other nodes, or a user, have to do something
}

// stages has the report for the steps of each stage.
var stages = map[plan.Stage]progress{
	plan.StageOpen:      {config.ReasonFencing, api.PhaseDraining},
	plan.StageDrain:     {config.ReasonEvicting, api.PhaseDraining},
	plan.StageHardware:  {config.ReasonRepartitioning, api.PhaseApplying},
	plan.StageReboot:    {config.ReasonNeedsReboot, api.PhaseWaiting},
	plan.StageConfigure: {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.StageRestore:   {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.StageVerify:    {config.ReasonFinishing, api.PhaseVerifying},
}

// kinds has the report for the kinds of steps that differ from their stage.
var kinds = map[plan.Kind]progress{
	plan.AcquireSlot:    {config.ReasonAwaitingSlot, api.PhaseWaiting},
	plan.Adopt:          {config.ReasonRecovering, api.PhaseVerifying},
	plan.PauseOperands:  {config.ReasonPausingOperands, api.PhaseDraining},
	plan.StopUnits:      {config.ReasonStoppingUnits, api.PhaseDraining},
	plan.SetComputeMode: {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.VerifyCapacity: {config.ReasonAwaitingCapacity, api.PhaseVerifying},
}

// of returns the report for a kind of step.
func of(kind plan.Kind) progress {
	if p, is := kinds[kind]; is {
		return p
	}
	return stages[plan.Step{Kind: kind}.Traits().Stage]
}

// Progress returns the reason and the phase of a plan that begins with the steps. They follow from the first step that changes more than the journal
// and the pool's Lease.
func Progress(steps []plan.Step, want state.Desired) (config.Reason, api.Phase) {
	if want.Undo {
		return config.ReasonRollingBack, api.PhaseRollingBack
	}
	p := of(steps[0].Kind)
	for _, s := range steps {
		if s.Kind != plan.Record && s.Kind != plan.AcquireSlot {
			p = of(s.Kind)
			break
		}
	}
	return p.reason, p.phase
}

// WaitingPhase is the phase of a plan after its first step had to wait or failed. A node that still takes pods is not draining.
func WaitingPhase(seen *state.Observed, kind plan.Kind, want state.Desired) api.Phase {
	phase := of(kind).phase
	switch {
	case want.Undo:
		return api.PhaseRollingBack
	case phase == api.PhaseDraining && !seen.DisruptionStarted():
		return api.PhaseWaiting
	}
	return phase
}

// goesOn reports whether a change goes on by itself, and waits for no user, tool or other node.
func goesOn(want state.Desired, steps []plan.Step, err error, d outcome.Decision) bool {
	switch {
	case err != nil:
		return !d.Stalled && (d.Waits == outcome.ForStep || d.Waits == outcome.ForRetry)
	case len(steps) == 0:
		return false
	default:
		_, phase := Progress(steps, want)
		return phase != api.PhaseWaiting
	}
}

func converged(seen *state.Observed, want state.Desired) string {
	text := fmt.Sprintf("%s: %s", want.Name, offer.Of(seen).Text(want))
	if len(want.MissingPositions) > 0 {
		var positions []string
		for _, i := range want.MissingPositions {
			positions = append(positions, strconv.Itoa(i))
		}
		text += fmt.Sprintf(" (ignored: devices that the config names and this node lacks: %s)", sanitize.Listed(positions))
	}
	if seen.Plugin.PassedOver != "" {
		text += fmt.Sprintf(" (the device plugin ignores a part of its config: %s)", seen.Plugin.PassedOver)
	}
	text += cordonNote(seen)
	if stale := seen.Capacity.Stale; len(stale) > 0 {
		text += " (" + strings.Join(stale, "; ") + ")"
	}
	return text
}

// cordonNote is CordonOfOthers for the end of a message.
func cordonNote(seen *state.Observed) string {
	if cordon := CordonOfOthers(seen); cordon != "" {
		return "; " + cordon
	}
	return ""
}

// CordonOfOthers says which user or tool has cordoned a node where the agent has nothing to restore; empty if none has.
func CordonOfOthers(seen *state.Observed) string {
	who, since, cordoned := managed.Cordoner(seen.Node)
	if !cordoned || seen.Journal != nil {
		return ""
	}
	text := "the node is cordoned"
	if who != "" {
		text += " by " + who
	}
	if !since.IsZero() {
		text += " since " + outcome.Moment(since)
	}
	if foreign := seen.ToolsThatCordon(); len(foreign) > 0 {
		text += ", during the work of " + strings.Join(foreign, "; ")
	}
	if _, keep := seen.Node.Annotations[config.AnnotationKeepCordoned]; keep {
		return text + "; annotation " + config.AnnotationKeepCordoned + " keeps the cordon"
	}
	return text + "; the agent does not lift that cordon"
}

func stalled(seen *state.Observed, want state.Desired, d outcome.Decision) string {
	switch {
	case seen.Journal != nil && seen.Journal.Cordoned:
		return d.Message + "; the node stays cordoned until this is mended"
	case len(seen.Marks.Startup) > 0:
		return d.Message + "; the node keeps " + startupTaints(seen) + " until this is mended"
	case seen.Failed(want) != nil:
		return fmt.Sprintf("to try again, remove the label %s and set it again; %s; the agent has undone the change", want.Label, d.Message)
	default:
		return d.Message
	}
}

// startupTaints names the startup taints of the node. Users may set any number of keys and effects.
func startupTaints(seen *state.Observed) string {
	keys := state.TaintKeys(seen.Marks.Startup)
	if len(keys) == 1 {
		return "the taint " + keys[0]
	}
	return "the taints " + strings.Join(keys, ", ")
}

// DrainReport holds KEP-5683's conditions of a node. If they are not known, those on the node stay.
type DrainReport struct{ Known, Draining, Drained, Maintained bool }

// PartitionReady is the agent's condition on the node; nil if there is none.
func PartitionReady(node *corev1.Node) *corev1.NodeCondition {
	return Find(node, config.ConditionGPUPartitionReady)
}

// DrainOf returns how far the node is drained, by the first step that is left. An observation that ended early shows no pods. If no step is left, or
// the change is an undo, pods that had to leave may have stayed: then the node is drained only if it was before.
func DrainOf(seen *state.Observed, want state.Desired, steps []plan.Step) DrainReport {
	switch {
	case !seen.Complete:
		return DrainReport{}
	case seen.Journal == nil || !seen.Journal.KeepsPodsAway():
		return DrainReport{Known: true}
	}
	draining := len(steps) > 0 && steps[0].Traits().BeforePodsLeft
	was := Find(seen.Node, config.ConditionDrained)
	drained := len(steps) > 0 && !want.Undo || was != nil && was.Status == corev1.ConditionTrue
	return DrainReport{Known: true, Draining: draining, Drained: drained && !draining, Maintained: true}
}

// ByDefault reports whether want has a config of the device plugin that the settings name, and no label of the node.
func ByDefault(node *corev1.Node, want state.Desired) bool {
	if want.Label != config.LabelDevicePluginConfig && (want.Label != config.LabelMIGConfig || !strings.Contains(want.Name, api.DesiredSeparator)) {
		return false
	}
	key := node.Labels[config.LabelDevicePluginConfig]
	return key == "" || strings.HasPrefix(key, config.OwnPluginKey)
}
