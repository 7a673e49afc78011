package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
)

// After a step of the clock, the agent cannot know how long ago it has seen renewals of other nodes.
func TestAStepOfTheClockTakesNoSlotFromANode(t *testing.T) {
	t.Parallel()
	for _, step := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			w := busy(t)
			c := &hostClock{readings: map[time.Time]time.Time{}}
			w.clock = c
			slots, pool, other := w.pool()
			if err := slots.Take(t.Context(), pool, other); err != nil {
				t.Fatal(err)
			}
			w.label("all-1g.10gb")
			w.untilReason(config.ReasonAwaitingSlot)
			w.spend(10 * time.Second)
			c.ahead = step
			for range 10 {
				w.spend(30 * time.Second)
				if err := slots.Renew(t.Context(), pool, other); err != nil {
					t.Fatal(err)
				}
			}
			if !w.runs("holder") {
				t.Errorf("a step of %s let the node begin beyond the limit", step)
			}
		})
	}
}

// The agent restores what another has left on the node, whatever the change waits for.
func TestWhatWasLeftWaitsForNoWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.fillManagedFields()
		w.setMaintenance("")
		w.budgetKeepsTeam()
		w.label("all-1g.10gb")
		w.untilCordoned()
		w.edit(func(n *corev1.Node) { delete(n.Annotations, config.AnnotationJournal) }) // a user removes the journal
		w.setMaintenance(until(time.Now()))
		w.spend(time.Hour)
		w.expectGivenBack()
		if !w.runs("holder") {
			t.Error("the pod was evicted")
		}
	})
}

// The agent is killed between the write that gives the node back and the one that reports it.
func TestWhatIsProvenIsKnownWhenTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneH100)
		w.setMaintenance("")
		w.converge("all-1g.10gb")
		w.label("all-7g.80gb")
		w.passes("the end", func() bool { return w.agent.NextStep(t.Context()) == plan.Release })
		_, revive := w.killAtPatch(func(patch string) bool { return strings.Contains(patch, config.AnnotationJournal+`":null`) }, true)
		w.agent.Pass(t.Context())
		revive()
		if w.hasJournal() {
			t.Fatal("the node is not given back")
		}
		w.setMaintenance(until(time.Now()))
		w.label("all-1g.10gb")
		w.spend(time.Hour)
		if n := len(w.snapshot()[0].Instances); n != 1 {
			t.Errorf("the GPU was cut into %d instances outside of the window", n)
		}
	})
}

// A waiting node keeps its age while the agent cannot read a file.
func TestARequestKeepsItsAgeWhileAFileCannotBeRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now()))
		w.profiles(onePart)
		w.profile("seven")
		w.untilReason(config.ReasonAwaitingWindow)
		since := w.status().Asked.Since
		w.spend(time.Hour)
		w.setFile("profiles", "nonsense")
		w.untilReason(config.ReasonInvalidCatalog)
		w.setFile("profiles", onePart)
		w.untilReason(config.ReasonAwaitingWindow)
		if again := w.status().Asked.Since; !again.Equal(since) {
			t.Errorf("the request is %s younger", again.Sub(since))
		}
	})
}

const onePart = `
apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  seven:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
`

// A hold that comes between the observation and the fence counts.
func TestAnAnnotationBetweenTheObservationAndTheFenceCounts(t *testing.T) {
	t.Parallel()
	for _, key := range []string{config.AnnotationHold, config.AnnotationForce} {
		synctest.Test(t, func(t *testing.T) {
			w := busy(t)
			w.setMaintenance("")
			if key == config.AnnotationForce {
				w.annotate(key, config.ForceNow)
			}
			w.label("all-1g.10gb")
			changed := false
			w.writeBeforeEachPatch(func(n *corev1.Node) {
				if changed {
					return
				}
				changed = true
				if key == config.AnnotationHold {
					metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, "stop")
				} else {
					delete(n.Annotations, key)
				}
			})
			w.passes("the fence", func() bool { return changed })
			if w.hasJournal() {
				t.Errorf("the fence was raised all the same, %s having changed", key)
			}
		})
	}
}

// An observation that ends early does not change the condition about the window.
func TestAnObservationThatEndsEarlyDoesNotSayThatNothingIsPlanned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(nights)
		w.spend(5 * time.Hour)
		w.label("all-1g.10gb")
		w.untilReason(config.ReasonAwaitingWindow)
		w.upgrade(true)
		w.untilReason(config.ReasonDriverNotLoaded)
		if p := w.planned(); p.Status != corev1.ConditionTrue {
			t.Errorf("MaintenancePlanned is %s: %s", p.Status, p.Message)
		}
	})
}

// An annotation that was meant for a request which is gone lets no later change begin.
func TestAForceGoesWithItsRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.setMaintenance(until(time.Now()))
		w.label("nonsense")
		w.annotate(config.AnnotationForce, config.ForceNow)
		w.spend(2 * time.Hour)
		w.unset(config.LabelMIGConfig)
		w.settle(config.ReasonNotRequested)
		w.spend(2 * time.Hour)
		w.label("all-1g.10gb")
		w.settle(config.ReasonAwaitingWindow)
		w.expectGivenBack()
	})
}
