package evict

import (
	"context"
	"time"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain"
)

// ComeBack returns the wait for a taint to go that would keep a pod of the step from starting again.
func (e *Evictions) ComeBack(in act.Input) error {
	keptAway, advice := offer.KeptAway(in.Seen, in.Steps[:1])
	if keptAway == "" {
		return nil
	}
	return &outcome.Waiting{
		Reason: config.ReasonNoDevicePlugin, For: outcome.ForUser, After: outcome.EvictionRetry, Since: in.Seen.Since(config.ReasonNoDevicePlugin, e.Clock.Stamp()),
		Advice: advice, Message: offer.Of(in.Seen).Name() + " needs a restart, and " + keptAway,
	}
}

// Restart evicts the pod of a device plugin that does not advertise the current GPUs; its DaemonSet replaces the pod. The agent has nothing to
// restore for that, so it writes no journal: if it is killed here, the next agent finds the former pod, or the new one. Restart never returns
// nil: only the next observation can show that the pod is gone. It waits for other tools that work on the node: a tool that has taken the node
// out for a bad GPU restarts the plugin itself, or does not want it restarted.
func (e *Evictions) Restart(ctx context.Context, in act.Input) error {
	if others := in.Seen.ToolsAtWork(); len(others) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Since: in.Seen.Since(config.ReasonOtherMaintenance, e.Clock.Stamp()),
			Message: offer.Of(in.Seen).Name() + " does not advertise the current GPUs; its restart waits for " + sanitize.Listed(others),
		}
	}
	if err := e.ComeBack(in); err != nil {
		return err
	}
	verdicts, _ := e.request(ctx, in, in.Step().Pods)
	for _, v := range verdicts {
		if v.State == drain.Requested {
			e.Events.Node(e.Node, events.RestartingPlugin(offer.Of(in.Seen).Name(), v.Pod.String()))
		}
	}
	if blocked := stuck(verdicts); len(blocked) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonEvictionBlocked, For: outcome.ForRoom, After: outcome.EvictionRetry, Blockers: describe(blocked),
			Since:   in.Seen.Since(config.ReasonEvictionBlocked, e.Clock.Stamp()),
			Message: sanitize.Listed(drain.Summary(blocked, time.Time{})) + "; " + offer.Of(in.Seen).Name() + " does not advertise the current GPUs and needs a restart",
			Else:    "to continue at once, delete the pod: its DaemonSet creates another",
		}
	}
	return &outcome.Waiting{
		Reason: config.ReasonAwaitingCapacity, For: outcome.ForStep, After: outcome.EvictionRetry, Blockers: describe(verdicts),
		Message: "restarting " + offer.Of(in.Seen).Name() + ", which does not advertise the current GPUs: " + sanitize.Listed(drain.Summary(verdicts, time.Time{})),
	}
}
