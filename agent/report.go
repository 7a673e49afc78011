package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/condition"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
)

// progressInterval is the least time between two reports that differ in nothing but how far a change has come.
const progressInterval = time.Second

// mostBlockers bounds what the status lists: all annotations of a node together may take 256 KiB.
const mostBlockers = 100

// report is what one pass tells.
type report struct {
	phase   api.Phase
	state   config.State           // empty: the label is left as it is
	ready   corev1.ConditionStatus // of GPUPartitionReady
	reason  config.Reason
	message string
	// converged: what is asked for is there, and proven.
	converged bool
	blocked   bool     // people have to let pods go
	blockers  []string // what is in the way, one by one
	left      int      // steps
	drain     drainReport
	planned   time.Time // when the change begins that waits for its window
}

// silent is why nothing can be said of the GPUs; empty if something can.
func (r report) silent() string {
	if r.ready != corev1.ConditionUnknown {
		return ""
	}
	return r.message
}

// conclude tells what the pass has found and done, and returns how long the loop may sleep. It is the only writer of the
// state label, the status annotation, the condition and their events.
func (a *Agent) conclude(ctx context.Context, seen observed, want desired, steps []plan.Step, err error) time.Duration {
	a.alive.At(telling)
	var first plan.Step // none, if the look at the node has failed
	if len(steps) > 0 {
		first = steps[0]
	}
	a.metrics.Stepped(steps, err)
	if !seen.complete {
		a.verification.began = time.Time{} // what is not seen takes none of the time for capacity
	} else {
		a.forget(first, err == nil && len(steps) == 0)
	}
	var d decision
	if err != nil {
		d = a.decide(seen, want, first, err).bounded()
	}
	a.replaced = errors.Is(err, nvml.ErrReplaced)
	switch {
	case seen.node == nil:
		a.log.Warn("looking at the node", zap.Error(err))
		return d.after
	case d.noReset && seen.journal != nil:
		return a.noteNoReset(ctx, seen, first.GPU, err)
	case d.failure != nil && seen.journal != nil && !want.undo:
		return a.giveUp(ctx, seen, want, d.failure)
	case d.failure != nil: // the way back fails too
		d = decision{reason: d.failure.Reason, message: d.failure.Message, after: a.settings.Retry.Longest, stalled: true}
	}
	r := reportOf(seen, want, steps, err, d)
	r.message = legible.Message(r.message+a.tellDropped(seen)+a.unitsDown()+seen.unnoticedReboots()+a.tellWindow(seen, want, d.planned), legible.Longest)
	r.blockers, r.drain, r.planned, r.left = d.blockers, drainOf(seen, first), d.planned, stepsLeft(steps, err)
	a.metrics.Reported(metrics.Report{Phase: r.phase, Ready: r.ready == corev1.ConditionTrue, Reason: r.reason, Converged: r.converged})
	a.removeGhosts(ctx, seen, err == nil && len(steps) == 0)
	if err := a.tell(ctx, seen, want, r, err == nil && len(steps) > 0); err != nil {
		a.log.Warn("reporting", zap.Error(err))
		return a.settings.Retry.First
	}
	return a.sleep(seen, steps, d, err)
}

// stepsLeft counts the steps that are still to be done after the pass.
func stepsLeft(steps []plan.Step, err error) int {
	if err == nil && len(steps) > 0 {
		return len(steps) - 1
	}
	return len(steps)
}

// forget drops what was remembered of steps that are over.
func (a *Agent) forget(first plan.Step, converged bool) {
	if first.Kind != plan.VerifyCapacity {
		a.verification.began, a.verification.restarted = time.Time{}, false
	}
	if !first.Traits().TouchesGPU {
		maps.DeleteFunc(a.budget.successes, func(step string, _ int) bool { return step != first.String() })
	}
	maps.DeleteFunc(a.budget.waits, func(what string, _ time.Time) bool { return what != waitOf(first) })
	if !first.Traits().AsksBudgets {
		a.blockedBy(nil)
	}
	if converged {
		clear(a.budget.attempts)
	}
}

// doing is what the agent is at beside the steps, for people who look why it stands still.
type doing string

const telling doing = "Tell"

// String implements fmt.Stringer.
func (d doing) String() string { return string(d) }

// noStep is by what failures are counted where no step was reached, since the look at the node has failed.
var noStep = plan.Step{}.String()

// sleep is the time until the next look: at once after a step, else what the decision says, at the latest when the
// heartbeat is due.
func (a *Agent) sleep(seen observed, steps []plan.Step, d decision, err error) time.Duration {
	if err == nil && len(steps) > 0 {
		return 0
	}
	due := a.settings.NodeHeartbeat
	if c := partitionReady(seen.node); c != nil {
		if age := a.clock.Since(c.LastHeartbeatTime.Time); age < due {
			due -= max(0, age) // one of the future was written before the clock was set back
		}
	}
	if a.awaitsUnits() {
		due = min(due, unitRetry)
	}
	if seen.leftovers.adoptsIn > 0 {
		due = min(due, seen.leftovers.adoptsIn)
	}
	if seen.pool.slot.Held {
		due = min(due, fleet.RenewAfter)
	}
	if err == nil {
		return due
	}
	return min(d.after, due)
}

// reportOf puts the pass into words.
func reportOf(seen observed, want desired, steps []plan.Step, err error, d decision) report {
	switch {
	case err == nil && len(steps) == 0:
		return atRest(seen, want)
	case err == nil:
		reason, phase := progress(steps[0].Kind, want)
		return report{
			phase: phase, ready: corev1.ConditionFalse, reason: reason, state: config.StatePending,
			message: fmt.Sprintf("%s: %s left; done: %s", target(seen, want), legible.Counted(len(steps)-1, "step"), steps[0]),
		}
	case d.stalled:
		return report{phase: api.PhaseStalled, ready: corev1.ConditionFalse, reason: d.reason, state: config.StateFailed, message: stalled(seen, want, d)}
	case d.waits == outcome.ForDriver:
		return report{phase: api.PhaseWaiting, ready: corev1.ConditionUnknown, reason: d.reason, message: d.message}
	}
	r := report{
		phase: api.PhaseWaiting, ready: corev1.ConditionFalse, reason: d.reason, state: config.StatePending, message: d.message, blocked: d.waits == outcome.ForRoom,
	}
	if d.waits == outcome.ForReboot {
		r.state = config.StateRebooting
	}
	if len(steps) > 0 {
		_, r.phase = progress(steps[0].Kind, want)
		r.message = target(seen, want) + ": " + d.message
	}
	if want.name == "" && seen.journal == nil {
		r.state = "" // nothing was asked for: what cannot be seen now is no matter of the label
	}
	return r
}

// atRest puts into words that there is nothing to do.
func atRest(seen observed, want desired) report {
	if want.name == "" {
		r := report{
			phase: api.PhaseIdle, ready: corev1.ConditionTrue, reason: config.ReasonNotRequested,
			message: fmt.Sprintf("no config is asked for by label %s, %s or %s; the GPUs are left as they are",
				config.LabelProfile, config.LabelMIGConfig, config.LabelDevicePluginConfig) + cordonOfOthers(seen),
		}
		if seen.devicePlugin.unpicked != "" {
			r.message += "; " + seen.devicePlugin.unpicked
		}
		if state := config.State(seen.node.Labels[config.LabelMIGConfigState]); state == config.StatePending || state == config.StateRebooting {
			r.state = config.StateFailed // what was asked for has not come: tools that wait for it must not wait for ever
		}
		return r
	}
	if message := seen.onAtReboot(want); message != "" {
		return report{
			phase: api.PhaseWaiting, ready: corev1.ConditionFalse, reason: config.ReasonNeedsReboot, state: seen.rebootState(),
			message: message,
		}
	}
	return report{
		phase: api.PhaseIdle, ready: corev1.ConditionTrue, converged: true, reason: config.ReasonConverged, state: config.StateSuccess,
		message: converged(seen, want),
	}
}

// target names what the steps lead to.
func target(seen observed, want desired) string {
	switch {
	case want.undo && want.undoCause != nil:
		return fmt.Sprintf("going back to what was before, since %v", want.undoCause)
	case want.undo:
		return fmt.Sprintf("going back to what was before %s, since %s", want.name, seen.journal.Undo.Message)
	case want.name == "":
		return "no config asked for"
	default:
		return want.name
	}
}

// progresses has the reason and the phase of a plan that begins with each kind of step.
var progresses = map[plan.Kind]struct {
	reason config.Reason
	phase  api.Phase
}{
	plan.AcquireSlot:        {config.ReasonAwaitingSlot, api.PhaseWaiting},
	plan.ReleaseSlot:        {config.ReasonAwaitingSlot, api.PhaseWaiting},
	plan.Record:             {config.ReasonFencing, api.PhaseDraining},
	plan.Fence:              {config.ReasonFencing, api.PhaseDraining},
	plan.Adopt:              {config.ReasonRecovering, api.PhaseVerifying},
	plan.Evict:              {config.ReasonEvicting, api.PhaseDraining},
	plan.PauseOperands:      {config.ReasonPausingOperands, api.PhaseDraining},
	plan.StopUnits:          {config.ReasonStoppingUnits, api.PhaseDraining},
	plan.SetMode:            {config.ReasonRepartitioning, api.PhaseApplying},
	plan.DropPersistence:    {config.ReasonRepartitioning, api.PhaseApplying},
	plan.RestorePersistence: {config.ReasonRepartitioning, api.PhaseApplying},
	plan.Reset:              {config.ReasonRepartitioning, api.PhaseApplying},
	plan.Destroy:            {config.ReasonRepartitioning, api.PhaseApplying},
	plan.Create:             {config.ReasonRepartitioning, api.PhaseApplying},
	plan.WriteSharing:       {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.ReloadPlugin:       {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.SetComputeMode:     {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.PublishNodeKeys:    {config.ReasonConfiguringPlugin, api.PhaseApplying},
	plan.Park:               {config.ReasonNeedsReboot, api.PhaseWaiting},
	plan.AskReboot:          {config.ReasonNeedsReboot, api.PhaseWaiting},
	plan.Reboot:             {config.ReasonNeedsReboot, api.PhaseWaiting},
	plan.RegenerateCDI:      {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.StartUnits:         {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.ResumeOperands:     {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.RestartOperands:    {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.VerifyCapacity:     {config.ReasonAwaitingCapacity, api.PhaseVerifying},
	plan.Release:            {config.ReasonAwaitingCapacity, api.PhaseVerifying},
}

// progress tells the reason and the phase of a plan that begins with the kind of step.
func progress(kind plan.Kind, want desired) (config.Reason, api.Phase) {
	if want.undo {
		return config.ReasonRollingBack, api.PhaseRollingBack
	}
	p := progresses[kind]
	return p.reason, p.phase
}

func converged(seen observed, want desired) string {
	text := fmt.Sprintf("%s: %s", want.name, capacity.Offered(seen.kubelet.offered).Summary(want.plugin.sharingKnown()))
	if len(want.missingPositions) > 0 {
		var positions []string
		for _, i := range want.missingPositions {
			positions = append(positions, strconv.Itoa(i))
		}
		text += fmt.Sprintf(" (the config names devices that this node does not have, which were passed over: %s)", listed(positions))
	}
	text += cordonOfOthers(seen)
	if stale := seen.staleFeatures(want.plugin); len(stale) > 0 {
		text += " (" + strings.Join(stale, "; ") + ")"
	}
	if old := capacity.Ghosts(seen.kubelet.offered, seen.node.Status.Allocatable); len(old) > 0 {
		text += fmt.Sprintf(" (kubelet keeps showing %s at 0, which is harmless)", strings.Join(old, ", "))
	}
	return text
}

// cordonOfOthers says of a cordoned node to which nothing is owed whose cordon it is.
func cordonOfOthers(seen observed) string {
	who, since, cordoned := fence.Cordoner(seen.node)
	if !cordoned || seen.journal != nil {
		return ""
	}
	text := "; the node is cordoned"
	if who != "" {
		text += " by " + who
	}
	if !since.IsZero() {
		text += " since " + outcome.Moment(since)
	}
	if foreign := seen.cordoning(); len(foreign) > 0 {
		text += ", while it is in the hands of " + strings.Join(foreign, "; ")
	}
	if _, keep := seen.node.Annotations[config.AnnotationKeepCordoned]; keep {
		return text + "; it stays so for annotation " + config.AnnotationKeepCordoned
	}
	return text + ", which is not ours to lift"
}

func stalled(seen observed, want desired, d decision) string {
	switch {
	case seen.journal != nil && seen.journal.Cordoned:
		return d.message + "; the node stays cordoned until this is mended"
	case seen.marks.startup != nil:
		return d.message + "; the node keeps the taint " + config.TaintNotReady + " until this is mended"
	case seen.failed(want) != nil:
		return d.message + fmt.Sprintf("; the GPUs are as they were before. To try again, remove the label %s and set it again", want.label)
	default:
		return d.message
	}
}

// tell writes what differs from what the node shows already.
func (a *Agent) tell(ctx context.Context, seen observed, want desired, r report, underway bool) error {
	old := partitionReady(seen.node)
	if old == nil {
		old = &corev1.NodeCondition{}
	}
	age := a.clock.Since(old.LastHeartbeatTime.Time)
	news := old.Reason != string(r.reason)
	if underway && !news && age < progressInterval {
		return nil
	}
	status, full, err := a.statusOf(ctx, seen, want, r)
	if err != nil {
		return err
	}
	if full {
		r.message = legible.Message(r.message, legible.Longest-len(noRoom)) + noRoom
	}
	// Each for itself, and the annotation last: what others write there must not keep the node from saying how it is.
	return errors.Join(a.tellState(ctx, seen, r), a.tellCondition(ctx, seen, want, r, underway), a.tellMetadata(ctx, seen, r, status))
}

// tellCondition writes the conditions that differ from what the node shows already.
func (a *Agent) tellCondition(ctx context.Context, seen observed, want desired, r report, underway bool) error {
	old := partitionReady(seen.node)
	if old == nil {
		old = &corev1.NodeCondition{}
	}
	age := a.clock.Since(old.LastHeartbeatTime.Time)
	news := old.Reason != string(r.reason)
	same := !news && old.Status == r.ready && old.Message == r.message
	beat := a.heartbeatDue(age)
	conditions := slices.Concat(a.drainConditions(seen.node, r), a.plannedCondition(seen, want, r))
	for _, part := range a.parts {
		conditions = append(conditions, part.Conditions(seen.node, seen.complete, r.silent(), beat)...)
	}
	if same && len(conditions) == 0 && !beat {
		return nil
	}
	conditions = append(conditions, condition.After(old, config.ConditionGPUPartitionReady, r.ready, string(r.reason), r.message, a.clock.Now()))
	if err := a.tellConditions(ctx, conditions); err != nil {
		return err
	}
	if news {
		a.log.Info("telling", zap.String("phase", string(r.phase)), zap.String("reason", string(r.reason)), zap.String("message", r.message))
	}
	if news && !underway {
		a.eventf(seen.node, eventType(r), r.reason, "%s", r.message)
	}
	return nil
}

// heartbeatDue reports whether the conditions are to be written though they say nothing new. Their time is in the future where the
// clock was set back.
func (a *Agent) heartbeatDue(age time.Duration) bool {
	return age >= a.settings.NodeHeartbeat || age < -steady.StepNoticed
}

// statusOf is the status annotation, and whether there is no room for it. A look that ended early has nothing to say there, and must
// not wipe out what an earlier one said: then it is empty. What the next changes go by is kept in the host's record besides.
func (a *Agent) statusOf(ctx context.Context, seen observed, want desired, r report) (text string, full bool, err error) {
	if !seen.complete {
		return "", false, nil
	}
	status := api.Status{
		Desired: want.name, Phase: r.phase, Reason: r.reason, GPUs: statusGPUs(seen.gpus),
		Capacity: capacity.Offered(seen.kubelet.offered).Summary(want.plugin.sharingKnown()),
	}
	status.Failed, status.NoReset, status.Blockers = seen.kept(want), seen.refusal(), r.blockers
	status.Left, status.Since = r.left, seen.since(r.reason, a.now())
	if seen.record.status.Desired != want.name { // tools tell by it what was said of a former wish
		status.Since = a.now()
	}
	if want.name != "" {
		status.Label = want.label
	}
	a.keep(&status, seen, want, r)
	published := publishedBy(a.record.now.Learnt) // this pass may have published others
	if a.record.absent {
		published = seen.record.published
	}
	a.learn(ctx, learntOf(status, published))
	text, fits, err := boundedStatus(status, roomFor(seen.node, config.AnnotationStatus, statusRoom))
	if err != nil || fits {
		return text, false, err
	}
	return "", true, nil
}

// tellState writes the state label, which tools wait for.
func (a *Agent) tellState(ctx context.Context, seen observed, r report) error {
	if a.outlived(seen, r) {
		return a.nodes.Patch(ctx, seen.node, func(*corev1.Node) ([]byte, error) {
			return nodewrite.Metadata(map[string]*string{config.LabelMIGConfigState: nil}, nil)
		})
	}
	if !seen.complete || r.state == "" || seen.node.Labels[config.LabelMIGConfigState] == string(r.state) {
		return nil
	}
	state := string(r.state)
	labels := map[string]*string{config.LabelMIGConfigState: &state}
	return a.nodes.Patch(ctx, seen.node, func(*corev1.Node) ([]byte, error) { return nodewrite.Metadata(labels, nil) })
}

// outlived reports whether the state label says that something has failed which nobody asks for any more. Tools that wait for the label have
// had the time of a heartbeat to see it; a success is still true, and a mig-manager's word is its own.
func (a *Agent) outlived(seen observed, r report) bool {
	return r.phase == api.PhaseIdle && !r.converged && r.state == "" && config.State(seen.node.Labels[config.LabelMIGConfigState]) == config.StateFailed &&
		a.now().Sub(seen.since(r.reason, a.now())) >= a.settings.NodeHeartbeat && !seen.leftovers.migManager
}

// tellMetadata writes the status annotation, unless there is none to write, and takes away those that are spent.
func (a *Agent) tellMetadata(ctx context.Context, seen observed, r report, text string) error {
	if !seen.complete {
		return nil
	}
	annotations := map[string]*string{}
	if text != "" && seen.node.Annotations[config.AnnotationStatus] != text {
		annotations[config.AnnotationStatus] = &text
	}
	if _, forced := seen.node.Annotations[config.AnnotationForce]; forced && r.phase == api.PhaseIdle {
		annotations[config.AnnotationForce] = nil // it was for this change, or for one that is wanted no more: the next one is to wait for its window
	}
	if len(annotations) == 0 {
		return nil
	}
	return a.nodes.Patch(ctx, seen.node, func(*corev1.Node) ([]byte, error) { return nodewrite.Metadata(nil, annotations) })
}

// keep copies into the status what later changes need: the config that was last proven, the boot, and how long changes took.
func (a *Agent) keep(status *api.Status, seen observed, want desired, r report) {
	status.Next, status.Proven, status.Cut, status.Took = r.planned.UTC(), seen.record.status.Proven, seen.record.status.Cut, seen.record.status.Took
	if r.converged {
		status.Proven, status.Cut = want.fingerprint, ""
		if hasInstances(seen.gpus) {
			status.Cut = seen.boot.id
		}
	}
	if a.record.persisted != nil { // it was written after the look
		status.Proven, status.Took, a.record.persisted = a.record.persisted.Proven, a.record.persisted.Took, nil
	}
	switch {
	case want.fingerprint != "":
		status.Asked = &api.AskedFor{Wish: want.fingerprint, Since: seen.asked(want, a.now())}
	case want.name != "": // what it means is not known as long as a file cannot be read
		status.Asked = seen.record.status.Asked
	}
}

// since is when the reason began: now, unless it was told before.
func (s observed) since(reason config.Reason, now time.Time) time.Time {
	if s.record.status.Reason == reason && !s.record.status.Since.IsZero() {
		return s.record.status.Since
	}
	return now
}

// tellConditions writes conditions of ours. A strategic merge patch leaves all others alone.
func (a *Agent) tellConditions(ctx context.Context, conditions []corev1.NodeCondition) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": conditions}})
	if err != nil {
		return fmt.Errorf("encoding the conditions: %w", err)
	}
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	err = retried.Do(api, func() error {
		_, err := a.client.CoreV1().Nodes().Patch(api, a.node, types.StrategicMergePatchType, body,
			metav1.PatchOptions{FieldManager: nodewrite.FieldManager}, "status")
		return err
	})
	if err != nil {
		return fmt.Errorf("writing the conditions of node %s: %w", a.node, err)
	}
	return nil
}

// drainReport is what KEP-5683's conditions say of a node.
type drainReport struct{ draining, drained, maintained bool }

// drainOf tells from the first step that is left how far the node is drained.
func drainOf(seen observed, first plan.Step) drainReport {
	if seen.journal == nil || !seen.journal.Cordoned {
		return drainReport{}
	}
	draining := first.Traits().BeforePodsLeft
	return drainReport{draining: draining, drained: !draining, maintained: true}
}

// drainConditions are those conditions that differ from what the node shows. A node that was never drained has none.
func (a *Agent) drainConditions(node *corev1.Node, r report) []corev1.NodeCondition {
	var out []corev1.NodeCondition
	for _, c := range []struct {
		kind   corev1.NodeConditionType
		is     bool
		reason string // of KEP-5683
	}{
		{config.ConditionDrainInProgress, r.drain.draining, "DrainStarted"},
		{config.ConditionDrained, r.drain.drained, "DrainCompleted"},
		{config.ConditionMaintenanceInProgress, r.drain.maintained, "Repartitioning"},
	} {
		old := condition.Find(node, c.kind)
		status, reason := corev1.ConditionFalse, "NotInMaintenance"
		if c.is {
			status, reason = corev1.ConditionTrue, c.reason
		}
		if old == nil && !c.is || old != nil && old.Status == status {
			continue
		}
		out = append(out, condition.After(old, c.kind, status, reason, "by "+nodewrite.FieldManager+", see condition "+config.ConditionGPUPartitionReady, a.clock.Now()))
	}
	return out
}

// plannedCondition says when the change begins that waits for its window.
func (a *Agent) plannedCondition(seen observed, want desired, r report) []corev1.NodeCondition {
	if !seen.complete { // it was said after another look
		return nil
	}
	old := condition.Find(seen.node, config.ConditionMaintenancePlanned)
	status, reason, message := corev1.ConditionFalse, "NotPlanned", "by "+nodewrite.FieldManager+": nothing waits for a window"
	if !r.planned.IsZero() {
		status, reason = corev1.ConditionTrue, "MaintenanceWindow" // of KEP-5683
		message = fmt.Sprintf("by %s: the change to %s begins at %s", nodewrite.FieldManager, want.name, zoned(r.planned))
	}
	if old == nil && status == corev1.ConditionFalse || old != nil && old.Status == status && old.Message == message {
		return nil
	}
	return []corev1.NodeCondition{condition.After(old, config.ConditionMaintenancePlanned, status, reason, message, a.clock.Now())}
}

func partitionReady(node *corev1.Node) *corev1.NodeCondition {
	return condition.Find(node, config.ConditionGPUPartitionReady)
}

// eventf records an event on the node, under the UID by which kubectl describe finds a node's events.
func (a *Agent) eventf(node *corev1.Node, kind string, reason config.Reason, format string, args ...any) {
	ref := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: node.Name, UID: types.UID(node.Name)}
	a.events.Eventf(ref, kind, string(reason), format, args...)
}

// podEventf records an event on a pod. All events of the agent are of it, or of the node.
func (a *Agent) podEventf(pod types.NamespacedName, uid types.UID, kind string, reason config.Reason, format string, args ...any) {
	ref := &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: uid}
	a.events.Eventf(ref, kind, string(reason), format, args...)
}

func eventType(r report) string {
	if r.ready == corev1.ConditionTrue || r.state == config.StatePending && !r.blocked {
		return corev1.EventTypeNormal
	}
	return corev1.EventTypeWarning
}
