package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// registeredAfterCut gives the GPUs another cut, and registers the node again before the device plugin, or NVIDIA's DRA driver, has read that. The journal
// goes with the node object, and with it which plugin has read the former GPUs.
func registeredAfterCut(t *testing.T, byClaims bool) *world {
	t.Helper()
	w := newWorld(t, h100)
	if byClaims {
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
	}
	w.converge("all-balanced")
	w.label("all-1g.10gb")
	cut := false
	w.countChanges(func(call int) { cut = call == 13 })
	w.passes("the cut", func() bool { return cut })
	w.recreateNode()
	w.restart()
	w.label("all-1g.10gb")
	return w
}

// pluginUID returns the UID of the one pod in the namespace of the device plugin, or of NVIDIA's DRA driver.
func (w *world) pluginUID(byClaims bool) string {
	w.t.Helper()
	namespace := "kube-system"
	if byClaims {
		namespace = "dra"
	}
	pods := w.podsIn(namespace)
	if len(pods) != 1 {
		w.t.Fatalf("%d plugins", len(pods))
	}
	return string(pods[0].UID)
}

// Promise 9. A plugin that starts between the agent's last look and the end of the last call has read GPUs that are not yet cut: it is restarted at once, and not
// only when it is late.
func TestAPluginThatStartsWithinACallIsRestarted(t *testing.T) {
	for name, row := range map[string]struct {
		byClaims bool
		replace  func(w *world)
	}{
		"NVIDIA's DRA driver": {true, func(w *world) { w.restartDRADriver(); w.turnDRADriver(false) }},
		"the device plugin":   {false, (*world).replacePlugin},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = row.byClaims, row.byClaims
				w.spend(time.Minute)
				w.converge("all-balanced")
				uid, cut := "", time.Time{}
				w.countChanges(func(int) {
					row.replace(w)
					uid = w.pluginUID(row.byClaims)
					<-time.After(2 * time.Second) // as long as the call takes
					cut = time.Now()
				})
				w.label("all-1g.10gb")
				w.reach("all-1g.10gb")
				if took := w.condition().LastTransitionTime.Sub(cut); took > w.settings.Timeouts.Capacity/4 || w.pluginUID(row.byClaims) == uid {
					t.Errorf("the change took %s after the last call, and the plugin was restarted: %t", took, w.pluginUID(row.byClaims) != uid)
				}
			})
		})
	}
}

// Promise 7. What the plugin offers shows that it has read the former GPUs.
func TestAPluginThatOffersWhatIsGoneIsRestarted(t *testing.T) {
	for name, byClaims := range map[string]bool{"NVIDIA's DRA driver": true, "the device plugin": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := registeredAfterCut(t, byClaims)
				w.spend(30 * time.Second)
				w.untilReason(config.ReasonCapacityMismatch)
				w.settle(config.ReasonConverged)
				w.expectGivenBack()
			})
		})
	}
}

// A user cuts the GPUs by hand, and then asks for just that.
func TestADriverThatOffersWhatWasCutByHandIsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		w.converge("all-1g.10gb")
		w.unset(config.LabelMIGConfig)
		w.settle(config.ReasonNotRequested)
		w.uncutGPU0()
		w.setConfigs(gpu0Whole)
		w.converge("second")
		w.expectGivenBack()
	})
}

// Promise 3. A hold keeps the agent from it; where nothing is asked of the GPUs, the agent disturbs no plugin, whoever has cut them.
func TestAPluginThatOffersWhatIsGoneStays(t *testing.T) {
	for name, keep := range map[string]func(*world){
		"while the node is held":          func(w *world) { w.annotate(config.AnnotationHold, "x") },
		"where nothing is asked for":      func(w *world) { w.unset(config.LabelMIGConfig) },
		"while a budget keeps the plugin": func(w *world) { w.budgetKeeps(func() bool { return true }, w.podsIn("dra")[0].Name) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := registeredAfterCut(t, true)
				keep(w)
				driver := w.pluginUID(true)
				w.spend(time.Hour)
				if w.pluginUID(true) != driver || w.node().Spec.Unschedulable || w.condition().Status == corev1.ConditionTrue && name != "where nothing is asked for" {
					t.Errorf("unschedulable %t: %+v", w.node().Spec.Unschedulable, w.condition())
				}
				if said := w.condition().Message; name == "where nothing is asked for" && !strings.Contains(said, "delete pod dra/driver-2, which read the GPUs before they were cut") {
					t.Errorf("the node says %s", said)
				}
			})
		})
	}
}

// A plugin that goes on offering what is gone is restarted ever more seldom.
func TestAPluginThatGoesOnOfferingWhatIsGoneIsRestartedEverMoreSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := registeredAfterCut(t, true)
		w.draDriver = false // the slices stay those of the former cut
		restarts := 0
		for range 2 * 360 {
			w.spend(10 * time.Second)
			if len(w.podsIn("dra")) == 0 {
				restarts++
				w.startDRADriver("")
			}
		}
		if restarts != 3 { // after a minute, ten, and an hour
			t.Errorf("%d restarts", restarts)
		}
		w.untilReason(config.ReasonCapacityMismatch)
		w.expectGivenBack()
	})
}

// endPods ends the pods of a namespace, so that their DaemonSets start others.
func (w *world) endPods(namespace string) {
	w.t.Helper()
	for _, p := range w.podsIn(namespace) {
		if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
			w.t.Fatal(err)
		}
	}
}

func (w *world) saysThatNoRestartHelps(devices []string) {
	w.t.Helper()
	c := w.condition()
	for _, says := range append(devices, "changes nothing until then") {
		if !strings.Contains(c.Message, says) {
			w.t.Errorf("the node says %s, want %q in it", c.Message, says)
		}
	}
	if c.Reason != string(config.ReasonCapacityMismatch) || stateOf(w.node()) != config.StateFailed {
		w.t.Errorf("the reason is %s, the state %s", c.Reason, stateOf(w.node()))
	}
}

// Promise 1. No change can be verified while a plugin or driver offers what is gone, and goes on when it is started again.
func TestWhatARestartHasNotCuredBeginsNoChange(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		byClaims bool
		says     []string
	}{
		"NVIDIA's DRA driver": {true, []string{"see the log of NVIDIA's DRA driver (pod dra/driver-", "GPU 0 as a whole", "GPU 1 as a whole"}},
		"the device plugin":   {false, []string{"see the device plugin's log on this node", "MIG-of-before, which is gone"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = row.byClaims, row.byClaims
				w.spend(time.Minute)
				w.converge("all-1g.10gb")
				calls := w.countChanges(nil)
				w.offersGone = true
				w.endPods(map[bool]string{true: "dra", false: "kube-system"}[row.byClaims])
				w.spend(5 * time.Minute)
				w.untilReason(config.ReasonCapacityMismatch)
				if row.byClaims {
					w.podWithClaim("train", "gpu-0-mig-1g10gb-0")
				} else {
					w.pod("train", w.gpus.MIGDevice(0, 0))
				}
				before := w.gpus.String()
				w.label("all-3g.40gb")
				for i := range 60 {
					if i == 30 {
						w.restart()
					}
					w.spend(time.Minute)
					if w.hasJournal() || w.node().Spec.Unschedulable {
						t.Fatal("a change has begun")
					}
				}
				w.saysThatNoRestartHelps(row.says)
				if *calls != 0 || !w.runs("train") || w.gpus.String() != before {
					t.Errorf("%d calls that change a GPU; the pod runs: %t", *calls, w.runs("train"))
				}
				w.unset(config.LabelMIGConfig)
				w.spend(time.Minute)
				if said := w.condition().Message; !strings.Contains(said, row.says[0]) || strings.Contains(said, "read the GPUs before they were cut") {
					t.Errorf("of a pod that was restarted since the node says %s", said)
				}
				w.label("all-3g.40gb")
				w.offersGone = false
				w.endPods(map[bool]string{true: "dra", false: "kube-system"}[row.byClaims])
				w.reach("all-3g.40gb")
			})
		})
	}
}

// A change to whole GPUs is right by what the driver offers.
func TestAChangeThatCuresWhatNoRestartHasBegins(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		w.converge("all-1g.10gb")
		w.offersGone = true
		w.endPods("dra")
		w.spend(5 * time.Minute)
		w.untilReason(config.ReasonCapacityMismatch)
		w.label("all-disabled")
		w.reach("all-disabled")
	})
}

// A GPU has recovered from an error that its plugin, or NVIDIA's DRA driver, has made nothing of. It is not withheld later, when nothing is offered, or where
// the driver cuts the GPUs itself: a restart would only take the devices away for longer.
func TestWhatDoesNotWithholdARecoveredGPUIsNotRestarted(t *testing.T) {
	t.Parallel()
	driver := func(gates string) func(*world) {
		return func(w *world) {
			w.noPlugin = true
			w.startDRADriver(gates)
			w.publish(w.driverDevices()...)
		}
	}
	for name, row := range map[string]struct{ begin, later func(*world) }{
		"the driver, as long as its slices are away after a restart of kubelet": {driver(""), func(w *world) {
			were := w.published
			w.publish()
			w.spend(25 * time.Second)
			w.published = were
		}},
		"a driver that starts":           {func(w *world) { driver("")(w); w.publish() }, nil},
		"a driver that cuts GPUs itself": {driver(dynamicGate), nil},
		"a plugin that registers again":  {nil, func(w *world) { were := w.offered; w.offered = nil; w.spend(2 * time.Second); w.offered = were }},
		"a plugin beside the driver, of which each offers a GPU": {func(w *world) {
			w.turn()
			w.startDRADriver("")
			w.publish(wholeGPU("gpu-0", w.gpus.UUIDs()[0]))
			w.offered = map[string][]string{nvml.ResourceGPU: w.gpus.UUIDs()[1:]}
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newSickWorld(t, h100, config.HealthResetNever)
				if row.begin != nil {
					row.begin(w)
				}
				w.spend(30 * time.Second)
				began := w.podsIn(metav1.NamespaceAll)
				w.setRecoveryAction(0, 1)
				w.passes("the error", func() bool { return w.unhealthy().Status == corev1.ConditionTrue })
				w.setRecoveryAction(0, 0)
				w.passes("the end of the error", w.healed)
				w.spend(10 * time.Minute)
				if row.later != nil {
					row.later(w)
					w.spend(10 * time.Minute)
				}
				if now := w.podsIn(metav1.NamespaceAll); !slices.EqualFunc(now, began, func(a, b corev1.Pod) bool { return a.UID == b.UID }) {
					t.Errorf("it was restarted: there are %d pods, and were %d", len(now), len(began))
				}
			})
		})
	}
}

// Promise 18. NVIDIA's DRA driver taints a device after an error, and keeps the taint until it restarts. Such a device is no capacity, and the driver is
// restarted once the GPU is well.
func TestADriverThatTaintsAGPUThatIsWellIsRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newSickWorld(t, h100, config.HealthResetNever)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		w.converge("all-1g.10gb")
		driver := w.pluginUID(true)
		w.setRecoveryAction(0, 1)
		w.passes("the error", func() bool { return w.unhealthy().Status == corev1.ConditionTrue })
		devices := w.published[0].Spec.Devices
		devices[0].Taints = []resourcev1.DeviceTaint{{Key: "gpu.nvidia.com/xid", Value: "94", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
		w.publish(devices...)
		w.passes("what the taint takes", func() bool { return w.reason() == config.ReasonCapacityMismatch })
		if said := w.condition().Message; !strings.Contains(said, devices[0].Name+" (gpu.nvidia.com/xid)") {
			t.Errorf("the node says %s", said)
		}
		w.spend(10 * time.Minute)
		if w.pluginUID(true) != driver {
			t.Error("the driver was restarted for a GPU that is not well")
		}
		w.setRecoveryAction(0, 0)
		w.settle(config.ReasonConverged)
		if w.pluginUID(true) == driver {
			t.Error("the driver runs on")
		}
		w.expectGivenBack()
	})
}
