package agent_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/gpuslice/gpuslice/config"
)

// Promises 7 and 15: of a change whose record is lost in its middle, the agent gives back what is marked as its own, and the GPUs go on to what the
// label asks for. It believes nothing of the journal: units that the change has stopped are a person's to start.
func TestAChangeGoesOnFromTheMarksWhenTheRecordIsLost(t *testing.T) {
	t.Parallel()
	for name, wanted := range map[string]bool{"the label stays": true, "the label goes": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := withPendingRestores(t)
				w.deployOperands(map[string]string{labelDCGM: "true"})
				w.label("all-balanced")
				w.passes("stop of the unit", func() bool { return w.units.states[dcgm] == "inactive" })
				if value := w.node().Labels[labelDCGM]; value != "paused-for-gpuslice" {
					t.Fatalf("the operand's label is %s", value)
				}
				w.disk.text = nil
				w.units.did = nil
				w.restart()
				if wanted {
					w.reach("all-balanced")
				} else {
					w.unset(config.LabelMIGConfig)
					w.settle(config.ReasonNotRequested)
				}
				w.expectGivenBack()
				if value := w.node().Labels[labelDCGM]; value != "true" {
					t.Errorf("the operand's label is %s", value)
				}
				if slices.Contains(w.units.did, "start "+dcgm) {
					t.Error("the agent has started a unit by a journal that no record knows")
				}
			})
		})
	}
}
