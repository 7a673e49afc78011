package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Promise 10.
func TestALostGPUOutsideTheChangeDoesNotKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.settle(config.ReasonNotRequested) // a driver knows the UUID of a lost GPU only if it has seen that GPU before
		w.setLost(1, true)
		before := w.gpus.String()
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("first-1g")
		w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		w.expectGPUs(before)
	})
}

// Promise 10. The other GPUs are as they were, and pods may use them.
func TestAGPULostInTheMiddleDoesNotKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-3g.40gb")
		w.label("all-1g.10gb")
		w.passes("the second GPU's first instance", func() bool { return w.gpus.MIGDevice(1, 1) != "" })
		w.setLost(1, true)
		w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		if got, want := w.snapshot()[0].Geometry().String(), "3g.40gb@0 3g.40gb@4"; got != want {
			t.Errorf("the GPU that is left is cut as %s, want %s", got, want)
		}
	})
}

// Promise 2. The journal does not hold the former instances of a GPU that the agent could not see then.
func TestAGPUThatComesBackDuringAnUndoIsLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.converge("all-1g.10gb")
		before := w.gpus.String()
		w.setLost(1, true)
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("first-3g")
		w.passes("a journal", w.hasJournal)
		w.setLost(1, false)
		w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		w.expectGPUs(before)
	})
}

func TestALostGPUIsNoSuccessForTheNextAgentEither(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ name, config string }{
		{"under a generated config", "all-1g.10gb"},
		{"under a config of the file", "mine"},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.setConfigs(map[string]catalog.MIGConfig{"mine": {{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}})
				w.converge(row.config)
				w.setLost(1, true)
				for _, agent := range []string{"the agent that has seen it well", "the next agent"} {
					w.spend(time.Minute)
					if c := w.condition(); c.Status != corev1.ConditionFalse || c.Reason != string(config.ReasonHardwareFailure) {
						t.Errorf("%s says %s %s: %s", agent, c.Status, c.Reason, c.Message)
					}
					w.restart()
				}
			})
		})
	}
}

// At night, the first line has to say what is broken: the capacity that is missing follows from it.
func TestALostGPUIsTheFirstCause(t *testing.T) {
	t.Parallel()
	for name, watched := range map[string]bool{"its health is watched": true, "its health is not watched": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				if watched {
					w = newSickWorld(t, h100, config.HealthResetNever)
					w.watch()
				}
				w.converge("all-1g.10gb")
				w.setLost(1, true)
				w.spend(5 * time.Minute)
				d := w.diagnose(true)
				if len(d.Causes) == 0 || d.Causes[0].Cause != api.Cause(config.ReasonGPULost) || !strings.Contains(d.Causes[0].You, "reboot the node") {
					t.Errorf("the causes are %+v", d.Causes)
				}
				if now := d.GPUs.Now; len(now) != 2 || now[0].Lost || !now[1].Lost {
					t.Errorf("the GPUs are said to be %+v", now)
				}
			})
		})
	}
}
