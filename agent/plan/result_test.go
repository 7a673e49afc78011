package plan_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml"
)

// A mode that is pending and taken back was never current: the instances stay.
func TestTheResultOfAModeThatIsTakenBackHasItsInstances(t *testing.T) {
	gpu := nvml.GPU{UUID: "GPU-1", Capable: true, Enabled: true, Instances: []nvml.Instance{{Placed: nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Size: 4}}}}}
	for on, left := range map[bool]int{true: 1, false: 0} {
		got := plan.Result([]nvml.GPU{gpu}, []plan.Step{{Kind: plan.SetMode, GPU: "GPU-1", On: on}})[0]
		if got.Enabled != on || got.Pending != on || len(got.Instances) != left {
			t.Errorf("MIG %t: enabled %t, pending %t, %d instances, want %d", on, got.Enabled, got.Pending, len(got.Instances), left)
		}
	}
}
