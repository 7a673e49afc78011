package agent

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// execute performs the first step of the input. Each step is idempotent, and none waits: a step that takes time returns *Waiting, and the next pass
// observes again.
func (a *Agent) execute(ctx context.Context, in act.Input) error {
	step := in.Step()
	prepared := *in.Seen // with what the agent reads right before the step
	in.Seen = &prepared
	a.reporters.liveness.At(step)
	began := a.env.Clock.Now()
	err := a.deciders.retries.TooEarly(step)
	if err == nil {
		err = a.deciders.retries.CheckNoEffect(in.Want, step)
	}
	early := err != nil
	if !early {
		if err = a.mayPerform(ctx, in); errors.Is(err, errNotFresh) {
			return err
		}
		if err == nil {
			err = a.actors.fencing.Prepare(ctx, in)
		}
		if err == nil {
			err = a.perform(ctx, in)
		}
		if errors.Is(err, outcome.ErrPlanAgain) {
			return err
		}
	}
	if !early || step.Kind != plan.AcquireSlot {
		a.actors.slot.Yield(ctx, in.Seen, step, err)
	}
	if err == nil {
		a.deciders.retries.Done(step)
		a.env.Log.Info("step done", zap.Stringer("step", step), zap.Int("left", len(in.Steps)-1),
			zap.Duration("took", a.env.Clock.Since(began)), zap.String("operation", in.Seen.Operation()))
	}
	return err
}

// errNotFresh means that the agent planned the step from what the watches have shown, which may be out of date. The next pass reads the API server, and plans
// again.
var errNotFresh = errors.New("the step needs a fresh observation")

// mayPerform asks the gates: it returns why the first step may not be performed now, and writes nothing.
func (a *Agent) mayPerform(ctx context.Context, in act.Input) error {
	if err := a.barred(ctx, in); err != nil || in.Step().Traits().OnlyObserves {
		return err
	}
	forward := isForward(in.Seen, in.Want)
	if !a.observers.objects.FreshFor(plan.NeedFresh(in.Steps, forward), plan.NeedFresh(in.Steps[1:], forward)) {
		return errNotFresh
	}
	if err := a.actors.fencing.Preflight(ctx, in); err != nil {
		return err
	}
	// The scheduler may have allocated a device to a claim since, or reserved the claim for another pod.
	traits := in.Step().Traits()
	opens, cuts := traits.Stage == plan.StageOpen, traits.HoldersKnown && !in.Seen.HardwareOrPluginTouched()
	if !a.observers.claims.FreshFor(opens || cuts) {
		a.observers.objects.ReadAgain()
		return errNotFresh
	}
	return nil
}

// isForward reports whether the agent is in the middle of the requested change, and not undoing it: a GPU or the device plugin's config differs from when the
// change began.
func isForward(seen *state.Observed, want state.Desired) bool {
	return seen.HardwareOrPluginTouched() && !want.Undo
}

// perform calls the executor of the first step.
func (a *Agent) perform(ctx context.Context, in act.Input) error {
	step := in.Step()
	perform := a.executors()[step.Kind]
	if perform == nil {
		return &outcome.Stalled{Reason: config.ReasonStepFailed, Message: fmt.Sprintf("no way to perform step %q", step.Kind)}
	}
	if step.Traits().ReachesTarget && !in.Want.Undo && !in.Seen.HardwareOrPluginTouched() {
		a.actors.timing.NoteTouched(a.env.Clock.Now())
	}
	return perform(ctx, in)
}
