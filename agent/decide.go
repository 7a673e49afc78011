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
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Delays between looks. Watches wake the loop earlier; these are for what cannot be watched.
const (
	// driverRetry is the pause before asking an absent or silent driver again: a driver upgrade takes minutes.
	driverRetry = 5 * time.Second
	// evictionRetry is the longest pause between two looks at pods that are leaving.
	evictionRetry = 5 * time.Second
	// inUseRetry is the pause before trying again what a process still holds.
	inUseRetry = 2 * time.Second
	// inUseNews is the least time between two words on who holds a GPU: people read it, and each is a write to the node.
	inUseNews = time.Minute
	// apiRetry is the longest pause after a look that the API server has ended: it may answer again at any moment.
	apiRetry = 10 * time.Second
	// conflictRetry is the pause after somebody else wrote the node at the same moment.
	conflictRetry = 100 * time.Millisecond
)

// decision is what follows from one pass.
type decision struct {
	reason   config.Reason
	message  string
	after    time.Duration // until the next look, if nothing wakes the loop; 0 means at once
	stalled  bool
	blockers []string // what is in the way
	planned  time.Time
	failure  *api.Failure // the change is given up, and undone
	waits    outcome.For
	noReset  bool // the GPU changes its mode at a reboot only: the plan is another one from now on
}

// decide is the one place where an error becomes a decision.
func (a *Agent) decide(seen observed, want desired, step plan.Step, err error) decision {
	var waiting *outcome.Waiting
	var stalled *outcome.Stalled
	var failure *api.Failure
	var refused *plan.Refused
	switch {
	case errors.As(err, &waiting):
		return decision{
			reason: waiting.Reason, message: waiting.Error(), after: waiting.After, blockers: waiting.Blockers, planned: waiting.Planned,
			waits: waiting.For,
		}
	case errors.As(err, &stalled):
		return decision{reason: stalled.Reason, message: stalled.Message, after: a.settings.Retry.Longest, stalled: true}
	case errors.As(err, &refused):
		return decision{reason: refusal(refused), message: err.Error(), after: a.settings.Retry.Longest, stalled: true}
	case errors.As(err, &failure):
		return decision{reason: failure.Reason, message: failure.Message, failure: failure}
	case errors.Is(err, nvml.ErrReplaced):
		return decision{reason: config.ReasonDriverNotLoaded, message: err.Error() + "; starting anew", waits: outcome.ForDriver}
	case errors.Is(err, nvml.ErrNoDriver):
		return decision{reason: config.ReasonDriverNotLoaded, message: err.Error() + "; waiting for the driver to be loaded", after: driverRetry, waits: outcome.ForDriver}
	case errors.Is(err, nvml.ErrUnresponsive):
		return decision{
			reason:  config.ReasonDriverUnresponsive,
			message: err.Error() + "; nothing is done until it answers (a reboot may be needed)", after: driverRetry, waits: outcome.ForDriver,
		}
	case apierrors.IsConflict(err):
		return decision{reason: config.ReasonRepartitioning, message: "the node object changed meanwhile; looking again", after: conflictRetry}
	case step.Traits().TouchesGPU && errors.Is(err, nvml.ErrInUse):
		return a.inUse(seen, want, step, err)
	case step.Traits().TouchesGPU && errors.Is(err, nvml.ErrNotSupported):
		return unsupported(seen, want, step, err)
	}
	return a.retry(step, want, err)
}

// unsupported is a step that will not work however often it is tried. A reset may be done by a reboot instead, where it can
// be told that one has happened.
func unsupported(seen observed, want desired, step plan.Step, err error) decision {
	if step.Kind == plan.Reset && seen.boot.id != "" {
		return decision{noReset: true}
	}
	return decision{failure: &api.Failure{Wish: want.fingerprint, Reason: config.ReasonHardwareFailure, Message: err.Error()}}
}

// inUse waits for processes that no pod accounts for, until the deadline for pods. Some come and go, as a monitor's do: who
// it is that holds the GPU is not told anew each time.
func (a *Agent) inUse(seen observed, want desired, step plan.Step, err error) decision {
	now := a.clock.Now()
	if seen.journal != nil && now.After(a.deadline(seen, want, step)) && !want.undo {
		return decision{failure: &api.Failure{
			Wish: want.fingerprint, Reason: config.ReasonGPUInUse,
			Message: fmt.Sprintf("%v, and still is at the deadline, %s", err, outcome.Moment(a.deadline(seen, want, step))),
		}}
	}
	tried := a.budget.attempts[step.String()]
	if !tried.inUse || now.Sub(tried.lastDecisionAt) >= inUseNews {
		tried.inUse, tried.lastDecisionAt = true, now
		wait := outcome.Waiting{Message: err.Error() + "; waiting for that to end", Advice: "end it to go on at once"}
		if seen.journal != nil {
			wait.Since = seen.journal.Started
			wait.Until, wait.Then = seen.atDeadline(a.deadline(seen, want, step), want)
		}
		tried.lastDecision = decision{reason: config.ReasonGPUInUse, after: inUseRetry, message: wait.Error()}
	}
	tried.next = now.Add(inUseRetry)
	a.budget.attempts[step.String()] = tried
	return tried.lastDecision
}

// throttledNames are names that people were told, and when.
type throttledNames struct {
	names []string
	at    time.Time
}

// of returns the names, or for a while those from before: processes that are started again and again have another pid each time.
func (t *throttledNames) of(names []string, now time.Time) []string {
	if len(t.names) == 0 || now.Sub(t.at) >= inUseNews {
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
func (a *Agent) retry(step plan.Step, want desired, err error) decision {
	tried := a.budget.attempts[step.String()]
	tried.failures++
	pause := a.settings.Retry.First
	for range tried.failures - 1 {
		pause = min(2*pause, a.settings.Retry.Longest)
	}
	if _, is := errors.AsType[*retried.Unanswered](err); is && step.Kind == "" {
		pause = min(pause, apiRetry)
	}
	tried.next = a.clock.Now().Add(pause)
	tried.lastDecision = decision{reason: config.ReasonRetrying, message: err.Error() + "; trying again", after: pause}
	if step.Traits().Bounded && tried.failures >= a.settings.Retry.Failures {
		failure := &api.Failure{
			Wish: want.fingerprint, Reason: config.ReasonHardwareFailure,
			Message: fmt.Sprintf("%v; given up after %s", err, legible.Counted(a.settings.Retry.Failures, "attempt")),
		}
		tried.lastDecision = decision{failure: failure, reason: failure.Reason, message: failure.Message, stalled: true}
	}
	a.budget.attempts[step.String()] = tried
	return tried.lastDecision
}
