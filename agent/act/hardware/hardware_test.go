package hardware_test

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/act/hardware"
	"github.com/gpuslice/gpuslice/agent/plan"
)

// Without a call for a kind of step that touches a GPU, the agent would end in the middle of the change. A call for any other kind would never be
// made.
func TestEachKindOfStepThatTouchesAGPUHasItsCallIntoTheDriver(t *testing.T) {
	t.Parallel()
	var touching []plan.Kind
	for _, kind := range plan.Kinds() {
		if (plan.Step{Kind: kind}).Traits().TouchesGPU() {
			touching = append(touching, kind)
		}
	}
	called := hardware.Called()
	slices.Sort(called)
	if diff := cmp.Diff(touching, called); diff != "" {
		t.Errorf("calls into the driver (-kinds that touch a GPU +kinds with a call):\n%s", diff)
	}
}
