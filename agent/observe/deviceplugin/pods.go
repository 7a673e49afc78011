package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// advice says what a user can do about a node without a device plugin, or with an unknown one.
func (dp *Plugin) advice(seen *state.Observed) string {
	if seen.Kubelet.OffersGPUs() {
		return dp.cure(seen.Pods)
	}
	text := "deploy NVIDIA's device plugin, or see why its DaemonSet has no pod on this node: it has to select the node"
	var taints []string
	for _, t := range seen.Node.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule {
			taints = append(taints, t.ToString())
		}
	}
	if len(taints) > 0 {
		text += ", and to tolerate " + sanitize.Listed(taints)
	}
	if value, there := seen.Node.Labels[config.LabelDevicePlugin]; there && value != fence.DeployedValue {
		text += fmt.Sprintf("; label %s=%s turns off the GPU Operator's", config.LabelDevicePlugin, value)
	}
	return text + dp.mislabelledPods(seen.Pods)
}

// Unstarted says which container of the device plugin's pod does not start, and what its config manager needs; empty if all run. A container has no
// log before it starts.
func (dp *Plugin) Unstarted(seen *state.Observed) string {
	for i := range seen.DevicePlugin.Pods {
		pod := &seen.DevicePlugin.Pods[i]
		if pod.DeletionTimestamp != nil {
			continue
		}
		for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			if c.State.Waiting == nil {
				continue
			}
			text := fmt.Sprintf("pod %s/%s does not start: its container %s waits (%s)", pod.Namespace, pod.Name, c.Name, sanitize.Cut(c.State.Waiting.Reason, 100))
			if m := managerOf(*pod); m != nil {
				text += fmt.Sprintf("; NVIDIA's config manager needs ConfigMap %s/%s, with one key at least", m.Namespace, m.ConfigMap)
			}
			return text
		}
	}
	return ""
}

// ObservePods finds the device plugin and MPS's control daemon among the node's pods.
func (dp *Plugin) ObservePods(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	seen.DevicePlugin.Pods = dp.ofNVIDIA(state.Picked(pods, dp.Settings.DevicePlugin.PodSelector, dp.Settings.DevicePlugin.Containers))
	seen.DevicePlugin.MPSDaemons = dp.ofNVIDIA(state.Picked(pods, dp.Settings.MPS.PodSelector, dp.Settings.MPS.Containers))
	seen.DevicePlugin.Rivals = dp.rivals(seen.DevicePlugin.Pods)
	seen.DevicePlugin.ObeysLabel = slices.ContainsFunc(seen.DevicePlugin.Pods, func(pod corev1.Pod) bool {
		m := managerOf(pod)
		return m != nil && m.Label == config.LabelDevicePluginConfig
	})
	if seen.DevicePlugin.Unconnected = dp.unconnected(ctx, seen); len(seen.DevicePlugin.Pods) == 0 {
		seen.DevicePlugin.Advice = dp.advice(seen)
	}
}

// ofNVIDIA returns the pods with true labels.
func (dp *Plugin) ofNVIDIA(pods []corev1.Pod) []corev1.Pod {
	return slices.DeleteFunc(pods, func(p corev1.Pod) bool { return dp.whyNotPluginPod(&p) != "" })
}

// whyNotPluginPod says why the pod's labels are not true; empty if they are.
func (dp *Plugin) whyNotPluginPod(pod *corev1.Pod) string {
	switch _, of := holders.DaemonSetOf(pod); {
	case !slices.Contains(dp.Settings.DevicePlugin.Namespaces, pod.Namespace):
		return fmt.Sprintf("namespace %s is not among devicePlugin.namespaces of the settings", pod.Namespace)
	case !of:
		return "it belongs to no existing DaemonSet"
	default:
		return ""
	}
}

// longestOfPod bounds each text of a pod in a message: whoever may create a pod writes them.
const longestOfPod = 100

// cure says which settings would let the agent know the device plugin among the pods.
func (dp *Plugin) cure(pods []corev1.Pod) string {
	const asDaemonSet = "run the node's device plugin as a DaemonSet that devicePlugin of the settings matches"
	pod, sign := likelyPlugin(pods)
	if pod == nil {
		return asDaemonSet + ": no pod of the node looks like one, so it may be a unit of the host, which the agent does not restart"
	}
	who := fmt.Sprintf("pod %s/%s is the node's device plugin, as its %s suggests", pod.Namespace, pod.Name, sanitize.Cut(sign, longestOfPod))
	if _, of := holders.DaemonSetOf(pod); !of {
		return asDaemonSet + ", if " + who + ": it belongs to no existing DaemonSet"
	}
	var lacks []string
	if !state.Selected(pod, dp.Settings.DevicePlugin.PodSelector) {
		lacks = append(lacks, fmt.Sprintf("%q to devicePlugin.podSelector", cmp.Or(dp.Sets.SelectorOf(pod), "the selector of its DaemonSet")))
	}
	if !slices.Contains(dp.Settings.DevicePlugin.Namespaces, pod.Namespace) {
		lacks = append(lacks, fmt.Sprintf("%q to devicePlugin.namespaces", pod.Namespace))
	}
	if len(pod.Spec.Containers) > 0 && len(state.Picked([]corev1.Pod{*pod}, []labels.Selector{labels.Everything()}, dp.Settings.DevicePlugin.Containers)) == 0 {
		lacks = append(lacks, fmt.Sprintf("%q to devicePlugin.containers", pod.Spec.Containers[0].Name))
	}
	return fmt.Sprintf("add %s of the settings, if %s", strings.Join(lacks, " and "), who)
}

// likelyPlugin returns the pod that looks most like NVIDIA's device plugin, and the sign of that; nil if none does.
func likelyPlugin(pods []corev1.Pod) (likely *corev1.Pod, by string) {
	best := 0
	for i := range pods {
		pod := &pods[i]
		rank, sign := likeness(pod)
		if rank == 0 || state.Ended(pod) {
			continue
		}
		if _, of := holders.DaemonSetOf(pod); of {
			rank += 3 // as almost all of them are
		}
		if rank > best {
			likely, by, best = pod, sign, rank
		}
	}
	return likely, by
}

// besidePlugin are programs in the image of NVIDIA's device plugin that advertise nothing.
var besidePlugin = []string{"gpu-feature-discovery", "mps-control-daemon", state.ManagerCommand}

// likeness says how much the pod looks like NVIDIA's device plugin, and names the sign; 0 if it does not. The folder of kubelet's sockets is a weak
// sign, since plugins of other devices have it too.
func likeness(pod *corev1.Pod) (rank int, sign string) {
	for _, v := range pod.Spec.Volumes {
		if v.HostPath != nil && path.Base(v.HostPath.Path) == "device-plugins" {
			rank, sign = 1, "volume "+v.HostPath.Path
		}
	}
	for _, c := range pod.Spec.Containers {
		commandLine := strings.Join(slices.Concat([]string{c.Name}, c.Command, c.Args), " ")
		if slices.ContainsFunc(besidePlugin, func(program string) bool { return strings.Contains(commandLine, program) }) {
			continue
		}
		for _, of := range []struct{ what, text string }{{"image", c.Image}, {"container", c.Name}, {"command", strings.Join(c.Command, " ")}} {
			if strings.Contains(of.text, "device-plugin") && (strings.Contains(of.text, "nvidia") || strings.Contains(of.text, "gpu")) {
				return rank + 2, of.what + " " + of.text
			}
		}
	}
	return rank, sign
}

// mislabelledPods names, for a message, an ignored pod with the device plugin's labels: it may be the device plugin, in a namespace that the settings
// lack.
func (dp *Plugin) mislabelledPods(pods []corev1.Pod) string {
	for _, pod := range state.Picked(pods, dp.Settings.DevicePlugin.PodSelector, dp.Settings.DevicePlugin.Containers) {
		if why := dp.whyNotPluginPod(&pod); why != "" {
			return fmt.Sprintf("; pod %s/%s has its labels, but is ignored: %s", pod.Namespace, pod.Name, why)
		}
	}
	return ""
}

// rivals says that pods of two DaemonSets run as device plugins on the node, with different MIG strategies or configs: the agent does not guess which
// one counts. Two pods of one DaemonSet are no rivals: the new one follows the old one.
func (dp *Plugin) rivals(operands []corev1.Pod) string {
	var first *corev1.Pod
	for i := range operands {
		pod := &operands[i]
		switch {
		case pod.DeletionTimestamp != nil: // it is about to end
		case first == nil:
			first = pod
		case daemonSetUID(pod) != daemonSetUID(first) && dp.podRole(pod) != dp.podRole(first):
			return fmt.Sprintf("two device plugins run on this node and are configured differently: pod %s/%s has %s, and pod %s/%s has %s; "+
				"remove one of their DaemonSets, or configure both alike; nothing changes until then",
				first.Namespace, first.Name, dp.podRole(first), pod.Namespace, pod.Name, dp.podRole(pod))
		}
	}
	return ""
}

func daemonSetUID(pod *corev1.Pod) types.UID {
	set, _ := holders.DaemonSetOf(pod)
	return set
}

// podRole returns the MIG strategy of a device plugin's pod, and the source of its config.
func (dp *Plugin) podRole(pod *corev1.Pod) string {
	strategy := string(state.StrategyOf(*pod))
	if strategy == "" {
		strategy = "no MIG strategy"
	} else {
		strategy = "MIG strategy " + strategy
	}
	switch m := managerOf(*pod); {
	case m != nil:
		return fmt.Sprintf("%s and its config from ConfigMap %s/%s by label %s", strategy, m.Namespace, m.ConfigMap, m.Label)
	case dp.readsFile(pod):
		return fmt.Sprintf("%s and its config from the file %s", strategy, dp.Settings.DevicePlugin.ConfigFile)
	default:
		return fmt.Sprintf("%s and no config", strategy)
	}
}

// ServesMPS reports whether the pod is MPS's daemon: its server computes for processes of other pods.
func (dp *Plugin) ServesMPS(pod *corev1.Pod) bool {
	return state.Selected(pod, dp.Settings.MPS.PodSelector) && dp.whyNotPluginPod(pod) == ""
}
