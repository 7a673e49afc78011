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

// What the agent has counted and awaited for a step counts until another heads the plan; on a GPU, steps follow each other.
func TestWhatIsOverIsDropped(t *testing.T) {
	t.Parallel()
	settings, clock := config.Default(), testclock.NewFakeClock(time.Unix(0, 0))
	create, destroy, evict := plan.Step{Kind: plan.Create}, plan.Step{Kind: plan.Destroy}, plan.Step{Kind: plan.Evict}
	b := decide.NewRetries(monotonic.New(clock), settings)
	for range settings.Retry.NoEffect {
		b.Done(create)
	}
	for range settings.Retry.Failures - 1 {
		b.CountFailure(create)
	}
	began := b.Began(destroy)
	clock.Step(time.Hour)
	for _, row := range []struct {
		name                  string
		then                  func()
		inVain, waits, spends bool
	}{
		{"the step of the wait heads the plan", func() { b.Head(destroy) }, true, true, true},
		{"another step on a GPU does", func() { b.Head(create) }, true, false, true},
		{"a step of another kind does", func() { b.Head(evict) }, false, false, true},
		{"the steps are of another change", b.ForgetFailures, false, false, false},
	} {
		row.then()
		inVain, waits, spends := b.InVain(state.Desired{}, create) != nil, b.Began(destroy).Equal(began), b.OneMoreIsTooMany(create)
		if inVain != row.inVain || waits != row.waits || spends != row.spends {
			t.Errorf("%s: in vain %t, waits %t, its budget is almost used up %t", row.name, inVain, waits, spends)
		}
	}
	b.Done(create)
	b.CountFailure(create)
	b.BeginUndo()
	for range settings.Retry.NoEffect - 1 {
		b.Done(create)
	}
	if b.InVain(state.Desired{}, create) != nil {
		t.Error("an undo begins with the successes of the change")
	}
}
