package observe

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Promise 3. A process that only has the file of a GPU open keeps the driver from resetting it, so it counts where all of the GPU goes. Where an
// instance goes it does not: all clients of the GPU have the same file open.
func TestOpenFilesAreSoughtOfAGPUThatGoesAsAWhole(t *testing.T) {
	t.Parallel()
	part := func(start int) nvml.Part { return nvml.Part{Name: "1c", Span: nvml.Span{Start: start, Size: 1}} }
	instance := func(uuid string, pid int) nvml.Instance {
		return nvml.Instance{Devices: []nvml.Device{{UUID: uuid, Part: part(0)}}, Processes: []nvml.Process{{PID: pid}}}
	}
	seen := state.Observed{GPUs: []nvml.GPU{
		{UUID: "GPU-a", Minor: 7, Processes: []nvml.Process{{PID: 11}}},
		{UUID: "GPU-b", Minor: 3, Enabled: true, Instances: []nvml.Instance{instance("MIG-1", 21), instance("MIG-2", 22)}},
		{UUID: "GPU-c", Minor: holders.AnyGPU},
	}}
	for name, row := range map[string]struct {
		taken []plan.Taken
		want  []holders.Sought
	}{
		"a whole GPU": {
			[]plan.Taken{{GPU: "GPU-a", Whole: true, Devices: []string{"GPU-a"}}},
			[]holders.Sought{{Device: "GPU-a", Minor: 7, Reported: []int{11}}},
		},
		"a whole GPU of which the driver does not say the file": {
			[]plan.Taken{{GPU: "GPU-c", Whole: true, Devices: []string{"GPU-c"}}},
			[]holders.Sought{{Device: "GPU-c", Minor: holders.AnyGPU}},
		},
		"a GPU that is cut, with its mode": {
			[]plan.Taken{{GPU: "GPU-b", Whole: true, Devices: []string{"MIG-1", "MIG-2", "GPU-b"}}},
			[]holders.Sought{
				{Device: "GPU-b", Minor: 3},
				{Device: "MIG-1", Minor: holders.NoFiles, Reported: []int{21}},
				{Device: "MIG-2", Minor: holders.NoFiles, Reported: []int{22}},
			},
		},
		"an instance": {
			[]plan.Taken{{GPU: "GPU-b", Devices: []string{"MIG-2", "GPU-b"}}},
			[]holders.Sought{{Device: "MIG-2", Minor: holders.NoFiles, Reported: []int{22}}},
		},
		"a GPU whose processes cannot stay": {
			[]plan.Taken{{GPU: "GPU-a", Compute: true, Devices: []string{"GPU-a"}}},
			[]holders.Sought{{Device: "GPU-a", Minor: holders.NoFiles, Reported: []int{11}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(row.want, soughtDevices(&seen, row.taken)); diff != "" {
				t.Errorf("sought devices (-want +got):\n%s", diff)
			}
		})
	}
}
