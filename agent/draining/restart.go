package draining

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

// restartPlugin evicts the device plugin's pod, which its DaemonSet replaces. No journal owes anything for that: an agent that is killed
// here is followed by one that finds the former pod, or the next. It never returns nil, as Evict. Other tools that work on the node have
// it first: one that has taken the node out for a bad GPU restarts the plugin by itself, or does not want it to be.
func (d *Draining) restartPlugin(ctx context.Context, seen state.Observed, step plan.Step) error {
	if others := seen.AtWork(); len(others) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Since: seen.Since(config.ReasonOtherMaintenance, d.Clock.Stamp()),
			Message: "the device plugin is to be restarted for a GPU that has recovered, after the work of " + legible.Listed(others),
		}
	}
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	policy, since := d.policy(seen, step, state.Desired{})
	verdicts := d.Evictor.Evict(all, seen.Drained(step.Pods), policy, since)
	d.Wakes.BlockedBy(verdicts)
	d.Metrics.Evicted(verdicts)
	for _, v := range verdicts {
		if v.State == drain.Requested {
			d.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonPluginRestarted,
				"restarting device plugin %s: it takes a GPU for unhealthy that has recovered", v.Pod)
		}
	}
	return &outcome.Waiting{
		Reason: config.ReasonAwaitingCapacity, After: outcome.EvictionRetry, Blockers: describe(verdicts),
		Message: fmt.Sprintf("restarting the device plugin, which withholds a GPU that has recovered: %s", strings.Join(describe(verdicts), "; ")),
	}
}
