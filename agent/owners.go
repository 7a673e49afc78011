package agent

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// Pods of NVIDIA's programs are known by their labels, which any pod may have. So they count only where the settings say that they
// are, and as pods of a DaemonSet that exists.

// believe gives the pods without the owners that they only pretend to have.
func (a *Agent) believe(ctx context.Context, pods []corev1.Pod) (out []corev1.Pod, err error) {
	err = retried.Do(ctx, func() (err error) {
		out, err = a.sets.Believe(ctx, pods)
		return err
	})
	return out, err
}

// operands picks the device plugin's pods.
func (a *Agent) operands(pods []corev1.Pod) []corev1.Pod {
	return a.ofNVIDIA(picked(pods, a.settings.DevicePlugin.PodSelector, a.settings.DevicePlugin.Containers))
}

// ofNVIDIA leaves those of the pods that are what their labels say.
func (a *Agent) ofNVIDIA(pods []corev1.Pod) []corev1.Pod {
	return slices.DeleteFunc(pods, func(p corev1.Pod) bool { return a.pretends(&p) != "" })
}

// pretends says why the pod is not what its labels say; empty if it is.
func (a *Agent) pretends(pod *corev1.Pod) string {
	switch _, of := holders.DaemonSetOf(pod); {
	case !slices.Contains(a.settings.DevicePlugin.Namespaces, pod.Namespace):
		return fmt.Sprintf("namespace %s is not among devicePlugin.namespaces of the settings", pod.Namespace)
	case !of:
		return "it is of no DaemonSet that exists"
	default:
		return ""
	}
}

// pretenders tells people of a pod that has the device plugin's labels and does not count: it may be theirs, in a namespace that the
// settings do not know yet.
func (a *Agent) pretenders(pods []corev1.Pod) string {
	for _, pod := range picked(pods, a.settings.DevicePlugin.PodSelector, a.settings.DevicePlugin.Containers) {
		if why := a.pretends(&pod); why != "" {
			return fmt.Sprintf("; pod %s/%s has its labels, and does not count: %s", pod.Namespace, pod.Name, why)
		}
	}
	return ""
}

// rivals is why it is not known which device plugin counts, where several DaemonSets run one on the node and are told different things:
// to choose one would be to guess. Of one DaemonSet, a new pod follows the old one.
func (a *Agent) rivals(operands []corev1.Pod) string {
	var first *corev1.Pod
	for i := range operands {
		pod := &operands[i]
		switch {
		case pod.DeletionTimestamp != nil: // what it is told counts no more
		case first == nil:
			first = pod
		case setOf(pod) != setOf(first) && a.toldTo(pod) != a.toldTo(first):
			return fmt.Sprintf("two device plugins run on this node and are told different things: pod %s/%s has %s, and pod %s/%s has %s; "+
				"nothing is changed until one of their DaemonSets is removed, or both are told the same",
				first.Namespace, first.Name, a.toldTo(first), pod.Namespace, pod.Name, a.toldTo(pod))
		}
	}
	return ""
}

func setOf(pod *corev1.Pod) types.UID {
	set, _ := holders.DaemonSetOf(pod)
	return set
}

// toldTo is what decisions are made by of a device plugin's pod.
func (a *Agent) toldTo(pod *corev1.Pod) string {
	strategy := string(state.StrategyOf(*pod))
	if strategy == "" {
		strategy = "no MIG strategy"
	} else {
		strategy = "MIG strategy " + strategy
	}
	switch m := managerOf(*pod); {
	case m != nil:
		return fmt.Sprintf("%s and its config from ConfigMap %s/%s by label %s", strategy, m.Namespace, m.ConfigMap, m.Label)
	case a.readsFile(pod):
		return fmt.Sprintf("%s and its config from the file %s", strategy, a.settings.DevicePlugin.ConfigFile)
	default:
		return fmt.Sprintf("%s and no config", strategy)
	}
}

// servesMPS reports whether the pod is MPS's daemon, whose server computes for others and not for itself.
func (a *Agent) servesMPS(pod *corev1.Pod) bool {
	return matches(pod, a.settings.MPS.PodSelector) && a.pretends(pod) == ""
}
