package agent_test

import (
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// virtual returns a virtual machine under the policy.
func virtual(t *testing.T, policy config.RebootPolicy) *world {
	t.Helper()
	w := newWorld(t, passthrough)
	w.settings.Reboot.Policy = policy
	w.restart()
	return w
}

// requested returns a virtual machine that is cut into instances, and waits for the reboot by which another tool is to turn MIG mode off.
func requested(t *testing.T) *world {
	t.Helper()
	w := virtual(t, config.RebootDelegate)
	w.cutAfterReboot()
	w.label("all-disabled")
	w.passes("the request", w.asked)
	return w
}

// cutAfterReboot brings the passthrough GPUs to all-1g.10gb by a reboot that the agent has not asked for.
func (w *world) cutAfterReboot() {
	w.t.Helper()
	policy := w.settings.Reboot.Policy
	w.settings.Reboot.Policy = config.RebootNever
	w.restart()
	w.label("all-1g.10gb")
	w.untilNeedsReboot()
	w.settings.Reboot.Policy = policy
	w.reboot()
	w.reach("all-1g.10gb")
}

// delegate: the sentinel asks for no reboot any more by the time at which the undone node takes pods again.
func TestTheRequestIsWithdrawnBeforeTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(w *world){
		"since the reboot does not come": func(*world) {},
		"since the request is withdrawn": func(w *world) { w.unset(config.LabelMIGConfig) },
		"since a GPU is lost":            func(w *world) { w.setLost(1, true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := requested(t)
				opened := false
				w.patched(func(patch string) error {
					if strings.Contains(patch, config.AnnotationJournal+`":null`) {
						opened = true
						if w.asked() {
							t.Error("the node is open to pods, and the sentinel still asks for a reboot")
						}
					}
					return nil
				})
				then(w)
				w.passes("the end of the undo", func() bool { return opened })
				w.expectGivenBack()
				w.spend(time.Hour)
				if n := len(w.snapshot()[0].Instances); w.asked() || n != 7 {
					t.Errorf("an hour later the sentinel asks: %t; %d of 7 instances are back: %s", w.asked(), n, w.condition().Message)
				}
			})
		})
	}
}

// A user withdraws the request (or makes it nonsense) while MIG mode is left pending: the agent must cancel mode and request, and its state label goes.
func TestAPendingModeIsCancelledWithItsRequest(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(n *corev1.Node){
		"label removed":    func(n *corev1.Node) { delete(n.Labels, config.LabelMIGConfig) },
		"label nonsense":   func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "nonsense" },
		"label impossible": func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-1g.5gb" },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := virtual(t, config.RebootDelegate)
				before := w.gpus.String()
				w.label("all-balanced")
				w.passes("the request", w.asked)
				w.passes("the state", func() bool { return stateOf(w.node()) == config.StateRebooting })
				w.edit(edit)
				w.spend(time.Hour)
				if state := stateOf(w.node()); w.asked() || state == config.StateRebooting {
					t.Errorf("the sentinel still asks for a reboot: %t; the state is %s", w.asked(), state)
				}
				w.reboot()
				w.spend(time.Hour)
				w.expectGPUs(before)
			})
		})
	}
}

// A node that has just been registered, and needs a reboot for the desired config.
func TestAFreshNodeThatWaitsForARebootKeepsItsTaint(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootNever)
		w.taintAsRegistered()
		w.label("all-balanced")
		w.untilNeedsReboot()
		w.spend(time.Hour)
		if !w.keepsPodsAway() {
			t.Errorf("the node is open with %v: %s", w.node().Status.Allocatable, w.condition().Message)
		}
	})
}

// A node that has just been registered. A user changes its label to nonsense in the middle.
func TestAFreshNodeWhoseRequestGoesBadInTheMiddleKeepsItsTaint(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(w *world){
		"nonsense": func(w *world) { w.label("nonsense") },
		"lost":     func(w *world) { w.setLost(1, true) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.taintAsRegistered()
				w.startChange("all-1g.10gb")
				spoil(w)
				w.passes("an end", func() bool { return !w.hasJournal() })
				w.spend(time.Hour)
				if !w.keepsPodsAway() {
					t.Errorf("the node is open with %v; %s: %s", w.node().Status.Allocatable, w.condition().Reason, w.condition().Message)
				}
			})
		})
	}
}

// Promise 15. Only the host's boot id ends the wait for its reboot, and the agent asks for no reboot if it could not notice that.
func TestARebootIsAwaitedUntilTheHostsBootIsAnother(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootSelf)
		w.label("all-balanced")
		w.passes("the reboot", func() bool { return w.host.reboots > 0 })
		w.forgeBootID(bootID(2))
		w.spend(time.Minute)
		if c := w.condition(); c.Reason != string(config.ReasonNeedsReboot) || !strings.Contains(c.Message, "waiting for logind to reboot the node") {
			t.Errorf("%s: %s", c.Reason, c.Message)
		}
		w.reboot()
		w.reach("all-balanced")
	})
}

// self: GPUs that the config does not name get their instances back after the reboot.
func TestARebootByTheAgentTakesNothingFromOtherGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootNever)
		w.setConfigs(map[string]catalog.MIGConfig{
			"first-1g":  {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
			"second-1g": {{Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
		})
		w.label("second-1g")
		w.untilNeedsReboot()
		w.reboot()
		w.reach("second-1g")
		w.settings.Reboot.Policy = config.RebootSelf
		w.restart()
		before := w.snapshot()[1].Geometry().String()
		w.label("first-1g")
		w.passes("the reboot", func() bool { return w.host.reboots > 0 })
		w.reboot()
		w.reach("first-1g")
		w.spend(time.Hour)
		if after := w.snapshot()[1].Geometry().String(); after != before {
			t.Errorf("GPU 1, which no entry selects, was %q and is %q; %s: %s", before, after, w.condition().Reason, w.condition().Message)
		}
	})
}

// A driver upgrade while the agent awaits the capacity; the agent observes at the moment when it is over.
func TestADriverUpgradeDoesNotUseUpTheTimeForCapacity(t *testing.T) {
	t.Parallel()
	const plugin = config.LabelDevicePlugin
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-balanced")
		w.passes("the wait for capacity", func() bool {
			if len(w.snapshot()[1].Instances) == 4 {
				w.pluginBroken = true // the plugin takes long to start
			}
			return w.reason() == config.ReasonAwaitingCapacity && len(w.node().Spec.Taints) == 0 && w.pluginBroken
		})
		w.spend(10 * time.Second)
		t.Log(w.condition().Reason, w.condition().Message)
		w.set(plugin, fence.PausedForDriverUpgrade)
		w.spend(2 * w.settings.Timeouts.Capacity)
		w.set(plugin, "true")
		w.spend(10 * time.Second) // the plugin starts
		if c := w.condition(); strings.Contains(c.Message, "undoing") {
			t.Errorf("given up %s after the upgrade; %s: %s", 10*time.Second, c.Reason, c.Message)
		}
	})
}

// delegate, MIG on: after a reboot that changes nothing, the agent does not ask again and again, as it does not under self.
func TestADelegatedRebootThatDoesNotHelpIsNotAskedForAgainAndAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootDelegate)
		w.label("all-balanced")
		asked := 0
		for range 6 {
			w.spend(time.Hour)
			if !w.asked() {
				break
			}
			asked++
			if err := os.Remove(w.settings.Reboot.Sentinel); err != nil { // /run is empty after a reboot
				t.Fatal(err)
			}
			w.nextBoot() // kured reboots the host; the mode is what it was
			w.restart()
		}
		if asked == 0 || asked > 2 {
			t.Errorf("%d reboots were asked for, and none helped; %s", asked, w.condition().Message)
		}
	})
}

// A node that has just been registered, and whose device plugin takes long to start, since kubelet pulls its image and the driver is validated.
func TestAFreshNodeWaitsForItsFirstPlugin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.taintAsRegistered()
		w.pluginBroken = true
		w.label("all-balanced")
		w.spend(2 * w.settings.Timeouts.Capacity)
		w.pluginBroken = false
		w.offered = w.devices()
		w.spend(6 * time.Hour)
		if c := w.condition(); c.Reason != string(config.ReasonConverged) {
			t.Errorf("%s: %s; taints %v", c.Reason, c.Message, w.node().Spec.Taints)
		}
	})
}
