package hardware

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/state"
)

// ObserveSpecs looks for CDI specs that describe other instances than the present ones. If it cannot read one, or could not write them, the
// agent reports that once, leaves them unchanged, and restores the node without them.
func (g *GPUs) ObserveSpecs(ctx context.Context, seen *state.Observed) {
	call, cancel := context.WithTimeout(ctx, g.Settings.Timeouts.DriverCall)
	defer cancel()
	stale, err := g.Specs.Stale(call, seen.GPUs)
	givenUp := seen.Journal == nil || seen.Journal.Undo != nil
	if len(stale) > 0 && givenUp && g.failures >= g.Settings.Retry.Failures {
		stale, err = nil, errors.Join(err, fmt.Errorf("writing CDI specs failed %d times", g.failures))
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != g.trouble {
		g.Log.Warn("leaving CDI specs unchanged", zap.Error(err))
	}
	seen.Specs, g.trouble = stale, text
}

// Regenerate writes the CDI specs again.
func (g *GPUs) Regenerate(ctx context.Context, in act.Input) error {
	call, cancel := context.WithTimeout(ctx, g.Settings.Timeouts.DriverCall)
	defer cancel()
	if err := g.Specs.Write(call, in.Seen.GPUs); err != nil {
		g.failures++
		return err
	}
	g.failures = 0
	return nil
}
