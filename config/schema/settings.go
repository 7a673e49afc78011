package schema

// Settings are how an agent behaves on its node. What is left out has its default.
type Settings struct {
	APIVersion string `json:"apiVersion" jsonschema:"enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"enum=Settings"`
	// How often a node on which nothing changes is written to.
	NodeHeartbeat Duration `json:"nodeHeartbeat,omitempty"`
	// How the device plugin presents MIG devices; auto takes it from the node.
	MIGStrategy string `json:"migStrategy,omitempty" jsonschema:"enum=auto,enum=none,enum=single,enum=mixed"`
	// Your own MIG configs, in mig-parted's format.
	MIGConfigMap *ConfigMapKey `json:"migConfigMap,omitempty"`
	// Your own profiles.
	Profiles *ConfigMapKey `json:"profiles,omitempty"`
	// When nodes may be disturbed, and how many at once.
	Maintenance    *ConfigMapKey   `json:"maintenance,omitempty"`
	DevicePlugin   *DevicePlugin   `json:"devicePlugin,omitempty"`
	MPS            *Pods           `json:"mps,omitempty"`
	MemoryPressure *MemoryPressure `json:"memoryPressure,omitempty"`
	// By what the condition GPUUnhealthy goes.
	Health *Health `json:"health,omitempty"`
	// When a pod is told that it does not use the GPU or the instance that it has.
	Idle *Idle `json:"idle,omitempty"`
	// What happens to resources of former configs that kubelet leaves on the node at 0.
	StaleResources string `json:"staleResources,omitempty" jsonschema:"enum=report,enum=remove"`
	// In whose name the agent asks about pods: that of its node (impersonation), or of its account, which a policy confines or RBAC alone.
	PodAccess string  `json:"podAccess,omitempty" jsonschema:"enum=auto,enum=impersonation,enum=policy,enum=rbac"`
	Reboot    *Reboot `json:"reboot,omitempty"`
	Drain     *Drain  `json:"drain,omitempty"`
	// Labels by which NVIDIA's GPU operator runs its operands, in the order in which they are paused.
	Operands []Operand `json:"operands,omitempty" jsonschema:"uniqueItems=true"`
	// systemd units of the host that keep a GPU open, in the order in which they are stopped.
	Units    []Unit    `json:"units,omitempty" jsonschema:"uniqueItems=true"`
	Recover  *Recover  `json:"recover,omitempty"`
	Timeouts *Timeouts `json:"timeouts,omitempty"`
	Retry    *Retry    `json:"retry,omitempty"`
	// Key of a taint that nodes may be registered with beside gpuslice.io/not-ready, and that goes when their GPUs are as asked.
	StartupTaint StartupTaint `json:"startupTaint,omitempty"`
}

// ConfigMapKey is a file in a ConfigMap.
type ConfigMapKey struct {
	// Empty for the agent's own.
	Namespace string `json:"namespace,omitempty"`
	// Empty for no file at all.
	Name string `json:"name,omitempty"`
	Key  string `json:"key,omitempty"`
}

// ConfigMapName is a ConfigMap with files of any name.
type ConfigMapName struct {
	// Empty for the agent's own.
	Namespace string `json:"namespace,omitempty"`
	// Empty for no ConfigMap at all.
	Name string `json:"name,omitempty"`
}

// DevicePlugin is how NVIDIA's device plugin is recognised, and handed another config.
type DevicePlugin struct {
	// Label selectors, one of which its pod matches.
	PodSelector []string `json:"podSelector,omitempty" jsonschema:"minItems=1,uniqueItems=true"`
	// Namespaces in which its pod is looked for, and that of the MPS control daemon.
	Namespaces []DNSLabel `json:"namespaces,omitempty" jsonschema:"minItems=1,uniqueItems=true"`
	// Names of containers, one of which its pod has; none for any.
	Containers []DNSLabel `json:"containers,omitempty" jsonschema:"uniqueItems=true"`
	// How it gets another config; auto chooses by what runs on the node.
	Handover string `json:"handover,omitempty" jsonschema:"enum=auto,enum=file,enum=label,enum=configmap,enum=restart"`
	// Path on the host of the file that it is run with, for file and restart.
	ConfigFile Path `json:"configFile,omitempty"`
	// Its configs by the keys that the label nvidia.com/device-plugin.config names.
	ConfigMap *ConfigMapName `json:"configMap,omitempty"`
	// The key for nodes without that label.
	DefaultConfig string `json:"defaultConfig,omitempty" jsonschema:"pattern=^[-._a-zA-Z0-9]*$"`
}

// Pods are how the pods of a program are recognised.
type Pods struct {
	// Label selectors, one of which its pod matches.
	PodSelector []string `json:"podSelector,omitempty" jsonschema:"minItems=1,uniqueItems=true"`
	// Names of containers, one of which its pod has; none for any.
	Containers []DNSLabel `json:"containers,omitempty" jsonschema:"uniqueItems=true"`
}

// Health is by what a GPU is found not to be well, and what is done about it.
type Health struct {
	// Numbers after which a GPU is not to be trusted, beside those of the agent's own table.
	CriticalXids []int `json:"criticalXids,omitempty" jsonschema:"uniqueItems=true,minimum=1,maximum=999"`
	// Numbers that are programs' own errors, also if the agent's table says otherwise.
	ApplicationXids []int `json:"applicationXids,omitempty" jsonschema:"uniqueItems=true,minimum=1,maximum=999"`
	// Whether the kernel's log, /dev/kmsg, is read for them: where that is possible, or never.
	KernelLog string `json:"kernelLog,omitempty" jsonschema:"enum=auto,enum=never"`
	// Effect of the taint gpuslice.io/gpu-unhealthy, which the node has while one of its GPUs cannot be used or trusted.
	Taint string `json:"taint,omitempty" jsonschema:"enum=none,enum=NoSchedule,enum=PreferNoSchedule"`
	// Which GPUs the agent resets that are not well, in a window and when their pods have left.
	Reset string `json:"reset,omitempty" jsonschema:"enum=never,enum=critical,enum=degraded"`
}

// MemoryPressure is when a GPU that several pods share counts as full.
type MemoryPressure struct {
	// Per cent of its memory in use; 0 for never.
	Threshold *int `json:"threshold,omitempty" jsonschema:"minimum=0,maximum=100"`
	// Per cent, less than threshold, from which on downwards it is no more.
	Clear *int `json:"clear,omitempty" jsonschema:"minimum=0,maximum=100"`
	// How long either must last.
	For Duration `json:"for,omitempty"`
}

// Idle is when a pod is told that it does not use what it has.
type Idle struct {
	// Time between two looks at how busy the GPUs are; 0s for none.
	Every Duration `json:"every,omitempty"`
	// How long a pod must have had the GPU and not used it.
	After Duration `json:"after,omitempty"`
	// Per cent of that time: a pod that used less is told; 0 for nobody.
	Below *int `json:"below,omitempty" jsonschema:"minimum=0,maximum=100"`
	// How busy an instance is on which there is a process: skip leaves it unknown, sample samples its counters (Hopper and later).
	Instances string `json:"instances,omitempty" jsonschema:"enum=skip,enum=sample"`
}

// Reboot is what happens where a GPU changes its MIG mode only at a reboot.
type Reboot struct {
	Policy string `json:"policy,omitempty" jsonschema:"enum=never,enum=delegate,enum=self"`
	// Path of the file by which delegate asks.
	Sentinel Path `json:"sentinel,omitempty"`
}

// Drain is how pods are sent away.
type Drain struct {
	// When pods are sent away that no rule fits: atOnce, or gradual, which lets them end by themselves for gradualFor before.
	Mode string `json:"mode,omitempty" jsonschema:"enum=atOnce,enum=gradual"`
	// How long they may.
	GradualFor Duration `json:"gradualFor,omitempty"`
	// What happens to pods that are still there at the deadline: the change is undone, or they are deleted.
	AfterDeadline string `json:"afterDeadline,omitempty" jsonschema:"enum=undo,enum=delete"`
	// The longest grace that a deletion leaves a pod.
	DeleteGrace Duration `json:"deleteGrace,omitempty"`
	// Pods that no controller brings back.
	UnmanagedPods string `json:"unmanagedPods,omitempty" jsonschema:"enum=evict,enum=refuse"`
	// Pods whose emptyDir has files on disk.
	EmptyDir string `json:"emptyDir,omitempty" jsonschema:"enum=evict,enum=refuse"`
	// What happens when a user or another tool lifts the agent's cordon.
	OnUncordon string `json:"onUncordon,omitempty" jsonschema:"enum=cancel,enum=refence"`
	// What is done with certain pods; the first that fits counts.
	Rules []DrainRule `json:"rules,omitempty"`
	// Label selectors of pods that hold no GPU but keep NVIDIA's library open.
	Clients []string `json:"clients,omitempty" jsonschema:"uniqueItems=true"`
}

// Recover is what is restored that others have left behind.
type Recover struct {
	Adopt []string `json:"adopt,omitempty" jsonschema:"enum=mig-manager,uniqueItems=true"`
}

// Timeouts bound each wait.
type Timeouts struct {
	// One call into the driver.
	DriverCall Duration `json:"driverCall,omitempty"`
	// One request to the API server.
	APICall Duration `json:"apiCall,omitempty"`
	// Until kubelet shows the new devices.
	Capacity Duration `json:"capacity,omitempty"`
	// Until the pods that hold a GPU have left.
	Drain Duration `json:"drain,omitempty"`
	// Until a unit of the host is stopped, or started.
	Unit Duration `json:"unit,omitempty"`
	// Until a reboot that was asked for has happened.
	Reboot Duration `json:"reboot,omitempty"`
	// Until people are told to look at an upgrade of the driver that is not over.
	DriverUpgrade Duration `json:"driverUpgrade,omitempty"`
}

// Retry is what happens to a step that fails for a cause that may pass.
type Retry struct {
	// In a row, until the change is given up and undone.
	Failures int `json:"failures,omitempty" jsonschema:"minimum=1,maximum=1000"`
	// Delay, doubling each time.
	First Duration `json:"first,omitempty"`
	// Delay that is not exceeded.
	Longest Duration `json:"longest,omitempty"`
	// How often a step may succeed and still be needed.
	NoEffect int `json:"noEffect,omitempty" jsonschema:"minimum=1,maximum=1000"`
}
