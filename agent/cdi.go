package agent

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/nvml"
)

// cdi is what is known of the specs that tell container runtimes of the GPUs.
type cdi struct {
	specs    Specs
	failures int    // of writing them, in a row
	trouble  string // why they could not be looked at, the last time
}

// observeSpecs looks for CDI specs that describe what was. One that cannot be read is not ours to mend, and one that
// cannot be written is no reason to keep the node: that is told once, and they are left alone.
func (a *Agent) observeSpecs(ctx context.Context, seen *state.Observed) {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	stale, err := a.cdi.specs.Stale(call, seen.GPUs)
	givenUp := seen.Journal == nil || seen.Journal.Undo != nil
	if len(stale) > 0 && givenUp && a.cdi.failures >= a.settings.Retry.Failures {
		stale, err = nil, errors.Join(err, fmt.Errorf("writing CDI specs failed %d times", a.cdi.failures))
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != a.cdi.trouble {
		a.log.Warn("CDI specs are left alone", zap.Error(err))
	}
	seen.Specs, a.cdi.trouble = stale, text
}

// regenerate writes the CDI specs anew.
func (a *Agent) regenerate(ctx context.Context, gpus []nvml.GPU) error {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	if err := a.cdi.specs.Write(call, gpus); err != nil {
		a.cdi.failures++
		return err
	}
	a.cdi.failures = 0
	return nil
}
