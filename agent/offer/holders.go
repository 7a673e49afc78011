package offer

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// isDRADriver reports whether a pod of the operand is a DRA driver, of GPUs or of others, such as NVIDIA's of compute domains.
func isDRADriver(seen *state.Observed, o fence.Operand) bool {
	return slices.ContainsFunc(seen.Pods, func(driver corev1.Pod) bool {
		return registers(&driver) && slices.ContainsFunc(o.Pods, func(p holders.Pod) bool { return p.UID == driver.UID })
	})
}

// DriverRuns reports whether NVIDIA's DRA driver runs on the node.
func DriverRuns(seen *state.Observed) bool {
	return slices.ContainsFunc(driverPods(seen.Pods), func(p *corev1.Pod) bool { return p.Status.Phase == corev1.PodRunning })
}

// daemonsTolerate are the taints that each pod of a DaemonSet tolerates.
var daemonsTolerate = []corev1.Toleration{
	{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
}

// DriverAway says why NVIDIA's DRA driver does not run on the node, as far as that shows; empty if it runs.
func DriverAway(seen *state.Observed) string {
	if drivers := driverPods(seen.Pods); len(drivers) > 0 {
		stopped := func(c corev1.ContainerStatus) bool { return c.Name == driverContainer && c.State.Running == nil }
		if status := drivers[0].Status; status.Phase == corev1.PodRunning && !slices.ContainsFunc(status.ContainerStatuses, stopped) {
			return ""
		}
		return podText(drivers[0]) + ", " + lastState(drivers[0])
	}
	taints := taintsOnDaemons(seen.Node)
	if len(taints) == 0 {
		return noDriverPod + ", and no taint keeps one away: kubectl get daemonsets -A shows whether its DaemonSet is there and selects the node"
	}
	return noDriverPod + "; unless its DaemonSet tolerates them, taints of the node keep it away: " + sanitize.Names(taints)
}

const noDriverPod = "no pod of it is on the node"

// taintsOnDaemons names the taints of the node that pods of DaemonSets do not tolerate by themselves, gpuslice's first.
func taintsOnDaemons(node *corev1.Node) []string {
	if node == nil {
		return nil
	}
	var ours, others []string
	for _, t := range node.Spec.Taints {
		switch text := sanitize.Cut(t.ToString(), longestID); {
		case t.Effect == corev1.TaintEffectPreferNoSchedule || holders.Tolerates(daemonsTolerate, t):
		case slices.Contains([]string{config.TaintRepartitioning, config.TaintGPUUnhealthy, config.TaintNotReady}, t.Key):
			ours = append(ours, text)
		default:
			others = append(others, text)
		}
	}
	return append(ours, others...)
}

// Untolerated names the first of the pods that could not start again on a node with the taints, and what a user can do; empty if each could.
func Untolerated(pods []corev1.Pod, taints []corev1.Taint) (why, advice string) {
	for _, pod := range pods {
		for _, t := range taints {
			if t.Effect != corev1.TaintEffectPreferNoSchedule && !holders.Tolerates(pod.Spec.Tolerations, t) {
				name := pod.Namespace + "/" + pod.Name
				return fmt.Sprintf("pod %s does not tolerate the taint %s, and would not start again", name, sanitize.Cut(t.ToString(), longestID)),
					"add the toleration to the DaemonSet of pod " + name
			}
		}
	}
	return "", ""
}

// KeptAway names a pod that offers the GPUs, that the steps end, and that a taint of the node would keep away after that, and what a user can do; empty if
// there is none.
func KeptAway(seen *state.Observed, steps []plan.Step) (why, advice string) {
	ends := func(pod corev1.Pod) bool {
		return slices.ContainsFunc(steps, func(s plan.Step) bool {
			return (s.Traits().ComesBack || s.Traits().StartsPlugin) && slices.ContainsFunc(s.Pods, func(p plan.Pod) bool { return p.UID == string(pod.UID) })
		})
	}
	stays := func(pod corev1.Pod) bool { return !ends(pod) }
	goes := func(t corev1.Taint) bool {
		return config.IsTransientTaint(t.Key) || slices.Contains(seen.Marks.Startup, t)
	}
	return Untolerated(slices.DeleteFunc(slices.Concat(Of(seen).Pods(), seen.DevicePlugin.MPSDaemons), stays),
		slices.DeleteFunc(slices.Clone(seen.Node.Spec.Taints), goes))
}

// HoldersUnknown returns why the agent cannot know which pods and processes hold a device; nil if it can.
func HoldersUnknown(seen *state.Observed) (config.Reason, error) {
	switch {
	case seen.Kubelet.Err != nil:
		return config.ReasonKubeletUnavailable, fmt.Errorf("until kubelet says which pod has which device: %w", seen.Kubelet.Err)
	case ClaimsUnknown(seen) != nil:
		return config.ReasonHoldersUnknown, fmt.Errorf("until it is known which device a claim has: %w", ClaimsUnknown(seen))
	case seen.Holders.Err != nil:
		return config.ReasonHoldersUnknown, fmt.Errorf("until the host's processes show who holds a GPU: %w", seen.Holders.Err)
	default:
		return "", nil
	}
}

// ClaimsUnknown returns why the agent cannot know which device a claim has; nil if it can. Either it could not read the claim, and kubelet does not name the
// pod's devices. Or it does not know the devices of NVIDIA's DRA driver, while that allocates GPUs or pods still have some from it.
func ClaimsUnknown(seen *state.Observed) error {
	if err := unreadClaims(seen); err != nil {
		return err
	}
	if !mayHaveClaimed(seen) && seen.Owner.Claimants == "" {
		return nil
	}
	return cmp.Or(slicesUnknown(seen), missingFromSlices(seen))
}

// mayHaveClaimed reports whether a pod may have a device of NVIDIA's DRA driver by a claim.
func mayHaveClaimed(seen *state.Observed) bool {
	switch owner := seen.Owner; owner.Kind {
	case api.OwnerDRAStatic:
		return true
	case api.OwnerDRADynamic:
		return slices.ContainsFunc(seen.Holders.Pods, func(p holders.Pod) bool { return len(p.DeviceClaims) > 0 })
	case api.OwnerBoth:
		return owner.Driver != "" || owner.Other == ""
	case api.OwnerNone, api.OwnerPlugin, api.OwnerDRAStarting:
	}
	return false
}

// unreadClaims names the pods that may hold any GPU because a claim of theirs was not read, and why it was not; nil if there is none.
func unreadClaims(seen *state.Observed) error {
	var pods []string
	for _, p := range seen.Holders.Pods {
		if len(p.UnreadClaims) > 0 {
			pods = append(pods, p.String())
		}
	}
	switch {
	case len(pods) == 0:
		return nil
	case seen.DRA.Unread == nil:
		return fmt.Errorf("the agent has not yet read all resource claims of %s", sanitize.Names(pods))
	default:
		return fmt.Errorf("%w (of %s)", seen.DRA.Unread, sanitize.Names(pods))
	}
}

// missingFromSlices names the pods with claims of devices that the ResourceSlices lack, as long as they also lack a device that a GPU has: it may be that
// one. Nil if there is no such pod. Where the slices have all devices of the GPUs, a device that they lack is gone.
func missingFromSlices(seen *state.Observed) error {
	if !(driver{seen}).lacksDevices() {
		return nil
	}
	listed := namesOf(seen.DRA)
	var missing []string
	for _, pod := range seen.Holders.Pods {
		if EndedByReboot(seen, pod) {
			continue
		}
		for _, gone := range goneOf(seen, pod, listed) {
			missing = append(missing, fmt.Sprintf("pod %s has %s", pod, gone))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("the ResourceSlices of this node do not show all devices of its GPUs, and not those of pods: %s", sanitize.Names(missing))
}

// IsReplaced reports whether a pod in the place of this one would have to get devices by claims of its own. A pod that names a claim has the devices of the pod
// before it, and one without claims may open any GPU. A pod created after its devices were closed has got them anyway: closing does not stop it.
func IsReplaced(seen *state.Observed, p holders.Pod) bool {
	i := slices.IndexFunc(seen.Pods, func(pod corev1.Pod) bool { return pod.UID == p.UID })
	if i < 0 || len(p.DeviceClaims) == 0 {
		return p.Unlisted // the API server has no such pod: none takes its place
	}
	pod := seen.Pods[i]
	named := slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.ResourceClaimTemplateName == nil })
	created := seen.Journal != nil && len(seen.Journal.Closed) > 0 && pod.CreationTimestamp.After(seen.Journal.Started)
	return !named && !created
}
