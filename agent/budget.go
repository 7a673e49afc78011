package agent

import (
	"time"

	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/steady"
)

// budget is how often steps were tried, and since when they are waited for.
type budget struct {
	clock     *steady.Clock
	attempts  map[string]attempt   // of steps that fail
	successes map[string]int       // of each step on the hardware since a step of another kind, and of those that others may undo
	waits     map[string]time.Time // when the waits began that have a time of their own, by what is waited for
}

func newBudget(clock *steady.Clock) budget {
	return budget{clock: clock, attempts: map[string]attempt{}, successes: map[string]int{}, waits: map[string]time.Time{}}
}

// Forget implements forgetter.
func (b *budget) Forget(time.Time) { *b = newBudget(b.clock) }

// attempt is what is known of a step that fails.
type attempt struct {
	failures       int             // in a row
	next           time.Time       // not to be tried before, whatever wakes the loop
	lastDecision   report.Decision // what followed from it last
	inUse          bool            // it waits for who holds the GPU, which was told at
	lastDecisionAt time.Time
}

// tooEarly is what was told when the step failed a moment ago, for as long as it must not be tried again.
func (b *budget) tooEarly(step plan.Step) error {
	tried, ok := b.attempts[step.String()]
	wait := tried.next.Sub(b.clock.Now())
	switch {
	case !ok || wait <= 0:
		return nil
	case tried.lastDecision.Stalled:
		return &outcome.Stalled{Reason: tried.lastDecision.Reason, Message: tried.lastDecision.Message}
	default:
		return &outcome.Waiting{Reason: tried.lastDecision.Reason, Message: tried.lastDecision.Message, After: wait}
	}
}

// waitOf is by what the wait for a step is known: the pods of all operands together, else each step for itself.
func waitOf(step plan.Step) string {
	if step.Traits().WaitsAsOne {
		return string(step.Kind)
	}
	return step.String()
}

// began is when the wait for the step began. It is lost with the process: a new one waits anew.
func (b *budget) began(step plan.Step) time.Time {
	began, ok := b.waits[waitOf(step)]
	if !ok {
		began = b.clock.Now().UTC().Truncate(time.Second)
		b.waits[waitOf(step)] = began
	}
	return began
}

// done drops what is known of failures of the step, and counts its success if that is bounded.
func (b *budget) done(step plan.Step) {
	delete(b.attempts, step.String())
	delete(b.waits, waitOf(step))
	if step.Traits().Repeatable {
		b.successes[step.String()]++
	}
}
