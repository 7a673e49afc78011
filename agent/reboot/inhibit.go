package reboot

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// logindRetry is the pause before asking a logind again that has not answered in hostTimeout. Each step of a change asks,
// and a node of 8 GPUs takes more than 50: it shall be no minutes slower, and logind be asked again once it may be mended.
const logindRetry = 5 * time.Minute

// Inhibit keeps the host from shutting down in the middle of the step, and the step from beginning while it is shutting
// down. Without logind, as on many immutable hosts, there is nobody to ask; one that does not answer is not waited for.
func (r *Rebooter) Inhibit(ctx context.Context, step plan.Step) (release func(), err error) {
	nobody := func() {}
	if r.Clock.Now().Before(r.next) {
		return nobody, nil
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
			Message: "the node is shutting down: no further change to a GPU is begun",
		}
	case call.Err() != nil:
		r.next = r.Clock.Now().Add(logindRetry)
		r.Log.Warn("logind does not answer: steps are not kept from a shutdown", zap.Duration("again", logindRetry), zap.Error(err))
		return nobody, nil
	default:
		r.Log.Debug("no shutdown inhibitor", zap.Error(err))
		return nobody, nil
	}
}
