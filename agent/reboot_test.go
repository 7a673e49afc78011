package agent_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// reboot reboots the node: the GPUs lose what a reboot takes, the plugin's pod is the same and reads them again,
// and the agent is another process.
func (w *world) reboot() {
	w.t.Helper()
	if err := w.gpus.Reboot(); err != nil {
		w.t.Fatal(err)
	}
	w.nextBoot()
	w.offered = w.devices()
	w.restart()
}

// passthrough is a virtual machine with two GPUs that its driver cannot reset.
const passthrough = "gpus: [{model: A100-80GB, count: 2, passthrough: true}]"

// modes lists current and pending MIG mode of each GPU.
func (w *world) modes() string {
	var out []string
	for _, gpu := range w.snapshot() {
		out = append(out, fmt.Sprintf("%t/%t", gpu.Enabled, gpu.Pending))
	}
	return strings.Join(out, " ")
}

// untilParked lets turns pass until the node waits for a reboot and is open, with a journal.
func (w *world) untilParked() {
	w.t.Helper()
	w.passes("an open node that waits for a reboot", func() bool {
		c := w.condition()
		return c.Reason == string(config.ReasonNeedsReboot) && strings.Contains(c.Message, "next reboot") && w.hasJournal()
	})
	if n := w.node(); n.Spec.Unschedulable || len(n.Spec.Taints) > 0 {
		w.t.Errorf("unschedulable is %t, taints are %v; want an open node", n.Spec.Unschedulable, n.Spec.Taints)
	}
}

// untilNeedsReboot lets turns pass until the node says so and is open, parked or not.
func (w *world) untilNeedsReboot() corev1.NodeCondition {
	w.t.Helper()
	w.passes("an open node that needs a reboot", func() bool {
		n := w.node()
		return w.reason() == config.ReasonNeedsReboot && !n.Spec.Unschedulable
	})
	return w.condition()
}

func (w *world) asked() bool {
	_, err := os.Stat(w.settings.Reboot.Sentinel)
	return err == nil
}

// If the driver cannot reset the GPUs, the agent asks it once, gives the node back, and finishes the change after the next
// reboot by a user or a tool.
func TestAModeThatTakesARebootIsLeftPendingOnAllGPUsAndTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	for _, policy := range []config.RebootPolicy{config.RebootNever, config.RebootDelegate} {
		t.Run(string(policy), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := virtual(t, policy)
				w.label("all-balanced")
				w.untilParked()
				if got, want := w.modes(), "false/true false/true"; got != want {
					t.Errorf("modes are %s, want %s", got, want)
				}
				w.passes("a word about both GPUs", func() bool { return strings.Contains(w.condition().Message, "GPUs 0, 1") })
				w.spend(time.Hour)
				w.restart()
				w.spend(time.Hour)
				if n := w.gpus.Calls()[gpusim.SetMigMode]; n > 4 {
					t.Errorf("the mode was set %d times, want twice for each GPU: to ask for it, and for a reset", n)
				}
				if w.asked() != (policy == config.RebootDelegate) || w.host.reboots != 0 {
					t.Errorf("a reboot was asked for: %t, and done: %d", w.asked(), w.host.reboots)
				}
				w.reboot()
				w.reach("all-balanced")
				w.passes("the request to be withdrawn", func() bool { return !w.asked() })
			})
		})
	}
}

// A GPU has to lose its instances before MIG mode is turned off: the agent does not begin that if it may not reboot.
func TestMIGIsNotTurnedOffIfTheAgentMayNotReboot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootNever)
		w.cutAfterReboot()
		w.turn()
		w.pod("innocent", w.snapshot()[0].Instances[0].Devices[0].UUID)
		before, destroyed := w.gpus.String(), w.gpus.Calls()[gpusim.GpuInstanceDestroy]
		w.label("all-disabled")
		w.settle(config.ReasonNeedsReboot)
		w.expectGivenBack()
		w.spend(time.Hour) // from now on the agent knows that the driver does not reset GPUs here
		w.expectGPUs(before)
		if n := w.gpus.Calls()[gpusim.GpuInstanceDestroy] - destroyed; n > 0 || !w.runs("innocent") {
			t.Errorf("%d instances were destroyed; the pod runs: %t", n, w.runs("innocent"))
		}
	})
}

// The agent asks logind before it fences the node for a change that takes a reboot.
func TestAHostThatMayNotBeRebootedIsNotFencedForAReboot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootSelf)
		w.cutAfterReboot()
		w.host.refuses = errors.New("logind asks for a password")
		w.label("all-disabled")
		w.settle(config.ReasonNeedsReboot) // only a reset that is refused shows that the change takes a reboot
		w.edit(func(n *corev1.Node) { delete(n.Labels, config.LabelMIGConfig) })
		w.settle(config.ReasonNotRequested)
		w.pod("innocent", w.snapshot()[0].Instances[0].Devices[0].UUID)
		cordons := w.recordCordons()
		w.label("all-disabled")
		w.settle(config.ReasonNeedsReboot)
		if !w.runs("innocent") || len(*cordons) > 0 || !strings.Contains(w.condition().Message, "logind asks for a password") {
			t.Errorf("the pod runs: %t; cordons: %v; the condition says %q", w.runs("innocent"), *cordons, w.condition().Message)
		}
	})
}

func TestMIGIsTurnedOffByADelegatedRebootBehindTheFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := requested(t)
		w.spend(w.settings.Timeouts.Reboot / 2)
		if !w.node().Spec.Unschedulable || stateOf(w.node()) != config.StateRebooting {
			t.Errorf("the node is not fenced, or its state is %s", stateOf(w.node()))
		}
		w.reboot()
		w.reach("all-disabled")
		w.passes("the request to be withdrawn", func() bool { return !w.asked() })
	})
}

// Promise 10, and once for each boot.
func TestTheAgentRebootsTheNodeItselfAfterTheDrainAndOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootSelf)
		w.pod("web", "", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} })
		w.pod("daemon", "", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
			p.OwnerReferences = ofDaemonSet("d")
		})
		w.grace = time.Minute
		w.label("all-balanced")
		w.passes("the reboot", func() bool { return w.host.reboots > 0 })
		if w.runs("web") || !w.runs("daemon") {
			t.Errorf("before the reboot, the pod of no one runs: %t, that of a DaemonSet: %t", w.runs("web"), w.runs("daemon"))
		}
		w.restart()
		w.spend(w.settings.Timeouts.Reboot / 2)
		if w.host.reboots != 1 || w.host.held != 0 {
			t.Errorf("%d reboots were asked for in one boot, with %d inhibitors held", w.host.reboots, w.host.held)
		}
		w.reboot()
		w.reach("all-balanced")
		if w.host.reboots != 1 {
			t.Errorf("%d reboots, want 1", w.host.reboots)
		}
	})
}

// Promise 10.
func TestARebootThatDoesNotHelpIsNotRepeated(t *testing.T) {
	t.Parallel()
	for name, boots := range map[string]bool{"since it changes nothing": true, "since it does not come": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := virtual(t, config.RebootSelf)
				before := w.gpus.String()
				w.label("all-balanced")
				w.passes("the reboot", func() bool { return w.host.reboots > 0 })
				w.host.down = false
				if boots {
					w.nextBoot()
				}
				w.settle(config.ReasonNeedsReboot)
				w.expectGivenBack()
				w.spend(time.Hour)
				if diff := cmp.Diff(before, w.gpus.String()); diff != "" || w.host.reboots != 1 {
					t.Errorf("%d reboots, want 1; GPUs (-before +after):\n%s", w.host.reboots, diff)
				}
			})
		})
	}
}

// Promise 10. The agent notices it before it evicts a pod for the reboot.
func TestARebootThatTheHostRefusesIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootSelf)
		before := w.gpus.String()
		w.host.refuses = errors.New("this host has no logind")
		w.pod("web", "", func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} })
		w.label("all-balanced")
		c := w.settle(config.ReasonNeedsReboot)
		w.expectGivenBack()
		w.expectGPUs(before)
		if w.host.reboots != 0 || !w.runs("web") || !strings.Contains(c.Message, "no logind") {
			t.Errorf("%d reboots; the pod runs: %t; message %q", w.host.reboots, w.runs("web"), c.Message)
		}
	})
}

// The agent neither begins a change nor goes on with one while the host is shutting down.
func TestNoGPUIsTouchedWhileTheHostShutsDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-1g.10gb")
		w.host.down = true
		before := w.gpus.String()
		w.spend(time.Minute)
		if c := w.condition(); c.Reason != string(config.ReasonShuttingDown) {
			t.Errorf("the node says %s: %s", c.Reason, c.Message)
		}
		w.expectGPUs(before)
		w.host.down = false
		w.reach("all-1g.10gb")
		if w.host.took < 16 || w.host.held != 0 {
			t.Errorf("%d inhibitors were taken, %d are still held; want one for each step", w.host.took, w.host.held)
		}
	})
}

// Promise 8. An H100 loses its instances and MIG mode at a reboot, an A100 its instances alone.
func TestWhatARebootTakesAwayIsMadeAgain(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"H100-80GB", "A100-80GB"} {
		t.Run(model, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus:\n- model: "+model+"\n  count: 2\n")
				w.converge("all-balanced")
				before := w.gpus.String()
				w.reboot()
				if before == w.gpus.String() {
					t.Fatal("the reboot took nothing away")
				}
				w.passes("the same geometry", func() bool { return w.gpus.String() == before })
				w.settle(config.ReasonConverged)
				w.expectGivenBack()
			})
		})
	}
}

// Promise 8, if the reboot comes in the middle of a change.
func TestAChangeGoesOnAfterAReboot(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"H100-80GB", "A100-80GB"} {
		t.Run(model, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus:\n- model: "+model+"\n  count: 2\n")
				w.converge("all-3g.40gb")
				w.label("all-balanced")
				w.passes("the second GPU's first instance", func() bool {
					gpu := w.snapshot()[1]
					return len(gpu.Instances) == 1 && gpu.Instances[0].Profile == "1g.10gb" ||
						strings.HasPrefix(gpu.Geometry().String(), "1g.10gb")
				})
				w.reboot()
				w.reach("all-balanced")
			})
		})
	}
}
