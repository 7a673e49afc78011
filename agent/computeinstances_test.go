package agent_test

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// dividedOtherwise keeps one part of three, and replaces the two others by a larger one.
var dividedOtherwise = venture{
	models:  "gpus: [{model: H100-80GB, mig: true}]",
	stands:  [][]nvml.Placed{{placedAt("3g.40gb", 0, 4, "1c+1c+1c"), placedAt("3g.40gb", 4, 4, "")}},
	config:  catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1c.3g.40gb": 1, "2c.3g.40gb": 1, "3g.40gb": 1}}},
	request: "mine",
}

// changesOf returns the calls of the library so far that create or destroy something.
func (w *world) changesOf() map[string]int {
	calls := w.gpus.Calls()
	maps.DeleteFunc(calls, func(function string, n int) bool {
		return n == 0 || !strings.HasPrefix(function, "Create") && !strings.HasSuffix(function, "Destroy")
	})
	return calls
}

// Promises 2, 3 and 8: within a GPU instance that stays, the agent destroys only the parts that have to go, and evicts only their pods.
// Wherever it is killed, the next agent makes the rest of the same calls.
func TestOnlyPartsThatGoAreTakenWhereverTheAgentIsKilled(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		for n, more := 0, true; more && !t.Failed(); n++ {
			t.Run(fmt.Sprintf("at call %d, after it %v", n, after), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := dividedOtherwise.prepare(t, "")
					w.pod("goes", w.gpus.MIGDevice(0, 0)) // it has the first part
					parts, whole := w.snapshot()[0].Instances[0].Devices, w.snapshot()[0].Instances[1]
					w.startGPUProcess(parts[2].UUID, 5000, "python", podCgroup("stays"))
					w.pod("stays", parts[2].UUID)
					calls := -1
					more = false
					die := func(here bool) {
						if here && calls == n && !more {
							more = true
							panic(killed{})
						}
					}
					w.wrapDriver = func(d nvml.Driver) nvml.Driver {
						return around{d, func() { calls++; die(!after) }, func() { die(after) }}
					}
					w.restart()
					w.label(dividedOtherwise.request)
					w.passesReviving("the end", func() {}, func() bool { return w.outcome(dividedOtherwise.request) != "" })

					if w.runs("goes") || !w.runs("stays") {
						t.Errorf("the pod on the part that goes runs: %v; the pod on the part that stays: %v", w.runs("goes"), w.runs("stays"))
					}
					now := w.snapshot()[0].Instances
					if got, want := (nvml.Geometry{now[0].Placed, now[1].Placed}).String(), "3g.40gb(1c+2c)@0 3g.40gb@4"; got != want {
						t.Fatalf("there are %s, want %s", got, want)
					}
					if now[0].Devices[0].UUID != parts[2].UUID {
						t.Errorf("the part that stays was made again: it was %+v, and is %+v", parts[2], now[0].Devices[0])
					}
					if diff := cmp.Diff(whole, now[1]); diff != "" {
						t.Errorf("the other instance is another (-before +after):\n%s", diff)
					}
					want := map[string]int{gpusim.ComputeInstanceDestroy: 2, gpusim.CreateComputeInstanceWithPlacement: 1}
					if diff := cmp.Diff(want, w.changesOf()); diff != "" {
						t.Errorf("calls (-want +made):\n%s", diff)
					}
					w.expectGivenBack()
				})
			})
		}
	}
}

// Another part takes nothing from any pod: the agent needs no fence, and one call.
func TestAnotherPartDisturbsNoPod(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		v := venture{
			models: "gpus: [{model: H100-80GB, mig: true}]", stands: [][]nvml.Placed{{placedAt("3g.40gb", 4, 4, "1c")}},
			config: catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1c.3g.40gb": 2}}}, request: "mine",
		}
		w := v.prepare(t, "")
		w.pod("stays", w.gpus.MIGDevice(0, 4))
		cordoned := false
		w.label(v.request)
		w.passes("the end", func() bool {
			cordoned = cordoned || w.node().Spec.Unschedulable
			return w.outcome(v.request) != ""
		})
		if cordoned || !w.runs("stays") {
			t.Errorf("the node was cordoned: %v; the pod runs: %v", cordoned, w.runs("stays"))
		}
		if diff := cmp.Diff(map[string]int{gpusim.CreateComputeInstanceWithPlacement: 1}, w.changesOf()); diff != "" {
			t.Errorf("calls (-want +made):\n%s", diff)
		}
		w.expectGivenBack()
	})
}
