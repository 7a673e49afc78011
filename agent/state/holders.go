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
func (w Desired) Planned(targets plan.Targets) plan.Desired {
	out := plan.Desired{GPUs: targets, Config: w.Plugin.ConfigText(), Later: w.PluginLater}
	if w.Plugin != nil {
		out.Sharing = PlannedSharing(w.Plugin.Sharing, w.Plugin.Strategy)
	}
	return out
}

// MustLeave returns the holders that have to leave if a plan takes what they hold; package plan decides which of them do. It leaves out operands, which
// have an order of their own, clients of the library that have no more than a file open, and pods of DaemonSets that tolerate the fence: evicting those
// would only restart them.
func (s *Observed) MustLeave() []holders.Pod {
	apart := map[string]bool{}
	for _, o := range s.KubeletPlugins() {
		apart[string(o.UID)] = true
	}
	for _, o := range s.Pauses {
		for _, p := range o.Pods {
			apart[string(p.UID)] = true
		}
	}
	clients := map[string]bool{}
	for _, p := range s.Holders.OfLibrary {
		clients[string(p.UID)] = true
	}
	return slices.DeleteFunc(slices.Clone(s.Holders.Pods), func(p holders.Pod) bool {
		return p.UID != "" && apart[string(p.UID)] || byFilesAlone(p) && (clients[string(p.UID)] || p.Daemon && s.returns(p))
	})
}

// returns reports whether the pod tolerates the fence, so that it comes back after its eviction.
func (s *Observed) returns(p holders.Pod) bool {
	return slices.ContainsFunc(s.Pods, func(pod corev1.Pod) bool {
		return pod.UID == p.UID && holders.Tolerates(pod.Spec.Tolerations, FenceTaint())
	})
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

func byFilesAlone(p holders.Pod) bool {
	return !slices.ContainsFunc(p.Sources, func(s holders.Source) bool { return !s.IsOpenFile() })
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

// ClaimsUnknown returns why the agent cannot know which device a claim has where NVIDIA's DRA driver gives out GPUs; nil if it can.
func (s *Observed) ClaimsUnknown() error {
	if s.Owner.Kind != api.OwnerDRAStatic && s.Owner.Kind != api.OwnerBoth {
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
