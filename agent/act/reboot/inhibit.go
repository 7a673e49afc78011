package reboot

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// logindRetry is the pause before the agent asks a logind again that has not answered in HostTimeout. Each step of a change asks,
// and a change of 8 GPUs takes more than 50 steps: to wait at each would take minutes.
const logindRetry = 5 * time.Minute

// Inhibit keeps the host from shutting down in the middle of the step, and the step from beginning while the host is shutting
// down. On a host without logind, as many immutable ones, it does neither; it does not wait for a logind that does not answer.
func (r *Rebooter) Inhibit(ctx context.Context, step plan.Step) (release func(), err error) {
	noRelease := func() {}
	if r.Clock.Now().Before(r.next) {
		return noRelease, nil
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	release, err = r.Host.Inhibit(call, step.String())
	switch {
	case err == nil:
		return release, nil
	case errors.Is(err, host.ErrShuttingDown):
		return nil, &outcome.Waiting{
			Reason: config.ReasonShuttingDown, After: retry,
			Message: "the node is shutting down: the agent changes no more GPUs",
		}
	case call.Err() != nil:
		r.next = r.Clock.Now().Add(logindRetry)
		r.Log.Warn("logind does not answer: a shutdown may interrupt steps", zap.Duration("again", logindRetry), zap.Error(err))
		return noRelease, nil
	default:
		r.Log.Debug("no shutdown inhibitor", zap.Error(err))
		return noRelease, nil
	}
}
