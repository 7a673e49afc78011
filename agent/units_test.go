package agent_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// One process makes many changes.
func TestAUnitHasItsTimeInEachChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		const unit = "nvidia-dcgm.service"
		slowly := func() {
			w.units.refuses = map[string]error{"stop " + unit: host.ErrJobRunning}
			w.untilReason(config.ReasonStoppingUnits)
			w.units.refuses = nil
			w.units.states[unit] = "inactive"
			w.units.changed(unit)
		}
		w.label("all-balanced")
		slowly()
		w.reach("all-balanced")
		w.spend(time.Hour)
		w.label("all-disabled")
		slowly()
		w.reach("all-disabled")
	})
}

// Promise 10: else the unit would stop a moment after the agent has forgotten it.
func TestAUnitThatIsStillStoppingWhenTheNodeIsGivenBackIsStarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		const unit = "nvidia-dcgm.service"
		w.units.refuses = map[string]error{"stop " + unit: host.ErrJobRunning}
		w.label("all-balanced")
		w.untilReason(config.ReasonStoppingUnits)
		w.units.states[unit], w.units.changed = "deactivating", nil
		w.passes("the end", func() bool { return !w.hasJournal() })
		started := false
		for _, d := range w.units.did {
			started = started || d == "start "+unit
		}
		if !started {
			t.Errorf("the unit was never started again: %v", w.units.did)
		}
	})
}
