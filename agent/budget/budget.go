// Package budget counts how often steps were tried, and since when the agent waits for them.
package budget

import (
	"errors"
	"fmt"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
)

// Budget is how often steps were tried, and since when the agent waits for them.
type Budget struct {
	clock     *steady.Clock
	settings  config.Settings
	Attempts  map[string]Attempt   // of steps that fail
	Successes map[string]int       // of each step on the hardware since a step of another kind, and of those that others may undo
	Waits     map[string]time.Time // when the waits began that have a time of their own, by what is waited for
}

// New is one that knows of no step.
func New(clock *steady.Clock, settings config.Settings) *Budget {
	return &Budget{clock: clock, settings: settings, Attempts: map[string]Attempt{}, Successes: map[string]int{}, Waits: map[string]time.Time{}}
}

// Forget is for when the clock was set: all steps begin anew.
func (b *Budget) Forget(time.Time) { *b = *New(b.clock, b.settings) }

// Attempt is what is known of a step that fails.
type Attempt struct {
	Failures       int             // in a row
	Next           time.Time       // not to be tried before, whatever wakes the loop
	LastDecision   report.Decision // what followed from it last
	InUse          bool            // it waits for who holds the GPU
	LastDecisionAt time.Time       // when the condition said so
}

// TooEarly repeats what the condition said when the step failed a moment ago, for as long as it must not be tried again.
func (b *Budget) TooEarly(step plan.Step) error {
	tried, ok := b.Attempts[step.String()]
	wait := tried.Next.Sub(b.clock.Now())
	switch {
	case !ok || wait <= 0:
		return nil
	case tried.LastDecision.Stalled:
		return &outcome.Stalled{Reason: tried.LastDecision.Reason, Message: tried.LastDecision.Message}
	default:
		return &outcome.Waiting{Reason: tried.LastDecision.Reason, Message: tried.LastDecision.Message, After: wait}
	}
}

// WaitOf is by what the wait for a step is known: the pods of all operands together, else each step for itself.
func WaitOf(step plan.Step) string {
	if step.Traits().WaitsAsOne {
		return string(step.Kind)
	}
	return step.String()
}

// Began is when the wait for the step began. It is lost with the process: a new one waits anew.
func (b *Budget) Began(step plan.Step) time.Time {
	began, ok := b.Waits[WaitOf(step)]
	if !ok {
		began = b.clock.Now().UTC().Truncate(time.Second)
		b.Waits[WaitOf(step)] = began
	}
	return began
}

// Done drops what is known of failures of the step, and counts its success if that is bounded.
func (b *Budget) Done(step plan.Step) {
	delete(b.Attempts, step.String())
	delete(b.Waits, WaitOf(step))
	if step.Traits().Repeatable {
		b.Successes[step.String()]++
	}
}

// afterPods is the least time of each wait that comes after eviction, which may use up timeouts.drain.
const afterPods = 5 * time.Minute

// Deadline is the end of a wait that starts after eviction: the drain deadline, or afterPods from its start, whichever is later.
func (b *Budget) Deadline(seen state.Observed, want state.Desired, step plan.Step) time.Time {
	until := b.Began(step).Add(afterPods)
	if pods := seen.Journal.Started.Add(b.settings.With(want.Drain).Timeouts.Drain); pods.After(until) {
		return pods
	}
	return until
}

// CheckNoEffect ends a change that somebody else undoes as often as it goes a step on. On the way back it is tried again, but ever less often.
func (b *Budget) CheckNoEffect(want state.Desired, step plan.Step) error {
	n := b.Successes[step.String()]
	if !step.Traits().Repeatable || n < b.settings.Retry.NoEffect {
		return nil
	}
	text := fmt.Sprintf("%s succeeded %d times and had no effect, or somebody else undoes it", step, n)
	if want.Undo {
		delete(b.Successes, step.String())
		return errors.New(text)
	}
	return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonStepHadNoEffect, Message: text}
}

// Failed lets a failed step be tried again after a pause that doubles each time, until its budget is used up.
func (b *Budget) Failed(step plan.Step, want state.Desired, err error) report.Decision {
	tried := b.Attempts[step.String()]
	tried.Failures++
	pause := b.settings.Retry.First
	for range tried.Failures - 1 {
		pause = min(2*pause, b.settings.Retry.Longest)
	}
	if _, is := errors.AsType[*retried.Unanswered](err); is && step.Kind == "" {
		pause = min(pause, outcome.APIRetry)
	}
	tried.Next = b.clock.Now().Add(pause)
	tried.LastDecision = report.Decision{Reason: config.ReasonRetrying, Message: err.Error() + "; trying again", After: pause}
	if step.Traits().Bounded && tried.Failures >= b.settings.Retry.Failures {
		failure := &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonHardwareFailure,
			Message: fmt.Sprintf("%v; given up after %s", err, legible.Counted(b.settings.Retry.Failures, "attempt")),
		}
		tried.LastDecision = report.Decision{Failure: failure, Reason: failure.Reason, Message: failure.Message, Stalled: true}
	}
	b.Attempts[step.String()] = tried
	return tried.LastDecision
}

// InUse waits for processes that no pod accounts for, until the deadline for pods. Some come and go, as a monitor's do: who
// it is that holds the GPU is not told anew each time.
func (b *Budget) InUse(seen state.Observed, want state.Desired, step plan.Step, err error) report.Decision {
	now := b.clock.Now()
	if seen.Journal != nil && now.After(b.Deadline(seen, want, step)) && !want.Undo {
		return report.Decision{Failure: &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonGPUInUse,
			Message: fmt.Sprintf("%v, and still is at the deadline, %s", err, outcome.Moment(b.Deadline(seen, want, step))),
		}}
	}
	tried := b.Attempts[step.String()]
	if !tried.InUse || now.Sub(tried.LastDecisionAt) >= outcome.InUseNews {
		tried.InUse, tried.LastDecisionAt = true, now
		wait := outcome.Waiting{Message: err.Error() + "; waiting for that to end", Advice: "end it to go on at once"}
		if seen.Journal != nil {
			wait.Since = seen.Journal.Started
			wait.Until, wait.Then = seen.AtDeadline(b.Deadline(seen, want, step), want)
		}
		tried.LastDecision = report.Decision{Reason: config.ReasonGPUInUse, After: outcome.InUseRetry, Message: wait.Error()}
	}
	tried.Next = now.Add(outcome.InUseRetry)
	b.Attempts[step.String()] = tried
	return tried.LastDecision
}
