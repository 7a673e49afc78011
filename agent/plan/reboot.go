package plan

import (
	"errors"

	"github.com/gpuslice/gpuslice/nvml"
)

// Reboots is what is known of reboots: whether a mode change takes one here, and who may do it.
type Reboots struct {
	// Needed says that the driver has refused, since the node's boot, to reset a GPU. A pending mode then becomes current
	// at a reboot and not before.
	Needed bool
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

// ErrNeedsReboot is why MIG mode cannot be turned off, or on, without a reboot that nobody may do.
var ErrNeedsReboot = errors.New("MIG mode changes at a reboot of the node only, since this machine does not let the driver reset the GPU," +
	" as in many virtual machines; set reboot.policy in the settings to delegate or self")

// AtReboot lists the GPUs that turn MIG mode on at the next reboot, whoever does it: their mode is left pending, and the
// node is given back until then, as a GPU with a pending mode works as before. The other way round that cannot be: a GPU
// must lose its instances before MIG mode is turned off, and is of no use to anybody then.
func AtReboot(seen Observed, want Desired) []nvml.GPU {
	var out []nvml.GPU
	for _, gpu := range seen.GPUs {
		if target, named := want[gpu.UUID]; named && seen.atReboot(gpu, target) {
			out = append(out, gpu)
		}
	}
	return out
}

func (seen Observed) atReboot(gpu nvml.GPU, target Target) bool {
	return seen.Reboots.Needed && seen.Reboots.Policy != RebootSelf &&
		gpu.Capable && !gpu.Lost && !gpu.Enabled && target.MIG && !target.Undo
}

// reboot lists the steps to the reboot that the changes wait for.
func reboot(seen Observed) []Step {
	switch {
	case seen.Reboots.Policy == RebootSelf && len(seen.Reboots.Others) > 0:
		return []Step{{Kind: Evict, Pods: seen.Reboots.Others}, {Kind: Reboot}}
	case seen.Reboots.Policy == RebootDelegate && seen.Reboots.Asked == AskedByNobody:
		return []Step{{Kind: AskReboot, On: true}, {Kind: Reboot}}
	default:
		return []Step{{Kind: Reboot}}
	}
}

// ask brings the sentinel file up to date: it asks while a GPU waits for a reboot, and not a moment longer.
func ask(seen Observed, want Desired) []Step {
	pending := false
	for _, gpu := range seen.GPUs {
		pending = pending || gpu.Pending != gpu.Enabled
	}
	delegated := seen.Reboots.Policy == RebootDelegate
	switch {
	case delegated && len(AtReboot(seen, want)) > 0 && seen.Reboots.Asked == AskedByNobody:
		return []Step{{Kind: AskReboot, On: true}}
	case !(delegated && pending) && seen.Reboots.Asked == AskedByUs:
		return []Step{{Kind: AskReboot}}
	default:
		return nil
	}
}
