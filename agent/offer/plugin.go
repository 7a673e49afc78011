package offer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// plugin is NVIDIA's device plugin, which advertises the GPUs to kubelet.
type plugin struct{ seen *state.Observed }

// Name implements Offer.
func (plugin) Name() string { return "the device plugin" }

// Pods implements Offer.
func (p plugin) Pods() []corev1.Pod { return p.seen.DevicePlugin.Pods }

func (p plugin) operand(o plan.Operand, _ *corev1.Pod) plan.Operand { return o }

// Absent implements Offer. No plugin is missing while the agent itself keeps it away. If kubelet still has GPUs to allocate, another program advertises them:
// the agent cannot restart that program, which would go on advertising the former GPUs.
func (p plugin) Absent() (why, advice string) {
	s := p.seen
	advertised := s.Kubelet.OffersGPUs()
	if s.Kubelet.Err != nil || len(s.DevicePlugin.Pods) > 0 || s.Marks.Fenced || s.PluginPaused() || !advertised && len(s.Marks.Startup) > 0 {
		return "", ""
	}
	why = "no device plugin advertises the GPUs to kubelet, and no pod of this node matches devicePlugin.podSelector of the settings"
	if advertised {
		why = fmt.Sprintf("no pod that devicePlugin of the settings matches advertises %s to kubelet, so the agent cannot restart what does", offeredNames(s))
	}
	return why, s.DevicePlugin.Advice
}

// AbsentFor returns what a wait is for where the device plugin is absent. On a new node the plugin may still come; one that the agent does not know has to be
// named by a user.
func AbsentFor(seen *state.Observed) outcome.For {
	if seen.Kubelet.OffersGPUs() {
		return outcome.ForUser
	}
	return outcome.ForDevicePlugin
}

func offeredNames(s *state.Observed) string {
	return sanitize.Listed(slices.Sorted(maps.Keys(capacity.Offered(s.Kubelet.Offered))))
}

// Strategy implements Offer: as the settings say, unless that is auto, else by the plugin's environment or arguments, else by its config, else none under MPS,
// else by the node's label.
func (p plugin) Strategy(set config.MIGStrategy, want *state.DesiredPlugin) config.MIGStrategy {
	if set != config.MIGStrategyAuto {
		return set
	}
	if explicit := p.seen.ExplicitStrategy(); explicit != "" {
		return explicit
	}
	if want != nil && want.Strategy != "" {
		return want.Strategy
	}
	if want != nil && want.Sharing.Strategy == catalog.SharingMPS {
		return config.MIGStrategyNone // a plugin without a strategy runs with none, and MPS does not work with mixed
	}
	return set.On(p.seen.Node.Labels[config.LabelMIGStrategy])
}

// RunsUnder implements Offer.
func (p plugin) RunsUnder() config.MIGStrategy {
	if p.seen.Kubelet.Err != nil || p.seen.DevicePlugin.Rivals != "" {
		return ""
	}
	return capacity.RunsUnder(p.seen.GPUs, p.seen.Kubelet.Offered, p.seen.Capacity.Strategy)
}

// RunsWithoutStrategy reports whether the device plugin runs, or will run, with the MIG strategy none, since its config sets no other. A desired config counts
// in place of the present one. For its environment and arguments see ExplicitStrategy.
func RunsWithoutStrategy(seen *state.Observed, want *state.DesiredPlugin) bool {
	switch {
	case len(seen.DevicePlugin.Pods) == 0:
		return false
	case want != nil:
		return want.Known && want.Strategy == ""
	case seen.Plugin.Method != "":
		return seen.Plugin.Current != nil && seen.Plugin.Current.MIGStrategy == ""
	default:
		return !slices.ContainsFunc(seen.DevicePlugin.Pods, state.ReadsConfig) && !offersMIGDevices(seen)
	}
}

// offersMIGDevices reports whether kubelet has MIG devices to allocate, which a plugin with the strategy none never advertises.
func offersMIGDevices(seen *state.Observed) bool {
	for _, devices := range seen.Kubelet.Offered {
		if slices.ContainsFunc(devices, func(id string) bool { return strings.HasPrefix(id, plan.MIGDeviceID) }) {
			return true
		}
	}
	return false
}

// Offered implements Offer.
func (p plugin) Offered() capacity.Resources { return capacity.Offered(p.seen.Kubelet.Offered) }

// Allocatable implements Offer.
func (p plugin) Allocatable(resource string) int {
	return capacity.Count(p.seen.Node.Status.Allocatable, resource)
}

// Known implements Offer.
func (p plugin) Known() bool { return p.seen.Kubelet.Err == nil }

// Text implements Offer.
func (p plugin) Text(want state.Desired) string {
	if !p.Known() {
		return textUnknown
	}
	return p.Offered().Summary(want.Plugin.SharingKnown())
}

// After implements Offer. Where no one asks for a config of the plugin, it keeps the present one, which the ids of shared devices show.
func (p plugin) After(gpus []nvml.GPU, want *state.DesiredPlugin, under config.MIGStrategy) string {
	sharing := want.SharingKnown()
	switch current := p.seen.Plugin.Current; {
	case sharing != nil:
	case want == nil && current != nil:
		sharing = &current.Sharing
	case want == nil && !p.sharesNow():
		sharing = &catalog.Sharing{Strategy: catalog.SharingNone}
	default:
		return ""
	}
	return capacity.Shared(capacity.Expected(gpus, under), *sharing).Summary(sharing)
}

// sharesNow reports whether several pods may get one of the devices that are offered.
func (p plugin) sharesNow() bool {
	for _, ids := range p.Offered() {
		if slices.ContainsFunc(ids, func(id string) bool { return strings.Contains(id, nvml.ReplicaSeparator) }) {
			return true
		}
	}
	return false
}

// advice implements Offer.
func (plugin) advice() string { return "see the device plugin's log on this node" }

// Notes implements Offer.
func (plugin) Notes(before, after []nvml.GPU) []string { return tooMany(before, after) }

// ListsParts implements Offer. The plugin does so under the strategies single and mixed.
func (p plugin) ListsParts() bool {
	under := p.seen.Capacity.Strategy
	return under != config.MIGStrategyNone && p.seen.ExplicitStrategy() == under
}

// Closable implements Offer: DeviceTaintRules close no device of the plugin.
func (plugin) Closable() map[nvml.UUID][]string { return nil }

// unhealthy implements Offer, by resource: kubelet counts a device that the plugin reports as unhealthy in the node's capacity, and not in what is allocatable.
// After a restart of kubelet it counts none of a plugin that has not registered again.
func (p plugin) unhealthy() []string {
	var out []string
	for name, all := range p.seen.Node.Status.Capacity {
		if usable := p.seen.Node.Status.Allocatable[name]; nvml.GPUResource(string(name)) && usable.Cmp(all) < 0 {
			out = append(out, string(name))
		}
	}
	slices.Sort(out)
	return out
}

// Withholds implements Offer.
func (p plugin) Withholds(gpu nvml.GPU, under config.MIGStrategy) bool {
	return len(p.unhealthy()) > 0 && capacity.Withheld(gpu, under, p.Offered())
}

// Missing implements Offer.
func (p plugin) Missing(want *state.DesiredPlugin, under config.MIGStrategy) (missing []string, stands capacity.Resources) {
	s := p.seen
	expected := capacity.Expected(s.GPUs, under)
	switch sharing := want.SharingKnown(); {
	case s.DevicePlugin.Rivals != "":
		missing = []string{s.DevicePlugin.Rivals}
	case sharing == nil:
		missing = capacity.Disagreements(expected, s.Kubelet.Offered, s.Node.Status.Allocatable)
	default:
		stands = capacity.Shared(expected.NamedBy(s.Kubelet.Offered), *sharing)
		missing = capacity.Mismatches(stands, s.Kubelet.Offered, s.Node.Status.Allocatable)
		if sharing.Strategy == catalog.SharingMPS {
			missing = append(missing, MissingMPS(s)...)
		}
	}
	if s.DevicePlugin.Unconnected != "" {
		return append(missing, s.DevicePlugin.Unconnected), nil
	}
	return missing, stands
}

// computeMPS is the compute mode of a GPU that MPS uses.
const computeMPS = nvml.ComputeExclusiveProcess

// MissingMPS says what a node lacks that shall share its GPUs by MPS. MPS's control daemon must have each GPU in exclusive-process mode.
func MissingMPS(seen *state.Observed) []string {
	var out []string
	capable, there := seen.Node.Labels[state.LabelMPSCapable]
	switch {
	case len(seen.DevicePlugin.MPSDaemons) > 0:
	case capable == "true":
		out = append(out, "no MPS control daemon runs on this node: none of its pods matches mps.podSelector of the settings")
	case there:
		out = append(out, fmt.Sprintf("no MPS control daemon: its DaemonSet selects label %s=true, and the node has %q: %s",
			state.LabelMPSCapable, capable, state.SetsMPSCapable))
	default:
		out = append(out, fmt.Sprintf("no MPS control daemon: the node lacks label %s=true, which its DaemonSet selects: %s", state.LabelMPSCapable, state.SetsMPSCapable))
	}
	for _, gpu := range seen.GPUs {
		if !gpu.Lost && gpu.ComputeMode != "" && gpu.ComputeMode != computeMPS {
			out = append(out, fmt.Sprintf("GPU %d: its compute mode is %s, and MPS needs %s", gpu.Index, gpu.ComputeMode, computeMPS))
		}
	}
	return out
}

// Withdrawn implements Offer: the pods that hold devices which kubelet allocates to others. A pod keeps what the config gives it: a plugin that is about to
// read that config may advertise something else for a moment. An undo can promise nothing about such pods.
func (p plugin) Withdrawn(stands capacity.Resources, want state.Desired) []state.Withdrawn {
	if want.Undo {
		return nil
	}
	given := capacity.GivenBy(p.seen.GPUs, p.seen.Kubelet.Offered)
	var out []state.Withdrawn
	for _, pod := range p.seen.Holders.Pods {
		if !slices.Contains(pod.Sources, holders.SourceKubelet) {
			continue // it has ended, and kubelet may list it still
		}
		w := state.Withdrawn{Pod: pod}
		for _, r := range replicasOf(p.seen, pod) {
			as := given.Again(r.Resource, r.ID)
			if slices.Contains(stands[r.Resource], r.ID) {
				as = p.replacedMPS(pod, r, want)
			}
			if as != "" {
				w.Replicas, w.As = append(w.Replicas, r), cmp.Or(w.As, as)
			}
		}
		if len(w.Replicas) > 0 {
			out = append(out, w)
		}
	}
	return out
}

// replacedMPS says how kubelet allocates the replica if a change that is not verified yet shares it by MPS, and the pod has had it since before; empty
// otherwise. Such a pod is no client of MPS. Until MPS's control daemon runs, the device plugin advertises nothing by MPS.
func (p plugin) replacedMPS(pod holders.Pod, r plan.Replica, want state.Desired) string {
	verified := p.seen.Record.Learnt.Verified
	if want.Plugin == nil || want.Plugin.Sharing.Strategy != catalog.SharingMPS || verified == "" || verified == want.Fingerprint {
		return ""
	}
	if !strings.Contains(r.ID, nvml.ReplicaSeparator) || !p.startedBeforeMPS(pod) {
		return ""
	}
	return r.Resource + " by MPS"
}

// startedBeforeMPS reports whether containers of the pod have run since before the MPS control daemon started on the node.
func (p plugin) startedBeforeMPS(pod holders.Pod) bool {
	pods, daemons := p.seen.Pods, p.seen.DevicePlugin.MPSDaemons
	i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.UID == pod.UID })
	if i < 0 || len(daemons) == 0 {
		return false
	}
	return slices.ContainsFunc(pods[i].Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Running != nil && !slices.ContainsFunc(daemons, func(daemon corev1.Pod) bool {
			return daemon.CreationTimestamp.Before(&c.State.Running.StartedAt) // times are whole seconds, and the plugin takes longer to advertise by a new daemon
		})
	})
}

// replicasOf returns the devices that kubelet has allocated to the pod.
func replicasOf(seen *state.Observed, pod holders.Pod) []plan.Replica {
	return state.Replicas(seen.Kubelet.Assigned[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}])
}
