package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// healthDisk is where the agent's processes remember the health of the GPUs.
type healthDisk struct {
	mu   sync.Mutex
	text []byte
}

// Read implements health.Store.
func (d *healthDisk) Read(context.Context) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.text), nil
}

// Write implements health.Store.
func (d *healthDisk) Write(_ context.Context, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.text = slices.Clone(data)
	return nil
}

// watch has the agent watch the health of the GPUs, in place of the one before.
func (w *world) watch() {
	if w.stopWatch != nil {
		w.stopWatch()
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	a, ended := w.agent, make(chan struct{})
	go func() {
		defer close(ended)
		a.WatchParts(ctx)
	}()
	w.stopWatch = func() {
		cancel()
		<-ended
		w.stopWatch = nil
	}
}

// newSickWorld is a world whose agent resets GPUs that are not well, by the settings.
func newSickWorld(t *testing.T, models string, reset config.HealthReset) *world {
	t.Helper()
	w := newWorld(t, models)
	w.settings.Health.Reset = reset
	w.health = &healthDisk{}
	w.restart()
	t.Cleanup(func() { w.stopWatch() })
	return w
}

// setRecoveryAction has the driver recommend an action for a GPU.
func (w *world) setRecoveryAction(gpu, action int) {
	w.t.Helper()
	if err := w.gpus.SetHealth(gpu, gpusim.Health{RecoveryAction: action}); err != nil {
		w.t.Fatal(err)
	}
}

// unhealthy is what the node says of its GPUs.
func (w *world) unhealthy() corev1.NodeCondition {
	w.t.Helper()
	if c := report.Find(w.node(), config.ConditionGPUUnhealthy); c != nil {
		return *c
	}
	return corev1.NodeCondition{}
}

func (w *world) healed() bool {
	return w.unhealthy().Status == corev1.ConditionFalse && !w.hasJournal()
}

// resets counts those of the library so far.
func (w *world) resets() int { return w.gpus.Calls()[gpusim.Reset] }

const cutH100 = "gpus: [{model: H100-80GB, mig: true, count: 2}]"

// A GPU whose driver recommends a reset is reset when its pods have left, and cut again as asked; the other GPU and its pods are not touched.
func TestAGPUThatIsNotWellIsResetAndCutAgain(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		request, want string
		byClaims      bool
	}{
		"as asked":                     {request: "all-3g.40gb", want: "3g.40gb@0 3g.40gb@4"},
		"as before, of a former label": {want: "3g.40gb@0 3g.40gb@4"},
		"by NVIDIA's DRA driver":       {request: "all-3g.40gb", want: "3g.40gb@0 3g.40gb@4", byClaims: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				models := cutH100
				if row.byClaims { // NVIDIA's DRA driver offers no GPU that has MIG mode on and no instance
					models = h100
				}
				w := newSickWorld(t, models, config.HealthResetCritical)
				w.noPlugin, w.draDriver = row.byClaims, row.byClaims
				w.spend(time.Minute)
				w.converge("all-3g.40gb")
				if row.request == "" {
					w.label("")
					w.settle(config.ReasonNotRequested)
				}
				stays := w.snapshot()[1].Instances
				if row.byClaims {
					w.podWithClaim("leaves", "gpu-0-mig-3g40gb-4")
					w.podWithClaim("stays", "gpu-1-mig-3g40gb-0")
				} else {
					w.pod("leaves", w.gpus.MIGDevice(0, 4))
					w.pod("stays", w.gpus.MIGDevice(1, 0))
				}
				w.setRecoveryAction(0, 1)
				w.passes("the condition", func() bool { return w.unhealthy().Status == corev1.ConditionTrue })
				if said := w.unhealthy().Message; !strings.Contains(said, "the agent resets it") {
					t.Errorf("the message does not say who resets it: %s", said)
				}
				w.passes("the end", func() bool { return w.resets() > 0 && w.healed() })
				w.spend(time.Hour)
				if got := w.snapshot()[0].Geometry().String(); got != row.want || w.resets() != 1 || w.runs("leaves") || !w.runs("stays") {
					t.Errorf("it is cut as %q, want %q, after %d resets; the pod on it runs: %v, the other one: %v", got, row.want, w.resets(), w.runs("leaves"), w.runs("stays"))
				}
				if now := w.snapshot()[1].Instances; fmt.Sprint(now) != fmt.Sprint(stays) {
					t.Errorf("the other GPU has %v, and had %v", now, stays)
				}
				w.expectGivenBack()
				if state := w.node().Labels[config.LabelMIGConfigState]; row.request == "" && state == string(config.StatePending) {
					t.Errorf("the state label says %q, and nothing is asked for", state)
				}
			})
		})
	}
}

// Idle or not, a GPU is reset in a window.
func TestAResetWaitsForItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, cutH100, config.HealthResetCritical)
		w.setMaintenance(twoHours)
		w.converge("all-3g.40gb")
		w.spend(65 * time.Minute)
		w.setRecoveryAction(0, 1)
		w.spend(150 * time.Minute) // longer than the drain and the capacity may take
		if reason := w.condition().Reason; w.resets() != 0 || reason != string(config.ReasonAwaitingWindow) || w.node().Spec.Unschedulable {
			t.Fatalf("%d resets outside of the window; the node says %s", w.resets(), reason)
		}
		w.passes("the end", func() bool { return w.resets() > 0 && w.healed() })
		if hour := time.Now().UTC().Hour(); hour != 4 {
			t.Errorf("it was reset at %d o'clock", hour)
		}
		w.reach("all-3g.40gb")
	})
}

// By default nothing is reset, and of what is merely due nothing but by its own setting.
func TestWhichGPUsAreResetIsASetting(t *testing.T) {
	t.Parallel()
	critical, degraded := gpusim.Health{RecoveryAction: 1}, gpusim.Health{RemapPending: true}
	for name, row := range map[string]struct {
		when   config.HealthReset
		health gpusim.Health
		want   int
	}{
		"never":                       {config.HealthResetNever, critical, 0},
		"what is due, by critical":    {config.HealthResetCritical, degraded, 0},
		"what is due, by degraded":    {config.HealthResetDegraded, degraded, 1},
		"critical, by degraded":       {config.HealthResetDegraded, critical, 1},
		"what a reboot is to recover": {config.HealthResetDegraded, gpusim.Health{RecoveryAction: 2}, 0},
		"what is to be drained first": {config.HealthResetDegraded, gpusim.Health{RecoveryAction: 3}, 0},
		"what a reset does not mend":  {config.HealthResetDegraded, gpusim.Health{RemapFailed: true}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSickWorld(t, "gpus: [{model: H200, count: 2}]", row.when)
				w.settle(config.ReasonNotRequested)
				if err := w.gpus.SetHealth(0, row.health); err != nil {
					t.Fatal(err)
				}
				w.spend(time.Hour)
				if w.resets() != row.want {
					t.Errorf("%d resets, want %d; the node says %s", w.resets(), row.want, w.unhealthy().Message)
				}
				w.expectGivenBack()
			})
		})
	}
}

// Where something else owns the GPUs, the agent resets none, promises none, and says why.
func TestNoResetIsPromisedWhereAnotherOwnsTheGPUs(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		owns func(w *world)
		says string
	}{
		"a driver that cuts them": {func(w *world) {
			w.noPlugin = true
			w.startDRADriver(dynamicGate)
		}, "The agent resets nothing: NVIDIA's DRA driver (pod dra/driver-1) cuts the GPUs of this node itself."},
		"a driver that does not start": {func(w *world) {
			w.noPlugin = true
			w.startDRADriver("", crashes)
		}, "The agent resets nothing: NVIDIA's DRA driver (pod dra/driver-1) advertises no GPU."},
		"two at once": {func(w *world) {
			w.turn()
			w.startDRADriver("")
			w.publish(wholeGPU("gpu-0", string(w.snapshot()[0].UUID)))
		}, "The agent resets nothing: NVIDIA's device plugin (pod kube-system/plugin-1) and NVIDIA's DRA driver (pod dra/driver-2) both allocate GPUs of this node."},
		"a device plugin that the agent does not know": {func(w *world) {
			w.settings.DevicePlugin.Namespaces = []string{"gpu-operator"}
			w.restart()
		}, "The agent resets nothing: no pod that devicePlugin of the settings matches advertises nvidia.com/gpu to kubelet"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSickWorld(t, h100, config.HealthResetCritical)
				row.owns(w)
				w.spend(2 * time.Minute)
				w.setRecoveryAction(0, 1)
				w.spend(time.Hour)
				if said := w.unhealthy(); w.resets() != 0 || said.Status != corev1.ConditionTrue || strings.Contains(said.Message, "the agent resets it") || !strings.Contains(said.Message, row.says) {
					t.Errorf("%d resets, and the node says %s: %s; want %s", w.resets(), said.Status, said.Message, row.says)
				}
			})
		})
	}
}

// A reset that does not help is not tried again and again, by this process or the next, and the condition says so.
func TestAResetThatDoesNotHelpIsNotRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, cutH100, config.HealthResetCritical)
		w.converge("all-3g.40gb")
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return around{d, func() {}, func() { w.setRecoveryAction(0, 1) }} }
		w.restart()
		w.setRecoveryAction(0, 1)
		w.passes("a reset", func() bool { return w.resets() > 0 && !w.hasJournal() })
		w.spend(2 * time.Hour)
		w.restart()
		w.spend(2 * time.Hour)
		c := w.unhealthy()
		if w.resets() != 1 || c.Status != corev1.ConditionTrue || !strings.Contains(c.Message, "does not try again") {
			t.Errorf("%d resets, want 1; the node says %s: %s", w.resets(), c.Status, c.Message)
		}
		w.expectGivenBack()
	})
}

// A driver that resets no GPU, as in a virtual machine, has the pods leave once and not again, and fails no request.
func TestAGPUThatCannotBeResetIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, "gpus: [{model: H100-80GB, mig: true, count: 2, passthrough: true}]", config.HealthResetCritical)
		w.converge("all-3g.40gb")
		w.setRecoveryAction(0, 1)
		w.passes("an attempt", func() bool { return w.resets() > 0 && !w.hasJournal() })
		w.spend(2 * time.Hour)
		if w.resets() != 1 || w.reason() != config.ReasonConverged || !strings.Contains(w.unhealthy().Message, "does not try again") {
			t.Errorf("%d attempts; the node says %s: %s, and %s", w.resets(), w.condition().Reason, w.condition().Message, w.unhealthy().Message)
		}
		w.expectGivenBack()
	})
}

// expectResetEnd checks the end of a reset in the middle of which the agent was killed.
func (w *world) expectResetEnd() {
	w.t.Helper()
	w.spend(15 * time.Minute) // in which a GPU that is not well would be reset again
	if got := w.snapshot()[0].Geometry().String(); got != "3g.40gb@0 3g.40gb@4" || w.resets() == 0 || w.resets() > 2 || !w.healed() {
		w.t.Errorf("it is cut as %q after %d resets, and the node says %s", got, w.resets(), w.unhealthy().Message)
	}
	w.expectGivenBack()
}

// Promise 8: killed before or after each call into the driver.
func TestAResetComesToItsEndWhereverTheAgentIsKilled(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		for n, more := 0, true; more && !t.Failed(); n++ {
			t.Run(fmt.Sprintf("at call %d, after it %v", n, after), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { more = resetKilledAtCall(t, n, after) })
			})
		}
	}
}

// resetKilledAtCall reports whether there was such a call.
func resetKilledAtCall(t *testing.T, n int, after bool) (died bool) {
	t.Helper()
	w := newSickWorld(t, cutH100, config.HealthResetCritical)
	w.converge("all-3g.40gb")
	w.setRecoveryAction(0, 1)
	calls := -1
	armed := true
	die := func(here bool) {
		if here && armed && calls == n && !died {
			died = true
			panic(killed{})
		}
	}
	w.wrapDriver = func(d nvml.Driver) nvml.Driver {
		return around{d, func() { calls++; die(!after) }, func() { die(after) }}
	}
	w.restart()
	w.passesReviving("the end", func() {}, func() bool { return w.resets() > 0 && w.healed() })
	armed = false
	w.expectResetEnd()
	return died
}

// Promise 8: killed once after each pass.
func TestAResetComesToItsEndAfterWhicheverPassTheAgentIsKilled(t *testing.T) {
	t.Parallel()
	for n, more := 0, true; more && !t.Failed(); n++ {
		t.Run(fmt.Sprintf("after pass %d", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSickWorld(t, cutH100, config.HealthResetCritical)
				w.converge("all-3g.40gb")
				w.setRecoveryAction(0, 1)
				w.passes("the beginning", w.hasJournal)
				passed := 0
				w.passes("the end", func() bool {
					if passed == n {
						w.restart()
					}
					passed++
					return w.resets() > 0 && w.healed()
				})
				more = passed > n
				w.expectResetEnd()
			})
		})
	}
}

// NVSentinel manages the node: the agent leaves the GPUs to it.
func TestWhereNVSentinelMindsTheNodeNothingIsReset(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, cutH100, config.HealthResetDegraded)
		w.edit(func(n *corev1.Node) {
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: "SysLogsXIDError", Status: corev1.ConditionFalse})
		})
		w.converge("all-3g.40gb")
		w.setRecoveryAction(0, 1)
		w.spend(time.Hour)
		if said := w.unhealthy().Message; w.resets() != 0 || !strings.Contains(said, "NVSentinel manages this node") {
			t.Errorf("%d resets; the node says %s", w.resets(), said)
		}
	})
}

// A reset destroys the instances of a GPU. Where NVIDIA's DRA driver makes those, the agent resets none, and the node stays open.
func TestAGPUThatTheDRADriverCutsIsNotReset(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, cutH100, config.HealthResetCritical)
		w.noPlugin = true
		w.startDRADriver(dynamicGate)
		w.spend(time.Minute)
		fences := w.recordCordons()
		w.setRecoveryAction(0, 1)
		w.passes("the condition", func() bool { return w.unhealthy().Status == corev1.ConditionTrue })
		w.spend(time.Hour)
		if w.resets() != 0 || len(*fences) > 0 {
			t.Errorf("%d resets, and the node was fenced %d times", w.resets(), len(*fences))
		}
		w.expectGivenBack()
	})
}

// The way back to what was before a change takes nothing more away: a GPU that is not well is reset by a change of its own.
func TestAnUndoResetsNoGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, h100, config.HealthResetCritical)
		w.converge("all-disabled")
		w.pluginBroken = true
		w.label("all-1g.10gb")
		w.passes("the undo", func() bool { return strings.Contains(w.node().Annotations[config.AnnotationJournal], `"undo"`) })
		w.setRecoveryAction(1, 1)
		w.spend(20 * time.Minute)
		if w.resets() > 0 || !w.hasJournal() {
			t.Errorf("%d resets during the undo; it is under way: %t", w.resets(), w.hasJournal())
		}
		w.pluginBroken = false
		w.startPlugin()
		w.settle(config.ReasonCapacityMismatch)
		w.label("all-disabled")
		w.passes("the end", func() bool { return w.resets() > 0 && w.healed() })
	})
}
