package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// observe looks at the node, its pods, kubelet, the ConfigMap and the GPUs. It writes nothing, tells nothing, and lets go of nothing: what
// follows from the look is up to the pass.
// Node and pods are read from the API server, not from a cache: a stale cordon or pod list is how fences fail.
func (a *Agent) observe(ctx context.Context) (state.Observed, error) {
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	var seen state.Observed
	var node *corev1.Node
	err := retried.Do(api, func() (err error) {
		node, err = a.client.CoreV1().Nodes().Get(api, a.node, metav1.GetOptions{})
		return err
	})
	if err != nil {
		return seen, fmt.Errorf("reading node %s: %w", a.node, err)
	}
	seen.Node = node
	seen.Marks.Tools = fence.Markers(node, a.settings.Operands)
	seen.Marks.Fenced, seen.Marks.Startup = a.fence.Stands(node), a.fence.Startup(node)
	a.observeBoot(ctx, &seen)
	if err := a.observeRecord(ctx, &seen); err != nil {
		return seen, err
	}
	if err = a.observeFiles(api, &seen); err != nil {
		return seen, err
	}
	pods, err := a.podList.List(api)
	if err != nil {
		return seen, fmt.Errorf("listing the pods of node %s: %w", a.node, err)
	}
	if pods, err = a.believe(api, pods); err != nil {
		return seen, err
	}
	if err := a.observeUpgrade(&seen); err != nil {
		return seen, err
	}
	if seen.GPUs, err = a.snapshot(ctx); err != nil {
		return seen, err
	}
	if seen.Record.Published = hostrecord.PublishedBy(seen.Record.Learnt); a.record.Absent {
		seen.Record.Published = a.publishedOn(&seen)
	}
	a.observeOwed(ctx, &seen)
	seen.Pods = pods
	a.observeKubelet(ctx, &seen, pods)
	a.observeOthers(&seen)
	a.observeReboots(ctx, &seen, pods)
	a.observeSpecs(ctx, &seen)
	seen.Started = a.observeStarted(ctx, seen)
	seen.Complete = true
	return seen, nil
}

func (a *Agent) snapshot(ctx context.Context) ([]nvml.GPU, error) {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	return a.driver.Snapshot(call)
}

// observeFiles reads the files of the administrator. One that cannot be read ends the look only if something is asked for that takes it.
func (a *Agent) observeFiles(ctx context.Context, seen *state.Observed) (err error) {
	want, _ := a.asked(seen.Node)
	geometry := want.Name != "" && want.Label != config.LabelDevicePluginConfig
	if seen.Files.Configs, err = a.configMap(ctx, a.settings.MIGConfigMap); err != nil && geometry {
		return err
	}
	if seen.Files.Profiles, err = a.configMap(ctx, a.settings.Profiles); err != nil && geometry && want.Label == config.LabelProfile {
		return err
	}
	if err = a.observeMaintenance(ctx, seen); err != nil && (want.Name != "" || seen.Journal != nil) {
		return err
	}
	if err != nil {
		seen.Pool.Err = err
	}
	return nil
}

// configMap reads a file of the administrator. That it is missing or broken is an observation, not an error: the generated
// configs still work.
func (a *Agent) configMap(ctx context.Context, ref config.ConfigMapKey) (*state.ConfigMapFile, error) {
	if ref.Name == "" {
		return nil, nil
	}
	file := &state.ConfigMapFile{Name: fmt.Sprintf("ConfigMap %s/%s, key %s", ref.Namespace, ref.Name, ref.Key)}
	object, err := a.readConfigMap(ctx, ref.Namespace, ref.Name)
	switch {
	case apierrors.IsNotFound(err):
		file.Absent = true
		return file, nil
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		file.Err = fmt.Errorf("reading %s: %w", file.Name, err)
		return file, nil
	case err != nil:
		file.Err = fmt.Errorf("reading %s: %w", file.Name, err)
		return file, file.Err
	}
	data, ok := object.Data[ref.Key]
	if !ok {
		file.Err = fmt.Errorf("%s: no such key; put the file there, or name its key in the settings", file.Name)
	}
	file.Data = []byte(data)
	return file, nil
}

func (a *Agent) readConfigMap(ctx context.Context, namespace, name string) (object *corev1.ConfigMap, err error) {
	err = retried.Do(ctx, func() (err error) {
		object, err = a.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	return object, err
}

// observeKubelet sorts the pods into holders and operands, and compares the capacity. A kubelet that cannot be asked is
// no error: pods then count as holding anything, and no capacity is proven.
func (a *Agent) observeKubelet(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
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
	seen.Holders.Pods = holders.GPUPods(pods, assigned, nil)
	seen.DevicePlugin.Pods = a.operands(pods)
	seen.DevicePlugin.MPSDaemons = a.ofNVIDIA(picked(pods, a.settings.MPS.PodSelector, a.settings.MPS.Containers))
	seen.DevicePlugin.Rivals = a.rivals(seen.DevicePlugin.Pods)
	a.prove(seen, nil)
	seen.Capacity.Proven = len(seen.Capacity.Missing) == 0
}

// prove compares the capacity with the hardware, and with the sharing that is wanted, if any is known.
func (a *Agent) prove(seen *state.Observed, want *state.DesiredPlugin) {
	seen.Capacity.Strategy = a.strategy(*seen, want)
	switch {
	case seen.Kubelet.Err != nil:
		seen.Capacity.Missing = []string{seen.Kubelet.Err.Error()}
	case seen.DevicePlugin.Rivals != "":
		seen.Capacity.Missing = []string{seen.DevicePlugin.Rivals}
	case want != nil && want.Known:
		seen.Capacity.Missing = capacity.Mismatches(capacity.Shared(capacity.Expected(seen.GPUs, seen.Capacity.Strategy).NamedBy(seen.Kubelet.Offered), want.Sharing), seen.Kubelet.Offered, seen.Node.Status.Allocatable)
		if want.Sharing.Strategy == config.SharingMPS {
			seen.Capacity.Missing = append(seen.Capacity.Missing, seen.MissingMPS()...)
		}
	default:
		seen.Capacity.Missing = capacity.Disagreements(capacity.Expected(seen.GPUs, seen.Capacity.Strategy), seen.Kubelet.Offered, seen.Node.Status.Allocatable)
	}
	seen.Capacity.Proof = a.proof
	a.awaitFeatures(seen, want)
	seen.Capacity.Proof.Count(len(seen.Capacity.Missing) == 0, a.clock.Now())
}

// strategy is how the plugin presents MIG devices: as the settings say, or as it is told, above all by its environment.
func (a *Agent) strategy(seen state.Observed, want *state.DesiredPlugin) config.MIGStrategy {
	if a.settings.MIGStrategy != config.MIGStrategyAuto {
		return a.settings.MIGStrategy
	}
	if s := seen.ExplicitStrategy(); s != "" {
		return s
	}
	if want != nil && want.Strategy != "" {
		return want.Strategy
	}
	if want != nil && want.Sharing.Strategy == config.SharingMPS {
		return config.MIGStrategyNone // which a plugin is told nothing has, and mixed would be none that MPS goes with
	}
	return a.settings.MIGStrategy.On(seen.Node.Labels[config.LabelMIGStrategy])
}

// picked are the pods that match a selector and have one of the containers, where any are named: one chart gives pods of several programs the
// same labels.
func picked(pods []corev1.Pod, any []labels.Selector, containers []string) []corev1.Pod {
	var out []corev1.Pod
	for i := range pods {
		has := len(containers) == 0 || slices.ContainsFunc(pods[i].Spec.Containers, func(c corev1.Container) bool { return slices.Contains(containers, c.Name) })
		if has && !state.Ended(&pods[i]) && matches(&pods[i], any) {
			out = append(out, pods[i])
		}
	}
	return out
}

func matches(pod *corev1.Pod, any []labels.Selector) bool {
	return slices.ContainsFunc(any, func(s labels.Selector) bool { return s.Matches(labels.Set(pod.Labels)) })
}

// observeOthers looks what else on the node has a say: operands, clients of the library, other tools, and what an agent has
// left there.
func (a *Agent) observeOthers(seen *state.Observed) {
	seen.Leftovers.MIGManager = state.RunsMIGManager(seen.Pods)
	seen.Leftovers.Adopts = a.adopts(seen.Pods)
	seen.Leftovers.Orphan = a.orphanOn(seen)
	labels := union(a.settings.Operands, slices.Sorted(maps.Keys(seen.Leftovers.Orphan.Labels)))
	if seen.Journal != nil {
		labels = union(labels, slices.Sorted(maps.Keys(seen.Journal.Paused)))
	}
	seen.Pauses = fence.Operands(seen.Node, seen.Pods, labels)
	a.observeClients(seen)
}

// planned is what the planner needs of the look.
func (a *Agent) planned(s state.Observed, want state.Desired) plan.Observed {
	out := plan.Observed{
		GPUs: s.GPUs, Fenced: s.Marks.Fenced, Startup: s.Marks.Startup != nil, Undo: want.Undo, Reboots: s.Reboots, CDI: s.Specs,
		Capacity: plan.Capacity{Agreed: s.Capacity.Proof.Agreed}, Orphaned: s.Leftovers.Orphan.Is(), Breached: s.Uncordoned() && !want.Undo &&
			(a.settingsFor(want).Drain.OnUncordon == config.UncordonRefence || s.Other(want)),
		Slot:  a.plannedSlot(s, want),
		Units: s.Units, Keys: want.Keys != nil && !want.Undo && nodekeys.Unpublished(s.Node, s.Record.Published, *want.Keys),
	}
	if want.Plugin != nil {
		out.Plugin = a.plannedPlugin(s, want)
	}
	if j := s.Journal; j != nil {
		out.Journal = plan.Journal{
			Owed: true, Cordoned: j.Cordoned, Other: s.Other(want) || s.Edited(want), Cuts: j.Cut(), Persistent: j.PersistentGPUs(), Proven: j.Proven,
			Paused: j.PausedLabels(), Stopped: j.StoppedUnits(), MPS: j.ChangesPlugin() && j.Plugin.MPS,
		}
	}
	for _, p := range s.MustLeave() {
		pod := state.PlannedPod(p)
		pod.Replicas = replicas(s.Kubelet.Assigned[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}])
		out.Pods = append(out.Pods, pod)
	}
	for _, p := range s.Holders.OfLibrary {
		out.Clients = append(out.Clients, state.PlannedPod(p))
	}
	out.Pauses, out.Operands = s.PlannedOperands()
	return out
}
