package fencing

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// absentAfter says why nothing would offer the GPUs after the steps, and what a user can do; empty if something would.
func absentAfter(in act.Input) (why, advice string) {
	if why, advice = offer.Of(in.Seen).Absent(); why != "" {
		return why, advice
	}
	return offer.KeptAway(in.Seen, in.Steps)
}

// Preflight checks, before a step that leads to the first disturbance, whether the change can succeed. No other tool may be working on the node, the
// pods must be evictable, and every process must be one that the agent can end. A device plugin and kubelet must be there to verify the capacity, and no
// taint may keep the plugin from starting again; otherwise the agent creates no instance either. It creates none while the plugin, or NVIDIA's DRA driver,
// still advertises removed devices after a restart by the agent. Preflight writes nothing.
func (f *Fencing) Preflight(ctx context.Context, in act.Input) error {
	makes := in.Steps[0].Traits().Stage == plan.StageOpen && !in.Want.Undo && in.Seen.Journal == nil && plan.Has(in.Steps, plan.Create)
	offers := offer.Of(in.Seen)
	absent, advice := absentAfter(in)
	gone := offer.Uncured(in.Seen, in.Want)
	if !startsDisruption(in) && !(makes && (absent != "" || len(gone) > 0 || in.Seen.Kubelet.Err != nil)) {
		return nil
	}
	const before = "changes nothing "
	wait := &outcome.Waiting{After: outcome.EvictionRetry}
	foreign := in.Seen.ToolsAtWork()
	reason, busy := offer.HoldersUnknown(in.Seen)
	switch {
	case len(foreign) > 0 && startsDisruption(in):
		wait.Reason, wait.Blockers = config.ReasonOtherMaintenance, foreign
		wait.Message = before + "until other tools are done with this node: " + strings.Join(foreign, "; ")
	case busy != nil:
		wait.Reason, wait.Message = reason, before+busy.Error()
		if in.Seen.Kubelet.Err != nil {
			wait.Advice = "see the node's kubelet, by journalctl -u kubelet"
		}
	case absent != "":
		wait.Reason, wait.Advice, wait.Message, wait.For = config.ReasonNoDevicePlugin, advice, absent, offer.AbsentFor(in.Seen)
		wait.Else = before + "until then"
	case len(gone) > 0:
		wait.Reason, wait.Advice, wait.For, wait.Else = config.ReasonCapacityMismatch, offer.Advice(in.Seen), outcome.ForUser, before+"until then"
		wait.Message = fmt.Sprintf("%s advertises %s, although the agent has restarted it, so no new capacity could be verified", offers.Name(), sanitize.Listed(gone))
	default:
		return f.holdersStay(ctx, in)
	}
	wait.Since = in.Seen.Since(wait.Reason, f.Clock.Stamp())
	return wait
}

// holdersStay returns a wait if something holds what the steps change, and would not leave: a process of no pod, or a pod that cannot be evicted.
func (f *Fencing) holdersStay(ctx context.Context, in act.Input) error {
	unowned := f.Processes.Unowned(in.Seen, in.Steps)
	if len(unowned) == 0 {
		return f.Evictions.Drainable(ctx, in)
	}
	return &outcome.Waiting{
		Reason: config.ReasonGPUInUse, Blockers: unowned, After: outcome.EvictionRetry, Since: in.Seen.Since(config.ReasonGPUInUse, f.Clock.Stamp()),
		Advice:  "end what holds the GPUs on the node, or stop its unit",
		Message: "processes of no pod hold what changes: " + sanitize.Listed(unowned), Else: "changes nothing until then",
	}
}
