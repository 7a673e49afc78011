package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// Promise 11. Users can change each label by which a node belongs to its pool. The change keeps its slot there, whatever they do and whenever the agent is
// killed, until the node is open again: a second node that begins before that would break the limit.
func TestAChangeKeepsItsPool(t *testing.T) {
	t.Parallel()
	for name, relabel := range map[string]func(*world){
		"no label asks for the change any more":    func(w *world) { w.unset(config.LabelMIGConfig) },
		"the node leaves the pool":                 func(w *world) { w.unset("pool") },
		"the node moves to another pool":           func(w *world) { w.set("pool", "other") },
		"the node leaves the pool and the change":  func(w *world) { w.unset("pool"); w.unset(config.LabelMIGConfig) },
		"another config, and the node leaves, too": func(w *world) { w.unset("pool"); w.label("all-1g.10gb") },
		"the node leaves the pool, and a user deletes the Lease while the agent is down": func(w *world) {
			w.unset("pool")
			if err := w.client.CoordinationV1().Leases("gpuslice").Delete(w.t.Context(), config.LeasePrefix+"research", metav1.DeleteOptions{}); err != nil {
				w.t.Fatal(err)
			}
			w.restart()
			w.agent.Pass(w.t.Context())
		},
		"the node leaves the pool, and the maintenance file can no longer be read": func(w *world) { w.unset("pool"); w.setMaintenance("pools: [oops\n") },
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

// The agent of a node that has left its pool is down for longer than a slot lasts without it.
func TestAClosedNodeKeepsItsPoolWhileItsAgentIsDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		slots, pool, other := w.pool()
		w.grace = time.Hour
		w.label("all-balanced")
		w.passes("the drain", func() bool { return w.node().Spec.Unschedulable && w.holdsSlot() })
		w.unset("pool")
		for range 10 {
			<-time.After(time.Minute)
			if free(t, slots, pool, other) {
				t.Fatal("another node gets the slot while this one is closed")
			}
		}
		w.restart()
		w.passes("the end of the change", func() bool { return !w.node().Spec.Unschedulable && !w.hasJournal() })
		w.spend(time.Minute)
		if w.holdsSlot() || !free(t, slots, pool, other) {
			t.Errorf("the node is open, and the Lease says %s", w.slots())
		}
	})
}

// The slot has gone while the agent was down, and comes back with the Lease of a backup when the change has ended: a node at rest has none.
func TestASlotThatComesBackAfterItsChangeIsReturned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		slots, pool, other := w.pool()
		w.startChange("all-1g.10gb")
		backup := w.slots()
		w.editLease(func(l *coordinationv1.Lease) { delete(l.Annotations, config.AnnotationSlots) })
		w.restart()
		w.reach("all-1g.10gb")
		w.editLease(func(l *coordinationv1.Lease) { l.Annotations[config.AnnotationSlots] = backup })
		w.restart()
		w.spend(time.Minute)
		if w.holdsSlot() || !free(t, slots, pool, other) {
			t.Errorf("the node is at rest, and the Lease says %s", w.slots())
		}
		w.set("pool", "other")
		w.reach("all-1g.10gb")
	})
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

// A change that has a journal, disturbs nothing yet, and waits for a slot of one pool, asks another one once the node's labels choose that.
func TestAChangeThatWaitsFollowsTheNodeToAnotherPool(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		alike bool // the pool is that of the nodes with the same request
		move  func(*world)
		want  string // the request that converges
	}{
		"the label of its pool changes": {move: func(w *world) { w.set("pool", "other") }, want: "all-3g.40gb"},
		"the label changes, and no agent can read the former pool's Lease": {
			move: func(w *world) {
				w.editLease(func(l *coordinationv1.Lease) { l.Annotations[config.AnnotationSlots] = "{oops" })
				w.set("pool", "other")
			}, want: "all-3g.40gb",
		},
		"another request is of another pool": {alike: true, move: func(w *world) { w.label("all-disabled") }, want: "all-disabled"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, oneH100)
				w.turn()
				slots, pool, other := w.pool()
				w.setMaintenance(strings.Replace(onePool, "pools: [", "pools: [{name: other, selector: pool=other, maxUnavailable: 1}, ", 1))
				if row.alike {
					w.unset("pool")
				}
				w.converge("all-enabled")
				if row.alike {
					w.cordonOther(map[string]string{config.LabelMIGConfig: "all-3g.40gb"})
				} else if err := slots.Take(t.Context(), pool, other); err != nil {
					t.Fatal(err)
				}
				w.label("all-1g.10gb")
				w.passes("the instances", func() bool { return len(w.snapshot()[0].Instances) == 7 && w.hasJournal() })
				w.pod("holds", w.snapshot()[0].Instances[0].Devices[0].UUID)
				w.label("all-3g.40gb")
				w.passes("the queue", func() bool { return w.reason() == config.ReasonAwaitingSlot })
				row.move(w)
				if w.reach(row.want); strings.Contains(w.slots(), nodeName) {
					t.Errorf("the Lease of the former pool says %s", w.slots())
				}
			})
		})
	}
}

// cordonOther gives the other node of the pool these labels, and cordons it.
func (w *world) cordonOther(labels map[string]string) {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), "gpu-2", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	n.Labels, n.Spec.Unschedulable = labels, true
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}
