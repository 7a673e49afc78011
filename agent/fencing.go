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
	"github.com/gpuslice/gpuslice/agent/drainpolicy"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// writeJournal writes the journal without a fence: for a change that disrupts nobody, to add to a journal that stands, or for what
// an agent has left without one.
func (a *Agent) writeJournal(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	if !want.Undo && !seen.DisruptionStarted() && plan.Disrupts(steps) {
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
	if err := a.amend(ctx, seen, *j, seen.Spent(*j)...); err != nil {
		return err
	}
	if left := seen.Leftovers.Orphan.String(); seen.Journal == nil && left != "" {
		a.eventf(seen.Node, corev1.EventTypeWarning, config.ReasonRecovering, "found without a journal, and to be given back: %s", left)
	}
	return nil
}

// raise fences the node, once it is known that the pods that must leave may do so. A node that cannot be drained stays
// schedulable.
func (a *Agent) raise(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	if !want.Undo && !seen.DisruptionStarted() {
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
	j.Cordoned, j.WasUnschedulable = true, seen.ForeignCordon()
	if seen.Marks.Startup != nil {
		j.Startup = &journal.Startup{Value: seen.Marks.Startup.Value, Effect: string(seen.Marks.Startup.Effect)}
	}
	if _, err := a.recorded(ctx, seen, *j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Raise(node, text, seen.Spent(*j)...)
	}); err != nil {
		return err
	}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonFencing, "cordoned for the change to %s: %s", want.Name, legible.Counted(len(steps), "step"))
	return nil
}

// preflight asks before the cordon whether the change can come to its end: whether nobody else works on the node, the pods may
// be evicted, no process would stay that nobody can send away, and there is anybody to prove the capacity.
func (a *Agent) preflight(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	const before = "nothing is disturbed before "
	if err := a.recordable(ctx, seen); err != nil {
		return err
	}
	if err := a.prepareSharing(ctx, seen, want, steps); err != nil {
		return err
	}
	wait := &outcome.Waiting{After: outcome.EvictionRetry}
	busy, foreign, strangers := seen.HoldersUnknown(), seen.AtWork(), a.unownedProcesses(seen)
	if len(strangers) == 0 {
		a.clients.unowned = throttledNames{}
	}
	switch {
	case len(foreign) > 0:
		wait.Reason, wait.Blockers = config.ReasonOtherMaintenance, foreign
		wait.Advice = "the node is as it was meanwhile"
		wait.Message = before + "other tools are done with this node: " + strings.Join(foreign, "; ")
	case busy != nil && seen.Kubelet.Err != nil:
		wait.Reason, wait.Message = config.ReasonKubeletUnavailable, before+"kubelet says which pod has which device: "+seen.Kubelet.Err.Error()
		wait.Advice = "see the node's kubelet, by journalctl -u kubelet"
	case busy != nil:
		wait.Reason, wait.Message = config.ReasonHoldersUnknown, before+"the host's processes show who holds a GPU: "+seen.Holders.Err.Error()
	case seen.LacksDevicePlugin():
		wait.Reason, wait.Message, wait.Advice = config.ReasonNoDevicePlugin, before+"a device plugin runs here: "+state.NoPluginOffers, a.devicePluginAdvice(seen)
	case len(strangers) > 0:
		strangers = a.clients.unowned.of(strangers, a.clock.Now())
		wait.Reason, wait.Blockers = config.ReasonGPUInUse, strangers
		wait.Message = before + "these processes end, which are of no pod and hold what is to go: " + legible.Listed(strangers)
		wait.Advice = "end them on the node, or stop their units"
	default:
		return a.drainable(ctx, seen, want, steps)
	}
	wait.Since = seen.Since(wait.Reason, a.now())
	return wait
}

// drainable asks in a dry run whether the pods may be evicted.
func (a *Agent) drainable(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	for _, s := range steps {
		policy := drainpolicy.From(a.settingsFor(want))
		switch {
		case s.Kind == plan.Evict:
		case s.Kind == plan.PauseOperands && s.Label == "":
			policy = drain.Policy{} // no rule is for them
		default:
			continue
		}
		all, cancel := context.WithTimeout(ctx, evictionsTimeout)
		verdicts := a.evictor.DryRun(all, seen.Drained(s.Pods), policy)
		cancel()
		blocked := blockedOf(verdicts)
		a.wakes.BlockedBy(verdicts)
		if len(blocked) > 0 {
			return &outcome.Waiting{
				Reason: config.ReasonEvictionBlocked, For: outcome.ForRoom, After: outcome.EvictionRetry, Blockers: blocked,
				Message: "nothing is disturbed before these pods may be evicted: " + legible.Listed(blocked),
				Since:   seen.Since(config.ReasonEvictionBlocked, a.now()),
				Advice:  "the node stays schedulable meanwhile, and is looked at again when they change; to call the change off, remove the label",
			}
		}
	}
	return nil
}

// journal is what the steps will owe to the node: what is owed already, and what they add.
func (a *Agent) journal(seen state.Observed, want state.Desired, steps []plan.Step) (*journal.Journal, error) {
	j := &journal.Journal{
		Operation: cmp.Or(a.turn.claim, uuid.NewString()), BootID: seen.Boot.ID,
		Proven:  seen.Capacity.Proven || seen.Leftovers.Orphan.Is(), // what was left is given back when it is seen to work
		Started: a.now(),
	}
	if seen.Journal != nil {
		copied := *seen.Journal
		j = &copied
		j.Previous, j.Parked = slices.Clone(j.Previous), false
	}
	if !want.Undo && j.Target != want.Name { // the deadlines count for each target
		j.Target, j.Started = want.Name, a.now()
		j.NoReset, j.Reboots, j.RebootAsked, j.Forced = nil, nil, time.Time{}, seen.Forces(want)
		clear(a.budget.Attempts)
		a.times.touchedAt, a.times.provenAt = time.Time{}, time.Time{}
		if known := seen.Refusal(); known != nil && known.Boot == seen.Boot.ID {
			j.NoReset = known
		}
	}
	if seen.Edited(want) {
		j.Forced = seen.Forces(want)
	}
	if !want.Undo {
		j.Wish = want.Fingerprint
	}
	for _, gpu := range seen.GPUs {
		if slices.ContainsFunc(steps, func(s plan.Step) bool { return s.GPU == gpu.UUID && s.Traits().ShapesPlugin }) {
			j.RecordLayout(gpu)
		}
	}
	owe(j, seen, steps)
	if seen.Journal == nil && steps[0].Kind == plan.Adopt {
		j.Undo = cmp.Or(seen.Failed(want), want.Left) // of which the former is not tried again
	}
	return j, a.notePlugin(j, seen, steps)
}

// notePlugin adds what the steps will change of the device plugin: what it has read of the GPUs, and its config.
func (a *Agent) notePlugin(j *journal.Journal, seen state.Observed, steps []plan.Step) error {
	j.Strategy = seen.ExplicitStrategy()
	shapes := plan.Any(steps, func(t plan.Traits) bool { return t.ShapesPlugin })
	if shapes {
		j.Operands = operandsOf(*j, seen.DevicePlugin.Pods)
	}
	changes := plan.Has(steps, plan.WriteSharing)
	if seen.Plugin.Method == "" || j.Plugin != nil && (!j.Plugin.Stays || !changes) {
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
func owe(j *journal.Journal, seen state.Observed, steps []plan.Step) {
	paused := maps.Clone(seen.Leftovers.Orphan.Labels)
	if paused == nil {
		paused = map[string]string{}
	}
	j.Stopped = slices.Clone(j.Stopped)
	for _, s := range steps {
		switch {
		case s.Kind == plan.PauseOperands && s.Label != "" && seen.Node.Labels[s.Label] != fence.PausedValue:
			paused[s.Label] = seen.Node.Labels[s.Label]
		case s.Kind == plan.StopUnits && !slices.Contains(j.Stopped, s.Unit):
			j.Stopped = append(j.Stopped, s.Unit)
		}
	}
	for label, value := range j.Paused { // what it holds already was there first
		paused[label] = value
	}
	j.Paused = paused
	for _, unit := range seen.Leftovers.Orphan.Host.Stopped {
		if !slices.Contains(j.Stopped, unit) {
			j.Stopped = append(j.Stopped, unit)
		}
	}
	for _, gpu := range seen.Leftovers.Orphan.Host.Persistent {
		if !slices.Contains(j.Persistent, gpu) {
			j.Persistent = append(slices.Clone(j.Persistent), gpu)
		}
	}
	if seen.Leftovers.Orphan.Cordon {
		j.Cordoned, j.WasUnschedulable = true, false
	}
}

// resume takes the taint away and leaves the cordon. An administrator who had cordoned the node before us and has
// uncordoned it since wants it back: the journal is told, so that the end leaves no cordon. Without a journal nothing is
// owed, and the taint is all that is ours.
func (a *Agent) resume(ctx context.Context, seen state.Observed) error {
	if seen.Journal == nil {
		return a.nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return a.fence.Lift(node, false) })
	}
	if seen.Journal.WasUnschedulable && !seen.Node.Spec.Unschedulable {
		j := *seen.Journal
		j.WasUnschedulable = false
		return a.amend(ctx, seen, j)
	}
	// Who has uncordoned the node to call the change off wants no cordon in its place, unless pods would meet GPUs that are
	// not there yet.
	if undo := seen.Journal.Undo; undo != nil && undo.Cancelled && len(seen.Capacity.Missing) == 0 {
		return a.nodes.Patch(ctx, seen.Node, a.fence.Uncover)
	}
	return a.nodes.Patch(ctx, seen.Node, a.fence.Open)
}

// release gives the node back. A node that has just been registered and is not ready goes on keeping pods away.
func (a *Agent) release(ctx context.Context, seen state.Observed, want state.Desired) error {
	if a.times.provenAt.IsZero() { // what others keep the node for after that is no time that the change takes
		a.times.provenAt = a.clock.Now()
	}
	uncordon := seen.Journal.Cordoned && !seen.ForeignCordon()
	if foreign := seen.Cordoning(); uncordon && len(foreign) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Blockers: foreign,
			Message: "the GPUs are as they should be; the node is uncordoned when other tools are done with it: " + strings.Join(foreign, "; "),
			Since:   seen.Since(config.ReasonOtherMaintenance, a.now()),
		}
	}
	if seen.Journal.Plugin != nil {
		a.tidySharing(ctx, seen)
	}
	a.learnForGood(ctx, seen, want)
	a.record.Release(ctx, a.clock.Now())
	err := a.nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) {
		if startup := seen.Journal.Startup; startup != nil && want.Undo && want.Name != "" {
			return a.fence.LiftUnready(node, uncordon, startup.Taint())
		}
		return a.fence.Lift(node, uncordon)
	})
	if err != nil {
		return err
	}
	a.record.Over(ctx, a.clock.Now())
	a.endTurn(ctx, seen, want)
	a.times.touchedAt, a.times.provenAt = time.Time{}, time.Time{}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonReleased, "node given back after %s, %s",
		a.clock.Since(seen.Journal.Started).Round(time.Second), capacity.Offered(seen.Kubelet.Offered).Summary(want.Plugin.SharingKnown()))
	return nil
}

// learnForGood keeps in the host's record what only the journal and this process know, before the node is given back: a restarted agent must
// not try again what has failed, nor restore what was before.
func (a *Agent) learnForGood(ctx context.Context, seen state.Observed, want state.Desired) {
	status := seen.Record.Status
	failed := seen.Journal.Undo
	if failed != nil && !failed.Later && want.Undo && (status.Failed == nil || status.Failed.Wish != failed.Wish) {
		status.Failed = failed
	}
	status.NoReset = seen.Refusal()
	if !want.Undo {
		status.Proven, status.Took = want.Fingerprint, a.measured(seen)
	}
	a.record.Persisted = &status
	a.learn(ctx, hostrecord.LearntOf(status, seen.Record.Published))
}

// giveUp keeps a failure in the journal: from now on the way is back.
func (a *Agent) giveUp(ctx context.Context, seen state.Observed, want state.Desired, failure *api.Failure) time.Duration {
	j := *seen.Journal
	j.Undo, j.Parked = failure, false
	if err := a.amend(ctx, seen, j); err != nil {
		a.log.Warn("recording the failure", zap.Error(err))
		return a.settings.Retry.First
	}
	a.countFailure(ctx, seen, failure)
	a.verification.began = time.Time{}
	clear(a.budget.Attempts)
	clear(a.budget.Successes)
	a.log.Warn("change given up", zap.String("target", want.Name), zap.String("reason", string(failure.Reason)), zap.String("message", failure.Message))
	a.eventf(seen.Node, corev1.EventTypeWarning, failure.Reason, "%s: %s; going back to what was before", want.Name, failure.Message)
	return 0
}
