package agent_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// An observation writes nothing, reports nothing and closes nothing. So a preview or a diagnosis may observe, too.
func TestObservingChangesNothing(t *testing.T) {
	t.Parallel()
	// observe lets the agent of w observe, and returns what it has done besides.
	observe := func(w *world, d *leaving, events <-chan string) {
		w.t.Helper()
		released := d.released
		for len(events) > 0 {
			<-events
		}
		w.client.ClearActions()
		_ = w.agent.Observe(w.t.Context()) // it may end early
		for _, action := range w.client.Actions() {
			if !slices.Contains([]string{"get", "list", "watch"}, action.GetVerb()) {
				w.t.Errorf("an observation has written: %s %s", action.GetVerb(), action.GetResource().Resource)
			}
		}
		if len(events) > 0 {
			w.t.Errorf("an observation has reported %q", <-events)
		}
		if d.released != released {
			w.t.Error("an observation has let go of the driver")
		}
	}
	start := func(w *world) (*leaving, <-chan string) {
		w.t.Helper()
		d := &leaving{Driver: w.gpus.Driver()}
		w.wrapDriver = func(nvml.Driver) nvml.Driver { return d }
		return d, w.restartWithEvents()
	}
	t.Run("before each pass of a change, and while the driver is upgraded", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			d, events := start(w)
			w.turn()
			w.label("all-1g.10gb")
			w.passes("the end", func() bool {
				observe(w, d, events)
				return w.reason() == config.ReasonConverged
			})
			w.upgrade(true)
			observe(w, d, events)
			w.spend(time.Minute)
			observe(w, d, events)
			if d.released == 0 {
				t.Error("the passes do not let go of the driver either")
			}
		})
	})
	t.Run("while a shared GPU is nearly full", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			p := &pressure{world: newWorld(t, t4)}
			d, events := start(p.world)
			p.poll(0)
			gpu := p.gpus.UUIDs()[0]
			p.takes("small", gpu+"::0", 4000)
			p.takes("large", gpu+"::1", 10000)
			p.poll(0)
			<-time.After(time.Minute)
			observe(p.world, d, events)
			p.poll(0)
			if len(events) == 0 {
				t.Error("the pass does not report it either")
			}
		})
	})
}
