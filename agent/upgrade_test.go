package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func (w *world) upgrade(on bool) {
	w.t.Helper()
	if on {
		w.set(labelDCGM, fence.PausedForDriverUpgrade)
	} else {
		w.unset(labelDCGM)
	}
}

func (w *world) schedulable() bool {
	n := w.node()
	return !n.Spec.Unschedulable && len(n.Spec.Taints) == 0
}

// expectOpen fails the test if the node does not take pods within a minute.
func (w *world) expectOpen() {
	w.t.Helper()
	w.spend(time.Minute)
	if n := w.node(); !w.schedulable() {
		w.t.Fatalf("unschedulable %t, taints %v; %s", n.Spec.Unschedulable, n.Spec.Taints, w.condition().Message)
	}
}

// The upgrade may have no end, and any user who may write labels can set the label of one.
func TestTheNodeIsGivenBackWhileTheDriverIsUpgraded(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		until func(w *world) bool
		less  int // GPU instances that there are by then
	}{
		{"before a GPU is touched", func(w *world) bool { return w.node().Spec.Unschedulable }, 1},
		{"while the GPUs are cut", func(w *world) bool { return len(w.snapshot()[0].Instances) == 3 }, 4},
		{"while the capacity is awaited", func(w *world) bool { return w.reason() == config.ReasonAwaitingCapacity }, 8},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.label("all-1g.10gb")
				w.passes("the middle", func() bool { return row.until(w) })
				w.upgrade(true)
				w.expectOpen()
				if n := len(w.snapshot()[0].Instances); n >= row.less {
					t.Errorf("the GPUs were changed before its end: %d instances", n)
				}
				w.spend(2 * time.Hour)
				if !w.schedulable() {
					t.Error("the node did not stay open")
				}
				w.upgrade(false)
				w.reach("all-1g.10gb")
			})
		})
	}
}

// The agent goes on with an undo after the upgrade.
func TestAnUndoGoesOnAfterTheUpgradeOfTheDriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-3g.40gb")
		before := w.snapshot()[0].Geometry().String()
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("all-1g.10gb")
		w.passes("the way back", func() bool { return strings.Contains(w.node().Annotations[config.AnnotationJournal], `"undo"`) })
		w.upgrade(true)
		w.expectOpen()
		w.upgrade(false)
		w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		if after := w.snapshot()[0].Geometry().String(); after != before {
			t.Errorf("the GPUs are cut as %s, and were as %s", after, before)
		}
	})
}
