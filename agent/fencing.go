package agent

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// writeJournal writes the journal without a fence: for a change that disrupts nobody, to add to a journal that stands, or for what
// an agent has left without one.
func (a *Agent) writeJournal(ctx context.Context, seen observed, want desired, steps []plan.Step) error {
	if !want.undo && !seen.disruptionStarted() && plan.Disrupts(steps) {
		if err := a.preflight(ctx, seen, want, steps); err != nil {
			return err
		}
		if err := a.confirmSlot(ctx, seen, want); err != nil {
			return err
		}
	}
	if err := a.prepareSharing(ctx, seen, want, steps); err != nil {
		return err
	}
	j, err := a.journal(seen, want, steps)
	if err != nil {
		return err
	}
	if err := a.amend(ctx, seen, *j, seen.spent(*j)...); err != nil {
		return err
	}
	if left := seen.leftovers.orphan.String(); seen.journal == nil && left != "" {
		a.eventf(seen.node, corev1.EventTypeWarning, config.ReasonRecovering, "found without a journal, and to be given back: %s", left)
	}
	return nil
}

// raise fences the node, once it is known that the pods that must leave may do so. A node that cannot be drained stays
// schedulable.
func (a *Agent) raise(ctx context.Context, seen observed, want desired, steps []plan.Step) error {
	if !want.undo && !seen.disruptionStarted() {
		if err := a.preflight(ctx, seen, want, steps); err != nil {
			return err
		}
		if err := a.confirmSlot(ctx, seen, want); err != nil {
			return err
		}
	}
	j, err := a.journal(seen, want, steps)
	if err != nil {
		return err
	}
	if !j.Cordoned { // the deadlines count from the fence
		j.Started = a.now()
	}
	j.Cordoned, j.WasUnschedulable = true, seen.foreignCordon()
	if seen.marks.startup != nil {
		j.Startup = &journal.Startup{Value: seen.marks.startup.Value, Effect: string(seen.marks.startup.Effect)}
	}
	if _, err := a.recorded(ctx, seen, *j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Raise(node, text, seen.spent(*j)...)
	}); err != nil {
		return err
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonFencing, "cordoned for the change to %s: %s", want.name, legible.Counted(len(steps), "step"))
	return nil
}

// spent are the annotations that mean nothing any more once the journal is written.
func (s observed) spent(j journal.Journal) []string {
	if !j.Forced {
		return nil
	}
	return []string{config.AnnotationForce}
}

// disruptionStarted reports whether the change has begun to take something away. To wait for a better moment is too late then, and would
// have no end: deadlines count from the fence.
func (s observed) disruptionStarted() bool {
	return s.journal != nil && (s.journal.Cordoned || slices.ContainsFunc(s.pauses, s.pausedHere))
}

// preflight asks before the cordon whether the change can come to its end: whether nobody else works on the node, the pods may
// be evicted, no process would stay that nobody can send away, and there is anybody to prove the capacity.
func (a *Agent) preflight(ctx context.Context, seen observed, want desired, steps []plan.Step) error {
	const before = "nothing is disturbed before "
	if err := a.recordable(ctx, seen); err != nil {
		return err
	}
	if err := a.prepareSharing(ctx, seen, want, steps); err != nil {
		return err
	}
	wait := &outcome.Waiting{After: evictionRetry}
	busy, foreign, strangers := seen.holdersUnknown(), seen.atWork(), a.unownedProcesses(seen)
	if len(strangers) == 0 {
		a.clients.unowned = throttledNames{}
	}
	switch {
	case len(foreign) > 0:
		wait.Reason, wait.Blockers = config.ReasonOtherMaintenance, foreign
		wait.Advice = "the node is as it was meanwhile"
		wait.Message = before + "other tools are done with this node: " + strings.Join(foreign, "; ")
	case busy != nil && seen.kubelet.err != nil:
		wait.Reason, wait.Message = config.ReasonKubeletUnavailable, before+"kubelet says which pod has which device: "+seen.kubelet.err.Error()
		wait.Advice = "see the node's kubelet, by journalctl -u kubelet"
	case busy != nil:
		wait.Reason, wait.Message = config.ReasonHoldersUnknown, before+"the host's processes show who holds a GPU: "+seen.holders.err.Error()
	case seen.lacksDevicePlugin():
		wait.Reason, wait.Message, wait.Advice = config.ReasonNoDevicePlugin, before+"a device plugin runs here: "+noPluginOffers, a.devicePluginAdvice(seen)
	case len(strangers) > 0:
		strangers = a.clients.unowned.of(strangers, a.clock.Now())
		wait.Reason, wait.Blockers = config.ReasonGPUInUse, strangers
		wait.Message = before + "these processes end, which are of no pod and hold what is to go: " + listed(strangers)
		wait.Advice = "end them on the node, or stop their units"
	default:
		return a.drainable(ctx, seen, want, steps)
	}
	wait.Since = seen.since(wait.Reason, a.now())
	return wait
}

// drainable asks in a dry run whether the pods may be evicted.
func (a *Agent) drainable(ctx context.Context, seen observed, want desired, steps []plan.Step) error {
	for _, s := range steps {
		policy := drainPolicy(a.settingsFor(want))
		switch {
		case s.Kind == plan.Evict:
		case s.Kind == plan.PauseOperands && s.Label == "":
			policy = drain.Policy{} // no rule is for them
		default:
			continue
		}
		all, cancel := context.WithTimeout(ctx, evictionsTimeout)
		verdicts := a.evictor.DryRun(all, seen.drained(s.Pods), policy)
		cancel()
		blocked := blockedOf(verdicts)
		a.blockedBy(verdicts)
		if len(blocked) > 0 {
			return &outcome.Waiting{
				Reason: config.ReasonEvictionBlocked, For: outcome.ForRoom, After: evictionRetry, Blockers: blocked,
				Message: "nothing is disturbed before these pods may be evicted: " + listed(blocked),
				Since:   seen.since(config.ReasonEvictionBlocked, a.now()),
				Advice:  "the node stays schedulable meanwhile, and is looked at again when they change; to call the change off, remove the label",
			}
		}
	}
	return nil
}

// atWork names the other tools that work on the node, by what they have written on it. What one has only announced is no reason
// to wait, nor is what a mig-manager has left that is not there any more.
func (s observed) atWork() []string {
	return s.tools(func(m fence.Marker) bool {
		return !m.Planned && (m.Tool != fence.ToolMIGManager || s.leftovers.migManager)
	})
}

// cordoning names those that rely on the node's cordon.
func (s observed) cordoning() []string {
	return s.tools(func(m fence.Marker) bool { return m.Cordons })
}

func (s observed) tools(count func(fence.Marker) bool) []string {
	var out []string
	for _, m := range s.marks.tools {
		if count(m) {
			out = append(out, nameOf(m))
		}
	}
	return out
}

// nameOf says which tool it is, by what it is known, and what ends its work.
func nameOf(m fence.Marker) string {
	text := m.Tool + ", by " + m.Sign
	if !m.Since.IsZero() {
		text += ", since " + outcome.Moment(m.Since)
	}
	if m.Done != "" {
		text += " (" + m.Done + ")"
	}
	return text
}

// journal is what the steps will owe to the node: what is owed already, and what they add.
func (a *Agent) journal(seen observed, want desired, steps []plan.Step) (*journal.Journal, error) {
	j := &journal.Journal{
		Operation: cmp.Or(a.turn.claim, uuid.NewString()), BootID: seen.boot.id,
		Proven:  seen.capacity.proven || seen.leftovers.orphan.is(), // what was left is given back when it is seen to work
		Started: a.now(),
	}
	if seen.journal != nil {
		copied := *seen.journal
		j = &copied
		j.Previous, j.Parked = slices.Clone(j.Previous), false
	}
	if !want.undo && j.Target != want.name { // the deadlines count for each target
		j.Target, j.Started = want.name, a.now()
		j.NoReset, j.Reboots, j.RebootAsked, j.Forced = nil, nil, time.Time{}, seen.forces(want)
		clear(a.budget.attempts)
		a.times.touchedAt, a.times.provenAt = time.Time{}, time.Time{}
		if known := seen.refusal(); known != nil && known.Boot == seen.boot.id {
			j.NoReset = known
		}
	}
	if seen.edited(want) {
		j.Forced = seen.forces(want)
	}
	if !want.undo {
		j.Wish = want.fingerprint
	}
	for _, gpu := range seen.gpus {
		if slices.ContainsFunc(steps, func(s plan.Step) bool { return s.GPU == gpu.UUID && s.Traits().ShapesPlugin }) {
			j.RecordLayout(gpu)
		}
	}
	owe(j, seen, steps)
	if seen.journal == nil && steps[0].Kind == plan.Adopt {
		j.Undo = cmp.Or(seen.failed(want), want.left) // of which the former is not tried again
	}
	return j, a.notePlugin(j, seen, steps)
}

// notePlugin adds what the steps will change of the device plugin: what it has read of the GPUs, and its config.
func (a *Agent) notePlugin(j *journal.Journal, seen observed, steps []plan.Step) error {
	j.Strategy = seen.toldStrategy()
	shapes := plan.Any(steps, func(t plan.Traits) bool { return t.ShapesPlugin })
	if shapes {
		j.Operands = operandsOf(*j, seen.devicePlugin.pods)
	}
	changes := plan.Has(steps, plan.WriteSharing)
	if seen.plugin.method == "" || j.Plugin != nil && (!j.Plugin.Stays || !changes) {
		return nil
	}
	former, err := a.formerPlugin(seen)
	if err != nil {
		return err
	}
	former.Stays = !changes
	j.Plugin = former
	return nil
}

// operandsOf are the UIDs of the plugin's pods for the journal: those that it has of pods that are there, and those that have come since. One that
// is gone never comes back, and any number of them may come and go while others are waited for.
func operandsOf(j journal.Journal, pods []corev1.Pod) []string {
	var out []string
	for _, uid := range j.Operands {
		if slices.ContainsFunc(pods, func(p corev1.Pod) bool { return string(p.UID) == uid }) {
			out = append(out, uid)
		}
	}
	for _, pod := range pods {
		if !j.RanBefore(string(pod.UID)) {
			out = append(out, string(pod.UID))
		}
	}
	return out
}

// owe notes what the steps take from operands and units, and what an agent has left on the node without a journal.
func owe(j *journal.Journal, seen observed, steps []plan.Step) {
	paused := maps.Clone(seen.leftovers.orphan.labels)
	if paused == nil {
		paused = map[string]string{}
	}
	j.Stopped = slices.Clone(j.Stopped)
	for _, s := range steps {
		switch {
		case s.Kind == plan.PauseOperands && s.Label != "" && seen.node.Labels[s.Label] != fence.PausedValue:
			paused[s.Label] = seen.node.Labels[s.Label]
		case s.Kind == plan.StopUnits && !slices.Contains(j.Stopped, s.Unit):
			j.Stopped = append(j.Stopped, s.Unit)
		}
	}
	for label, value := range j.Paused { // what it holds already was there first
		paused[label] = value
	}
	j.Paused = paused
	for _, unit := range seen.leftovers.orphan.host.Stopped {
		if !slices.Contains(j.Stopped, unit) {
			j.Stopped = append(j.Stopped, unit)
		}
	}
	for _, gpu := range seen.leftovers.orphan.host.Persistent {
		if !slices.Contains(j.Persistent, gpu) {
			j.Persistent = append(slices.Clone(j.Persistent), gpu)
		}
	}
	if seen.leftovers.orphan.cordon {
		j.Cordoned, j.WasUnschedulable = true, false
	}
}

// resume takes the taint away and leaves the cordon. An administrator who had cordoned the node before us and has
// uncordoned it since wants it back: the journal is told, so that the end leaves no cordon. Without a journal nothing is
// owed, and the taint is all that is ours.
func (a *Agent) resume(ctx context.Context, seen observed) error {
	if seen.journal == nil {
		return a.nodes.Patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) { return a.fence.Lift(node, false) })
	}
	if seen.journal.WasUnschedulable && !seen.node.Spec.Unschedulable {
		j := *seen.journal
		j.WasUnschedulable = false
		return a.amend(ctx, seen, j)
	}
	// Who has uncordoned the node to call the change off wants no cordon in its place, unless pods would meet GPUs that are
	// not there yet.
	if undo := seen.journal.Undo; undo != nil && undo.Cancelled && len(seen.capacity.missing) == 0 {
		return a.nodes.Patch(ctx, seen.node, a.fence.Uncover)
	}
	return a.nodes.Patch(ctx, seen.node, a.fence.Open)
}

// release gives the node back. A node that has just been registered and is not ready goes on keeping pods away.
func (a *Agent) release(ctx context.Context, seen observed, want desired) error {
	if a.times.provenAt.IsZero() { // what others keep the node for after that is no time that the change takes
		a.times.provenAt = a.clock.Now()
	}
	uncordon := seen.journal.Cordoned && !seen.foreignCordon()
	if foreign := seen.cordoning(); uncordon && len(foreign) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: evictionRetry, Blockers: foreign,
			Message: "the GPUs are as they should be; the node is uncordoned when other tools are done with it: " + strings.Join(foreign, "; "),
			Since:   seen.since(config.ReasonOtherMaintenance, a.now()),
		}
	}
	if seen.journal.Plugin != nil {
		a.tidySharing(ctx, seen)
	}
	a.learnForGood(ctx, seen, want)
	a.record.release(ctx, a.clock.Now())
	err := a.nodes.Patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) {
		if startup := seen.journal.Startup; startup != nil && want.undo && want.name != "" {
			return a.fence.LiftUnready(node, uncordon, startup.Taint())
		}
		return a.fence.Lift(node, uncordon)
	})
	if err != nil {
		return err
	}
	a.record.over(ctx, a.clock.Now())
	a.endTurn(ctx, seen, want)
	a.times.touchedAt, a.times.provenAt = time.Time{}, time.Time{}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonReleased, "node given back after %s, %s",
		a.clock.Since(seen.journal.Started).Round(time.Second), capacity.Offered(seen.kubelet.offered).Summary(want.plugin.sharingKnown()))
	return nil
}

// learnForGood keeps in the host's record what only the journal and this process know, before the node is given back: a restarted agent must
// not try again what has failed, nor restore what was before.
func (a *Agent) learnForGood(ctx context.Context, seen observed, want desired) {
	status := seen.record.status
	failed := seen.journal.Undo
	if failed != nil && !failed.Later && want.undo && (status.Failed == nil || status.Failed.Wish != failed.Wish) {
		status.Failed = failed
	}
	status.NoReset = seen.refusal()
	if !want.undo {
		status.Proven, status.Took = want.fingerprint, a.measured(seen)
	}
	a.record.persisted = &status
	a.learn(ctx, learntOf(status, seen.record.published))
}

// giveUp keeps a failure in the journal: from now on the way is back.
func (a *Agent) giveUp(ctx context.Context, seen observed, want desired, failure *api.Failure) time.Duration {
	j := *seen.journal
	j.Undo, j.Parked = failure, false
	if err := a.amend(ctx, seen, j); err != nil {
		a.log.Warn("recording the failure", zap.Error(err))
		return a.settings.Retry.First
	}
	a.countFailure(ctx, seen, failure)
	a.verification.began = time.Time{}
	clear(a.budget.attempts)
	clear(a.budget.successes)
	a.log.Warn("change given up", zap.String("target", want.name), zap.String("reason", string(failure.Reason)), zap.String("message", failure.Message))
	a.eventf(seen.node, corev1.EventTypeWarning, failure.Reason, "%s: %s; going back to what was before", want.name, failure.Message)
	return 0
}
