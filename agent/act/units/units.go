// Package units stops units of the host's systemd that keep GPUs open, and starts them again: the units of the settings, and no others.
package units

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// Systemd is the host's systemd. On a host without it, each method returns host.ErrNoSystemd.
type Systemd interface {
	// States returns the active state of each unit that the host has.
	States(ctx context.Context, names []string) (map[string]string, error)
	// Stop and Start wait for the unit's job as long as ctx lasts; host.ErrJobRunning if it continues after that.
	Stop(ctx context.Context, name string) error
	Start(ctx context.Context, name string) error
}

// Units are the units of the settings, and what the agent has asked systemd for.
type Units struct {
	act.Env

	Systemd Systemd
	Retries *decide.Retries
	Journal *journal.Writer

	next            time.Time         // when the agent may ask a systemd again that has not answered
	started         map[string]start  // units that the agent has started again
	startedNext     time.Time         // when it may ask for their states again
	reportedDropped map[string]string // reported units that it does not start
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
const notStartable = "it is masked on the host, or was removed"

// Retry is the pause between two observations of a unit that stops or starts.
const Retry = outcome.HostTimeout

// Stop stops a unit of the host that is in the way. If the unit does not stop, that ends the change.
func (u *Units) Stop(ctx context.Context, in act.Input) error {
	until := u.Retries.Began(in.Step()).Add(u.Settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	delete(u.started, in.Step().Unit)
	err := u.Systemd.Stop(call, in.Step().Unit)
	if !errors.Is(err, host.ErrJobRunning) {
		return err
	}
	if u.Clock.Now().After(until) && !in.Want.Undo {
		return &api.Failure{
			Fingerprint: in.Want.Fingerprint, Reason: config.ReasonUnitFailed,
			Message: fmt.Sprintf("%s of this host has not stopped in %s; see systemctl status %s", in.Step().Unit, u.Settings.Timeouts.Unit, in.Step().Unit),
		}
	}
	return &outcome.Waiting{
		Reason: config.ReasonStoppingUnits, For: outcome.ForStep, After: Retry,
		Message: fmt.Sprintf("waiting for %s of this host to stop: it keeps GPUs open", in.Step().Unit),
		Since:   in.Seen.Journal.Started, Until: until, Then: in.Seen.DeadlineText(in.Want),
	}
}

// start is what the agent knows of a unit that it has started again.
type start struct {
	times  int       // how often, since it was stopped
	at     time.Time // the last start
	failed bool      // it does not run, and the agent has reported that
}

// Start starts a unit that the change has stopped. If the unit does not start, or ends each time, the agent restores the node anyway: the GPUs
// work without it.
func (u *Units) Start(ctx context.Context, in act.Input) error {
	before := u.started[in.Step().Unit]
	if before.times >= u.Settings.Retry.NoEffect {
		return u.abandon(ctx, in, fmt.Errorf("it was started %d times, and has ended each time", before.times))
	}
	until := u.Retries.Began(in.Step()).Add(u.Settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := u.Systemd.Start(call, in.Step().Unit)
	switch {
	case err == nil:
		u.note(in.Step().Unit, start{times: before.times + 1, at: u.Clock.Now()})
		return nil
	case errors.Is(err, host.ErrJobRunning) && u.Clock.Now().Before(until):
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, For: outcome.ForStep, After: Retry,
			Message: fmt.Sprintf("waiting for %s of this host to start", in.Step().Unit), Until: until, Then: "the agent restores the node without it",
		}
	case errors.Is(err, host.ErrJobRunning), u.Retries.OneMoreIsTooMany(in.Step()):
		return u.abandon(ctx, in, err)
	default:
		return err
	}
}

// abandon removes a unit that does not start from the journal, and reports it.
func (u *Units) abandon(ctx context.Context, in act.Input, err error) error {
	u.Log.Warn("a unit of the host does not start again", zap.String("unit", in.Step().Unit), zap.Error(err))
	u.Events.Node(u.Node, events.UnitAbandoned(in.Step().Unit, err))
	j := *in.Seen.Journal
	j.Stopped = slices.DeleteFunc(slices.Clone(j.Stopped), func(name string) bool { return name == in.Step().Unit })
	if err := u.Journal.Amend(ctx, in.Seen.Writing(in.Want, in.Step().Kind), j); err != nil {
		return err
	}
	u.note(in.Step().Unit, start{failed: true})
	return outcome.ErrPlanAgain
}
