package agent

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
)

// executors returns what performs each kind of step.
func (a *Agent) executors() map[plan.Kind]func(ctx context.Context, in act.Input) error {
	return map[plan.Kind]func(ctx context.Context, in act.Input) error{
		plan.Record:      a.fencing.WriteJournal,
		plan.Adopt:       a.adopt,
		plan.AcquireSlot: a.slot.Take,
		plan.ReleaseSlot: a.slot.Return,
		plan.Close:       a.fencing.Close,
		plan.Fence:       a.fencing.Raise,
		plan.Park:        a.fencing.Park,
		plan.Release:     a.fencing.Release,

		plan.Evict:             a.evictPods,
		plan.RestartOperands:   a.evictPods,
		plan.RestartLatePlugin: a.restartLatePlugin,
		plan.RestartPlugin:     a.evictions.Restart,
		plan.PauseOperands:     a.pauseOperands,
		plan.ResumeOperands:    a.resumeOperands,
		plan.StopUnits:         a.units.Stop,
		plan.StartUnits:        a.units.Start,

		plan.SetMode:            a.hardware.Change,
		plan.DropPersistence:    a.hardware.Change,
		plan.RestorePersistence: a.hardware.Change,
		plan.Reset:              a.hardware.Change,
		plan.Heal:               a.hardware.Change,
		plan.Destroy:            a.hardware.Change,
		plan.Create:             a.hardware.Change,
		plan.SetComputeMode:     a.setComputeMode,
		plan.RegenerateCDI:      a.hardware.Regenerate,

		plan.AskReboot: a.rebooter.Ask,
		plan.Reboot:    a.rebooter.Reboot,

		plan.WriteSharing:    a.writeSharing,
		plan.ReloadPlugin:    a.reloadPlugin,
		plan.VerifyCapacity:  a.verifier.Await,
		plan.PublishNodeKeys: a.publisher.Publish,
	}
}

// adopt writes a journal for what an earlier agent has left without one.
func (a *Agent) adopt(ctx context.Context, in act.Input) error {
	if err := a.fencing.WriteJournal(ctx, in); err != nil {
		return err
	}
	a.metrics.Adopted(in.Seen.Record.StrangeJournal)
	return nil
}

// evictPods evicts pods. If a reboot is the next step, it does so only if the settings and gates allow the reboot.
func (a *Agent) evictPods(ctx context.Context, in act.Input) error {
	if len(in.Steps) > 1 && in.Steps[1].Kind == plan.Reboot {
		if err := a.rebooter.Allowed(ctx, in); err != nil {
			return err
		}
	}
	return a.evictions.Evict(ctx, in)
}

// restartLatePlugin restarts a device plugin that does not offer in time what the GPUs have.
func (a *Agent) restartLatePlugin(ctx context.Context, in act.Input) error {
	return a.verifier.Within(in, a.evictions.Evict(ctx, in))
}

// pauseOperands removes operands from the node: one by its label, or, if the step names no label, all that the fence keeps away.
func (a *Agent) pauseOperands(ctx context.Context, in act.Input) error {
	if in.Step().Label == "" {
		return a.evictPods(ctx, in)
	}
	return a.evictions.PauseOperand(ctx, in)
}

// resumeOperands restores operands.
func (a *Agent) resumeOperands(ctx context.Context, in act.Input) error {
	if in.Step().Label == "" {
		return a.fencing.Resume(ctx, in)
	}
	return a.evictions.ResumeOperand(ctx, in)
}

// setComputeMode sets the compute mode of a GPU, once the MPS daemons on it have ended.
func (a *Agent) setComputeMode(ctx context.Context, in act.Input) error {
	if err := a.handover.DaemonsGone(in); err != nil {
		return err
	}
	return a.hardware.Change(ctx, in)
}

// writeSharing gives the device plugin another config. The agent then verifies the capacity again, even if the devices are the same.
func (a *Agent) writeSharing(ctx context.Context, in act.Input) error {
	a.verifier.Restart()
	return a.handover.WriteSharing(ctx, in)
}

// reloadPlugin makes the device plugin read its new config.
func (a *Agent) reloadPlugin(ctx context.Context, in act.Input) error {
	a.verifier.Restart()
	return a.handover.Reload(ctx, in)
}
