package units

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
)

// Observe asks systemd for the state of the units that the agent may have to stop, or has to start again.
func (u *Units) Observe(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	var stopped []string
	if seen.Journal != nil {
		stopped = u.named(seen, seen.Journal.Stopped)
	}
	seen.Units = nil
	if len(taken) == 0 && len(stopped) == 0 {
		return
	}
	states, err := u.states(ctx, stopped)
	for _, name := range u.Settings.Units {
		state, exists := states[name]
		if !exists && (err == nil || !slices.Contains(stopped, name)) {
			if slices.Contains(stopped, name) {
				noteDropped(seen, name, notStartable)
			}
			continue
		}
		seen.Units = append(seen.Units, plan.Unit{
			Name: name, Active: runs(state), Ending: state == "deactivating", Starting: state == "activating", Holds: computes(seen, name),
		})
	}
}

// computes reports whether a process of the unit computes on a device that the change takes.
func computes(seen *state.Observed, unit string) bool {
	return slices.ContainsFunc(seen.Holders.Processes, func(c holders.Client) bool {
		return c.Unit == unit && slices.Contains(c.Sources, holders.SourceNVML)
	})
}

// states asks systemd for the units of the settings, and never for others. After a systemd has not answered, it does not ask again for a while,
// unless the agent has to start a unit again.
func (u *Units) states(ctx context.Context, stopped []string) (map[string]string, error) {
	if len(stopped) == 0 && u.Clock.Now().Before(u.next) {
		return nil, nil
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	states, err := u.Systemd.States(call, u.Settings.Units)
	switch {
	case err == nil, errors.Is(err, host.ErrNoSystemd):
	default:
		u.next = u.Clock.Now().Add(systemdRetry)
		u.Log.Warn("systemd does not answer: leaving the host's units unchanged", zap.Duration("again", systemdRetry), zap.Error(err))
	}
	return states, err
}

// runs reports whether a unit in the state has processes, or may have.
func runs(state string) bool { return state != "" && state != "inactive" && state != "failed" }

// ObserveToRestore finds what the agent must still restore on the host for a change without a journal: a user may have removed that, or deleted the node
// object. The agent does not start units that are not in the settings any more, and reports them.
func (u *Units) ObserveToRestore(ctx context.Context, seen *state.Observed) {
	pending := u.Journal.Record.Now().Host
	if seen.Journal != nil || u.Journal.Record.Now().Ends && !seen.Record.StrangeJournal {
		return
	}
	for _, gpu := range seen.GPUs {
		if !gpu.Persistent && !gpu.Lost && slices.Contains(pending.Persistent, string(gpu.UUID)) {
			seen.Record.Pending.Persistent = append(seen.Record.Pending.Persistent, gpu.UUID)
		}
	}
	named := u.named(seen, pending.Stopped)
	if len(named) == 0 {
		return
	}
	states, err := u.states(ctx, named)
	for _, unit := range named {
		state, exists := states[unit]
		switch {
		case errors.Is(err, host.ErrNoSystemd):
		case err == nil && !exists:
			noteDropped(seen, unit, notStartable)
		case !runs(state):
			seen.Record.Pending.Stopped = append(seen.Record.Pending.Stopped, unit)
		}
	}
}

// named returns the units that are in the settings. It notes the others: the agent reports them, and does not start them.
func (u *Units) named(seen *state.Observed, stopped []string) []string {
	var out []string
	for _, unit := range stopped {
		if slices.Contains(u.Settings.Units, unit) {
			out = append(out, unit)
		} else {
			noteDropped(seen, unit, "setting units no longer names it")
		}
	}
	return out
}

// noteDropped notes why the agent does not start a unit that it has stopped.
func noteDropped(seen *state.Observed, unit, why string) {
	if seen.Record.Dropped == nil {
		seen.Record.Dropped = map[string]string{}
	}
	seen.Record.Dropped[unit] = why
}

// Dropped is the end of the message: which units were stopped for a change and are not started, and why.
func (u *Units) Dropped(seen *state.Observed) string {
	text := ""
	for _, unit := range slices.Sorted(maps.Keys(seen.Record.Dropped)) {
		text += "; " + notStarted(unit, seen.Record.Dropped[unit])
	}
	return text
}

func notStarted(unit, why string) string {
	return fmt.Sprintf("%s of this host was stopped for a change and is not started: %s", sanitize.Cut(unit, 256), why)
}

// ReportDropped logs, and reports by an Event, each unit that was stopped for a change and is not started. It reports each once, and remembers those that
// the settings name: Down names them until they run.
func (u *Units) ReportDropped(seen *state.Observed) {
	for _, unit := range slices.Sorted(maps.Keys(seen.Record.Dropped)) {
		why := seen.Record.Dropped[unit]
		if u.reportedDropped[unit] == why {
			continue
		}
		u.Log.Warn("a unit of the host was stopped for a change and is not started", zap.String("unit", unit), zap.String("why", why))
		u.Events.Node(u.Node, events.UnitNotStarted(notStarted(unit, why)))
		if slices.Contains(u.Settings.Units, unit) {
			u.note(unit, start{at: u.Clock.Now(), failed: true}) // the agent reports the unit until it runs
		}
	}
	u.reportedDropped = seen.Record.Dropped
}

// ObserveStarted asks for the state of units that the agent has started again. Systemd's job is done when the unit's process has begun,
// and that may end a moment later, when the agent has no unit to start any more.
func (u *Units) ObserveStarted(ctx context.Context, seen *state.Observed) state.Started {
	if seen.Journal != nil || len(u.started) == 0 || u.Clock.Now().Before(u.startedNext) {
		return state.Started{}
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	states, err := u.Systemd.States(call, slices.Sorted(maps.Keys(u.started)))
	return state.Started{Asked: true, States: states, Err: err}
}

// ReportNotRunning reports units that have not run since the agent started them again, and forgets those that do.
func (u *Units) ReportNotRunning(seen *state.Observed) {
	if !seen.Started.Asked {
		return
	}
	now, states, err := u.Clock.Now(), seen.Started.States, seen.Started.Err
	for name, s := range u.started {
		state, over := states[name], now.Sub(s.at) >= u.Settings.Timeouts.Unit
		switch {
		case err != nil && !over:
		case s.failed && state != "active":
		case state == "failed" || state == "activating" && over:
			u.note(name, start{at: s.at, failed: true})
			u.Log.Warn("a unit of the host has not run since it was started again", zap.String("unit", name), zap.String("state", state))
			u.Events.Node(u.Node, events.UnitFailed(name, state))
		case s.failed || over:
			delete(u.started, name)
		}
	}
	u.startedNext = now.Add(systemdRetry)
	if u.Awaits() {
		u.startedNext = now.Add(Retry)
	}
}

// Awaits reports whether it is too early to say whether a unit runs again.
func (u *Units) Awaits() bool {
	for _, s := range u.started {
		if !s.failed {
			return true
		}
	}
	return false
}

// Down names, for the end of a message, the units that the agent has stopped for a change and that have not run since.
func (u *Units) Down() string {
	text := ""
	for _, name := range slices.Sorted(maps.Keys(u.started)) {
		if u.started[name].failed {
			text += fmt.Sprintf("; %s of this host was stopped for a change and has not run since: see systemctl status %s", name, name)
		}
	}
	return text
}
