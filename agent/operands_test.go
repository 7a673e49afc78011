package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

const (
	labelExporter = config.LabelOperandPrefix + "dcgm-exporter"
	labelDCGM     = config.LabelOperandPrefix + "dcgm"
	labelGFD      = config.LabelOperandPrefix + "gpu-feature-discovery"
)

// deployOperands gives the node operands of the GPU operator, each with its label, which may have any value.
func (w *world) deployOperands(values map[string]string) {
	w.t.Helper()
	w.edit(func(n *corev1.Node) {
		for label, value := range values {
			metav1.SetMetaDataLabel(&n.ObjectMeta, label, value)
			w.operands = append(w.operands, label)
		}
	})
	slices.Sort(w.operands)
	w.turn()
}

// operandLabels returns the present labels of operands.
func (w *world) operandLabels() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, label := range w.operands {
		out[label] = w.node().Labels[label]
	}
	return out
}

// recordLabels notes each change of an operand's label, in the order in which they happen.
func (w *world) recordLabels(until func() bool) []string {
	w.t.Helper()
	var changes []string
	last := w.operandLabels()
	w.passes("the end", func() bool {
		for label, value := range w.operandLabels() {
			if last[label] != value {
				changes = append(changes, strings.TrimPrefix(label, config.LabelOperandPrefix)+" "+value)
				last[label] = value
			}
		}
		return until()
	})
	return changes
}

// Promises 7 and 13.
func TestOperandsArePausedInOrderAndResumedInReverse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := map[string]string{
			config.LabelDevicePlugin: "true", labelDCGM: "true", labelExporter: "true",
			labelGFD: "false", config.LabelOperandPrefix + "client": "paused-for-mig-change",
		}
		w.deployOperands(before)
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.label("all-balanced")
		got := w.recordLabels(w.done("all-balanced"))
		const paused = fence.PausedValue
		want := []string{
			"dcgm-exporter " + paused, "dcgm " + paused, "device-plugin " + paused,
			"device-plugin true", "dcgm true", "dcgm-exporter true",
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("labels, in the order in which they changed (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(before, w.operandLabels()); diff != "" {
			t.Errorf("labels (-before +after):\n%s", diff)
		}
		w.expectGivenBack()
	})
}

// Once the plugin is back, kubelet gives out what it offers, and a plugin with a wrong MIG strategy offers devices that do not exist. So the node
// stays fenced from before the agent pauses the plugin until the capacity is verified, even if no pod holds what goes.
func TestIdleGPUsAreChangedBehindTheFenceEvenIfALabelSendsThePluginAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true"})
		before := w.gpus.String()
		w.label("all-balanced")
		w.passes("the end", func() bool {
			n := w.node()
			if w.done("all-balanced")() {
				return true
			}
			if away := w.operandLabels()[config.LabelDevicePlugin] != "true"; (away || w.gpus.String() != before) && !n.Spec.Unschedulable && w.hasJournal() {
				t.Fatalf("the node is open in the middle of the change: plugin %s, GPUs\n%s", w.operandLabels()[config.LabelDevicePlugin], w.gpus)
			}
			return false
		})
		w.expectGivenBack()
	})
	t.Run("and a pod that gets it after all is evicted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
			w.label("all-balanced")
			w.passes("the pause", func() bool { return w.operandLabels()[labelDCGM] == fence.PausedValue })
			w.pod("late", string(w.snapshot()[1].UUID))
			w.untilCordoned()
			w.reach("all-balanced")
			if w.runs("late") {
				t.Error("the pod was not evicted")
			}
		})
	})
}

// Promise 10.
func TestOperandsComeBackAlsoWhenTheChangeFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"}
		w.deployOperands(before)
		w.failForGood("CreateGpuInstanceWithPlacement")
		w.label("all-balanced")
		w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		if diff := cmp.Diff(before, w.operandLabels()); diff != "" {
			t.Errorf("labels (-before +after):\n%s", diff)
		}
	})
}

// Kubelet ends no pod that has a claim without the claim's driver. The agent does not pause that even if it is among the operands in the settings.
func TestTheDriverOfClaimsIsNeverPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		const label = config.LabelOperandPrefix + "dra-driver"
		w.startDRADriver("", func(p *corev1.Pod) { // a device plugin gives out the GPUs, and this driver compute domains alone
			p.Spec.NodeSelector = map[string]string{label: "true"}
			p.Spec.Containers[0].Name, p.Spec.Containers[0].Args = "compute-domains", []string{"compute-domain-kubelet-plugin -v 6"}
		})
		w.settings.Operands = append(w.settings.Operands, label)
		w.restart()
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", label: "true"})
		w.label("all-balanced")
		got := w.recordLabels(w.done("all-balanced"))
		if diff := cmp.Diff([]string{"device-plugin " + fence.PausedValue, "device-plugin true"}, got); diff != "" {
			t.Errorf("labels, in the order in which they changed (-want +got):\n%s", diff)
		}
	})
}

// Promise 15. A pod of no DaemonSet may have that driver's label and folder, and select nodes by an operand's.
func TestAPodThatSaysItIsTheDriverOfClaimsKeepsNoOperand(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.pod("tenant", "", func(p *corev1.Pod) {
			p.Labels = map[string]string{"dra-driver-nvidia-gpu-component": "kubelet-plugin"}
			p.Spec.Volumes = []corev1.Volume{{Name: "registry", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/plugins_registry"}}}}
			p.Spec.NodeSelector = map[string]string{labelDCGM: "true"}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		})
		w.label("all-balanced")
		got := w.recordLabels(w.done("all-balanced"))
		if want := "dcgm " + fence.PausedValue; !slices.Contains(got, want) {
			t.Errorf("the operand was not paused: %v", got)
		}
	})
}

// Another tool may change a label in the middle. The label is that tool's then.
func TestAnOperandThatAnotherToolPausesInTheMiddleStaysPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.label("all-balanced")
		w.passes("the pause", func() bool { return w.operandLabels()[config.LabelDevicePlugin] == fence.PausedValue })
		w.set(labelDCGM, "paused-for-mig-change")
		w.reach("all-balanced")
		if got := w.operandLabels()[labelDCGM]; got != "paused-for-mig-change" {
			t.Errorf("the label is %s", got)
		}
	})
}

// budgetKeepsPod lets a disruption budget keep the pod.
func (w *world) budgetKeepsPod(name string) {
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		if action.GetSubresource() != "eviction" {
			return false, nil, nil
		}
		e, ok := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
		if ok && e.Name == name {
			return true, nil, apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
		}
		return false, nil, nil
	})
}

// Promise 8. Without a fence there is no cordon by which the agent could know a parked change from one that is not parked yet.
func TestOperandsAreBackOnAParkedNodeThatWasNotFenced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, passthrough)
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.label("all-balanced")
		w.untilParked()
		w.spend(time.Hour)
		for label, value := range w.operandLabels() {
			if value != "true" {
				t.Errorf("%s is %s on a parked node", label, value)
			}
		}
	})
}

// Some tools keep the labels of nodes as a file says, a socket may start a unit again, and a user may uncordon a node that the agent cordons again by
// the settings: the agent does not do a step again and again.
func TestAStepThatIsUndoneAgainAndAgainEndsTheChange(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		node func(t *testing.T) *world
		undo func(w *world) bool // reports whether there was something to undo
		says []config.Reason
	}{
		"an operand's pause": {func(t *testing.T) *world {
			t.Helper()
			w := newWorld(t, h100)
			w.deployOperands(map[string]string{labelDCGM: "true"})
			return w
		}, func(w *world) bool {
			paused := w.operandLabels()[labelDCGM] == fence.PausedValue
			if paused {
				w.set(labelDCGM, "true")
			}
			return paused
		}, []config.Reason{config.ReasonStepHadNoEffect}},
		"a cordon": {func(t *testing.T) *world {
			t.Helper()
			w := newWorld(t, h100)
			w.settings.Drain.OnUncordon = config.UncordonRefence
			w.restart()
			return w
		}, func(w *world) bool {
			cordoned := w.node().Spec.Unschedulable
			if cordoned {
				w.cordon(false)
			}
			return cordoned
		}, []config.Reason{config.ReasonStepHadNoEffect, config.ReasonConverged}},
		"the stop of a unit": {func(t *testing.T) *world {
			t.Helper()
			w := monitored(t)
			w.units.changed = func(name string) { w.units.states[name] = "active" }
			return w
		}, func(w *world) bool { return len(w.units.did) > 0 }, []config.Reason{config.ReasonStepHadNoEffect, config.ReasonUnitFailed}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := row.node(t)
				w.label("all-balanced")
				undone := 0
				if !w.passesWithin(400, func() bool {
					if row.undo(w) {
						undone++
					}
					return !w.hasJournal() && slices.Contains(row.says, w.reason())
				}) || undone == 0 {
					t.Errorf("it was undone %d times; %s: %s", undone, w.reason(), w.condition().Message)
				}
				w.expectGivenBack()
			})
		})
	}
}

// Promise 10. The change has begun, so the agent does not wait without a deadline any more.
func TestAPodThatComesLateAndMayNotGoKeepsNoOperandsPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployOperands(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.label("all-balanced")
		w.passes("the pause", func() bool { return w.operandLabels()[labelDCGM] == fence.PausedValue })
		w.pod("late", string(w.snapshot()[1].UUID))
		w.budgetKeepsPod("late")
		if !w.passesWithin(2500, func() bool {
			return !w.hasJournal() && w.operandLabels()[config.LabelDevicePlugin] == "true" && w.operandLabels()[labelDCGM] == "true"
		}) {
			t.Errorf("labels %v: %s", w.operandLabels(), w.condition().Message)
		}
		w.expectGivenBack()
	})
}

// Pods may take all of their time, or more by a rule.
func TestAnOperandMayEndAfterTheDeadlineForPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Drain.AfterDeadline = config.AfterDeadlineDelete
		w.restart()
		w.deployOperands(map[string]string{labelDCGM: "true"})
		w.turn()
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.operandGrace, w.grace = 20*time.Second, 24*time.Hour
		w.label("all-balanced")
		w.untilCordoned()
		w.budgetKeepsPod("trainer")
		w.reach("all-balanced")
	})
}
