package offer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// OwnerOf returns who allocates the node's GPUs. It looks at kubelet's devices, at the ResourceSlices of DRA drivers and the pod of NVIDIA's, and at pods that have
// GPUs by claims. These pods keep their GPUs when the driver is gone.
func OwnerOf(s *state.Observed) state.Owner {
	drivers, holding := driverPods(s.Pods), sanitize.Names(s.DRA.Claimed().Claimants(s.Pods, s.Kubelet.Assigned))
	o := state.Owner{Plugin: pluginText(s), Driver: driverText(s, drivers, holding)}
	if lostSlices(s, drivers) {
		o.Lost = podText(drivers[0])
	}
	other, otherHas := otherDriver(s)
	o.Other = other
	changing := s.Journal != nil && s.Journal.ByClaims // a change that starts the driver again itself
	switch {
	case changing:
		o.Driver = cmp.Or(o.Driver, "NVIDIA's DRA driver")
	case len(drivers) == 0:
		if o.PodGone = len(s.DRA.Slices) > 0; !o.PodGone {
			o.Claimants = holding
		}
	}
	if o.Kind, o.Evidence = ownerKind(s, o, drivers, changing, holding); other != "" && s.Journal == nil {
		o.Kind, o.Evidence = api.OwnerBoth, otherHas
	}
	return o
}

// ownerKind returns the kind of the owner, and the evidence for it. Holding names the pods that have GPUs by claims.
func ownerKind(s *state.Observed, o state.Owner, drivers []*corev1.Pod, changing bool, holding string) (kind api.Owner, evidence string) {
	dynamic, common := dynamicMIG(s, drivers), allocatedTwice(s)
	byClaims := len(s.DRA.Slices) > 0 || changing || holding != ""
	trace := byClaims || len(drivers) > 0
	switch {
	case byClaims && (common != "" || o.Plugin != ""):
		return api.OwnerBoth, common
	case dynamic != "":
		return api.OwnerDRADynamic, dynamic
	case changing:
		return api.OwnerDRAStatic, ""
	case !trace && o.Plugin != "":
		return api.OwnerPlugin, ""
	case !trace:
		return api.OwnerNone, ""
	case len(drivers) == 0 || len(s.DRA.Slices) == 0 || !s.DRA.Complete:
		return api.OwnerDRAStarting, whyNothingOffered(s, drivers)
	default:
		return api.OwnerDRAStatic, ""
	}
}

// ResetsRefused says why the agent resets no GPU of the node until a user has acted, whatever the settings say; empty if it may.
func ResetsRefused(seen *state.Observed) string {
	switch owner := seen.Owner; {
	case owner.Kind == api.OwnerDRADynamic:
		return owner.Driver + " cuts the GPUs of this node itself"
	case owner.Kind == api.OwnerBoth:
		return owner.Allocate() + " GPUs of this node"
	case owner.Kind == api.OwnerDRAStarting && owner.Left <= 0:
		return owner.Driver + " advertises no GPU"
	}
	if why, _ := Of(seen).Absent(); AbsentFor(seen) == outcome.ForUser {
		return why
	}
	return ""
}

// lostSlices reports whether a driver that is ready has no slice at all, although the GPUs have devices. Kubelet deletes all slices when it starts, and the driver
// publishes them again within half a minute; releases of it were seen that did not before they were started again.
func lostSlices(s *state.Observed, drivers []*corev1.Pod) bool {
	if len(drivers) == 0 || s.DRA.Err != nil || len(s.DRA.Slices) > 0 || len(capacity.Expected(s.GPUs, config.MIGStrategyMixed)) == 0 {
		return false
	}
	_, runs := startOf(drivers[0])
	return runs && slices.ContainsFunc(drivers[0].Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// LostSlices reports whether NVIDIA's DRA driver allocates the GPUs of the node, is ready, and has lost its ResourceSlices.
func LostSlices(seen *state.Observed) bool {
	return seen.Owner.Lost != "" && seen.Owner.Kind == api.OwnerDRAStarting && seen.Owner.ByClaims()
}

// pluginText names what advertises GPUs to kubelet, or is about to; empty if nothing does.
func pluginText(s *state.Observed) string {
	switch {
	case len(s.DevicePlugin.Pods) > 0:
		return "NVIDIA's device plugin (" + podText(&s.DevicePlugin.Pods[0]) + ")"
	case s.Kubelet.OffersGPUs():
		return "what advertises " + offeredNames(s) + " to kubelet"
	default:
		return ""
	}
}

// driverText names NVIDIA's DRA driver; empty if there is no sign of it.
func driverText(s *state.Observed, drivers []*corev1.Pod, holding string) string {
	switch {
	case len(drivers) > 0:
		return "NVIDIA's DRA driver (" + podText(drivers[0]) + ")"
	case len(s.DRA.Slices) > 0:
		return "NVIDIA's DRA driver (ResourceSlice " + s.DRA.Slices[0].Name + ")"
	case holding != "":
		return "NVIDIA's DRA driver (claims of " + holding + ")"
	default:
		return ""
	}
}

func podText(p *corev1.Pod) string { return "pod " + p.Namespace + "/" + p.Name }

// otherDriver names a DRA driver other than NVIDIA's that allocates GPUs of the node, by one of its devices, and the GPU that this is; empty if there is none.
func otherDriver(s *state.Observed) (driver, has string) {
	devices := slices.SortedFunc(maps.Keys(s.DRA.Others), func(a, b holders.Device) int {
		return cmp.Or(cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Pool, b.Pool))
	})
	if len(devices) == 0 {
		return "", ""
	}
	first := devices[0]
	if has = s.DRA.Others[first]; has != "" {
		has = s.DeviceName(has)
	}
	return fmt.Sprintf("DRA driver %s (device %s)", sanitize.Cut(first.Driver, longestOfPod), sanitize.Cut(first.Name, longestOfPod)), has
}

// dynamicMIG returns the evidence that NVIDIA's DRA driver cuts GPUs itself; empty if it does not. An A100 with MIG mode off shows no counters, so the slices
// alone do not show that it does not.
func dynamicMIG(s *state.Observed, drivers []*corev1.Pod) string {
	for _, slice := range s.DRA.Slices {
		if len(slice.Spec.SharedCounters) > 0 {
			return "sharedCounters in ResourceSlice " + slice.Name
		}
		for _, d := range slice.Spec.Devices {
			if len(d.ConsumesCounters) > 0 {
				return "consumesCounters in ResourceSlice " + slice.Name
			}
		}
	}
	for _, p := range drivers {
		if by := turnedOn(gpuDriver(p), gateDynamicMIG); by != "" {
			return fmt.Sprintf("%s of container %s of %s", by, driverContainer, podText(p))
		}
	}
	if s.Journal != nil && s.Journal.ModesOnly { // the agent itself keeps the driver away while a mode changes, and kubelet then deletes its slices
		return "it did when the change under way began"
	}
	return ""
}

// allocatedTwice names a GPU, or a part of one, that both kubelet and NVIDIA's DRA driver allocate; empty if there is none.
func allocatedTwice(s *state.Observed) string {
	parent := map[string]string{} // of MIG devices
	for _, gpu := range s.GPUs {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				parent[d.UUID] = string(gpu.UUID)
			}
		}
	}
	claimed := map[string]bool{}
	for _, slice := range s.DRA.Slices {
		for _, d := range slice.Spec.Devices {
			for _, name := range []string{"uuid", "parentUUID"} {
				if uuid := d.Attributes[resourcev1.QualifiedName(name)].StringValue; uuid != nil {
					claimed[*uuid], claimed[parent[*uuid]] = true, true
				}
			}
		}
	}
	delete(claimed, "")
	for _, resource := range slices.Sorted(maps.Keys(s.Kubelet.Offered)) {
		for _, id := range s.Kubelet.Offered[resource] {
			device, _, _ := strings.Cut(id, nvml.ReplicaSeparator)
			if claimed[device] || claimed[parent[device]] {
				return s.DeviceName(device)
			}
		}
	}
	return ""
}

// whyNothingOffered says why NVIDIA's DRA driver advertises no GPU although it is on the node, as far as that shows.
func whyNothingOffered(s *state.Observed, drivers []*corev1.Pod) string {
	if s.DRA.Err != nil {
		return "its ResourceSlices cannot be read: " + sanitize.Cut(s.DRA.Err.Error(), longestOfPod)
	}
	state := DriverAway(s)
	if len(drivers) > 0 {
		state = lastState(drivers[0])
	}
	switch {
	case lostSlices(s, drivers):
		return podText(drivers[0]) + " is ready, and has no ResourceSlice for the node"
	case len(s.DRA.Slices) == 0:
		return "it has no ResourceSlice for the node, and " + state
	case !s.DRA.Complete:
		return "its ResourceSlices for the node are not complete, and " + state
	}
	return state
}

// lastState describes a pod by the first of its containers that does not run, or that has ended before.
func lastState(pod *corev1.Pod) string {
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		name := "its container " + sanitize.Cut(c.Name, longestOfPod)
		before := ""
		if t := c.LastTerminationState.Terminated; t != nil {
			before = ", and has ended before: " + ended(t)
		}
		switch t := c.State.Terminated; {
		case c.State.Waiting != nil:
			return fmt.Sprintf("%s waits (%s)%s", name, sanitize.Cut(c.State.Waiting.Reason, longestOfPod), before)
		case t != nil && t.ExitCode != 0:
			return name + " has ended: " + ended(t)
		case before != "":
			return name + " runs" + before
		}
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return "its pod is " + sanitize.Cut(string(pod.Status.Phase), longestOfPod)
	}
	return "its containers run"
}

func ended(t *corev1.ContainerStateTerminated) string {
	return fmt.Sprintf("exit code %d (%s)", t.ExitCode, sanitize.Cut(t.Reason, longestOfPod))
}
