package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// register gives the node the taint of one that has just been registered.
func (w *world) register() {
	w.t.Helper()
	w.edit(func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule})
	})
}

func (w *world) keepsPodsAway() bool {
	n := w.node()
	return n.Spec.Unschedulable || len(n.Spec.Taints) > 0
}

// Promise 9: no pod comes to a fresh node before its capacity is proven, although the device plugin does.
func TestAFreshNodeIsOpenedWhenItsCapacityIsProven(t *testing.T) {
	t.Parallel()
	for _, wish := range []string{"all-balanced", "all-disabled"} { // a new node is as the second asks already
		t.Run(wish, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.register()
				w.label(wish)
				w.passes("an open node", func() bool { return !w.keepsPodsAway() })
				opened, offered := w.gpus.String(), w.node().Status.Allocatable
				w.reach(wish)
				if diff := cmp.Diff(w.gpus.String(), opened); diff != "" {
					t.Errorf("the GPUs when the node was opened (-later +then):\n%s", diff)
				}
				if diff := cmp.Diff(w.node().Status.Allocatable, offered); diff != "" || len(offered) == 0 {
					t.Errorf("the capacity when the node was opened (-later +then):\n%s", diff)
				}
			})
		})
	}
}

func TestAFreshNodeOfWhichNothingIsAskedIsOpened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.register()
		w.settle(config.ReasonNotRequested)
		w.givenBack()
	})
}

// A new node that the agent cannot make ready keeps its startup taint: its GPUs are not as the label asks.
func TestAFreshNodeThatCannotBeMadeReadyStaysTainted(t *testing.T) {
	t.Parallel()
	t.Run("since the wish is bad", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.register()
			w.label("all-9g.999gb")
			c := w.settle(config.ReasonUnknownConfig)
			w.spend(time.Hour)
			if !w.keepsPodsAway() || w.node().Spec.Unschedulable || !strings.Contains(c.Message, config.TaintNotReady) {
				t.Errorf("taints are %v, the message %q", w.node().Spec.Taints, c.Message)
			}
		})
	})
	t.Run("since the change fails", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.register()
			w.fail(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-balanced")
			w.settle(config.ReasonHardwareFailure)
			w.spend(time.Hour)
			n := w.node()
			if len(n.Spec.Taints) != 1 || n.Spec.Taints[0].Key != config.TaintNotReady || n.Spec.Unschedulable {
				t.Errorf("unschedulable is %t, taints are %v; want the startup taint alone", n.Spec.Unschedulable, n.Spec.Taints)
			}
		})
	})
}
