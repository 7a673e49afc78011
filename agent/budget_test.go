package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
)

// The agent repeats a change that succeeds each time as long as another program undoes it, if that leaves time in between.
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
			w.expectGivenBack()
		}
	})
}

// Promise 5. A budget that keeps the pod which the change restarts after the cut holds the change up before the cordon.
func TestABudgetOfThePodThatRestartsHoldsUpTheChangeBeforeTheCordon(t *testing.T) {
	t.Parallel()
	for namespace, byClaims := range map[string]bool{"dra": true, "kube-system": false} {
		t.Run(namespace, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = byClaims, byClaims
				w.converge("all-balanced")
				calls, fences := w.countChanges(nil), w.recordCordons()
				keeps, pod := true, w.podsIn(namespace)[0].Name
				w.budgetKeeps(func() bool { return keeps }, pod)
				w.label("all-1g.10gb")
				w.spend(time.Hour)
				c := w.condition()
				if c.Reason != string(config.ReasonEvictionBlocked) || !strings.Contains(c.Message, pod) || len(*fences) > 0 || *calls > 0 || w.hasJournal() {
					t.Errorf("after %d calls and %d cordons the node says %s: %s", *calls, len(*fences), c.Reason, c.Message)
				}
				keeps = false
				w.reach("all-1g.10gb")
			})
		})
	}
}
