// Package budget counts how often steps were tried, and since when the agent waits for them.
package budget

import (
	"time"

	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/steady"
)

// Budget is how often steps were tried, and since when the agent waits for them.
type Budget struct {
	clock     *steady.Clock
	Attempts  map[string]Attempt   // of steps that fail
	Successes map[string]int       // of each step on the hardware since a step of another kind, and of those that others may undo
	Waits     map[string]time.Time // when the waits began that have a time of their own, by what is waited for
}

// New is one that knows of no step.
func New(clock *steady.Clock) Budget {
	return Budget{clock: clock, Attempts: map[string]Attempt{}, Successes: map[string]int{}, Waits: map[string]time.Time{}}
}

// Forget is for when the clock was set: all steps begin anew.
func (b *Budget) Forget(time.Time) { *b = New(b.clock) }

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
