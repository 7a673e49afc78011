package agent

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// observeMaintenance reads what the maintenance file says of the node. One that cannot be read closes it.
func (a *Agent) observeMaintenance(ctx context.Context, seen *state.Observed) error {
	file, err := a.configMap(ctx, a.settings.Maintenance)
	if err != nil {
		return err
	}
	seen.Pool.Err = file.Read(func(data []byte) (err error) {
		seen.Pool.File, err = config.ParseMaintenance(data)
		return err
	})
	seen.Pool.Pool = seen.Pool.File.For(seen.Node)
	a.observeSlot(ctx, seen)
	return nil
}

// gate says why the first step may not be taken now: a *Waiting before anything is disturbed, and a *Failure that puts the change
// off after that. It writes nothing. Steps that disturb nobody, roll-backs, and changes past the point of no return are always allowed.
func (a *Agent) gate(seen state.Observed, want state.Desired, steps []plan.Step) error {
	switch {
	case want.Undo:
		return nil
	case seen.Held() != "" && seen.StartsChange(want, steps):
		return seen.OnHold(want, a.now())
	case seen.Forced(want) || !needsWindow(seen, want, steps) || seen.PastPointOfNoReturn(want, steps):
		return nil
	case seen.Pool.Err != nil && seen.DisruptionStarted():
		return seen.PutOff(want, config.ReasonInvalidMaintenance, fmt.Sprintf("the maintenance file cannot be read any more: %v", seen.Pool.Err))
	case seen.Pool.Err != nil:
		return &outcome.Waiting{
			Reason: config.ReasonInvalidMaintenance, After: a.settings.Retry.Longest, Since: seen.Since(config.ReasonInvalidMaintenance, a.now()),
			Message: fmt.Sprintf("nothing is begun before it is known when this node may be disturbed: %v", seen.Pool.Err),
			Advice:  "mend the file, or take the ConfigMap away to have no windows",
		}
	case seen.DisruptionStarted():
		return a.mayGoOn(seen, want)
	default:
		return a.mayBegin(seen, want)
	}
}

// needsWindow reports whether the steps disturb anybody: a pod that runs, or one that would get a GPU meanwhile. A node with its startup taint runs
// no workload, and a GPU whose instances a reboot removed serves none.
func needsWindow(seen state.Observed, want state.Desired, steps []plan.Step) bool {
	// As long as kubelet is silent, everybody may be on it, and preflight waits.
	fresh := seen.Marks.Startup != nil && (seen.Kubelet.Err != nil || !plan.Has(steps, plan.Evict)) || seen.Journal != nil && seen.Journal.Startup != nil
	if fresh || seen.Restores(want) && !plan.Has(steps, plan.Evict) {
		return false
	}
	return plan.Disrupts(steps) || plan.Has(steps, plan.Fence)
}

// noteForced has the journal of the change that is under way say that it needs no window, as people have said since it was begun. Their
// word is good for one change: it goes when the journal has it.
func (a *Agent) noteForced(ctx context.Context, seen *state.Observed, want state.Desired) error {
	if seen.Journal == nil || seen.Other(want) || want.Undo || !seen.Forces(want) || seen.Journal.Forced && !seen.Edited(want) {
		return nil
	}
	j := *seen.Journal
	j.Forced = true
	node, err := a.recorded(ctx, *seen, j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Record(node, text, config.AnnotationForce)
	})
	if err != nil {
		return fmt.Errorf("noting that the change needs no window, as annotation %s says: %w", config.AnnotationForce, err)
	}
	seen.Node, seen.Journal = node, &j
	return nil
}
