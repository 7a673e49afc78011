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

// busyness is how busy something is in percent, or why that is not known.
type busyness struct {
	percent float64
	unknown string // empty if it is known
}

// Why it is not known how busy a pod is. Each is one text, whichever pod it is about, so that it is reported once.
const (
	unknownYet     = "the agent has just begun to observe"
	unknownLost    = "the GPU has fallen off the bus"
	unknownCutting = "the GPU is being cut"
	unknownShared  = "several pods share an instance, and the driver does not distinguish their processes"
	unknownOwner   = "a process that is busy is of none of the pods that have the GPU, or computes for others as MPS's server does"
	unknownSkipped = "NVML does not report how busy a process on an instance is, and idle.instances of the settings is " + string(config.IdleInstancesSkip)
)

// unknownCode is why a value is not known that the driver was asked for.
func unknownCode[T any](of string, r nvml.Reading[T]) string {
	switch r.Code {
	case "":
		return of + " was not asked for"
	case "ERROR_NOT_SUPPORTED", "ERROR_FUNCTION_NOT_FOUND":
		return fmt.Sprintf("the driver does not report %s of this kind of GPU, or is too old (%s)", of, r.Code)
	default:
		return fmt.Sprintf("the driver does not report %s: %s", of, sanitize.Cut(r.Code, 64))
	}
}

// busyOn says how busy a device is, and how busy each of the pods keeps it that have it. Owners are pods by pid.
func busyOn(d monitor.Device, u nvml.Usage, pods []holders.Pod, owners map[int]*corev1.Pod, sampled bool) (all busyness, each map[types.UID]busyness) {
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
	all = busyOfInstance(d, u, sampled)
	if len(pods) > 1 && all.unknown == "" && all.percent > 0 {
		_, each = same(busyness{unknown: unknownShared})
		return all, each
	}
	return same(all)
}

// busyOnGPU adds up processes of a GPU, as the driver reports how busy each is.
func busyOnGPU(processes []nvml.ProcessUsage, pods []holders.Pod, owners map[int]*corev1.Pod) (all busyness, each map[types.UID]busyness) {
	each = map[types.UID]busyness{}
	for _, p := range pods {
		each[p.UID] = busyness{}
	}
	strange := ""
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
			strange = b.unknown
			if strange == "" {
				strange = unknownOwner
			}
		}
	}
	for uid, b := range each {
		// Whose work that is may be this pod's, unless there is enough of its own.
		if strange != "" && b.percent == 0 {
			each[uid] = busyness{unknown: strange}
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

// busyOfInstance is 0 of one without a process, on any kind of GPU.
func busyOfInstance(d monitor.Device, u nvml.Usage, sampled bool) busyness {
	if !slices.ContainsFunc(u.Processes.Value, func(p nvml.ProcessUsage) bool { return p.GI == d.GI }) {
		return busyness{}
	}
	r, asked := u.Instances[d.GI]
	switch {
	case r.Known:
		return busyness{percent: r.Value}
	case !sampled:
		return busyness{unknown: unknownSkipped}
	case !asked:
		return busyness{unknown: unknownCutting}
	default:
		return busyness{unknown: unknownCode("how busy an instance is", r)}
	}
}

// memoryOn is what the processes on the device hold of its memory, in MiB.
func memoryOn(d monitor.Device, u nvml.Usage) (mib, processes int) {
	for _, p := range u.Processes.Value {
		if p.GI == d.GI {
			mib, processes = mib+p.UsedMiB, processes+1
		}
	}
	return mib, processes
}
