// Package verdict decides whether the GPUs of a node are healthy, by what their driver, its events and the PCI bus report. It calls nothing, writes
// nothing and has no clock: the monitor hands it each observation with its time, and asks for the verdict.
package verdict

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Severity says how much a GPU can still be used.
type Severity string

// The severities.
const (
	Critical Severity = "critical" // it cannot be used or trusted
	Degraded Severity = "degraded" // it works, and something is due
)

// Action is what to do, in one word for tools.
type Action string

// The actions.
const (
	ActionNone             Action = "None"
	ActionResetGPU         Action = "ResetGPU"
	ActionRebootNode       Action = "RebootNode"
	ActionDrainAndReset    Action = "DrainAndReset"
	ActionRecoverIMEX      Action = "RecoverIMEX"
	ActionResetBus         Action = "ResetBus"
	ActionRebootMachine    Action = "RebootMachine"
	ActionContactSupport   Action = "ContactSupport"
	ActionCheckMechanicals Action = "CheckMechanicals"
	ActionCheckFabric      Action = "CheckFabric"
	ActionRunDiagnostics   Action = "RunDiagnostics"
)

// reasons has everything that may be wrong with a GPU, the worst first.
var reasons = []struct {
	reason   config.Reason
	severity Severity
	action   Action
	phrase   string // "GPU 3 … has fallen off the bus"
	advice   string // for people: who does what
}{
	{
		config.ReasonGPULost, Critical, ActionRebootNode, "has fallen off the bus: it does not answer",
		"end its pods, then reboot the node; have the machine inspected if it happens again; the agent does not recover it",
	},
	{
		config.ReasonGPUMissing, Critical, ActionRebootNode, "is missing: the driver does not report it",
		"reboot the node; have the machine inspected if the GPU stays missing",
	},
	{
		config.ReasonRebootRequired, Critical, ActionRebootNode, "needs a reboot", "drain the node and reboot it; the agent does not reboot it for this",
	},
	{
		config.ReasonResetRequired, Critical, ActionResetGPU, "needs a reset",
		"end its pods, then reset it, or reboot the node; the agent does not reset it",
	},
	{
		config.ReasonDrainRequired, Critical, ActionDrainAndReset, "has to be drained",
		"let its pods end, start no others on it, then reset it, or reboot the node",
	},
	{
		config.ReasonXidCritical, Critical, ActionResetGPU, "has reported an error that is not known to be over",
		"end its pods, then reset it, or reboot the node; or inspect it and set annotation " + config.AnnotationHealthAck + " of the node to that time",
	},
	{
		config.ReasonRowRemapFailed, Critical, ActionContactSupport, "has a row of memory that cannot be replaced",
		"no reset helps; run NVIDIA's field diagnostics and have the GPU replaced",
	},
	{
		config.ReasonSRAMThresholdExceeded, Critical, ActionContactSupport, "has had more SRAM errors than NVIDIA tolerates",
		"no reset helps; run NVIDIA's field diagnostics and have the GPU replaced",
	},
	{
		config.ReasonMemoryUnrepairable, Critical, ActionContactSupport, "has memory that can no longer be repaired",
		"no reset helps; run NVIDIA's field diagnostics and have the GPU replaced",
	},
	{
		config.ReasonRowRemapPending, Degraded, ActionResetGPU, "replaces a bad row of memory at its next reset",
		"new work is safe; reset it when its pods have ended",
	},
	{
		config.ReasonRepairPending, Degraded, ActionResetGPU, "repairs itself at its next reset",
		"new work is safe; reset it when its pods have ended",
	},
	{
		config.ReasonPageRetirementPending, Degraded, ActionResetGPU, "drops a bad page of memory at the next load of its driver",
		"new work is safe; reset it when its pods have ended",
	},
	{
		config.ReasonUncorrectableECC, Degraded, ActionResetGPU, "has had an uncorrectable memory error",
		"programs that ran on it then may have wrong results; reset it when its pods have ended, unless the driver reports that the error is over",
	},
	{
		config.ReasonModePending, Degraded, ActionResetGPU, "has a mode that changes at its next reset", "reset it when its pods have ended",
	},
	{
		config.ReasonFabricUnhealthy, Degraded, ActionCheckFabric, "is not well connected to its NVSwitch fabric",
		"check nvidia-fabricmanager on this node or the fabric's",
	},
	{
		config.ReasonRepeatedXid, Degraded, ActionRunDiagnostics, "has had errors of several pods within an hour",
		"the programs may be at fault; if they are unrelated, run NVIDIA's diagnostics on the GPU",
	},
}

// rank is the place of a reason among the others; a smaller one is worse.
func rank(r config.Reason) int {
	for i, known := range reasons {
		if known.reason == r {
			return i
		}
	}
	return len(reasons)
}

// Finding is something that is wrong with a GPU.
type Finding struct {
	Reason config.Reason
	Action Action
	Detail string // after the phrase of the reason, as ": recovery action 1 (GPU reset)"
	// Instances are the numbers of the GPU instances that the finding is about; none for the whole GPU.
	Instances []int
	Since     time.Time

	settles         bool      // it ends by itself: within settleTime the driver recommends an action, or the error is over
	readingsWithout int       // readings in a row that did not show it any more
	lastWithout     time.Time // the last of these
}

// Severity says how much its GPU can still be used.
func (f Finding) Severity() Severity { return reasons[rank(f.Reason)].severity }

// Phrase is what follows the GPU's name: "has fallen off the bus: it does not answer".
func (f Finding) Phrase() string { return reasons[rank(f.Reason)].phrase + f.Detail }

// Advice says who does what about it.
func (f Finding) Advice() string {
	if f.Action == ActionContactSupport && f.Reason == config.ReasonResetRequired {
		return "ask NVIDIA's support what this action means, or run a newer agent"
	}
	return reasons[rank(f.Reason)].advice
}

// Worse reports whether a GPU is worse off by the first reason than by the second.
func Worse(a, b config.Reason) bool { return rank(a) < rank(b) }

// sortFindings puts the worst first.
func sortFindings(all []Finding) {
	slices.SortFunc(all, func(a, b Finding) int { return cmp.Compare(rank(a.Reason), rank(b.Reason)) })
}

// recoveries maps the recovery action that a driver recommends to a reason and an action.
var recoveries = map[nvml.RecoveryAction]struct {
	reason config.Reason
	action Action
}{
	nvml.RecoverByReset:         {config.ReasonResetRequired, ActionResetGPU},
	nvml.RecoverByReboot:        {config.ReasonRebootRequired, ActionRebootNode},
	nvml.RecoverByDrainingP2P:   {config.ReasonDrainRequired, ActionDrainAndReset},
	nvml.RecoverByDrainAndReset: {config.ReasonDrainRequired, ActionDrainAndReset},
	nvml.RecoverIMEX:            {config.ReasonDrainRequired, ActionRecoverIMEX},
	nvml.RecoverByBusReset:      {config.ReasonResetRequired, ActionResetBus},
	nvml.RecoverByMachineReboot: {config.ReasonRebootRequired, ActionRebootMachine},
}
