package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// The label may have no effect, beside a plugin that does not select by it.
func TestThereIsAFenceWhereTheLabelDeploysNoPlugin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startPlugin(corev1.Toleration{Operator: corev1.TolerationOpExists})
		w.set(config.LabelDevicePlugin, "true")
		w.label("all-balanced")
		w.passes("the last instance", func() bool {
			if len(w.snapshot()[0].Instances) > 0 && len(w.offered["nvidia.com/gpu"]) > 0 && !w.node().Spec.Unschedulable {
				t.Fatal("kubelet still gives out what goes, and the node is open")
			}
			return len(w.snapshot()[1].Instances) == 4
		})
	})
}

// Promise 5. A change that has only created instances so far has disturbed no pod. If a user turns it into one that does, the agent checks
// first that it can come to its end, as before any other.
func TestAHarmlessChangeThatTurnsIntoAnotherIsPreparedLikeOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const kured = "weave.works/kured-reboot-in-progress"
		w := newWorld(t, h100)
		before := map[string]string{config.LabelDevicePlugin: "true"}
		w.deployOperands(before)
		w.converge("all-enabled")
		w.startChange("all-1g.10gb")
		w.annotate(kured, "2000-01-01T00:00:00Z")
		w.label("all-3g.40gb")
		w.untilReason(config.ReasonOtherMaintenance)
		w.spend(minutes)
		if diff := cmp.Diff(before, w.operandLabels()); diff != "" || w.node().Spec.Unschedulable {
			t.Errorf("the node is cordoned, or operands are paused (-before +after):\n%s", diff)
		}
		w.unannotate(kured)
		w.reach("all-3g.40gb")
	})
}

// Promises 10 and 12: if the agent cannot give a node back, it reports that, and writes nothing else.
func TestANodeThatCannotBeGivenBackIsQuiet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return slow{d, time.Second} }
		w.restart()
		w.converge("all-disabled")
		w.startChange("all-1g.10gb")
		w.pluginBroken = true
		stalled := func() bool {
			return w.reason() == config.ReasonCapacityMismatch &&
				strings.Contains(w.condition().Message, "the node stays cordoned until this is mended")
		}
		w.passes("an end of the undo", stalled)
		w.restart()
		w.spend(2 * w.settings.Timeouts.Capacity) // in which the next agent waits for the capacity too

		if n, beats := w.countWrites(time.Hour), int(time.Hour/w.settings.NodeHeartbeat); n > beats+1 {
			t.Errorf("%d writes in an hour of %d heartbeats", n, beats)
		}
		if !stalled() || !w.hasJournal() || !w.node().Spec.Unschedulable {
			t.Errorf("the node was given back, or says something else: %s", w.condition().Message)
		}
		w.pluginBroken = false
		w.startPlugin()
		w.settle(config.ReasonCapacityMismatch)
		w.expectGivenBack()
	})
}
