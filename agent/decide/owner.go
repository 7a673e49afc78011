package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// geometryRefused returns why the agent may not cut the GPUs on a node with NVIDIA's DRA driver; nil if it may, or if the label requests no geometry.
func geometryRefused(seen *state.Observed, label, name string, requests map[nvml.UUID]nvml.Request) error {
	if len(requests) == 0 {
		return nil
	}
	switch seen.Owner.Kind {
	case api.OwnerDRADynamic:
		return modesRefused(seen, label, name, requests)
	case api.OwnerDRAStatic:
		return partsRefused(seen, requests)
	case api.OwnerNone, api.OwnerPlugin, api.OwnerBoth, api.OwnerDRAStarting:
	}
	return unclear(seen)
}

// modesRefused returns why the agent may not change the GPUs where NVIDIA's DRA driver cuts them itself; nil if it may. There a label can request MIG modes
// alone. A mode that takes a reset is what the driver never changes. The instances are the driver's: the agent destroys none, not even one without a claim.
func modesRefused(seen *state.Observed, label, name string, requests map[nvml.UUID]nvml.Request) error {
	cuts := func(r nvml.Request) bool {
		return slices.ContainsFunc(slices.Collect(maps.Values(r.Devices)), func(n int) bool { return n > 0 })
	}
	if slices.ContainsFunc(slices.Collect(maps.Values(requests)), cuts) || seen.Journal != nil && !seen.Journal.ModesOnly {
		return foreign(fmt.Sprintf("request MIG devices by claims of class mig.nvidia.com, and by the label only which GPUs are in MIG mode, as all-enabled and all-disabled do; "+
			"or turn DynamicMIG off in the feature gates of %s: it cuts the GPUs of this node itself (%s), and would destroy the instances that label %s=%s requests",
			seen.Owner.Driver, seen.Owner.Evidence, label, name))
	}
	for _, gpu := range seen.GPUs {
		request, named := requests[gpu.UUID]
		if !named || request.MIG || gpu.Lost || !gpu.Capable {
			continue
		}
		if gpu.SwitchesAlone() {
			return foreign(fmt.Sprintf("remove label %s=%s, or leave GPU %d out of its config: %s turns MIG mode on for claims of class mig.nvidia.com, and off after them; the agent cannot keep that GPU whole",
				label, name, gpu.Index, seen.Owner.Driver))
		}
		if gpu.Enabled && len(gpu.Instances) > 0 {
			return instancesStay(seen, gpu)
		}
	}
	if seen.Journal == nil && (seen.DRA.Err != nil || !seen.DRA.Complete) {
		return &outcome.Waiting{
			Reason: config.ReasonForeignOwner, After: outcome.EvictionRetry,
			Message: fmt.Sprintf("changes no MIG mode until the ResourceSlices of %s for this node are complete, which show who has which GPU", seen.Owner.Driver),
		}
	}
	return nil
}

// instancesStay waits until NVIDIA's DRA driver has destroyed the instances of a GPU that shall leave MIG mode.
func instancesStay(seen *state.Observed, gpu nvml.GPU) error {
	var pods []string
	for _, p := range seen.Holders.Pods {
		if !p.DevicesKnown || slices.Contains(p.Devices, string(gpu.UUID)) {
			pods = append(pods, p.String())
		}
	}
	held := "no pod that the agent knows of has a claim on it: delete the driver's pod, which destroys instances without a claim when it starts again"
	if len(pods) > 0 {
		held = "end the pods that have or may have claims on it: " + sanitize.Names(pods)
	}
	return &outcome.Waiting{
		Reason: config.ReasonForeignOwner, After: outcome.EvictionRetry, Advice: held,
		Message: fmt.Sprintf("GPU %d leaves MIG mode only without instances, and has %s, which %s destroys after the claims", gpu.Index, gpu.Geometry(), seen.Owner.Driver),
	}
}

// modesAlone limits the targets to the MIG modes where NVIDIA's DRA driver cuts the GPUs itself.
func modesAlone(seen *state.Observed, targets plan.Targets) plan.Targets {
	if seen.Owner.Kind != api.OwnerDRADynamic {
		return targets
	}
	out := plan.Targets{}
	for gpu, t := range targets {
		out[gpu] = plan.Target{Request: nvml.Request{MIG: t.MIG}, Undo: t.Undo, ModeOnly: true}
	}
	return out
}

// modesBack limits the targets of an undo to the MIG modes that the change has switched. A GPU keeps its mode if the driver has made instances there since.
func modesBack(seen *state.Observed, former plan.Targets) plan.Targets {
	if !seen.Journal.ModesOnly {
		return nil
	}
	out := modesAlone(seen, former)
	for _, gpu := range seen.GPUs {
		if !out[gpu.UUID].MIG && len(gpu.Instances) > 0 {
			delete(out, gpu.UUID)
		}
	}
	return out
}

// sharingRefused returns why the agent writes no config of the device plugin, which by requests; nil if it may. Where NVIDIA's DRA driver allocates the GPUs,
// each claim says how its device is shared.
func sharingRefused(seen *state.Observed, by string) error {
	if seen.Owner.Kind != api.OwnerDRAStatic && seen.Owner.Kind != api.OwnerDRADynamic {
		return unclear(seen)
	}
	return &outcome.Stalled{
		Reason: config.ReasonImpossibleSharing,
		Message: fmt.Sprintf("share GPUs by the claims on this node, in spec.spec.devices.config of their ResourceClaimTemplate: "+
			"opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing}}}, or kind: MigDeviceConfig for MIG devices, or strategy: MPS, "+
			"with the driver's feature gate TimeSlicingSettings or MPSSupport; %s requests a config of the device plugin, and %s allocates the GPUs here", by, seen.Owner.Driver),
	}
}

// allocatedTwice returns an error if several programs allocate the node's GPUs, or a DRA driver that the agent does not know. A change that is under way continues.
func allocatedTwice(seen *state.Observed) error {
	if seen.Owner.Kind != api.OwnerBoth || seen.Journal != nil {
		return nil
	}
	return unclear(seen)
}

// unclear returns why the agent cannot tell who allocates the GPUs, and so changes nothing; nil if it can.
func unclear(seen *state.Observed) error {
	owner := seen.Owner
	switch owner.Kind {
	case api.OwnerBoth:
		do, twice := bothAllocate(owner)
		return foreign(do + ": " + twice)
	case api.OwnerDRAStarting:
		return awaitDriver(seen)
	case api.OwnerNone, api.OwnerPlugin, api.OwnerDRAStatic, api.OwnerDRADynamic:
	}
	return nil
}

// bothAllocate says what a user can do if several programs allocate the node's GPUs, or one that the agent does not know, and why.
func bothAllocate(owner state.Owner) (do, twice string) {
	do, twice = "keep one of them off this node, by the node selector of its DaemonSet", owner.Allocate()
	why := "so two pods may get the same device; NVIDIA supports one or the other on a node"
	switch {
	case owner.Other != "" && owner.Plugin == "" && owner.Driver == "":
		do, why = "keep it off this node, by the node selector of its DaemonSet", "and the agent can verify what NVIDIA's device plugin and DRA driver advertise, and nothing else"
	case owner.Other != "":
		why = "so two pods may get the same device"
	case owner.Claimants != "": // the driver has left the node
		do = "start NVIDIA's DRA driver on this node again, and end the pods that have claims, which cannot end without it: " + owner.Claimants
		twice = strings.Replace(twice, "both allocate", "have both allocated", 1)
	}
	return do, fmt.Sprintf("%s %s, %s; the agent changes nothing until then", twice, cmp.Or(owner.Evidence, "GPUs of this node"), why)
}

// awaitDriver waits until NVIDIA's DRA driver advertises GPUs: its ResourceSlices show whether it cuts them itself. The wait ends, since a driver that
// cannot start needs its user.
func awaitDriver(seen *state.Observed) error {
	owner := seen.Owner
	if owner.Left <= 0 && (owner.Claimants != "" || owner.PodGone) {
		return foreign(fmt.Sprintf("%s. The DRA driver has been gone since %s (%s); nothing changes until it is back",
			offer.AdviceOn(owner), outcome.Moment(owner.Since), owner.Evidence))
	}
	if owner.Left <= 0 && owner.Lost != "" { // the agent starts it again, for a request of a geometry
		return &outcome.Waiting{
			Reason: config.ReasonForeignOwner, After: outcome.DriverRetry, Advice: offer.AdviceOn(owner),
			Message: fmt.Sprintf("%s has advertised no GPU since %s", owner.Driver, outcome.Moment(owner.Since)), Else: "changes nothing until it does",
		}
	}
	if owner.Left <= 0 {
		return foreign(fmt.Sprintf("see the log of %s, or delete its pod, so that its DaemonSet starts another: it has advertised no GPU since %s (%s); until it does, the agent cannot tell who may cut the GPUs, and changes nothing",
			owner.Driver, outcome.Moment(owner.Since), owner.Evidence))
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonForeignOwner, After: min(owner.Left, outcome.EvictionRetry), Since: owner.Since,
		Message: fmt.Sprintf("changes nothing until %s advertises GPUs, which shows who may cut them: %s", owner.Driver, owner.Evidence),
	}
	if seen.Journal != nil { // a restart of the driver must not undo a running change
		return &outcome.UnseenError{Err: wait}
	}
	return wait
}

// partsRefused refuses compute instances that are smaller than their GPU instance.
func partsRefused(seen *state.Observed, requests map[nvml.UUID]nvml.Request) error {
	for _, gpu := range seen.GPUs {
		for _, name := range slices.Sorted(maps.Keys(requests[gpu.UUID].Devices)) {
			if compute, _, is := strings.Cut(name, "c."); is && !strings.Contains(compute, ".") && requests[gpu.UUID].Devices[name] > 0 {
				return &outcome.Stalled{
					Reason: config.ReasonImpossibleGeometry,
					Message: fmt.Sprintf("request whole GPU instances: %s on GPU %d is a part of one, and on such a node %s does not start: "+
						"the node would lose all its GPUs", name, gpu.Index, seen.Owner.Driver),
				}
			}
		}
	}
	return nil
}

func foreign(message string) error {
	return &outcome.Stalled{Reason: config.ReasonForeignOwner, Message: message}
}
