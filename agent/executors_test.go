package agent_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/plan"
)

// A kind of step without an executor would stall the change in the middle; for one without a reason the agent could report nothing.
func TestEachKindOfStepCanBeExecutedAndReported(t *testing.T) {
	t.Parallel()
	for _, kind := range plan.Kinds() {
		performed, reason, phase := agent.Performs(kind)
		if !performed || reason == "" || phase == "" {
			t.Errorf("%s: has an executor: %t; is reported as %q, %q", kind, performed, reason, phase)
		}
	}
}
