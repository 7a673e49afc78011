package fencing

import (
	"context"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Preflight checks, before a step that leads to the first disturbance, whether the change can come to its end: no other tool works on the node,
// the pods may be evicted, no process would stay that the agent cannot send away, and a device plugin is there to prove the capacity, without
// which it makes no instance either. It writes nothing.
func (f *Fencing) Preflight(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	makes := steps[0].Traits().Opens && !want.Undo && seen.Journal == nil && plan.Has(steps, plan.Create)
	if !startsDisruption(seen, want, steps) && !(makes && seen.LacksDevicePlugin()) {
		return nil
	}
	const before = "nothing is disturbed before "
	wait := &outcome.Waiting{After: outcome.EvictionRetry}
	busy, foreign, unowned := seen.HoldersUnknown(), seen.ToolsAtWork(), f.Processes.Unowned(seen)
	switch {
	case len(foreign) > 0:
		wait.Reason, wait.Blockers = config.ReasonOtherMaintenance, foreign
		wait.Advice = "the node is as it was meanwhile"
		wait.Message = before + "other tools are done with this node: " + strings.Join(foreign, "; ")
	case busy != nil && seen.Kubelet.Err != nil:
		wait.Reason, wait.Message = config.ReasonKubeletUnavailable, before+"kubelet says which pod has which device: "+seen.Kubelet.Err.Error()
		wait.Advice = "see the node's kubelet, by journalctl -u kubelet"
	case busy != nil:
		wait.Reason, wait.Message = config.ReasonHoldersUnknown, before+"the host's processes show who holds a GPU: "+seen.Holders.Err.Error()
	case seen.LacksDevicePlugin():
		wait.Reason, wait.Message = config.ReasonNoDevicePlugin, f.Handover.Advice(seen)+"; until then nothing is disturbed: "+seen.WhyNoPlugin()
	case len(unowned) > 0:
		wait.Reason, wait.Blockers = config.ReasonGPUInUse, unowned
		wait.Message = before + "these processes end, which are of no pod and hold what is to go: " + sanitize.Listed(unowned)
		wait.Advice = "end them on the node, or stop their units"
	default:
		return f.Evictions.Drainable(ctx, seen, want, steps)
	}
	wait.Since = seen.Since(wait.Reason, f.Clock.Stamp())
	return wait
}
