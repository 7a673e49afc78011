package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// unitRetry is the pause between two looks at a unit that stops or starts.
const unitRetry = outcome.HostTimeout

// stopUnit stops a unit of the host that is in the way. One that does not stop ends the change.
func (a *Agent) stopUnit(ctx context.Context, seen state.Observed, want state.Desired, step plan.Step) error {
	until := a.budget.Began(step).Add(a.settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	delete(a.systemd.started, step.Unit)
	err := a.systemd.units.Stop(call, step.Unit)
	if !errors.Is(err, host.ErrJobRunning) {
		return err
	}
	if a.clock.Now().After(until) && !want.Undo {
		return &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonUnitFailed,
			Message: fmt.Sprintf("%s of this host has not stopped in %s; see systemctl status %s", step.Unit, a.settings.Timeouts.Unit, step.Unit),
		}
	}
	return &outcome.Waiting{
		Reason: config.ReasonStoppingUnits, After: unitRetry,
		Message: fmt.Sprintf("waiting for %s of this host to stop, which keeps GPUs open", step.Unit),
		Since:   seen.Journal.Started, Until: until, Then: seen.Then(want),
	}
}

// systemd is the host's, and what it has been asked for.
type systemd struct {
	units       Units
	next        time.Time         // one that has not answered is not asked before
	started     map[string]start  // units that were started again
	startedNext time.Time         // they are not asked after before
	toldDropped map[string]string // units that are not started, as people were told
}

// Forget implements forgetter.
func (s *systemd) Forget(time.Time) {
	clear(s.started)
	s.next, s.startedNext = time.Time{}, time.Time{}
}

// start is what is known of a unit that was started again.
type start struct {
	times  int       // since it was stopped
	at     time.Time // the last
	failed bool      // it does not run, and people were told
}

// startUnit starts a unit that the change has stopped. One that does not start, or ends as often as it does, keeps no node: the GPUs
// work without it.
func (a *Agent) startUnit(ctx context.Context, seen state.Observed, step plan.Step) error {
	before := a.systemd.started[step.Unit]
	if before.times >= a.settings.Retry.NoEffect {
		return a.abandonUnit(ctx, seen, step, fmt.Errorf("it was started %d times, and has ended each time", before.times))
	}
	until := a.budget.Began(step).Add(a.settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := a.systemd.units.Start(call, step.Unit)
	switch {
	case err == nil:
		a.systemd.started[step.Unit] = start{times: before.times + 1, at: a.clock.Now()}
		return nil
	case errors.Is(err, host.ErrJobRunning) && a.clock.Now().Before(until):
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, After: unitRetry, Message: fmt.Sprintf("waiting for %s of this host to start", step.Unit),
			Until: until, Then: "the node is given back without it",
		}
	case errors.Is(err, host.ErrJobRunning), a.budget.Attempts[step.String()].Failures+1 >= a.settings.Retry.Failures:
		return a.abandonUnit(ctx, seen, step, err)
	default:
		return err
	}
}

// abandonUnit strikes from the journal a unit that does not start, and tells.
func (a *Agent) abandonUnit(ctx context.Context, seen state.Observed, step plan.Step, err error) error {
	a.log.Warn("a unit of the host does not start again", zap.String("unit", step.Unit), zap.Error(err))
	a.eventf(seen.Node, corev1.EventTypeWarning, config.ReasonUnitFailed,
		"%s of this host was stopped for the change and does not start again: %v; start it by hand", step.Unit, err)
	j := *seen.Journal
	j.Stopped = slices.DeleteFunc(slices.Clone(j.Stopped), func(name string) bool { return name == step.Unit })
	if err := a.amend(ctx, seen, j); err != nil {
		return err
	}
	a.systemd.started[step.Unit] = start{failed: true}
	return nil
}

// observeStarted looks what has become of units that were started again. A job of systemd is done when the unit's process has begun,
// and that may end a moment later, when nothing is owed to it any more.
func (a *Agent) observeStarted(ctx context.Context, seen state.Observed) state.Started {
	if seen.Journal != nil || len(a.systemd.started) == 0 || a.clock.Now().Before(a.systemd.startedNext) {
		return state.Started{}
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	states, err := a.systemd.units.States(call, slices.Sorted(maps.Keys(a.systemd.started)))
	return state.Started{Asked: true, States: states, Err: err}
}

// followStarted tells of units that do not run since they were started again, and forgets those that do.
func (a *Agent) followStarted(seen state.Observed) {
	if !seen.Started.Asked {
		return
	}
	now, states, err := a.clock.Now(), seen.Started.States, seen.Started.Err
	for name, s := range a.systemd.started {
		state, over := states[name], now.Sub(s.at) >= a.settings.Timeouts.Unit
		switch {
		case err != nil && !over:
		case s.failed && state != "active":
		case state == "failed" || state == "activating" && over:
			a.systemd.started[name] = start{at: s.at, failed: true}
			a.log.Warn("a unit of the host does not run since it was started again", zap.String("unit", name), zap.String("state", state))
			a.eventf(seen.Node, corev1.EventTypeWarning, config.ReasonUnitFailed,
				"%s of this host was stopped for a change, was started again, and is %s since; see systemctl status %s", name, state, name)
		case s.failed || over:
			delete(a.systemd.started, name)
		}
	}
	a.systemd.startedNext = now.Add(systemdRetry)
	if a.awaitsUnits() {
		a.systemd.startedNext = now.Add(unitRetry)
	}
}

// awaitsUnits reports whether it is too early to say of a unit that it runs again.
func (a *Agent) awaitsUnits() bool {
	for _, s := range a.systemd.started {
		if !s.failed {
			return true
		}
	}
	return false
}

// unitsDown names, for the end of a message, the units that were stopped for a change and do not run since.
func (a *Agent) unitsDown() string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(a.systemd.started)) {
		if a.systemd.started[name].failed {
			text += fmt.Sprintf("; %s of this host was stopped for a change and does not run since: see systemctl status %s", name, name)
		}
	}
	return text
}
