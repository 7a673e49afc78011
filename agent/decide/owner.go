package decide

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// geometryRefused says why the agent does not cut the GPUs as the label asks, since NVIDIA's DRA driver is on the node; nil where it may, or where the
// label asks for no geometry.
func geometryRefused(seen *state.Observed, label, name string, requests map[nvml.UUID]nvml.Request) error {
	if len(requests) == 0 {
		return nil
	}
	switch seen.Owner.Kind {
	case api.OwnerDRADynamic:
		return foreign(fmt.Sprintf("ask for MIG devices by claims of class mig.nvidia.com, or turn DynamicMIG off in the feature gates of %s: it cuts the GPUs of this node itself, by %s, "+
			"and would destroy what label %s=%s asks for", seen.Owner.Driver, seen.Owner.Evidence, label, name))
	case api.OwnerDRAStatic:
		return partsRefused(seen, requests)
	case api.OwnerNone, api.OwnerPlugin, api.OwnerBoth, api.OwnerDRAStarting:
	}
	return unclear(seen)
}

// sharingRefused says why the agent gives no config to a device plugin, which by asks for: where NVIDIA's DRA driver gives out the GPUs, each claim says itself
// how its device is shared.
func sharingRefused(seen *state.Observed, by string) error {
	if seen.Owner.Kind != api.OwnerDRAStatic && seen.Owner.Kind != api.OwnerDRADynamic {
		return unclear(seen)
	}
	return &outcome.Stalled{
		Reason: config.ReasonImpossibleSharing,
		Message: fmt.Sprintf("share GPUs by the claims on this node, in spec.spec.devices.config of their ResourceClaimTemplate: "+
			"opaque: {driver: gpu.nvidia.com, parameters: {apiVersion: resource.nvidia.com/v1beta1, kind: GpuConfig, sharing: {strategy: TimeSlicing}}}, or strategy: MPS, "+
			"with the driver's feature gate TimeSlicingSettings or MPSSupport; %s asks for a config of the device plugin, and %s gives out the GPUs here", by, seen.Owner.Driver),
	}
}

// givenOutTwice says that two give out the node's GPUs, whatever its labels ask for; nil if they do not, and in the middle of a change, which goes on.
func givenOutTwice(seen *state.Observed) error {
	if seen.Owner.Kind != api.OwnerBoth || seen.Journal != nil {
		return nil
	}
	return unclear(seen)
}

// unclear says why neither the device plugin nor NVIDIA's DRA driver counts, so that nothing is changed; nil if one does.
func unclear(seen *state.Observed) error {
	owner := seen.Owner
	switch owner.Kind {
	case api.OwnerBoth:
		do, twice := bothGiveOut(owner)
		return foreign(do + ": " + twice)
	case api.OwnerDRAStarting:
		return awaitDriver(seen)
	case api.OwnerNone, api.OwnerPlugin, api.OwnerDRAStatic, api.OwnerDRADynamic:
	}
	return nil
}

// bothGiveOut says what a user can do where a device plugin and NVIDIA's DRA driver give out the node's GPUs, and why.
func bothGiveOut(owner state.Owner) (do, twice string) {
	do, twice = "keep one of them off this node, by the node selector of its DaemonSet", "both give out"
	if owner.Claimants != "" { // the driver is off the node by now
		do, twice = "end the pods that have claims: "+owner.Claimants, "have both given out"
	}
	return do, fmt.Sprintf("%s and %s %s %s, so that two pods may get the same; NVIDIA supports one or the other on a node, and the agent changes nothing until then",
		cmp.Or(owner.Plugin, "what offers GPUs to kubelet"), owner.Driver, twice, cmp.Or(owner.Evidence, "GPUs of this node"))
}

// awaitDriver waits until NVIDIA's DRA driver offers GPUs, by which it shows whether it cuts them itself. It does not wait without an end: a driver that
// cannot start needs its user.
func awaitDriver(seen *state.Observed) error {
	owner := seen.Owner
	if owner.Left <= 0 && owner.Claimants != "" {
		return foreign(fmt.Sprintf("%s: it is away since %s: %s; whose the GPUs are is not known, and the agent changes nothing",
			offer.AdviceOn(owner), outcome.Moment(owner.Since), owner.Evidence))
	}
	if owner.Left <= 0 {
		return foreign(fmt.Sprintf("see the log of %s, or take it off this node: it offers no GPU since %s: %s; whose the GPUs are is not known, and the agent changes nothing",
			owner.Driver, outcome.Moment(owner.Since), owner.Evidence))
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonForeignOwner, After: min(owner.Left, outcome.EvictionRetry), Since: owner.Since,
		Message: fmt.Sprintf("changes nothing until %s offers GPUs, by which it shows whose they are: %s", owner.Driver, owner.Evidence),
	}
	if seen.Journal != nil { // a change that is under way is not undone for a restart of the driver
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
					Message: fmt.Sprintf("ask for whole GPU instances: %s on GPU %d is a part of one, beside which %s does not start, "+
						"so that the node would lose all its GPUs", name, gpu.Index, seen.Owner.Driver),
				}
			}
		}
	}
	return nil
}

func foreign(message string) error {
	return &outcome.Stalled{Reason: config.ReasonForeignOwner, Message: message}
}
