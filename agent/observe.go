package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// observe reads the node, its pods, kubelet, the ConfigMaps, the host's record and the GPUs. It changes nothing, and sends no Event: pass
// draws the conclusions.
// It reads what the watches have shown; but if the pass before has found something to do, it asks the API server.
func (a *Agent) observe(ctx context.Context) (*state.Observed, error) {
	seen := &state.Observed{}
	a.objects.Begin(a.verifier.LastObservationDue())
	// Each read of a pass has a deadline of its own: a server that answers slowly still lets a pass end. The pods are asked for beside the node.
	call, cancel := context.WithTimeout(ctx, a.Settings.Timeouts.APICall)
	defer cancel()
	node, err := a.objects.Node(call)
	if err != nil {
		return seen, err
	}
	seen.Node = node
	seen.Marks.Tools = fence.Markers(node, a.Settings.Operands)
	seen.Marks.Fenced = a.Fence.IsRaised(node)
	a.rebooter.ObserveBoot(ctx, seen)
	seen.Journal, seen.Record.Known, err = a.journal.Read(ctx, node, seen.Boot.ID)
	seen.Marks.Startup = a.fencing.Startup(node, seen.Journal)
	if err != nil {
		return seen, err
	}
	if err = a.files.Observe(ctx, seen); err != nil {
		return seen, err
	}
	a.slot.Observe(ctx, seen, a.objects.AreFresh())
	if err := a.upgrades.Observe(seen); err != nil {
		return seen, err
	}
	if seen.GPUs, err = a.hardware.Snapshot(ctx); err != nil {
		return seen, err
	}
	pods, err := a.listPods(ctx, node.UID)
	if err != nil {
		return seen, err
	}
	a.units.ObserveToRestore(ctx, seen)
	seen.Pods = pods
	seen.Recovered, seen.Outdated = a.verifier.RestartBefore(a.health.Recovered())
	if seen.Sick, err = a.resets.Sick(seen.Node, seen.Journal != nil); err != nil {
		return seen, err
	}
	a.observeKubelet(ctx, seen, pods)
	if !seen.Owner.MayCut() {
		seen.Sick = nil // a reset destroys the instances, which here are not the agent's to make again
	}
	a.observeOthers(seen)
	a.rebooter.Observe(ctx, seen, pods)
	a.hardware.ObserveSpecs(ctx, seen)
	seen.Started = a.units.ObserveStarted(ctx, seen)
	a.observePlugin(ctx, seen)
	seen.Complete = true
	return seen, nil
}

// listPods lists all pods of the node. It drops owner references to DaemonSets and nodes that are not there: the agent knows pods of NVIDIA's programs by
// their labels, which any user may set, and so such a pod counts only if its DaemonSet exists.
func (a *Agent) listPods(ctx context.Context, node types.UID) ([]corev1.Pod, error) {
	call, cancel := context.WithTimeout(ctx, a.Settings.Timeouts.APICall)
	defer cancel()
	pods, err := a.objects.Pods(call)
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", a.Node, err)
	}
	return a.sets.Believe(call, node, pods)
}

// observeKubelet sorts the pods into holders and operands, and compares what kubelet offers with the GPUs. If kubelet does not answer, that is
// no error: the agent then takes each pod for a holder of any device, and verifies no capacity.
func (a *Agent) observeKubelet(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	call, cancel := context.WithTimeout(ctx, a.Settings.Timeouts.APICall)
	defer cancel()
	assigned, err := a.kubelet.Assignments(call)
	if assigned.Premature(pods) {
		assigned, err = nil, holders.ErrKubeletStarting
	}
	if err == nil {
		seen.Kubelet.Offered, err = a.kubelet.Allocatable(call)
	}
	seen.Kubelet.Err = err
	seen.Kubelet.Assigned = assigned
	a.observeClaims(ctx, seen)
	seen.Holders.Pods = holders.GPUPods(pods, assigned, nil, seen.DRA.Claimed())
	a.devicePlugin.ObservePods(ctx, seen, pods)
	a.ownership.Observe(seen)
	seen.Capacity = seen.CompareHardware(seen.MIGStrategy(a.Settings.MIGStrategy, nil))
}

// observeClaims reads what resource claims have given out: where the observation reads the API server, during a change, and for a plan that a user asks
// for. A node at rest costs the API server no request for them, whatever its pods do.
func (a *Agent) observeClaims(ctx context.Context, seen *state.Observed) {
	_, asked := seen.Node.Annotations[config.AnnotationPreview]
	a.claims.Observe(ctx, seen, a.objects.AreFresh() || seen.Journal != nil || asked)
}

// observeOthers reads what else on the node matters to a change: operands, clients of the library, other tools, and what an earlier
// agent has left.
func (a *Agent) observeOthers(seen *state.Observed) {
	seen.Leftovers.MIGManager = state.RunsMIGManager(seen.Pods)
	seen.Leftovers.Adopts = a.leftovers.Adopts(seen.Pods)
	seen.Leftovers.Orphan = a.leftovers.Orphan(seen)
	seen.Pauses = fence.Operands(seen.Node, seen.Pods, operandLabels(seen, a.Settings.Operands))
	a.processes.ObserveClients(seen)
}

// operandLabels returns the labels by which the agent pauses operands: those of the settings first, then those that an agent has left on the
// node or that the journal holds.
func operandLabels(seen *state.Observed, ofSettings []string) []string {
	out := slices.Clone(ofSettings)
	left := slices.Sorted(maps.Keys(seen.Leftovers.Orphan.Labels))
	if seen.Journal != nil {
		left = append(left, slices.Sorted(maps.Keys(seen.Journal.Paused))...)
	}
	for _, label := range left {
		if !slices.Contains(out, label) {
			out = append(out, label)
		}
	}
	return out
}

// observePlugin reads the config of the device plugin if a change has replaced it, or if what the labels ask for depends on it. So a mount that does not answer
// holds up no node that asks for none of it, and a config manager's ConfigMap costs no request there. Where nothing is asked for, it sees now and then whether
// there are configs that a label could name.
func (a *Agent) observePlugin(ctx context.Context, seen *state.Observed) {
	want, err := a.resolver.Desired(seen)
	switch {
	case decide.NeedsPlugin(err), seen.Journal != nil && seen.Journal.Plugin != nil:
		a.devicePlugin.Observe(ctx, seen)
	case err == nil && want.Name == "":
		a.devicePlugin.ObserveUnpicked(ctx, seen)
	}
}

// planned returns what the planner needs of the observation. It first adds to the observation who holds the devices that the targets take away.
func (a *Agent) planned(ctx context.Context, s *state.Observed, want state.Desired, targets plan.Targets) plan.Observed {
	out := plan.Observed{
		GPUs: s.GPUs, Pods: plannedPods(s), Fenced: s.Marks.Fenced, Startup: len(s.Marks.Startup) > 0,
		Returned: !a.fencing.ReturnedUntil(s.Node, s.Journal).IsZero(), Undo: want.Undo, ByClaims: s.Owner.ByClaims(), Reboots: s.Reboots, CDI: s.Specs,
		Capacity: plan.Capacity{Agreed: s.Capacity.Agreement.Agreed}, Orphaned: s.Leftovers.Orphan.Exists(), Breached: s.Uncordoned() && !want.Undo &&
			(a.Settings.With(want.Drain).Drain.OnUncordon == config.UncordonRefence || s.Other(want)),
		Slot: a.slot.Planned(s, want),
		Keys: want.Keys != nil && !want.Undo && nodekeys.Unpublished(s.Node, s.Record.Learnt.Published, *want.Keys),
	}
	if !want.Undo {
		out.Sick = s.Sick
	}
	if want.Plugin != nil {
		out.Plugin = s.PlannedPlugin(want.Plugin)
	}
	if j := s.Journal; j != nil {
		out.Journal = plan.Journal{
			Pending: true, Cordoned: j.Cordoned, Other: s.Other(want) || s.Edited(want), Cuts: j.Cut(), Persistent: j.PersistentGPUs(), Verified: j.Verified,
			Paused: j.PausedLabels(), Stopped: j.StoppedUnits(), MPS: j.ChangesPlugin() && j.Plugin.MPS, Closes: len(j.Closed) > 0,
		}
		if len(j.Closed) > 0 {
			out.Closed = a.rules.Closed(ctx)
		}
	}
	if a.Settings.Drain.Fence == config.DrainFenceDevices && !a.rules.Unusable() {
		out.Closable = s.Closable()
	}
	for _, p := range s.Holders.OfLibrary {
		out.Clients = append(out.Clients, state.PlannedPod(p))
	}
	out.Pauses, out.Operands = a.verifier.Operands(s, want)
	a.observeTaken(ctx, s, plan.Takes(out, want.Planned(targets)))
	out.Pods, out.Units = plannedPods(s), s.Units
	return out
}

// plannedPods returns the pods that may have to leave. The planner picks those that hold what its steps take away.
func plannedPods(s *state.Observed) []plan.Pod {
	var out []plan.Pod
	for _, p := range mustLeave(s) {
		pod := state.PlannedPod(p)
		pod.Replicas = state.Replicas(s.Kubelet.Assigned[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}])
		pod.Withdrawn, pod.Ending, pod.Replaced = s.HoldsWithdrawn(p), p.Terminating, s.IsReplaced(p)
		out = append(out, pod)
	}
	return out
}

// mustLeave returns the holders that have to leave if a plan takes what they hold; package plan decides which of them do. It leaves out operands, which
// have an order of their own, clients of the library that have no more than a file open, and pods of DaemonSets that tolerate the fence: evicting those
// would only restart them.
func mustLeave(seen *state.Observed) []holders.Pod {
	apart := map[string]bool{}
	for _, o := range seen.KubeletPlugins() {
		apart[string(o.UID)] = true
	}
	for _, o := range seen.Pauses {
		for _, p := range o.Pods {
			apart[string(p.UID)] = true
		}
	}
	clients := map[string]bool{}
	for _, p := range seen.Holders.OfLibrary {
		clients[string(p.UID)] = true
	}
	return slices.DeleteFunc(slices.Clone(seen.Holders.Pods), func(p holders.Pod) bool {
		return p.UID != "" && apart[string(p.UID)] || byFilesAlone(p) && (clients[string(p.UID)] || p.Daemon && comesBack(seen, p))
	})
}

// comesBack reports whether the pod tolerates the fence, so that it is there again after its eviction.
func comesBack(seen *state.Observed, p holders.Pod) bool {
	return slices.ContainsFunc(seen.Pods, func(pod corev1.Pod) bool {
		return pod.UID == p.UID && holders.Tolerates(pod.Spec.Tolerations, state.FenceTaint())
	})
}

func byFilesAlone(p holders.Pod) bool {
	return !slices.ContainsFunc(p.Sources, func(s holders.Source) bool { return !s.IsOpenFile() })
}

// observeTaken adds to the observation which processes, pods and units use the devices that a plan takes.
func (a *Agent) observeTaken(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	a.processes.Observe(ctx, seen, taken)
	a.units.Observe(ctx, seen, taken)
}
