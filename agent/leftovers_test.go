package agent_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// The agent does not try the request again for that.
func TestWhatAnAgentHasLeftIsGivenBackUnderARequestThatCannotBeMet(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"no-such-config", "failed"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.deployOperands(map[string]string{labelDCGM: "true"})
			if name == "failed" {
				w.failForGood("CreateGpuInstanceWithPlacement")
				w.label("all-balanced")
				w.settle(config.ReasonHardwareFailure)
			} else {
				w.label(name)
				w.spend(minutes)
			}
			w.set(labelDCGM, fence.PausedValue)
			if !w.passesWithin(500, func() bool { return w.operandLabels()[labelDCGM] == "true" && !w.hasJournal() }) {
				t.Errorf("%s: label stays %s: %s", name, w.operandLabels()[labelDCGM], w.condition().Message)
			}
		})
	}
}

// The owner of a cordon is in managedFields, so that the agent knows its own without a journal.
func TestWhatAnAgentHasLeftIsGivenBack(t *testing.T) {
	t.Parallel()
	t.Run("a cordon", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.fillManagedFields()
			w.startChange("all-balanced")
			w.edit(func(n *corev1.Node) {
				delete(n.Annotations, config.AnnotationJournal)
				delete(n.Labels, config.LabelMIGConfig)
				n.Spec.Taints = nil
			})
			w.settle(config.ReasonNotRequested)
			w.expectGivenBack()
		})
	})
	t.Run("a cordon that people want to keep", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.fillManagedFields()
			w.startChange("all-balanced")
			w.annotate(config.AnnotationKeepCordoned, "for the night shift")
			w.passes("the end", w.done("all-balanced"))
			w.spend(minutes)
			if !w.node().Spec.Unschedulable || w.hasJournal() {
				t.Error("the node is uncordoned, or something is still to be restored")
			}
			w.unannotate(config.AnnotationKeepCordoned)
			w.passes("the cordon's end", func() bool { return !w.node().Spec.Unschedulable && !w.hasJournal() })
		})
	})
	t.Run("a paused operand", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.deployOperands(map[string]string{labelDCGM: fence.PausedValue, labelGFD: "false"})
			w.passes("the operand", func() bool { return w.operandLabels()[labelDCGM] == "true" })
			w.settle(config.ReasonNotRequested)
			w.expectGivenBack()
			if w.operandLabels()[labelGFD] != "false" {
				t.Error("an operand that a user has switched off was switched on")
			}
		})
	})
	t.Run("a paused operand that neither settings nor record know", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			const another = config.LabelOperandPrefix + "another"
			w.deployOperands(map[string]string{another: fence.PausedValue, labelGFD: "true"})
			w.settle(config.ReasonNotRequested)
			w.spend(minutes)
			if got := w.operandLabels()[another]; got != fence.PausedValue {
				t.Errorf("the label is %s", got)
			}
		})
	})
	t.Run("an operand that was paused before the settings forgot it", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.deployOperands(map[string]string{labelDCGM: "true"})
			w.label("all-balanced")
			w.passes("the pause", func() bool { return w.operandLabels()[labelDCGM] == fence.PausedValue })
			w.unannotate(config.AnnotationJournal)
			w.settings.Operands = slices.DeleteFunc(slices.Clone(w.settings.Operands), func(label string) bool { return label == labelDCGM })
			w.restart()
			w.passes("the operand", func() bool { return w.operandLabels()[labelDCGM] == "true" })
		})
	})
	t.Run("what NVIDIA's mig-manager has left, where that is wanted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.set(config.LabelMIGConfigState, "pending")
			w.deployOperands(map[string]string{labelDCGM: "paused-for-mig-change", config.LabelDevicePlugin: "paused-for-mig-change"})
			w.spend(minutes)
			if w.operandLabels()[labelDCGM] != "paused-for-mig-change" || w.hasJournal() {
				t.Fatal("it was touched without being asked for")
			}
			w.settings.Recover.Adopt = []string{config.AdoptMIGManager}
			w.restart()
			w.passes("the operands", func() bool {
				return w.operandLabels()[labelDCGM] == "true" && w.operandLabels()[config.LabelDevicePlugin] == "true"
			})
			w.settle(config.ReasonNotRequested)
			w.expectGivenBack()
			if state := w.node().Labels[config.LabelMIGConfigState]; state == "pending" {
				t.Error("the state is still pending")
			}
		})
	})
}

// During a rollout there is no mig-manager for some seconds, and the next one restores its labels itself.
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
		if got := w.operandLabels()[labelDCGM]; got != paused || w.hasJournal() {
			w.t.Fatalf("the label is %s, and a journal is there: %t", got, w.hasJournal())
		}
	}
	restored := func(w *world, within time.Duration) {
		w.t.Helper()
		began := time.Now()
		w.passes("the operand", func() bool { return w.operandLabels()[labelDCGM] == "true" && !w.hasJournal() })
		if took := time.Since(began); took > within {
			w.t.Errorf("it took %s, want %s at most", took, within)
		}
	}
	t.Run("in a rollout", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := adopting(t)
			manager(w, "first")
			w.deployOperands(map[string]string{labelDCGM: paused})
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
			w.deployOperands(map[string]string{labelDCGM: paused})
			untouched(w, 50*time.Second)
			restored(w, 30*time.Second)
		})
	})
	t.Run("but what was taken on is given back at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := adopting(t)
			w.deployOperands(map[string]string{labelDCGM: paused})
			w.passes("the journal", w.hasJournal)
			w.restart()
			w.agent.Begin()
			restored(w, 30*time.Second)
		})
	})
}
