package decide

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Planned returns what the planner needs of the observation.
func Planned(seen *state.Observed, want state.Desired, settings config.Settings) plan.Observed {
	out := plan.Observed{
		GPUs: seen.GPUs, Pods: plannedPods(seen), Units: seen.Units, Fenced: seen.Marks.Fenced, Cordoned: seen.Node.Spec.Unschedulable, Startup: len(seen.Marks.Startup) > 0,
		Returned: seen.Marks.Returned, Undo: want.Undo, ByClaims: seen.Owner.ByClaims(), Reboots: seen.Reboots, CDI: seen.Specs,
		Capacity: plan.Capacity{Agreed: seen.Capacity.Agreement.Agreed}, Orphaned: seen.Leftovers.Orphan.Exists(),
		Breached: seen.Uncordoned() && !want.Undo && (settings.With(want.Drain).Drain.OnUncordon == config.UncordonRefence || seen.Other(want)),
		Slot:     plannedSlot(seen, want),
		Keys:     want.Keys != nil && !want.Undo && nodekeys.Unpublished(seen.Node, seen.Record.Learnt.Published, *want.Keys),
	}
	if !want.Undo {
		out.Sick = seen.Sick
	}
	if seen.Owner.Kind == api.OwnerDRADynamic { // instances come and go, and the driver writes the specs of its claims itself
		out.CDI = nil
	}
	if want.Plugin != nil {
		out.Plugin = seen.PlannedPlugin(want.Plugin)
	}
	if j := seen.Journal; j != nil {
		out.Journal = plan.Journal{
			Pending: true, Cordoned: j.Cordoned, Other: seen.Other(want) || seen.Edited(want), Cuts: j.Cut(), Persistent: j.PersistentGPUs(), Verified: j.Verified,
			Paused: j.PausedLabels(), Stopped: j.StoppedUnits(), MPS: j.ChangesPlugin() && j.Plugin.MPS, Closes: len(j.Closed) > 0,
		}
		out.Closed = seen.DRA.Closed
	}
	out.Closable = closable(seen, want, settings)
	for _, p := range seen.Holders.OfLibrary {
		client := state.PlannedPod(p)
		client.Client = true
		out.Clients = append(out.Clients, client)
	}
	out.Pauses, out.Operands = offer.Operands(seen)
	for i := range out.Operands {
		out.Operands[i].Late = slices.Contains(seen.Capacity.Late, types.UID(out.Operands[i].UID))
	}
	return out
}

// closable returns the devices of each GPU that the agent may close in place of the node. It is empty if a pod leaves only behind a cordon. It has no devices
// of a GPU if the agent cannot close one of them: that GPU then counts as one that stays.
func closable(seen *state.Observed, want state.Desired, settings config.Settings) map[nvml.UUID][]string {
	if settings.Drain.Fence != config.DrainFenceDevices || seen.DRA.RulesUnusable {
		return nil
	}
	policy := From(settings.With(want.Drain))
	for _, p := range mayHaveToLeave(seen) {
		if _, asked := policy.Asked(p, time.Time{}); asked {
			return nil
		}
	}
	out := offer.Of(seen).Closable()
	for gpu, devices := range out {
		if slices.ContainsFunc(devices, func(d string) bool { return slices.Contains(seen.DRA.Unclosable, d) }) {
			out[gpu] = nil
		}
	}
	return out
}

// plannedSlot returns what the planner needs to know of the pool's slot. A change that has begun needs none: its node is unavailable already.
func plannedSlot(seen *state.Observed, want state.Desired) plan.Slot {
	return plan.Slot{
		Needed: seen.Pool.HasLimit() && !want.Undo && !seen.DisruptionStarted() && !seen.HoldsSlot(), Spared: seen.Restores(want),
		Drains: seen.Pool.ForEvictions, Has: seen.Pool.Slot.Held || seen.Pool.Slot.Waiting,
	}
}

// plannedPods returns the pods that may have to leave. The planner picks those that hold what its steps remove.
func plannedPods(seen *state.Observed) []plan.Pod {
	var out []plan.Pod
	for _, p := range mayHaveToLeave(seen) {
		pod := state.PlannedPod(p)
		pod.Replicas = state.Replicas(seen.Kubelet.Assigned[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}])
		pod.Withdrawn, pod.Ending, pod.Replaced = offer.WithdrawnFrom(seen, p) != nil, p.Terminating, offer.IsReplaced(seen, p)
		pod.Known = pod.Known || offer.EndedByReboot(seen, p)
		out = append(out, pod)
	}
	return out
}

// mayHaveToLeave returns the holders that have to leave if a plan takes their devices; package plan decides which of them do. It leaves out operands. Of
// pods that neither have a device from kubelet or a claim nor compute on one, it leaves out those that come back behind the fence: an eviction would only
// restart them.
func mayHaveToLeave(seen *state.Observed) []holders.Pod {
	return slices.DeleteFunc(slices.Clone(seen.Holders.Pods), func(p holders.Pod) bool {
		return IsOperand(seen, p) || only(p, holders.Source.IsOpenFile, isNamed) && comesBack(seen, p)
	})
}

// IsOperand reports whether plans have steps of their own for the pod: it advertises the GPUs, a label of the node deploys it, or it is a client of the
// library that neither has a device from kubelet or a claim nor computes on one.
func IsOperand(seen *state.Observed, p holders.Pod) bool {
	if p.UID == "" {
		return false
	}
	same := func(o holders.Pod) bool { return o.UID == p.UID }
	return slices.ContainsFunc(offer.Of(seen).Pods(), func(o corev1.Pod) bool { return o.UID == p.UID }) ||
		slices.ContainsFunc(seen.Pauses, func(o fence.Operand) bool { return slices.ContainsFunc(o.Pods, same) }) ||
		only(p, holders.Source.IsOpenFile, isNamed) && slices.ContainsFunc(seen.Holders.OfLibrary, same)
}

// comesBack reports whether a pod like this one starts behind the fence: its DaemonSet tolerates the fence, or the pod itself has come past it. Anyone can
// have a pod name a device and bind it to the node, again and again.
func comesBack(seen *state.Observed, p holders.Pod) bool {
	return slices.ContainsFunc(seen.Pods, func(pod corev1.Pod) bool {
		return pod.UID == p.UID && (p.Daemon && holders.Tolerates(pod.Spec.Tolerations, state.FenceTaint()) ||
			only(p, isNamed) && seen.Journal != nil && seen.Journal.Cordoned && pod.CreationTimestamp.After(seen.Journal.Started))
	})
}

func isNamed(s holders.Source) bool { return s == holders.SourceContainer }

// only reports whether the pod was found by such signs alone.
func only(p holders.Pod, signs ...func(holders.Source) bool) bool {
	return !slices.ContainsFunc(p.Sources, func(s holders.Source) bool {
		return !slices.ContainsFunc(signs, func(is func(holders.Source) bool) bool { return is(s) })
	})
}
