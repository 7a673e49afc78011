package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// proofInterval is the least time between two looks that both count as proof. A plugin that registers and fails right
// after, or registers twice, does so within a second or two.
const proofInterval = 2 * time.Second

// resources maps the name of a resource to the sorted ids of its devices.
type resources map[string][]string

// expected lists what the device plugin makes of the GPUs under the strategy.
func expected(gpus []nvml.GPU, strategy config.MIGStrategy) resources {
	out := resources{}
	for _, gpu := range gpus {
		if gpu.Lost {
			continue
		}
		if !gpu.Enabled || strategy == config.MIGStrategyNone {
			out[nvml.ResourceGPU] = append(out[nvml.ResourceGPU], string(gpu.UUID))
			continue
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				name := nvml.ResourceGPU
				if strategy == config.MIGStrategyMixed {
					name = nvml.ResourceMIGPrefix + strings.ReplaceAll(d.Profile, "+", ".")
				}
				out[name] = append(out[name], d.UUID)
			}
		}
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// shared is what the device plugin makes of the resources by the sharing: each device as often as it is shared, under the name that this has.
func shared(of resources, s config.Sharing) resources {
	out := resources{}
	for resource, ids := range of {
		name, n := s.Offered(resource)
		for _, id := range ids {
			if n == 1 {
				out[name] = append(out[name], id)
				continue
			}
			for i := range n {
				out[name] = append(out[name], id+nvml.ReplicaSeparator+strconv.Itoa(i))
			}
		}
		slices.Sort(out[name])
	}
	return out
}

// mismatches compares what is wanted, device by device, with what kubelet would give out and with what the node promises to the scheduler.
func mismatches(want, kubelet resources, allocatable corev1.ResourceList) []string {
	var out []string
	names := map[string]bool{}
	for name := range want {
		names[name] = true
	}
	for name := range kubelet {
		names[name] = holders.GPUResource(name)
	}
	for name := range allocatable {
		names[string(name)] = holders.GPUResource(string(name))
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if !names[name] {
			continue
		}
		switch wanted, given := want[name], kubelet[name]; {
		case len(given) != len(wanted):
			out = append(out, fmt.Sprintf("%s: %d wanted, kubelet has %d", name, len(wanted), len(given)))
		case !slices.Equal(given, wanted):
			out = append(out, fmt.Sprintf("%s: kubelet has %d others than are wanted", name, len(given)))
		case count(allocatable, name) != len(given):
			out = append(out, fmt.Sprintf("%s: kubelet has %d, the node object %d", name, len(given), count(allocatable, name)))
		}
	}
	return out
}

// summary is the capacity as people check it: "nvidia.com/gpu 24 = 8 x 3 time-slicing".
func (r resources) summary(want *pluginWish) string {
	if want == nil || !want.known || want.sharing.Strategy == config.SharingNone {
		return r.String()
	}
	replicas := map[string]int{}
	for _, resource := range want.sharing.Resources() {
		name, n := want.sharing.Offered(resource)
		replicas[name] = n
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r)) {
		text := fmt.Sprintf("%s %d", name, len(r[name]))
		if n := replicas[name]; n > 1 {
			text += fmt.Sprintf(" = %d x %d %s", len(r[name])/n, n, want.sharing.Strategy)
		}
		parts = append(parts, text)
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}

// proof is how often hardware, kubelet and node were seen to agree, and when last.
type proof struct {
	agreed     int // looks in a row
	at         time.Time
	staleSince time.Time // when labels of GPU feature discovery were first seen to lag behind the change
}

func (p *proof) forget(time.Time) { *p = proof{} }

// count adds a look, if it comes long enough after the last.
func (p *proof) count(agrees bool, now time.Time) {
	switch {
	case !agrees:
		p.agreed = 0
	case p.agreed == 0 || now.Sub(p.at) >= proofInterval:
		p.agreed++
		p.at = now
	}
}

// verification is the present wait for capacity.
type verification struct {
	began     time.Time // zero if none is under way
	restarted bool      // the device plugin was started anew for want of capacity
}

func (v *verification) forget(time.Time) { v.began = time.Time{} }

// featurePatience is how long the labels of GPU feature discovery are waited for: it looks each minute, and node feature discovery
// carries over what it finds. They are a hint that pods are placed by, and no proof.
const featurePatience = 90 * time.Second

// awaitFeatures counts labels that are not yet right as missing capacity, for a while, in the middle of a change.
func (a *Agent) awaitFeatures(seen *observed, want *pluginWish) {
	if want == nil {
		return
	}
	stale := seen.staleFeatures(want)
	switch {
	case seen.journal == nil || len(stale) == 0:
		seen.capacity.proof.staleSince = time.Time{}
	case len(seen.capacity.missing) > 0:
	case seen.capacity.proof.staleSince.IsZero():
		seen.capacity.proof.staleSince = a.clock.Now()
		seen.capacity.missing = stale
	case a.clock.Since(seen.capacity.proof.staleSince) < min(featurePatience, a.settings.Timeouts.Capacity/2):
		seen.capacity.missing = stale
	}
}

// staleFeatures are the labels by which GPU feature discovery tells of another sharing than is wanted. Where it does not run there are none.
func (s observed) staleFeatures(want *pluginWish) []string {
	if want == nil || !want.known {
		return nil
	}
	var out []string
	for _, resource := range slices.Sorted(maps.Keys(expected(s.gpus, s.capacity.strategy))) {
		_, n := want.sharing.Offered(resource)
		strategy := config.SharingNone
		if n > 1 {
			strategy = want.sharing.Strategy
		}
		for label, value := range map[string]string{resource + ".replicas": strconv.Itoa(n), resource + ".sharing-strategy": string(strategy)} {
			if told, there := s.node.Labels[label]; there && told != value {
				out = append(out, fmt.Sprintf("GPU feature discovery still says %s=%s, and not %s", label, told, value))
			}
		}
	}
	slices.Sort(out)
	return out
}

// offered is what kubelet gives out of GPUs, leaving out names without devices.
func offered(kubelet resources) resources {
	out := resources{}
	for name, ids := range kubelet {
		if holders.GPUResource(name) && len(ids) > 0 {
			out[name] = ids
		}
	}
	return out
}

// nobodyOffers reports whether there is no device plugin on the node at all, though nothing of ours keeps one away.
func (s observed) nobodyOffers() bool {
	nobody := s.kubelet.err == nil && len(s.devicePlugin.pods) == 0 && len(offered(s.kubelet.offered)) == 0
	return nobody && !s.marks.fenced && s.marks.startup == nil && !s.paused()
}

// nobody says of such a node what it lacks.
const nobody = "no device plugin offers the GPUs to kubelet, and no pod of this node matches devicePlugin.podSelector of the settings"

// deployPlugin is what people can do about it.
func (a *Agent) deployPlugin(seen observed) string {
	text := "deploy NVIDIA's device plugin, or see why its DaemonSet has no pod on this node: it has to select the node"
	var taints []string
	for _, t := range seen.node.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule {
			taints = append(taints, t.ToString())
		}
	}
	if len(taints) > 0 {
		text += ", and to tolerate " + listed(taints)
	}
	if value, there := seen.node.Labels[config.LabelDevicePlugin]; there && value != fence.DeployedValue {
		text += fmt.Sprintf("; label %s=%s keeps that of the GPU Operator away", config.LabelDevicePlugin, value)
	}
	return text + a.pretenders(seen.pods)
}

// missingCapacity says what is missing of the capacity, with the cause and what people can do where that is known.
func (a *Agent) missingCapacity(seen observed) (reason config.Reason, text string) {
	if seen.nobodyOffers() {
		return config.ReasonNoDevicePlugin, fmt.Sprintf("%s; %s (%s)", nobody, a.deployPlugin(seen), seen.blockers())
	}
	if under := seen.offeredUnder(); under != "" {
		return config.ReasonWrongMIGStrategy, fmt.Sprintf("%s (%s)", a.otherStrategy(seen, under), seen.blockers())
	}
	return config.ReasonCapacityMismatch, seen.blockers() + "; see the device plugin's log on this node"
}

// causePatience is how long capacity is missing before a cause is told of it in the middle of a change: by then kubelet has forgotten what
// the device plugin offered before, and the next one has begun to offer.
const causePatience = 10 * time.Second

// offeredUnder is the MIG strategy under which the device plugin offers just what it does, where that is another than it is taken to
// have; empty otherwise.
func (s observed) offeredUnder() config.MIGStrategy {
	if s.kubelet.err != nil || s.devicePlugin.rivals != "" {
		return ""
	}
	given := resources{}
	for name, ids := range offered(s.kubelet.offered) {
		name = strings.TrimSuffix(name, nvml.SharedSuffix)
		given[name] = append(given[name], physical(ids)...)
	}
	for name, ids := range given {
		slices.Sort(ids)
		given[name] = slices.Compact(ids)
	}
	wanted := expected(s.gpus, s.capacity.strategy).namedBy(given)
	for _, other := range []config.MIGStrategy{config.MIGStrategyNone, config.MIGStrategySingle, config.MIGStrategyMixed} {
		would := expected(s.gpus, other).namedBy(given)
		if would.equal(given) && !would.equal(wanted) {
			return other
		}
	}
	return ""
}

func (r resources) equal(other resources) bool {
	return len(r) > 0 && maps.EqualFunc(r, other, slices.Equal)
}

// otherStrategy names the strategy under which the device plugin evidently runs, and where to set the one that is needed.
func (a *Agent) otherStrategy(seen observed, under config.MIGStrategy) string {
	set := fmt.Sprintf("set MIG_STRATEGY=%[1]s in the environment of its DaemonSet, or flags.migStrategy: %[1]s in its config", seen.capacity.strategy)
	switch told := seen.toldStrategy(); {
	case a.settings.MIGStrategy != config.MIGStrategyAuto:
		set = fmt.Sprintf("migStrategy of the agent's settings is %s: %s; or set migStrategy of the settings to auto", seen.capacity.strategy, set)
	case told != "":
		set = "its environment or arguments say so, and it does otherwise: see its log on this node"
	case seen.plugin.now != nil && seen.plugin.now.MIGStrategy == seen.capacity.strategy:
		set = "its config says so, which it has not read: delete its pod on this node"
	}
	return fmt.Sprintf("the device plugin runs under the MIG strategy %s, by what it offers, and %s is needed: %s", under, seen.capacity.strategy, set)
}

// namedBy gives the hardware's devices the names under which the node's plugin has them. Plugins before v0.20 leave out
// what distinguishes a profile from its plain form: they offer a 1g.10gb+me as nvidia.com/mig-1g.10gb.
func (r resources) namedBy(kubelet resources) resources {
	out := resources{}
	for name, ids := range r {
		profile, plain := strings.CutPrefix(name, nvml.ResourceMIGPrefix)
		if end := strings.Index(profile, "gb"); plain && len(kubelet[name])+len(kubelet[name+nvml.SharedSuffix]) == 0 && end >= 0 {
			name = nvml.ResourceMIGPrefix + profile[:end+len("gb")]
		}
		out[name] = append(out[name], ids...)
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// String lists names and counts: "nvidia.com/mig-1g.10gb 16, nvidia.com/mig-3g.40gb 8".
func (r resources) String() string {
	if len(r) == 0 {
		return "none"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, len(r[name])))
	}
	return strings.Join(parts, ", ")
}

// disagreements compares the hardware with what kubelet would give out and with what the node promises to the scheduler.
// Nothing means that all three agree. Devices are compared by id, since equal counts of old ids prove nothing.
func disagreements(hardware resources, kubelet resources, allocatable corev1.ResourceList) []string {
	var out []string
	hardware = hardware.namedBy(kubelet)
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(hardware)) {
		shown := name
		if len(kubelet[name]) == 0 && len(kubelet[name+nvml.SharedSuffix]) > 0 {
			shown = name + nvml.SharedSuffix
		}
		seen[shown] = true
		switch ids := physical(kubelet[shown]); {
		case len(ids) != len(hardware[name]):
			out = append(out, fmt.Sprintf("%s: the GPUs have %d, kubelet %d", name, len(hardware[name]), len(ids)))
		case !slices.Equal(ids, hardware[name]):
			out = append(out, fmt.Sprintf("%s: kubelet still has devices that no longer exist", name))
		default:
			if n := count(allocatable, shown); n != len(kubelet[shown]) {
				out = append(out, fmt.Sprintf("%s: kubelet has %d, the node object %d", shown, len(kubelet[shown]), n))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(kubelet)) {
		if holders.GPUResource(name) && !seen[name] && len(kubelet[name]) > 0 {
			seen[name] = true
			out = append(out, fmt.Sprintf("%s: the GPUs have none, kubelet %d", name, len(kubelet[name])))
		}
	}
	for name := range allocatable {
		if n := count(allocatable, string(name)); holders.GPUResource(string(name)) && !seen[string(name)] && n > 0 {
			out = append(out, fmt.Sprintf("%s: the GPUs have none, the node object %d", name, n))
		}
	}
	slices.Sort(out)
	return out
}

// ghosts lists resources that stay on the node object at 0 after their plugin went: kubelet never removes them.
func ghosts(kubelet resources, allocatable corev1.ResourceList) []string {
	var out []string
	for name := range allocatable {
		if holders.GPUResource(string(name)) && count(allocatable, string(name)) == 0 && len(kubelet[string(name)]) == 0 {
			out = append(out, string(name))
		}
	}
	slices.Sort(out)
	return out
}

// removeGhosts takes off the node what ghosts it has, where the settings say so. Kubelet does not put back what it has forgotten, which takes it
// five minutes: until then the capacity is not 0, and is left to it.
func (a *Agent) removeGhosts(ctx context.Context, seen observed, converged bool) {
	if a.settings.Ghosts != config.GhostsRemove || !converged {
		return
	}
	var patch []map[string]any
	var names []string
	for _, name := range ghosts(seen.kubelet.offered, seen.node.Status.Allocatable) {
		if count(seen.node.Status.Capacity, name) > 0 {
			continue
		}
		names = append(names, name)
		for _, list := range []string{"capacity", "allocatable"} {
			at := "/status/" + list + "/" + strings.ReplaceAll(name, "/", "~1")
			patch = append(patch, map[string]any{"op": "test", "path": at, "value": "0"}, map[string]any{"op": "remove", "path": at})
		}
	}
	if len(patch) == 0 {
		return
	}
	body, err := json.Marshal(patch)
	if err == nil {
		api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
		defer cancel()
		_, err = a.client.CoreV1().Nodes().Patch(api, a.node, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: FieldManager}, "status")
	}
	if err != nil {
		a.log.Warn("removing resources of former configs from the node", zap.Strings("resources", names), zap.Error(err))
		return
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonReleased, "removed resources of former configs from the node, as ghosts: remove says: %s", strings.Join(names, ", "))
}

func count(list corev1.ResourceList, name string) int {
	quantity := list[corev1.ResourceName(name)]
	return int(quantity.Value())
}

// physical cuts the replica numbers off and leaves each device once.
func physical(ids []string) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i], _, _ = strings.Cut(id, nvml.ReplicaSeparator)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
