package plan

import (
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Kind names what a step does.
type Kind string

// The kinds of steps, about in the order of a change; Make has the order of a plan. Within the change of one GPU, instances are destroyed before MIG
// mode is turned off and created after it is turned on. Where NVIDIA's DRA driver advertises the GPUs, the steps that pause or restart the device
// plugin's pods do that with the driver's.
const (
	// Record writes the journal without a fence: for a change that disrupts no pod, or before a fenced change takes something more that it has to
	// restore.
	Record Kind = "Record"
	// Adopt writes a journal for what an agent has left on the node without one, so that the agent restores it like any change.
	Adopt Kind = "Adopt"
	// AcquireSlot waits until the node's pool gives it a slot.
	AcquireSlot Kind = "AcquireSlot"
	// Close writes the journal, and closes to claims only the devices that go, while their holders leave. Fence follows before a GPU is touched.
	Close Kind = "Close"
	// Fence writes the journal, the cordon and the taint in one guarded update. Where NVIDIA's DRA driver advertises the GPUs, it writes the taint only if
	// pods of DaemonSets have to stay away.
	Fence Kind = "Fence"
	// Evict evicts the pods that hold a device which the plan removes, and is over when they are gone.
	Evict Kind = "Evict"
	// PauseOperands changes the label that deploys operands, so that these end, and is over when they are gone. Without a label it evicts the device
	// plugin and other clients of the library; the fence's taint then keeps them away.
	PauseOperands Kind = "PauseOperands"
	// StopUnits stops one systemd unit of the host that keeps GPUs open.
	StopUnits Kind = "StopUnits"
	// SetMode turns MIG mode on or off, which may stay pending until Reset.
	SetMode Kind = "SetMode"
	// DropPersistence turns persistence mode off before a Reset: the driver does not reset a GPU in that mode.
	DropPersistence Kind = "DropPersistence"
	// RestorePersistence turns persistence mode on again after the Reset.
	RestorePersistence Kind = "RestorePersistence"
	// Reset makes a pending mode change current.
	Reset Kind = "Reset"
	// Heal resets a GPU that is not well, because its driver recommends that, and makes a pending mode current besides.
	Heal Kind = "Heal"
	// Destroy removes one instance, or one compute instance of an instance that stays.
	Destroy Kind = "Destroy"
	// Create creates one instance at its place, or one compute instance in an existing instance.
	Create Kind = "Create"
	// Park uncordons the node and leaves the journal: the change continues after the next reboot.
	Park Kind = "Park"
	// AskReboot asks for a reboot by the sentinel file.
	AskReboot Kind = "AskReboot"
	// Reboot reboots the node once for a pending mode; if the settings delegate that, it waits until another tool or a user has rebooted it.
	Reboot Kind = "Reboot"
	// WriteSharing gives the device plugin another config, and is over when its readers can see it.
	WriteSharing Kind = "WriteSharing"
	// RegenerateCDI rewrites the CDI specs that describe the GPUs before the change.
	RegenerateCDI Kind = "RegenerateCDI"
	// StartUnits starts one unit again.
	StartUnits Kind = "StartUnits"
	// ResumeOperands restores a label's former value. Without a label it removes the taint and leaves the cordon: pods of DaemonSets come back,
	// others do not.
	ResumeOperands Kind = "ResumeOperands"
	// RestartOperands evicts a device plugin that started before the change, since it reads the layout only at its start.
	RestartOperands Kind = "RestartOperands"
	// RestartPlugin evicts a device plugin that does not advertise the current GPUs. Until it restarts, it takes a recovered GPU for unhealthy, and
	// advertises the layout that it once read.
	RestartPlugin Kind = "RestartPlugin"
	// RestartLatePlugin evicts a device plugin if kubelet still lacks its devices after half of the time that verification may take: kubelet was once
	// seen to forget a registered plugin.
	RestartLatePlugin Kind = "RestartLatePlugin"
	// ReloadPlugin makes the device plugin's pods read the present config, if they run by a former one.
	ReloadPlugin Kind = "ReloadPlugin"
	// SetComputeMode sets the default compute mode on a GPU that an ended MPS daemon has left in exclusive-process mode.
	SetComputeMode Kind = "SetComputeMode"
	// VerifyCapacity is over when NVML, kubelet and the node's allocatable agree, twice in a row.
	VerifyCapacity Kind = "VerifyCapacity"
	// PublishNodeKeys sets the profile's labels and taints, and removes those of the former profile.
	PublishNodeKeys Kind = "PublishNodeKeys"
	// Release removes the journal, the taint and the agent's cordon in one guarded update.
	Release Kind = "Release"
	// ReleaseSlot returns the node's slot to the pool.
	ReleaseSlot Kind = "ReleaseSlot"
)

// Kinds returns all kinds of steps, sorted by their names.
func Kinds() []Kind { return slices.Sorted(maps.Keys(kinds)) }

// Traits are what is true of every step of a kind. Code that treats several kinds differently asks for a trait: a new kind then needs a row here, a
// case in the planner, and an executor.
type Traits struct {
	// Text writes the step as plans, logs and goldens show it.
	Text func(s Step) string
	// Apply returns the GPU as the step leaves it; nil if the step changes no GPU. A step that names no GPU is for all.
	Apply func(s Step, gpu nvml.GPU) nvml.GPU

	// Stage is the part of a change that it belongs to.
	Stage Stage
	// Disrupts: it takes something from pods or from the host.
	Disrupts bool
	// Begins: it begins a change, which a hold on the node forbids.
	Begins bool
	// BeforePodsLeft: while it is the next step, holders of devices that go may still be there.
	BeforePodsLeft bool
	// AsksBudgets: it asks whether pods may be evicted, so the agent watches their disruption budgets while it waits.
	AsksBudgets bool
	// DryRun: before the change disturbs anything, the agent checks by a dry run whether the step's pods may be evicted.
	DryRun bool
	// ComesBack: its pods come back by themselves, so the agent checks them only if all others may go.
	ComesBack bool
	// ShapesPlugin: it changes what the device plugin reads when it starts, and never again.
	ShapesPlugin bool
	// StartsPlugin: the device plugin may start after it, and then reads its config.
	StartsPlugin bool
	// ReachesTarget: it carries out a part of the request, so a change beyond it is as short to finish as to undo.
	ReachesTarget bool
	// HoldersKnown: it ends processes on the GPU, so the agent must know the holders first.
	HoldersKnown bool
	// TakesFromHost: if the agent is killed, only the host's record says what the step took from the host.
	TakesFromHost bool
	// OnlyObserves: it changes nothing, so it may rest on the watches.
	OnlyObserves bool
	// Restores: it removes nothing, and names the version of what it changes, so it may rest on the watches.
	Restores bool
	// OnlyAdds: it takes no device from a pod, so in the middle of a change it may rest on the watches. At worst it adds what the label requested a
	// moment ago.
	OnlyAdds bool
	// Bounded: the agent gives up a change if this step keeps failing.
	Bounded bool
	// Repeatable: it succeeds at once, and a user or another tool may undo it right away. The agent gives up a change that repeats it in vain.
	Repeatable bool
	// PartOfVerify: the wait for capacity continues while it is the next step.
	PartOfVerify bool
	// WaitsAsOne: all steps of the kind share one wait and one deadline.
	WaitsAsOne bool
	// Wait is what it waits for besides pods.
	Wait Wait
}

// TouchesGPU says whether the step changes the hardware.
func (t Traits) TouchesGPU() bool { return t.Stage == StageHardware }

// Stage is a part of a change.
type Stage int

// The stages of a change, about in their order. The exceptions:
//   - Close, and the Evict of the pods that hold the closed devices, come before Fence.
//   - To end MPS before a GPU is cut, WriteSharing, ReloadPlugin and SetComputeMode come before the hardware. Otherwise SetComputeMode comes after the
//     restoring steps, and with MPS or under claims ReloadPlugin, too.
//   - If a mode waits for a reboot, Create and RestorePersistence come after it. If the agent reboots the node itself, an Evict comes right before it.
//   - Under claims, ResumeOperands by a label comes after VerifyCapacity.
//   - VerifyCapacity and PublishNodeKeys come before the ResumeOperands of a node that has just been registered and is as desired.
//   - Park and its AskReboot come after VerifyCapacity and PublishNodeKeys.
const (
	// StageOpen comes before any disturbance, so the agent checks in it whether the change can succeed.
	StageOpen Stage = iota + 1
	// StageDrain: pods, operands and units leave.
	StageDrain
	// StageHardware changes a GPU.
	StageHardware
	// StageReboot waits until the host is rebooted.
	StageReboot
	// StageConfigure gives the device plugin its config.
	StageConfigure
	// StageRestore restores what the change has removed.
	StageRestore
	// StageVerify verifies the capacity, publishes the profile's labels and taints, and releases the node.
	StageVerify
)

// Wait is what a step waits for, and so how long it may take.
type Wait int

// The waits of steps. A step with WaitNone ends at once, or when pods have left.
const (
	WaitNone Wait = iota
	WaitDriver
	WaitUnit
	WaitReboot
	WaitCapacity
)

// kinds has a row for each kind.
var kinds = map[Kind]Traits{
	AcquireSlot: {Stage: StageOpen, Text: fixedText("take a slot of the pool"), AsksBudgets: true},
	Record:      {Stage: StageOpen, Text: fixedText("record: journal"), Begins: true, BeforePodsLeft: true, AsksBudgets: true},
	Adopt:       {Stage: StageOpen, Text: fixedText("adopt what was left: journal"), AsksBudgets: true},
	Fence: {
		Stage: StageOpen,
		Text:  Step.fence, Begins: true, BeforePodsLeft: true, AsksBudgets: true, Repeatable: true,
	},
	Close: {
		Stage:  StageOpen,
		Text:   func(s Step) string { return "close to claims, with journal: " + strings.Join(s.Devices, ", ") },
		Begins: true, BeforePodsLeft: true, AsksBudgets: true, Bounded: true, Repeatable: true,
	},
	Evict: {
		Stage:    StageDrain,
		Text:     func(s Step) string { return "evict " + withClaims(s.Pods) },
		Disrupts: true, BeforePodsLeft: true, AsksBudgets: true, DryRun: true, WaitsAsOne: true,
	},
	PauseOperands: {
		Stage: StageDrain, Text: Step.pause,
		Disrupts: true, AsksBudgets: true, DryRun: true, ComesBack: true, Repeatable: true, WaitsAsOne: true,
	},
	StopUnits: {
		Stage:    StageDrain,
		Text:     func(s Step) string { return "stop unit " + s.Unit },
		Disrupts: true, TakesFromHost: true, Bounded: true, Repeatable: true, Wait: WaitUnit,
	},
	SetMode: {
		Stage: StageHardware,
		Text:  onGPU(func(s Step) string { return "turn MIG " + onOff(s.On) }), Apply: Step.withMode,
		Disrupts: true, Begins: true, ShapesPlugin: true, ReachesTarget: true, HoldersKnown: true, TakesFromHost: true, Bounded: true,
		Wait: WaitDriver,
	},
	DropPersistence: {
		Stage: StageHardware,
		Text:  onGPU(fixedText("turn persistence mode off")), Apply: withPersistence(false),
		Disrupts: true, Begins: true, ShapesPlugin: true, ReachesTarget: true, TakesFromHost: true, Bounded: true, Wait: WaitDriver,
	},
	Reset: {
		Stage: StageHardware,
		Text:  onGPU(fixedText("reset")), Apply: withPending,
		Disrupts: true, Begins: true, ShapesPlugin: true, ReachesTarget: true, HoldersKnown: true, TakesFromHost: true, Bounded: true,
		Wait: WaitDriver,
	},
	Heal: {
		Stage: StageHardware,
		Text:  onGPU(fixedText("reset, since it is not well")), Apply: withPending,
		Disrupts: true, Begins: true, ShapesPlugin: true, ReachesTarget: true, HoldersKnown: true, TakesFromHost: true, Bounded: true,
		Wait: WaitDriver,
	},
	Destroy: {
		Stage: StageHardware,
		Text:  onGPU(func(s Step) string { return "destroy " + s.what() }), Apply: Step.withInstances,
		Disrupts: true, Begins: true, ShapesPlugin: true, ReachesTarget: true, HoldersKnown: true, Bounded: true, Wait: WaitDriver,
	},
	Create: {
		Stage: StageHardware,
		Text:  onGPU(func(s Step) string { return "create " + s.what() }), Apply: Step.withInstances,
		Begins: true, ShapesPlugin: true, ReachesTarget: true, OnlyAdds: true, Bounded: true, Wait: WaitDriver,
	},
	RestorePersistence: {
		Stage: StageHardware,
		Text:  onGPU(fixedText("turn persistence mode on")), Apply: withPersistence(true),
		Begins: true, ShapesPlugin: true, ReachesTarget: true, Wait: WaitDriver,
	},
	Park:      {Stage: StageReboot, Text: fixedText("park: give the node back until it is rebooted")},
	AskReboot: {Stage: StageReboot, Text: fixedText("ask for a reboot"), Bounded: true},
	Reboot:    {Stage: StageReboot, Text: fixedText("reboot the node"), Apply: withPending, TakesFromHost: true, Wait: WaitReboot},
	WriteSharing: {
		Stage:  StageConfigure,
		Text:   func(s Step) string { return "set the device plugin's config: " + s.Config },
		Begins: true, ReachesTarget: true, Bounded: true,
	},
	RegenerateCDI: {
		Stage: StageRestore, Text: func(s Step) string { return "regenerate CDI spec " + strings.Join(s.Files, ", ") },
		Bounded: true, Restores: true,
	},
	StartUnits:     {Stage: StageRestore, Text: func(s Step) string { return "start unit " + s.Unit }, Restores: true, Wait: WaitUnit},
	ResumeOperands: {Stage: StageRestore, Text: Step.resume, StartsPlugin: true, Restores: true},
	RestartPlugin: {
		Stage: StageRestore,
		Text: func(s Step) string {
			return "restart " + plugins(s.Pods) + ", which does not advertise the current GPUs"
		},
		Begins: true, StartsPlugin: true, AsksBudgets: true,
	},
	RestartLatePlugin: {
		Stage: StageRestore,
		Text: func(s Step) string {
			if byDriver(s.Pods) {
				return "restart " + plugins(s.Pods) + ": its ResourceSlices still do not match the GPUs"
			}
			return "restart " + plugins(s.Pods) + ": kubelet still lacks its devices"
		},
		StartsPlugin: true, AsksBudgets: true, PartOfVerify: true,
	},
	RestartOperands: {
		Stage: StageRestore, Text: func(s Step) string { return "restart " + plugins(s.Pods) },
		StartsPlugin: true, AsksBudgets: true, DryRun: true, ComesBack: true,
	},
	ReloadPlugin: {Stage: StageConfigure, Text: fixedText("have the device plugin read its config"), AsksBudgets: true, Bounded: true, Restores: true},
	SetComputeMode: {
		Stage: StageHardware,
		Text:  onGPU(fixedText("let any process compute on it")), Apply: withComputeDefault,
		Begins: true, ReachesTarget: true, Bounded: true,
	},
	VerifyCapacity:  {Stage: StageVerify, Text: fixedText("verify capacity"), OnlyObserves: true, PartOfVerify: true, Wait: WaitCapacity},
	PublishNodeKeys: {Stage: StageVerify, Text: fixedText("publish the profile's labels and taints"), Begins: true, Bounded: true, Repeatable: true},
	Release:         {Stage: StageVerify, Text: fixedText("release: give the node back")},
	ReleaseSlot:     {Stage: StageVerify, Text: fixedText("give the slot of the pool back")},
}

func fixedText(text string) func(Step) string { return func(Step) string { return text } }
