package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// observe reads the node, its pods, kubelet, the ConfigMaps, the pool's Lease, claims and ResourceSlices, the host's record, boot id, processes and units,
// and the GPUs. It changes nothing, and sends no Event: pass draws the conclusions. It reads what the watches have shown; but if the pass before has found
// something to do, it reads from the API server. Planning reads the rest: see planned.
func (a *Agent) observe(ctx context.Context) (*state.Observed, error) {
	seen := &state.Observed{}
	a.observers.objects.Begin(a.actors.verifier.LastObservationDue())
	// Each read of a pass has its own deadline: a server that answers slowly still lets a pass end. The client requests the pods together with the node.
	call, cancel := context.WithTimeout(ctx, a.env.Settings.Timeouts.APICall)
	defer cancel()
	node, err := a.observers.objects.Node(call)
	if err != nil {
		return seen, err
	}
	seen.Node = node
	seen.Marks.Tools = fence.Markers(node, a.env.Settings.Operands)
	seen.Marks.Fenced = a.env.Fence.IsRaised(node)
	a.actors.rebooter.ObserveBoot(ctx, seen)
	seen.Journal, seen.Record.Known, err = a.actors.journal.Read(ctx, node, seen.Boot.ID)
	seen.Marks.Lost = state.LostChange(node, seen.Record.Known)
	seen.Marks.Startup = a.actors.fencing.Startup(node, seen.Journal)
	seen.Marks.Returned = !a.actors.fencing.ReturnedUntil(node, seen.Journal).IsZero()
	if seen.Record.First && !showsAgent(seen) {
		seen.Record.Learnt.Found = state.Asking(node)
	}
	if err != nil {
		return seen, err
	}
	if err = a.observers.files.Observe(ctx, seen); err != nil {
		return seen, err
	}
	a.actors.slot.Observe(ctx, seen, a.observers.objects.AreFresh())
	if err := a.actors.upgrades.Observe(seen); err != nil {
		return seen, err
	}
	if seen.GPUs, err = a.actors.hardware.Snapshot(ctx); err != nil {
		return seen, err
	}
	pods, err := a.listPods(ctx, node.UID)
	if err != nil {
		return seen, err
	}
	a.actors.units.ObserveToRestore(ctx, seen)
	seen.Pods = pods
	seen.Recovered, seen.Outdated = a.actors.verifier.RestartBefore(a.health.Recovered())
	if seen.Sick, err = a.actors.resets.Sick(seen.Node, seen.Journal != nil); err != nil {
		return seen, err
	}
	a.observeKubelet(ctx, seen, pods)
	if !seen.Owner.MayCut() {
		seen.Sick = nil // a reset destroys the instances, and here the agent may not recreate them
	}
	a.observeOthers(seen)
	a.actors.rebooter.Observe(ctx, seen, pods)
	a.actors.hardware.ObserveSpecs(ctx, seen)
	seen.Started = a.actors.units.ObserveStarted(ctx, seen)
	a.observePlugin(ctx, seen)
	seen.Early = a.actors.hardware.Early(offer.Of(seen).Pods())
	seen.Complete = true
	return seen, nil
}

// showsAgent reports whether an agent has been here, by the node alone: the host's record may be lost. A user who can write these marks can also set a label.
func showsAgent(seen *state.Observed) bool {
	ready := report.PartitionReady(seen.Node)
	return ready != nil && ready.Status == corev1.ConditionTrue || seen.Marks.Fenced || seen.Marks.Lost
}

// listPods lists all pods of the node. It drops owner references to DaemonSets and nodes that do not exist. The agent recognizes pods of NVIDIA's programs by
// their labels, which any user may set, so such a pod counts only if its DaemonSet exists.
func (a *Agent) listPods(ctx context.Context, node types.UID) ([]corev1.Pod, error) {
	call, cancel := context.WithTimeout(ctx, a.env.Settings.Timeouts.APICall)
	defer cancel()
	pods, err := a.observers.objects.Pods(call)
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", a.env.Node, err)
	}
	return a.observers.sets.Believe(call, node, pods)
}

// observeKubelet sorts the pods into holders and operands, and compares kubelet's devices with the GPUs. It is no error if kubelet does not answer: the agent
// then treats each pod as holding every device, and verifies no capacity.
func (a *Agent) observeKubelet(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	call, cancel := context.WithTimeout(ctx, a.env.Settings.Timeouts.APICall)
	defer cancel()
	assigned, err := a.observers.kubelet.Assignments(call)
	if assigned.Premature(pods) {
		assigned, err = nil, holders.ErrKubeletStarting
	}
	if err == nil {
		seen.Kubelet.Offered, err = a.observers.kubelet.Allocatable(call)
	}
	seen.Kubelet.Err = err
	seen.Kubelet.Assigned = assigned
	a.observeClaims(ctx, seen)
	seen.Holders.Pods = holders.GPUPods(pods, assigned, nil, seen.DRA.Claimed(), seen.GPUs)
	a.observers.devicePlugin.ObservePods(ctx, seen, pods)
	a.observers.ownership.Observe(seen)
	seen.Capacity = offer.CompareHardware(seen, offer.Of(seen).Strategy(a.env.Settings.MIGStrategy, nil))
}

// observeClaims reads which devices resource claims have, and which are closed to them. It does so whenever the observation reads the API server, during a
// change, and for a plan that a user requests; and always where NVIDIA's DRA driver advertises the GPUs. At rest it sends one request there
// for each claim of a pod, and none on other nodes.
func (a *Agent) observeClaims(ctx context.Context, seen *state.Observed) {
	_, asked := seen.Node.Annotations[config.AnnotationPreview]
	a.observers.claims.Observe(ctx, seen, a.observers.objects.AreFresh() || seen.Journal != nil || asked)
	a.actors.rules.Observe(ctx, seen)
}

// observeOthers reads what else on the node matters to a change: operands, clients of the library, other tools, and what an earlier
// agent has left.
func (a *Agent) observeOthers(seen *state.Observed) {
	seen.Leftovers.MIGManager = state.RunsMIGManager(seen.Pods)
	seen.Leftovers.Adopts = a.observers.leftovers.Adopts(seen.Pods)
	seen.Leftovers.Orphan = a.observers.leftovers.Orphan(seen)
	seen.Pauses = fence.Operands(seen.Node, seen.Pods, operandLabels(seen, a.env.Settings.Operands))
	a.observers.processes.ObserveClients(seen)
}

// operandLabels returns the labels that pause operands: those of the settings first, then those that an agent has left on the node or in the journal.
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

// observePlugin reads the device plugin's config only if a change has replaced it, or if the request depends on it. On other nodes a mount that does not
// answer holds nothing up, and a config manager's ConfigMap costs no request. If the labels request nothing, it checks now and then whether there are configs
// that a label could name.
func (a *Agent) observePlugin(ctx context.Context, seen *state.Observed) {
	want, err := a.deciders.resolver.Desired(seen)
	switch {
	case decide.NeedsPlugin(err), seen.Journal != nil && seen.Journal.Plugin != nil:
		a.observers.devicePlugin.Observe(ctx, seen)
	case err == nil && want.Name == "":
		a.observers.devicePlugin.ObserveUnpicked(ctx, seen)
	}
}

// planned returns what the planner needs of the observation. First it reads who uses the devices that the targets take, and adds that to the observation.
func (a *Agent) planned(ctx context.Context, seen *state.Observed, want state.Desired, targets plan.Targets) plan.Observed {
	a.observeTaken(ctx, seen, plan.Takes(decide.Planned(seen, want, a.env.Settings), want.Planned(targets)))
	return decide.Planned(seen, want, a.env.Settings)
}

// observeTaken reads which processes, pods and units use the devices that a plan takes, and adds them to the observation.
func (a *Agent) observeTaken(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	a.observers.processes.Observe(ctx, seen, taken)
	a.actors.units.Observe(ctx, seen, taken)
}
