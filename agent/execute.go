package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// execute performs the first step. Each step is idempotent, and none waits: what takes time returns *Waiting, and the
// next pass looks again.
func (a *Agent) execute(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	step := steps[0]
	a.alive.At(step)
	began := a.clock.Now()
	err := a.budget.TooEarly(step)
	if err == nil {
		err = a.checkNoEffect(want, step)
	}
	early := err != nil
	if !early {
		if err = a.noteForced(ctx, &seen, want); err == nil {
			err = a.gate(seen, want, steps)
		}
		if err == nil {
			seen.Gives, seen.Asks = want.Undo || step.Kind == plan.Adopt, want.Fingerprint
			err = a.mayTake(ctx, seen, step)
		}
		if err == nil {
			err = a.perform(ctx, seen, want, steps)
		}
	}
	if !early || step.Kind != plan.AcquireSlot {
		a.yieldSlot(ctx, seen, step, err)
	}
	if err == nil {
		a.budget.Done(step)
		a.log.Info("step done", zap.Stringer("step", step), zap.Int("left", len(steps)-1),
			zap.Duration("took", a.clock.Since(began)), zap.String("operation", seen.Operation()))
	}
	return err
}

// perform is what the kind of the first step does.
func (a *Agent) perform(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	step := steps[0]
	perform := executors[step.Kind]
	if perform == nil {
		return &outcome.Stalled{Reason: config.ReasonHardwareFailure, Message: fmt.Sprintf("no way to perform step %q", step.Kind)}
	}
	if step.Traits().ReachesTarget && !want.Undo && a.times.touchedAt.IsZero() && !seen.Touched() {
		a.times.touchedAt = a.clock.Now()
	}
	return perform(a, ctx, work{seen: seen, want: want, step: step, steps: steps})
}

// afterPods is the least time of each wait that comes after eviction, which may use up timeouts.drain.
const afterPods = 5 * time.Minute

// deadline is the end of a wait that starts after eviction: the drain deadline, or afterPods from its start, whichever is later.
func (a *Agent) deadline(seen state.Observed, want state.Desired, step plan.Step) time.Time {
	until := a.budget.Began(step).Add(afterPods)
	if pods := seen.Journal.Started.Add(a.settingsFor(want).Timeouts.Drain); pods.After(until) {
		return pods
	}
	return until
}

// checkNoEffect ends a change that somebody else undoes as often as it goes a step on. On the way back it is tried again, but ever less often.
func (a *Agent) checkNoEffect(want state.Desired, step plan.Step) error {
	n := a.budget.Successes[step.String()]
	if !step.Traits().Repeatable || n < a.settings.Retry.NoEffect {
		return nil
	}
	text := fmt.Sprintf("%s succeeded %d times and had no effect, or somebody else undoes it", step, n)
	if want.Undo {
		delete(a.budget.Successes, step.String())
		return errors.New(text)
	}
	return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonStepHadNoEffect, Message: text}
}

// awaitCapacity says what is missing until the look that finds nothing.
func (a *Agent) awaitCapacity(ctx context.Context, seen state.Observed, want state.Desired, step plan.Step) error {
	now := a.clock.Now()
	if a.verification.began.IsZero() {
		a.verification.began = now
	}
	if len(seen.Capacity.Missing) == 0 {
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, After: capacity.ProofInterval,
			Message: "capacity is right; looking once more: " + capacity.Offered(seen.Kubelet.Offered).Summary(want.Plugin.SharingKnown()),
		}
	}
	reason, missing := a.missingCapacity(seen)
	if seen.Journal == nil {
		return &outcome.Waiting{Reason: reason, Message: missing, After: outcome.DriverRetry}
	}
	// A fresh node has nothing to go back to, and its first plugin may wait for a driver that is still being installed.
	fresh := seen.Journal.Startup != nil && !want.Undo
	until := a.verification.began.Add(a.settings.Timeouts.Capacity)
	if err := a.mendPlugin(ctx, seen, want, step, fresh); err != nil {
		return err
	}
	if fresh || now.Before(until) {
		if reason == config.ReasonCapacityMismatch || now.Sub(a.verification.began) < causePatience {
			missing = seen.Blockers()
		}
		wait := &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, Message: "waiting for kubelet and the device plugin: " + missing, After: capacity.ProofInterval,
			Blockers: seen.Capacity.Missing,
		}
		if !fresh {
			wait.Since, wait.Until, wait.Then = a.verification.began, until, seen.Then(want)
		}
		return wait
	}
	if want.Undo {
		return &outcome.Stalled{
			Reason:  reason,
			Message: fmt.Sprintf("the GPUs are as they were, but their capacity is not back after %s: %s", a.settings.Timeouts.Capacity, missing),
		}
	}
	return &api.Failure{
		Wish: want.Fingerprint, Reason: reason, Message: fmt.Sprintf("no proof of capacity after %s: %s", a.settings.Timeouts.Capacity, missing),
	}
}

// mendPlugin ends a change whose config the device plugin does not run by. Otherwise, for want of capacity, it evicts the plugin once: one
// has been seen to register and to be forgotten by kubelet.
func (a *Agent) mendPlugin(ctx context.Context, seen state.Observed, want state.Desired, step plan.Step, fresh bool) error {
	if fails := a.pluginFails(seen); fails != "" && seen.Journal.ChangesPlugin() && !want.Undo {
		return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonPluginFailed, Message: "the device plugin does not run by its new config: " + fails}
	}
	half := a.verification.began.Add(a.settings.Timeouts.Capacity / 2)
	if fresh || a.verification.restarted || !a.clock.Now().After(half) || len(seen.DevicePlugin.Pods) == 0 {
		return nil
	}
	a.verification.restarted = true
	step.Kind, step.Pods = plan.RestartOperands, nil
	for i := range seen.DevicePlugin.Pods {
		step.Pods = append(step.Pods, state.PlannedPod(holders.Describe(&seen.DevicePlugin.Pods[i])))
	}
	a.log.Info("no capacity for long: starting the device plugin anew", zap.Strings("missing", seen.Capacity.Missing))
	return a.evict(ctx, seen, want, []plan.Step{step})
}

// now is the time as the journal holds it.
func (a *Agent) now() time.Time { return a.clock.Now().UTC().Truncate(time.Second) }

// amend writes the journal anew, and takes away annotations by which people have asked for something that it now holds.
func (a *Agent) amend(ctx context.Context, seen state.Observed, j journal.Journal, spent ...string) error {
	_, err := a.recorded(ctx, seen, j, func(node *corev1.Node, text string) ([]byte, error) { return a.fence.Record(node, text, spent...) })
	return err
}
