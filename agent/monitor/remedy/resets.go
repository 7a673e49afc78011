package remedy

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// patience is how long a change that is under way waits for the driver's reading of the health of its GPUs; a read takes milliseconds.
const patience = time.Minute

// Resets says which GPUs to reset because they are not well, and notes the resets that were given up.
type Resets struct {
	Health monitor.Health
	Clock  *monotonic.Clock
	Began  time.Time // when this process began
}

// Forget treats the process as one that begins now.
func (r *Resets) Forget(now time.Time) { r.Began = now }

// Sick returns the GPUs to reset because they are not well. In the middle of a change a new process waits until they are known: it does not
// restore a GPU without the reset that pods have left for.
func (r *Resets) Sick(node *corev1.Node, underway bool) (plan.Sick, error) {
	if fence.NVSentinel(node) != "" {
		return nil, nil
	}
	sick, known := r.Health.ToReset()
	if !known && underway && r.Clock.Since(r.Began) < patience {
		return nil, &outcome.Waiting{
			Reason: config.ReasonRepartitioning, For: outcome.ForStep, After: outcome.ConflictRetry,
			Message: "the change continues when the driver reports the GPUs' health",
		}
	}
	return sick, nil
}

// NoteFailed notes the GPUs that are not reset because the agent has given up the change, so that pods do not have to leave for them again and
// again. The label's request does not count as failed.
func (r *Resets) NoteFailed(steps []plan.Step, failure *api.Failure) {
	if failure.Later {
		return
	}
	for i, s := range steps {
		if s.Kind == plan.Heal && (i == 0 || steps[0].Kind != plan.Heal) {
			r.Health.NoteResetFailed(s.GPU)
			failure.Later = true
		}
	}
}
