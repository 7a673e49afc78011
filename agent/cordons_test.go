package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

func TestACordonThatIsPutBackMovesNoDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Drain.OnUncordon = config.UncordonRefence
		w.restart()
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.grace = time.Hour
		w.label("all-balanced")
		w.untilCordoned()
		w.budgetKeepsPod("trainer")
		w.cordon(false)
		if !w.passesWithin(2500, func() bool { return !w.hasJournal() }) {
			t.Errorf("%v %s", w.node().Spec, w.condition().Message)
		}
		w.expectGivenBack()
	})
}

func TestARequestThatComesAfterAnUncordonIsNotCalledOffByIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-balanced")
		w.cordon(false)
		w.label("all-1g.10gb")
		w.passes("an end", func() bool { return !w.hasJournal() && w.reason() != config.ReasonRepartitioning })
		if !w.passesWithin(2000, w.done("all-1g.10gb")) {
			t.Errorf("%s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// fillManagedFields makes the client fill managedFields from here on, as API servers do.
func (w *world) fillManagedFields() {
	w.t.Helper()
	w.edit(func(n *corev1.Node) {
		n.ManagedFields = []metav1.ManagedFieldsEntry{{
			Manager: "kubelet", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{}}}`),
		}}
	})
}

// Promise 6.
func TestAnUncordonInTheMiddleCallsTheChangeOff(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		until func(w *world) bool
	}{
		{"before a pod has left", func(w *world) bool { return w.node().Spec.Unschedulable }},
		{"while the GPUs change", func(w *world) bool { return len(w.snapshot()[0].Instances) == 2 }},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				before := w.gpus.String()
				w.label("all-balanced")
				w.passes("the middle", func() bool { return row.until(w) })
				w.cordon(false)
				c := w.settle(config.ReasonCancelled)
				w.expectGivenBack()
				if !strings.Contains(c.Message, "a user or tool uncordoned the node") {
					t.Errorf("the message does not say why: %s", c.Message)
				}
				if after := w.gpus.String(); after != before {
					t.Errorf("the GPUs are not as they were, but\n%s", after)
				}
			})
		})
	}
	t.Run("and not when only the proof is left", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.label("all-balanced")
			w.passes("the proof", func() bool {
				return w.reason() == config.ReasonAwaitingCapacity && len(w.node().Spec.Taints) == 0
			})
			w.cordon(false)
			w.reach("all-balanced")
		})
	})
	t.Run("and is undone by policy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.settings.Drain.OnUncordon = config.UncordonRefence
			w.restart()
			w.startChange("all-balanced")
			w.cordon(false)
			w.passes("another cordon", func() bool { return w.node().Spec.Unschedulable })
			w.reach("all-balanced")
		})
	})
}

// Promise 13.
func TestOtherToolsAreWaitedForByName(t *testing.T) {
	t.Parallel()
	const kured = "weave.works/kured-reboot-in-progress"
	t.Run("before the release", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.startChange("all-balanced")
			w.annotate(kured, "2000-01-01T00:00:00Z")
			w.untilReason(config.ReasonOtherMaintenance)
			if !w.node().Spec.Unschedulable {
				t.Error("the node was uncordoned under kured's hands")
			}
			w.unannotate(kured)
			w.reach("all-balanced")
		})
	})
}

// KEP-5683: by these conditions other tools see how far a drain is.
func TestTheConditionsOfADrainFollowIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.grace = minutes
		w.label("all-balanced")
		is := func(kind corev1.NodeConditionType) bool {
			for _, c := range w.node().Status.Conditions {
				if c.Type == kind {
					return c.Status == corev1.ConditionTrue
				}
			}
			return false
		}
		w.passes("the drain", func() bool { return is(config.ConditionDrainInProgress) })
		if !is(config.ConditionMaintenanceInProgress) || is(config.ConditionDrained) {
			t.Error("it is not reported that the node is under maintenance, and not drained yet")
		}
		w.passes("the drain's end", func() bool { return is(config.ConditionDrained) })
		if !is(config.ConditionMaintenanceInProgress) || is(config.ConditionDrainInProgress) {
			t.Error("it is not reported that the node is under maintenance, and drained")
		}
		w.reach("all-balanced")
		w.passes("the end of all that", func() bool {
			return !is(config.ConditionDrained) && !is(config.ConditionDrainInProgress) && !is(config.ConditionMaintenanceInProgress)
		})
	})
}
