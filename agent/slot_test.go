package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// The tests of agent/act/fleet hold, on a real API server, that nodes agree. The tests here hold what the agent does with its slot.

const onePool = "jitter: 0s\nestimate: 1m\npools: [{name: research, selector: pool=research, maxUnavailable: 1, pauseAfter: 2}]\n"

// pool puts the node into a pool of two, and returns the other node's view of the slots.
func (w *world) pool() (*fleet.Leases, fleet.Pool, fleet.Change) {
	w.t.Helper()
	w.setMaintenance(onePool)
	w.set("pool", "research")
	w.ready(nodeName)
	other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-2", UID: "other-uid", Labels: map[string]string{"pool": "research"}}, Status: withGPUs()}
	if _, err := w.client.CoreV1().Nodes().Create(w.t.Context(), other, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	w.ready("gpu-2")
	return w.otherNode()
}

// withGPUs is the status of a node that kubelet gives GPUs to.
func withGPUs() corev1.NodeStatus {
	return corev1.NodeStatus{Capacity: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("8")}}
}

// otherNode is the other node's view of the slots of the pool.
func (w *world) otherNode() (*fleet.Leases, fleet.Pool, fleet.Change) {
	w.t.Helper()
	m, err := maintenance.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n" + onePool))
	if err != nil {
		w.t.Fatal(err)
	}
	slots := &fleet.Leases{Client: clientset.Of(w.client), Namespace: "gpuslice", Clock: clock.RealClock{}, Log: zap.NewNop()}
	return slots, fleet.PoolOf(m, m.Pools[0]), fleet.Change{Node: "gpu-2", UID: types.UID("other-uid"), Operation: "other", Since: time.Now()}
}

func (w *world) ready(name string) {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue})
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// slots is what the pool's Lease says of them; empty if there is none.
func (w *world) slots() string {
	object, err := w.client.Tracker().Get(coordinationv1.SchemeGroupVersion.WithResource("leases"), "gpuslice", config.LeasePrefix+"research")
	if err != nil {
		return ""
	}
	return object.(*coordinationv1.Lease).Annotations[config.AnnotationSlots] //nolint:errcheck // it is a Lease
}

// holdsSlot reports whether a node of the pool has a slot.
func (w *world) holdsSlot() bool { return strings.Contains(w.slots(), `"holders"`) }

// editLease writes the pool's Lease.
func (w *world) editLease(change func(*coordinationv1.Lease)) {
	w.t.Helper()
	leases := w.client.CoordinationV1().Leases("gpuslice")
	l, err := leases.Get(w.t.Context(), config.LeasePrefix+"research", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	change(l)
	if _, err := leases.Update(w.t.Context(), l, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// free reports whether the other node would get a slot.
func free(t *testing.T, slots *fleet.Leases, pool fleet.Pool, c fleet.Change) bool {
	t.Helper()
	if slots.Take(t.Context(), pool, c) != nil {
		return false
	}
	if err := slots.Leave(t.Context(), pool, c); err != nil {
		t.Fatal(err)
	}
	return true
}

// Promise 11.
func TestANodeWaitsForItsTurnInThePool(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		slots, pool, other := w.pool()
		if err := slots.Take(t.Context(), pool, other); err != nil {
			t.Fatal(err)
		}
		cordons := w.recordCordons()
		w.label("all-1g.10gb")
		c := w.untilReason(config.ReasonAwaitingSlot)
		if !strings.Contains(c.Message, "gpu-2") {
			t.Errorf("the node does not say for whom it waits: %s", c.Message)
		}
		for range 10 {
			w.spend(time.Minute)
			if err := slots.Renew(t.Context(), pool, other); err != nil {
				t.Fatal(err)
			}
		}
		w.expectGivenBack()
		if len(*cordons) > 0 {
			t.Errorf("the node was cordoned %d times while another had the slot", len(*cordons))
		}
		if err := slots.Release(t.Context(), pool, other); err != nil {
			t.Fatal(err)
		}
		w.reach("all-1g.10gb")
		if !free(t, slots, pool, other) {
			t.Error("the slot was not given back")
		}
	})
}

// The pool has to count a node in the middle of a change.
func TestTheSlotIsTheNodesUntilItIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(w *world){
		"by another process, too": (*world).restart,
		"although a user has deleted the Lease": func(w *world) {
			if err := w.client.CoordinationV1().Leases("gpuslice").Delete(w.t.Context(), config.LeasePrefix+"research", metav1.DeleteOptions{}); err != nil {
				w.t.Fatal(err)
			}
		},
		"while the driver is away": func(w *world) { w.upgrade(true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, oneH100)
				w.deployOperands(map[string]string{config.LabelDevicePlugin: "true"})
				w.operandGrace = 24 * time.Hour
				slots, pool, other := w.pool()
				w.settings.Timeouts.Drain = 24 * time.Hour
				w.restart()
				w.label("all-1g.10gb")
				w.passes("the pause", func() bool { return w.operandLabels()[config.LabelDevicePlugin] != "true" })
				then(w)
				for range 10 {
					w.spend(time.Minute)
					if free(t, slots, pool, other) {
						t.Fatal("another node gets a slot in the middle of the change")
					}
				}
			})
		})
	}
}

// A node that waits for something else keeps no other node waiting.
func TestANodeThatHasToWaitAfterAllGivesItsSlotBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		slots, pool, other := w.pool()
		held := func() bool {
			s, err := slots.Read(t.Context(), pool, fleet.Change{Node: nodeName, UID: w.node().UID})
			if err != nil {
				t.Fatal(err)
			}
			return s.Held
		}
		cordons, had := w.recordCordons(), false
		w.budgetKeeps(func() bool { return had }, "holder") // the budget is used up by the time that the node has its slot
		w.label("all-1g.10gb")
		w.passes("the slot", func() bool {
			had = had || held()
			return had
		})
		w.untilReason(config.ReasonEvictionBlocked)
		if held() || !free(t, slots, pool, other) {
			t.Error("a node that cannot be drained has a slot")
		}
		w.spend(time.Minute)
		if held() || len(*cordons) > 0 {
			t.Errorf("a minute later it has a slot: %t; it was cordoned %d times", held(), len(*cordons))
		}
	})
}

// Cause 9 of what keeps nodes: a slot is about concurrency alone.
func TestALostSlotEndsNoChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		w.pool()
		w.startChange("all-1g.10gb")
		leases := w.client.CoordinationV1().Leases("gpuslice")
		if err := leases.Delete(t.Context(), config.LeasePrefix+"research", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.reach("all-1g.10gb")
	})
}

func TestTheAgentThatDiedBetweenSlotAndFenceGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		slots, pool, other := w.pool()
		w.label("all-1g.10gb")
		_, revive := w.killAtPatch(func(patch string) bool { return strings.Contains(patch, config.TaintRepartitioning) }, false)
		for range 3 {
			w.agent.Pass(t.Context())
		}
		revive()
		if !w.holdsSlot() || w.hasJournal() {
			t.Fatalf("the agent was not killed between slot and fence: %s", w.slots())
		}
		w.reach("all-1g.10gb")
		if !free(t, slots, pool, other) {
			t.Error("the slot was not given back")
		}
	})
}

func TestAPoolPausesItselfAfterTooManyFailures(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, oneH100)
		w.turn()
		slots, pool, other := w.pool()
		w.failForGood("CreateGpuInstanceWithPlacement")
		w.label("all-1g.10gb")
		w.settle(config.ReasonHardwareFailure)
		if !free(t, slots, pool, other) {
			t.Fatal("one failure has paused the pool, or the slot was not given back")
		}
		w.failForGood("CreateGpuInstanceWithPlacement")
		w.label("all-balanced")
		w.passes("the second failure", func() bool {
			return w.reason() == config.ReasonHardwareFailure && strings.HasPrefix(w.status().Desired, "all-balanced") && !w.hasJournal()
		})
		if free(t, slots, pool, other) {
			t.Fatal("the pool goes on after two failures in a row")
		}
		w.label("all-2g.20gb")
		c := w.untilReason(config.ReasonPoolPaused)
		if !strings.Contains(c.Message, "gpu-1") || !strings.Contains(c.Message, config.AnnotationPaused) {
			t.Errorf("the node does not say who failed and how to go on: %s", c.Message)
		}
		w.editLease(func(l *coordinationv1.Lease) { delete(l.Annotations, config.AnnotationPaused) })
		w.reach("all-2g.20gb")
	})
}
