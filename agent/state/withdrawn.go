package state

import (
	"fmt"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// Withdrawn is a pod that holds devices which are no longer its own. The device plugin may have got another config before the agent could evict the pod, as
// from its config manager. Kubelet then allocates the devices to others, since it compares only their names. Or the pod's claims have devices that NVIDIA's
// DRA driver no longer advertises.
type Withdrawn struct {
	Pod      holders.Pod
	Replicas []plan.Replica // the devices as kubelet has allocated them to the pod
	As       string         // how kubelet allocates the first of them now: "nvidia.com/gpu x 4"
	Gone     []string       // the devices that the driver does not advertise: "gpu-0 by claim team-gpu-x7k2p"
}

// DeviceName names a GPU by its index, and an instance by its GPU, profile and place.
func (s *Observed) DeviceName(uuid string) string {
	for _, gpu := range s.GPUs {
		if string(gpu.UUID) == uuid {
			return fmt.Sprintf("GPU %d", gpu.Index)
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				switch {
				case d.UUID != uuid:
				case i.Compute == "":
					return fmt.Sprintf("GPU %d %s", gpu.Index, i.Placed)
				default:
					return fmt.Sprintf("GPU %d %s in %s", gpu.Index, d.Part, i.Placed)
				}
			}
		}
	}
	if s.GPUs == nil {
		return uuid
	}
	return uuid + ", which is gone"
}
