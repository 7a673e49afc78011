package agent

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
)

// work is the input of an executor: the observed state, the desired state, and the steps between them, of which it performs the first.
type work struct {
	seen  *state.Observed
	want  state.Desired
	step  plan.Step
	steps []plan.Step
}

// executor performs a step. It is idempotent and does not wait: it returns *Waiting, and the next pass looks again.
type executor func(a *Agent, ctx context.Context, w work) error

// executors has one for each kind of step.
var executors = map[plan.Kind]executor{
	plan.Record: func(a *Agent, ctx context.Context, w work) error {
		return a.fencing.WriteJournal(ctx, w.seen, w.want, w.steps)
	},
	plan.Adopt:       (*Agent).adopt,
	plan.AcquireSlot: func(a *Agent, ctx context.Context, w work) error { return a.slot.Take(ctx, w.seen, w.want) },
	plan.ReleaseSlot: func(a *Agent, ctx context.Context, w work) error { return a.slot.Return(ctx, w.seen) },
	plan.Fence: func(a *Agent, ctx context.Context, w work) error {
		return a.fencing.Raise(ctx, w.seen, w.want, w.steps)
	},
	plan.Release: (*Agent).release,

	plan.Evict:           (*Agent).evictPods,
	plan.RestartOperands: (*Agent).evictPods,
	plan.RestartLatePlugin: func(a *Agent, ctx context.Context, w work) error {
		return a.verifier.Within(w.seen, w.want, a.evictions.Evict(ctx, w.seen, w.want, w.step))
	},
	plan.RestartPlugin:  func(a *Agent, ctx context.Context, w work) error { return a.evictions.Restart(ctx, w.seen, w.step) },
	plan.PauseOperands:  (*Agent).pauseOperands,
	plan.ResumeOperands: (*Agent).resumeOperands,
	plan.StopUnits:      func(a *Agent, ctx context.Context, w work) error { return a.units.Stop(ctx, w.seen, w.want, w.step) },
	plan.StartUnits:     func(a *Agent, ctx context.Context, w work) error { return a.units.Start(ctx, w.seen, w.want, w.step) },

	plan.SetMode:            (*Agent).changeGPU,
	plan.DropPersistence:    (*Agent).changeGPU,
	plan.RestorePersistence: (*Agent).changeGPU,
	plan.Reset:              (*Agent).changeGPU,
	plan.Heal:               (*Agent).changeGPU,
	plan.Destroy:            (*Agent).changeGPU,
	plan.Create:             (*Agent).changeGPU,
	plan.SetComputeMode:     (*Agent).setComputeMode,
	plan.RegenerateCDI:      func(a *Agent, ctx context.Context, w work) error { return a.hardware.Regenerate(ctx, w.seen.GPUs) },

	plan.Park:      func(a *Agent, ctx context.Context, w work) error { return a.fencing.Park(ctx, w.seen, w.want) },
	plan.AskReboot: func(a *Agent, ctx context.Context, w work) error { return a.rebooter.Ask(ctx, w.seen, w.want) },
	plan.Reboot:    func(a *Agent, ctx context.Context, w work) error { return a.rebooter.Reboot(ctx, w.seen, w.want) },

	plan.WriteSharing:    (*Agent).writeSharing,
	plan.ReloadPlugin:    (*Agent).reloadPlugin,
	plan.VerifyCapacity:  func(a *Agent, ctx context.Context, w work) error { return a.verifier.Await(w.seen, w.want) },
	plan.PublishNodeKeys: func(a *Agent, ctx context.Context, w work) error { return a.publisher.Publish(ctx, w.seen, w.want) },
}

// release gives the node back. The agent writes what it has learnt from the change into the next status.
func (a *Agent) release(ctx context.Context, w work) error {
	learnt, err := a.fencing.Release(ctx, w.seen, w.want)
	if learnt != nil {
		a.reporter.Learn(learnt)
	}
	return err
}

// changeGPU performs a step that is one call into the driver.
func (a *Agent) changeGPU(ctx context.Context, w work) error {
	return a.hardware.Change(ctx, w.seen, w.want, w.step)
}

// setComputeMode sets the compute mode of a GPU, once the MPS daemons on it have ended.
func (a *Agent) setComputeMode(ctx context.Context, w work) error {
	if err := a.handover.DaemonsGone(w.seen, w.want, w.step); err != nil {
		return err
	}
	return a.changeGPU(ctx, w)
}

// pauseOperands sends operands away: one by its label, or, if the step names no label, all that the fence keeps away.
func (a *Agent) pauseOperands(ctx context.Context, w work) error {
	if w.step.Label == "" {
		return a.evictPods(ctx, w)
	}
	return a.evictions.PauseOperand(ctx, w.seen, w.want, w.step)
}

// resumeOperands brings operands back.
func (a *Agent) resumeOperands(ctx context.Context, w work) error {
	if w.step.Label == "" {
		return a.fencing.Resume(ctx, w.seen, w.want)
	}
	return a.evictions.ResumeOperand(ctx, w.seen, w.step)
}

// evictPods evicts pods. If a reboot is the next step, it does so only if the settings and gates allow the reboot.
func (a *Agent) evictPods(ctx context.Context, w work) error {
	if len(w.steps) > 1 && w.steps[1].Kind == plan.Reboot {
		if err := a.rebooter.Allowed(ctx, w.seen, w.want); err != nil {
			return err
		}
	}
	return a.evictions.Evict(ctx, w.seen, w.want, w.step)
}

// writeSharing gives the device plugin another config. The agent then has to prove the same devices anew.
func (a *Agent) writeSharing(ctx context.Context, w work) error {
	a.verifier.ProveAnew()
	return a.handover.WriteSharing(ctx, w.seen, w.want)
}

// reloadPlugin makes the device plugin read its new config.
func (a *Agent) reloadPlugin(ctx context.Context, w work) error {
	a.verifier.ProveAnew()
	return a.handover.Reload(ctx, w.seen, w.want, w.step)
}

// adopt writes a journal for what an earlier agent has left without one.
func (a *Agent) adopt(ctx context.Context, w work) error {
	if err := a.fencing.WriteJournal(ctx, w.seen, w.want, w.steps); err != nil {
		return err
	}
	a.metrics.Adopted(w.seen.Record.StrangeJournal)
	return nil
}
