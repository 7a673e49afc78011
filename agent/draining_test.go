package agent_test

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/nvml"
)

// Promise 12, in the middle of a change: the agent does not write again because less of a pod's grace period is left.
func TestAPodThatIsLeavingIsNoReasonToWriteAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return slow{d, time.Second} }
		w.setConfigs(firstOnly)
		w.turn()
		w.pod("leaving", w.gpus.UUIDs()[0], func(p *corev1.Pod) {
			end := metav1.NewTime(time.Now().Add(30 * time.Second))
			p.DeletionTimestamp, p.Finalizers = &end, []string{"team/archive"}
		})
		w.label("first-1g")
		if n := w.countWrites(10 * time.Minute); n > 11 { // the label, the conditions and the annotation are written apart
			t.Errorf("%d writes in 10 minutes", n)
		}
		if !w.hasJournal() || !w.runs("leaving") {
			t.Error("the change did not wait for the pod")
		}
	})
}

// countWrites lets the agent pass for d as its watch makes it, at once after each write of its own, while the cluster
// stands still. It returns how often the agent wrote.
func (w *world) countWrites(d time.Duration) int {
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
