package plan

import (
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// Result returns the GPUs as the steps leave them, if each succeeds. The planner continues from it, and others draw and check plans by it. Instances
// that a step creates have no devices in it, since only the driver names devices.
func Result(gpus []nvml.GPU, steps []Step) []nvml.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		out[i].Instances = slices.Clone(out[i].Instances)
	}
	for _, step := range steps {
		apply := step.Traits().Apply
		if apply == nil {
			continue
		}
		for i := range out {
			if step.GPU == "" || step.GPU == out[i].UUID {
				out[i] = apply(step, out[i])
			}
		}
	}
	return out
}

func (s Step) withMode(gpu nvml.GPU) nvml.GPU {
	if gpu.Enabled != s.On { // else the step changes a pending mode back, and nothing goes
		gpu.Instances = nil
	}
	gpu.Enabled, gpu.Pending = s.On, s.On
	return gpu
}

func withPending(_ Step, gpu nvml.GPU) nvml.GPU {
	gpu.Enabled, gpu.Instances = gpu.Pending, nil
	return gpu
}

func withPersistence(on bool) func(Step, nvml.GPU) nvml.GPU {
	return func(_ Step, gpu nvml.GPU) nvml.GPU {
		gpu.Persistent = on
		return gpu
	}
}

func withComputeDefault(_ Step, gpu nvml.GPU) nvml.GPU {
	gpu.ComputeMode = nvml.ComputeDefault
	return gpu
}

func (s Step) withInstances(gpu nvml.GPU) nvml.GPU {
	gpu.Instances = s.instances(gpu)
	return gpu
}

// instances returns the GPU's instances after the step has created or destroyed one, or a part of one.
func (s Step) instances(gpu nvml.GPU) []nvml.Instance {
	switch {
	case s.OnPart():
		return s.divided(gpu)
	case s.Kind == Create:
		half := func(i nvml.Instance) bool {
			return i.HalfMade() && i.Profile == s.Instance.Profile && i.Span == s.Instance.Span // which the driver finishes
		}
		out := append(slices.DeleteFunc(slices.Clone(gpu.Instances), half), nvml.Instance{Placed: s.Instance})
		slices.SortFunc(out, func(a, b nvml.Instance) int { return nvml.ComparePlaced(a.Placed, b.Placed) })
		return out
	default:
		return slices.DeleteFunc(slices.Clone(gpu.Instances), func(i nvml.Instance) bool { return i.Placed == s.Instance })
	}
}

// divided returns the GPU's instances after one of them has got or lost a part. A new part has no name.
func (s Step) divided(gpu nvml.GPU) []nvml.Instance {
	out := slices.Clone(gpu.Instances)
	for n, i := range out {
		if i.Profile != s.Instance.Profile || i.Span != s.Instance.Span {
			continue
		}
		devices := slices.DeleteFunc(slices.Clone(i.Devices), func(d nvml.Device) bool { return d.Part == s.Part })
		if s.Kind == Create {
			devices = append(devices, nvml.Device{Part: s.Part})
		}
		profile, _ := gpu.Profile(i.Profile)
		out[n] = i.Divided(profile, devices)
	}
	return out
}
