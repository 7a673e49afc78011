package state

import (
	"fmt"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// UnnoticedReboots says, for the end of a message, why no reboot would be noticed; empty if one would.
func (s Observed) UnnoticedReboots() string {
	if s.Boot.Err == nil {
		return ""
	}
	return "; a reboot of this host would not be noticed: " + s.Boot.Err.Error()
}

// Refusal is what is known of GPUs that are not reset here, in this boot or in an earlier one; nil if nothing is.
func (s Observed) Refusal() *api.NoReset {
	if s.Journal != nil && s.Journal.NoReset != nil {
		return s.Journal.NoReset
	}
	return s.Record.Status.NoReset
}

// KeepForeign gives the GPUs of which nothing is asked their instances back, which a reboot of ours has taken.
func (want *Desired) KeepForeign(j *journal.Journal) {
	if j == nil || len(j.Reboots) == 0 {
		return
	}
	for _, c := range j.Previous {
		if _, asked := want.Targets[c.GPU]; c.Foreign && !asked {
			want.Targets[c.GPU] = c.Target()
		}
	}
}

// OnAtReboot tells what the next reboot will bring; empty if nothing waits for one.
func (s Observed) OnAtReboot(want Desired) string {
	gpus := plan.OnAtReboot(plan.Observed{GPUs: s.GPUs, Reboots: s.Reboots}, plan.Desired{GPUs: want.Targets})
	if len(gpus) == 0 {
		return ""
	}
	text := fmt.Sprintf("%s: %s MIG mode on at the node's next reboot, since this machine does not let the driver reset a GPU; "+
		"until then the node is given back, and the change goes on by itself after it", want.Name, turns(gpus))
	if s.Reboots.Policy == plan.RebootDelegate {
		return text + ". A reboot is asked for by the sentinel file"
	}
	return text + ". Reboot the node when it suits you, or set reboot.policy in the settings"
}

// RebootState is the state of a change that waits for a reboot: one that is left to people is none that a tool should go
// on waiting for.
func (s Observed) RebootState() config.State {
	if s.Reboots.Policy == plan.RebootDelegate {
		return config.StateRebooting
	}
	return config.StateFailed
}

func turns(gpus []nvml.GPU) string {
	names := make([]string, len(gpus))
	for i, gpu := range gpus {
		names[i] = fmt.Sprint(gpu.Index)
	}
	if len(names) == 1 {
		return "GPU " + names[0] + " turns"
	}
	return "GPUs " + strings.Join(names, ", ") + " turn"
}
