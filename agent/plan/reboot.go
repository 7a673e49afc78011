package plan

import (
	"errors"

	"github.com/gpuslice/gpuslice/nvml"
)

// Reboots says which mode changes need a reboot here, and who may reboot the node.
type Reboots struct {
	// NoReset are the GPUs that the driver has refused to reset since the node's boot. Their pending mode becomes current only at a reboot.
	NoReset map[nvml.UUID]bool
	// Suspected are the GPUs that the driver has refused to reset in any earlier boot: a machine that refuses once mostly always does.
	Suspected map[nvml.UUID]bool
	// InVain says that the node was rebooted after the driver refused the reset in this change. A mode that is still pending then would stay pending
	// after any further reboot.
	InVain bool
	Policy RebootPolicy
	Asked  Asked // the state of the sentinel file
	Others []Pod // all pods that a drain of the node would evict
}

// RebootPolicy says who reboots the node.
type RebootPolicy string

// The policies, as in the settings.
const (
	RebootNever    RebootPolicy = "never"
	RebootDelegate RebootPolicy = "delegate"
	RebootSelf     RebootPolicy = "self"
)

// Asked is the state of the sentinel file.
type Asked string

// States of the sentinel file.
const (
	NotAsked      Asked = ""
	AskedByUs     Asked = "us"
	AskedByOthers Asked = "others" // another program has written the file, so the agent must not remove it
)

// Errors of a change of MIG mode on a GPU that the driver refuses to reset.
var (
	// ErrNeedsReboot: the change needs a reboot, and the settings allow none.
	ErrNeedsReboot = errors.New("set reboot.policy in the settings to delegate or self: this machine does not let the driver reset the GPU, as many virtual machines do not," +
		" so MIG mode changes only at a reboot")
	// ErrStillPending: the mode is still pending after the reboot.
	ErrStillPending = errors.New("MIG mode is still pending after a reboot of the node; see the kernel's log for messages of NVRM")
)

// OnAtReboot lists the GPUs that turn MIG mode on at the next reboot by a user or another tool. The agent leaves their mode pending and releases the
// node until then: a GPU with a pending mode works as before. Turning MIG mode off cannot wait like that: the GPU has to lose its instances first,
// and then no pod can use it. If the agent reboots the node itself, the list is empty.
func OnAtReboot(seen Observed, want Desired) []nvml.GPU {
	var out []nvml.GPU
	for _, gpu := range seen.GPUs {
		if target, named := want.GPUs[gpu.UUID]; named && seen.onAtReboot(gpu, target) {
			out = append(out, gpu)
		}
	}
	return out
}

func (seen Observed) onAtReboot(gpu nvml.GPU, target Target) bool {
	return seen.Reboots.NoReset[gpu.UUID] && seen.Reboots.Policy != RebootSelf &&
		gpu.Capable && !gpu.Lost && !gpu.Enabled && target.MIG && !target.Undo
}

// reboot lists the steps to the reboot that the changes wait for.
func reboot(seen Observed) []Step {
	switch {
	case seen.Reboots.Policy == RebootSelf && len(seen.Reboots.Others) > 0:
		return []Step{{Kind: Evict, Pods: seen.Reboots.Others}, {Kind: Reboot}}
	case seen.Reboots.Policy == RebootDelegate:
		return append(askForReboot(seen), Step{Kind: Reboot})
	default:
		return []Step{{Kind: Reboot}}
	}
}

func askForReboot(seen Observed) []Step {
	if seen.Reboots.Policy != RebootDelegate || seen.Reboots.Asked != NotAsked {
		return nil
	}
	return []Step{{Kind: AskReboot}}
}
