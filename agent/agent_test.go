package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const h100 = "gpus:\n- model: H100-80GB\n  count: 2\n"

func TestEveryGeneratedConfigIsReachedFromEveryOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus:\n- model: A100-80GB\n  count: 1\n")
		names := config.Merge(config.Generate(w.snapshot()), nil).Names()
		for _, from := range names {
			for _, to := range names {
				w.converge(from)
				w.converge(to)
			}
		}
	})
}

// Promise 8: after each pass another agent process goes on, which knows nothing.
func TestAnAgentThatForgetsEverythingAfterEachPassConverges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-balanced")
		w.passes("proven capacity", func() bool {
			w.forget()
			return w.condition().Reason == string(config.ReasonConverged) && !w.owed()
		})
		w.givenBack()
	})
}

// Promise 10.
func TestAHardwareFailureBringsBackWhatWas(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-3g.40gb")
		w.settle(config.ReasonConverged)
		before := w.gpus.String()
		if err := w.gpus.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 10}); err != nil {
			t.Fatal(err)
		}
		w.label("all-1g.10gb")
		c := w.settle(config.ReasonHardwareFailure)
		w.givenBack()
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
			t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
		}
		if state := w.node().Labels[config.LabelMIGConfigState]; state != string(config.StateFailed) {
			t.Errorf("state label is %q, want failed", state)
		}
		if !strings.Contains(c.Message, "set it again") {
			t.Errorf("the message does not say how to try again: %s", c.Message)
		}

		// The next agent process does not disturb the node again for the same wish.
		w.restart()
		calls := w.gpus.Calls()
		for range 10 {
			w.turn()
			<-time.After(w.agent.Pass(t.Context()))
		}
		if diff := cmp.Diff(calls, w.gpus.Calls()); diff != "" {
			t.Errorf("the failed wish was tried again (-before +after):\n%s", diff)
		}

		// Nor does it when the driver has been away meanwhile.
		if err := w.gpus.Fail(gpusim.Init, gpusim.Fault{Return: gpusim.DriverNotLoaded, Times: 4}); err != nil {
			t.Fatal(err)
		}
		w.restart()
		w.passes("a word about the driver", func() bool { return w.condition().Reason == string(config.ReasonDriverNotLoaded) })
		w.settle(config.ReasonHardwareFailure)
		if diff := cmp.Diff(calls, w.gpus.Calls()); diff != "" {
			t.Errorf("the failed wish was tried again after the driver came back (-before +after):\n%s", diff)
		}

		// It tries the wish again once a user has withdrawn it and set it again.
		w.label("")
		w.settle(config.ReasonNotRequested)
		w.label("all-1g.10gb")
		w.settle(config.ReasonConverged)
		w.givenBack()
	})
}

// Promises 9 and 10: a plugin that shows nothing is no success.
func TestCapacityThatNeverComesIsUndone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-disabled")
		w.settle(config.ReasonConverged)
		before := w.gpus.String()
		w.broken = true
		w.label("all-1g.10gb")
		w.passes("undo", func() bool {
			return strings.Contains(w.node().Annotations[config.AnnotationJournal], `"undo"`)
		})
		w.broken = false
		w.settle(config.ReasonCapacityMismatch)
		w.givenBack()
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
			t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
		}
	})
}

func TestANewLabelInTheMiddleIsFollowedFromWhereTheNodeIs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.begin("all-balanced")
		w.label("all-3g.40gb")
		w.reach("all-3g.40gb")
	})
}

func TestNonsenseInTheMiddleIsUndone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := w.gpus.String()
		w.begin("all-balanced")
		w.label("nonsense")
		w.settle(config.ReasonUnknownConfig)
		w.givenBack()
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
			t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
		}
	})
}

// Promise 6.
func TestACordonFromBeforeStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.cordon(true)
		w.label("all-balanced")
		w.settle(config.ReasonConverged)
		if !w.node().Spec.Unschedulable {
			t.Error("a cordon that was there before was lifted")
		}
	})
}

func TestAProcessOfNoPodIsWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		gpu := string(w.snapshot()[0].UUID)
		if err := w.gpus.Hold(gpu, 4711, "python", 1000); err != nil {
			t.Fatal(err)
		}
		w.label("all-balanced")
		w.passes("a word about the process", func() bool { return w.condition().Reason == string(config.ReasonGPUInUse) })
		if err := w.gpus.Release(4711); err != nil {
			t.Fatal(err)
		}
		w.settle(config.ReasonConverged)
		w.givenBack()
	})
}

func TestADriverThatIsAwayIsWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-balanced")
		if err := w.gpus.Fail(gpusim.Init, gpusim.Fault{Return: gpusim.DriverNotLoaded, Times: 3}); err != nil {
			t.Fatal(err)
		}
		w.restart()
		w.passes("a word about the driver", func() bool { return w.condition().Reason == string(config.ReasonDriverNotLoaded) })
		if c := w.condition(); c.Status != corev1.ConditionUnknown {
			t.Errorf("condition is %s, want Unknown", c.Status)
		}
		w.settle(config.ReasonConverged)
	})
}

// Promise 13: a condition, taint, label and annotation of other programs stay as they are through a whole change.
func TestForeignKeysAreLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		n := w.node()
		n.Labels = map[string]string{"team": "a"}
		n.Annotations = map[string]string{"note": "b"}
		n.Spec.Taints = []corev1.Taint{{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoExecute}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: "GpuXidWatch", Status: corev1.ConditionFalse, Reason: "Fine"}}
		if _, err := w.client.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.label("all-balanced")
		w.settle(config.ReasonConverged)
		after := w.node()
		if after.Labels["team"] != "a" || after.Annotations["note"] != "b" {
			t.Errorf("labels %v, annotations %v", after.Labels, after.Annotations)
		}
		if diff := cmp.Diff(n.Spec.Taints, after.Spec.Taints); diff != "" {
			t.Errorf("taints (-before +after):\n%s", diff)
		}
		if !slices.Contains(after.Status.Conditions, n.Status.Conditions[0]) {
			t.Errorf("condition %v is not as it was among %v", n.Status.Conditions[0], after.Status.Conditions)
		}
	})
}

// Promise 10: a process that no user ends does not keep the node for ever.
func TestAProcessThatStaysPastTheDeadlineIsNoReasonToKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := w.gpus.String()
		if err := w.gpus.Hold(string(w.snapshot()[1].UUID), 4711, "python", 1000); err != nil {
			t.Fatal(err)
		}
		w.label("all-balanced")
		began := time.Now()
		w.settle(config.ReasonGPUInUse)
		w.givenBack()
		if took := time.Since(began); took < w.settings.Timeouts.Drain || took > w.settings.Timeouts.Drain+5*time.Minute {
			t.Errorf("given back after %s, want %s", took, w.settings.Timeouts.Drain)
		}
		if err := w.gpus.Release(4711); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
			t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
		}
	})
}
