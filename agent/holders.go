package agent

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
)

const (
	// freeFor is how long a look at the process table that found nothing counts. A change of eight GPUs takes some fifty steps,
	// and a table with 200,000 open files takes two seconds to read. The driver refuses in any case what is in use.
	freeFor = 5 * time.Second
	// systemdRetry is the pause before asking a systemd again that has not answered.
	systemdRetry = 5 * time.Minute
)

// clients are the processes that keep GPUs open, and what is known of them.
type clients struct {
	processes holders.Processes
	foundFree map[string]time.Time // the last scan that found no process on the device; valid for freeFor
	unowned   throttledNames       // processes of no pod that hold what is to go
}

// Forget implements forgetter.
func (c *clients) Forget(time.Time) {
	clear(c.foundFree)
	c.unowned = throttledNames{}
}

// steps plans the way to the targets, once it is known who holds what goes.
func (a *Agent) steps(ctx context.Context, seen *state.Observed, want state.Desired, targets plan.Targets) ([]plan.Step, error) {
	a.observeTaken(ctx, seen, want, targets)
	return plan.Make(a.planned(*seen, want), want.Planned(targets))
}

// observeTaken completes the look by who is concerned by what goes.
func (a *Agent) observeTaken(ctx context.Context, seen *state.Observed, want state.Desired, targets plan.Targets) {
	taken := plan.Takes(a.planned(*seen, want), want.Planned(targets))
	a.observeHolders(ctx, seen, taken)
	a.observeUnits(ctx, seen, taken)
}

// observeHolders adds to the look who holds what goes by processes and open files, whatever kubelet says. A table that cannot
// be read is no error here: what cannot be looked at counts as busy, and is waited for.
func (a *Agent) observeHolders(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	now := a.clock.Now()
	sought := seen.Sought(taken)
	isFree := func(d holders.Sought) bool { return now.Sub(a.clients.foundFree[d.Device]) < freeFor }
	if !slices.ContainsFunc(sought, func(d holders.Sought) bool { return len(d.Reported) > 0 || !isFree(d) }) {
		return
	}
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	seen.Holders.Processes, seen.Holders.Err = a.clients.processes.Holders(call, sought)
	clear(a.clients.foundFree)
	for _, d := range sought {
		if seen.Holders.Err == nil && !slices.ContainsFunc(seen.Holders.Processes, func(c holders.Client) bool { return slices.Contains(c.Devices, d.Device) }) {
			a.clients.foundFree[d.Device] = now
		}
	}
	seen.Holders.Pods = holders.GPUPods(seen.Pods, seen.Kubelet.Assigned, seen.Holders.Processes)
}

// observeUnits looks which of the host's units run that may have to stop, or be started again.
func (a *Agent) observeUnits(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	var stopped []string
	if seen.Journal != nil {
		stopped = a.named(seen, seen.Journal.Stopped)
	}
	seen.Units = nil
	if len(taken) == 0 && len(stopped) == 0 {
		return
	}
	states, err := a.unitStates(ctx, stopped)
	for _, name := range a.settings.Units {
		state, exists := states[name]
		if !exists && (err == nil || !slices.Contains(stopped, name)) {
			if slices.Contains(stopped, name) {
				seen.Drop(name, notStartable)
			}
			continue
		}
		seen.Units = append(seen.Units, plan.Unit{
			Name: name, Active: runs(state), Ending: state == "deactivating", Starting: state == "activating", Holds: seen.Computes(name),
		})
	}
}

// notStartable is why a unit is left alone that was stopped, and that systemd does not list as one that it could start.
const notStartable = "the host has no such unit that it may start: it is masked or was removed"

// unitStates asks systemd for the units of the settings, and never for others. One that has not answered is not asked again for a while, unless something is owed to it.
func (a *Agent) unitStates(ctx context.Context, stopped []string) (map[string]string, error) {
	if len(stopped) == 0 && a.clock.Now().Before(a.systemd.next) {
		return nil, nil
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	states, err := a.systemd.units.States(call, a.settings.Units)
	switch {
	case err == nil, errors.Is(err, host.ErrNoSystemd):
	default:
		a.systemd.next = a.clock.Now().Add(systemdRetry)
		a.log.Warn("systemd does not answer: the host's units are left alone", zap.Duration("again", systemdRetry), zap.Error(err))
	}
	return states, err
}

// runs reports whether a unit in the state has processes, or may have.
func runs(state string) bool { return state != "" && state != "inactive" && state != "failed" }

func union(a, b []string) []string {
	out := slices.Clone(a)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// unownedProcesses names the processes that compute on what goes, while no pod has it that could be evicted and no unit that could
// be stopped. People have to end them. One that the process table does not show has mostly just ended.
func (a *Agent) unownedProcesses(seen state.Observed) []string {
	held := map[string]bool{}
	for _, p := range seen.Holders.Pods {
		for _, d := range p.Devices {
			held[d] = true
		}
	}
	strange := holders.Unowned(seen.Holders.Processes, seen.Pods)
	strange = slices.DeleteFunc(strange, func(c holders.Client) bool {
		return c.Self || c.Unlisted || !slices.Contains(c.Sources, holders.SourceNVML) || slices.Contains(a.settings.Units, c.Unit) ||
			!slices.ContainsFunc(c.Devices, func(d string) bool { return !held[d] })
	})
	return holders.NameClients(strange, seen.Pods)
}

// observeClients picks the pods that keep the library open without having a GPU, by the selectors of the settings. One that the fence
// does not keep away cannot be sent away.
func (a *Agent) observeClients(seen *state.Observed) {
	for i := range seen.Pods {
		pod := &seen.Pods[i]
		if state.Ended(pod) || !matches(pod, a.settings.Drain.Clients) {
			continue
		}
		if !holders.Tolerates(pod.Spec.Tolerations, state.FenceTaint()) {
			seen.Holders.OfLibrary = append(seen.Holders.OfLibrary, holders.Describe(pod))
		}
	}
}
