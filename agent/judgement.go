package agent

import (
	"context"
	"errors"
	"fmt"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// What keeps a change from beginning stands here once: a pass asks before its first step, and previews and diagnoses ask the same.

// barred returns what keeps the first step from being performed, without a request to the API server. That is a hold, a window or another gate. It may also be
// a key of the device plugin's config that cannot be written, or a reboot that the plan needs and the agent may not do.
func (a *Agent) barred(ctx context.Context, in act.Input) error {
	if err := a.deciders.gates.Allow(in.Seen, in.Want, in.Steps); err != nil || in.Step().Traits().OnlyObserves {
		return err
	}
	return a.unable(ctx, in)
}

// unable returns why the agent cannot carry out the steps whenever they may begin.
func (a *Agent) unable(ctx context.Context, in act.Input) error {
	if err := a.actors.handover.RequireKey(in); err != nil {
		return err
	}
	if in.Seen.Journal == nil && plan.Has(in.Steps, plan.Reboot) {
		return a.actors.rebooter.Allowed(ctx, in)
	}
	return nil
}

// foresee returns why the agent would not begin a change with these steps now: it makes the checks that come before a change, and writes nothing.
func (a *Agent) foresee(ctx context.Context, in act.Input) error {
	if err := a.deciders.retries.TooEarly(in.Step()); err != nil {
		return err
	}
	if err := a.barred(ctx, in); err != nil {
		return err
	}
	if in.Step().Traits().OnlyObserves {
		if in.Seen.Journal != nil || foretold(in.Seen, in.Want) && in.Seen.Kubelet.Err == nil { // that the plugin still lacks its config is no reason
			return nil
		}
		return a.actors.verifier.Lacks(in.Seen, in.Want)
	}
	if err := a.blocked(ctx, in); err != nil || in.Step().Kind != plan.AcquireSlot {
		return err
	}
	return a.actors.slot.Foresee(ctx, in)
}

// blocked returns what on the node itself would keep the change: pods that cannot leave, processes, other tools.
func (a *Agent) blocked(ctx context.Context, in act.Input) error {
	err := a.actors.fencing.Foresee(ctx, in)
	a.observers.wakes.BlockedBy(nil) // these pods block no change yet; if they block the running one, the rest of this pass says so again
	return err
}

// beyondGate returns what would keep a change that waits at the gate, once the gate lets it pass. It is nil if the change does not wait there.
func (a *Agent) beyondGate(ctx context.Context, in act.Input, waits error) error {
	var at, gate *outcome.Waiting
	atGate := errors.As(waits, &at) && errors.As(a.deciders.gates.Allow(in.Seen, in.Want, in.Steps), &gate) && at.Reason == gate.Reason
	if !atGate || in.Step().Traits().OnlyObserves {
		return nil
	}
	if err := a.unable(ctx, in); err != nil {
		return err
	}
	return a.blocked(ctx, in)
}

// notWanted returns why a pass would not work towards the request, although it has steps: it undoes a change first, or restores what an earlier one has left.
func notWanted(seen *state.Observed, to course) error {
	switch failed := seen.Failed(to.want); {
	case to.goal == decide.CleanUp:
		return to.why
	case to.goal != decide.Undo:
		return nil
	case failed != nil && failed.Later:
		return &outcome.Waiting{Reason: failed.Reason, Message: "the agent first undoes the change, and begins again when it may: " + failed.Message}
	case failed != nil:
		return &outcome.Stalled{Reason: failed.Reason, Message: failed.Message}
	case refusal(to.why) != "":
		return &outcome.Stalled{Reason: refusal(to.why), Message: fmt.Sprintf("%v; and the agent would undo the change to %s, which is under way", to.why, seen.Journal.Target)}
	}
	return &outcome.Waiting{Reason: config.ReasonRollingBack, Message: fmt.Sprintf("the agent first undoes the change to %s: %v", seen.Journal.Target, to.why)}
}

// refusal is the reason that the node's condition would have for a refusal; empty if the error is none.
func refusal(err error) config.Reason {
	var stalled *outcome.Stalled
	var refused *plan.Refused
	var failure *api.Failure
	switch {
	case errors.As(err, &stalled):
		return stalled.Reason
	case errors.As(err, &refused):
		return decide.Refusal(refused)
	case errors.As(err, &failure) && !failure.Later:
		return failure.Reason
	default:
		return ""
	}
}
