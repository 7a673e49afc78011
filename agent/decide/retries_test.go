package decide_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
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

// early says why a step is not tried now; empty if it is.
func early(b *decide.Retries, step plan.Step) string {
	var waiting *outcome.Waiting
	var stalled *outcome.Stalled
	switch err := b.TooEarly(step); {
	case errors.As(err, &waiting):
		return fmt.Sprintf("waits %s, %s: %s", waiting.After, waiting.Reason, waiting.Message)
	case errors.As(err, &stalled):
		return fmt.Sprintf("%s: %s", stalled.Reason, stalled.Message)
	}
	return ""
}

// A step that fails is tried again after pauses that double, and not before; the change is given up after so many failures of a step whose failures count.
func TestAStepThatFailsIsTriedAgainUntilItsBudgetIsUsedUp(t *testing.T) {
	t.Parallel()
	settings, clock := config.Default(), testclock.NewFakeClock(time.Unix(0, 0))
	settings.Retry.First, settings.Retry.Longest, settings.Retry.Failures = time.Second, 3*time.Second, 4
	b := decide.NewRetries(monotonic.New(clock), settings)
	create, evict := plan.Step{Kind: plan.Create}, plan.Step{Kind: plan.Evict}
	for i, pause := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second} {
		if said := early(b, create); said != "" {
			t.Errorf("before failure %d: %s", i+1, said)
		}
		if d := b.Failed(create, state.Desired{}, errors.New("no")); d.After != pause || d.Failure != nil || d.Reason != config.ReasonRetrying {
			t.Errorf("failure %d: %+v, want a pause of %s", i+1, d, pause)
		}
		if said, want := early(b, create), fmt.Sprintf("waits %s, Retrying: no; trying again until about 1970-01-01 00:00:06Z: %d of 4 attempts have failed", pause, i+1); said != want {
			t.Errorf("after failure %d: %s, want %s", i+1, said, want)
		}
		if said := early(b, evict); said != "" {
			t.Errorf("the failure of a step holds up another: %s", said)
		}
		clock.Step(pause)
	}
	d := b.Failed(create, state.Desired{Fingerprint: "asked"}, errors.New("no"))
	if d.Failure == nil || d.Failure.Reason != config.ReasonStepFailed || d.Failure.Fingerprint != "asked" || d.Failure.Message != "no; given up after 4 attempts" {
		t.Errorf("the last failure: %+v", d)
	}
	if said, want := early(b, create), "StepFailed: no; given up after 4 attempts"; said != want {
		t.Errorf("after the last failure: %s, want %s", said, want)
	}
	for range 2 * settings.Retry.Failures {
		if d := b.Failed(evict, state.Desired{}, errors.New("no")); d.Failure != nil {
			t.Errorf("pods that stay are no failure of the step: %+v", d)
		}
	}
}

// Only what the driver itself has refused is a failure of the hardware.
func TestAChangeIsGivenUpForTheReasonThatWasSeen(t *testing.T) {
	t.Parallel()
	driver := fmt.Errorf("the step: %w", &nvml.Error{Op: "creating 3g.40gb@4", Code: "ERROR_UNKNOWN"})
	refused := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "gpu-1", errors.New("by a webhook"))
	settings := config.Default()
	for _, row := range []struct {
		kind plan.Kind
		err  error
		want config.Reason
	}{
		{plan.Create, driver, config.ReasonHardwareFailure},
		{plan.Create, refused, config.ReasonStepFailed},
		{plan.SetComputeMode, driver, config.ReasonHardwareFailure},
		{plan.RegenerateCDI, driver, config.ReasonHardwareFailure},
		{plan.RegenerateCDI, errors.New("read-only file system"), config.ReasonStepFailed},
		{plan.AskReboot, errors.New("read-only file system"), config.ReasonStepFailed},
		{plan.WriteSharing, refused, config.ReasonStepFailed},
		{plan.ReloadPlugin, refused, config.ReasonStepFailed},
		{plan.PublishNodeKeys, refused, config.ReasonStepFailed},
		{plan.StopUnits, errors.New("D-Bus: access denied"), config.ReasonUnitFailed},
	} {
		b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(0, 0))), settings)
		var d outcome.Decision
		for range settings.Retry.Failures {
			d = b.Decide(&state.Observed{}, state.Desired{}, plan.Step{Kind: row.kind}, row.err)
		}
		if d.Failure == nil || d.Failure.Reason != row.want || d.Reason != row.want {
			t.Errorf("%s, after %d times %v: %+v, want %s", row.kind, settings.Retry.Failures, row.err, d, row.want)
		}
	}
}

// An observation that fails is repeated after pauses that double, too.
func TestAnObservationThatFailsIsRepeated(t *testing.T) {
	t.Parallel()
	settings := config.Default()
	settings.Retry.First, settings.Retry.Longest = time.Second, 3*time.Second
	b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(0, 0))), settings)
	for _, pause := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 3 * time.Second, 0, time.Second} {
		if pause == 0 {
			b.ForgetObservations()
		} else if d := b.ObservationFailed(errors.New("no")); d.After != pause || d.Reason != config.ReasonRetrying {
			t.Errorf("%+v, want a pause of %s", d, pause)
		}
	}
}

// The agent waits for processes on a GPU until the deadline for pods. It reports those that it sees once a minute, and at once where the step has failed
// otherwise between.
func TestProcessesOnAGPUAreWaitedForUntilTheDeadline(t *testing.T) {
	t.Parallel()
	start := time.Unix(1000, 0)
	drain := config.Default().Timeouts.Drain
	reset := plan.Step{Kind: plan.Reset, GPU: "GPU-a"}
	for name, row := range map[string]struct {
		at       time.Duration
		journal  bool
		undo     bool
		before   string // what was said half a minute before: a process, or a failure
		earlier  time.Duration
		says     string
		deadline bool // the message names it
		failed   bool
	}{
		"no change is under way":              {at: drain + time.Hour, says: "process 2"},
		"before the deadline":                 {at: drain - time.Minute, journal: true, says: "process 2", deadline: true},
		"at the deadline":                     {at: drain, journal: true, says: "process 2", deadline: true},
		"after the deadline":                  {at: drain + time.Second, journal: true, failed: true, says: "process 2, still at the deadline"},
		"after the deadline, on the way back": {at: drain + time.Second, journal: true, undo: true, says: "process 2"},
		"half a minute after another process": {
			at:       time.Minute,
			journal:  true,
			before:   "process 1",
			earlier:  30 * time.Second,
			says:     "process 1",
			deadline: true,
		},
		"half a minute after another process, and then none": {
			at:       time.Minute,
			journal:  true,
			before:   "process 1, then none",
			earlier:  30 * time.Second,
			says:     "process 1",
			deadline: true,
		},
		"a minute after another process": {at: time.Minute, journal: true, before: "process 1", earlier: time.Minute, says: "process 2", deadline: true},
		"half a minute after it failed somehow": {
			at:       time.Minute,
			journal:  true,
			before:   "a failure",
			earlier:  30 * time.Second,
			says:     "process 2",
			deadline: true,
		},
	} {
		clock := testclock.NewFakeClock(start)
		b := decide.NewRetries(monotonic.New(clock), config.Default())
		seen, want := &state.Observed{}, state.Desired{Fingerprint: "asked", Undo: row.undo}
		if row.journal {
			seen.Journal = &journal.Journal{Started: start}
		}
		b.Began(reset)
		clock.Step(row.at - row.earlier)
		switch row.before {
		case "process 1":
			b.InUse(seen, want, reset, errors.New(row.before))
		case "process 1, then none":
			b.InUse(seen, want, reset, errors.New("process 1"))
			b.InUse(seen, want, reset, &outcome.NoHolderError{Err: errors.New("no process")})
		case "a failure":
			b.InUse(seen, want, reset, errors.New("process 1"))
			b.Failed(reset, want, errors.New(row.before))
		}
		clock.Step(row.earlier)
		d := b.InUse(seen, want, reset, errors.New("process 2"))
		message := d.Message
		if d.Failure != nil {
			message = d.Failure.Message
		}
		if (d.Failure != nil) != row.failed || !strings.Contains(message, row.says) {
			t.Errorf("%s: it has failed: %t, want %t: %s, want %q", name, d.Failure != nil, row.failed, message, row.says)
		}
		if d.Failure == nil && (d.Reason != config.ReasonGPUInUse || strings.Contains(message, outcome.Moment(start.Add(drain))) != row.deadline) {
			t.Errorf("%s: %s: %s, and the deadline is %s", name, d.Reason, message, outcome.Moment(start.Add(drain)))
		}
	}
}

// An undo does first what is left to be done to GPUs of which no step was given up; the order of each GPU's steps, and of what comes after them, stays.
func TestTheUndoOfAGPUOfWhichAStepWasGivenUpComesLast(t *testing.T) {
	t.Parallel()
	on := func(kind plan.Kind, gpu nvml.UUID) plan.Step { return plan.Step{Kind: kind, GPU: gpu} }
	settings := config.Default()
	settings.Retry.Failures = 1
	destroy, create, other := on(plan.Destroy, "GPU-a"), on(plan.Create, "GPU-a"), on(plan.Create, "GPU-b")
	all, release := on(plan.Reset, ""), on(plan.Release, "")
	for name, row := range map[string]struct{ steps, want []plan.Step }{
		"nothing":                       {},
		"one GPU":                       {[]plan.Step{destroy, create}, []plan.Step{destroy, create}},
		"another GPU":                   {[]plan.Step{destroy, create, other}, []plan.Step{other, destroy, create}},
		"another GPU is first":          {[]plan.Step{other, destroy, create}, []plan.Step{other, destroy, create}},
		"another GPU, and what follows": {[]plan.Step{destroy, create, other, release}, []plan.Step{other, destroy, create, release}},
		"a step on all GPUs between":    {[]plan.Step{destroy, all, other}, []plan.Step{destroy, all, other}},
		"a step on no GPU between":      {[]plan.Step{destroy, release, other}, []plan.Step{destroy, release, other}},
	} {
		b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(0, 0))), settings)
		b.Failed(destroy, state.Desired{}, errors.New("no"))
		if got := b.OthersFirst(row.steps); fmt.Sprint(got) != fmt.Sprint(row.want) {
			t.Errorf("%s: %v, want %v", name, got, row.want)
		}
	}
}

// What a pass that ended by an error says, and whether the change goes on.
func TestWhatBecomesOfAPassThatEndedByAnError(t *testing.T) {
	t.Parallel()
	conflict := apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "gpu-1", errors.New("another version"))
	for name, row := range map[string]struct {
		kind    plan.Kind // empty: the observation
		err     error
		boot    string
		reason  config.Reason
		failed  bool
		noReset bool
	}{
		"the observation":                {err: errors.New("no"), reason: config.ReasonRetrying},
		"the observation, in use":        {err: nvml.ErrInUse, reason: config.ReasonRetrying},
		"a step":                         {kind: plan.Create, err: errors.New("no"), reason: config.ReasonRetrying},
		"a step on a GPU that is in use": {kind: plan.Create, err: nvml.ErrInUse, reason: config.ReasonGPUInUse},
		"a step on none, in use":         {kind: plan.StopUnits, err: nvml.ErrInUse, reason: config.ReasonRetrying},
		"a mode that the driver does not know": {
			kind:   plan.SetMode,
			err:    nvml.ErrNotSupported,
			boot:   "boot-1",
			reason: config.ReasonHardwareFailure,
			failed: true,
		},
		"a step on none that is not supported":     {kind: plan.StopUnits, err: nvml.ErrNotSupported, reason: config.ReasonRetrying},
		"a reset that the driver does not know":    {kind: plan.Reset, err: nvml.ErrNotSupported, boot: "boot-1", noReset: true},
		"that, where a reboot cannot be seen":      {kind: plan.Reset, err: nvml.ErrNotSupported, reason: config.ReasonHardwareFailure, failed: true},
		"a reset that fails":                       {kind: plan.Reset, err: errors.New("no"), boot: "boot-1", reason: config.ReasonRetrying},
		"another program wrote at the same moment": {kind: plan.Fence, err: conflict, reason: config.ReasonRepartitioning},
		"the driver is replaced":                   {kind: plan.Create, err: nvml.ErrReplaced, reason: config.ReasonDriverNotLoaded},
		"the driver does not answer":               {kind: plan.Create, err: nvml.ErrUnresponsive, reason: config.ReasonDriverUnresponsive},
	} {
		b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(1000, 0))), config.Default())
		seen := &state.Observed{}
		seen.Boot.ID = row.boot
		d := b.Decide(seen, state.Desired{}, plan.Step{Kind: row.kind}, row.err)
		reason := d.Reason
		if d.Failure != nil {
			reason = d.Failure.Reason
		}
		if reason != row.reason || (d.Failure != nil) != row.failed || d.NoReset != row.noReset {
			t.Errorf("%s: %q, failed %t, no reset %t; want %q, %t, %t", name, reason, d.Failure != nil, d.NoReset, row.reason, row.failed, row.noReset)
		}
	}
	b := decide.NewRetries(monotonic.New(testclock.NewFakeClock(time.Unix(1000, 0))), config.Default())
	for range 4 { // of an observation each, not of one step
		b.Decide(&state.Observed{}, state.Desired{}, plan.Step{}, errors.New("no"))
	}
	if b.ForgetObservations(); b.Decide(&state.Observed{}, state.Desired{}, plan.Step{}, errors.New("no")).After != config.Default().Retry.First {
		t.Error("a failed observation counts after one that has succeeded")
	}
}

// A process that comes and goes opens no end of quick tries, each of which scans the process table.
func TestAProcessThatComesAndGoesDoesNotQuickenTheTriesForGood(t *testing.T) {
	t.Parallel()
	start, reset := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), plan.Step{Kind: plan.Reset, GPU: "GPU-a"}
	clock := testclock.NewFakeClock(start)
	b := decide.NewRetries(monotonic.New(clock), config.Default())
	want, tries := state.Desired{Fingerprint: "asked", Undo: true}, 0
	for ; clock.Since(start) < time.Hour; tries++ {
		var err error = &outcome.NoHolderError{Err: errors.New("no process")}
		if tries%8 == 0 {
			err = errors.New("a monitor")
		}
		clock.Step(b.InUse(&state.Observed{}, want, reset, err).After)
	}
	if most := int(time.Hour/outcome.InUseRetry) + 60*int(outcome.NoHolderNews/outcome.NoHolderRetry); tries > most {
		t.Errorf("%d tries in an hour, want at most %d", tries, most)
	}
}
