package state

import (
	"fmt"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/nvml"
)

// Refusal returns which GPUs the driver has refused to reset, in this boot or in an earlier one; nil if it has not.
func (s *Observed) Refusal() *journal.NoReset {
	if s.Journal != nil && s.Journal.NoReset != nil {
		return s.Journal.NoReset
	}
	return s.Record.Learnt.NoReset
}

// KeepForeign adds targets for the GPUs that the label does not name: they get back the instances that the agent's reboot or reset has removed.
func (d *Desired) KeepForeign(j *journal.Journal) {
	if j == nil {
		return
	}
	for _, c := range j.Previous {
		if _, asked := d.Targets[c.GPU]; c.Foreign && !asked {
			d.Targets[c.GPU] = c.Target()
		}
	}
}

// OnAtReboot says which GPUs turn MIG mode on at the next reboot; empty if none do.
func (s *Observed) OnAtReboot(want Desired) string {
	gpus := plan.OnAtReboot(plan.Observed{GPUs: s.GPUs, Reboots: s.Reboots}, plan.Desired{GPUs: want.Targets})
	if len(gpus) == 0 {
		return ""
	}
	text := fmt.Sprintf("%s: %s MIG mode on at the node's next reboot, since this machine does not let the driver reset a GPU; "+
		"the node takes pods until then, and the change continues by itself after the reboot", want.Name, turns(gpus))
	if s.Reboots.Policy == plan.RebootDelegate {
		return text + ". The sentinel file requests a reboot"
	}
	return text + ". Reboot the node when it suits you, or set reboot.policy in the settings"
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
