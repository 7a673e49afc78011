package agent_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// writes lets the agent look for d as its watch makes it look, at once after each write of its own, while the cluster
// stands still. It returns how often the agent wrote.
func (w *world) writes(d time.Duration) int {
	w.t.Helper()
	n := 0
	for began := time.Now(); time.Since(began) < d; {
		before := len(w.client.Actions())
		pause := w.agent.Pass(w.t.Context())
		wrote := 0
		for _, a := range w.client.Actions()[before:] {
			if a.GetVerb() == "patch" {
				wrote++
			}
		}
		if n += wrote; wrote == 0 {
			<-time.After(pause)
		}
	}
	return n
}

// Promise 12, on the way there. That less and less of a pod's grace is left is no news.
func TestAPodThatIsLeavingIsNoReasonToWriteAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.through = func(d nvml.Driver) nvml.Driver { return slow{d, time.Second} }
		w.administer(firstOnly)
		w.turn()
		w.pod("leaving", w.gpus.UUIDs()[0], func(p *corev1.Pod) {
			end := metav1.NewTime(time.Now().Add(30 * time.Second))
			p.DeletionTimestamp, p.Finalizers = &end, []string{"team/archive"}
		})
		w.label("first-1g")
		if n := w.writes(10 * time.Minute); n > 11 { // the label, the conditions and the annotation are written apart
			t.Errorf("%d writes in 10 minutes", n)
		}
		if !w.owed() || !w.runs("leaving") {
			t.Error("the change did not wait for the pod")
		}
	})
}

// Promises 10 and 12: a node that cannot be given back says so, and nothing else.
func TestANodeThatCannotBeGivenBackIsQuiet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.through = func(d nvml.Driver) nvml.Driver { return slow{d, time.Second} }
		w.restart()
		w.converge("all-disabled")
		w.begin("all-1g.10gb")
		w.broken = true
		stalled := func() bool {
			return w.condition().Reason == string(config.ReasonCapacityMismatch) &&
				strings.Contains(w.condition().Message, "the node stays cordoned until this is mended")
		}
		w.passes("an end of the undo", stalled)
		w.restart()
		w.spend(2 * w.settings.Timeouts.Capacity) // in which the next agent waits for the capacity too

		if n, beats := w.writes(time.Hour), int(time.Hour/w.settings.NodeHeartbeat); n > beats+1 {
			t.Errorf("%d writes in an hour of %d heartbeats", n, beats)
		}
		if !stalled() || !w.owed() || !w.node().Spec.Unschedulable {
			t.Errorf("the node was given back, or says something else: %s", w.condition().Message)
		}
		w.broken = false
		w.startPlugin()
		w.settle(config.ReasonCapacityMismatch)
		w.givenBack()
	})
}

// A change that succeeds each time is repeated for as long as somebody else undoes it, if they leave time in between.
func TestRepairsOverTimeAreNotStepsWithoutEffect(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		for range 2 * w.settings.Retry.NoEffect {
			gpu := w.snapshot()[1]
			if err := w.gpus.Driver().Destroy(t.Context(), gpu.UUID, gpu.Instances[6].Placed); err != nil {
				t.Fatal(err)
			}
			w.passes("seven instances", func() bool { return len(w.snapshot()[1].Instances) == 7 })
			w.settle(config.ReasonConverged)
			w.givenBack()
		}
	})
}

// Promise 12: what has failed stays failed, also when nobody could say for a moment what was wished.
func TestAFileThatIsBrokenForAMomentDoesNotBringTheFailedWishBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.administer(firstOnly)
		w.fail(gpusim.CreateGpuInstanceWithPlacement)
		w.label("first-1g")
		w.settle(config.ReasonHardwareFailure)
		calls := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
		broken := true
		w.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
			return broken, &corev1.ConfigMap{}, nil
		})
		w.settle(config.ReasonInvalidCatalog)
		broken = false
		w.settle(config.ReasonHardwareFailure)
		w.spend(10 * time.Minute)
		w.givenBack()
		if again := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]; again != calls {
			t.Errorf("the failed wish was tried again, with %d calls", again-calls)
		}
	})
}

// Promises 8 and 12. The agent dies right after it has given the node back, before it could say anything else. Where it
// knows of no plugin to restart, that is the first thing it does on the way back.
func TestAnAgentThatDiesAtTheEndOfAnUndoLeavesWordOfTheFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-enabled")
		w.settings.DevicePlugin.PodSelector = nil
		w.restart()
		dead := false
		w.client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
			patch, ok := a.(k8stesting.PatchAction)
			if !ok || dead {
				return true, nil, errors.New("the agent is dead")
			}
			dead = strings.Contains(string(patch.GetPatch()), `"`+config.AnnotationJournal+`":null`)
			return false, nil, nil
		})
		w.fail(gpusim.CreateGpuInstanceWithPlacement)
		w.label("all-1g.10gb")
		w.passes("a release", func() bool { return dead })
		w.givenBack()
		calls := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
		dead = false
		w.restart()
		w.settle(config.ReasonHardwareFailure)
		w.spend(10 * time.Minute)
		if again := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]; again != calls {
			t.Errorf("the failed wish was tried again, with %d calls", again-calls)
		}
	})
}
