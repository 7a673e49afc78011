package offer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// nameOfDriver is what messages call NVIDIA's DRA driver.
const nameOfDriver = "NVIDIA's DRA driver"

// driver is NVIDIA's DRA driver for GPUs, which advertises them by ResourceSlices.
type driver struct{ seen *state.Observed }

// Name implements Offer.
func (driver) Name() string { return nameOfDriver }

// Pods implements Offer.
func (d driver) Pods() []corev1.Pod {
	var out []corev1.Pod
	for _, p := range driverPods(d.seen.Pods) {
		out = append(out, *p)
	}
	return out
}

func (driver) operand(o plan.Operand, pod *corev1.Pod) plan.Operand {
	o.Pod.Driver, o.Stays = true, !holdsSession(pod)
	return o
}

// Absent implements Offer. The driver needs no device plugin next to it: one would allocate each GPU a second time. Missing says if the driver itself is
// not on the node.
func (driver) Absent() (why, advice string) { return "", "" }

// Strategy implements Offer: the driver advertises each device by its profile.
func (driver) Strategy(config.MIGStrategy, *state.DesiredPlugin) config.MIGStrategy {
	return config.MIGStrategyMixed
}

// RunsUnder implements Offer: the driver has no other strategy.
func (driver) RunsUnder() config.MIGStrategy { return "" }

// ListsParts implements Offer.
func (driver) ListsParts() bool { return true }

// Known implements Offer. Where the driver cuts the GPUs as claims ask, there is nothing to compare.
func (d driver) Known() bool {
	return d.seen.Owner.Kind != api.OwnerDRADynamic && d.seen.DRA.Err == nil
}

// Offered implements Offer. Pods cannot get a device that the driver has tainted.
func (d driver) Offered() capacity.Resources {
	return d.devices(func(device resourcev1.Device) bool { return unhealthyTaint(device) == "" })
}

// Allocatable implements Offer: the scheduler goes by the ResourceSlices.
func (d driver) Allocatable(resource string) int { return len(d.Offered()[resource]) }

// isSettled reports whether the driver has published all its slices for GPUs that it does not cut itself.
func (d driver) isSettled() bool {
	return d.seen.Owner.Kind == api.OwnerDRAStatic && d.seen.DRA.Complete
}

// listed returns all devices of the slices.
func (d driver) listed() capacity.Resources {
	return d.devices(func(resourcev1.Device) bool { return true })
}

// devices returns those devices of the complete slices that count, by the names under which a device plugin would advertise them with the MIG strategy mixed. A
// device without a UUID has an empty id. It returns none while it is not settled how the GPUs are cut.
func (d driver) devices(count func(resourcev1.Device) bool) capacity.Resources {
	out := capacity.Resources{}
	if !d.isSettled() {
		return out
	}
	for _, s := range d.seen.DRA.Slices {
		for _, device := range s.Spec.Devices {
			if !isPart(device) || !count(device) {
				continue
			}
			name := nvml.ResourceGPU
			if profile := state.Attribute(device, "profile"); profile != "" {
				name = nvml.ResourceMIGPrefix + strings.ReplaceAll(profile, "+", ".")
			}
			out[name] = append(out[name], state.Attribute(device, "uuid"))
		}
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// isPart reports whether the device is a GPU or a part of it. A device of another type is the same GPU once more, for virtual machines.
func isPart(device resourcev1.Device) bool {
	return slices.Contains([]string{"", "gpu", "mig"}, state.Attribute(device, "type"))
}

// unhealthyTaint returns the key of a taint that keeps claims from the device; empty if it has none. A taint without an effect does not count.
func unhealthyTaint(device resourcev1.Device) string {
	for _, t := range device.Taints {
		if t.Effect == resourcev1.DeviceTaintEffectNoSchedule || t.Effect == resourcev1.DeviceTaintEffectNoExecute {
			return t.Key
		}
	}
	return ""
}

// unhealthy implements Offer: the devices that the driver has tainted, each with the key of the taint.
func (d driver) unhealthy() []string { return d.tainted(nil) }

// tainted is unhealthy without the devices of these names.
func (d driver) tainted(except []string) []string {
	if !d.isSettled() {
		return nil
	}
	var out []string
	for _, s := range d.seen.DRA.Slices {
		for _, device := range s.Spec.Devices {
			if key := unhealthyTaint(device); key != "" && isPart(device) && !slices.Contains(except, device.Name) {
				out = append(out, fmt.Sprintf("%s (%s)", sanitize.Cut(device.Name, longestID), sanitize.Cut(key, longestID)))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Withholds implements Offer. Slices that are not complete withhold nothing: the driver is starting.
func (d driver) Withholds(gpu nvml.GPU, under config.MIGStrategy) bool {
	return d.isSettled() && capacity.Withheld(gpu, under, d.Offered())
}

// Text implements Offer. Users who claim devices know them by class and profile: "gpu.nvidia.com 1, mig.nvidia.com 1g.10gb 7".
func (d driver) Text(want state.Desired) string {
	switch {
	case d.seen.Owner.Kind == api.OwnerDRADynamic:
		var inParts []string
		for _, gpu := range d.seen.GPUs {
			_, asked := want.Targets[gpu.UUID]
			if _, parts := offeredAs(d.seen, gpu.UUID); asked && parts {
				inParts = append(inParts, fmt.Sprintf("GPU %d", gpu.Index))
			}
		}
		if len(inParts) == 0 {
			return "as claims ask"
		}
		return "as claims ask, also in parts of " + sanitize.Names(inParts)
	case d.seen.DRA.Err != nil:
		return textUnknown
	}
	return byClasses(d.Offered())
}

// After implements Offer. Where the driver cuts the GPUs itself, claims decide.
func (d driver) After(gpus []nvml.GPU, _ *state.DesiredPlugin, _ config.MIGStrategy) string {
	if d.seen.Owner.Kind == api.OwnerDRADynamic {
		return ""
	}
	return byClasses(capacity.Expected(gpus, config.MIGStrategyMixed))
}

// byClasses writes devices as users claim them.
func byClasses(of capacity.Resources) string {
	out := capacity.Resources{}
	for name, ids := range of {
		out[byClass(name)] = ids
	}
	return out.String()
}

// advice implements Offer.
func (d driver) advice() string { return AdviceOn(d.seen.Owner) }

// AdviceOn says what a user can do about a driver that advertises nothing, or something else than the GPUs have.
func AdviceOn(owner state.Owner) string {
	switch {
	case owner.PodGone:
		return "start NVIDIA's DRA driver on this node again: its ResourceSlices are here, and no pod of it"
	case owner.Claimants != "":
		return "start NVIDIA's DRA driver on this node again: without it no pod that has claims can end: " + owner.Claimants
	case owner.Lost != "":
		return fmt.Sprintf("delete %s, so that its DaemonSet starts another: it is ready, and has no ResourceSlice for the node", owner.Lost)
	default:
		return "see the log of " + owner.Driver
	}
}

// Notes implements Offer. If no GPU stays whole, a claim that asks for all whole GPUs finds none, and the agent does not wait for the pod that has it.
func (driver) Notes(before, after []nvml.GPU) []string {
	whole := func(g nvml.GPU) bool { return !g.Enabled && !g.Lost }
	notes := tooMany(before, after)
	if slices.ContainsFunc(before, whole) && !slices.ContainsFunc(after, whole) {
		notes = append(notes, "after it, no whole GPU is left: class gpu.nvidia.com matches no device of this node, so pods that claim all of them, "+
			"as a GPUCluster's DCGM exporter, stay Pending here; the change does not wait for them")
	}
	return notes
}

// Closable implements Offer. It returns none for a node that is fenced or cordoned already, or while the slices disagree with the GPUs.
func (d driver) Closable() map[nvml.UUID][]string {
	s := d.seen
	if !d.isSettled() || s.Node.Spec.Unschedulable || s.Marks.Fenced || len(d.disagreements()) > 0 {
		return nil
	}
	out := map[nvml.UUID][]string{}
	for _, gpu := range s.GPUs {
		if devices := s.DRA.DevicesOf(s.Node.Name, map[nvml.UUID]bool{gpu.UUID: true}); len(devices) > 0 {
			out[gpu.UUID] = devices
		}
	}
	return out
}

// untouched returns the devices of the GPUs that the change under way does not touch; none if there is no change. Their taints say nothing of it.
func (d driver) untouched() []string {
	s := d.seen
	if s.Journal == nil {
		return nil
	}
	others := map[nvml.UUID]bool{}
	for _, gpu := range s.GPUs {
		others[gpu.UUID] = !slices.ContainsFunc(s.Journal.Previous, func(l journal.GPULayout) bool { return l.GPU == gpu.UUID })
	}
	return s.DRA.DevicesOf(s.Node.Name, others)
}

// Missing implements Offer. Where the driver cuts the GPUs itself, slices and instances have nothing to agree on: see modesNotOffered.
func (d driver) Missing(*state.DesiredPlugin, config.MIGStrategy) (missing []string, stands capacity.Resources) {
	switch {
	case d.seen.Owner.Kind == api.OwnerDRADynamic:
		return nil, nil
	case slicesUnknown(d.seen) != nil:
		return []string{slicesUnknown(d.seen).Error()}, nil
	case !DriverRuns(d.seen): // its slices outlast it by half a minute
		return []string{notRunning(d.seen)}, nil
	}
	if missing = d.disagreements(); len(missing) > 0 {
		return missing, nil
	}
	if unhealthy := d.tainted(d.untouched()); len(unhealthy) > 0 {
		missing = append(missing, "NVIDIA's DRA driver keeps claims from "+sanitize.Names(unhealthy))
	}
	return missing, d.listed()
}

// disagreements says how the complete slices differ from the GPUs, device by device; empty if they do not.
func (d driver) disagreements() []string {
	expected, offered := capacity.Expected(d.seen.GPUs, config.MIGStrategyMixed), d.listed()
	all := maps.Clone(expected)
	maps.Copy(all, offered)
	var out []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		switch {
		case len(offered[name]) != len(expected[name]):
			out = append(out, fmt.Sprintf("%s: the GPUs have %d, the ResourceSlices %d", byClass(name), len(expected[name]), len(offered[name])))
		case !slices.Equal(offered[name], expected[name]):
			out = append(out, fmt.Sprintf("%s: the ResourceSlices still have devices that no longer exist", byClass(name)))
		}
	}
	return out
}

// lacksDevices reports whether a GPU has a device that the complete slices lack. Where the driver makes the parts itself, one device stands for the GPU.
func (d driver) lacksDevices() bool {
	if d.seen.Owner.Kind == api.OwnerDRADynamic {
		return slices.ContainsFunc(d.seen.GPUs, func(g nvml.GPU) bool {
			whole, parts := offeredAs(d.seen, g.UUID)
			return !whole && !parts
		})
	}
	listed := map[string]bool{}
	for _, ids := range d.listed() {
		for _, id := range ids {
			listed[id] = true
		}
	}
	for _, ids := range capacity.Expected(d.seen.GPUs, config.MIGStrategyMixed) {
		if slices.ContainsFunc(ids, func(id string) bool { return !listed[id] }) {
			return true
		}
	}
	return false
}

// modesNotOffered names those of these GPUs that the slices do not show in their present MIG mode, where NVIDIA's DRA driver makes the instances itself. The
// driver reads the modes at its start. It offers a GPU as a whole and in parts if the mode takes no reset, and otherwise either way, by the mode.
func modesNotOffered(seen *state.Observed, targets plan.Targets) (out []string) {
	switch {
	case seen.Owner.Kind != api.OwnerDRADynamic || len(targets) == 0 || seen.Kubelet.Err != nil:
		return nil
	case slicesUnknown(seen) != nil:
		return []string{slicesUnknown(seen).Error()}
	case !DriverRuns(seen):
		return []string{notRunning(seen)}
	}
	for _, gpu := range seen.GPUs {
		if _, named := targets[gpu.UUID]; !named || gpu.Lost || !gpu.Capable {
			continue
		}
		whole, parts := offeredAs(seen, gpu.UUID)
		if text := modeNotOffered(gpu, whole, parts); text != "" {
			out = append(out, text)
		}
	}
	return out
}

// modeNotOffered says how what the slices have of the GPU, as a whole or in parts, differs from its MIG mode; empty if it does not.
func modeNotOffered(gpu nvml.GPU, whole, parts bool) string {
	wantsWhole, wantsParts := gpu.SwitchesAlone() || !gpu.Enabled, gpu.SwitchesAlone() || gpu.Enabled
	mode := "is not in MIG mode"
	if gpu.Enabled {
		mode = "is in MIG mode"
	}
	what := ""
	switch {
	case wantsParts && !parts:
		what = "have no parts of it"
	case wantsWhole && !whole:
		what = "do not have it as a whole"
	case whole && !wantsWhole:
		what = "have it as a whole"
	case parts && !wantsParts:
		what = "have parts of it"
	default:
		return ""
	}
	return fmt.Sprintf("GPU %d %s, and the ResourceSlices %s", gpu.Index, mode, what)
}

// offeredAs reports whether the slices have the GPU as a whole, and parts of it.
func offeredAs(seen *state.Observed, gpu nvml.UUID) (whole, parts bool) {
	for _, s := range seen.DRA.Slices {
		for _, d := range s.Spec.Devices {
			whole = whole || isPart(d) && state.Attribute(d, "uuid") == string(gpu)
			parts = parts || isPart(d) && state.Attribute(d, "parentUUID") == string(gpu)
		}
	}
	return whole, parts
}

func notRunning(seen *state.Observed) string {
	return "NVIDIA's DRA driver does not run on this node: " + DriverAway(seen)
}

// Withdrawn implements Offer: the pods with claims of devices that no slice has any more. The driver has restarted since, and such a pod cannot start, or
// runs on devices that no longer exist. An undo considers them only if it cuts GPUs, since it then evicts those pods.
func (d driver) Withdrawn(_ capacity.Resources, want state.Desired) []state.Withdrawn {
	s := d.seen
	undoCuts := s.Journal != nil && len(s.Journal.Targets(s.GPUs)) > 0
	settled := d.isSettled() || s.Owner.Kind == api.OwnerDRADynamic && s.DRA.Complete && len(want.Targets) > 0
	if want.Undo && (!undoCuts || s.RebootedSinceVerified()) || !settled || want.Restoring || s.RebootedSinceVerified() && d.lacksDevices() {
		return nil
	}
	offered := namesOf(s.DRA)
	var out []state.Withdrawn
	for _, pod := range s.Holders.Pods {
		w := state.Withdrawn{Pod: pod, Gone: goneOf(s, pod, offered)}
		if len(w.Gone) > 0 {
			out = append(out, w)
		}
	}
	return out
}

// namesOf returns the devices that the slices list.
func namesOf(dra state.DRA) map[holders.Device]bool {
	out := map[holders.Device]bool{}
	for _, slice := range dra.Slices {
		for _, d := range slice.Spec.Devices {
			out[holders.Device{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Name: d.Name}] = true
		}
	}
	return out
}

// goneOf names the devices that the pod's claims have and that are not among those offered.
func goneOf(s *state.Observed, pod holders.Pod, offered map[holders.Device]bool) (gone []string) {
	for _, name := range pod.DeviceClaims {
		claim := s.DRA.Claims[holders.PodClaim{Pod: pod.UID, Name: name}]
		if !claim.IsSettledFor(pod.UID) {
			continue
		}
		for _, d := range claim.Own() {
			if d.Pool == s.Node.Name && !offered[d] {
				gone = append(gone, fmt.Sprintf("%s by claim %s", sanitize.Cut(d.Name, longestID), name))
			}
		}
	}
	return gone
}

// slicesUnknown returns why the agent does not know what the driver advertises; nil if it does.
func slicesUnknown(seen *state.Observed) error {
	switch {
	case seen.DRA.Err != nil:
		return fmt.Errorf("the ResourceSlices of NVIDIA's DRA driver cannot be read: %w", seen.DRA.Err)
	case !seen.DRA.Complete:
		text := "NVIDIA's DRA driver has not published all of its ResourceSlices for this node"
		if away := DriverAway(seen); away != "" {
			text += ": " + away
		}
		return errors.New(text)
	default:
		return nil
	}
}

// The DeviceClasses of NVIDIA's charts.
const (
	classGPU = "gpu.nvidia.com"
	classMIG = "mig.nvidia.com"
)

// byClass names by DeviceClass and profile what a device plugin advertises under this name: "mig.nvidia.com 1g.10gb+me". Resource names have points where
// profiles have signs.
func byClass(resource string) string {
	profile, mig := strings.CutPrefix(resource, nvml.ResourceMIGPrefix)
	if !mig {
		return classGPU
	}
	const memory = "gb"
	size, attributes, _ := strings.Cut(profile, memory)
	if size == profile {
		return classMIG + " " + sanitize.Cut(profile, longestID)
	}
	return classMIG + " " + sanitize.Cut(size+memory+strings.Replace(attributes, ".", "+", 1), longestID)
}
