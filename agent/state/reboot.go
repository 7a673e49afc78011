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

// RebootedSinceVerified reports whether the host has been rebooted since the agent last verified the capacity.
func (s *Observed) RebootedSinceVerified() bool {
	in := s.Record.Learnt.Boot
	return in != "" && s.Boot.ID != "" && in != s.Boot.ID
}

// Restore adds what GPUs get back although the label does not name it: the places that their instances had when the agent last verified the same request, and
// the instances of GPUs that the label does not name. Those are lost by a reset that the agent makes, or by any reboot. A GPU that has other instances by
// then belongs to another program.
func (d *Desired) Restore(seen *Observed) {
	if seen.Journal != nil {
		for _, l := range seen.Journal.Previous {
			if _, asked := d.Targets[l.GPU]; l.Foreign && !asked {
				d.Targets[l.GPU] = l.Target()
			}
		}
	}
	if len(d.Targets) == 0 || !seen.RebootedSinceVerified() {
		return
	}
	for _, l := range seen.Record.Learnt.Layouts {
		gpu, is := seen.GPU(l.GPU)
		target, asked := d.Targets[l.GPU]
		if !is || gpu.Lost || !l.FitsOn(gpu) || asked && (seen.Record.Learnt.Verified != d.Fingerprint || !target.MIG) {
			continue
		}
		if asked {
			target.Exact = l.Target().Exact
		} else {
			target = l.Target()
		}
		d.Targets[l.GPU] = target
		d.Restoring = d.Restoring || !l.Matches(gpu)
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
