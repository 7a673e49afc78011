package config

// Labels of the node that the agent reads.
const (
	// LabelMIGConfig names the MIG config that the node shall have. Without it the GPUs are left as they are.
	LabelMIGConfig = "nvidia.com/mig.config"
	// LabelProfile names a profile of our own catalog. If set, it wins over the one above.
	LabelProfile = "gpuslice.io/profile"
	// LabelDevicePluginConfig names a config of NVIDIA's device plugin, by its key in the ConfigMap of configs.
	LabelDevicePluginConfig = "nvidia.com/device-plugin.config"
	// LabelMIGStrategy is how the device plugin presents MIG devices, as GPU feature discovery publishes it.
	LabelMIGStrategy = "nvidia.com/mig.strategy"
)

// Labels by which NVIDIA's GPU operator deploys its operands.
const (
	LabelOperandPrefix = "nvidia.com/gpu.deploy."
	LabelDevicePlugin  = LabelOperandPrefix + "device-plugin"
)

// Labels of the node that the agent writes.
const (
	// LabelMIGConfigState says how far LabelMIGConfig has come, as one of the States, for tools that wait on it.
	LabelMIGConfigState = "nvidia.com/mig.config.state"
)

// State is a value of LabelMIGConfigState. They are those of NVIDIA's k8s-mig-manager.
type State string

// The states of a change, as tools that wait for it know them.
const (
	// StatePending is written when a change is accepted, and stays until it ends.
	StatePending State = "pending"
	// StateRebooting is written while a mode change waits for a reboot that has been asked for.
	StateRebooting State = "rebooting"
	// StateSuccess is written when the capacity is proven.
	StateSuccess State = "success"
	// StateFailed is written when the wish is refused, or undone after a failure.
	StateFailed State = "failed"
)

// Annotations of the node that people set.
const (
	// AnnotationKeepCordoned, with any value, keeps the agent from lifting its cordon, whatever happens.
	AnnotationKeepCordoned = "gpuslice.io/keep-cordoned"
	// AnnotationHold, with any value, keeps the agent from beginning anything. What is begun is finished or undone.
	AnnotationHold = "gpuslice.io/hold"
	// AnnotationForce lets one change begin outside of its window: ForceNow, or the id of a change. The agent takes it away.
	AnnotationForce = "gpuslice.io/force"
	// AnnotationPreview asks what a label would do, as "gpuslice.io/profile=research". The agent answers by AnnotationPlan.
	AnnotationPreview = "gpuslice.io/preview"
)

// ForceNow is the value of AnnotationForce for whatever change is asked for.
const ForceNow = "now"

// Annotations of the node that the agent writes.
const (
	// AnnotationStatus is compact JSON for tools: what is asked for, the phase, and how each GPU is cut.
	AnnotationStatus = "gpuslice.io/status"
	// AnnotationPublished is JSON of the labels and taints that a profile has put on the node.
	AnnotationPublished = "gpuslice.io/published"
	// AnnotationJournal is what must be given back. It is there exactly while something is owed.
	AnnotationJournal = "gpuslice.io/journal"
	// AnnotationPlan is JSON of the plan that AnnotationPreview asks for. It is there as long as that is.
	AnnotationPlan = "gpuslice.io/plan"
)

// LeasePrefix begins the names of the Leases by which the nodes of a pool agree who may be disturbed; the pool's name follows.
const LeasePrefix = "gpuslice-pool-"

// Annotations of the Lease of a pool.
const (
	// AnnotationSlots is JSON of who has a slot and who waits. The agents write it.
	AnnotationSlots = "gpuslice.io/slots"
	// AnnotationPaused, with any value, keeps the pool's nodes from beginning anything. The agents set it after too many failures,
	// and people take it away.
	AnnotationPaused = "gpuslice.io/paused"
)

// Taints of the node, with the effect NoSchedule.
const (
	// TaintRepartitioning fences the node while its GPUs change.
	TaintRepartitioning = "gpuslice.io/repartitioning"
	// TaintNotReady is put on nodes by whoever registers them, to keep pods away until the GPUs are cut as the labels ask
	// and their capacity is proven. The agent takes it away then.
	TaintNotReady = "gpuslice.io/not-ready"
)

// Conditions of KEP-5683, by which any tool tells any other what it does to a node.
const (
	// ConditionMaintenancePlanned is True while a change waits for its window.
	ConditionMaintenancePlanned = "MaintenancePlanned"
	// ConditionDrainInProgress is True while pods are being made to leave.
	ConditionDrainInProgress = "DrainInProgress"
	// ConditionDrained is True while those that had to leave are gone and the node is not given back.
	ConditionDrained = "Drained"
	// ConditionMaintenanceInProgress is True from the fence until the node is given back.
	ConditionMaintenanceInProgress = "MaintenanceInProgress"
)

// ConditionGPUPartitionReady is True when what the labels ask for is on the hardware and in the node's allocatable.
const ConditionGPUPartitionReady = "GPUPartitionReady"

// ConditionGPUMemoryPressure is True while the memory of a GPU that several pods share is nearly full.
const ConditionGPUMemoryPressure = "GPUMemoryPressure"

// Reason is why the agent does, waits for, or refuses something. Conditions, events, metrics and logs share the
// reasons, so that each can be searched by the words of any other.
type Reason string

// Reasons of a node at rest.
const (
	// ReasonNotRequested is given when no label asks for anything: the GPUs are left as they are.
	ReasonNotRequested Reason = "NotRequested"
	// ReasonConverged is given when hardware and allocatable are as the labels ask.
	ReasonConverged Reason = "Converged"
)

// Reasons why a wish is refused before anything is disturbed.
const (
	// ReasonUnknownConfig is given when no config of the catalog has the name that the label asks for.
	ReasonUnknownConfig Reason = "UnknownConfig"
	// ReasonInvalidCatalog is given when a ConfigMap cannot be read, or a config of it cannot be meant for this node.
	ReasonInvalidCatalog Reason = "InvalidCatalog"
	// ReasonImpossibleGeometry is given when a GPU cannot hold the instances that the config asks of it.
	ReasonImpossibleGeometry Reason = "ImpossibleGeometry"
	// ReasonWrongMIGStrategy is given when the node's device plugin, as it is told to present MIG devices, would not offer what is asked for.
	ReasonWrongMIGStrategy Reason = "WrongMIGStrategy"
	// ReasonNoHandover is given when the node's device plugin cannot be given another config.
	ReasonNoHandover Reason = "NoHandover"
	// ReasonNodeKeyConflict is given when somebody else has set a label or taint of the node otherwise than the profile does.
	ReasonNodeKeyConflict Reason = "NodeKeyConflict"
	// ReasonNoCapableGPU is given when a config asks for MIG and no GPU that it names can do MIG.
	ReasonNoCapableGPU Reason = "NoCapableGPU"
	// ReasonVirtualGPU is given when MIG or sharing is asked of a vGPU, which its host has cut for one workload at a time, or
	// sharing of a GPU that this host lends to virtual machines.
	ReasonVirtualGPU Reason = "VirtualGPU"
	// ReasonImpossibleSharing is given when the device plugin cannot share the node's resources in the way that is asked for.
	ReasonImpossibleSharing Reason = "ImpossibleSharing"
)

// Reasons why a change does not begin yet, or not go on.
const (
	// ReasonHeld is given while people keep the node from any change by AnnotationHold.
	ReasonHeld Reason = "Held"
	// ReasonInvalidMaintenance is given when the maintenance file cannot be read: nothing is begun then.
	ReasonInvalidMaintenance Reason = "InvalidMaintenance"
	// ReasonAwaitingWindow is given while the node may not be disturbed, or not for as long as the change takes.
	ReasonAwaitingWindow Reason = "AwaitingWindow"
	// ReasonAwaitingSlot is given while as many nodes of the pool are unavailable as may be.
	ReasonAwaitingSlot Reason = "AwaitingSlot"
	// ReasonPoolPaused is given while the pool begins nothing, after too many failures or because people say so.
	ReasonPoolPaused Reason = "PoolPaused"
	// ReasonWindowClosed is given when a change is put off because its window closed before a GPU was touched.
	ReasonWindowClosed Reason = "WindowClosed"
	// ReasonWindowOverrun is given when a change goes on beyond its window, since its GPUs were touched.
	ReasonWindowOverrun Reason = "WindowOverrun"
)

// Reasons while a change is under way, in the order of its steps.
const (
	// ReasonFencing is given while the node is being cordoned and tainted.
	ReasonFencing Reason = "Fencing"
	// ReasonEvicting is given while pods that hold what will change are leaving.
	ReasonEvicting Reason = "Evicting"
	// ReasonHoldersUnknown is given while the host's processes cannot be looked at, so that nobody knows who holds a GPU.
	ReasonHoldersUnknown Reason = "HoldersUnknown"
	// ReasonOtherMaintenance is given while another tool maintains the node, by what it has written there.
	ReasonOtherMaintenance Reason = "OtherMaintenance"
	// ReasonPausingOperands is given while operands of the GPU operator are being sent away by their labels.
	ReasonPausingOperands Reason = "PausingOperands"
	// ReasonStoppingUnits is given while units of the host that keep GPUs open are being stopped.
	ReasonStoppingUnits Reason = "StoppingUnits"
	// ReasonEvictionBlocked is given when a pod cannot be evicted now, as when its disruption budget is used up.
	ReasonEvictionBlocked Reason = "EvictionBlocked"
	// ReasonKubeletUnavailable is given while kubelet does not say which pod has which device.
	ReasonKubeletUnavailable Reason = "KubeletUnavailable"
	// ReasonNoDevicePlugin is given when nobody on the node offers its GPUs to kubelet, so that no change could be proven.
	ReasonNoDevicePlugin Reason = "NoDevicePlugin"
	// ReasonGPUInUse is given when a process that no pod accounts for holds what will change.
	ReasonGPUInUse Reason = "GPUInUse"
	// ReasonNeedsReboot is given when a mode change is pending and only a reboot of the node makes it current, as in
	// virtual machines that do not let the driver reset a GPU.
	ReasonNeedsReboot Reason = "NeedsReboot"
	// ReasonShuttingDown is given when the node is being shut down: no further change to a GPU is begun.
	ReasonShuttingDown Reason = "ShuttingDown"
	// ReasonRepartitioning is given while MIG mode is turned on or off and instances are destroyed and created.
	ReasonRepartitioning Reason = "Repartitioning"
	// ReasonConfiguringPlugin is given while the device plugin is being given another config.
	ReasonConfiguringPlugin Reason = "ConfiguringPlugin"
	// ReasonPluginFailed is given when the device plugin does not run by its new config, or MPS does not end.
	ReasonPluginFailed Reason = "PluginFailed"
	// ReasonAwaitingCapacity is given while kubelet does not yet show the new devices.
	ReasonAwaitingCapacity Reason = "AwaitingCapacity"
	// ReasonCapacityMismatch is given when allocatable is still not what stands on the hardware at the deadline.
	ReasonCapacityMismatch Reason = "CapacityMismatch"
	// ReasonReleased is given when the node is uncordoned and nothing more is owed.
	ReasonReleased Reason = "Released"
)

// Reasons of ConditionGPUMemoryPressure, and of the event about the pod that has filled a GPU.
const (
	// ReasonGPUMemorySufficient is given when no GPU that pods share is nearly full.
	ReasonGPUMemorySufficient Reason = "GPUMemorySufficient"
	// ReasonGPUMemoryNearlyFull is given when one is: sharing keeps no pod's memory apart, and any may be the next to get none.
	ReasonGPUMemoryNearlyFull Reason = "GPUMemoryNearlyFull"
	// ReasonGPUMemoryUnknown is given while the driver does not say, or nobody wants to know.
	ReasonGPUMemoryUnknown Reason = "GPUMemoryUnknown"
)

// Reasons of events about what the agent's account may do. They are told when an agent starts, and keep it from nothing.
const (
	// ReasonUnconfined is given when no admission policy confines the agent to its own node, or when they refuse all it writes.
	ReasonUnconfined Reason = "Unconfined"
	// ReasonMissingRight is given when the settings ask for what the account has no right to.
	ReasonMissingRight Reason = "MissingRight"
)

// Reasons when something went wrong.
const (
	// ReasonJournalUnreadable is given when the journal is not one that this agent can read: it then touches nothing.
	ReasonJournalUnreadable Reason = "JournalUnreadable"
	// ReasonHostRecordUnavailable is given while the host's record of what is owed cannot be read or written: nothing is begun then.
	ReasonHostRecordUnavailable Reason = "HostRecordUnavailable"
	// ReasonDriverNotLoaded is given while NVIDIA's driver or library is not there.
	ReasonDriverNotLoaded Reason = "DriverNotLoaded"
	// ReasonDriverUnresponsive is given while a call into the driver does not come back.
	ReasonDriverUnresponsive Reason = "DriverUnresponsive"
	// ReasonHardwareFailure is given when the driver refuses a step for a cause that waiting does not cure.
	ReasonHardwareFailure Reason = "HardwareFailure"
	// ReasonStepHadNoEffect is given when a step reported success again and again and is still needed.
	ReasonStepHadNoEffect Reason = "StepHadNoEffect"
	// ReasonRetrying is given when a step failed for a cause that may pass, and is tried again.
	ReasonRetrying Reason = "Retrying"
	// ReasonCancelled is given when somebody lifts our cordon in the middle of a change, which ends it.
	ReasonCancelled Reason = "Cancelled"
	// ReasonRecovering is given when something of ours is found on the node that no change accounts for, and is given back.
	ReasonRecovering Reason = "Recovering"
	// ReasonUnitFailed is given when a unit of the host does not stop, or does not start again.
	ReasonUnitFailed Reason = "UnitFailed"
	// ReasonRollingBack is given while GPUs are brought back to what they were.
	ReasonRollingBack Reason = "RollingBack"
)

// OwnPluginKey begins the keys that the agent writes into the ConfigMap of the device plugin's config manager. What follows is a hash of the
// config: an edited key is never read again, another one is.
const OwnPluginKey = "gpuslice-"
