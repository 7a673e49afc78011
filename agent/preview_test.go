package agent_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func TestAPreviewNamesWhatWaitsForAReboot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, passthrough)
		w.label("all-balanced")
		w.untilParked()
		w.passes("a word about both GPUs", func() bool { return strings.Contains(w.condition().Message, "GPUs 0, 1") })
		p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-balanced")
		if err != nil {
			t.Fatal(err)
		}
		if len(p.AtReboot) != 2 || p.Reboot {
			t.Errorf("%d GPUs are said to turn MIG on at the next reboot, and the steps wait for one: %t", len(p.AtReboot), p.Reboot)
		}
		w.reboot()
		w.reach("all-balanced")
	})
	t.Run("in the middle of the change", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := requested(t)
			p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-disabled")
			if err != nil {
				t.Fatal(err)
			}
			if len(p.AtReboot) != 0 || !p.Reboot {
				t.Errorf("%d GPUs are said to turn MIG on at the next reboot, and the steps wait for one: %t", len(p.AtReboot), p.Reboot)
			}
		})
	})
}

func TestAPreviewSaysWhenTheChangeWouldBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		runs := func(name string) string {
			t.Helper()
			p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, name)
			if err != nil {
				t.Fatal(err)
			}
			return p.Runs
		}
		expect := func(name, want string) {
			t.Helper()
			if got := runs(name); !strings.HasPrefix(got, want) {
				t.Errorf("%s runs %q, want %q", name, got, want)
			}
		}
		expect("all-1g.10gb", "at once: no window restricts it")
		expect("all-disabled", "")
		w.setMaintenance(nights)
		expect("all-1g.10gb", "at once: a window is open until Sat 2000-01-01 04:00:00Z")
		w.setMaintenance(nights + "freezes: [{from: '2000-01-01T00:00:00Z', to: '2000-01-02T00:00:00Z'}]\npools: [{name: all, selector: '!none', maxUnavailable: 2}]\n")
		expect("all-1g.10gb", "at Sun 2000-01-02 00:00:00Z, by the windows of pool all, when a slot is free (pool all changes at most 2 nodes at a time)")
		w.setMaintenance(until(time.Now()))
		expect("all-1g.10gb", "never: none of the windows of the maintenance file is as long as")
		w.annotate(config.AnnotationHold, "audit")
		expect("all-1g.10gb", `only after annotation gpuslice.io/hold ("audit") is removed`)
	})
}

// In the middle of a change a GPU that the label does not name may lack instances that a reset has taken. The agent recreates them, and the preview says so.
func TestAPreviewHasTheInstancesOfGPUsThatTheLabelDoesNotName(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, cutH100, config.HealthResetCritical)
		w.converge("all-3g.40gb")
		w.setConfigs(map[string]catalog.MIGConfig{"second": {{Indices: []int{1}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}}})
		w.converge("second")
		w.setRecoveryAction(0, 1)
		w.passes("the reset", func() bool { return w.resets() > 0 })
		if n := len(w.snapshot()[0].Instances); n > 0 {
			t.Fatalf("GPU 0 has %d instances, so that the preview shows nothing", n)
		}
		p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "second")
		if err != nil {
			t.Fatal(err)
		}
		if got := p.After[0].Geometry().String(); got != "3g.40gb@0 3g.40gb@4" {
			t.Errorf("after the change GPU 0 has %q; the steps are %v", got, p.Steps)
		}
	})
}

// The slot that a node has in its pool is none in the pool that other labels put it into.
func TestAPreviewOfAnotherPoolAsksForASlotThere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		const file = "jitter: 0s\nestimate: 1m\npools: [{name: former, selector: nvidia.com/mig.config=all-balanced, maxUnavailable: 1}, " +
			"{name: research, selector: nvidia.com/mig.config=all-1g.10gb, maxUnavailable: 1}]\n"
		w.setMaintenance(file)
		w.ready(nodeName)
		other := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-2", UID: "other-uid", Labels: map[string]string{config.LabelMIGConfig: "all-1g.10gb"}}, Status: withGPUs()}
		if _, err := w.client.CoreV1().Nodes().Create(t.Context(), other, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.ready("gpu-2")
		m, err := maintenance.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n" + file))
		if err != nil {
			t.Fatal(err)
		}
		slots, _, _ := w.otherNode()
		err = slots.Take(t.Context(), fleet.PoolOf(m, m.Pools[1]), fleet.Change{Node: "gpu-2", UID: types.UID("other-uid"), Operation: "other", Since: time.Now()})
		if err != nil {
			t.Fatal(err)
		}
		w.label("all-balanced")
		w.passes("the slot", func() bool { return w.agent.NextStep(t.Context()) == plan.Fence })
		p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-1g.10gb")
		if err != nil {
			t.Fatal(err)
		}
		if p.Reason != config.ReasonAwaitingSlot || !strings.Contains(p.HeldUp, "gpu-2") {
			t.Errorf("the only slot of pool research is that of gpu-2, and the change is held up by %s: %q; the steps are %v", p.Reason, p.HeldUp, p.Steps)
		}
	})
}

// bareBehind has a pod on GPU 0 that the drain policy keeps.
func bareBehind(w *world) { w.pod("notebook", w.gpus.UUIDs()[0], bare) }

const refusedNext = "; and then, as the node is now, EvictionBlocked: to let this change evict what would be lost: kubectl gpuslice apply gpu-1 --mig-config all-1g.10gb --force-unmanaged; " +
	"team/notebook: no controller"

// A change that is undone comes first, and what an earlier agent has left is restored whatever is requested. A plan says what becomes of its request.
func TestAPreviewSaysWhatAPassWouldDo(t *testing.T) {
	t.Parallel()
	failed := func(w *world) {
		w.setFault(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 10})
		w.label("all-1g.10gb")
		w.passes("the undo", func() bool { return strings.Contains(w.condition().Message, "undoing") })
	}
	for name, row := range map[string]struct {
		before     func(w *world)
		asked      string
		reason     config.Reason
		held, says string // that the change is held up; else it is refused
	}{
		"the change that is undone": {
			before: failed, asked: "all-1g.10gb", reason: config.ReasonHardwareFailure, says: "creating 1g.10gb@0 on GPU 0",
		},
		"another, while one is undone": {before: failed, asked: "all-balanced"},
		"an unknown name, in the middle of a change": {
			before: func(w *world) { w.startChange("all-1g.10gb") },
			asked:  "all-9g.999gb", reason: config.ReasonUnknownConfig, says: "the agent would undo the change to all-1g.10gb, which is under way",
		},
		"an unknown name, beside a taint that is left": {
			before: func(w *world) {
				w.edit(func(n *corev1.Node) {
					n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}}
				})
			},
			asked: "all-9g.999gb", reason: config.ReasonUnknownConfig, says: "all-9g.999gb",
		},
		"another GPU's process, in the middle of a change": {
			before: func(w *world) {
				w.converge("all-1g.10gb")
				w.setConfigs(map[string]catalog.MIGConfig{"second": {{Indices: []int{1}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}}})
				w.startGPUProcess(w.snapshot()[0].Instances[6].Devices[0].UUID, 4711, "python", "0::/user.slice/user-1000.slice/session-3.scope")
				w.label("second")
				w.passes("the fence", w.hasJournal)
			},
			asked: "all-balanced", reason: config.ReasonGPUInUse, held: "python",
		},
		"what the API server does not answer, is no refusal": {
			before: func(w *world) {
				w.setMaintenance("pools: [{name: all, selector: '!none', maxUnavailable: 1}]\n")
				w.client.PrependReactor("*", "leases", func(k8stesting.Action) (bool, runtime.Object, error) {
					return true, nil, apierrors.NewInternalError(errors.New("no leader"))
				})
				w.label("all-1g.10gb")
				w.passes("the failure", func() bool { return w.reason() == config.ReasonRetrying })
			},
			asked: "all-1g.10gb", says: "no leader",
		},
		"a closed window, and a bare pod behind it": {
			before: func(w *world) { bareBehind(w); w.setMaintenance(noon) }, asked: "all-1g.10gb", reason: config.ReasonAwaitingWindow,
			held: "at Sat 2000-01-01 12:00:00Z, by the windows of the maintenance file, when a slot is free (pool mig.all-1g.10gb changes at most 10% of its nodes at a time)" + refusedNext,
		},
		"no window, and a bare pod behind that": {
			before: func(w *world) { bareBehind(w); w.setMaintenance(until(time.Now())) }, asked: "all-1g.10gb", reason: config.ReasonAwaitingWindow,
			held: "never: none of the windows of the maintenance file is as long as the change takes, 10m0s" + refusedNext,
		},
		"a hold, and a bare pod behind it": {
			before: func(w *world) { bareBehind(w); w.annotate(config.AnnotationHold, "audit") }, asked: "all-1g.10gb", reason: config.ReasonHeld,
			held: `only after annotation gpuslice.io/hold ("audit") is removed` + refusedNext,
		},
		"a hold, and nothing behind it": {
			before: func(w *world) { w.annotate(config.AnnotationHold, "audit") }, asked: "all-1g.10gb", reason: config.ReasonHeld,
			held: `to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; changes nothing until annotation gpuslice.io/hold ("audit") is removed`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.before(w)
				got := w.ask(config.LabelMIGConfig + "=" + row.asked)
				if got.Reason != row.reason || !strings.Contains(got.Refused, row.says) || (row.says == "") != (got.Refused == "") ||
					!strings.Contains(got.HeldUp, row.held) || (row.held == "") != (got.HeldUp == "") {
					t.Errorf("the answer is %+v", got)
				}
			})
		})
	}
}
