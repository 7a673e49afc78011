package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/budget"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/condition"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// progressInterval is the least time between two reports that differ in nothing but how far a change has come.
const progressInterval = time.Second

// conclude tells what the pass has found and done, and returns how long the loop may sleep. It is the only writer of the
// state label, the status annotation, the condition and their events.
func (a *Agent) conclude(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step, err error) time.Duration {
	a.alive.At(telling)
	var first plan.Step // none, if the look at the node has failed
	if len(steps) > 0 {
		first = steps[0]
	}
	a.metrics.Stepped(steps, err)
	if !seen.Complete {
		a.verification.began = time.Time{} // what is not seen takes none of the time for capacity
	} else {
		a.forget(first, err == nil && len(steps) == 0)
	}
	var d report.Decision
	if err != nil {
		d = a.decide(seen, want, first, err).Bounded()
	}
	a.replaced = errors.Is(err, nvml.ErrReplaced)
	switch {
	case seen.Node == nil:
		a.log.Warn("looking at the node", zap.Error(err))
		return d.After
	case d.NoReset && seen.Journal != nil:
		return a.noteNoReset(ctx, seen, first.GPU, err)
	case d.Failure != nil && seen.Journal != nil && !want.Undo:
		return a.giveUp(ctx, seen, want, d.Failure)
	case d.Failure != nil: // the way back fails too
		d = report.Decision{Reason: d.Failure.Reason, Message: d.Failure.Message, After: a.settings.Retry.Longest, Stalled: true}
	}
	r := report.Of(seen, want, steps, err, d)
	r.Message = legible.Message(r.Message+a.tellDropped(seen)+a.unitsDown()+seen.UnnoticedReboots()+a.tellWindow(seen, want, d.Planned), legible.Longest)
	r.Blockers, r.Drain, r.Planned, r.Left = d.Blockers, drainOf(seen, first), d.Planned, stepsLeft(steps, err)
	a.metrics.Reported(metrics.Report{Phase: r.Phase, Ready: r.Ready == corev1.ConditionTrue, Reason: r.Reason, Converged: r.Converged})
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
		maps.DeleteFunc(a.budget.Successes, func(step string, _ int) bool { return step != first.String() })
	}
	maps.DeleteFunc(a.budget.Waits, func(what string, _ time.Time) bool { return what != budget.WaitOf(first) })
	if !first.Traits().AsksBudgets {
		a.wakes.BlockedBy(nil)
	}
	if converged {
		clear(a.budget.Attempts)
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
func (a *Agent) sleep(seen state.Observed, steps []plan.Step, d report.Decision, err error) time.Duration {
	if err == nil && len(steps) > 0 {
		return 0
	}
	due := a.settings.NodeHeartbeat
	if c := report.PartitionReady(seen.Node); c != nil {
		if age := a.clock.Since(c.LastHeartbeatTime.Time); age < due {
			due -= max(0, age) // one of the future was written before the clock was set back
		}
	}
	if a.awaitsUnits() {
		due = min(due, unitRetry)
	}
	if seen.Leftovers.AdoptsIn > 0 {
		due = min(due, seen.Leftovers.AdoptsIn)
	}
	if seen.Pool.Slot.Held {
		due = min(due, fleet.RenewAfter)
	}
	if err == nil {
		return due
	}
	return min(d.After, due)
}

// tell writes what differs from what the node shows already.
func (a *Agent) tell(ctx context.Context, seen state.Observed, want state.Desired, r report.Report, underway bool) error {
	old := report.PartitionReady(seen.Node)
	if old == nil {
		old = &corev1.NodeCondition{}
	}
	age := a.clock.Since(old.LastHeartbeatTime.Time)
	news := old.Reason != string(r.Reason)
	if underway && !news && age < progressInterval {
		return nil
	}
	status, full, err := a.statusOf(ctx, seen, want, r)
	if err != nil {
		return err
	}
	if full {
		r.Message = legible.Message(r.Message, legible.Longest-len(noRoom)) + noRoom
	}
	// Each for itself, and the annotation last: what others write there must not keep the node from saying how it is.
	return errors.Join(a.tellState(ctx, seen, r), a.tellCondition(ctx, seen, want, r, underway), a.tellMetadata(ctx, seen, r, status))
}

// tellCondition writes the conditions that differ from what the node shows already.
func (a *Agent) tellCondition(ctx context.Context, seen state.Observed, want state.Desired, r report.Report, underway bool) error {
	old := report.PartitionReady(seen.Node)
	if old == nil {
		old = &corev1.NodeCondition{}
	}
	age := a.clock.Since(old.LastHeartbeatTime.Time)
	news := old.Reason != string(r.Reason)
	same := !news && old.Status == r.Ready && old.Message == r.Message
	beat := a.heartbeatDue(age)
	conditions := slices.Concat(a.drainConditions(seen.Node, r), a.plannedCondition(seen, want, r))
	for _, part := range a.parts {
		conditions = append(conditions, part.Conditions(seen.Node, seen.Complete, r.Silent(), beat)...)
	}
	if same && len(conditions) == 0 && !beat {
		return nil
	}
	conditions = append(conditions, condition.After(old, config.ConditionGPUPartitionReady, r.Ready, string(r.Reason), r.Message, a.clock.Now()))
	if err := a.tellConditions(ctx, conditions); err != nil {
		return err
	}
	if news {
		a.log.Info("telling", zap.String("phase", string(r.Phase)), zap.String("reason", string(r.Reason)), zap.String("message", r.Message))
	}
	if news && !underway {
		a.eventf(seen.Node, eventType(r), r.Reason, "%s", r.Message)
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
func (a *Agent) statusOf(ctx context.Context, seen state.Observed, want state.Desired, r report.Report) (text string, full bool, err error) {
	if !seen.Complete {
		return "", false, nil
	}
	status := api.Status{
		Desired: want.Name, Phase: r.Phase, Reason: r.Reason, GPUs: report.GPUs(seen.GPUs),
		Capacity: capacity.Offered(seen.Kubelet.Offered).Summary(want.Plugin.SharingKnown()),
	}
	status.Failed, status.NoReset, status.Blockers = seen.Kept(want), seen.Refusal(), r.Blockers
	status.Left, status.Since = r.Left, seen.Since(r.Reason, a.now())
	if seen.Record.Status.Desired != want.Name { // tools tell by it what was said of a former wish
		status.Since = a.now()
	}
	if want.Name != "" {
		status.Label = want.Label
	}
	a.keep(&status, seen, want, r)
	published := hostrecord.PublishedBy(a.record.Now.Learnt) // this pass may have published others
	if a.record.Absent {
		published = seen.Record.Published
	}
	a.learn(ctx, hostrecord.LearntOf(status, published))
	text, fits, err := report.EncodeStatus(status, report.RoomFor(seen.Node, config.AnnotationStatus, report.StatusRoom))
	if err != nil || fits {
		return text, false, err
	}
	return "", true, nil
}

// tellState writes the state label, which tools wait for.
func (a *Agent) tellState(ctx context.Context, seen state.Observed, r report.Report) error {
	if a.outlived(seen, r) {
		return a.nodes.Patch(ctx, seen.Node, func(*corev1.Node) ([]byte, error) {
			return nodewrite.Metadata(map[string]*string{config.LabelMIGConfigState: nil}, nil)
		})
	}
	if !seen.Complete || r.State == "" || seen.Node.Labels[config.LabelMIGConfigState] == string(r.State) {
		return nil
	}
	state := string(r.State)
	labels := map[string]*string{config.LabelMIGConfigState: &state}
	return a.nodes.Patch(ctx, seen.Node, func(*corev1.Node) ([]byte, error) { return nodewrite.Metadata(labels, nil) })
}

// outlived reports whether the state label says that something has failed which nobody asks for any more. Tools that wait for the label have
// had the time of a heartbeat to see it; a success is still true, and a mig-manager's word is its own.
func (a *Agent) outlived(seen state.Observed, r report.Report) bool {
	return r.Phase == api.PhaseIdle && !r.Converged && r.State == "" && config.State(seen.Node.Labels[config.LabelMIGConfigState]) == config.StateFailed &&
		a.now().Sub(seen.Since(r.Reason, a.now())) >= a.settings.NodeHeartbeat && !seen.Leftovers.MIGManager
}

// tellMetadata writes the status annotation, unless there is none to write, and takes away those that are spent.
func (a *Agent) tellMetadata(ctx context.Context, seen state.Observed, r report.Report, text string) error {
	if !seen.Complete {
		return nil
	}
	annotations := map[string]*string{}
	if text != "" && seen.Node.Annotations[config.AnnotationStatus] != text {
		annotations[config.AnnotationStatus] = &text
	}
	if _, forced := seen.Node.Annotations[config.AnnotationForce]; forced && r.Phase == api.PhaseIdle {
		annotations[config.AnnotationForce] = nil // it was for this change, or for one that is wanted no more: the next one is to wait for its window
	}
	if len(annotations) == 0 {
		return nil
	}
	return a.nodes.Patch(ctx, seen.Node, func(*corev1.Node) ([]byte, error) { return nodewrite.Metadata(nil, annotations) })
}

// keep copies into the status what later changes need: the config that was last proven, the boot, and how long changes took.
func (a *Agent) keep(status *api.Status, seen state.Observed, want state.Desired, r report.Report) {
	status.Next, status.Proven, status.Cut, status.Took = r.Planned.UTC(), seen.Record.Status.Proven, seen.Record.Status.Cut, seen.Record.Status.Took
	if r.Converged {
		status.Proven, status.Cut = want.Fingerprint, ""
		if state.HasInstances(seen.GPUs) {
			status.Cut = seen.Boot.ID
		}
	}
	if a.record.Persisted != nil { // it was written after the look
		status.Proven, status.Took, a.record.Persisted = a.record.Persisted.Proven, a.record.Persisted.Took, nil
	}
	switch {
	case want.Fingerprint != "":
		status.Asked = &api.AskedFor{Wish: want.Fingerprint, Since: seen.Asked(want, a.now())}
	case want.Name != "": // what it means is not known as long as a file cannot be read
		status.Asked = seen.Record.Status.Asked
	}
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

// drainOf tells from the first step that is left how far the node is drained.
func drainOf(seen state.Observed, first plan.Step) report.DrainReport {
	if seen.Journal == nil || !seen.Journal.Cordoned {
		return report.DrainReport{}
	}
	draining := first.Traits().BeforePodsLeft
	return report.DrainReport{Draining: draining, Drained: !draining, Maintained: true}
}

// drainConditions are those conditions that differ from what the node shows. A node that was never drained has none.
func (a *Agent) drainConditions(node *corev1.Node, r report.Report) []corev1.NodeCondition {
	var out []corev1.NodeCondition
	for _, c := range []struct {
		kind   corev1.NodeConditionType
		is     bool
		reason string // of KEP-5683
	}{
		{config.ConditionDrainInProgress, r.Drain.Draining, "DrainStarted"},
		{config.ConditionDrained, r.Drain.Drained, "DrainCompleted"},
		{config.ConditionMaintenanceInProgress, r.Drain.Maintained, "Repartitioning"},
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
func (a *Agent) plannedCondition(seen state.Observed, want state.Desired, r report.Report) []corev1.NodeCondition {
	if !seen.Complete { // it was said after another look
		return nil
	}
	old := condition.Find(seen.Node, config.ConditionMaintenancePlanned)
	status, reason, message := corev1.ConditionFalse, "NotPlanned", "by "+nodewrite.FieldManager+": nothing waits for a window"
	if !r.Planned.IsZero() {
		status, reason = corev1.ConditionTrue, "MaintenanceWindow" // of KEP-5683
		message = fmt.Sprintf("by %s: the change to %s begins at %s", nodewrite.FieldManager, want.Name, zoned(r.Planned))
	}
	if old == nil && status == corev1.ConditionFalse || old != nil && old.Status == status && old.Message == message {
		return nil
	}
	return []corev1.NodeCondition{condition.After(old, config.ConditionMaintenancePlanned, status, reason, message, a.clock.Now())}
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

func eventType(r report.Report) string {
	if r.Ready == corev1.ConditionTrue || r.State == config.StatePending && !r.Blocked {
		return corev1.EventTypeNormal
	}
	return corev1.EventTypeWarning
}
