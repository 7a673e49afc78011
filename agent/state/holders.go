package state

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
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

// keepsClaims reports whether a pod of the operand is a DRA driver, of GPUs or of others, such as NVIDIA's of compute domains.
func (s *Observed) keepsClaims(o fence.Operand) bool {
	return slices.ContainsFunc(s.Pods, func(driver corev1.Pod) bool {
		return registers(&driver) && slices.ContainsFunc(o.Pods, func(p holders.Pod) bool { return p.UID == driver.UID })
	})
}

// ClaimDriver reports whether NVIDIA's DRA driver runs on the node.
func (s *Observed) ClaimDriver() bool {
	return slices.ContainsFunc(driverPods(s.Pods), func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

// HoldersUnknown returns why the agent cannot know which pods and processes hold a device; nil if it can.
func (s *Observed) HoldersUnknown() (config.Reason, error) {
	switch {
	case s.Kubelet.Err != nil:
		return config.ReasonKubeletUnavailable, fmt.Errorf("until kubelet says which pod has which device: %w", s.Kubelet.Err)
	case s.ClaimsUnknown() != nil:
		return config.ReasonHoldersUnknown, fmt.Errorf("until it is known which device a claim has: %w", s.ClaimsUnknown())
	case s.Holders.Err != nil:
		return config.ReasonHoldersUnknown, fmt.Errorf("until the host's processes show who holds a GPU: %w", s.Holders.Err)
	default:
		return "", nil
	}
}

// ClaimsUnknown returns why the agent cannot know which device a claim has where NVIDIA's DRA driver gives out GPUs, or has done so to pods that still have
// them; nil if it can.
func (s *Observed) ClaimsUnknown() error {
	if s.Owner.Kind != api.OwnerDRAStatic && s.Owner.Kind != api.OwnerBoth && s.Owner.Claimants == "" {
		return nil
	}
	return s.DRA.unknown()
}

// Started is the state of the units that the agent has started again.
type Started struct {
	Asked  bool
	States map[string]string
	Err    error
}

// ToRestore is what the agent must restore on the host though no journal says so.
type ToRestore struct {
	Stopped    []string
	Persistent []nvml.UUID
}

// Ended reports whether the pod's containers have ended for good.
func Ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
