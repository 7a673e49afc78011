package hardware

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// Drive makes the call into the driver for the step.
func (g *GPUs) Drive(ctx context.Context, step plan.Step) error { return g.drive(ctx, step) }
