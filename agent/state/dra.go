package state

import (
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// DRA is what NVIDIA's DRA driver offers of the node's GPUs, and what resource claims have got of it. It is zero where nothing shows that the
// driver is or was on the node: the agent then asks the API server for none of it.
type DRA struct {
	// Slices are the driver's ResourceSlices for the node (spec.driver gpu.nvidia.com, spec.nodeName), sorted by name: of each pool those of its
	// highest generation. They are bounded: a list has one entry more than any API server lets it have if it was longer, attributes with a text
	// longer than that are left out, of SharedCounters and of ConsumesCounters the first is kept, without its counters.
	Slices []resourcev1.ResourceSlice
	// Complete says that there are slices, and that each pool has as many as it is to have: a device that is in none of them is not offered.
	// While the driver starts, and after a restart of kubelet, there are none.
	Complete bool
	Err      error          // why the agent does not know the slices; they are then nil
	Claims   holders.Claims // the resource claims of the node's pods, as far as the agent could read them
}
