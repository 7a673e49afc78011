package plan

import (
	"errors"

	"github.com/gpuslice/gpuslice/nvml"
)

// Reboots is what is known of reboots: which mode changes take one here, and who may do it.
type Reboots struct {
	// NoReset are the GPUs that the driver has refused to reset since the node's boot. Their pending mode becomes current at
	// a reboot and not before.
	NoReset map[nvml.UUID]bool
	// Suspected are those that it has refused to reset at any time: machines do not often learn it.
	Suspected map[nvml.UUID]bool
	// InVain says that the node was rebooted since this change met the refusal. A mode that is still pending then would be so
	// after any further reboot.
	InVain bool
	Policy RebootPolicy
	Asked  Asked // what the sentinel file says
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
	AskedByNobody Asked = ""
	AskedByUs     Asked = "us"
	AskedByOthers Asked = "others" // it asks for a reboot too, but it is not ours to withdraw
)

// Why MIG mode is not changed where a GPU is not reset.
var (
	// ErrNeedsReboot: nobody may do the reboot that it takes.
	ErrNeedsReboot = errors.New("MIG mode changes at a reboot of the node only, since this machine does not let the driver reset the GPU," +
		" as in many virtual machines; set reboot.policy in the settings to delegate or self")
	// ErrStillPending: the reboot has not helped.
	ErrStillPending = errors.New("MIG mode is still pending after a reboot of the node; see the kernel's log for messages of NVRM")
)

// OnAtReboot lists the GPUs that turn MIG mode on at the next reboot that somebody else does: their mode is left pending, and
// the node is given back until then, as a GPU with a pending mode works as before. The other way round that cannot be: a
// GPU must lose its instances before MIG mode is turned off, and is of no use to anybody then. Where the agent reboots the
// node itself there are none.
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
	if seen.Reboots.Policy != RebootDelegate || seen.Reboots.Asked != AskedByNobody {
		return nil
	}
	return []Step{{Kind: AskReboot}}
}
