package state

import (
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// DRA is what NVIDIA's DRA driver offers of the node's GPUs, and what resource claims have got of it. It is zero where nothing shows that the
// driver is or was on the node: the agent then asks the API server for none of it.
type DRA struct {
	// Slices are the driver's ResourceSlices for the node (spec.driver gpu.nvidia.com, spec.nodeName), sorted by name: of each pool those of its
	// highest generation, cut by holders.ShortenSlice. It keeps the name of each device and its attributes uuid, parentUUID, type and profile, by these
	// names; of SharedCounters and ConsumesCounters no more than that there are some.
	Slices []resourcev1.ResourceSlice
	// Complete says that there are slices, and that each pool has as many as it is to have: a device that is in none of them is not offered.
	// While the driver starts, and after a restart of kubelet, there are none.
	Complete bool
	Err      error // why the agent does not know the slices; they are then nil

	Claims holders.Claims // the resource claims of the node's pods, as far as the agent has read them
	Unread error          // why it could not read all of them
}

// Claimed is what holders.GPUPods needs of it. Where the slices are not complete, no device is known.
func (d DRA) Claimed() holders.Claimed {
	out := holders.Claimed{Claims: d.Claims}
	if d.Complete {
		out.UUIDs = holders.UUIDs(d.Slices)
	}
	return out
}
