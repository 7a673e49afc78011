package capacity

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Given is what kubelet allocates, device by device. It shows whether other pods may get the device of a pod.
type Given struct {
	offered Resources
	of      map[string]outlet // by GPU or MIG device
	parts   map[string]outlet // by GPU: of its MIG devices
	gpus    map[string]string // by MIG device: its GPU
}

// outlet is how kubelet allocates a device: under a resource, by so many ids.
type outlet struct {
	resource string
	ids      int
}

func (o outlet) and(resource string) outlet { return outlet{resource: resource, ids: o.ids + 1} }

func (o outlet) String() string {
	if o.ids <= 1 {
		return o.resource
	}
	return fmt.Sprintf("%s x %d", o.resource, o.ids)
}

// GivenBy returns what kubelet allocates of these GPUs.
func GivenBy(gpus []nvml.GPU, kubelet Resources) Given {
	g := Given{offered: Offered(kubelet), of: map[string]outlet{}, parts: map[string]outlet{}, gpus: map[string]string{}}
	for _, gpu := range gpus {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				g.gpus[d.UUID] = string(gpu.UUID)
			}
		}
	}
	for resource, ids := range g.offered {
		for _, id := range ids {
			device := DeviceOf(id)
			g.of[device] = g.of[device].and(resource)
			if gpu, is := g.gpus[device]; is {
				g.parts[gpu] = g.parts[gpu].and(resource)
			}
		}
	}
	return g
}

// Again says how kubelet allocates a pod's device to others by another id: "nvidia.com/gpu", "nvidia.com/gpu x 4". The device of the id counts, its MIG
// devices, and the GPU that it is a part of. Again is empty if kubelet still allocates the id, or nothing of the device: a plugin that starts, or that finds
// the device unhealthy, withdraws it from no pod.
func (g Given) Again(resource, id string) string {
	if !nvml.GPUResource(resource) || slices.Contains(g.offered[resource], id) {
		return ""
	}
	device := DeviceOf(id)
	for _, o := range []outlet{g.of[device], g.parts[device], g.of[g.gpus[device]]} {
		if o.ids > 0 {
			return o.String()
		}
	}
	return ""
}

// DeviceOf cuts the number of the replica off the id.
func DeviceOf(id string) string {
	device, _, _ := strings.Cut(id, nvml.ReplicaSeparator)
	return device
}
