package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
)

// Promise 11. Users can change each label by which a node belongs to its pool. The change keeps its slot there, whatever they do and whenever the agent is
// killed, until the node is open again: another node that would begin meanwhile would pass the limit.
func TestAChangeKeepsItsPool(t *testing.T) {
	t.Parallel()
	for name, relabel := range map[string]func(*world){
		"no label asks for the change any more":    func(w *world) { w.unset(config.LabelMIGConfig) },
		"the node leaves the pool":                 func(w *world) { w.unset("pool") },
		"the node moves to another pool":           func(w *world) { w.set("pool", "other") },
		"the node leaves the pool and the change":  func(w *world) { w.unset("pool"); w.unset(config.LabelMIGConfig) },
		"another config, and the node leaves, too": func(w *world) { w.unset("pool"); w.label("all-1g.10gb") },
	} {
		for _, killed := range []bool{false, true} {
			t.Run(name+map[bool]string{true: ", and the agent is killed after each pass of it"}[killed], func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := busy(t)
					slots, pool, other := w.pool()
					w.setMaintenance(strings.Replace(onePool, "pools: [", "pools: [{name: other, selector: pool=other, maxUnavailable: 1}, ", 1))
					w.grace = 5 * time.Minute
					w.label("all-balanced")
					w.passes("the drain", func() bool { return w.node().Spec.Unschedulable && w.holdsSlot() })
					relabel(w)
					open := func() bool { return !w.node().Spec.Unschedulable && !w.hasJournal() }
					w.passes("the end of the change", func() bool {
						if killed && w.reason() != config.ReasonAwaitingCapacity { // the capacity has to be seen twice
							w.restart()
						}
						if !open() && free(t, slots, pool, other) {
							t.Error("another node gets the slot while this one is closed")
							return true
						}
						return open()
					})
					w.spend(time.Minute)
					if w.holdsSlot() || strings.Contains(w.slots(), nodeName) || !free(t, slots, pool, other) {
						t.Errorf("the node is open, and the Lease says %s", w.slots())
					}
				})
			})
		}
	}
}

// A node that waits in the queue of a pool, or has got a slot and not begun, leaves it when its labels choose no pool, or another, also by the next process.
func TestANodeLeavesTheQueueOfAPoolThatItsLabelsNoLongerChoose(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := busy(t)
			slots, pool, other := w.pool()
			if err := slots.Take(t.Context(), pool, other); err != nil {
				t.Fatal(err)
			}
			w.label("all-balanced")
			w.passes("the queue", func() bool { return strings.Contains(w.slots(), nodeName) })
			w.unset("pool")
			w.unset(config.LabelMIGConfig)
			if killed {
				w.restart()
			}
			w.spend(time.Minute)
			if strings.Contains(w.slots(), nodeName) {
				t.Errorf("killed %t: the Lease says %s", killed, w.slots())
			}
		})
	}
}
