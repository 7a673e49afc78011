package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

// unitRetry is the pause between two looks at a unit that stops or starts.
const unitRetry = hostTimeout

// stopUnit stops a unit of the host that is in the way. One that does not stop ends the change.
func (a *Agent) stopUnit(ctx context.Context, seen observed, want wish, step plan.Step) error {
	until := a.began(step).Add(a.settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, hostTimeout)
	defer cancel()
	err := a.units.Stop(call, step.Unit)
	if !errors.Is(err, drain.ErrJobRunning) {
		return err
	}
	if a.clock.Now().After(until) && !want.undo {
		return &Failure{
			Wish: want.fingerprint, Reason: config.ReasonUnitFailed,
			Message: fmt.Sprintf("%s of this host has not stopped in %s; see systemctl status %s", step.Unit, a.settings.Timeouts.Unit, step.Unit),
		}
	}
	return &Waiting{
		Reason: config.ReasonStoppingUnits, After: unitRetry,
		Message: fmt.Sprintf("waiting for %s of this host to stop, which keeps GPUs open", step.Unit),
		Since:   seen.journal.Started, Until: until, Then: seen.then(want),
	}
}

// startUnit starts a unit that the change has stopped. One that does not start keeps no node: the GPUs work without it.
func (a *Agent) startUnit(ctx context.Context, seen observed, step plan.Step) error {
	until := a.began(step).Add(a.settings.Timeouts.Unit)
	call, cancel := context.WithTimeout(ctx, hostTimeout)
	defer cancel()
	err := a.units.Start(call, step.Unit)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, drain.ErrJobRunning) && a.clock.Now().Before(until):
		return &Waiting{
			Reason: config.ReasonAwaitingCapacity, After: unitRetry, Message: fmt.Sprintf("waiting for %s of this host to start", step.Unit),
			Until: until, Then: "the node is given back without it",
		}
	case errors.Is(err, drain.ErrJobRunning), a.attempts[step.String()].failures+1 >= a.settings.Retry.Failures:
		return a.forgoUnit(ctx, seen, step, err)
	default:
		return err
	}
}

// forgoUnit strikes from the journal a unit that does not start, and tells.
func (a *Agent) forgoUnit(ctx context.Context, seen observed, step plan.Step, err error) error {
	a.log.Warn("a unit of the host does not start again", zap.String("unit", step.Unit), zap.Error(err))
	a.eventf(seen.node, corev1.EventTypeWarning, config.ReasonUnitFailed,
		"%s of this host was stopped for the change and does not start again: %v; start it by hand", step.Unit, err)
	j := *seen.journal
	j.Stopped = slices.DeleteFunc(slices.Clone(j.Stopped), func(name string) bool { return name == step.Unit })
	return a.amend(ctx, seen, j)
}
