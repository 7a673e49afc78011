package reboot

import (
	"cmp"
	"context"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// ObserveBoot reads the host's boot id. If that fails, the last one still holds, since a reboot would have ended this process. If the agent
// has never read it, it never assumes a reboot.
func (r *Rebooter) ObserveBoot(ctx context.Context, seen *state.Observed) {
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	boot, err := r.Kernel.Boot(call)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != r.trouble {
		r.Log.Warn("cannot read the host's boot id", zap.Error(err))
	}
	r.id, r.trouble = cmp.Or(boot, r.id), text
	if seen.Boot.ID = r.id; seen.Boot.ID == "" {
		seen.Boot.Err = err
	}
}

// Observe finds out which mode changes need a reboot here, and whether the agent has asked for one.
func (r *Rebooter) Observe(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	boot := seen.Boot.ID
	known := seen.Refusal()
	seen.Reboots = plan.Reboots{
		NoReset:   map[nvml.UUID]bool{},
		Suspected: map[nvml.UUID]bool{},
		Policy:    plan.RebootPolicy(r.Settings.Reboot.Policy),
		Asked:     r.Sentinel.State(ctx),
	}
	if known != nil {
		for _, gpu := range known.GPUs {
			seen.Reboots.Suspected[gpu] = true
			seen.Reboots.NoReset[gpu] = boot != "" && known.Boot == boot
		}
	}
	j := seen.Journal
	seen.Reboots.InVain = j != nil && j.NoReset != nil && boot != "" && j.NoReset.Boot != boot
	for _, p := range pods {
		// Pods that started behind the fence tolerate everything, and would come back as often as the agent evicts them.
		if j != nil && j.Cordoned && p.CreationTimestamp.After(j.Started) {
			continue
		}
		seen.Holders.BeforeReboot = append(seen.Holders.BeforeReboot, holders.Drainable([]corev1.Pod{p})...)
	}
	for _, p := range seen.Holders.BeforeReboot {
		seen.Reboots.Others = append(seen.Reboots.Others, state.PlannedPod(p))
	}
}
