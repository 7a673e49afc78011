// Package units stops units of the host's systemd that keep GPUs open, and starts them again: the units of the settings, and no others.
package units

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// Systemd is the host's systemd. On a host without it, each method returns host.ErrNoSystemd.
type Systemd interface {
	// States gives the active state of each unit that the host has.
	States(ctx context.Context, names []string) (map[string]string, error)
	// Stop and Start wait for the unit's job as long as ctx lasts; host.ErrJobRunning if it goes on after that.
	Stop(ctx context.Context, name string) error
	Start(ctx context.Context, name string) error
}

// Units are the units of the settings, and what the agent has asked systemd for.
type Units struct {
	Systemd  Systemd
	Settings config.Settings
	Retries  *decide.Retries
	Journal  *journal.Writer
	Events   report.Events
	Clock    *monotonic.Clock
	Log      *zap.Logger

	next            time.Time         // when the agent may ask a systemd again that has not answered
	started         map[string]start  // units that the agent has started again
	startedNext     time.Time         // when it may ask for their states again
	reportedDropped map[string]string // units that it does not start, as it has reported
}

// Forget drops what was computed from earlier times of the clock.
func (u *Units) Forget(time.Time) {
	clear(u.started)
	u.next, u.startedNext = time.Time{}, time.Time{}
}

// note keeps what the agent knows of a unit that it has started again.
func (u *Units) note(unit string, s start) {
	if u.started == nil {
		u.started = map[string]start{}
	}
	u.started[unit] = s
}

// systemdRetry is the pause before the agent asks a systemd again that has not answered.
const systemdRetry = 5 * time.Minute

// notStartable is why the agent does not start a unit that it has stopped: systemd does not list it as one that can start.
const notStartable = "the host has no such unit that it may start: it is masked or was removed"

// Retry is the pause between two looks at a unit that stops or starts.
const Retry = outcome.HostTimeout

// Stop stops a unit of the host that is in the way. If the unit does not stop, that ends the change.
func (u *Units) Stop(ctx context.Context, seen *state.Observed, want state.Desired, step plan.Step) error {
	until := u.Retries.Began(step).Add(u.Settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	delete(u.started, step.Unit)
	err := u.Systemd.Stop(call, step.Unit)
	if !errors.Is(err, host.ErrJobRunning) {
		return err
	}
	if u.Clock.Now().After(until) && !want.Undo {
		return &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonUnitFailed,
			Message: fmt.Sprintf("%s of this host has not stopped in %s; see systemctl status %s", step.Unit, u.Settings.Timeouts.Unit, step.Unit),
		}
	}
	return &outcome.Waiting{
		Reason: config.ReasonStoppingUnits, For: outcome.ForStep, After: Retry,
		Message: fmt.Sprintf("waiting for %s of this host to stop, which keeps GPUs open", step.Unit),
		Since:   seen.Journal.Started, Until: until, Then: seen.DeadlineText(want),
	}
}

// start is what the agent knows of a unit that it has started again.
type start struct {
	times  int       // how often, since it was stopped
	at     time.Time // the last start
	failed bool      // it does not run, and the agent has reported that
}

// Start starts a unit that the change has stopped. If the unit does not start, or ends each time, the agent gives the node back all the same:
// the GPUs work without it.
func (u *Units) Start(ctx context.Context, seen *state.Observed, want state.Desired, step plan.Step) error {
	before := u.started[step.Unit]
	if before.times >= u.Settings.Retry.NoEffect {
		return u.abandon(ctx, seen, want, step, fmt.Errorf("it was started %d times, and has ended each time", before.times))
	}
	until := u.Retries.Began(step).Add(u.Settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := u.Systemd.Start(call, step.Unit)
	switch {
	case err == nil:
		u.note(step.Unit, start{times: before.times + 1, at: u.Clock.Now()})
		return nil
	case errors.Is(err, host.ErrJobRunning) && u.Clock.Now().Before(until):
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, For: outcome.ForStep, After: Retry,
			Message: fmt.Sprintf("waiting for %s of this host to start", step.Unit), Until: until, Then: "the node is given back without it",
		}
	case errors.Is(err, host.ErrJobRunning), u.Retries.Attempts[step.String()].Failures+1 >= u.Settings.Retry.Failures:
		return u.abandon(ctx, seen, want, step, err)
	default:
		return err
	}
}

// abandon removes a unit that does not start from the journal, and reports it.
func (u *Units) abandon(ctx context.Context, seen *state.Observed, want state.Desired, step plan.Step, err error) error {
	u.Log.Warn("a unit of the host does not start again", zap.String("unit", step.Unit), zap.Error(err))
	u.Events.Nodef(seen.Node, corev1.EventTypeWarning, config.ReasonUnitFailed,
		"%s of this host was stopped for the change and does not start again: %v; start it by hand", step.Unit, err)
	j := *seen.Journal
	j.Stopped = slices.DeleteFunc(slices.Clone(j.Stopped), func(name string) bool { return name == step.Unit })
	if err := u.Journal.Amend(ctx, seen.Writing(want, step.Kind), j); err != nil {
		return err
	}
	u.note(step.Unit, start{failed: true})
	return nil
}
