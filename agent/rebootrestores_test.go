package agent_test

import (
	"cmp"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// rebootUnderDriver reboots a node of NVIDIA's DRA driver, which finds the GPUs as the reboot has left them.
func (w *world) rebootUnderDriver() {
	w.t.Helper()
	before := w.gpus.String()
	w.reboot()
	if before == w.gpus.String() {
		w.t.Fatal("the reboot took nothing away")
	}
	w.publish(w.driverDevices()...)
}

// place creates instances of these profiles at these places of the GPU.
func (w *world) place(index int, at ...nvml.Placed) {
	w.t.Helper()
	gpu := w.snapshot()[index]
	if !gpu.Enabled {
		if err := w.gpus.Driver().SetMode(w.t.Context(), gpu.UUID, true); err != nil {
			w.t.Fatal(err)
		}
	}
	for _, p := range at {
		if err := w.gpus.Driver().Create(w.t.Context(), gpu.UUID, p); err != nil {
			w.t.Fatal(err)
		}
	}
	w.offered = w.devices()
}

func placed(profile string, start, size int) nvml.Placed {
	return nvml.Placed{Profile: profile, Span: nvml.Span{Start: start, Size: size}}
}

// Promise 8, on a node of NVIDIA's DRA driver: claims name devices by their place, so pods get theirs back, and none is evicted.
func TestPodsKeepTheDevicesThatComeBackAfterAReboot(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"H100-80GB", "A100-80GB"} {
		for name, after := range map[string]func(w *world){"": func(*world) {}, ", with agents that are killed": (*world).restartUnlessVerifying} {
			t.Run(model+name, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, "gpus:\n- model: "+model+"\n  count: 2\n")
					w.noPlugin, w.draDriver = true, true
					w.spend(time.Minute)
					w.converge("all-1g.10gb")
					w.podWithClaim("of-0", "gpu-0-mig-1g10gb-0")
					w.podWithClaim("of-1", "gpu-1-mig-1g10gb-6", bound)
					before := w.gpus.String()
					w.rebootUnderDriver()
					w.passes("the end", func() bool {
						after(w)
						if !w.runs("of-0") || !w.runs("of-1") {
							t.Fatalf("a pod was evicted: %s", w.condition().Message)
						}
						return w.gpus.String() == before && w.condition().Status == "True" && !w.hasJournal()
					})
					w.expectGivenBack()
				})
			})
		}
	}
}

// Promise 8. A label may ask for instances without their places, and name only some of the GPUs: each GPU gets back what the agent has last verified on it.
func TestAfterARebootEachGPUIsCutAsTheAgentHasVerifiedIt(t *testing.T) {
	t.Parallel()
	first := map[string]catalog.MIGConfig{
		"first":  {{Indices: []int{0}, MIG: true, Devices: map[string]int{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}}},
		"second": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
	}
	for name, row := range map[string]struct {
		byClaims bool
		before   func(w *world) // of the reboot, after the agent has verified "first"
		after    func(w *world)
		want     string // of the GPUs; empty for what they were
		leaves   bool   // the pod whose device does not come back
	}{
		"with the device plugin":     {},
		"with NVIDIA's DRA driver":   {byClaims: true},
		"where another program cuts": {after: func(w *world) { w.place(1, placed("7g.80gb", 0, 8)) }, want: "2g.20gb@0 1g.10gb@2 3g.40gb@4 | 7g.80gb@0"},
		"where the request is another by then": {
			byClaims: true, after: func(w *world) { w.label("second") }, leaves: true,
			want: "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6 | 1g.10gb@6",
		},
		"where nothing is asked for by then": {after: func(w *world) { w.unset(config.LabelMIGConfig) }, want: " | "},
		"where a user had cut a GPU since": {
			before: func(w *world) { w.destroyAll(1); w.place(1, placed("2g.20gb", 2, 2)); w.spend(10 * time.Minute) }, want: "2g.20gb@0 1g.10gb@2 3g.40gb@4 | 2g.20gb@2",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin, w.draDriver = row.byClaims, row.byClaims
				w.place(0, placed("3g.40gb", 4, 4), placed("2g.20gb", 0, 2), placed("1g.10gb", 2, 1))
				w.place(1, placed("1g.10gb", 6, 1))
				w.setConfigs(first)
				w.spend(time.Minute)
				w.converge("first")
				want := places(w.snapshot())
				if row.byClaims {
					w.podWithClaim("of-0", "gpu-0-mig-3g40gb-4")
					w.podWithClaim("of-1", "gpu-1-mig-1g10gb-6")
				}
				if row.before != nil {
					row.before(w)
				}
				w.reboot()
				if row.byClaims {
					w.publish(w.driverDevices()...)
				}
				if row.after != nil {
					row.after(w)
				}
				want = cmp.Or(row.want, want)
				w.settle(config.ReasonConverged, config.ReasonNotRequested)
				w.spend(10 * time.Minute)
				if got := places(w.snapshot()); got != want {
					t.Errorf("the GPUs are cut as\n%s, want\n%s (%s: %s)", got, want, w.reason(), w.condition().Message)
				}
				if row.byClaims && (w.runs("of-0") == row.leaves || !w.runs("of-1")) {
					t.Errorf("run: of-0 %t, of-1 %t", w.runs("of-0"), w.runs("of-1"))
				}
			})
		})
	}
}

// Promise 3. Who uses a GPU in another way since, by right, keeps it: an old layout takes nothing from anybody.
func TestAnOldLayoutTakesNoGPUThatIsUsed(t *testing.T) {
	t.Parallel()
	configs := map[string]catalog.MIGConfig{
		"gpu-0": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
		"both":  {{Indices: []int{0, 1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
	}
	mine := func(w *world) { w.pod("mine", w.gpus.UUIDs()[1]) }
	for name, row := range map[string]struct {
		model, verified string
		then            func(w *world)
	}{
		"a user made the GPUs whole before the reboot": {then: func(w *world) {
			w.unset(config.LabelMIGConfig)
			w.settle(config.ReasonNotRequested)
			for gpu := range 2 {
				w.destroyAll(gpu)
				w.setMode(gpu, false)
			}
			w.spend(time.Hour)
			w.reboot()
			w.spend(time.Hour)
			mine(w)
			w.label("gpu-0")
		}},
		"a pod got the whole GPU after the reboot": {then: func(w *world) {
			w.unset(config.LabelMIGConfig)
			w.reboot()
			w.spend(time.Hour)
			mine(w)
			w.spend(time.Hour)
			w.label("gpu-0")
		}},
		"a process has the whole GPU": {verified: "gpu-0", then: func(w *world) {
			w.reboot()
			w.addProcess(4711, "python", "0::/user.slice/session.scope", "/dev/nvidia1")
			w.holdDevice(w.gpus.UUIDs()[1], 4711)
			mine(w)
		}},
		"a user turned off a mode that a reboot leaves": {model: "A100-80GB", verified: "gpu-0", then: func(w *world) {
			w.reboot()
			w.setMode(1, false)
			mine(w)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus:\n- model: "+cmp.Or(row.model, "H100-80GB")+"\n  count: 2\n")
				w.setConfigs(configs)
				w.spend(time.Minute)
				w.place(1, placed("1g.10gb", 6, 1))
				w.converge(cmp.Or(row.verified, "both"))
				row.then(w)
				w.reach("gpu-0")
				w.spend(time.Hour)
				if gpu := w.snapshot()[1]; !w.runs("mine") || gpu.Enabled {
					t.Errorf("the pod runs: %t; GPU 1 is cut: %t", w.runs("mine"), gpu.Enabled)
				}
			})
		})
	}
}

// setMode turns MIG mode on or off, as another program does.
func (w *world) setMode(index int, on bool) {
	w.t.Helper()
	if err := w.gpus.Driver().SetMode(w.t.Context(), w.snapshot()[index].UUID, on); err != nil {
		w.t.Fatal(err)
	}
	w.offered = w.devices()
}

// Promise 8. Whatever comes in the middle of the restoration, pods whose devices come back stay.
func TestARestorationThatIsDisturbedEvictsNoPod(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		disturb func(w *world)
		bare    bool // nothing is restored
	}{
		"a crash":            {disturb: (*world).restart},
		"another reboot":     {disturb: func(w *world) { w.reboot(); w.publish(w.driverDevices()...) }},
		"the same by a name": {disturb: func(w *world) { w.label("same") }},
		"no label":           {disturb: func(w *world) { w.unset(config.LabelMIGConfig) }, bare: true},
		"a driver that is away for long": {disturb: func(w *world) {
			w.draDriver = false
			w.restartDRADriver()
			w.publish()
			w.spend(20 * time.Minute)
			w.draDriver = true
		}},
	} {
		for _, at := range []int{1, 3, 5} { // calls that change a GPU
			t.Run(fmt.Sprintf("%s at call %d", name, at), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, h100)
					w.noPlugin, w.draDriver = true, true
					w.place(0, placed("3g.40gb", 4, 4), placed("1g.10gb", 2, 1))
					w.place(1, placed("1g.10gb", 6, 1))
					cut := catalog.MIGConfig{{Indices: []int{0}, MIG: true, Devices: map[string]int{"3g.40gb": 1, "1g.10gb": 1}}}
					w.setConfigs(map[string]catalog.MIGConfig{"first": cut, "same": cut})
					w.spend(time.Minute)
					w.converge("first")
					want := places(w.snapshot())
					w.podWithClaim("of-0", "gpu-0-mig-1g10gb-2")
					w.podWithClaim("of-1", "gpu-1-mig-1g10gb-6", bound)
					w.rebootUnderDriver()
					calls := w.countChanges(nil)
					w.passes("the call", func() bool { return *calls >= at })
					row.disturb(w)
					w.spend(2 * time.Hour)
					w.expectGivenBack()
					if got := places(w.snapshot()); got != want && !row.bare || !w.runs("of-0") || !w.runs("of-1") {
						t.Errorf("the GPUs are cut as %s, want %s; run: of-0 %t, of-1 %t (%s: %s)", got, want, w.runs("of-0"), w.runs("of-1"), w.reason(), w.condition().Message)
					}
				})
			})
		}
	}
}

// A GPU that is lost over one reboot gets its instances back at the next.
func TestAGPUThatComesBackLaterIsRestoredThen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(map[string]catalog.MIGConfig{"first": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}})
		w.spend(time.Minute)
		w.place(1, placed("1g.10gb", 6, 1))
		w.converge("first")
		w.reboot()
		w.setLost(1, true)
		w.spend(time.Hour)
		w.setLost(1, false)
		w.reboot()
		w.spend(time.Hour)
		if got := len(w.snapshot()[1].Instances); got != 1 {
			t.Errorf("GPU 1 has %d instances", got)
		}
	})
}

// Promise 3. A driver that starts while it does not see a GPU has complete slices without it. A pod that has that GPU since the reboot keeps it.
func TestAPodThatHasStartedSinceTheRebootIsNoGhost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.noPlugin, w.draDriver = true, true
		w.spend(time.Minute)
		w.converge("all-1g.10gb")
		w.annotate(config.AnnotationHold, "x")
		w.rebootUnderDriver()
		w.spend(10 * time.Minute)
		w.podWithClaim("new", "gpu-1")
		w.spend(10 * time.Minute)
		w.publish(w.driverDevices()[:1]...)
		w.unannotate(config.AnnotationHold)
		w.untilReason(config.ReasonHoldersUnknown)
		w.spend(time.Minute)
		if w.snapshot()[1].Enabled || !w.runs("new") {
			t.Errorf("GPU 1 is cut: %t; its pod runs: %t", w.snapshot()[1].Enabled, w.runs("new"))
		}
	})
}

// places lists the instances of each GPU with their places.
func places(gpus []nvml.GPU) string {
	var out string
	for i, gpu := range gpus {
		if i > 0 {
			out += " | "
		}
		for n, p := range gpu.Instances {
			if n > 0 {
				out += " "
			}
			out += p.Placed.String()
		}
	}
	return out
}
