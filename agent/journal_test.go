package agent_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

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

// The journal names the plugin's pods that have read the GPUs as they were. Each pod that comes while the agent waits for others is one
// more, and no agent reads a journal with too many of them: the node would stay cordoned.
func TestDevicePluginsThatComeAndGoMakeNoJournalTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.grace, w.settings.Timeouts.Drain = 30*time.Minute, 24*time.Hour
		w.restart()
		w.pod("train", "0")
		w.label("all-1g.10gb")
		for range 300 {
			w.replacePlugin()
			w.pass()
		}
		if c := w.condition(); c.Reason == string(config.ReasonJournalUnreadable) {
			t.Errorf("after %d device plugins: %s", w.podsStarted, c.Message)
		}
		w.reach("all-1g.10gb")
	})
}
