package agent_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/host"
)

// blocks lets a disruption budget keep the pod.
func (w *world) blocks(name string) {
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

// Promise 8. Without a fence there is no cordon by which a change that is parked could be told from one that is not yet.
func TestOperandsAreBackOnAParkedNodeThatWasNotFenced(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, passthrough)
		w.operator(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.label("all-balanced")
		w.parked()
		w.spend(time.Hour)
		for label, value := range w.values() {
			if value != "true" {
				t.Errorf("%s is %s on a parked node", label, value)
			}
		}
	})
}

// One process makes many changes.
func TestAUnitHasItsTimeInEachChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		const unit = "nvidia-dcgm.service"
		slowly := func() {
			w.units.refuses = map[string]error{"stop " + unit: host.ErrJobRunning}
			w.passes("the stop", func() bool { return w.condition().Reason == string(config.ReasonStoppingUnits) })
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

// Promise 10: it would be stopped a moment after nobody owes it anything.
func TestAUnitThatIsStillStoppingWhenTheNodeIsGivenBackIsStarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		const unit = "nvidia-dcgm.service"
		w.units.refuses = map[string]error{"stop " + unit: host.ErrJobRunning}
		w.label("all-balanced")
		w.passes("the stop", func() bool { return w.condition().Reason == string(config.ReasonStoppingUnits) })
		w.units.states[unit], w.units.changed = "deactivating", nil
		w.passes("the end", func() bool { return !w.owed() })
		started := false
		for _, d := range w.units.did {
			started = started || d == "start "+unit
		}
		if !started {
			t.Errorf("the unit was never started again: %v", w.units.did)
		}
	})
}

// turns counts passes until stop, or fails after n.
func (w *world) turns(n int, stop func() bool) bool {
	w.t.Helper()
	for range n {
		if stop() {
			return true
		}
		w.turn()
		if pause := w.agent.Pass(w.t.Context()); pause > 0 {
			<-time.After(pause)
		}
	}
	return false
}

// Such as one that is activated by its socket.
func TestAUnitThatComesBackByItselfEndsTheChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		w.units.changed = func(name string) { w.units.states[name] = "active" }
		w.label("all-balanced")
		if !w.turns(400, func() bool {
			r := w.condition().Reason
			return !w.owed() && (r == string(config.ReasonStepHadNoEffect) || r == string(config.ReasonUnitFailed))
		}) {
			t.Errorf("after 400 passes the agent still stops it: %d times; %s", len(w.units.did), w.condition().Message)
		}
	})
}

// As a tool does that keeps the labels of nodes as a file says.
func TestALabelThatSomebodySetsBackEndsTheChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.operator(map[string]string{labelDCGM: "true"})
		w.label("all-balanced")
		writes := 0
		if !w.turns(400, func() bool {
			if w.values()[labelDCGM] == fence.PausedValue {
				writes++
				w.edit(func(n *corev1.Node) { n.Labels[labelDCGM] = "true" })
			}
			return !w.owed() && w.condition().Reason == string(config.ReasonStepHadNoEffect)
		}) {
			t.Errorf("after 400 passes the agent still pauses it: %d times; %s", writes, w.condition().Message)
		}
		w.givenBack()
	})
}

// The policy is to put the cordon back, and not to fight for it.
func TestAnUncordonAgainAndAgainEndsTheChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Drain.OnUncordon = config.UncordonRefence
		w.restart()
		w.label("all-balanced")
		writes := 0
		if !w.turns(400, func() bool {
			if w.node().Spec.Unschedulable {
				writes++
				w.cordon(false)
			}
			r := w.condition().Reason
			return !w.owed() && (r == string(config.ReasonStepHadNoEffect) || r == string(config.ReasonConverged))
		}) {
			t.Errorf("after 400 passes the agent still cordons it: %d times; %s", writes, w.condition().Message)
		}
	})
}

// The wish is not tried again for it.
func TestWhatAnAgentHasLeftIsGivenBackUnderAWishThatCannotBe(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"no-such-config", "failed"} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.operator(map[string]string{labelDCGM: "true"})
			if name == "failed" {
				w.fail("CreateGpuInstanceWithPlacement")
				w.label("all-balanced")
				w.settle(config.ReasonHardwareFailure)
			} else {
				w.label(name)
				w.spend(minutes)
			}
			w.edit(func(n *corev1.Node) { n.Labels[labelDCGM] = fence.PausedValue })
			if !w.turns(500, func() bool { return w.values()[labelDCGM] == "true" && !w.owed() }) {
				t.Errorf("%s: label stays %s: %s", name, w.values()[labelDCGM], w.condition().Message)
			}
		})
	}
}

// Promise 10. The change has begun, so that it is no time any more to wait without an end.
func TestAPodThatComesLateAndMayNotGoKeepsNoOperandsPaused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.operator(map[string]string{config.LabelDevicePlugin: "true", labelDCGM: "true"})
		w.label("all-balanced")
		w.passes("the pause", func() bool { return w.values()[labelDCGM] == fence.PausedValue })
		w.pod("late", string(w.snapshot()[1].UUID))
		w.blocks("late")
		if !w.turns(2500, func() bool {
			return !w.owed() && w.values()[config.LabelDevicePlugin] == "true" && w.values()[labelDCGM] == "true"
		}) {
			t.Errorf("labels %v: %s", w.values(), w.condition().Message)
		}
		w.givenBack()
	})
}

func TestACordonThatIsPutBackMovesNoDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Drain.OnUncordon = config.UncordonRefence
		w.restart()
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.grace = time.Hour
		w.label("all-balanced")
		w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
		w.blocks("trainer")
		w.cordon(false)
		if !w.turns(2500, func() bool { return !w.owed() }) {
			t.Errorf("%v %s", w.node().Spec, w.condition().Message)
		}
		w.givenBack()
	})
}

// Promises 5 and 10.
func TestAClientOfTheLibraryThatMayNotGoKeepsNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB}]")
		s, _ := labels.Parse("app=monitor")
		w.settings.Drain.Clients = []labels.Selector{s}
		w.restart()
		w.pod("monitor", "", func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": "monitor"}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		})
		w.blocks("monitor")
		w.label("all-balanced")
		w.passes("a day or an end", func() bool { return w.condition().Reason != "" })
		if !w.turns(3000, func() bool { return !w.owed() && w.condition().Reason == string(config.ReasonEvictionBlocked) }) {
			t.Errorf("%v %s: %s", w.node().Spec, w.condition().Reason, w.condition().Message)
		}
	})
}

// Promise 3.
func TestAClientOfTheLibraryThatHasAnInstanceIsEvicted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		s, _ := labels.Parse("app=monitor")
		w.settings.Drain.Clients = []labels.Selector{s}
		w.restart()
		w.converge("all-1g.10gb")
		w.pod("monitor", w.gpus.MIGDevice(0, 0), func(p *corev1.Pod) { p.Labels = map[string]string{"app": "monitor"} })
		w.label("all-3g.40gb")
		w.passes("the end", w.converged("all-3g.40gb"))
		if w.runs("monitor") {
			t.Error("the pod still runs, and its instance is gone")
		}
	})
}

// Pods may take all of their time, or more by a rule.
func TestAnOperandMayEndAfterTheDeadlineForPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Drain.AfterDeadline = config.AfterDeadlineDelete
		w.restart()
		w.operator(map[string]string{labelDCGM: "true"})
		w.turn()
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		w.lingers, w.grace = 20*time.Second, 24*time.Hour
		w.label("all-balanced")
		w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
		w.blocks("trainer")
		w.reach("all-balanced")
	})
}

// The API server refuses a guarded write of a node that somebody has written since the look, and some write 50 times a second.
func TestAChangeComesToItsEndWhileOthersWriteTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.edit(func(n *corev1.Node) { // what another tool has left is compared too
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelOperandPrefix+"client", "paused-for-mig-change")
			n.Spec.Taints = []corev1.Taint{{Key: "DeletionCandidateOfClusterAutoscaler", Value: "946684800", Effect: corev1.TaintEffectPreferNoSchedule}}
		})
		version := func() string { return fmt.Sprint(time.Now().UnixMilli() / 20) }
		w.client.PrependReactor("get", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			o, err := w.client.nodes.Get(corev1.SchemeGroupVersion.WithResource("nodes"), "", nodeName)
			if err != nil {
				return true, nil, err
			}
			n, ok := o.(*corev1.Node)
			if !ok {
				return false, nil, nil
			}
			n = n.DeepCopy()
			n.ResourceVersion = version()
			return true, n, nil
		})
		w.client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			patch, ok := a.(k8stesting.PatchAction)
			if !ok {
				return false, nil, nil
			}
			body := string(patch.GetPatch())
			if i := strings.Index(body, `"resourceVersion":"`); i >= 0 && !strings.HasPrefix(body[i+19:], version()+`"`) {
				return true, nil, apierrors.NewConflict(corev1.Resource("nodes"), nodeName, errors.New("the object has been modified"))
			}
			return false, nil, nil
		})
		w.slowness = 30 * time.Millisecond
		w.label("all-balanced")
		if !w.turns(400, w.converged("all-balanced")) {
			t.Errorf("after 400 passes: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

func TestAWishThatComesAfterAnUncordonIsNotCalledOffByIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.begin("all-balanced")
		w.cordon(false)
		w.label("all-1g.10gb")
		w.passes("an end", func() bool { return !w.owed() && w.condition().Reason != string(config.ReasonRepartitioning) })
		if !w.turns(2000, w.converged("all-1g.10gb")) {
			t.Errorf("%s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// The label may be there for nothing, beside a plugin that no selector finds.
func TestThereIsAFenceWhereTheLabelDeploysNoPlugin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		none, _ := labels.Parse("name=nobody")
		w.settings.DevicePlugin.PodSelector = []labels.Selector{none}
		w.restart()
		w.startPlugin()
		w.edit(func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelDevicePlugin, "true") })
		w.label("all-balanced")
		w.turns(500, func() bool {
			if len(w.snapshot()[0].Instances) > 0 && len(w.offered["nvidia.com/gpu"]) > 0 && !w.node().Spec.Unschedulable {
				t.Error("kubelet still gives out what goes, and the node is open")
				return true
			}
			return false
		})
	})
}

// Promise 3: what cannot be looked at counts as busy, not before the fence alone.
func TestNoGPUIsTouchedWhileTheProcessTableCannotBeRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		w.label("all-3g.40gb")
		w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
		w.breakTable()
		<-time.After(time.Minute)
		before := w.gpus.String()
		w.spend(5 * time.Minute)
		if after := w.gpus.String(); after != before {
			t.Errorf("the GPUs were changed while nobody could say who holds them: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// Promise 5. A change that has only created so far has disturbed nobody, and what it turns into is asked for like any other.
func TestAHarmlessChangeThatTurnsIntoAnotherIsPreparedLikeOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const kured = "weave.works/kured-reboot-in-progress"
		w := newWorld(t, h100)
		before := map[string]string{config.LabelDevicePlugin: "true"}
		w.operator(before)
		w.converge("all-enabled")
		w.begin("all-1g.10gb")
		w.annotate(kured, "2000-01-01T00:00:00Z")
		w.label("all-3g.40gb")
		w.passes("a word about kured", func() bool { return w.condition().Reason == string(config.ReasonOtherMaintenance) })
		w.spend(minutes)
		if diff := cmp.Diff(before, w.values()); diff != "" || w.node().Spec.Unschedulable {
			t.Errorf("the node is cordoned, or operands are paused (-before +after):\n%s", diff)
		}
		w.edit(func(n *corev1.Node) { delete(n.Annotations, kured) })
		w.reach("all-3g.40gb")
	})
}
