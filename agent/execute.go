package agent

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// execute performs the first step. Each step is idempotent, and none waits: a step that takes time returns *Waiting, and the
// next pass looks again.
func (a *Agent) execute(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	step, prepared := steps[0], *seen
	seen = &prepared // with what the agent reads right before the step
	a.liveness.At(step)
	began := a.clock.Now()
	err := a.retries.TooEarly(step)
	if err == nil {
		err = a.retries.CheckNoEffect(want, step)
	}
	early := err != nil
	if !early {
		if err = a.mayPerform(ctx, seen, want, steps); errors.Is(err, errNotFresh) {
			return err
		}
		if err == nil {
			err = a.fencing.Prepare(ctx, seen, want, steps)
		}
		if err == nil {
			err = a.perform(ctx, seen, want, steps)
		}
	}
	if !early || step.Kind != plan.AcquireSlot {
		a.slot.Yield(ctx, seen, step, err)
	}
	if err == nil {
		a.retries.Done(step)
		a.log.Info("step done", zap.Stringer("step", step), zap.Int("left", len(steps)-1),
			zap.Duration("took", a.clock.Since(began)), zap.String("operation", seen.Operation()))
	}
	return err
}

// errNotFresh means that the agent planned the step by what the watches have shown, which may be out of date. The next pass reads the
// API server, and plans anew.
var errNotFresh = errors.New("the look has to be taken anew")

// mayPerform asks the gates: it returns why the first step may not be performed now, and writes nothing.
func (a *Agent) mayPerform(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	if err := a.gates.Allow(seen, want, steps); err != nil || steps[0].Traits().OnlyLooks {
		return err
	}
	if !a.objects.FreshFor(plan.NeedFreshLook(steps, seen.Forward(want)), plan.NeedFreshLook(steps[1:], seen.Forward(want))) {
		return errNotFresh
	}
	return a.fencing.Preflight(ctx, seen, want, steps)
}

// perform calls the executor of the first step.
func (a *Agent) perform(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	step := steps[0]
	perform := executors[step.Kind]
	if perform == nil {
		return &outcome.Stalled{Reason: config.ReasonHardwareFailure, Message: fmt.Sprintf("no way to perform step %q", step.Kind)}
	}
	if step.Traits().ReachesTarget && !want.Undo && !seen.HardwareOrPluginTouched() {
		a.timing.Touches(a.clock.Now())
	}
	return perform(a, ctx, work{seen: seen, want: want, step: step, steps: steps})
}
