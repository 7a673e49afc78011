package agent

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// decide is the one place where an error becomes a decision.
func (a *Agent) decide(seen state.Observed, want state.Desired, step plan.Step, err error) report.Decision {
	var waiting *outcome.Waiting
	var stalled *outcome.Stalled
	var failure *api.Failure
	var refused *plan.Refused
	switch {
	case errors.As(err, &waiting):
		return report.Decision{
			Reason: waiting.Reason, Message: waiting.Error(), After: waiting.After, Blockers: waiting.Blockers, Planned: waiting.Planned,
			Waits: waiting.For,
		}
	case errors.As(err, &stalled):
		return report.Decision{Reason: stalled.Reason, Message: stalled.Message, After: a.settings.Retry.Longest, Stalled: true}
	case errors.As(err, &refused):
		return report.Decision{Reason: refusal(refused), Message: err.Error(), After: a.settings.Retry.Longest, Stalled: true}
	case errors.As(err, &failure):
		return report.Decision{Reason: failure.Reason, Message: failure.Message, Failure: failure}
	case errors.Is(err, nvml.ErrReplaced):
		return report.Decision{Reason: config.ReasonDriverNotLoaded, Message: err.Error() + "; starting anew", Waits: outcome.ForDriver}
	case errors.Is(err, nvml.ErrNoDriver):
		return report.Decision{Reason: config.ReasonDriverNotLoaded, Message: err.Error() + "; waiting for the driver to be loaded", After: outcome.DriverRetry, Waits: outcome.ForDriver}
	case errors.Is(err, nvml.ErrUnresponsive):
		return report.Decision{
			Reason:  config.ReasonDriverUnresponsive,
			Message: err.Error() + "; nothing is done until it answers (a reboot may be needed)", After: outcome.DriverRetry, Waits: outcome.ForDriver,
		}
	case apierrors.IsConflict(err):
		return report.Decision{Reason: config.ReasonRepartitioning, Message: "the node object changed meanwhile; looking again", After: outcome.ConflictRetry}
	case step.Traits().TouchesGPU && errors.Is(err, nvml.ErrInUse):
		return a.inUse(seen, want, step, err)
	case step.Traits().TouchesGPU && errors.Is(err, nvml.ErrNotSupported):
		return unsupported(seen, want, step, err)
	}
	return a.retry(step, want, err)
}

// unsupported is a step that will not work however often it is tried. A reset may be done by a reboot instead, where it can
// be told that one has happened.
func unsupported(seen state.Observed, want state.Desired, step plan.Step, err error) report.Decision {
	if step.Kind == plan.Reset && seen.Boot.ID != "" {
		return report.Decision{NoReset: true}
	}
	return report.Decision{Failure: &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonHardwareFailure, Message: err.Error()}}
}

// inUse waits for processes that no pod accounts for, until the deadline for pods. Some come and go, as a monitor's do: who
// it is that holds the GPU is not told anew each time.
func (a *Agent) inUse(seen state.Observed, want state.Desired, step plan.Step, err error) report.Decision {
	now := a.clock.Now()
	if seen.Journal != nil && now.After(a.deadline(seen, want, step)) && !want.Undo {
		return report.Decision{Failure: &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonGPUInUse,
			Message: fmt.Sprintf("%v, and still is at the deadline, %s", err, outcome.Moment(a.deadline(seen, want, step))),
		}}
	}
	tried := a.budget.Attempts[step.String()]
	if !tried.InUse || now.Sub(tried.LastDecisionAt) >= outcome.InUseNews {
		tried.InUse, tried.LastDecisionAt = true, now
		wait := outcome.Waiting{Message: err.Error() + "; waiting for that to end", Advice: "end it to go on at once"}
		if seen.Journal != nil {
			wait.Since = seen.Journal.Started
			wait.Until, wait.Then = seen.AtDeadline(a.deadline(seen, want, step), want)
		}
		tried.LastDecision = report.Decision{Reason: config.ReasonGPUInUse, After: outcome.InUseRetry, Message: wait.Error()}
	}
	tried.Next = now.Add(outcome.InUseRetry)
	a.budget.Attempts[step.String()] = tried
	return tried.LastDecision
}

// throttledNames are names that people were told, and when.
type throttledNames struct {
	names []string
	at    time.Time
}

// of returns the names, or for a while those from before: processes that are started again and again have another pid each time.
func (t *throttledNames) of(names []string, now time.Time) []string {
	if len(t.names) == 0 || now.Sub(t.at) >= outcome.InUseNews {
		t.names, t.at = names, now
	}
	return t.names
}

// refusal is the reason why a wish cannot be.
func refusal(err *plan.Refused) config.Reason {
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

// retry lets a failed step be tried again after a pause that doubles each time, until its budget is used up.
func (a *Agent) retry(step plan.Step, want state.Desired, err error) report.Decision {
	tried := a.budget.Attempts[step.String()]
	tried.Failures++
	pause := a.settings.Retry.First
	for range tried.Failures - 1 {
		pause = min(2*pause, a.settings.Retry.Longest)
	}
	if _, is := errors.AsType[*retried.Unanswered](err); is && step.Kind == "" {
		pause = min(pause, outcome.APIRetry)
	}
	tried.Next = a.clock.Now().Add(pause)
	tried.LastDecision = report.Decision{Reason: config.ReasonRetrying, Message: err.Error() + "; trying again", After: pause}
	if step.Traits().Bounded && tried.Failures >= a.settings.Retry.Failures {
		failure := &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonHardwareFailure,
			Message: fmt.Sprintf("%v; given up after %s", err, legible.Counted(a.settings.Retry.Failures, "attempt")),
		}
		tried.LastDecision = report.Decision{Failure: failure, Reason: failure.Reason, Message: failure.Message, Stalled: true}
	}
	a.budget.Attempts[step.String()] = tried
	return tried.LastDecision
}
