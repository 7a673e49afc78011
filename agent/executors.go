package agent

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/nvml"
)

// work is what an executor is given: what was seen, what is wanted, and the steps to there, of which it performs the first.
type work struct {
	seen  state.Observed
	want  state.Desired
	step  plan.Step
	steps []plan.Step
}

// executor performs a step. It is idempotent and does not wait: *Waiting means that the next pass looks again.
type executor func(a *Agent, ctx context.Context, w work) error

// executors has one for each kind of step.
var executors = map[plan.Kind]executor{
	plan.Record:      func(a *Agent, ctx context.Context, w work) error { return a.writeJournal(ctx, w.seen, w.want, w.steps) },
	plan.Adopt:       func(a *Agent, ctx context.Context, w work) error { return a.writeJournal(ctx, w.seen, w.want, w.steps) },
	plan.AcquireSlot: func(a *Agent, ctx context.Context, w work) error { return a.takeSlot(ctx, w.seen, w.want, w.steps) },
	plan.ReleaseSlot: func(a *Agent, ctx context.Context, w work) error { return a.returnSlot(ctx, w.seen) },
	plan.Fence:       func(a *Agent, ctx context.Context, w work) error { return a.raise(ctx, w.seen, w.want, w.steps) },
	plan.Release:     func(a *Agent, ctx context.Context, w work) error { return a.release(ctx, w.seen, w.want) },

	plan.Evict:           func(a *Agent, ctx context.Context, w work) error { return a.evict(ctx, w.seen, w.want, w.steps) },
	plan.RestartOperands: func(a *Agent, ctx context.Context, w work) error { return a.evict(ctx, w.seen, w.want, w.steps) },
	plan.PauseOperands:   (*Agent).pauseOperands,
	plan.ResumeOperands:  (*Agent).resumeOperands,
	plan.StopUnits:       func(a *Agent, ctx context.Context, w work) error { return a.stopUnit(ctx, w.seen, w.want, w.step) },
	plan.StartUnits:      func(a *Agent, ctx context.Context, w work) error { return a.startUnit(ctx, w.seen, w.step) },

	plan.SetMode: onGPU(func(a *Agent, ctx context.Context, s plan.Step) error { return a.driver.SetMode(ctx, s.GPU, s.On) }),
	plan.DropPersistence: onGPU(func(a *Agent, ctx context.Context, s plan.Step) error {
		return a.driver.SetPersistence(ctx, s.GPU, false)
	}),
	plan.RestorePersistence: onGPU(func(a *Agent, ctx context.Context, s plan.Step) error {
		return a.driver.SetPersistence(ctx, s.GPU, true)
	}),
	plan.SetComputeMode: onGPU(func(a *Agent, ctx context.Context, s plan.Step) error {
		return a.driver.SetComputeMode(ctx, s.GPU, nvml.ComputeDefault)
	}),
	plan.Reset:         onGPU(func(a *Agent, ctx context.Context, s plan.Step) error { return a.driver.Reset(ctx, s.GPU) }),
	plan.Destroy:       onGPU((*Agent).destroy),
	plan.Create:        onGPU((*Agent).create),
	plan.RegenerateCDI: func(a *Agent, ctx context.Context, w work) error { return a.regenerate(ctx, w.seen.GPUs) },

	plan.Park:      func(a *Agent, ctx context.Context, w work) error { return a.park(ctx, w.seen, w.want) },
	plan.AskReboot: func(a *Agent, ctx context.Context, w work) error { return a.askForReboot(ctx, w.seen, w.want) },
	plan.Reboot:    func(a *Agent, ctx context.Context, w work) error { return a.reboot(ctx, w.seen, w.want) },

	plan.WriteSharing:    func(a *Agent, ctx context.Context, w work) error { return a.writeSharing(ctx, w.seen, w.want) },
	plan.ReloadPlugin:    func(a *Agent, ctx context.Context, w work) error { return a.reloadPlugin(ctx, w.seen, w.want, w.step) },
	plan.VerifyCapacity:  func(a *Agent, ctx context.Context, w work) error { return a.awaitCapacity(ctx, w.seen, w.want, w.step) },
	plan.PublishNodeKeys: func(a *Agent, ctx context.Context, w work) error { return a.publish(ctx, w.seen, *w.want.Keys) },
}

// onGPU is the executor of a step that is one call into the driver.
func onGPU(call func(a *Agent, ctx context.Context, step plan.Step) error) executor {
	return func(a *Agent, ctx context.Context, w work) error { return a.change(ctx, w.seen, w.want, w.step, call) }
}
