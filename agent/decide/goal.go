package decide

import (
	"errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Kind is what a pass works towards.
type Kind int

// The kinds of goals.
const (
	// Wanted is what the labels request.
	Wanted Kind = iota
	// StandStill changes nothing; Why says why.
	StandStill
	// Cancel gives the change up, since a user or another program has uncordoned the node.
	Cancel
	// CleanUp restores what an earlier agent has left, or returns a slot that no change needs, although the request is refused.
	CleanUp
	// Undo restores the former config.
	Undo
)

// Goal is what a pass works towards.
type Goal struct {
	Kind    Kind
	Targets plan.Targets // of the GPUs; nil leaves them unchanged
	Why     error        // why the request is not the goal; nil if it is, and if a change was given up before
}

// GoalOf returns what a pass works towards, before there is a plan. Err says why the request is refused; under is the device plugin's MIG strategy if the
// request is carried out.
func GoalOf(seen *state.Observed, want state.Desired, err error, under config.MIGStrategy) Goal {
	switch {
	case outcome.IsUnseen(err):
		return Goal{Kind: StandStill, Why: err}
	case err == nil && !seen.GivenUp(want):
		return Goal{Kind: Wanted, Targets: want.Targets}
	case seen.Journal == nil && restores(seen, under):
		return Goal{Kind: CleanUp, Why: err}
	case seen.Journal == nil:
		return Goal{Kind: StandStill, Why: err}
	case errors.Is(err, plan.ErrStillPending) && seen.Journal.Undo == nil:
		return Goal{Kind: StandStill, Why: &api.Failure{Fingerprint: want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}}
	}
	back := Goal{Kind: Undo, Targets: seen.Journal.Targets(seen.GPUs), Why: err}
	if seen.Owner.Kind == api.OwnerDRADynamic { // the agent may not cut the GPUs any more, not even back
		back.Targets = modesBack(seen, back.Targets)
	}
	return back
}

// Revised returns the goal once its steps are known. Only the steps show whether a change would begin although a file could not be read, and whether a
// change that someone has uncordoned the node of would still disturb pods.
func (g Goal) Revised(seen *state.Observed, want state.Desired, steps []plan.Step, on config.OnUncordon, under config.MIGStrategy) Goal {
	switch {
	case g.Kind != Wanted:
	case on == config.UncordonCancel && uncordonedInTime(seen, want, steps):
		return Goal{Kind: Cancel, Why: cancelled(seen, want)}
	case want.Unread != nil && len(steps) > 0 && startsChange(seen, want, steps):
		return GoalOf(seen, want, want.Unread, under)
	}
	return g
}

// uncordonedInTime reports whether a user or another program has uncordoned the node while the change still has pods to evict or GPUs to touch. Later an
// uncordon harms no pod: only the capacity is left to verify. A config that was requested after the cordon is not cancelled: its change cordons the node
// again.
func uncordonedInTime(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	changes := plan.Disrupts(steps) || plan.Has(steps, plan.Create)
	return seen.Uncordoned() && changes && !seen.Other(want) && !seen.GivenUp(want)
}

// restores reports whether there is something to restore on a node without a journal.
func restores(seen *state.Observed, under config.MIGStrategy) bool {
	return seen.Leftovers.Orphan.Exists() || seen.Marks.Fenced || seen.Pool.Slot.Held || seen.Pool.Slot.Waiting || offer.HasOutdatedPod(seen, under)
}

// CleansUpWhileWaiting reports whether the agent restores what an earlier one has left without a journal while the change waits, perhaps for days. Err is
// that wait.
func CleansUpWhileWaiting(seen *state.Observed, err error) bool {
	// If the node object does not show which field manager cordoned it, only the agent's taint shows that the agent did.
	taint := seen.Marks.Fenced && (!seen.Node.Spec.Unschedulable || seen.ForeignCordon())
	_, waits := errors.AsType[*outcome.Waiting](err)
	return waits && seen.Journal == nil && (seen.Leftovers.Orphan.Exists() || taint)
}

// cancelled ends a change because a user or another tool has lifted the agent's cordon. Neither kubectl nor most tools leave a name.
func cancelled(seen *state.Observed, want state.Desired) *api.Failure {
	text := "a user or tool uncordoned the node"
	who, when := fence.Uncordoner(seen.Node, config.FieldManager)
	if !when.IsZero() {
		text += " at " + outcome.Moment(when)
	}
	if who == "" {
		who = "the node does not show who"
	}
	text += " (" + who + ")"
	return &api.Failure{
		Fingerprint: want.Fingerprint, Reason: config.ReasonCancelled, Cancelled: true, Message: text + " during the change, which cancels it",
	}
}
