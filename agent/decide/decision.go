package decide

import (
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Decide turns the error that ended a pass into a decision. For a step that fails or finds a GPU in use, the decision depends on how often and how long it has.
func (r *Retries) Decide(seen *state.Observed, want state.Desired, step plan.Step, err error) outcome.Decision {
	var waiting *outcome.Waiting
	var stalled *outcome.Stalled
	var failure *api.Failure
	var refused *plan.Refused
	switch {
	case errors.As(err, &waiting):
		return outcome.Decision{
			Reason: waiting.Reason, Message: waiting.Error(), After: waiting.After, Blockers: waiting.Blockers, Planned: waiting.Planned,
			Until: waiting.Until, Then: waiting.Then,
			Waits: waiting.For, Named: waiting.Named,
		}
	case errors.As(err, &stalled):
		return outcome.Decision{Reason: stalled.Reason, Message: stalled.Message, After: r.settings.Retry.Longest, Stalled: true}
	case errors.As(err, &refused):
		return outcome.Decision{Reason: Refusal(refused), Message: err.Error(), After: r.settings.Retry.Longest, Stalled: true}
	case errors.As(err, &failure):
		return outcome.Decision{Reason: failure.Reason, Message: failure.Message, Failure: failure}
	case errors.Is(err, nvml.ErrReplaced):
		return outcome.Decision{Reason: config.ReasonDriverNotLoaded, Message: err.Error() + "; starting again", Waits: outcome.ForDriver}
	case errors.Is(err, nvml.ErrNoDriver):
		return outcome.Decision{
			Reason: config.ReasonDriverNotLoaded, Message: err.Error() + "; waiting for the driver to be loaded",
			After: outcome.DriverRetry, Waits: outcome.ForDriver,
		}
	case errors.Is(err, nvml.ErrUnresponsive):
		return outcome.Decision{
			Reason:  config.ReasonDriverUnresponsive,
			Message: err.Error() + "; nothing is done until it answers (a reboot may be needed)", After: outcome.DriverRetry, Waits: outcome.ForDriver,
		}
	case apierrors.IsConflict(err):
		return outcome.Decision{
			Reason: config.ReasonRepartitioning, Message: "the node object has changed; trying again",
			After: outcome.ConflictRetry, Waits: outcome.ForStep,
		}
	case step.Traits().TouchesGPU() && errors.Is(err, nvml.ErrInUse):
		return r.InUse(seen, want, step, err)
	case step.Traits().TouchesGPU() && errors.Is(err, nvml.ErrNotSupported):
		return unsupported(seen, want, step, err)
	}
	if step.Kind == "" {
		return r.ObservationFailed(err)
	}
	return r.Failed(step, want, err)
}

// unsupported decides on a step that the driver does not support: no retry helps. A reboot replaces a reset, but only if the boot ID shows the agent
// that the host has rebooted.
func unsupported(seen *state.Observed, want state.Desired, step plan.Step, err error) outcome.Decision {
	if step.Kind == plan.Reset && seen.Boot.ID != "" {
		return outcome.Decision{NoReset: true}
	}
	return outcome.Decision{Failure: &api.Failure{Fingerprint: want.Fingerprint, Reason: config.ReasonHardwareFailure, Message: err.Error()}}
}

// Refusal returns the reason for a request that is impossible.
func Refusal(err *plan.Refused) config.Reason {
	var impossible *nvml.Impossible
	switch {
	case errors.As(err, &impossible):
		return config.ReasonImpossibleGeometry
	case errors.Is(err, nvml.ErrLost):
		return config.ReasonHardwareFailure
	case errors.Is(err, plan.ErrNeedsReboot):
		return config.ReasonNeedsReboot
	default:
		return config.ReasonNoCapableGPU
	}
}
