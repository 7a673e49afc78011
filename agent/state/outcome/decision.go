package outcome

import (
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Decision is what the agent does after one pass.
type Decision struct {
	Reason   config.Reason
	Message  string
	Named    bool          // Message names the requested config
	After    time.Duration // until the next observation, if nothing wakes the loop; 0 means at once
	Stalled  bool
	Blockers []string // what is in the way
	Planned  time.Time
	Until    time.Time    // the deadline of a wait; zero if there is none
	Then     string       // what the agent does at the deadline
	Failure  *api.Failure // the agent gives the change up, and undoes it
	Waits    For
	NoReset  bool // the GPU changes its mode only at a reboot: the plan changes
}

// longestDecision bounds the cause, so that a condition has room for the desired config and for what happens to the node.
const longestDecision = 768 // characters

// Bounded returns the decision with texts fit for a condition: short enough, and with its GPUs as named names them.
func (d Decision) Bounded(named func(text string) string) Decision {
	d.Message = sanitize.Message(named(d.Message), longestDecision)
	if d.Failure != nil {
		failure := *d.Failure
		failure.Message = named(failure.Message)
		d.Failure = BoundedFailure(&failure)
	}
	return d
}

// BoundedFailure returns the failure with texts short enough for the node's annotation.
func BoundedFailure(f *api.Failure) *api.Failure {
	if f == nil {
		return nil
	}
	out := *f
	out.Message = sanitize.Message(f.Message, longestDecision)
	return &out
}
