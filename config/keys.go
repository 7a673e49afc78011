package config

//go:generate go test -count=1 ../test/repo -run TestTheAgentsPageHasTheReasonsOfTheCode -update

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
// reasons, so that each can be searched by the words of any other. What the comments below say of each is what agent/README.md says.
type Reason string

// Reasons of a node at rest.
const (
	// ReasonNotRequested is given when no label asks for anything: the GPUs stay as they are.
	ReasonNotRequested Reason = "NotRequested"
	// ReasonConverged is given when hardware and allocatable are as the labels ask, seen twice in a row.
	ReasonConverged Reason = "Converged"
)

// Reasons why the agent refuses what is asked for, before it disturbs anything. The message says what would be possible.
const (
	// ReasonUnknownConfig is given when no config of the catalog has the name that the label asks for.
	ReasonUnknownConfig Reason = "UnknownConfig"
	// ReasonInvalidCatalog is given when a ConfigMap cannot be read, or a config of it cannot be meant for this node.
	ReasonInvalidCatalog Reason = "InvalidCatalog"
	// ReasonImpossibleGeometry is given when a GPU cannot hold the instances that the config asks of it.
	ReasonImpossibleGeometry Reason = "ImpossibleGeometry"
	// ReasonWrongMIGStrategy is given when the device plugin, by the MIG strategy that it is told, would end on what is asked for or
	// not offer it. Where only what the plugin offers shows its strategy, the agent finds out while it awaits the capacity, and
	// undoes the change.
	ReasonWrongMIGStrategy Reason = "WrongMIGStrategy"
	// ReasonNoHandover is given when the agent has no way to give the device plugin another config.
	ReasonNoHandover Reason = "NoHandover"
	// ReasonNodeKeyConflict is given when a label or taint of the profile is on the node with another value, which is not the agent's.
	ReasonNodeKeyConflict Reason = "NodeKeyConflict"
	// ReasonNoCapableGPU is given when a config asks for MIG and no GPU that it names can do MIG, or a profile selects no GPU of this node.
	ReasonNoCapableGPU Reason = "NoCapableGPU"
	// ReasonVirtualGPU is given when a label asks for MIG or sharing of a vGPU, which only the host of its virtual machine can cut and
	// which one workload has at a time, or for sharing of a GPU that this host lends to virtual machines.
	ReasonVirtualGPU Reason = "VirtualGPU"
	// ReasonImpossibleSharing is given when the device plugin cannot share the node's resources in the way that is asked for.
	ReasonImpossibleSharing Reason = "ImpossibleSharing"
)

// Reasons why a change does not begin yet, or not go on.
const (
	// ReasonHeld is given while AnnotationHold keeps the node from any change.
	ReasonHeld Reason = "Held"
	// ReasonInvalidMaintenance is given while the maintenance file cannot be read: the agent begins nothing until it can.
	ReasonInvalidMaintenance Reason = "InvalidMaintenance"
	// ReasonAwaitingWindow is given while no window is open that is long enough for the change. The message and
	// ConditionMaintenancePlanned say when the change begins.
	ReasonAwaitingWindow Reason = "AwaitingWindow"
	// ReasonAwaitingSlot is given while as many nodes of the pool are unavailable as may be; the message names them.
	ReasonAwaitingSlot Reason = "AwaitingSlot"
	// ReasonPoolPaused is given while the pool begins nothing, after too many failures in a row or because people say so.
	ReasonPoolPaused Reason = "PoolPaused"
	// ReasonWindowClosed is given when the window closes, or is about to, before the agent has touched a GPU: it gives the node back,
	// and begins the change again in the next window.
	ReasonWindowClosed Reason = "WindowClosed"
	// ReasonWindowOverrun is given, by an Event and in the condition's message, when a change goes on beyond its window, since its GPUs were touched.
	ReasonWindowOverrun Reason = "WindowOverrun"
)

// Reasons while a change is under way, in the order of its steps.
const (
	// ReasonFencing is given while the agent cordons and taints the node.
	ReasonFencing Reason = "Fencing"
	// ReasonEvicting is given while pods that hold what will change are leaving.
	ReasonEvicting Reason = "Evicting"
	// ReasonHoldersUnknown is given while the agent cannot see the host's processes, so that nobody knows who holds a GPU. It evicts no
	// pod before it can.
	ReasonHoldersUnknown Reason = "HoldersUnknown"
	// ReasonOtherMaintenance is given while another tool works on the node (kured, a driver upgrade, an autoscaler, …). The agent names it
	// and waits for it, before the fence and before the uncordon.
	ReasonOtherMaintenance Reason = "OtherMaintenance"
	// ReasonPausingOperands is given while the agent sends operands of the GPU Operator away by their labels.
	ReasonPausingOperands Reason = "PausingOperands"
	// ReasonStoppingUnits is given while the agent stops units of the host that keep GPUs open.
	ReasonStoppingUnits Reason = "StoppingUnits"
	// ReasonEvictionBlocked is given when a pod cannot be evicted now, as when its disruption budget is used up. Before the cordon the
	// node stays schedulable until it can.
	ReasonEvictionBlocked Reason = "EvictionBlocked"
	// ReasonKubeletUnavailable is given while kubelet does not say which pod has which device. The agent evicts no pod before it does.
	ReasonKubeletUnavailable Reason = "KubeletUnavailable"
	// ReasonNoDevicePlugin is given when nothing offers the node's GPUs to kubelet, so that no change could be proven. The message says
	// why a device plugin may not be here.
	ReasonNoDevicePlugin Reason = "NoDevicePlugin"
	// ReasonGPUInUse is given when a process that belongs to no evicted pod holds what will change. The message names its pid,
	// its command, and its pod, unit or container.
	ReasonGPUInUse Reason = "GPUInUse"
	// ReasonNeedsReboot is given when a mode change is pending and only a reboot of the node makes it current, as in
	// virtual machines that do not let the driver reset a GPU.
	ReasonNeedsReboot Reason = "NeedsReboot"
	// ReasonShuttingDown is given while the node shuts down: the agent begins no further change to a GPU.
	ReasonShuttingDown Reason = "ShuttingDown"
	// ReasonRepartitioning is given while the agent turns MIG mode on or off, and destroys and creates instances.
	ReasonRepartitioning Reason = "Repartitioning"
	// ReasonConfiguringPlugin is given while the agent gives the device plugin another config.
	ReasonConfiguringPlugin Reason = "ConfiguringPlugin"
	// ReasonPluginFailed is given when the device plugin ends again and again by its new config, or MPS does not end. The agent
	// brings the former config back.
	ReasonPluginFailed Reason = "PluginFailed"
	// ReasonAwaitingCapacity is given while kubelet does not yet show the new devices.
	ReasonAwaitingCapacity Reason = "AwaitingCapacity"
	// ReasonCapacityMismatch is given when allocatable is still not what stands on the hardware at the deadline.
	ReasonCapacityMismatch Reason = "CapacityMismatch"
	// ReasonReleased is given, by an Event alone, when the node is uncordoned and the agent owes it nothing more.
	ReasonReleased Reason = "Released"
)

// Reasons of ConditionGPUMemoryPressure, and of the Event about the pod that has filled a GPU.
const (
	// ReasonGPUMemorySufficient is given when no GPU or MIG instance that pods share is nearly full.
	ReasonGPUMemorySufficient Reason = "GPUMemorySufficient"
	// ReasonGPUMemoryNearlyFull is given when one is: sharing keeps no pod's memory apart, and any may be the next to get none.
	// The message has its pods with their MiB.
	ReasonGPUMemoryNearlyFull Reason = "GPUMemoryNearlyFull"
	// ReasonGPUMemoryUnknown is given while the driver does not answer, or memoryPressure.threshold of the settings is 0.
	ReasonGPUMemoryUnknown Reason = "GPUMemoryUnknown"
)

// Reasons of Events about what the agent's account may do. The agent tells them when it starts, and works all the same.
const (
	// ReasonUnconfined is given when no admission policy confines the agent to its own node, or when they refuse all it writes.
	ReasonUnconfined Reason = "Unconfined"
	// ReasonMissingRight is given when the settings ask for what the account has no right to.
	ReasonMissingRight Reason = "MissingRight"
)

// Reasons when something went wrong.
const (
	// ReasonJournalUnreadable is given when this agent cannot read the journal, as when a newer one wrote it: it touches nothing until a
	// person has looked.
	ReasonJournalUnreadable Reason = "JournalUnreadable"
	// ReasonHostRecordUnavailable is given while the agent cannot read or write the host's record of what it owes: it begins nothing, and
	// gives back what was begun. The message says what to do.
	ReasonHostRecordUnavailable Reason = "HostRecordUnavailable"
	// ReasonDriverNotLoaded is given while NVIDIA's driver or library is not there, as during its upgrade. The agent waits for it.
	ReasonDriverNotLoaded Reason = "DriverNotLoaded"
	// ReasonDriverUnresponsive is given while a call into the driver does not come back.
	ReasonDriverUnresponsive Reason = "DriverUnresponsive"
	// ReasonHardwareFailure is given when the driver refuses a step for a cause that waiting does not cure.
	ReasonHardwareFailure Reason = "HardwareFailure"
	// ReasonStepHadNoEffect is given when a step reported success again and again and is still needed.
	ReasonStepHadNoEffect Reason = "StepHadNoEffect"
	// ReasonRetrying is given when a step failed for a cause that may pass; the agent tries it again.
	ReasonRetrying Reason = "Retrying"
	// ReasonCancelled is given when somebody lifts our cordon in the middle of a change, which calls it off.
	ReasonCancelled Reason = "Cancelled"
	// ReasonRecovering is given while the agent gives back what is ours on the node without a journal.
	ReasonRecovering Reason = "Recovering"
	// ReasonUnitFailed is given when a unit of the host does not stop, which undoes the change, or does not start again.
	ReasonUnitFailed Reason = "UnitFailed"
	// ReasonRollingBack is given while the agent brings GPUs back to what they were, since the change was given up.
	ReasonRollingBack Reason = "RollingBack"
)

// OwnPluginKey begins the keys that the agent writes into the ConfigMap of the device plugin's config manager. What follows is a hash of the
// config: an edited key is never read again, another one is.
const OwnPluginKey = "gpuslice-"
