package config

//go:generate go test -count=1 ../test/repo -run TestTheAgentsPagesAndTheGlossaryHave -update

// FieldManager names the agent in the managedFields of what it writes.
const FieldManager = "gpuslice-agent"

// Labels of the node that the agent reads.
const (
	// LabelMIGConfig names the MIG config requested for the node. Without it the GPUs stay unchanged.
	LabelMIGConfig = "nvidia.com/mig.config"
	// LabelProfile names a profile of our own catalog. If set, it overrides LabelMIGConfig.
	LabelProfile = "gpuslice.io/profile"
	// LabelDevicePluginConfig names a config of NVIDIA's device plugin, by its key in the ConfigMap of configs.
	LabelDevicePluginConfig = "nvidia.com/device-plugin.config"
	// LabelMIGStrategy is how the device plugin presents MIG devices, as GPU feature discovery publishes it.
	LabelMIGStrategy = "nvidia.com/mig.strategy"
)

// NVIDIA's GPU operator deploys its operands by these labels. Others may follow the convention with nvidia.com/gpu.deploy.client.
const (
	LabelOperandPrefix = "nvidia.com/gpu.deploy."
	LabelDevicePlugin  = LabelOperandPrefix + "device-plugin"
)

// Labels of the node that the agent writes.
const (
	// LabelMIGConfigState says how far LabelMIGConfig has come, as one of the States, for tools that wait on it.
	LabelMIGConfigState = "nvidia.com/mig.config.state"
)

// RequestLabels lists the labels that request a config.
func RequestLabels() []string { return []string{LabelProfile, LabelMIGConfig, LabelDevicePluginConfig} }

// State is a value of LabelMIGConfigState. They are those of NVIDIA's k8s-mig-manager.
type State string

// The states of a change, as tools that wait for it know them.
const (
	// StatePending is written when a change is accepted, and stays until the change ends.
	StatePending State = "pending"
	// StateRebooting is written while a mode change waits for a requested reboot.
	StateRebooting State = "rebooting"
	// StateSuccess is written when the capacity is verified.
	StateSuccess State = "success"
	// StateFailed is written when the request is refused, undone after a failure, or held up until a user acts, as by a device plugin that the agent does
	// not know.
	StateFailed State = "failed"
)

// Annotations of the node that users set.
const (
	// AnnotationKeepCordoned, with any value, keeps the agent from ever lifting its cordon.
	AnnotationKeepCordoned = "gpuslice.io/keep-cordoned"
	// AnnotationHold, with any value, keeps the agent from beginning a change. It still finishes or undoes a change under way.
	AnnotationHold = "gpuslice.io/hold"
	// AnnotationForce lets one change begin outside of its window: ForceNow, or the id of a change. The agent removes it.
	AnnotationForce = "gpuslice.io/force"
	// AnnotationAllowEviction lets one change evict pods that the settings refuse to evict. Its value is an Allowance: "gpuslice.io/profile=research
	// unmanagedPods emptyDir". The agent removes it when that change has ended.
	AnnotationAllowEviction = "gpuslice.io/allow-eviction"
	// AnnotationPreview requests an answer in AnnotationPlan. "gpuslice.io/profile=research" requests the plan for that label,
	// "gpuslice.io/profile=research emptyDir" the plan together with an AnnotationAllowEviction of this value. It may also be RequestDiagnosis or
	// RequestTop.
	AnnotationPreview = "gpuslice.io/preview"
	// AnnotationHealthAck is an RFC 3339 time: a user has seen all that GPUs reported until then. The agent drops findings for Xids that are older
	// than this time and older than the annotation.
	AnnotationHealthAck = "gpuslice.io/health-ack"
)

// UserAnnotations lists them.
func UserAnnotations() []string {
	return []string{AnnotationKeepCordoned, AnnotationHold, AnnotationForce, AnnotationAllowEviction, AnnotationPreview, AnnotationHealthAck}
}

// ForceNow is the value of AnnotationForce for any change that the labels request.
const ForceNow = "now"

// RequestDiagnosis is the value of AnnotationPreview that requests a diagnosis: which pods and processes hold which GPU, and why the node is in its
// state.
const RequestDiagnosis = "diagnosis"

// RequestTop is the value of AnnotationPreview that requests each pod's use of GPUs and instances.
const RequestTop = "top"

// Annotations of the node that the agent writes.
const (
	// AnnotationStatus is compact JSON for tools: desired config, phase, and the instances of each GPU.
	AnnotationStatus = "gpuslice.io/status"
	// AnnotationPublished is JSON of the labels and taints that the agent has put on the node for a profile.
	AnnotationPublished = "gpuslice.io/published"
	// AnnotationJournal is what the agent must restore. It exists exactly while a restore is pending.
	AnnotationJournal = "gpuslice.io/journal"
	// AnnotationPlan is JSON of the answer to AnnotationPreview. The agent removes it together with the request.
	AnnotationPlan = "gpuslice.io/plan"
)

// Annotations of other tools, which the agent sets for the time of a change, unless they are there already. A drained node looks empty, and
// autoscalers remove empty nodes.
const (
	// AnnotationScaleDownDisabled keeps cluster-autoscaler from removing the node.
	AnnotationScaleDownDisabled = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	// AnnotationDoNotDisrupt keeps Karpenter from removing the node.
	AnnotationDoNotDisrupt = "karpenter.sh/do-not-disrupt"
	// AnnotationCordonReason is what Slinky's slurm-operator gives Slurm as the reason, when it drains the Slurm nodes of a cordoned node. The agent
	// sets it on nodes with pods of a NodeSet. Its own value begins with CordonReasonPrefix.
	AnnotationCordonReason = "nodeset.slinky.slurm.net/node-cordon-reason"
)

// LabelSlurmNodePrefix begins labels of a NodeSet's pods. Each of them is a Slurm node.
const LabelSlurmNodePrefix = "nodeset.slinky.slurm.net/"

// CordonReasonPrefix begins each value of AnnotationCordonReason that an agent has set.
const CordonReasonPrefix = "gpuslice: "

// FenceAnnotations lists the other tools' annotations that the agent sets during a change.
func FenceAnnotations() []string {
	return []string{AnnotationScaleDownDisabled, AnnotationDoNotDisrupt, AnnotationCordonReason}
}

// LeasePrefix and the pool's name make the name of the pool's Lease. By it the agents of a pool agree which nodes may be unavailable.
const LeasePrefix = "gpuslice-pool-"

// Annotations of the Lease of a pool.
const (
	// AnnotationSlots is JSON of the nodes that have a slot and those that wait for one. The agents write it.
	AnnotationSlots = "gpuslice.io/slots"
	// AnnotationPaused, with any value, keeps the pool's nodes from beginning a change. The agents set it after too many failures; users remove it.
	AnnotationPaused = "gpuslice.io/paused"
)

// Taints of the node. The agent's own have the effect NoSchedule; the effect of TaintGPUUnhealthy is a setting.
const (
	// TaintRepartitioning fences the node while its GPUs change.
	TaintRepartitioning = "gpuslice.io/repartitioning"
	// TaintNotReady is a startup taint: kubelet registers the node with it, and the agent removes it once the GPUs are as the labels request and the
	// capacity is verified. The settings may name a second one: Settings.StartupTaints are both.
	TaintNotReady = "gpuslice.io/not-ready"
	// TaintGPUUnhealthy keeps new pods off a node while one of its GPUs cannot be used or trusted, where the settings say so. With a value other than
	// ValueGPUUnhealthy it belongs to another user or program.
	TaintGPUUnhealthy = "gpuslice.io/gpu-unhealthy"
	ValueGPUUnhealthy = "critical"
)

// Conditions of KEP-5683: a tool shows all others what it does to a node.
const (
	// ConditionMaintenancePlanned is True while a change waits for its window.
	ConditionMaintenancePlanned = "MaintenancePlanned"
	// ConditionDrainInProgress is True while the agent evicts pods.
	ConditionDrainInProgress = "DrainInProgress"
	// ConditionDrained is True from when the pods that had to leave are gone until the node is restored.
	ConditionDrained = "Drained"
	// ConditionMaintenanceInProgress is True from the fence until the node is restored.
	ConditionMaintenanceInProgress = "MaintenanceInProgress"
)

// ConditionGPUPartitionReady is True when hardware and the node's allocatable are as the labels request.
const ConditionGPUPartitionReady = "GPUPartitionReady"

// ConditionGPUMemoryPressure is True while the memory of a GPU that several pods share is nearly full.
const ConditionGPUMemoryPressure = "GPUMemoryPressure"

// ConditionGPUUnhealthy is True while something is wrong with a GPU. It names the worst problem, and what to do.
const ConditionGPUUnhealthy = "GPUUnhealthy"

// Reason is why the agent does, waits for, or refuses something. Conditions, events, metrics and logs share the reasons, so that a search for one
// finds all. agent/REASONS.md and kubectl gpuslice explain are generated from the comments below.
type Reason string

// Reasons of a node at rest.
const (
	// ReasonNotRequested is given when no label requests anything: the GPUs stay unchanged.
	//
	// You can: request a config: kubectl gpuslice apply NODE --mig-config all-balanced.
	ReasonNotRequested Reason = "NotRequested"
	// ReasonConverged is given when hardware and allocatable are as the labels request, seen twice in a row.
	//
	// You can: use the node; nothing is left to do.
	ReasonConverged Reason = "Converged"
)

// Reasons why the agent refuses a request before it disturbs anything. The message says what would be possible.
const (
	// ReasonUnknownConfig is given when the catalog has no config with the name in the label.
	//
	// You can: set the label to one of the names in the message, or add the config to the ConfigMap of configs.
	ReasonUnknownConfig Reason = "UnknownConfig"
	// ReasonInvalidCatalog is given when a ConfigMap cannot be read, or when one of its configs, or one that the label spells out, cannot be meant for this node.
	//
	// You can: fix the ConfigMap at the line that the message names, or the label; kubectl gpuslice validate shows all mistakes at once.
	ReasonInvalidCatalog Reason = "InvalidCatalog"
	// ReasonImpossibleGeometry is given when a GPU cannot hold the instances that the config requests.
	//
	// You can: request fewer or smaller instances; the message says what fits.
	ReasonImpossibleGeometry Reason = "ImpossibleGeometry"
	// ReasonWrongMIGStrategy is given when the device plugin's MIG strategy does not fit the request: the plugin would exit, or not advertise it.
	// Where only the advertised resources show the strategy, the agent finds out while it awaits the capacity, and undoes the change.
	//
	// You can: give the device plugin the MIG strategy that the message names, or request a config that fits the plugin's.
	ReasonWrongMIGStrategy Reason = "WrongMIGStrategy"
	// ReasonNoHandover is given when the agent has no way to give the device plugin another config, or may not overwrite its ConfigMap key, which
	// another program has changed. It is an Event. Where something would start the plugin, the start waits for it.
	//
	// You can: give the device plugin a config by ConfigMap or by file, as deploy/README.md says; let the agent write the key that the message names.
	ReasonNoHandover Reason = "NoHandover"
	// ReasonNodeKeyConflict is given when the node has a label or taint of the profile with another value, which the agent did not set.
	//
	// You can: remove the label or taint from the node, or leave it out of the profile.
	ReasonNodeKeyConflict Reason = "NodeKeyConflict"
	// ReasonNoCapableGPU is given when a config requests MIG and none of the GPUs it names can do MIG, or a profile selects no GPU of this node.
	//
	// You can: remove the label from the node, or request a config for GPUs that this node has.
	ReasonNoCapableGPU Reason = "NoCapableGPU"
	// ReasonVirtualGPU is given when a label requests MIG or sharing of a vGPU, or sharing of a GPU that this host lends to virtual machines. Only
	// the host of its virtual machine can cut a vGPU, and one workload has it at a time.
	//
	// You can: cut the GPU on the host of the virtual machine, and remove the label from this node.
	ReasonVirtualGPU Reason = "VirtualGPU"
	// ReasonForeignOwner is given when a DRA driver keeps the agent from cutting the node's GPUs. NVIDIA's cuts them itself (DynamicMIG), advertises
	// them together with a device plugin, or advertises none yet, so that their owner is unknown; or another driver advertises them.
	//
	// You can: request MIG devices by claims of class mig.nvidia.com, and by the label only which GPUs are in MIG mode (all-enabled), or leave the node to the device plugin alone, as the message says.
	ReasonForeignOwner Reason = "ForeignOwner"
	// ReasonImpossibleSharing is given when the device plugin cannot share the node's resources as requested.
	//
	// You can: change the sharing in the profile or the config as the message says.
	ReasonImpossibleSharing Reason = "ImpossibleSharing"
)

// Reasons why a change does not begin yet, or does not continue.
const (
	// ReasonHeld is given while AnnotationHold keeps the node from any change.
	//
	// You can: let the node change again: kubectl gpuslice hold NODE --release.
	ReasonHeld Reason = "Held"
	// ReasonOlderRequest is given while the first agent on a node finds a label that was there before it, and the change would destroy instances or evict
	// pods. Whoever set the label may have asked another program, long ago.
	//
	// You can: run the command in the message to have the label applied, or remove the label.
	ReasonOlderRequest Reason = "OlderRequest"
	// ReasonInvalidMaintenance is given while the agent cannot read the maintenance file. It begins no change until it can.
	//
	// You can: fix the maintenance file; kubectl gpuslice validate shows the line.
	ReasonInvalidMaintenance Reason = "InvalidMaintenance"
	// ReasonAwaitingWindow is given while no open window is long enough for the change. The message and ConditionMaintenancePlanned say when the
	// change begins.
	//
	// You can: wait, or let this change begin at once: kubectl annotate node NODE gpuslice.io/force=now.
	ReasonAwaitingWindow Reason = "AwaitingWindow"
	// ReasonAwaitingSlot is given while the pool has its maximum of unavailable nodes; the message names them.
	//
	// You can: wait for the nodes that the message names; if one of them is stuck, fix it first, or delete its node object if it is gone for good.
	ReasonAwaitingSlot Reason = "AwaitingSlot"
	// ReasonPoolPaused is given while the pool is paused, after too many failures in a row or by a user.
	//
	// You can: fix the nodes that failed, then remove the annotation gpuslice.io/paused from the pool's Lease.
	ReasonPoolPaused Reason = "PoolPaused"
	// ReasonWindowClosed is given when the window closes, or is about to, before the agent has touched a GPU. It restores the node, and begins the
	// change again in the next window.
	//
	// You can: wait for the next window, or make the windows longer.
	ReasonWindowClosed Reason = "WindowClosed"
	// ReasonWindowOverrun is given, by an Event and in the condition's message, when a change runs past its window because its GPUs were already
	// touched.
	//
	// You can: let the change finish; make the windows longer if it happens again.
	ReasonWindowOverrun Reason = "WindowOverrun"
)

// Reasons while a change is under way, in the order of its steps.
const (
	// ReasonFencing is given while the agent cordons and taints the node.
	//
	// You can: wait; it takes seconds.
	ReasonFencing Reason = "Fencing"
	// ReasonEvicting is given while pods leave that hold devices about to change.
	//
	// You can: wait for the pods to end, or delete those that need no orderly end.
	ReasonEvicting Reason = "Evicting"
	// ReasonHoldersUnknown is given while the agent cannot know who holds a GPU: it cannot see the host's processes, or not read which devices resource
	// claims have. It evicts no pod until it can.
	//
	// You can: give the agent what the message names, as deploy/base does: the host's process table, or the right to read claims and slices.
	ReasonHoldersUnknown Reason = "HoldersUnknown"
	// ReasonOtherMaintenance is given while another tool works on the node (kured, a driver upgrade, an autoscaler, …). The agent names it, and waits
	// for it before the fence and before the uncordon.
	//
	// You can: let the tool that the message names finish, or stop it.
	ReasonOtherMaintenance Reason = "OtherMaintenance"
	// ReasonPausingOperands is given while the agent pauses operands of the GPU Operator by their labels.
	//
	// You can: wait; if an operand stays, see why its pod does not end.
	ReasonPausingOperands Reason = "PausingOperands"
	// ReasonStoppingUnits is given while the agent stops host units that keep GPUs open.
	//
	// You can: wait; if a unit keeps running, see systemctl status on the host.
	ReasonStoppingUnits Reason = "StoppingUnits"
	// ReasonEvictionBlocked is given when a pod cannot be evicted now, for example because its disruption budget is used up or a webhook denies it.
	// Before the cordon the node stays schedulable until the pod can be evicted.
	//
	// You can: make room in the disruption budget that the message names, or delete the pod. Or run the command at the start of the message: it lets
	// this change evict what would be lost. If a program lets the pod go or moves it behind a cordon, write a drain rule with action ask.
	ReasonEvictionBlocked Reason = "EvictionBlocked"
	// ReasonKubeletUnavailable is given while kubelet does not say which pod has which device. The agent evicts no pod until it does.
	//
	// You can: check that kubelet runs, and that the agent has its pod-resources socket.
	ReasonKubeletUnavailable Reason = "KubeletUnavailable"
	// ReasonNoDevicePlugin is given when neither a pod that the settings match nor NVIDIA's DRA driver advertises the node's GPUs, so that no
	// capacity could be verified. The message says why a device plugin may be missing, or which pod looks like one. Or when a taint of the node would keep
	// the plugin's pod, or the driver's, from starting again after the change.
	//
	// You can: find out why the node has no pod of the device plugin, add the toleration that the message names, or name the pod in devicePlugin of
	// the settings, as the message says.
	ReasonNoDevicePlugin Reason = "NoDevicePlugin"
	// ReasonGPUInUse is given when a process outside the evicted pods holds a device that will change. The message names its pid, its command, and
	// its pod, unit or container.
	//
	// You can: end the process that the message names, or name its unit in the settings.
	ReasonGPUInUse Reason = "GPUInUse"
	// ReasonNeedsReboot is given when a pending mode change takes effect only at a reboot of the node, as in virtual machines that do not let the
	// driver reset a GPU.
	//
	// You can: drain and reboot the node, unless the settings let the agent do it.
	ReasonNeedsReboot Reason = "NeedsReboot"
	// ReasonShuttingDown is given while the node shuts down: the agent begins no further change to a GPU.
	//
	// You can: wait until the node is back; the agent continues then.
	ReasonShuttingDown Reason = "ShuttingDown"
	// ReasonRepartitioning is given while the agent turns MIG mode on or off, and destroys and creates instances.
	//
	// You can: wait; it takes seconds for each GPU.
	ReasonRepartitioning Reason = "Repartitioning"
	// ReasonConfiguringPlugin is given while the agent gives the device plugin another config.
	//
	// You can: wait for the device plugin to start with its new config.
	ReasonConfiguringPlugin Reason = "ConfiguringPlugin"
	// ReasonPluginFailed is given when the device plugin keeps exiting on its new config, or MPS does not end. The agent restores the former config.
	//
	// You can: read the log of the device plugin's pod, and fix the config.
	ReasonPluginFailed Reason = "PluginFailed"
	// ReasonAwaitingCapacity is given while kubelet, or a ResourceSlice of NVIDIA's DRA driver, does not yet show the new devices.
	//
	// You can: wait; if it lasts for minutes, read the log of the device plugin's or DRA driver's pod.
	ReasonAwaitingCapacity Reason = "AwaitingCapacity"
	// ReasonCapacityMismatch is given when allocatable, or the DRA driver's ResourceSlices, still differ from the hardware at the deadline. Or
	// kubelet allocates devices of a device plugin that does not serve it. Or, on a node without a request, it allocates to others what a pod holds.
	// Or the plugin or driver advertises what is gone, as a whole GPU next to its MIG devices: if a restart does not cure that, no change begins.
	//
	// You can: read the log of the device plugin's or DRA driver's pod; if a plugin's log says "already connected", restart kubelet. Then remove the
	// label, and set it again. If the message names pods, delete them, or set a label so that the agent evicts them.
	ReasonCapacityMismatch Reason = "CapacityMismatch"
	// ReasonFinishing is given while the agent ends a change: it publishes the profile's labels and taints, restores the node, and returns its slot
	// to the pool.
	//
	// You can: wait; it takes seconds.
	ReasonFinishing Reason = "Finishing"
	// ReasonReleased is given, by an Event alone, when the node is uncordoned and everything is restored.
	//
	// You can: use the node; nothing is left to do.
	ReasonReleased Reason = "Released"
	// ReasonStaleResourcesRemoved is given, by an Event alone, when the agent has removed resources of former configs from the node object, as the
	// settings say.
	//
	// You can: ignore it; kubelet had them at 0.
	ReasonStaleResourcesRemoved Reason = "StaleResourcesRemoved"
	// ReasonInvalidSettings is given, by an Event alone, while the settings cannot be read. The agent keeps the former ones.
	//
	// You can: fix the settings at the line that the message names; kubectl gpuslice validate shows all mistakes at once.
	ReasonInvalidSettings Reason = "InvalidSettings"
	// ReasonKeyIgnored is given, by an Event alone, when the agent ignores a label or annotation of the node: another label overrides it, or its key
	// is a misspelt one of the agent's.
	//
	// You can: remove the key that the message names, or correct it as the message says.
	ReasonKeyIgnored Reason = "KeyIgnored"
)

// Reasons of the conditions of KEP-5683, which show other tools what the agent does to the node.
const (
	// ReasonMaintenanceWindow is given while MaintenancePlanned is True, since a change waits for its window.
	//
	// You can: wait; the message says when the change begins.
	ReasonMaintenanceWindow Reason = "MaintenanceWindow"
	// ReasonNotPlanned is given when MaintenancePlanned is False again, since no change waits for a window.
	//
	// You can: ignore it; there is nothing to do.
	ReasonNotPlanned Reason = "NotPlanned"
	// ReasonDrainStarted is given while DrainInProgress is True, since the agent evicts pods.
	//
	// You can: wait; the condition GPUPartitionReady names the pods.
	ReasonDrainStarted Reason = "DrainStarted"
	// ReasonDrainCompleted is given while Drained is True: the pods that had to leave are gone, and the node is not restored yet.
	//
	// You can: wait; the condition GPUPartitionReady shows the progress.
	ReasonDrainCompleted Reason = "DrainCompleted"
	// ReasonMaintenanceStarted is given while MaintenanceInProgress is True, from the fence until the node is restored.
	//
	// You can: wait; the condition GPUPartitionReady shows the progress.
	ReasonMaintenanceStarted Reason = "MaintenanceStarted"
	// ReasonNotInMaintenance is given when DrainInProgress, Drained or MaintenanceInProgress is False again.
	//
	// You can: ignore it; there is nothing to do.
	ReasonNotInMaintenance Reason = "NotInMaintenance"
)

// Reasons of ConditionGPUMemoryPressure, and of the Event about the pod that has filled a GPU.
const (
	// ReasonGPUMemorySufficient is given when no GPU or MIG instance that pods share is nearly full.
	//
	// You can: use the node; nothing is left to do.
	ReasonGPUMemorySufficient Reason = "GPUMemorySufficient"
	// ReasonGPUMemoryNearlyFull is given when one is. Sharing does not separate the pods' memory, so that any of them may be the next to get none.
	// The message names the pods and their MiB.
	//
	// You can: move or shrink the pods that the message names, before one of them fails.
	ReasonGPUMemoryNearlyFull Reason = "GPUMemoryNearlyFull"
	// ReasonGPUMemoryUnknown is given while the driver does not answer, or memoryPressure.threshold of the settings is 0.
	//
	// You can: check that the driver answers, or set memoryPressure.threshold of the settings.
	ReasonGPUMemoryUnknown Reason = "GPUMemoryUnknown"
)

// Reasons of Events about how pods use their GPUs.
const (
	// ReasonGPUIdle is given, by a Warning on the pod, when the pod has had a GPU or instance for idle.after and used less than idle.below per cent
	// of that. It is repeated after the same time, if that is still so.
	//
	// You can: end the pod, or give it a smaller instance or a shared one; kubectl gpuslice top --sort-by busy shows all such pods.
	ReasonGPUIdle Reason = "GPUIdle"
)

// Reasons of ConditionGPUUnhealthy, the worst first. Each but the last five is about one GPU.
const (
	// ReasonGPULost is given when a GPU has fallen off the bus. It heals when the GPU answers again.
	//
	// You can: drain and reboot the node; if it happens again, have the machine checked.
	ReasonGPULost Reason = "GPULost"
	// ReasonGPUMissing is given when the driver does not list a GPU that is on the PCI bus, or that it listed before. It heals when the driver lists
	// it.
	//
	// You can: reboot the node; if the GPU stays missing, have the machine checked. If the GPU was taken out, set the annotation
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
	// ReasonXidCritical is given when the driver has reported an error after which the GPU cannot be trusted, and the GPU's state does not show that
	// it is over.
	//
	// You can: end the pods on the GPU and reset it, or reboot the node. If you have seen the errors, set the annotation gpuslice.io/health-ack to
	// the time when you looked.
	ReasonXidCritical Reason = "XidCritical"
	// ReasonRowRemapFailed is given when a bad row of memory cannot be replaced. It does not heal.
	//
	// You can: run NVIDIA's field diagnostics, and have the GPU replaced.
	ReasonRowRemapFailed Reason = "RowRemapFailed"
	// ReasonSRAMThresholdExceeded is given when a GPU's SRAM has had more errors than NVIDIA allows. It does not heal.
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
	// ReasonUncorrectableECC is given when a GPU has had an uncorrectable memory error. It ends when the driver recommends an action, or none for
	// half a minute.
	//
	// You can: rerun what ran on the GPU then; reset the GPU when its pods have ended, unless the condition ends by itself.
	ReasonUncorrectableECC Reason = "UncorrectableECC"
	// ReasonModePending is given when ECC, or a MIG mode that the agent did not set, changes at the next reset.
	//
	// You can: reset the GPU when its pods have ended.
	ReasonModePending Reason = "ModePending"
	// ReasonFabricUnhealthy is given when a GPU is not well connected to its NVSwitch fabric.
	//
	// You can: check nvidia-fabricmanager, on the node or in the fabric.
	ReasonFabricUnhealthy Reason = "FabricUnhealthy"
	// ReasonRepeatedXid is given when programs of three pods on one GPU have had errors within an hour.
	//
	// You can: check the programs that the Events name; if they are unrelated, run NVIDIA's diagnostics on the GPU.
	ReasonRepeatedXid Reason = "RepeatedXid"
	// ReasonHealthUnknown is given, with the status Unknown, while the driver cannot be queried. If it is not loaded or does not answer, the reason
	// is ReasonDriverNotLoaded or ReasonDriverUnresponsive.
	//
	// You can: read the message, and the agent's log.
	ReasonHealthUnknown Reason = "HealthUnknown"
	// ReasonNoGPU is given, with the status False, when neither the driver nor the PCI bus has a GPU.
	//
	// You can: keep the agent off nodes without a GPU.
	ReasonNoGPU Reason = "NoGPU"
	// ReasonGPUsHealthy is given, with the status False, when all GPUs are well.
	//
	// You can: ignore it; there is nothing to do.
	ReasonGPUsHealthy Reason = "GPUsHealthy"
)

// Reasons of Events about the health of GPUs.
const (
	// ReasonGPUUnhealthy is given, by a Warning, when ConditionGPUUnhealthy becomes True, or its reason becomes worse.
	//
	// You can: see the condition GPUUnhealthy.
	ReasonGPUUnhealthy Reason = "GPUUnhealthy"
	// ReasonGPUHealthy is given when all GPUs are well again.
	//
	// You can: ignore it; there is nothing to do.
	ReasonGPUHealthy Reason = "GPUHealthy"
	// ReasonHealthAcknowledged is given when annotation gpuslice.io/health-ack has dropped reports of GPUs. The message says which program wrote the
	// annotation.
	//
	// You can: ignore it, if it was one of you; else have the GPUs reset or tested, and check who may patch nodes.
	ReasonHealthAcknowledged Reason = "HealthAcknowledged"
	// ReasonXidError is given, on the node and on the pods that have the GPU or instance, when the driver has reported an error that is not a
	// program's own.
	//
	// You can: see the condition GPUUnhealthy, and agent/monitor/health/README.md for the number.
	ReasonXidError Reason = "XidError"
	// ReasonApplicationXid is given only on the pods that have the GPU or instance, when one of their programs has made an error, or a contained
	// memory error stopped it.
	//
	// You can: read the pod's own log: its program made the error, or another one on the shared GPU did.
	ReasonApplicationXid Reason = "ApplicationXid"
	// ReasonRecoveryActionChanged is given when the driver recommends another action for a GPU.
	//
	// You can: see the condition GPUUnhealthy.
	ReasonRecoveryActionChanged Reason = "RecoveryActionChanged"
	// ReasonRowRemapped is given when a bad row of memory was replaced.
	//
	// You can: ignore it; the GPU has repaired itself.
	ReasonRowRemapped Reason = "RowRemapped"
	// ReasonPluginRestarted is given when the agent restarts the device plugin or NVIDIA's DRA driver because it advertises GPUs wrongly. Until its
	// next start it counts a GPU that has had an error as unhealthy, and advertises devices that are gone.
	//
	// You can: wait; the right devices are advertised in a moment.
	ReasonPluginRestarted Reason = "PluginRestarted"
	// ReasonHealthNotWatched is given when the driver delivers no events. The agent then sees only errors that the GPUs' state shows.
	//
	// You can: check the driver; an old one may not have events.
	ReasonHealthNotWatched Reason = "HealthNotWatched"
)

// Reasons of Events about what the agent's account may do. The agent reports them when it starts, and works anyway.
const (
	// ReasonUnconfined is given when no admission policy confines the agent to its own node, or the policies refuse all it writes. A Normal Event
	// follows when they confine it.
	//
	// You can: install the admission policies: kubectl apply -k deploy/policies.
	ReasonUnconfined Reason = "Unconfined"
	// ReasonMissingRight is given when the agent's account lacks a right that the settings or the agent's work need.
	//
	// You can: give the account the right that the message names, or turn the setting off.
	ReasonMissingRight Reason = "MissingRight"
)

// Reasons when something went wrong.
const (
	// ReasonJournalUnreadable is given when this agent cannot read the journal, for example because a newer one wrote it. It touches nothing until a
	// person has decided.
	//
	// You can: install the newer agent again; gpuslice-agent recover on the node shows what must be restored.
	ReasonJournalUnreadable Reason = "JournalUnreadable"
	// ReasonHostRecordUnavailable is given while the agent cannot read or write the host's record of what it must restore. It begins no change, and
	// restores the node if one was begun. The message says what to do.
	//
	// You can: make the host's folder readable and writable, as the message says.
	ReasonHostRecordUnavailable Reason = "HostRecordUnavailable"
	// ReasonDriverNotLoaded is given while NVIDIA's driver or library is missing, as during its upgrade. The agent waits for it.
	//
	// You can: wait for the driver's upgrade to end; otherwise check the driver's pod, or nvidia-smi on the host.
	ReasonDriverNotLoaded Reason = "DriverNotLoaded"
	// ReasonDriverUnresponsive is given while a call into the driver does not return.
	//
	// You can: search the host's kernel log for Xid errors; a GPU that hangs needs a reboot of the node.
	ReasonDriverUnresponsive Reason = "DriverUnresponsive"
	// ReasonHardwareFailure is given when the driver refuses a step, and waiting cannot help.
	//
	// You can: check the GPU's health and the host's kernel log; then remove the label, and set it again.
	ReasonHardwareFailure Reason = "HardwareFailure"
	// ReasonStepFailed is given when a step other than a driver call has failed so often that the agent gives up the change. The message says which
	// step, and why.
	//
	// You can: fix the cause in the message; then remove the label, and set it again.
	ReasonStepFailed Reason = "StepFailed"
	// ReasonStepHadNoEffect is given when a step has reported success several times and is still needed, or another program keeps undoing what the agent
	// has done: the agent then does it again ever less often.
	//
	// You can: end the program that the message is about; or read the host's kernel log, then remove the label, and set it again.
	ReasonStepHadNoEffect Reason = "StepHadNoEffect"
	// ReasonRetrying is given when a step failed for a cause that may pass; the agent retries it.
	//
	// You can: wait; if the cause in the message stays, fix it.
	ReasonRetrying Reason = "Retrying"
	// ReasonCancelled is given when a user or another tool lifts the agent's cordon during a change, which cancels the change.
	//
	// You can: to have the change anyway, remove the label and set it again.
	ReasonCancelled Reason = "Cancelled"
	// ReasonRecovering is given while the agent restores what it left on the node without a journal.
	//
	// You can: wait; the node is restored in a moment.
	ReasonRecovering Reason = "Recovering"
	// ReasonUnitFailed is given when a host unit does not stop, which undoes the change, or does not start again.
	//
	// You can: check the unit on the host by systemctl status and journalctl -u, and fix it.
	ReasonUnitFailed Reason = "UnitFailed"
	// ReasonRollingBack is given while the agent restores the former state of the GPUs after it gave up a change.
	//
	// You can: wait; the message has the reason of the failure, and keeps it.
	ReasonRollingBack Reason = "RollingBack"
)

// OwnPluginKey begins the keys that agents write into the ConfigMap of the device plugin's config manager. The UID of the agent's node follows: all
// nodes share the ConfigMap, and no agent may write another's keys. Last is a hash of the config: an edited key is never read again, another one is.
const OwnPluginKey = "gpuslice-"
