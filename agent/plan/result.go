package plan

import (
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// Result is what the GPUs look like after the steps, if each does what it says. It is for drawing a plan and for
// checking it; instances that a step makes have no devices in it, since only the driver gives these their names.
func Result(gpus []nvml.GPU, steps []Step) []nvml.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		out[i].Instances = slices.Clone(out[i].Instances)
	}
	for _, step := range steps {
		if step.Kind == Reboot {
			for i := range out {
				out[i].Enabled, out[i].Instances = out[i].Pending, nil
			}
			continue
		}
		i := slices.IndexFunc(out, func(g nvml.GPU) bool { return g.UUID == step.GPU })
		if i < 0 {
			continue
		}
		out[i] = step.applied(out[i])
	}
	return out
}

func (s Step) applied(gpu nvml.GPU) nvml.GPU {
	switch s.Kind {
	case SetMode:
		gpu.Enabled, gpu.Pending, gpu.Instances = s.On, s.On, nil
	case Reset:
		gpu.Enabled, gpu.Instances = gpu.Pending, nil
	case Destroy:
		gpu.Instances = slices.DeleteFunc(gpu.Instances, func(i nvml.Instance) bool { return i.Placed == s.Instance })
	case Create:
		gpu.Instances = append(gpu.Instances, nvml.Instance{Placed: s.Instance})
		slices.SortFunc(gpu.Instances, func(a, b nvml.Instance) int { return nvml.ComparePlaced(a.Placed, b.Placed) })
	case SetPersistence:
		gpu.Persistent = s.On
	case SetComputeMode:
		gpu.ComputeMode = nvml.ComputeDefault
	case Record, Adopt, AcquireSlot, ReleaseSlot, Fence, Evict, PauseOperands, StopUnits, Park, AskReboot, Reboot, WriteSharing, RegenerateCDI, StartUnits, ResumeOperands,
		RestartOperands, ReloadPlugin, VerifyCapacity, PublishNodeKeys, Release:
	}
	return gpu
}
