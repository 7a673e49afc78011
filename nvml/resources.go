package nvml

import "strings"

// NVIDIA's device plugin advertises GPUs to kubelet by these names of resources and devices.
const (
	// ResourceGPU is the resource of GPUs that are not divided, and under the MIG strategy single of MIG devices too.
	ResourceGPU = "nvidia.com/gpu"
	// ResourceMIGPrefix begins the resources of MIG devices under the strategy mixed: "nvidia.com/mig-1g.10gb".
	ResourceMIGPrefix = "nvidia.com/mig-"
	// SharedSuffix is added to the name of a resource that is shared, under the plugin's option renameByDefault.
	SharedSuffix = ".shared"
	// ReplicaSeparator stands between the UUID of a device that is shared and the number of the replica: "GPU-…::2".
	ReplicaSeparator = "::"
)

// GPUResource reports whether NVIDIA's device plugin makes the resource of GPUs or of parts of them. There are other nvidia.com/
// resources, such as those of network devices.
func GPUResource(name string) bool {
	return name == ResourceGPU || name == ResourceGPU+SharedSuffix || strings.HasPrefix(name, ResourceMIGPrefix)
}
