package nvml

// The names of resources and devices by which NVIDIA's device plugin offers GPUs to kubelet.
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
