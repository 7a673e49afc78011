package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// opens fails the test if the node does not take pods within a minute.
func (w *world) opens() {
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
				w.opens()
				if n := len(w.snapshot()[0].Instances); n >= row.less {
					t.Errorf("the GPUs were changed meanwhile: %d instances", n)
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
		w.fail(gpusim.CreateGpuInstanceWithPlacement)
		w.label("all-1g.10gb")
		w.passes("the way back", func() bool { return strings.Contains(w.node().Annotations[config.AnnotationJournal], `"undo"`) })
		w.upgrade(true)
		w.opens()
		w.upgrade(false)
		w.settle(config.ReasonHardwareFailure)
		w.givenBack()
		if after := w.snapshot()[0].Geometry().String(); after != before {
			t.Errorf("the GPUs are cut as %s, and were as %s", after, before)
		}
	})
}

func TestAnUpgradeOfTheDriverLeavesACordonThatIsNotOurs(t *testing.T) {
	t.Parallel()
	for name, also := range map[string]func(n *corev1.Node){
		"one from before the change":  nil,
		"one that another tool needs": func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, "talos.dev/cordoned", "true") },
		"one that people want to remain": func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, config.AnnotationKeepCordoned, "yes")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.cordon(also == nil)
				w.label("all-1g.10gb")
				w.passes("the fence", func() bool { return len(w.node().Spec.Taints) > 0 })
				if also != nil {
					w.edit(also)
				}
				w.upgrade(true)
				w.spend(time.Hour)
				if !w.node().Spec.Unschedulable {
					t.Error("the cordon was lifted")
				}
			})
		})
	}
}

// The agent opens a node on which another has left a cordon, too, although it may not ask the driver.
func TestWhatIsLeftWithoutAJournalIsOpenedWhileTheDriverIsUpgraded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.begin("all-1g.10gb")
		w.unannotate(config.AnnotationJournal)
		w.upgrade(true)
		w.spend(time.Minute)
		if fenced := len(w.node().Spec.Taints) > 0; fenced {
			who, _, _ := fence.Cordoner(w.node())
			t.Errorf("our taint is left; cordoned by %q", who)
		}
		w.upgrade(false)
		w.reach("all-1g.10gb")
	})
}

// A user who may write labels must not stop an agent by one that no driver manager sets. The agent reports a label that a driver manager has left.
func TestAnUpgradeOfTheDriverIsWhatOperandsSayAndEndsOrIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Timeouts.DriverUpgrade = 45 * time.Minute
		w.restart()
		w.converge("all-1g.10gb")
		w.set(config.LabelOperandPrefix+"anything", fence.PausedForDriverUpgrade)
		w.spend(10 * time.Minute)
		if c := w.condition(); c.Reason != string(config.ReasonConverged) {
			t.Errorf("by a label of no operand, %s: %s", c.Reason, c.Message)
		}
		w.set(labelDCGM, fence.PausedForDriverUpgrade)
		c := w.settle(config.ReasonDriverNotLoaded)
		if strings.Contains(c.Message, "kubectl") || !strings.Contains(c.Message, config.LabelOperandPrefix+"dcgm="+fence.PausedForDriverUpgrade) {
			t.Errorf("people are sent there at once, or the label is not named: %s", c.Message)
		}
		w.spend(40 * time.Minute)
		if c := w.condition(); strings.Contains(c.Message, "kubectl") {
			t.Errorf("people are sent there before timeouts.driverUpgrade: %s", c.Message)
		}
		w.spend(6 * time.Minute)
		if c := w.condition(); !strings.Contains(c.Message, "kubectl label node gpu-1 "+config.LabelOperandPrefix+"dcgm=true --overwrite") {
			t.Errorf("it does not say who has to act: %s", c.Message)
		}
		w.unset(labelDCGM)
		w.reach("all-1g.10gb")
	})
}
