package state

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/drain/holders"
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

// Restore adds what GPUs get back after a reset by the agent, or after any reboot, although the label does not name it. A GPU that is
// to have the devices that the agent last verified on it gets them at the same places. GPUs that the label does not name get theirs, unless someone uses them
// otherwise since. Where
// NVIDIA's DRA driver makes instances for claims, none gets any.
func (d *Desired) Restore(seen *Observed) {
	if seen.Journal != nil {
		d.restoreForeign(seen.Journal)
	}
	if len(d.Targets) == 0 || !seen.RebootedSinceVerified() || seen.Owner.Kind == api.OwnerDRADynamic {
		return
	}
	for _, l := range seen.Record.Learnt.Layouts {
		gpu, is := seen.GPU(l.GPU)
		if !is || gpu.Lost || !l.FitsOn(gpu) {
			continue
		}
		target, asked := d.Targets[l.GPU]
		switch {
		case asked && gives(l, gpu, target.Request):
			target.Exact = l.Target().Exact
		case !asked && !takenSince(seen, gpu):
			target = l.Target()
		default:
			continue
		}
		d.Targets[l.GPU] = target
		d.Restoring = d.Restoring || !l.Matches(gpu)
	}
}

// gives reports whether the layout has just the MIG devices of the request.
func gives(l journal.GPULayout, gpu nvml.GPU, request nvml.Request) bool {
	has := map[string]int{}
	for _, p := range l.Target().Exact {
		for _, d := range gpu.Named(p).Devices() {
			has[d]++
		}
	}
	return request.MIG && maps.Equal(has, request.Devices)
}

// takenSince reports whether someone uses the GPU otherwise since the reboot: a pod or a process has it as a whole, or it has lost a mode that a reboot leaves.
func takenSince(seen *Observed, gpu nvml.GPU) bool {
	return !gpu.Enabled && (!gpu.SwitchesAlone() || len(nvml.PIDs(gpu.Processes)) > 0 ||
		slices.ContainsFunc(seen.Holders.Pods, func(p holders.Pod) bool { return slices.Contains(p.Devices, string(gpu.UUID)) }))
}

// restoreForeign adds the GPUs of the change under way that the label does not name.
func (d *Desired) restoreForeign(j *journal.Journal) {
	for _, l := range j.Previous {
		if _, asked := d.Targets[l.GPU]; l.Foreign && !asked {
			d.Targets[l.GPU] = l.Target()
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
