package idle

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// busyness is how busy something is in percent, or why that is unknown.
type busyness struct {
	percent float64
	unknown string // empty if it is known
}

// Reasons why a pod's load is unknown. Each text is the same for all pods, so that it is reported once.
const (
	unknownYet     = "the agent has just begun to observe"
	unknownLost    = "the GPU has fallen off the bus"
	unknownCutting = "the GPU is being cut"
	unknownShared  = "several pods share an instance, and the driver does not distinguish their processes"
	unknownChanged = "the agent samples no instance while a change is under way"
	unknownOwner   = "a busy process belongs to no pod that has the GPU, or computes for others as MPS's server does"
	unknownSkipped = "NVML does not report how busy processes on instances are, and setting idle.instances is " + string(config.IdleInstancesSkip)
)

// unknownCode says why the driver's value is unknown.
func unknownCode[T any](of string, r nvml.Reading[T]) string {
	switch r.Code {
	case "":
		return "the agent did not ask " + of
	case "ERROR_NOT_SUPPORTED", "ERROR_FUNCTION_NOT_FOUND":
		return fmt.Sprintf("the driver does not report %s on this kind of GPU, or is too old (%s)", of, r.Code)
	default:
		return fmt.Sprintf("the driver does not report %s: %s", of, sanitize.Cut(r.Code, 64))
	}
}

// busyOn returns how busy a device is, and how busy each of its pods keeps it. Owners are pods by pid; unsampled is why no instance was sampled.
func busyOn(d monitor.Device, u nvml.Usage, pods []holders.Pod, owners map[int]*corev1.Pod, unsampled string) (all busyness, each map[types.UID]busyness) {
	same := func(b busyness) (busyness, map[types.UID]busyness) {
		each := map[types.UID]busyness{}
		for _, p := range pods {
			each[p.UID] = b
		}
		return b, each
	}
	switch {
	case u.Lost:
		return same(busyness{unknown: unknownLost})
	case u.Enabled == d.IsWhole():
		return same(busyness{unknown: unknownCutting})
	case !u.Processes.Known:
		return same(busyness{unknown: unknownCode("which processes there are", u.Processes)})
	case d.IsWhole():
		return busyOnGPU(u.Processes.Value, pods, owners)
	}
	all = busyOfInstance(d, u, unsampled)
	if len(pods) > 1 && all.unknown == "" && all.percent > 0 {
		_, each = same(busyness{unknown: unknownShared})
		return all, each
	}
	return same(all)
}

// busyOnGPU adds up the load of a GPU's processes, as the driver reports it.
func busyOnGPU(processes []nvml.ProcessUsage, pods []holders.Pod, owners map[int]*corev1.Pod) (all busyness, each map[types.UID]busyness) {
	each = map[types.UID]busyness{}
	for _, p := range pods {
		each[p.UID] = busyness{}
	}
	unassigned := ""
	for _, p := range processes {
		b := busyness{percent: p.Busy.Value}
		if !p.Busy.Known {
			b = busyness{unknown: unknownCode("how busy a process is", p.Busy)}
		}
		all = all.plus(b)
		if owner := owners[p.PID]; owner != nil {
			if has, holds := each[owner.UID]; holds {
				each[owner.UID] = has.plus(b)
			}
			continue
		}
		if b.unknown != "" || b.percent > 0 {
			unassigned = b.unknown
			if unassigned == "" {
				unassigned = unknownOwner
			}
		}
	}
	for uid, b := range each {
		// The unassigned load may be this pod's, unless the pod's own processes are busy.
		if unassigned != "" && b.percent == 0 {
			each[uid] = busyness{unknown: unassigned}
		}
	}
	return all, each
}

func (b busyness) plus(other busyness) busyness {
	switch {
	case b.unknown != "":
		return b
	case other.unknown != "":
		return other
	default:
		return busyness{percent: min(b.percent+other.percent, 100)}
	}
}

// busyOfInstance returns 0 for an instance without a process, on any kind of GPU.
func busyOfInstance(d monitor.Device, u nvml.Usage, unsampled string) busyness {
	if !slices.ContainsFunc(u.Processes.Value, func(p nvml.ProcessUsage) bool { return p.GI == d.GI }) {
		return busyness{}
	}
	r, asked := u.Instances[d.GI]
	switch {
	case r.Known:
		return busyness{percent: r.Value}
	case unsampled != "":
		return busyness{unknown: unsampled}
	case !asked:
		return busyness{unknown: unknownCutting}
	default:
		return busyness{unknown: unknownCode("how busy an instance is", r)}
	}
}

// memoryOn returns how much of the device's memory its processes hold, in MiB, and how many they are.
func memoryOn(d monitor.Device, u nvml.Usage) (mib, processes int) {
	for _, p := range u.Processes.Value {
		if p.GI == d.GI {
			mib, processes = mib+p.UsedMiB, processes+1
		}
	}
	return mib, processes
}
