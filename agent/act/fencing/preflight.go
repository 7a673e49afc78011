package fencing

import (
	"context"
	"strings"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Preflight checks, before a step that leads to the first disturbance, whether the change can come to its end: no other tool works on the node,
// the pods may be evicted, no process would stay that the agent cannot send away, and a device plugin is there to prove the capacity, without
// which it makes no instance either. It writes nothing.
func (f *Fencing) Preflight(ctx context.Context, in act.Input) error {
	makes := in.Steps[0].Traits().Stage == plan.StageOpen && !in.Want.Undo && in.Seen.Journal == nil && plan.Has(in.Steps, plan.Create)
	if !startsDisruption(in) && !(makes && in.Seen.LacksDevicePlugin()) {
		return nil
	}
	const before = "changes nothing until "
	wait := &outcome.Waiting{After: outcome.EvictionRetry}
	busy, foreign, unowned := in.Seen.HoldersUnknown(), in.Seen.ToolsAtWork(), f.Processes.Unowned(in.Seen)
	switch {
	case len(foreign) > 0:
		wait.Reason, wait.Blockers = config.ReasonOtherMaintenance, foreign
		wait.Message = before + "other tools are done with this node: " + strings.Join(foreign, "; ")
	case busy != nil && in.Seen.Kubelet.Err != nil:
		wait.Reason, wait.Message = config.ReasonKubeletUnavailable, before+"kubelet says which pod has which device: "+in.Seen.Kubelet.Err.Error()
		wait.Advice = "see the node's kubelet, by journalctl -u kubelet"
	case busy != nil:
		wait.Reason, wait.Message = config.ReasonHoldersUnknown, before+"the host's processes show who holds a GPU: "+in.Seen.Holders.Err.Error()
	case in.Seen.LacksDevicePlugin():
		wait.Reason, wait.Advice, wait.Message = config.ReasonNoDevicePlugin, f.Handover.Advice(in.Seen), in.Seen.WhyNoPlugin()
		wait.Else = before + "then"
	case len(unowned) > 0:
		wait.Reason, wait.Blockers = config.ReasonGPUInUse, unowned
		wait.Advice = "end these processes on the node, or stop their units: " + sanitize.Listed(unowned)
		wait.Message = "they are of no pod and hold what is to change"
		wait.Else = before + "then"
	default:
		return f.Evictions.Drainable(ctx, in)
	}
	wait.Since = in.Seen.Since(wait.Reason, f.Clock.Stamp())
	return wait
}
