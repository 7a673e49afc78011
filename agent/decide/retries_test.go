package decide_test

import (
	"testing"
	"time"

	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// One count says of each kind of step whether it succeeds in vain: of those on a GPU, and of those that other programs may undo at once.
func TestOneCountSaysWhatSucceedsInVain(t *testing.T) {
	t.Parallel()
	settings := config.Default()
	for _, kind := range plan.Kinds() {
		b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(0, 0))), settings)
		step := plan.Step{Kind: kind}
		for range settings.Retry.NoEffect {
			if failure := b.InVain(state.Desired{}, step); failure != nil {
				t.Fatalf("%s is in vain too early: %v", kind, failure)
			}
			b.Done(step)
		}
		bounded := step.Traits().Repeatable || step.Traits().TouchesGPU()
		if failure := b.InVain(state.Desired{}, step); (failure != nil) != bounded {
			t.Errorf("%s after %d successes: %v", kind, settings.Retry.NoEffect, failure)
		}
		if err := b.CheckNoEffect(state.Desired{}, step); (err != nil) != step.Traits().Repeatable {
			t.Errorf("%s, which is repeatable: %t, ends the change before it is begun once more: %v", kind, step.Traits().Repeatable, err)
		}
	}
}

// A step that was done is progress, also where the API server fails some requests.
func TestPausesAfterUnansweredPassesGrowUntilAnAnswerOrAStep(t *testing.T) {
	t.Parallel()
	r := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(0, 0))), config.Default())
	for name, success := range map[string]func(){"an answer": r.Answered, "a step": func() { r.Done(plan.Step{Kind: plan.Fence}) }} {
		first := r.Unanswered()
		var last, sum time.Duration
		for range 20 {
			last = r.Unanswered()
			sum += last
		}
		if first < time.Second || first > 2*time.Second || last < 20*time.Second || last > 30*time.Second || sum < 5*time.Minute {
			t.Errorf("before %s: from %s to %s, %s in all", name, first, last, sum)
		}
		success()
	}
}
