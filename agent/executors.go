package agent

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
)

// executors returns the function that performs each kind of step.
func (a *Agent) executors() map[plan.Kind]func(ctx context.Context, in act.Input) error {
	return map[plan.Kind]func(ctx context.Context, in act.Input) error{
		plan.Record:      a.actors.fencing.WriteJournal,
		plan.Adopt:       a.adopt,
		plan.AcquireSlot: a.actors.slot.Take,
		plan.ReleaseSlot: a.actors.slot.Return,
		plan.Close:       a.actors.fencing.Close,
		plan.Fence:       a.actors.fencing.Raise,
		plan.Park:        a.actors.fencing.Park,
		plan.Release:     a.actors.fencing.Release,

		plan.Evict:             a.evictPods,
		plan.RestartOperands:   a.evictPods,
		plan.RestartLatePlugin: a.restartLatePlugin,
		plan.RestartPlugin:     a.actors.evictions.Restart,
		plan.PauseOperands:     a.pauseOperands,
		plan.ResumeOperands:    a.resumeOperands,
		plan.StopUnits:         a.actors.units.Stop,
		plan.StartUnits:        a.actors.units.Start,

		plan.SetMode:            a.actors.hardware.Change,
		plan.DropPersistence:    a.actors.hardware.Change,
		plan.RestorePersistence: a.actors.hardware.Change,
		plan.Reset:              a.actors.hardware.Change,
		plan.Heal:               a.actors.hardware.Change,
		plan.Destroy:            a.actors.hardware.Change,
		plan.Create:             a.actors.hardware.Change,
		plan.SetComputeMode:     a.setComputeMode,
		plan.RegenerateCDI:      a.actors.hardware.Regenerate,

		plan.AskReboot: a.actors.rebooter.Ask,
		plan.Reboot:    a.actors.rebooter.Reboot,

		plan.WriteSharing:    a.writeSharing,
		plan.ReloadPlugin:    a.reloadPlugin,
		plan.VerifyCapacity:  a.actors.verifier.Await,
		plan.PublishNodeKeys: a.actors.publisher.Publish,
	}
}

// adopt writes a journal for what an earlier agent has left without one.
func (a *Agent) adopt(ctx context.Context, in act.Input) error {
	if err := a.actors.fencing.WriteJournal(ctx, in); err != nil {
		return err
	}
	a.reporters.metrics.Adopted(in.Seen.Record.StrangeJournal)
	return nil
}

// evictPods evicts pods. If a reboot is the next step, it does so only if the settings and gates allow the reboot.
func (a *Agent) evictPods(ctx context.Context, in act.Input) error {
	if len(in.Steps) > 1 && in.Steps[1].Kind == plan.Reboot {
		if err := a.actors.rebooter.Allowed(ctx, in); err != nil {
			return err
		}
	}
	return a.actors.evictions.Evict(ctx, in)
}

// restartLatePlugin restarts a device plugin that does not advertise the GPUs' devices in time.
func (a *Agent) restartLatePlugin(ctx context.Context, in act.Input) error {
	err := a.actors.evictions.ComeBack(in)
	if err == nil {
		err = a.actors.evictions.Evict(ctx, in)
	}
	return a.actors.verifier.Within(in, err)
}

// pauseOperands removes operands from the node: one by its label; if the step names no label, all that the fence keeps away.
func (a *Agent) pauseOperands(ctx context.Context, in act.Input) error {
	if in.Step().Label == "" {
		return a.evictPods(ctx, in)
	}
	return a.actors.evictions.PauseOperand(ctx, in)
}

// resumeOperands restores operands.
func (a *Agent) resumeOperands(ctx context.Context, in act.Input) error {
	if in.Step().Label == "" {
		return a.actors.fencing.Resume(ctx, in)
	}
	return a.actors.evictions.ResumeOperand(ctx, in)
}

// setComputeMode sets the compute mode of a GPU, once the MPS daemons on it have ended.
func (a *Agent) setComputeMode(ctx context.Context, in act.Input) error {
	if err := a.actors.handover.DaemonsGone(in); err != nil {
		return err
	}
	return a.actors.hardware.Change(ctx, in)
}

// writeSharing gives the device plugin another config. The agent then verifies the capacity again, even if the devices are the same.
func (a *Agent) writeSharing(ctx context.Context, in act.Input) error {
	a.actors.verifier.Restart()
	return a.actors.handover.WriteSharing(ctx, in)
}

// reloadPlugin makes the device plugin read its new config.
func (a *Agent) reloadPlugin(ctx context.Context, in act.Input) error {
	a.actors.verifier.Restart()
	return a.actors.handover.Reload(ctx, in)
}
