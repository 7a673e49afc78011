package state

import (
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
)

// Owner is who allocates the node's GPUs, and so who may cut them.
type Owner struct {
	Kind   api.Owner
	Plugin string // the device plugin, or something that advertises GPUs to kubelet as it does; empty if nothing does
	Driver string // NVIDIA's DRA driver, which publishes GPUs, or is about to; empty if it does not
	Other  string // another DRA driver that publishes GPUs of the node; empty if none does
	// Evidence is why the driver is known to cut GPUs itself, which GPU both allocate, or why the driver advertises none yet.
	Evidence string
	// Claimants names pods that have GPUs by claims although neither a pod of the driver nor a ResourceSlice is on the node. It is not known which GPUs.
	Claimants string
	PodGone   bool // the driver's ResourceSlices are here, and no pod of it: they outlast it
	// Lost names the driver's pod if it is ready, has no ResourceSlice, and the GPUs have devices: kubelet has deleted the slices, and the driver does not
	// publish them again.
	Lost string

	// Of api.OwnerDRAStarting alone.

	Since time.Time     // since when the driver is on the node and advertises nothing
	Left  time.Duration // how long the agent goes on to wait for it
}

// ByClaims reports whether NVIDIA's DRA driver allocates the GPUs, or is about to, and nothing advertises them to kubelet as a device plugin does.
func (o Owner) ByClaims() bool {
	return o.OfDRA() != api.OwnerNone && o.Plugin == "" && (o.Driver != "" || o.Other == "")
}

// Allocate says which programs allocate the GPUs of api.OwnerBoth: "A and B both allocate".
func (o Owner) Allocate() string {
	all := slices.DeleteFunc([]string{o.Plugin, o.Driver, o.Other}, func(name string) bool { return name == "" })
	if o.Plugin == "" && o.Other == "" {
		all = slices.Insert(all, 0, "what offers GPUs to kubelet")
	}
	switch len(all) {
	case 1:
		return all[0] + " allocates"
	case 2:
		return all[0] + " and " + all[1] + " both allocate"
	default:
		return strings.Join(all, " and ") + " all allocate"
	}
}

// OfDRA returns the kind if NVIDIA's DRA driver has a part in it; otherwise none.
func (o Owner) OfDRA() api.Owner {
	if o.Kind == api.OwnerPlugin {
		return api.OwnerNone
	}
	return o.Kind
}

// MayCut reports whether the agent may change the GPUs, and can then verify by the device plugin or NVIDIA's DRA driver that it has.
func (o Owner) MayCut() bool {
	return o.Kind == api.OwnerNone || o.Kind == api.OwnerPlugin || o.Kind == api.OwnerDRAStatic
}
