package report

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Source has conditions of its own, and a part of the status.
type Source interface {
	// Conditions returns the conditions that differ from those on the node, or, on beat, all. Complete means that the pass has observed all
	// of the node; silent says why the agent can say nothing about the GPUs, or is empty.
	Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition
	// Report adds to the status.
	Report(status *api.Status)
}

// Writer writes the reports of one node.
type Writer struct {
	Node     string // its name
	Nodes    nodewrite.Writer
	Journal  *journal.Writer
	Record   *journal.Keeper
	Sources  []Source
	Settings config.Settings
	Events   events.Recorder
	Metrics  *metrics.Metrics
	Wall     clock.PassiveClock // the host's; windows open by it
	Clock    *monotonic.Clock
	Log      *zap.Logger

	WrongSettings string // why the agent does not use the file of the settings; empty if it does

	reported   time.Time // when the agent last reported of a change under way; zero if there is none
	unreported time.Time // since when the node's report lags behind a change; zero if it does not
	shown      shown     // the status annotation that the agent has last written
	ignored    []note    // what ReportIgnored has reported at the last pass
	overran    string    // operation with a reported overrun of its window
}

// How long a report may lag behind a change with quick steps: each report takes three writes, and the next step would wait for them.
const (
	progressInterval = time.Second
	countInterval    = 5 * time.Second // if only the number of steps that are left is news
)

// heldInterval is the least time between two writes of the status if only the pods in it are news. Jobs of a few seconds come and go all the time, and each
// write of the node goes to all that watch nodes.
const heldInterval = 5 * time.Second

// encoded is a status annotation, with and without its pods.
type encoded struct{ text, rest string }

// shown is a status annotation on the node.
type shown struct {
	encoded
	at time.Time
	// lags: the pods of the last status differ, and wait.
	lags bool
}

// LagsFor returns how long the pods of the status still wait to be written; 0 if they do not.
func (w *Writer) LagsFor() time.Duration {
	if !w.shown.lags {
		return 0
	}
	return max(time.Millisecond, heldInterval-w.Clock.Since(w.shown.at))
}

// isDue reports whether the status has to be written now. It may wait if it differs from the one on the node by the pods alone, and the agent has written that
// a moment ago. A clock that was set back shortens the wait.
func (w *Writer) isDue(node *corev1.Node, status encoded) bool {
	old, age := node.Annotations[config.AnnotationStatus], w.Clock.Since(w.shown.at)
	news := status.text != "" && old != status.text
	w.shown.lags = news && old == w.shown.text && status.rest == w.shown.rest && age >= 0 && age < heldInterval
	return news && !w.shown.lags
}

// Report writes whatever differs from what the node shows already. While a change is underway, its next step follows at once.
func (w *Writer) Report(ctx context.Context, seen *state.Observed, want state.Desired, r Report, underway bool) error {
	if underway && w.mayWait(seen, r) {
		return nil
	}
	w.reported, w.unreported = time.Time{}, time.Time{}
	if seen.Journal != nil {
		w.reported = w.Clock.Now()
	}
	status, full, err := w.status(ctx, seen, want, r)
	if err != nil {
		return err
	}
	if full {
		r.Message = sanitize.Message(r.Message, sanitize.Longest-len(noRoom)) + noRoom
	}
	// Each has its own write, and the annotation is last: if other programs have filled the annotations, the agent still writes the condition.
	return errors.Join(w.answer(ctx, seen, want, r, underway), w.annotations(ctx, seen, want, r, status))
}

// answer writes the state label and the condition. Who waits for the label's success and looks at the condition then finds it True; any other answer
// is in the label first.
func (w *Writer) answer(ctx context.Context, seen *state.Observed, want state.Desired, r Report, underway bool) error {
	if r.State != config.StateSuccess {
		return errors.Join(w.stateLabel(ctx, seen, r), w.condition(ctx, seen, want, r, underway))
	}
	if err := w.condition(ctx, seen, want, r, underway); err != nil {
		return err
	}
	return w.stateLabel(ctx, seen, r)
}

// mayWait reports whether a report of a change under way may wait. It may not before a step that carries out a part of the request: kubelet may show
// the new capacity at once. Tools would then take a condition that is still True for the end of the change. Nor may it while kubelet allocates a
// pod's devices to others.
func (w *Writer) mayWait(seen *state.Observed, r Report) bool {
	old := PartitionReady(seen.Node)
	if old == nil || old.Status == corev1.ConditionTrue && len(seen.Capacity.Withdrawn) > 0 {
		return false
	}
	now, last, pause := w.Clock.Now(), w.reported, progressInterval
	if w.unreported.IsZero() {
		w.unreported = now
	}
	switch {
	case r.Left == 0 || last.IsZero(): // the end, or the beginning
		last = w.unreported
	case old.Reason == string(r.Reason):
		last, pause = old.LastHeartbeatTime.Time, countInterval
	}
	return now.Sub(last) < pause && !(r.BeforeTarget && old.Reason != string(r.Reason))
}

// condition writes the conditions that differ from what the node shows already.
func (w *Writer) condition(ctx context.Context, seen *state.Observed, want state.Desired, r Report, underway bool) error {
	old := PartitionReady(seen.Node)
	if old == nil {
		old = &corev1.NodeCondition{}
	}
	age := w.Clock.Since(old.LastHeartbeatTime.Time)
	news := old.Reason != string(r.Reason)
	same := !news && old.Status == r.Ready && old.Message == r.Message
	// A record that was lost does not say since when the condition's reason is so. For tools, a status is never newer than the condition.
	late := w.Record.Now().Learnt.Reported.Since.Truncate(time.Second).After(old.LastHeartbeatTime.Time)
	beat := late || w.heartbeatDue(age)
	conditions := slices.Concat(w.drainConditions(seen.Node, r), w.plannedCondition(seen, want, r))
	for _, source := range w.Sources {
		conditions = append(conditions, source.Conditions(seen.Node, seen.Complete, r.Silent(), beat)...)
	}
	if same && len(conditions) == 0 && !beat {
		return nil
	}
	conditions = append(conditions, After(old, config.ConditionGPUPartitionReady, r.Ready, r.Reason, r.Message, w.Clock.Now()))
	if err := w.Nodes.Conditions(ctx, w.Node, conditions); err != nil {
		return err
	}
	if news {
		w.Log.Info("reporting", zap.String("phase", string(r.Phase)), zap.String("reason", string(r.Reason)), zap.String("message", r.Message))
	}
	if news && !underway {
		w.Events.Node(w.Node, events.Reported(eventType(r), r.Reason, r.Message))
	}
	return nil
}

// heartbeatDue reports whether the agent has to write unchanged conditions again. Their time is in the future if the clock was set back.
func (w *Writer) heartbeatDue(age time.Duration) bool {
	return age >= w.Settings.NodeHeartbeat || age < -monotonic.StepNoticed
}

// status returns the status annotation, and whether there is no room for it. After an observation that ended early it returns none, so that the status
// of an earlier observation stays. It also writes what later changes need into the host's record.
func (w *Writer) status(ctx context.Context, seen *state.Observed, want state.Desired, r Report) (out encoded, full bool, err error) {
	if !seen.Complete {
		return encoded{}, false, nil
	}
	status := api.Status{
		Desired: want.Name, Phase: r.Phase, Reason: r.Reason, GPUs: GPUs(seen.GPUs), Owner: seen.Owner.OfDRA(),
		Capacity: offer.Of(seen).Text(want), Models: Models(seen.GPUs), Held: held(decide.Holdings(seen)),
	}
	learnt := w.learnt(seen, want, r)
	status.Left, status.Since, status.Next, status.Blockers = r.Left, learnt.Reported.Since, r.Planned.UTC(), r.Blockers
	status.Until, status.Then = r.Until.UTC().Truncate(time.Second), r.Then // as the message has it: the same wait is no news
	status.Failed, status.Asked = learnt.Failed, learnt.Asked
	if want.Name != "" {
		status.Label, status.ByDefault = want.Label, ByDefault(seen.Node, want)
	}
	if w.Settings.NodeHeartbeat != config.DefaultNodeHeartbeat {
		status.Heartbeat = api.Duration(w.Settings.NodeHeartbeat)
	}
	if stale := capacity.StaleResources(seen.Kubelet.Offered, seen.Node.Status.Allocatable); r.Converged {
		status.StaleResources = stale[:min(len(stale), mostBlockers)]
	}
	for _, source := range w.Sources {
		source.Report(&status)
	}
	learnt.FullMemory = status.FullMemory
	w.Journal.Learn(ctx, learnt)
	room := RoomFor(seen.Node, config.AnnotationStatus, StatusRoom)
	text, fits, err := EncodeStatus(status, room)
	if err != nil || !fits {
		return encoded{}, err == nil, err
	}
	status.Held = nil
	rest, _, err := EncodeStatus(status, room)
	return encoded{text, rest}, false, err
}

// stateLabel writes the state label, which tools wait for. It answers one request: if a user has made another request since, tools would take the
// label for its answer, so the agent does not write it.
func (w *Writer) stateLabel(ctx context.Context, seen *state.Observed, r Report) error {
	if w.stateLabelStale(seen, r) {
		return w.Nodes.LabelsWhile(ctx, seen.Node, sameRequest, map[string]*string{config.LabelMIGConfigState: nil})
	}
	if !seen.Complete || r.State == "" || seen.Node.Labels[config.LabelMIGConfigState] == string(r.State) {
		return nil
	}
	state := string(r.State)
	return w.Nodes.LabelsWhile(ctx, seen.Node, sameRequest, map[string]*string{config.LabelMIGConfigState: &state})
}

// sameRequest reports whether the node's labels have the same request and the same answer. A user removes the answer to get a new one.
func sameRequest(a, b *corev1.Node) bool {
	for _, label := range append(config.RequestLabels(), config.LabelMIGConfigState) {
		textA, isA := a.Labels[label]
		if textB, isB := b.Labels[label]; textA != textB || isA != isB {
			return false
		}
	}
	return a.UID == b.UID
}

// stateLabelStale reports whether the state label reports the failure of a withdrawn request. Tools that wait for the label have had the time of a
// heartbeat to see it; a success is still true, and a mig-manager's label is its own.
func (w *Writer) stateLabelStale(seen *state.Observed, r Report) bool {
	return r.Phase == api.PhaseIdle && !r.Converged && r.State == "" && config.State(seen.Node.Labels[config.LabelMIGConfigState]) == config.StateFailed &&
		w.Clock.Stamp().Sub(seen.Since(r.Reason, w.Clock.Stamp())) >= w.Settings.NodeHeartbeat && !seen.Leftovers.MIGManager
}

// annotations writes the status annotation, unless it is empty or may wait, and removes users' annotations that have served.
func (w *Writer) annotations(ctx context.Context, seen *state.Observed, want state.Desired, r Report, status encoded) error {
	w.shown.lags = false
	if !seen.Complete {
		return nil
	}
	annotations := map[string]*string{}
	if w.isDue(seen.Node, status) {
		annotations[config.AnnotationStatus] = &status.text
	}
	_, forced := seen.Node.Annotations[config.AnnotationForce]
	if forced && (r.Phase == api.PhaseIdle || seen.Older(config.AnnotationForce)) {
		annotations[config.AnnotationForce] = nil // it was for this change or a withdrawn one: the next change has to wait for its window
	}
	// That change has ended; the next request has to be allowed again.
	ended := r.Phase == api.PhaseIdle || seen.Journal == nil && seen.Failed(want) != nil
	_, allowed := seen.Node.Annotations[config.AnnotationAllowEviction]
	if allowed && (ended || seen.Older(config.AnnotationAllowEviction)) {
		annotations[config.AnnotationAllowEviction] = nil
	}
	if len(annotations) == 0 {
		return nil
	}
	err := w.Nodes.Patch(ctx, seen.Node, func(*corev1.Node) ([]byte, error) { return nodewrite.Annotations(annotations) })
	if err == nil && annotations[config.AnnotationStatus] != nil {
		w.shown = shown{encoded: status, at: w.Clock.Now()}
	}
	return err
}

// learnt returns what later changes need to know, and what the agent reports now. It begins with the present record: the pass may have written it
// after observing the node.
func (w *Writer) learnt(seen *state.Observed, want state.Desired, r Report) journal.Learnt {
	l := w.Record.Now().Learnt
	l.Failed, l.NoReset = seen.ReportedFailure(want), seen.Refusal()
	switch {
	case r.Converged:
		noteVerified(&l, seen, want)
	case seen.Journal == nil && !seen.RebootedSinceVerified(): // another program may have cut a GPU
		l.Layouts = withoutPresent(l.Layouts, seen, func(was journal.GPULayout, gpu nvml.GPU) bool { return !was.Matches(gpu) })
	}
	if l.Asked == nil || want.Name != l.Reported.Desired || want.Fingerprint != "" && want.Fingerprint != l.Asked.Fingerprint {
		l.Foreign = nil // a user has changed the request, though perhaps to one that names nothing
	}
	now := w.Clock.Stamp()
	switch {
	case want.Fingerprint != "":
		l.Asked = &api.AskedFor{Fingerprint: want.Fingerprint, Since: seen.AskedSince(want, now)}
	case want.Name == "": // a name without a fingerprint: a file cannot be read
		l.Asked = nil
	}
	// Tools see by Since which reports are about a former request.
	if was := l.Reported; was.Desired != want.Name || was.Reason != r.Reason || was.Since.IsZero() || was.Since.After(now) {
		l.Reported.Since = now
	}
	l.Reported.Desired, l.Reported.Phase, l.Reported.Reason = want.Name, r.Phase, r.Reason
	return l
}

// noteVerified notes that the agent has verified the desired state, and the layouts that a reboot would take.
func noteVerified(l *journal.Learnt, seen *state.Observed, want state.Desired) {
	l.Verified, l.Boot, l.Cut = want.Fingerprint, seen.Boot.ID, ""
	l.Layouts = withoutPresent(l.Layouts, seen, func(journal.GPULayout, nvml.GPU) bool { return true })
	if l.Foreign != nil {
		l.Foreign = &journal.Foreign{Repeats: l.Foreign.Repeats}
	}
	if seen.Owner.Kind == api.OwnerDRADynamic { // NVIDIA's DRA driver makes and destroys the instances there
		return
	}
	for _, gpu := range seen.GPUs {
		if gpu.Enabled && !gpu.Lost {
			l.Layouts = append(l.Layouts, journal.LayoutOf(gpu))
		}
	}
	if state.HasInstances(seen.GPUs) {
		l.Cut = seen.Boot.ID
	}
}

// withoutPresent returns the layouts without those of present GPUs that such holds for. A GPU that is lost may come back, and keeps its own.
func withoutPresent(layouts []journal.GPULayout, seen *state.Observed, such func(was journal.GPULayout, gpu nvml.GPU) bool) []journal.GPULayout {
	return slices.DeleteFunc(slices.Clone(layouts), func(was journal.GPULayout) bool {
		gpu, is := seen.GPU(was.GPU)
		return is && !gpu.Lost && such(was, gpu)
	})
}

// drainConditions returns the conditions of KEP-5683 that differ from those on the node. A node that was never drained has none.
func (w *Writer) drainConditions(node *corev1.Node, r Report) []corev1.NodeCondition {
	if !r.Drain.Known {
		return nil
	}
	var out []corev1.NodeCondition
	for _, c := range []struct {
		kind   corev1.NodeConditionType
		is     bool
		reason config.Reason
	}{
		{config.ConditionDrainInProgress, r.Drain.Draining, config.ReasonDrainStarted},
		{config.ConditionDrained, r.Drain.Drained, config.ReasonDrainCompleted},
		{config.ConditionMaintenanceInProgress, r.Drain.Maintained, config.ReasonMaintenanceStarted},
	} {
		old := Find(node, c.kind)
		status, reason := corev1.ConditionFalse, config.ReasonNotInMaintenance
		if c.is {
			status, reason = corev1.ConditionTrue, c.reason
		}
		if old == nil && !c.is || old != nil && old.Status == status {
			continue
		}
		out = append(out, After(old, c.kind, status, reason, "by "+config.FieldManager+", see condition "+config.ConditionGPUPartitionReady, w.Clock.Now()))
	}
	return out
}

// plannedCondition returns the condition that says when a change begins that waits for its window.
func (w *Writer) plannedCondition(seen *state.Observed, want state.Desired, r Report) []corev1.NodeCondition {
	if !seen.Complete { // an earlier, complete observation has set it
		return nil
	}
	old := Find(seen.Node, config.ConditionMaintenancePlanned)
	status, reason, message := corev1.ConditionFalse, config.ReasonNotPlanned, "by "+config.FieldManager+": nothing waits for a window"
	if !r.Planned.IsZero() {
		status, reason = corev1.ConditionTrue, config.ReasonMaintenanceWindow
		message = fmt.Sprintf("by %s: the change to %s begins at %s", config.FieldManager, want.Name, outcome.Zoned(r.Planned))
	}
	if old == nil && status == corev1.ConditionFalse || old != nil && old.Status == status && old.Message == message {
		return nil
	}
	return []corev1.NodeCondition{After(old, config.ConditionMaintenancePlanned, status, reason, message, w.Clock.Now())}
}

func eventType(r Report) string {
	if r.Ready == corev1.ConditionTrue || r.State == config.StatePending && !r.ForRoom {
		return corev1.EventTypeNormal
	}
	return corev1.EventTypeWarning
}

// noRoom is the end of the message if other programs have filled the node's annotations.
const noRoom = "; annotation " + config.AnnotationStatus + " is out of date, since the annotations of this node are full"
