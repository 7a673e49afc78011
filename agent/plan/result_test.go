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

// What a killed creation has left of an instance is finished by creating it: it is not there twice then.
func TestAHalfMadeInstanceThatIsCreatedStandsOnce(t *testing.T) {
	whole := nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Size: 4}}
	divided := whole
	divided.Compute = "1c+1c"
	elsewhere := whole
	elsewhere.Span.Start = 4
	gpu := nvml.GPU{UUID: "GPU-1", Capable: true, Enabled: true, Instances: []nvml.Instance{{Placed: whole}, {Placed: elsewhere}}}
	got := plan.Result([]nvml.GPU{gpu}, []plan.Step{{Kind: plan.Create, GPU: "GPU-1", Instance: divided}})[0]
	if len(got.Instances) != 2 || got.Instances[0].Placed != divided || got.Instances[1].Placed != elsewhere {
		t.Errorf("%v stand", got.Instances)
	}
}
