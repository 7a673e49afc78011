package decide

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// Retries counts how often the agent has tried steps, and keeps since when it waits for them.
type Retries struct {
	clock     *monotonic.Clock
	settings  config.Settings
	attempts  map[string]attempt   // of steps that fail
	successes map[string]int       // of steps on the hardware since a step of another kind, and of steps that other programs may undo
	waits     map[string]time.Time // when a wait with its own deadline began, by waitOf
	refused   refusals

	failedObservations int          // in a row
	unanswered         wait.Backoff // the pauses after passes in which the API server has failed requests
}

// NewRetries makes a Retries that knows of no step.
func NewRetries(clock *monotonic.Clock, settings config.Settings) *Retries {
	return &Retries{
		clock: clock, settings: settings, attempts: map[string]attempt{}, successes: map[string]int{}, waits: map[string]time.Time{}, unanswered: kube.Backoff(),
	}
}

// Forget drops everything, since the clock was set: all steps begin again.
func (r *Retries) Forget(time.Time) { *r = *NewRetries(r.clock, r.settings) }

// ForgetFailures drops earlier failures: they say nothing about later steps.
func (r *Retries) ForgetFailures() { clear(r.attempts) }

// Converged drops the failures of a change that has succeeded.
func (r *Retries) Converged() {
	r.ForgetFailures()
	r.refused = refusals{}
}

// refusals counts how often a change to one config was refused after it had begun.
type refusals struct {
	fingerprint string
	n           int
	undoing     bool // the last of them
}

// Refused counts a refusal of a change that has begun, once until a pass works towards the request again. Without a refusal the reason is empty. It returns
// the failure of a change that was refused retry.noEffect times: the change itself, or another program, alters what the request is judged by, and the change
// would begin without end.
func (r *Retries) Refused(seen *state.Observed, want state.Desired, goal Goal, reason config.Reason) *api.Failure {
	j, givenUp := seen.Journal, seen.Journal != nil && seen.Journal.Undo != nil
	switch {
	case goal.Kind == Wanted:
		r.refused.undoing = false
		return nil
	case goal.Kind != Undo || reason == "" || givenUp || j.Target != want.Name || j.Fingerprint == "":
		return nil
	case r.refused.fingerprint != j.Fingerprint:
		r.refused = refusals{fingerprint: j.Fingerprint}
	case r.refused.undoing:
		return nil
	}
	r.refused.undoing = true
	if r.refused.n++; r.refused.n < r.settings.Retry.NoEffect {
		return nil
	}
	return &api.Failure{
		Fingerprint: j.Fingerprint, Reason: reason,
		Message: fmt.Sprintf("%v; the change to %s was refused %d times after it had begun", goal.Why, want.Name, r.refused.n),
	}
}

// BeginUndo drops what was counted for the change that is now undone.
func (r *Retries) BeginUndo() {
	clear(r.attempts)
	clear(r.successes)
}

// Head takes the first step of the plan, zero if there is none. It drops the waits of all other steps, and their successes unless the first step works on
// a GPU.
func (r *Retries) Head(first plan.Step) {
	if !first.Traits().TouchesGPU() {
		maps.DeleteFunc(r.successes, func(step string, _ int) bool { return step != first.String() })
	}
	maps.DeleteFunc(r.waits, func(what string, _ time.Time) bool { return what != waitOf(first) })
}

// attempt is what the agent knows of a step that fails.
type attempt struct {
	failures     int              // in a row
	next         time.Time        // the agent does not try the step earlier, whatever wakes the loop
	lastDecision outcome.Decision // the decision after the last failure
	unheldSince  time.Time        // since when no process has held the GPU that is in use; zero if it is not, or if one has
	inUseAt      time.Time        // when the condition reported lastDecision about processes that hold the GPU; zero if it is about something else
}

// OneMoreIsTooMany reports whether one more failure of the step uses up its budget.
func (r *Retries) OneMoreIsTooMany(step plan.Step) bool {
	return r.attempts[step.String()].failures+1 >= r.settings.Retry.Failures
}

// CountFailure counts a failure of the step without deciding on it, as Failed does.
func (r *Retries) CountFailure(step plan.Step) {
	tried := r.attempts[step.String()]
	tried.failures++
	r.attempts[step.String()] = tried
}

// TooEarly returns the error that the condition reported when the step failed, as long as the agent must not retry the step.
func (r *Retries) TooEarly(step plan.Step) error {
	tried := r.attempts[step.String()]
	rest := tried.next.Sub(r.clock.Now())
	switch {
	case rest <= 0:
		return nil
	case tried.lastDecision.Stalled:
		return &outcome.Stalled{Reason: tried.lastDecision.Reason, Message: tried.lastDecision.Message}
	default:
		return &outcome.Waiting{Reason: tried.lastDecision.Reason, Message: tried.lastDecision.Message, After: rest, For: tried.lastDecision.Waits}
	}
}

// OthersFirst returns the steps of an undo in an order that leaves GPUs with a given-up step for last.
func (r *Retries) OthersFirst(steps []plan.Step) []plan.Step {
	n := 0
	for n < len(steps) && steps[n].Traits().TouchesGPU() && steps[n].GPU != "" {
		n++
	}
	ofGPUs := slices.Clone(steps[:n])
	last := map[nvml.UUID]bool{}
	for _, s := range ofGPUs {
		last[s.GPU] = last[s.GPU] || r.attempts[s.String()].lastDecision.Stalled
	}
	slices.SortStableFunc(ofGPUs, func(x, y plan.Step) int {
		switch {
		case last[x.GPU] == last[y.GPU]:
			return 0
		case last[x.GPU]:
			return 1
		default:
			return -1
		}
	})
	return slices.Concat(ofGPUs, steps[n:])
}

// waitOf returns the key of the wait for a step: pods that leave, and operands, share one each; every other step has its own.
func waitOf(step plan.Step) string {
	if step.Traits().WaitsAsOne {
		return string(step.Kind)
	}
	return step.String()
}

// Began returns when the wait for the step began. A new process begins the wait again.
func (r *Retries) Began(step plan.Step) time.Time {
	began, ok := r.waits[waitOf(step)]
	if !ok {
		began = r.clock.Now().UTC().Truncate(time.Second)
		r.waits[waitOf(step)] = began
	}
	return began
}

// Done drops the failures of the step, and counts its success if too many of them mean that the step has no effect.
func (r *Retries) Done(step plan.Step) {
	delete(r.attempts, step.String())
	delete(r.waits, waitOf(step))
	r.Answered()
	if traits := step.Traits(); traits.Repeatable || traits.TouchesGPU() {
		r.successes[step.String()]++
	}
}

// InVain returns the failure of a step that has succeeded retry.noEffect times and is still needed; nil below that.
func (r *Retries) InVain(want state.Desired, step plan.Step) *api.Failure {
	n := r.successes[step.String()]
	if n < r.settings.Retry.NoEffect {
		return nil
	}
	return &api.Failure{
		Fingerprint: want.Fingerprint, Reason: config.ReasonStepHadNoEffect,
		Message: fmt.Sprintf("%s reported success %d times and had no effect, or another program undoes it", step, n),
	}
}

// afterPods is the least time of each wait after eviction, which may use up timeouts.drain.
const afterPods = 5 * time.Minute

// Deadline is the end of a wait that starts after eviction: the drain deadline, or afterPods from its start, whichever is later.
func (r *Retries) Deadline(seen *state.Observed, want state.Desired, step plan.Step) time.Time {
	until := r.Began(step).Add(afterPods)
	if pods := seen.Journal.Started.Add(r.settings.With(want.Drain).Timeouts.Drain); pods.After(until) {
		return pods
	}
	return until
}

// CheckNoEffect returns the failure of a change if a user or another tool undoes its step each time. In an undo the agent retries the step, but ever less
// often. For a step on a GPU, act/hardware calls InVain right before the call into the driver.
func (r *Retries) CheckNoEffect(want state.Desired, step plan.Step) error {
	if !step.Traits().Repeatable {
		return nil
	}
	failure := r.InVain(want, step)
	switch {
	case failure == nil:
		return nil
	case want.Undo:
		delete(r.successes, step.String())
		return errors.New(failure.Message)
	}
	return failure
}

// ObservationFailed is for an observation that failed: the agent observes again after a pause that doubles each time.
func (r *Retries) ObservationFailed(err error) outcome.Decision {
	r.failedObservations++
	pause := r.PauseAfter(r.failedObservations)
	if _, is := errors.AsType[*kube.UnansweredError](err); is {
		pause = min(pause, outcome.APIRetry)
	}
	return tryAgain(pause, err)
}

// Unanswered returns the least pause after a pass with failed requests to the API server, even if retries of them succeeded. It grows with each such pass
// that performs no step.
func (r *Retries) Unanswered() time.Duration { return r.unanswered.Step() }

// Answered is for a pass without failed requests to the API server.
func (r *Retries) Answered() { r.unanswered = kube.Backoff() }

// ForgetObservations is for an observation that has succeeded.
func (r *Retries) ForgetObservations() { r.failedObservations = 0 }

// PauseAfter is the pause after so many failures in a row. It doubles each time.
func (r *Retries) PauseAfter(failures int) time.Duration {
	pause := r.settings.Retry.First
	for range failures - 1 {
		pause = min(2*pause, r.settings.Retry.Longest)
	}
	return pause
}

func tryAgain(pause time.Duration, err error) outcome.Decision {
	return outcome.Decision{Reason: config.ReasonRetrying, Message: err.Error() + "; trying again", After: pause, Waits: outcome.ForRetry}
}

// Failed decides to try a failed step again after a pause that doubles each time, until its budget is used up.
func (r *Retries) Failed(step plan.Step, want state.Desired, err error) outcome.Decision {
	tried := r.attempts[step.String()]
	tried.failures++
	tried.inUseAt, tried.unheldSince = time.Time{}, time.Time{}
	pause := r.PauseAfter(tried.failures)
	tried.next = r.clock.Now().Add(pause)
	tried.lastDecision = tryAgain(pause, err)
	switch all := sanitize.Counted(r.settings.Retry.Failures, "attempt"); {
	case !step.Traits().Bounded:
	case tried.failures < r.settings.Retry.Failures:
		tried.lastDecision.Message += fmt.Sprintf(" until about %s: %d of %s have failed", outcome.Moment(r.lastTry(tried.failures)), tried.failures, all)
	default:
		failure := &api.Failure{
			Fingerprint: want.Fingerprint, Reason: givenUp(step, err),
			Message: fmt.Sprintf("%v; given up after %s", err, all),
		}
		tried.lastDecision = outcome.Decision{Failure: failure, Reason: failure.Reason, Message: failure.Message, Stalled: true}
	}
	r.attempts[step.String()] = tried
	return tried.lastDecision
}

// lastTry returns when the last attempt of a step begins that has failed so many times, if the attempts take no time.
func (r *Retries) lastTry(failures int) time.Time {
	at := r.clock.Now()
	for ; failures < r.settings.Retry.Failures; failures++ {
		at = at.Add(r.PauseAfter(failures))
	}
	return at
}

// givenUp returns the reason for giving up a change when the step has failed too often. Each step also writes to the API server or to the host, so only the
// error shows whether the driver has refused it.
func givenUp(step plan.Step, err error) config.Reason {
	_, byDriver := errors.AsType[*nvml.Error](err)
	switch {
	case byDriver:
		return config.ReasonHardwareFailure
	case step.Kind == plan.StopUnits:
		return config.ReasonUnitFailed
	default:
		return config.ReasonStepFailed
	}
}

// InUse waits for processes that belong to no pod that leaves, until the deadline for pods. Some start and end often, as a monitor's do, so the agent does
// not report each of them. A GPU that no process holds may be free in a moment.
func (r *Retries) InUse(seen *state.Observed, want state.Desired, step plan.Step, err error) outcome.Decision {
	now := r.clock.Now()
	if seen.Journal != nil && now.After(r.Deadline(seen, want, step)) && !want.Undo {
		return outcome.Decision{Failure: &api.Failure{
			Fingerprint: want.Fingerprint, Reason: config.ReasonGPUInUse,
			Message: fmt.Sprintf("%v, still at the deadline, %s", err, outcome.Moment(r.Deadline(seen, want, step))),
		}}
	}
	tried := r.attempts[step.String()]
	_, unheld := errors.AsType[*outcome.NoHolderError](err)
	switch {
	case !unheld && now.Sub(tried.unheldSince) >= outcome.InUseNews: // the agent tries so often once a minute at most: processes may come and go in turn
		tried.unheldSince = time.Time{}
	case unheld && tried.unheldSince.IsZero():
		tried.unheldSince = now
	}
	if unheld && now.Sub(tried.unheldSince) < outcome.NoHolderNews {
		tried.next = now.Add(outcome.NoHolderRetry)
		if now.Sub(tried.inUseAt) >= outcome.InUseNews { // otherwise the report of processes stays
			tried.inUseAt = time.Time{}
			tried.lastDecision = outcome.Decision{Reason: config.ReasonRepartitioning, Message: err.Error() + "; trying again", Waits: outcome.ForStep}
		}
		tried.lastDecision.After = outcome.NoHolderRetry
		r.attempts[step.String()] = tried
		return tried.lastDecision
	}
	if now.Sub(tried.inUseAt) >= outcome.InUseNews {
		tried.inUseAt = now
		wait := outcome.Waiting{Advice: "to go on at once, end what holds the GPU", Message: err.Error()}
		if seen.Journal != nil {
			wait.Since = seen.Journal.Started
			wait.Until, wait.Then = seen.AtDeadline(r.Deadline(seen, want, step), want)
		}
		tried.lastDecision = outcome.Decision{Reason: config.ReasonGPUInUse, Message: wait.Error()}
	}
	tried.lastDecision.After = outcome.InUseRetry
	tried.next = now.Add(outcome.InUseRetry)
	r.attempts[step.String()] = tried
	return tried.lastDecision
}
