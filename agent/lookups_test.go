//go:build cgo

package agent_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// lookups counts the handles of MIG devices that the agent takes, and its observations of the GPUs.
type lookups struct {
	gpus              *gpusim.Node
	taken, before     int
	observations, off int
}

// countLookups starts the agent again with the product's driver over the simulated library.
func (w *world) countLookups() *lookups {
	w.t.Helper()
	n, file := &lookups{gpus: w.gpus}, gpusimtest.Library(w.t)
	w.wrapDriver = func(nvml.Driver) nvml.Driver {
		return around{lib.Open(lib.Options{Library: file}), func() { n.before, n.off = n.now() }, func() {
			taken, lists := n.now()
			n.taken, n.observations = n.taken+taken-n.before, n.observations+lists-n.off
		}}
	}
	w.restart()
	return n
}

// now counts what all processes have done so far.
func (n *lookups) now() (taken, observed int) {
	reads := n.gpus.Reads()
	return reads[gpusim.ComputeInstanceGetInfo] + reads[gpusim.GetMigDeviceHandleByIndex] + reads[gpusim.WalkMIGDevice], reads[gpusim.GetCount]
}

// A large machine takes 93 ms for the handle of a MIG device, of which it has 56: see test/gpusim.
func TestTheAgentLooksUpEachMIGDeviceOnce(t *testing.T) {
	if gpusimtest.Apart(t) {
		return
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.replaceGPUs(gpusim.Create(gpusimtest.Dir(t), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: "B200", Count: 8, MIG: true}}}))
		w.profiles(`
apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  sevenths: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.23gb: 7}}]}
  halves: {mig: [{gpus: {index: [3]}, enabled: true, instances: {3g.90gb: 2}}, {gpus: {index: [0, 1, 2, 4, 5, 6, 7]}, enabled: true, instances: {1g.23gb: 7}}]}
`)
		w.profile("sevenths")
		w.reach("sevenths")
		n := w.countLookups()
		step := func(name string, want int, do func()) {
			t.Helper()
			*n = lookups{gpus: w.gpus}
			do()
			t.Logf("%s: %d lookups in %d observations", name, n.taken, n.observations)
			if n.taken != want || n.observations == 0 && name != "top" {
				t.Errorf("%s: %d handles of MIG devices were taken in %d observations, want %d", name, n.taken, n.observations, want)
			}
		}
		step("the first pass of a process", 56, w.pass)
		step("another pass", 0, w.pass)
		step("an hour at rest", 0, func() { w.spend(time.Hour) })
		shared := w.gpus.MIGDevice(0, 0)
		w.pod("one", shared)
		w.pod("two", shared) // the agent watches the memory that they share
		step("a minute of a process", 56, func() {
			w.goLive()
			w.spend(time.Minute)
		})
		step("top", 0, func() {
			if a := w.ask(config.RequestTop); a.For != config.RequestTop {
				t.Errorf("answer: %+v", a)
			}
		})
		step("an hour at rest, with pods that share memory", 0, func() { w.spend(time.Hour) })
		step("one GPU becomes two halves", 2, func() {
			w.profile("halves")
			w.reach("halves")
		})
	})
}
