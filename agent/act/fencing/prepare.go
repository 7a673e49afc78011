package fencing

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// startsDisruption reports whether the first step leads to the first disturbance of the node: by then all must be checked and prepared.
func startsDisruption(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	if !steps[0].Traits().Opens || want.Undo || seen.DisruptionStarted() {
		return false
	}
	return plan.Disrupts(steps) || plan.Has(steps, plan.Fence) || plan.Has(steps, plan.AcquireSlot)
}

// Prepare writes what must be written before the first step, once no gate is in its way: that a user has forced the change, what the disk lacks
// of the debts, and, before anything is disturbed, the host's record and the room for the device plugin's config. The error is why the step has
// to wait.
func (f *Fencing) Prepare(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	if err := f.noteForced(ctx, seen, want); err != nil {
		return err
	}
	step := steps[0]
	if err := f.Journal.RecordDebts(ctx, seen.Writing(want, step.Kind), step); err != nil {
		return err
	}
	starts := startsDisruption(seen, want, steps)
	if starts {
		if err := f.Journal.TryRecord(ctx, seen.Writing(want, step.Kind)); err != nil {
			return err
		}
	}
	if !step.Traits().Opens || step.Kind == plan.Fence && !starts {
		return nil
	}
	return f.Handover.Prepare(ctx, seen, want, steps)
}

// noteForced notes in the journal that the running change needs no window, if a user has said so by the annotation since it began. The
// annotation is good for one change: the same write removes it.
func (f *Fencing) noteForced(ctx context.Context, seen *state.Observed, want state.Desired) error {
	if seen.Journal == nil || seen.Other(want) || want.Undo || !seen.Forces(want) || seen.Journal.Forced && !seen.Edited(want) {
		return nil
	}
	j := *seen.Journal
	j.Forced = true
	node, err := f.Journal.Write(ctx, seen.Writing(want, plan.Record), j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Record(node, text, config.AnnotationForce)
	})
	if err != nil {
		return fmt.Errorf("noting that the change needs no window, as annotation %s says: %w", config.AnnotationForce, err)
	}
	seen.Node, seen.Journal = node, &j
	return nil
}
