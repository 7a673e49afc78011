package fencing

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
)

// startsDisruption reports whether the first step leads to the first disturbance of the node: everything must be checked and prepared before.
func startsDisruption(in act.Input) bool {
	if in.Steps[0].Traits().Stage != plan.StageOpen || in.Want.Undo || in.Seen.DisruptionStarted() {
		return false
	}
	return plan.Disrupts(in.Steps) || plan.Has(in.Steps, plan.Fence) || plan.Has(in.Steps, plan.AcquireSlot)
}

// Prepare makes the writes before the first step, once no gate is in its way. It notes that a user has forced the change, and completes the host's
// record of what to restore. Before the first disturbance it also writes that record, and makes room for the device plugin's config. The error is why
// the step has to wait.
func (f *Fencing) Prepare(ctx context.Context, in act.Input) error {
	if err := f.noteForced(ctx, in); err != nil {
		return err
	}
	step := in.Steps[0]
	if err := f.Journal.RecordRestores(ctx, in.Seen.Writing(in.Want, step.Kind), step); err != nil {
		return err
	}
	starts := startsDisruption(in)
	if starts {
		if err := f.Journal.TryRecord(ctx, in.Seen.Writing(in.Want, step.Kind)); err != nil {
			return err
		}
	}
	if step.Traits().Stage != plan.StageOpen || step.Kind == plan.Fence && !starts {
		return nil
	}
	return f.Handover.Prepare(ctx, in)
}

// Foresee returns why the first step would have to wait, by the checks of Preflight and Prepare. In the middle of a change these are done, and it returns which
// holders of the GPUs would not leave. It reverts its trials, so nothing stays written.
func (f *Fencing) Foresee(ctx context.Context, in act.Input) error {
	if in.Seen.Journal != nil && !startsDisruption(in) {
		return f.holdersStay(ctx, in)
	}
	begins := in.Seen.Journal == nil && !in.Want.Undo && in.Step().Traits().Begins // also one that only creates instances has a record
	if err := f.Preflight(ctx, in); err != nil || !begins && !startsDisruption(in) {
		return err
	}
	if err := f.Journal.ForeseeRecord(ctx, in.Seen.Writing(in.Want, in.Step().Kind)); err != nil {
		return err
	}
	return f.Handover.Foresee(ctx, in)
}

// noteForced notes in the journal that the running change needs no window, if a user has set the annotation since it began. The annotation serves one
// change: the same write removes it.
func (f *Fencing) noteForced(ctx context.Context, in act.Input) error {
	if in.Seen.Journal == nil || in.Seen.Other(in.Want) || in.Want.Undo || !in.Seen.Forces(in.Want) || in.Seen.Journal.Forced && !in.Seen.Edited(in.Want) {
		return nil
	}
	j := *in.Seen.Journal
	j.Forced = true
	node, err := f.Journal.Write(ctx, in.Seen.Writing(in.Want, plan.Record), j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Record(node, text, config.AnnotationForce)
	})
	if err != nil {
		return fmt.Errorf("noting that the change needs no window, as annotation %s says: %w", config.AnnotationForce, err)
	}
	in.Seen.Node, in.Seen.Journal = node, &j
	return nil
}
