package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/nvml"
)

// evictionsTimeout bounds one round of eviction requests. The API server may take 10 s for one when many fight over a
// disruption budget.
const evictionsTimeout = time.Minute

// execute performs the first step. Each step is idempotent, and none waits: what takes time returns *Waiting, and the
// next pass looks again.
func (a *Agent) execute(ctx context.Context, seen observed, want wish, steps []plan.Step) error {
	step := steps[0]
	began := a.clock.Now()
	err := a.tooEarly(step)
	if err != nil {
		return err
	}
	switch step.Kind {
	case plan.Record:
		err = a.record(ctx, seen, want, steps)
	case plan.Fence:
		err = a.raise(ctx, seen, want, steps)
	case plan.Evict, plan.PauseOperands, plan.RestartOperands:
		err = a.evict(ctx, seen, want, steps)
	case plan.SetMode, plan.SetPersistence, plan.Reset, plan.Destroy, plan.Create:
		err = a.change(ctx, seen, want, step)
	case plan.Park:
		err = a.park(ctx, seen, want)
	case plan.AskReboot:
		err = a.askForReboot(seen, want)
	case plan.Reboot:
		err = a.reboot(ctx, seen, want)
	case plan.RegenerateCDI:
		err = a.regenerate(ctx, seen.gpus)
	case plan.ResumeOperands:
		err = a.resume(ctx, seen)
	case plan.VerifyCapacity:
		err = a.awaitCapacity(seen, want)
	case plan.Release:
		err = a.release(ctx, seen, want)
	default:
		err = &Stalled{Reason: config.ReasonHardwareFailure, Message: fmt.Sprintf("no way to perform step %q", step.Kind)}
	}
	if err == nil {
		delete(a.attempts, step.String())
		a.log.Info("step done", zap.Stringer("step", step), zap.Int("left", len(steps)-1),
			zap.Duration("took", a.clock.Since(began)), zap.String("operation", seen.operation()))
	}
	return err
}

// record writes the journal without a fence: for a change that disrupts nobody, or to add to a journal that stands.
func (a *Agent) record(ctx context.Context, seen observed, want wish, steps []plan.Step) error {
	return a.amend(ctx, seen, *a.journal(seen, want, steps))
}

// raise fences the node, once it is known that the pods that must leave may do so. A node that cannot be drained stays
// schedulable.
func (a *Agent) raise(ctx context.Context, seen observed, want wish, steps []plan.Step) error {
	if !want.undo {
		if err := a.preflight(ctx, seen, steps); err != nil {
			return err
		}
	}
	j := a.journal(seen, want, steps)
	if !j.Cordoned { // the deadlines count from the fence
		j.Started = a.now()
	}
	j.Cordoned, j.WasUnschedulable = true, seen.foreignCordon()
	if seen.startup != nil {
		j.Startup = &startup{Value: seen.startup.Value, Effect: string(seen.startup.Effect)}
	}
	text, err := j.encode()
	if err != nil {
		return err
	}
	if err := a.patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) { return a.fence.Raise(node, text) }); err != nil {
		return err
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonFencing, "cordoned for the change to %s: %d steps", want.name, len(steps))
	return nil
}

// preflight asks before the cordon whether the change can come to its end: whether the pods may be evicted, and whether
// there is anybody to prove the capacity.
func (a *Agent) preflight(ctx context.Context, seen observed, steps []plan.Step) error {
	const before = "nothing is disturbed before "
	if seen.deaf != nil {
		return &Waiting{
			Reason: config.ReasonKubeletUnavailable, After: evictionRetry,
			Message: before + "kubelet says which pod has which device: " + seen.deaf.Error(),
		}
	}
	if len(seen.operands) == 0 && len(offered(seen.kubelet)) == 0 && !seen.fenced && seen.startup == nil { // our own taints keep a plugin away
		return &Waiting{
			Reason: config.ReasonNoDevicePlugin, After: evictionRetry,
			Message: before + "a device plugin runs here: none offers the GPUs to kubelet, and no pod of this node matches devicePlugin.podSelector of the settings",
		}
	}
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		all, cancel := context.WithTimeout(ctx, evictionsTimeout)
		blocked := blockedOf(a.evictor.DryRun(all, seen.drained(s.Pods), drainPolicy(a.settings)))
		cancel()
		if len(blocked) > 0 {
			return &Waiting{
				Reason: config.ReasonEvictionBlocked, After: evictionRetry,
				Message: before + "these pods may be evicted: " + strings.Join(blocked, "; "),
			}
		}
	}
	return nil
}

// journal is what the steps will owe to the node: what is owed already, and what they add.
func (a *Agent) journal(seen observed, want wish, steps []plan.Step) *Journal {
	j := &Journal{
		Version: journalVersion, Operation: uuid.NewString(), BootID: seen.node.Status.NodeInfo.BootID,
		Proven: len(seen.capacity) == 0,
	}
	if seen.journal != nil {
		copied := *seen.journal
		j = &copied
		j.Previous = slices.Clone(j.Previous)
	}
	if !want.undo && j.Target != want.name { // the deadlines count for each target
		j.Target, j.Started = want.name, a.now()
		j.NoReset, j.Reboots, j.RebootAsked = nil, nil, time.Time{}
		clear(a.attempts)
		if known := seen.refusal(); known != nil && known.Boot == seen.boot() {
			j.NoReset = known
		}
	}
	for _, gpu := range seen.gpus {
		if slices.ContainsFunc(steps, func(s plan.Step) bool { return s.GPU == gpu.UUID && s.TouchesGPU() }) {
			j.note(gpu)
		}
	}
	for _, pod := range seen.operands {
		if !j.ranBefore(string(pod.UID)) {
			j.Operands = append(j.Operands, string(pod.UID))
		}
	}
	return j
}

// evict asks pods to leave and says which are still there. It never returns nil: only the next look can tell that they
// are gone.
func (a *Agent) evict(ctx context.Context, seen observed, want wish, steps []plan.Step) error {
	step := steps[0]
	if len(steps) > 1 && steps[1].Kind == plan.Reboot {
		if err := a.mayReboot(ctx, seen, want); err != nil {
			return err
		}
	}
	overdue := step.Kind == plan.Evict && !want.undo && seen.overdue(a.clock.Now(), a.settings.Timeouts.Drain)
	if seen.deaf != nil && step.Kind == plan.Evict && !overdue {
		// Every pod counts as holding everything now, which is a reason to wait and not to evict them all.
		return &Waiting{
			Reason: config.ReasonKubeletUnavailable, After: evictionRetry,
			Message: "nobody is evicted until kubelet says which pod has which device: " + seen.deaf.Error(),
		}
	}
	// Each request has a deadline of its own; this one keeps a slow API server from holding up the loop for all pods.
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	policy, since := drain.Policy{}, time.Time{} // of operands, which are to come back, and of the way back, which has to be gone
	if step.Kind == plan.Evict && !want.undo && seen.journal != nil {
		policy, since = drainPolicy(a.settings), seen.journal.Started
		policy.Delete = policy.Delete && seen.deaf == nil // every pod counts as a holder then
	}
	verdicts := a.evictor.Evict(all, seen.drained(step.Pods), policy, since)
	after := evictionRetry
	for _, v := range verdicts {
		if v.State == drain.Requested {
			a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonEvicting, "evicting pod %s for the change to %s", v.Pod, want.name)
		}
		if wait := v.RetryAt.Sub(a.clock.Now()); !v.RetryAt.IsZero() && wait > 0 {
			after = min(after, wait)
		}
	}
	blocked := blockedOf(verdicts)
	if overdue && (seen.deaf != nil || slices.ContainsFunc(verdicts, func(v drain.Verdict) bool { return v.Overdue })) {
		return &Failure{
			Wish: want.fingerprint, Reason: config.ReasonEvictionBlocked,
			Message: fmt.Sprintf("pods still there at the deadline, %s after the change began: %s",
				a.settings.Timeouts.Drain, strings.Join(describe(verdicts), "; ")),
		}
	}
	if len(blocked) > 0 {
		return &Waiting{Reason: config.ReasonEvictionBlocked, Message: strings.Join(blocked, "; "), After: after}
	}
	return &Waiting{Reason: config.ReasonEvicting, Message: "waiting for pods to leave: " + strings.Join(describe(verdicts), "; "), After: after}
}

// regenerate writes the CDI specs anew.
func (a *Agent) regenerate(ctx context.Context, gpus []nvml.GPU) error {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	if err := a.specs.Write(call, gpus); err != nil {
		a.specFailures++
		return err
	}
	a.specFailures = 0
	return nil
}

// resume takes the taint away and leaves the cordon. An administrator who had cordoned the node before us and has
// uncordoned it since wants it back: the journal is told, so that the end leaves no cordon. Without a journal nothing is
// owed, and the taint is all that is ours.
func (a *Agent) resume(ctx context.Context, seen observed) error {
	if seen.journal == nil {
		return a.patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) { return a.fence.Lift(node, false) })
	}
	if seen.journal.WasUnschedulable && !seen.node.Spec.Unschedulable {
		j := *seen.journal
		j.WasUnschedulable = false
		return a.amend(ctx, seen, j)
	}
	return a.patch(ctx, seen.node, a.fence.Open)
}

// awaitCapacity says what is missing until the look that finds nothing.
func (a *Agent) awaitCapacity(seen observed, want wish) error {
	now := a.clock.Now()
	if a.verifying.IsZero() {
		a.verifying = now
	}
	if len(seen.capacity) == 0 {
		return &Waiting{
			Reason: config.ReasonAwaitingCapacity, After: proofInterval,
			Message: "capacity is right; looking once more: " + offered(seen.kubelet).String(),
		}
	}
	if seen.journal == nil {
		return &Waiting{Reason: config.ReasonCapacityMismatch, Message: seen.blockers() + "; see the device plugin's log on this node", After: driverRetry}
	}
	// A fresh node has nothing to go back to, and its first plugin may wait for a driver that is still being installed.
	fresh := seen.journal.Startup != nil && !want.undo
	if fresh || now.Sub(a.verifying) < a.settings.Timeouts.Capacity {
		return &Waiting{Reason: config.ReasonAwaitingCapacity, Message: "waiting for kubelet and the device plugin: " + seen.blockers(), After: proofInterval}
	}
	if want.undo {
		return &Stalled{
			Reason: config.ReasonCapacityMismatch,
			Message: fmt.Sprintf("the GPUs are as they were, but their capacity is not back after %s: %s; see the device plugin's log on this node",
				a.settings.Timeouts.Capacity, seen.blockers()),
		}
	}
	return &Failure{
		Wish: want.fingerprint, Reason: config.ReasonCapacityMismatch,
		Message: fmt.Sprintf("no proof of capacity after %s: %s", a.settings.Timeouts.Capacity, seen.blockers()),
	}
}

// release gives the node back. What only the journal knows is written first: a restarted agent must not try again what
// has failed. A node that has just been registered and is not ready goes on keeping pods away.
func (a *Agent) release(ctx context.Context, seen observed, want wish) error {
	status := seen.status
	failed := seen.journal.Undo
	if failed != nil && want.undo && (status.Failed == nil || status.Failed.Wish != failed.Wish) {
		status.Failed = failed
	}
	status.NoReset = seen.refusal()
	if status.Failed != seen.status.Failed || status.NoReset != seen.status.NoReset {
		if err := a.patch(ctx, seen.node, func(*corev1.Node) ([]byte, error) { return status.patch() }); err != nil {
			return fmt.Errorf("recording what the journal knows and the node must go on telling: %w", err)
		}
		node, err := a.client.CoreV1().Nodes().Get(ctx, a.node, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("reading node %s: %w", a.node, err)
		}
		seen.node = node
	}
	uncordon := seen.journal.Cordoned && !seen.foreignCordon()
	err := a.patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) {
		if startup := seen.journal.Startup; startup != nil && want.undo && want.name != "" {
			return a.fence.LiftUnready(node, uncordon, startup.taint())
		}
		return a.fence.Lift(node, uncordon)
	})
	if err != nil {
		return err
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonReleased, "node given back after %s, %s",
		a.clock.Since(seen.journal.Started).Round(time.Second), offered(seen.kubelet))
	return nil
}

// giveUp keeps a failure in the journal: from now on the way is back.
func (a *Agent) giveUp(ctx context.Context, seen observed, want wish, failure *Failure) time.Duration {
	j := *seen.journal
	j.Undo = failure
	if err := a.amend(ctx, seen, j); err != nil {
		a.log.Warn("recording the failure", zap.Error(err))
		return a.settings.Retry.First
	}
	a.verifying = time.Time{}
	clear(a.attempts)
	clear(a.done)
	a.log.Warn("change given up", zap.String("target", want.name), zap.String("reason", string(failure.Reason)), zap.String("message", failure.Message))
	a.eventf(seen.node, corev1.EventTypeWarning, failure.Reason, "%s: %s; going back to what was before", want.name, failure.Message)
	return 0
}

// now is the time as the journal holds it.
func (a *Agent) now() time.Time { return a.clock.Now().UTC().Truncate(time.Second) }

// amend writes the journal anew.
func (a *Agent) amend(ctx context.Context, seen observed, j Journal) error {
	text, err := j.encode()
	if err != nil {
		return err
	}
	return a.patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) { return a.fence.Record(node, text) })
}

// patch sends one guarded write of the node's metadata and spec.
func (a *Agent) patch(ctx context.Context, node *corev1.Node, write func(*corev1.Node) ([]byte, error)) error {
	body, err := write(node)
	if err != nil {
		return err
	}
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	_, err = a.client.CoreV1().Nodes().Patch(api, node.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: FieldManager})
	if err != nil {
		return fmt.Errorf("patching node %s: %w", node.Name, err)
	}
	return nil
}

// drained finds the observed pods that the planner named.
func (s observed) drained(pods []plan.Pod) []drain.Pod {
	var out []drain.Pod
	for _, p := range pods {
		named := func(pod drain.Pod) bool {
			return string(pod.UID) == p.UID && pod.Namespace == p.Namespace && pod.Name == p.Name
		}
		if i := slices.IndexFunc(s.holders, named); i >= 0 {
			out = append(out, s.holders[i])
			continue
		}
		if i := slices.IndexFunc(s.drainable, named); i >= 0 {
			out = append(out, s.drainable[i])
			continue
		}
		for i := range s.operands {
			if pod := drain.Describe(&s.operands[i]); named(pod) {
				out = append(out, pod)
			}
		}
	}
	return out
}

func blockedOf(verdicts []drain.Verdict) []string {
	var out []string
	for _, v := range verdicts {
		if v.State == drain.Blocked || v.State == drain.Failed || v.State == drain.Refused {
			out = append(out, describe([]drain.Verdict{v})...)
		}
	}
	return out
}

func describe(verdicts []drain.Verdict) []string {
	var out []string
	for _, v := range verdicts {
		text := v.Pod.String()
		if v.Message != "" {
			text += ": " + v.Message
		}
		out = append(out, text)
	}
	return out
}
