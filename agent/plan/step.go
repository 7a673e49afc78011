package plan

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Kind names what a step does.
type Kind string

// The kinds of steps, in the order in which a plan holds them. Within the change of one GPU, instances are destroyed
// before MIG mode is turned off and created after it is turned on.
const (
	// Record writes the journal, for a change that disrupts nobody.
	Record Kind = "Record"
	// Adopt writes a journal for what an agent has left on the node without one, so that it is given back like any change.
	Adopt Kind = "Adopt"
	// AcquireSlot waits until the node's pool can do without it.
	AcquireSlot Kind = "AcquireSlot"
	// Fence writes the journal, the cordon and the taint in one guarded update.
	Fence Kind = "Fence"
	// Evict asks the pods that hold what the plan takes away to leave, and is over when they are gone.
	Evict Kind = "Evict"
	// PauseOperands sends away the operands that a label deploys by changing the label, and is over when they are gone. Without
	// a label it evicts the device plugin and other clients of the library, which the taint of the fence keeps away.
	PauseOperands Kind = "PauseOperands"
	// StopUnits stops one unit of the host that keeps GPUs open.
	StopUnits Kind = "StopUnits"
	// SetMode turns MIG mode on or off, which may stay pending until Reset.
	SetMode Kind = "SetMode"
	// SetPersistence turns persistence mode off before a Reset, which it stands in the way of, and on again after it.
	SetPersistence Kind = "SetPersistence"
	// Reset makes a pending mode change current.
	Reset Kind = "Reset"
	// Destroy removes one instance, or one compute instance of an instance that stays.
	Destroy Kind = "Destroy"
	// Create makes one instance at its place, or one compute instance in an instance that stands.
	Create Kind = "Create"
	// Park uncordons the node and leaves the journal: what is left to do comes with the next reboot.
	Park Kind = "Park"
	// AskReboot asks for a reboot by the sentinel file.
	AskReboot Kind = "AskReboot"
	// Reboot reboots the node once for what is pending, or is over when somebody who was asked has done so.
	Reboot Kind = "Reboot"
	// WriteSharing gives the device plugin another config, and is over when its readers can see it.
	WriteSharing Kind = "WriteSharing"
	// RegenerateCDI writes the CDI specs anew that describe the GPUs as they were.
	RegenerateCDI Kind = "RegenerateCDI"
	// StartUnits starts one unit again.
	StartUnits Kind = "StartUnits"
	// ResumeOperands gives a label its former value again. Without a label it takes the taint away and leaves the cordon: pods
	// of DaemonSets come back, others do not.
	ResumeOperands Kind = "ResumeOperands"
	// RestartOperands evicts a device plugin that started before the change, since it reads the layout only at its start.
	RestartOperands Kind = "RestartOperands"
	// ReloadPlugin makes those read the plugin's config who run by a former one.
	ReloadPlugin Kind = "ReloadPlugin"
	// SetComputeMode lets any process compute on a GPU again that MPS has left to its daemon alone, when that is gone.
	SetComputeMode Kind = "SetComputeMode"
	// VerifyCapacity is over when NVML, kubelet and the node's allocatable agree, twice in a row.
	VerifyCapacity Kind = "VerifyCapacity"
	// PublishNodeKeys sets the labels and taints of the profile, and takes those of the former away.
	PublishNodeKeys Kind = "PublishNodeKeys"
	// Release takes the journal, the taint and our cordon away in one guarded update.
	Release Kind = "Release"
	// ReleaseSlot lets another node of the pool have its turn.
	ReleaseSlot Kind = "ReleaseSlot"
)

// Step is one idempotent action. A plan is a list of them.
type Step struct {
	Kind     Kind
	GPU      nvml.UUID   // of SetMode, SetPersistence, SetComputeMode, Reset, Destroy and Create
	Index    int         // the same GPU by its position, as people name it
	On       bool        // of SetMode and SetPersistence
	Instance nvml.Placed // of Destroy and Create; if these are about a part of it, it does not say how it is divided
	Part     nvml.Part   // of Destroy and Create, if these are about one compute instance; else zero
	Pods     []Pod       // of Evict, PauseOperands and RestartOperands
	Files    []string    // of RegenerateCDI
	Label    string      // of PauseOperands and ResumeOperands, where they work by label
	Unit     string      // of StopUnits and StartUnits
	Config   string      // of WriteSharing: names the config
}

// String writes the step as plans, logs and goldens show it.
func (s Step) String() string {
	if s.TouchesGPU() {
		return fmt.Sprintf("GPU %d: %s", s.Index, s.onGPU())
	}
	switch s.Kind {
	case AcquireSlot, ReleaseSlot:
		return s.onSlot()
	case Record, Adopt, Fence:
		return s.onJournal()
	case Evict:
		return "evict " + names(s.Pods)
	case PauseOperands, ResumeOperands, StopUnits, StartUnits:
		return s.onClients()
	case Park:
		return "park: give the node back until it is rebooted"
	case AskReboot:
		return "ask for a reboot"
	case Reboot:
		return "reboot the node"
	case WriteSharing, ReloadPlugin, RestartOperands:
		return s.onPlugin()
	case PublishNodeKeys:
		return "publish the profile's labels and taints"
	case RegenerateCDI:
		return "regenerate CDI spec " + strings.Join(s.Files, ", ")
	case VerifyCapacity:
		return "verify capacity"
	case Release:
		return "release: give the node back"
	default:
		return string(s.Kind)
	}
}

func (s Step) onJournal() string {
	switch s.Kind {
	case Record:
		return "record: journal"
	case Adopt:
		return "adopt what was left: journal"
	default:
		return "fence: journal, cordon, taint"
	}
}

func (s Step) onSlot() string {
	if s.Kind == AcquireSlot {
		return "take a slot of the pool"
	}
	return "give the slot of the pool back"
}

func (s Step) onPlugin() string {
	switch s.Kind {
	case WriteSharing:
		return "set the device plugin's config: " + s.Config
	case ReloadPlugin:
		return "have the device plugin read its config"
	default:
		return "restart device plugin " + names(s.Pods)
	}
}

func (s Step) onClients() string {
	switch {
	case s.Kind == StopUnits:
		return "stop unit " + s.Unit
	case s.Kind == StartUnits:
		return "start unit " + s.Unit
	case s.Kind == PauseOperands && s.Label != "":
		return "pause " + s.Label
	case s.Kind == PauseOperands:
		return "pause device plugin " + names(s.Pods)
	case s.Label != "":
		return "resume " + s.Label
	default:
		return "resume device plugin"
	}
}

func (s Step) onGPU() string {
	switch s.Kind {
	case SetMode:
		return "turn MIG " + onOff(s.On)
	case SetPersistence:
		return "turn persistence mode " + onOff(s.On)
	case SetComputeMode:
		return "let any process compute on it"
	case Reset:
		return "reset"
	case Destroy:
		return "destroy " + s.what()
	default:
		return "create " + s.what()
	}
}

// what is destroyed or created: "3g.40gb@4", or "1c@2 in 3g.40gb@4".
func (s Step) what() string {
	if !s.OnPart() {
		return s.Instance.String()
	}
	return s.Part.String() + " in " + s.Instance.String()
}

// OnPart reports whether the step is about one compute instance of an instance that stays.
func (s Step) OnPart() bool { return s.Part != nvml.Part{} }

// TouchesGPU reports whether the step changes the hardware.
func (s Step) TouchesGPU() bool {
	switch s.Kind {
	case SetMode, SetPersistence, SetComputeMode, Reset, Destroy, Create:
		return true
	case Record, Adopt, AcquireSlot, ReleaseSlot, Fence, Evict, PauseOperands, StopUnits, Park, AskReboot, Reboot, WriteSharing, RegenerateCDI, StartUnits, ResumeOperands,
		RestartOperands, ReloadPlugin, VerifyCapacity, PublishNodeKeys, Release:
		return false
	default:
		return false
	}
}

// Touches reports whether any of the steps changes the hardware.
func Touches(steps []Step) bool { return slices.ContainsFunc(steps, Step.TouchesGPU) }

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

func names(pods []Pod) string {
	out := make([]string, len(pods))
	for i, p := range pods {
		out[i] = p.Namespace + "/" + p.Name
	}
	return strings.Join(out, ", ")
}
