// Package act is what a step is performed by. Each package below it performs the steps of one family.
//
// What performs a step is idempotent and does not wait: it returns *outcome.Waiting, and the next pass observes how far the step has come. It may be
// killed anywhere.
package act

import (
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Env is what all that acts on one node works with.
type Env struct {
	Node     string // its name
	Nodes    nodewrite.Writer
	Fence    fence.Fence
	Settings config.Settings
	Events   events.Recorder
	Clock    *monotonic.Clock
	Log      *zap.Logger
}

// Input is what a step is performed by.
type Input struct {
	Seen  *state.Observed
	Want  state.Desired
	Steps []plan.Step // the way from what is observed to what is desired; the first step is the one to perform
}

// Step returns the step to perform.
func (in Input) Step() plan.Step { return in.Steps[0] }
