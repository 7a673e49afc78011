package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// attribute lets the client say from here on who wrote what, as API servers do.
func (w *world) attribute() {
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
				w.givenBack()
				if !strings.Contains(c.Message, "somebody has uncordoned the node") {
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
				return w.condition().Reason == string(config.ReasonAwaitingCapacity) && len(w.node().Spec.Taints) == 0
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
			w.begin("all-balanced")
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
	t.Run("before the fence", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.annotate(kured, "2000-01-01T00:00:00Z")
			w.label("all-balanced")
			w.passes("a word", func() bool { return w.condition().Reason == string(config.ReasonOtherMaintenance) })
			if c := w.condition(); !strings.Contains(c.Message, "kured") || w.owed() || w.node().Spec.Unschedulable {
				t.Errorf("the node is touched, or kured not named: %s", c.Message)
			}
			w.edit(func(n *corev1.Node) { delete(n.Annotations, kured) })
			w.reach("all-balanced")
		})
	})
	t.Run("before the release", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.begin("all-balanced")
			w.annotate(kured, "2000-01-01T00:00:00Z")
			w.passes("a word", func() bool { return w.condition().Reason == string(config.ReasonOtherMaintenance) })
			if !w.node().Spec.Unschedulable {
				t.Error("the node was uncordoned under kured's hands")
			}
			w.edit(func(n *corev1.Node) { delete(n.Annotations, kured) })
			w.reach("all-balanced")
		})
	})
}

// The owner of a cordon is in managedFields, so that ours is known without a journal.
func TestWhatAnAgentHasLeftIsGivenBack(t *testing.T) {
	t.Parallel()
	t.Run("a cordon", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.attribute()
			w.begin("all-balanced")
			w.edit(func(n *corev1.Node) {
				delete(n.Annotations, config.AnnotationJournal)
				delete(n.Labels, config.LabelMIGConfig)
				n.Spec.Taints = nil
			})
			w.settle(config.ReasonNotRequested)
			w.givenBack()
		})
	})
	t.Run("a cordon that people want to keep", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.attribute()
			w.begin("all-balanced")
			w.annotate(config.AnnotationKeepCordoned, "for the night shift")
			w.passes("the end", w.converged("all-balanced"))
			w.spend(minutes)
			if !w.node().Spec.Unschedulable || w.owed() {
				t.Error("the node is uncordoned, or something is owed to it")
			}
			w.edit(func(n *corev1.Node) { delete(n.Annotations, config.AnnotationKeepCordoned) })
			w.passes("the cordon's end", func() bool { return !w.node().Spec.Unschedulable && !w.owed() })
		})
	})
	t.Run("a paused operand", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.operator(map[string]string{labelDCGM: fence.PausedValue, labelGFD: "false"})
			w.passes("the operand", func() bool { return w.values()[labelDCGM] == "true" })
			w.settle(config.ReasonNotRequested)
			w.givenBack()
			if w.values()[labelGFD] != "false" {
				t.Error("an operand that somebody has switched off was switched on")
			}
		})
	})
	t.Run("a paused operand that neither settings nor record know", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			const another = config.LabelOperandPrefix + "another"
			w.operator(map[string]string{another: fence.PausedValue, labelGFD: "true"})
			w.settle(config.ReasonNotRequested)
			w.spend(minutes)
			if got := w.values()[another]; got != fence.PausedValue {
				t.Errorf("the label is %s", got)
			}
		})
	})
	t.Run("an operand that was paused before the settings forgot it", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.operator(map[string]string{labelDCGM: "true"})
			w.label("all-balanced")
			w.passes("the pause", func() bool { return w.values()[labelDCGM] == fence.PausedValue })
			w.unannotate()
			w.settings.Operands = slices.DeleteFunc(slices.Clone(w.settings.Operands), func(label string) bool { return label == labelDCGM })
			w.restart()
			w.passes("the operand", func() bool { return w.values()[labelDCGM] == "true" })
		})
	})
	t.Run("what NVIDIA's mig-manager has left, where that is wanted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.edit(func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfigState, "pending") })
			w.operator(map[string]string{labelDCGM: "paused-for-mig-change", config.LabelDevicePlugin: "paused-for-mig-change"})
			w.spend(minutes)
			if w.values()[labelDCGM] != "paused-for-mig-change" || w.owed() {
				t.Fatal("it was touched without being asked for")
			}
			w.settings.Recover.Adopt = []string{config.AdoptMIGManager}
			w.restart()
			w.passes("the operands", func() bool {
				return w.values()[labelDCGM] == "true" && w.values()[config.LabelDevicePlugin] == "true"
			})
			w.settle(config.ReasonNotRequested)
			w.givenBack()
			if state := w.node().Labels[config.LabelMIGConfigState]; state == "pending" {
				t.Error("the state is still pending")
			}
		})
	})
}

// From one pod of a rollout to the next there is no mig-manager for some seconds, and it still minds its labels itself.
func TestWhatAMIGManagerHasPausedIsLeftToItForAMinute(t *testing.T) {
	t.Parallel()
	const paused = "paused-for-mig-change"
	adopting := func(t *testing.T) *world {
		t.Helper()
		w := newWorld(t, h100)
		w.settings.Recover.Adopt = []string{config.AdoptMIGManager}
		w.restart()
		w.agent.Begin()
		return w
	}
	manager := func(w *world, name string) {
		w.pod(name, "", func(p *corev1.Pod) {
			p.Labels, p.OwnerReferences = map[string]string{"app": "nvidia-mig-manager"}, ofDaemonSet("mig-manager")
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		})
	}
	leaves := func(w *world, name string) {
		w.t.Helper()
		if err := w.client.Tracker().Delete(podResource, "team", name); err != nil {
			w.t.Fatal(err)
		}
	}
	untouched := func(w *world, d time.Duration) {
		w.t.Helper()
		for began := time.Now(); time.Since(began) < d; <-time.After(5 * time.Second) { // as often as pods change
			w.turn()
			w.agent.Pass(w.t.Context())
		}
		if got := w.values()[labelDCGM]; got != paused || w.owed() {
			w.t.Fatalf("the label is %s, and something owed: %t", got, w.owed())
		}
	}
	restored := func(w *world, within time.Duration) {
		w.t.Helper()
		began := time.Now()
		w.passes("the operand", func() bool { return w.values()[labelDCGM] == "true" && !w.owed() })
		if took := time.Since(began); took > within {
			w.t.Errorf("it took %s, want %s at most", took, within)
		}
	}
	t.Run("in a rollout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := adopting(t)
			manager(w, "first")
			w.operator(map[string]string{labelDCGM: paused})
			untouched(w, minutes)
			leaves(w, "first")
			untouched(w, 30*time.Second)
			manager(w, "second")
			untouched(w, minutes)
			leaves(w, "second")
			restored(w, 90*time.Second)
		})
	})
	t.Run("after a start of the agent", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := adopting(t)
			w.operator(map[string]string{labelDCGM: paused})
			untouched(w, 50*time.Second)
			restored(w, 30*time.Second)
		})
	})
	t.Run("but what was taken on is given back at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := adopting(t)
			w.operator(map[string]string{labelDCGM: paused})
			w.passes("the journal", w.owed)
			w.restart()
			w.agent.Begin()
			restored(w, 30*time.Second)
		})
	})
}

// Who holds a foreign cordon, and since when, is what people ask first.
func TestACordonOfOthersIsReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.attribute()
		w.cordon(true)
		w.label("all-balanced")
		w.passes("the end", w.converged("all-balanced"))
		if c := w.condition(); !strings.Contains(c.Message, "cordoned by "+administrator+" since 2000-01-01") {
			t.Errorf("the message does not say whose the cordon is: %s", c.Message)
		}
		if !w.node().Spec.Unschedulable {
			t.Error("the cordon was lifted")
		}
	})
}

// KEP-5683: so other tools see what goes on.
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
			t.Error("it is not told that the node is under maintenance, and not drained yet")
		}
		w.passes("the drain's end", func() bool { return is(config.ConditionDrained) })
		if !is(config.ConditionMaintenanceInProgress) || is(config.ConditionDrainInProgress) {
			t.Error("it is not told that the node is under maintenance, and drained")
		}
		w.reach("all-balanced")
		w.passes("the end of all that", func() bool {
			return !is(config.ConditionDrained) && !is(config.ConditionDrainInProgress) && !is(config.ConditionMaintenanceInProgress)
		})
	})
}
