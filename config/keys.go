package config

//go:generate go test -count=1 ../test/repo -run TestTheAgentsPagesAndTheGlossaryHave -update

// FieldManager names the agent in the managedFields of what it writes.
const FieldManager = "gpuslice-agent"

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

// Labels by which NVIDIA's GPU operator deploys its operands. Others may follow the convention with nvidia.com/gpu.deploy.client.
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
	// StateSuccess is written when the capacity is verified.
	StateSuccess State = "success"
	// StateFailed is written when the request is refused, or undone after a failure.
	StateFailed State = "failed"
)

// Annotations of the node that users set.
const (
	// AnnotationKeepCordoned, with any value, keeps the agent from lifting its cordon, whatever happens.
	AnnotationKeepCordoned = "gpuslice.io/keep-cordoned"
	// AnnotationHold, with any value, keeps the agent from beginning anything. It finishes or undoes a change that it has begun.
	AnnotationHold = "gpuslice.io/hold"
	// AnnotationForce lets one change begin outside of its window: ForceNow, or the id of a change. The agent removes it.
	AnnotationForce = "gpuslice.io/force"
	// AnnotationAllowEviction lets one change evict pods that the settings refuse to evict, as Allowance writes it: "gpuslice.io/profile=research
	// unmanagedPods emptyDir". The agent removes it when that change has ended.
	AnnotationAllowEviction = "gpuslice.io/allow-eviction"
	// AnnotationPreview asks what a label would do, as "gpuslice.io/profile=research", or "gpuslice.io/profile=research emptyDir", what it would do
	// beside an AnnotationAllowEviction of this value, or for RequestDiagnosis or RequestTop. The agent
	// answers by AnnotationPlan.
	AnnotationPreview = "gpuslice.io/preview"
	// AnnotationHealthAck is the time, as RFC 3339 has it, until which a user has seen what GPUs have reported. The agent drops
	// findings for Xids of before that, and of before it was written.
	AnnotationHealthAck = "gpuslice.io/health-ack"
)

// ForceNow is the value of AnnotationForce for any change that the labels ask for.
const ForceNow = "now"

// RequestDiagnosis is the value of AnnotationPreview that asks for the agent's diagnosis: which pods and processes hold which GPU, and why
// the node is as it is.
const RequestDiagnosis = "diagnosis"

// RequestTop is the value of AnnotationPreview that asks which pod uses how much of which GPU or instance.
const RequestTop = "top"

// Annotations of the node that the agent writes.
const (
	// AnnotationStatus is compact JSON for tools: the desired config, the phase, and the instances of each GPU.
	AnnotationStatus = "gpuslice.io/status"
	// AnnotationPublished is JSON of the labels and taints that the agent has put on the node for a profile.
	AnnotationPublished = "gpuslice.io/published"
	// AnnotationJournal is what the agent must give back to the node. It is there exactly while a restore is pending.
	AnnotationJournal = "gpuslice.io/journal"
	// AnnotationPlan is JSON of the plan or the diagnosis that AnnotationPreview asks for. It is there as long as that is.
	AnnotationPlan = "gpuslice.io/plan"
)

// Annotations of other tools that the agent sets for the time of a change, to "true", unless they are there. A drained node looks empty, and
// autoscalers remove empty nodes.
const (
	// AnnotationScaleDownDisabled keeps cluster-autoscaler from removing the node.
	AnnotationScaleDownDisabled = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	// AnnotationDoNotDisrupt keeps Karpenter from removing the node.
	AnnotationDoNotDisrupt = "karpenter.sh/do-not-disrupt"
)

// AutoscalerAnnotations lists the annotations that the agent sets for the time of a change.
func AutoscalerAnnotations() []string {
	return []string{AnnotationScaleDownDisabled, AnnotationDoNotDisrupt}
}

// LeasePrefix is the prefix of the Leases by which the agents of a pool's nodes agree which nodes may be unavailable; the pool's name follows.
const LeasePrefix = "gpuslice-pool-"

// Annotations of the Lease of a pool.
const (
	// AnnotationSlots is JSON of the nodes that have a slot and those that wait for one. The agents write it.
	AnnotationSlots = "gpuslice.io/slots"
	// AnnotationPaused, with any value, keeps the pool's nodes from beginning anything. The agents set it after too many failures,
	// and users remove it.
	AnnotationPaused = "gpuslice.io/paused"
)

// Taints of the node. Those that the agent puts there by itself have the effect NoSchedule, but for TaintGPUUnhealthy, whose effect is a
// setting.
const (
	// TaintRepartitioning fences the node while its GPUs change.
	TaintRepartitioning = "gpuslice.io/repartitioning"
	// TaintNotReady is a taint with which kubelet registers a node, to keep pods away until the GPUs are as the labels ask
	// and their capacity is verified. The agent removes it then. The settings may name a second one: Settings.StartupTaints are both.
	TaintNotReady = "gpuslice.io/not-ready"
	// TaintGPUUnhealthy keeps new pods from a node while one of its GPUs cannot be used or trusted, where the settings say so. With a
	// value other than ValueGPUUnhealthy it is another user or program's.
	TaintGPUUnhealthy = "gpuslice.io/gpu-unhealthy"
	ValueGPUUnhealthy = "critical"
)

// Conditions of KEP-5683, by which a tool shows all others what it does to a node.
const (
	// ConditionMaintenancePlanned is True while a change waits for its window.
	ConditionMaintenancePlanned = "MaintenancePlanned"
	// ConditionDrainInProgress is True while the agent makes pods leave.
	ConditionDrainInProgress = "DrainInProgress"
	// ConditionDrained is True from when the pods that had to leave are gone until the node is given back.
	ConditionDrained = "Drained"
	// ConditionMaintenanceInProgress is True from the fence until the node is given back.
	ConditionMaintenanceInProgress = "MaintenanceInProgress"
)

// ConditionGPUPartitionReady is True when what the labels ask for is on the hardware and in the node's allocatable.
const ConditionGPUPartitionReady = "GPUPartitionReady"

// ConditionGPUMemoryPressure is True while the memory of a GPU that several pods share is nearly full.
const ConditionGPUMemoryPressure = "GPUMemoryPressure"

// ConditionGPUUnhealthy is True while something is wrong with a GPU. It names the worst, and what is to be done.
const ConditionGPUUnhealthy = "GPUUnhealthy"

// Reason is why the agent does, waits for, or refuses something. Conditions, events, metrics and logs share the
// reasons, so that each can be searched by the words of any other. What the comments below say of each, and what people can do, is what
// agent/REASONS.md and kubectl gpuslice explain say.
type Reason string

// Reasons of a node at rest.
const (
	// ReasonNotRequested is given when no label asks for anything: the GPUs stay as they are.
	//
	// You can: set a label to ask for a config: kubectl gpuslice apply NODE --mig-config all-balanced.
	ReasonNotRequested Reason = "NotRequested"
	// ReasonConverged is given when hardware and allocatable are as the labels ask, seen twice in a row.
	//
	// You can: use the node; nothing is left to do.
	ReasonConverged Reason = "Converged"
)

// Reasons why the agent refuses what is asked for, before it disturbs anything. The message says what would be possible.
const (
	// ReasonUnknownConfig is given when no config of the catalog has the name that the label asks for.
	//
	// You can: set the label to one of the names in the message, or add the config to the ConfigMap of configs.
	ReasonUnknownConfig Reason = "UnknownConfig"
	// ReasonInvalidCatalog is given when a ConfigMap cannot be read, or a config of it cannot be meant for this node.
	//
	// You can: mend the ConfigMap at the line that the message names; kubectl gpuslice validate shows all mistakes at once.
	ReasonInvalidCatalog Reason = "InvalidCatalog"
	// ReasonImpossibleGeometry is given when a GPU cannot hold the instances that the config asks of it.
	//
	// You can: ask for fewer or smaller instances; the message says what fits.
	ReasonImpossibleGeometry Reason = "ImpossibleGeometry"
	// ReasonWrongMIGStrategy is given when the device plugin, by the MIG strategy that it has, would end on what is asked for or
	// not offer it. Where only what the plugin offers shows its strategy, the agent finds out while it awaits the capacity, and
	// undoes the change.
	//
	// You can: give the device plugin the MIG strategy that the message names, or ask for a config that fits the one it has.
	ReasonWrongMIGStrategy Reason = "WrongMIGStrategy"
	// ReasonNoHandover is given when the agent has no way to give the device plugin another config, or cannot write its key of the ConfigMap again
	// which another program has changed: by an Event, and, where something would start the plugin, as what that waits for.
	//
	// You can: give the device plugin a config by ConfigMap or by file, as deploy/README.md says; let the agent write the key that the message names.
	ReasonNoHandover Reason = "NoHandover"
	// ReasonNodeKeyConflict is given when a label or taint of the profile is on the node with another value, which is not the agent's.
	//
	// You can: remove the label or taint from the node, or leave it out of the profile.
	ReasonNodeKeyConflict Reason = "NodeKeyConflict"
	// ReasonNoCapableGPU is given when a config asks for MIG and no GPU that it names can do MIG, or a profile selects no GPU of this node.
	//
	// You can: take the label off the node, or ask for a config that names GPUs which this node has.
	ReasonNoCapableGPU Reason = "NoCapableGPU"
	// ReasonVirtualGPU is given when a label asks for MIG or sharing of a vGPU, which only the host of its virtual machine can cut and
	// which one workload has at a time, or for sharing of a GPU that this host lends to virtual machines.
	//
	// You can: cut the GPU on the host of the virtual machine, and take the label off this node.
	ReasonVirtualGPU Reason = "VirtualGPU"
	// ReasonForeignOwner is given when NVIDIA's DRA driver keeps the agent from cutting the node's GPUs: it cuts them itself (DynamicMIG), gives them
	// out beside a device plugin, or offers none yet, so that the agent does not know whose they are.
	//
	// You can: ask for MIG devices by claims of class mig.nvidia.com, or have the node given out by the device plugin alone, as the message says.
	ReasonForeignOwner Reason = "ForeignOwner"
	// ReasonImpossibleSharing is given when the device plugin cannot share the node's resources in the way that is asked for.
	//
	// You can: change the sharing of the profile or of the config as the message says.
	ReasonImpossibleSharing Reason = "ImpossibleSharing"
)

// Reasons why a change does not begin yet, or not go on.
const (
	// ReasonHeld is given while AnnotationHold keeps the node from any change.
	//
	// You can: let the node change again: kubectl gpuslice hold NODE --release.
	ReasonHeld Reason = "Held"
	// ReasonInvalidMaintenance is given while the maintenance file cannot be read: the agent begins nothing until it can.
	//
	// You can: mend the maintenance file; kubectl gpuslice validate shows the line.
	ReasonInvalidMaintenance Reason = "InvalidMaintenance"
	// ReasonAwaitingWindow is given while no window is open that is long enough for the change. The message and
	// ConditionMaintenancePlanned say when the change begins.
	//
	// You can: wait, or let this change begin at once: kubectl annotate node NODE gpuslice.io/force=now.
	ReasonAwaitingWindow Reason = "AwaitingWindow"
	// ReasonAwaitingSlot is given while as many nodes of the pool are unavailable as may be; the message names them.
	//
	// You can: wait for the nodes that the message names; if one of them is stuck, see to it first.
	ReasonAwaitingSlot Reason = "AwaitingSlot"
	// ReasonPoolPaused is given while the pool begins nothing, after too many failures in a row or because a user has paused it.
	//
	// You can: mend the nodes that failed, then remove the annotation gpuslice.io/paused from the pool's Lease.
	ReasonPoolPaused Reason = "PoolPaused"
	// ReasonWindowClosed is given when the window closes, or is about to, before the agent has touched a GPU: it gives the node back,
	// and begins the change again in the next window.
	//
	// You can: wait for the next window, or make the windows longer.
	ReasonWindowClosed Reason = "WindowClosed"
	// ReasonWindowOverrun is given, by an Event and in the condition's message, when a change goes on beyond its window, since its GPUs were touched.
	//
	// You can: let the change come to its end; make the windows longer if it happens again.
	ReasonWindowOverrun Reason = "WindowOverrun"
)

// Reasons while a change is under way, in the order of its steps.
const (
	// ReasonFencing is given while the agent cordons and taints the node.
	//
	// You can: wait; it takes seconds.
	ReasonFencing Reason = "Fencing"
	// ReasonEvicting is given while pods that hold what will change are leaving.
	//
	// You can: wait for the pods to end, or delete those that need not end in order.
	ReasonEvicting Reason = "Evicting"
	// ReasonHoldersUnknown is given while the agent cannot see the host's processes, so that it does not know which of them hold a GPU. It evicts no
	// pod before it can.
	//
	// You can: give the agent the host's process table, as deploy/base does.
	ReasonHoldersUnknown Reason = "HoldersUnknown"
	// ReasonOtherMaintenance is given while another tool works on the node (kured, a driver upgrade, an autoscaler, …). The agent names it
	// and waits for it, before the fence and before the uncordon.
	//
	// You can: let the tool that the message names finish, or end its work.
	ReasonOtherMaintenance Reason = "OtherMaintenance"
	// ReasonPausingOperands is given while the agent sends operands of the GPU Operator away by their labels.
	//
	// You can: wait; if an operand stays, see why its pod does not end.
	ReasonPausingOperands Reason = "PausingOperands"
	// ReasonStoppingUnits is given while the agent stops units of the host that keep GPUs open.
	//
	// You can: wait; if a unit stays, see it on the host by systemctl status.
	ReasonStoppingUnits Reason = "StoppingUnits"
	// ReasonEvictionBlocked is given when a pod cannot be evicted now, as when its disruption budget is used up. Before the cordon the
	// node stays schedulable until it can.
	//
	// You can: make room in the disruption budget that the message names; enter the command that it begins with, which lets this change evict
	// what would be lost; or delete the pod.
	ReasonEvictionBlocked Reason = "EvictionBlocked"
	// ReasonKubeletUnavailable is given while kubelet does not say which pod has which device. The agent evicts no pod before it does.
	//
	// You can: see whether kubelet runs, and whether the agent has its pod-resources socket.
	ReasonKubeletUnavailable Reason = "KubeletUnavailable"
	// ReasonNoDevicePlugin is given when no pod that the settings match offers the node's GPUs to kubelet, and NVIDIA's DRA driver does not offer them
	// either, so that no capacity could be verified. The message says why a device plugin may not be here, or which pod looks like one.
	//
	// You can: see why no pod of the device plugin is on the node, or name it in devicePlugin of the settings, as the message says.
	ReasonNoDevicePlugin Reason = "NoDevicePlugin"
	// ReasonGPUInUse is given when a process that belongs to no evicted pod holds what will change. The message names its pid,
	// its command, and its pod, unit or container.
	//
	// You can: end the process that the message names, or name its unit in the settings.
	ReasonGPUInUse Reason = "GPUInUse"
	// ReasonNeedsReboot is given when a mode change is pending and only a reboot of the node makes it current, as in
	// virtual machines that do not let the driver reset a GPU.
	//
	// You can: drain and reboot the node, unless the settings let the agent do it.
	ReasonNeedsReboot Reason = "NeedsReboot"
	// ReasonShuttingDown is given while the node shuts down: the agent begins no further change to a GPU.
	//
	// You can: wait until the node is back; the agent goes on then.
	ReasonShuttingDown Reason = "ShuttingDown"
	// ReasonRepartitioning is given while the agent turns MIG mode on or off, and destroys and creates instances.
	//
	// You can: wait; it takes seconds for each GPU.
	ReasonRepartitioning Reason = "Repartitioning"
	// ReasonConfiguringPlugin is given while the agent gives the device plugin another config.
	//
	// You can: wait for the device plugin to start with its new config.
	ReasonConfiguringPlugin Reason = "ConfiguringPlugin"
	// ReasonPluginFailed is given when the device plugin ends again and again by its new config, or MPS does not end. The agent
	// brings the former config back.
	//
	// You can: read the log of the device plugin's pod, and mend the config.
	ReasonPluginFailed Reason = "PluginFailed"
	// ReasonAwaitingCapacity is given while kubelet, or a ResourceSlice of NVIDIA's DRA driver, does not yet show the new devices.
	//
	// You can: wait; if it lasts for minutes, see the log of the pod of the device plugin or of NVIDIA's DRA driver.
	ReasonAwaitingCapacity Reason = "AwaitingCapacity"
	// ReasonCapacityMismatch is given when, at the deadline, allocatable, or the ResourceSlices of NVIDIA's DRA driver, are not what stands on the
	// hardware, or kubelet gives out devices of a device plugin that does not serve it, or, where nothing is asked of the node, gives out to others
	// what a pod holds.
	//
	// You can: see the log of the pod of the device plugin or of NVIDIA's DRA driver; where a device plugin's says that it is already connected,
	// restart kubelet; then remove the label, and set it again. Delete the pods that the message names, or set a label by which the agent evicts them.
	ReasonCapacityMismatch Reason = "CapacityMismatch"
	// ReasonFinishing is given while the agent does the last of a change: it publishes the profile's labels and taints, gives the node back, and
	// returns its slot to the pool.
	//
	// You can: wait; it takes seconds.
	ReasonFinishing Reason = "Finishing"
	// ReasonReleased is given, by an Event alone, when the node is uncordoned and the agent has restored all.
	//
	// You can: use the node; nothing is left to do.
	ReasonReleased Reason = "Released"
	// ReasonStaleResourcesRemoved is given, by an Event alone, when the agent has removed resources of former configs from the node object,
	// where the settings say so.
	//
	// You can: leave it; kubelet had them at 0.
	ReasonStaleResourcesRemoved Reason = "StaleResourcesRemoved"
	// ReasonInvalidSettings is given, by an Event alone, while the settings cannot be read: the agent goes on with those of before.
	//
	// You can: mend the settings at the line that the message names; kubectl gpuslice validate shows all mistakes at once.
	ReasonInvalidSettings Reason = "InvalidSettings"
	// ReasonKeyIgnored is given, by an Event alone, when a label or annotation of the node does not count: another label counts in its place, or its
	// key is none that the agent knows, and is spelt almost like one.
	//
	// You can: remove the key that the message names, or write it as the message says.
	ReasonKeyIgnored Reason = "KeyIgnored"
)

// Reasons of the conditions of KEP-5683, by which other tools see what the agent does to the node.
const (
	// ReasonMaintenanceWindow is given while MaintenancePlanned is True: a change waits for its window.
	//
	// You can: wait; the message says when the change begins.
	ReasonMaintenanceWindow Reason = "MaintenanceWindow"
	// ReasonNotPlanned is given when MaintenancePlanned is False again: no change waits for a window.
	//
	// You can: leave it; nothing is to be done.
	ReasonNotPlanned Reason = "NotPlanned"
	// ReasonDrainStarted is given while DrainInProgress is True: the agent makes pods leave.
	//
	// You can: wait; the condition GPUPartitionReady names the pods.
	ReasonDrainStarted Reason = "DrainStarted"
	// ReasonDrainCompleted is given while Drained is True: the pods that had to leave are gone, and the node is not given back yet.
	//
	// You can: wait; the condition GPUPartitionReady says what is being done.
	ReasonDrainCompleted Reason = "DrainCompleted"
	// ReasonMaintenanceStarted is given while MaintenanceInProgress is True: from the fence until the node is given back.
	//
	// You can: wait; the condition GPUPartitionReady says what is being done.
	ReasonMaintenanceStarted Reason = "MaintenanceStarted"
	// ReasonNotInMaintenance is given when DrainInProgress, Drained or MaintenanceInProgress is False again.
	//
	// You can: leave it; nothing is to be done.
	ReasonNotInMaintenance Reason = "NotInMaintenance"
)

// Reasons of ConditionGPUMemoryPressure, and of the Event about the pod that has filled a GPU.
const (
	// ReasonGPUMemorySufficient is given when no GPU or MIG instance that pods share is nearly full.
	//
	// You can: use the node; nothing is left to do.
	ReasonGPUMemorySufficient Reason = "GPUMemorySufficient"
	// ReasonGPUMemoryNearlyFull is given when one is: sharing keeps no pod's memory apart, and any may be the next to get none.
	// The message has its pods with their MiB.
	//
	// You can: move or shrink the pods that the message names, before one of them fails.
	ReasonGPUMemoryNearlyFull Reason = "GPUMemoryNearlyFull"
	// ReasonGPUMemoryUnknown is given while the driver does not answer, or memoryPressure.threshold of the settings is 0.
	//
	// You can: see whether the driver answers, or set memoryPressure.threshold of the settings.
	ReasonGPUMemoryUnknown Reason = "GPUMemoryUnknown"
)

// Reasons of Events about what pods make of their GPUs.
const (
	// ReasonGPUIdle is given, by a Warning on the pod, when it has had a GPU or an instance for idle.after of the settings and used it for
	// less than idle.below per cent of that time. It is given again after as long, if that is still so.
	//
	// You can: end the pod, or give it a smaller instance or a shared one; kubectl gpuslice top --sort-by busy shows all such pods.
	ReasonGPUIdle Reason = "GPUIdle"
)

// Reasons of ConditionGPUUnhealthy, the worst first. Each is of a GPU, but for the last five.
const (
	// ReasonGPULost is given when a GPU has fallen off the bus. It heals when the GPU answers again.
	//
	// You can: drain and reboot the node; have the machine checked if it happens again.
	ReasonGPULost Reason = "GPULost"
	// ReasonGPUMissing is given when the driver does not list a GPU that is on the PCI bus, or that it listed before. It heals when it
	// does.
	//
	// You can: reboot the node, and have the machine checked if the GPU stays away; one that was taken out is dropped by the annotation
	// gpuslice.io/health-ack.
	ReasonGPUMissing Reason = "GPUMissing"
	// ReasonRebootRequired is given when the driver recommends a reboot, of the node or of the machine.
	//
	// You can: drain and reboot the node, or the machine if the message says so.
	ReasonRebootRequired Reason = "RebootRequired"
	// ReasonResetRequired is given when the driver recommends a reset of the GPU or of its bus, or an action that this agent does not know.
	//
	// You can: end the pods on the GPU and reset it by nvidia-smi -r, or reboot the node.
	ReasonResetRequired Reason = "ResetRequired"
	// ReasonDrainRequired is given when the driver recommends to let the GPU's work end, with a reset or without.
	//
	// You can: let the pods on the GPU end, start none on it, then reset it, or reboot the node.
	ReasonDrainRequired Reason = "DrainRequired"
	// ReasonXidCritical is given when the driver has reported an error after which a GPU is not to be trusted, and its state does not
	// show that nothing is left of it.
	//
	// You can: end the pods on the GPU and reset it, or reboot the node; or set the annotation gpuslice.io/health-ack to the time until
	// which you have seen the errors.
	ReasonXidCritical Reason = "XidCritical"
	// ReasonRowRemapFailed is given when a bad row of memory cannot be replaced. It does not heal.
	//
	// You can: run NVIDIA's field diagnostics, and have the GPU replaced.
	ReasonRowRemapFailed Reason = "RowRemapFailed"
	// ReasonSRAMThresholdExceeded is given when a GPU's SRAM has had more errors than NVIDIA lets pass. It does not heal.
	//
	// You can: run NVIDIA's field diagnostics, and have the GPU replaced.
	ReasonSRAMThresholdExceeded Reason = "SRAMThresholdExceeded"
	// ReasonMemoryUnrepairable is given when a GPU's memory cannot be repaired any more. It does not heal.
	//
	// You can: run NVIDIA's field diagnostics, and have the GPU replaced.
	ReasonMemoryUnrepairable Reason = "MemoryUnrepairable"
	// ReasonRowRemapPending is given when a bad row of memory is replaced at the next reset.
	//
	// You can: reset the GPU when its pods have ended; new work on it is safe.
	ReasonRowRemapPending Reason = "RowRemapPending"
	// ReasonRepairPending is given when a GPU repairs a channel or a TPC at its next reset.
	//
	// You can: reset the GPU when its pods have ended; new work on it is safe.
	ReasonRepairPending Reason = "RepairPending"
	// ReasonPageRetirementPending is given when a bad page of memory is dropped at the next load of the driver (Turing and earlier).
	//
	// You can: reset the GPU, or reboot the node, when its pods have ended; new work on it is safe.
	ReasonPageRetirementPending Reason = "PageRetirementPending"
	// ReasonUncorrectableECC is given when a GPU has had an uncorrectable memory error, until the driver has had half a minute to say what
	// is to be done.
	//
	// You can: run again what has run on the GPU then; reset the GPU when its pods have ended, unless the condition ends by itself.
	ReasonUncorrectableECC Reason = "UncorrectableECC"
	// ReasonModePending is given when ECC, or MIG mode without the agent, changes at the next reset.
	//
	// You can: reset the GPU when its pods have ended.
	ReasonModePending Reason = "ModePending"
	// ReasonFabricUnhealthy is given when a GPU is not well connected to its NVSwitch fabric.
	//
	// You can: check nvidia-fabricmanager, on the node or in the fabric.
	ReasonFabricUnhealthy Reason = "FabricUnhealthy"
	// ReasonRepeatedXid is given when the programs of three pods on one GPU have had errors within an hour.
	//
	// You can: check the programs that the Events name; if they are not related, run NVIDIA's diagnostics on the GPU.
	ReasonRepeatedXid Reason = "RepeatedXid"
	// ReasonHealthUnknown is given, with the status Unknown, while the driver cannot be asked. Where it is not loaded or does not answer,
	// the reason is ReasonDriverNotLoaded or ReasonDriverUnresponsive.
	//
	// You can: see the message, and the agent's log.
	ReasonHealthUnknown Reason = "HealthUnknown"
	// ReasonNoGPU is given, with the status False, when neither the driver nor the PCI bus has a GPU.
	//
	// You can: keep the agent off nodes without a GPU.
	ReasonNoGPU Reason = "NoGPU"
	// ReasonGPUsHealthy is given, with the status False, when all GPUs are well.
	//
	// You can: leave it; nothing is to be done.
	ReasonGPUsHealthy Reason = "GPUsHealthy"
)

// Reasons of Events about the health of GPUs.
const (
	// ReasonGPUUnhealthy is given, by a Warning, when ConditionGPUUnhealthy becomes True, or its reason worse.
	//
	// You can: see the condition GPUUnhealthy.
	ReasonGPUUnhealthy Reason = "GPUUnhealthy"
	// ReasonGPUHealthy is given when all GPUs are well again.
	//
	// You can: leave it; nothing is to be done.
	ReasonGPUHealthy Reason = "GPUHealthy"
	// ReasonHealthAcknowledged is given when annotation gpuslice.io/health-ack has dropped what GPUs have reported. It says which program wrote it.
	//
	// You can: leave it, if it was one of you; else have the GPUs reset or tested, and see who may patch nodes.
	ReasonHealthAcknowledged Reason = "HealthAcknowledged"
	// ReasonXidError is given, on the node and on the pods that have the GPU or the instance, when the driver has reported an error that
	// is not a program's own.
	//
	// You can: see the condition GPUUnhealthy, and agent/monitor/health/README.md for the number.
	ReasonXidError Reason = "XidError"
	// ReasonApplicationXid is given on the pods alone that have the GPU or the instance, when a program of one has made an error, or was
	// stopped by an error of memory that was contained.
	//
	// You can: read the pod's own log: its program has made the error, or another one on the GPU that it shares.
	ReasonApplicationXid Reason = "ApplicationXid"
	// ReasonRecoveryActionChanged is given when the driver recommends another action for a GPU.
	//
	// You can: see the condition GPUUnhealthy.
	ReasonRecoveryActionChanged Reason = "RecoveryActionChanged"
	// ReasonRowRemapped is given when a bad row of memory was replaced.
	//
	// You can: leave it; the GPU has mended itself.
	ReasonRowRemapped Reason = "RowRemapped"
	// ReasonPluginRestarted is given when the agent restarts the device plugin or NVIDIA's DRA driver since it does not offer the GPUs as they are: until it
	// starts again, it takes a GPU for unhealthy that has had an error, and offers devices that are gone.
	//
	// You can: leave it; the GPUs are offered as they are in a moment.
	ReasonPluginRestarted Reason = "PluginRestarted"
	// ReasonHealthNotWatched is given when the driver does not hand out its events: errors are seen only as far as the GPUs' state shows them.
	//
	// You can: see whether the driver is well; an older one may not have events.
	ReasonHealthNotWatched Reason = "HealthNotWatched"
)

// Reasons of Events about what the agent's account may do. The agent reports them when it starts, and works all the same.
const (
	// ReasonUnconfined is given when no admission policy confines the agent to its own node, or when they refuse all it writes, and by a Normal
	// Event when they confine it at last.
	//
	// You can: install the admission policies: kubectl apply -k deploy/policies.
	ReasonUnconfined Reason = "Unconfined"
	// ReasonMissingRight is given when the account lacks a right that the settings, or the work of the agent, need.
	//
	// You can: give the account the right that the message names, or turn the setting off.
	ReasonMissingRight Reason = "MissingRight"
)

// Reasons when something went wrong.
const (
	// ReasonJournalUnreadable is given when this agent cannot read the journal, as when a newer one wrote it: it touches nothing until a
	// person has decided.
	//
	// You can: install the newer agent again; gpuslice-agent recover on the node says what must be restored.
	ReasonJournalUnreadable Reason = "JournalUnreadable"
	// ReasonHostRecordUnavailable is given while the agent cannot read or write the host's record of what it must restore: it begins nothing, and
	// gives back what was begun. The message says what to do.
	//
	// You can: make the folder on the host readable and writable, as the message says.
	ReasonHostRecordUnavailable Reason = "HostRecordUnavailable"
	// ReasonDriverNotLoaded is given while NVIDIA's driver or library is not there, as during its upgrade. The agent waits for it.
	//
	// You can: wait for the driver's upgrade to end; otherwise see the driver's pod, or nvidia-smi on the host.
	ReasonDriverNotLoaded Reason = "DriverNotLoaded"
	// ReasonDriverUnresponsive is given while a call into the driver does not come back.
	//
	// You can: see the host's kernel log for Xid errors; a GPU that hangs takes a reboot of the node.
	ReasonDriverUnresponsive Reason = "DriverUnresponsive"
	// ReasonHardwareFailure is given when the driver refuses a step for a cause that waiting does not cure.
	//
	// You can: see the GPU's health and the host's kernel log; then remove the label, and set it again.
	ReasonHardwareFailure Reason = "HardwareFailure"
	// ReasonStepFailed is given when a step other than a call into the driver has failed so often that the agent gives the change up. The message says
	// which, and why.
	//
	// You can: see to the cause in the message; then remove the label, and set it again.
	ReasonStepFailed Reason = "StepFailed"
	// ReasonStepHadNoEffect is given when a step reported success again and again and is still needed.
	//
	// You can: see the host's kernel log; then remove the label, and set it again.
	ReasonStepHadNoEffect Reason = "StepHadNoEffect"
	// ReasonRetrying is given when a step failed for a cause that may pass; the agent tries it again.
	//
	// You can: wait; if the cause in the message stays, see to it.
	ReasonRetrying Reason = "Retrying"
	// ReasonCancelled is given when a user or another tool lifts the agent's cordon in the middle of a change, which cancels the change.
	//
	// You can: remove the label and set it again to have the change after all.
	ReasonCancelled Reason = "Cancelled"
	// ReasonRecovering is given while the agent restores what it has left on the node without a journal.
	//
	// You can: wait; the node is given back in a moment.
	ReasonRecovering Reason = "Recovering"
	// ReasonUnitFailed is given when a unit of the host does not stop, which undoes the change, or does not start again.
	//
	// You can: see the unit on the host by systemctl status and journalctl -u, and mend it.
	ReasonUnitFailed Reason = "UnitFailed"
	// ReasonRollingBack is given while the agent brings GPUs back to what they were, since the change was given up.
	//
	// You can: wait; the reason of the failure is in the message, and stays after it.
	ReasonRollingBack Reason = "RollingBack"
)

// OwnPluginKey begins the keys that agents write into the ConfigMap of the device plugin's config manager. What follows is the UID of the
// agent's node, since all nodes share the ConfigMap and no agent may write another's keys, and a hash of the config: an edited key is never
// read again, another one is.
const OwnPluginKey = "gpuslice-"
