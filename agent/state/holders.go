package state

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml"
)

// Planned returns the desired state as the planner needs it.
func (d Desired) Planned(targets plan.Targets) plan.Desired {
	out := plan.Desired{GPUs: targets, Config: d.Plugin.ConfigText(), Later: d.PluginLater}
	if d.Plugin != nil {
		out.Sharing = PlannedSharing(d.Plugin.Sharing, d.Plugin.Strategy)
	}
	return out
}

// Started is the state of the units that the agent has started again.
type Started struct {
	Asked  bool
	States map[string]string
	Err    error
}

// ToRestore is what the agent must restore on the host although no journal says so.
type ToRestore struct {
	Stopped    []string
	Persistent []nvml.UUID
}

// Ended reports whether the pod's containers have ended for good.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
