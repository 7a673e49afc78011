package agent_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const a100 = "gpus:\n- model: A100-80GB\n  count: 3\n"

// dynamicDevices are the devices of a GPU that the driver of v0.5.0 offers if it cuts GPUs itself. It never changes a mode that takes a reset, and reads the
// modes at its start.
func dynamicDevices(gpu nvml.GPU) (out []resourcev1.Device) {
	counters := []resourcev1.DeviceCounterConsumption{{CounterSet: fmt.Sprintf("gpu-%d-counter-set", gpu.Minor)}}
	if gpu.SwitchesAlone() || !gpu.Enabled {
		whole := wholeGPU(fmt.Sprintf("gpu-%d", gpu.Minor), string(gpu.UUID))
		if gpu.SwitchesAlone() {
			whole.ConsumesCounters = counters
		}
		out = append(out, whole)
	}
	if !gpu.SwitchesAlone() && !gpu.Enabled {
		return out
	}
	for _, p := range gpu.Profiles {
		for _, at := range p.Placements {
			out = append(out, resourcev1.Device{Name: partOf(gpu, p.Name, at.Start), ConsumesCounters: counters, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{
				"type": {StringValue: new("mig")}, "profile": {StringValue: &p.Name}, "parentUUID": {StringValue: new(string(gpu.UUID))},
			}})
		}
	}
	return out
}

// partOf is the driver's name of a part of the GPU.
func partOf(gpu nvml.GPU, profile string, start int) string {
	return fmt.Sprintf("gpu-%d-mig-%s-1-%d", gpu.Minor, strings.NewReplacer(".", "", "+", "-").Replace(profile), start)
}

// dynamic is a node of three A100s that NVIDIA's DRA driver cuts itself. Modes counts the changes of GPUs so far; those beside the driver fail the test.
func dynamic(t *testing.T) (w *world, modes *int) {
	t.Helper()
	w = newWorld(t, a100)
	w.noPlugin, w.draDriver, w.driverGates = true, true, dynamicGate
	w.setConfigs(map[string]catalog.MIGConfig{
		"first": {{Indices: []int{0}, MIG: true, Devices: map[string]int{}}, {Indices: []int{1, 2}}},
		"two":   {{Indices: []int{0, 1}, MIG: true, Devices: map[string]int{}}, {Indices: []int{2}}},
	})
	modes = w.countChanges(func(int) {
		if pods := w.podsIn("dra"); len(pods) > 0 {
			t.Errorf("a mode changes while %s has the GPUs open", pods[0].Name)
		}
	})
	w.spend(time.Minute)
	return w, modes
}

// makes has the driver make the instance for a pod with a claim.
func (w *world) makes(pod string, gpu nvml.GPU, p nvml.Placed) {
	w.t.Helper()
	if err := w.gpus.Driver().Create(w.t.Context(), gpu.UUID, p); err != nil {
		w.t.Fatal(err)
	}
	w.podWithClaim(pod, partOf(gpu, p.Profile, p.Start))
}

// expectModes fails the test unless these GPUs are in MIG mode, and the calls that made or destroyed instances are the driver's.
func (w *world) expectModes(calls map[string]int, want ...bool) {
	w.t.Helper()
	for i, gpu := range w.snapshot() {
		if gpu.Enabled != want[i] || gpu.Pending != want[i] {
			w.t.Errorf("MIG mode of GPU %d is %t, and %t after a reset; want %t", i, gpu.Enabled, gpu.Pending, want[i])
		}
	}
	for function, n := range w.gpus.Calls() {
		if instances := strings.Contains(function, "Instance") && (strings.HasPrefix(function, "Create") || strings.HasSuffix(function, "Destroy")); instances && n > calls[function] {
			w.t.Errorf("%s was called %d times, want %d", function, n, calls[function])
		}
	}
}

// Where NVIDIA's DRA driver cuts the GPUs itself, it never turns on a MIG mode that takes a reset. The agent does, for the GPUs that the label names, and
// leaves the instances to the driver. Only pods of GPUs whose mode changes leave.
func TestMIGModesThatTakeAResetAreSwitchedForADRADriverThatCutsTheGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, modes := dynamic(t)
		w.podWithClaim("on-0", "gpu-0")
		w.podWithClaim("on-1", "gpu-1")
		w.label("first")
		w.reach("first")
		if said := w.condition().Message; said != "first: as claims ask, also in parts of GPU 0" {
			t.Errorf("the node says %s", said)
		}
		if w.runs("on-0") || !w.runs("on-1") || !w.offers("gpu-1") || w.offers("gpu-0") {
			t.Errorf("after the change of GPU 0 the pod on it runs: %t, that on GPU 1: %t; the driver offers %d slices", w.runs("on-0"), w.runs("on-1"), len(w.published))
		}
		w.expectModes(w.gpus.Calls(), true, false, false)

		gpu := w.snapshot()[0]
		w.makes("part", gpu, nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: 4, Size: 4}})
		calls, before := w.gpus.Calls(), *modes
		w.spend(time.Hour) // what the driver makes is no mismatch
		if c := w.condition(); c.Status != corev1.ConditionTrue || *modes != before {
			t.Errorf("the driver has made an instance; %d calls change GPUs, and the node says %s %s", *modes-before, c.Status, c.Message)
		}
		w.podWithClaim("on-2", "gpu-2")
		w.label("two")
		w.reach("two")
		if !w.runs("on-2") || !w.runs("part") || w.runs("on-1") {
			t.Errorf("after the change of GPU 1 the pod on it runs: %t, that on a part of GPU 0: %t, that on GPU 2: %t", w.runs("on-1"), w.runs("part"), w.runs("on-2"))
		}
		w.expectModes(calls, true, true, false)
		if got := w.snapshot()[0].Geometry().String(); got != "3g.40gb@4" {
			t.Errorf("GPU 0 has %s", got)
		}
		w.expectGivenBack()
	})
}

// No GPU leaves MIG mode under an instance of the driver: neither one that a pod has by its claim, nor one that is left over.
func TestAGPULeavesMIGModeOnlyWithoutInstancesOfTheDRADriver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, modes := dynamic(t)
		w.label("all-enabled")
		w.reach("all-enabled")
		gpu, placed := w.snapshot()[0], nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 2, Size: 1}}
		w.makes("part", gpu, placed)
		before := *modes
		w.label("all-disabled")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonForeignOwner, "GPU 0", "1g.10gb@2", "end the pods", "team/part")
		w.endPod("part")
		w.spend(time.Minute)
		w.expectRefused(config.ReasonForeignOwner, "GPU 0", "1g.10gb@2", "delete the driver's pod")
		if *modes != before {
			t.Errorf("%d calls change GPUs", *modes-before)
		}
		if err := w.gpus.Driver().Destroy(t.Context(), gpu.UUID, placed); err != nil {
			t.Fatal(err)
		}
		calls := w.gpus.Calls()
		w.reach("all-disabled")
		w.expectModes(calls, false, false, false)
		if !w.offers("gpu-0") || !w.offers("gpu-1") {
			t.Errorf("the driver offers %v", w.published)
		}
	})
}

// Killed anywhere, the change comes to the same end, however long the driver is away: kubelet deletes its slices after half a minute. Then only the journal
// has that the instances are another's, and which GPU a pod has that stays is not known until the driver is back.
func TestASwitchOfMIGModesForADRADriverSurvivesItsAgent(t *testing.T) {
	t.Parallel()
	for name, stays := range map[string]bool{"no pod stays": false, "a pod stays": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, _ := dynamic(t)
				w.podWithClaim("on-0", "gpu-0")
				if stays {
					w.podWithClaim("on-2", "gpu-2")
				}
				if err := w.gpus.Delay(gpusim.SetMigMode, 40*time.Second); err != nil {
					t.Fatal(err)
				}
				w.label("two")
				w.untilCordoned()
				if j, err := journal.Parse(w.node().Annotations[config.AnnotationJournal]); err != nil || !j.ModesOnly {
					t.Errorf("the journal is %+v, %v", j, err)
				}
				wiped := false
				w.passes("the end of the change", func() bool {
					w.restartUnlessVerifying()
					wiped = wiped || len(w.published) == 0
					return w.node().Annotations[config.AnnotationJournal] == "" && w.condition().Status == corev1.ConditionTrue
				})
				if w.runs("on-0") || w.runs("on-2") != stays || !wiped {
					t.Errorf("the pod on GPU 0 runs: %t, that on GPU 2: %t; the slices were away: %t", w.runs("on-0"), w.runs("on-2"), wiped)
				}
				w.expectModes(w.gpus.Calls(), true, true, false)
				w.expectGivenBack()
			})
		})
	}
}

// What the driver does not offer is not said to be there: it reads the modes at its start.
func TestAMIGModeCountsOnceTheDRADriverOffersTheGPUSo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := dynamic(t)
		w.label("first")
		w.reach("first")
		offered := w.published
		for name, devices := range map[string][]resourcev1.Device{
			"GPU 0 is in MIG mode, and the ResourceSlices have no parts of it":           {wholeGPU("gpu-0", w.gpus.UUIDs()[0]), wholeGPU("gpu-1", w.gpus.UUIDs()[1]), wholeGPU("gpu-2", w.gpus.UUIDs()[2])},
			"GPU 1 is not in MIG mode, and the ResourceSlices do not have it as a whole": dynamicDevices(w.snapshot()[0]),
			"(pod dra/driver-2) for this node are complete":                              nil,
		} {
			w.publish(devices...)
			w.spend(time.Minute)
			if c := w.condition(); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, name) {
				t.Errorf("want %q, and the node says %s %s", name, c.Status, c.Message)
			}
			w.published = offered
			w.show(offered)
			w.reach("first")
		}
	})
}

// The scheduler chooses a device before it binds the pod, which may be after the change: the agent evicts such a pod, which could never start.
func TestAPodWhoseGPUTheDRADriverOffersOnlyInPartsLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := dynamic(t)
		w.allocate("late", "gpu-0")
		w.label("first")
		w.reach("first")
		w.podOfClaim("late", "gpu-0")
		w.podWithClaim("part", partOf(w.snapshot()[0], "3g.40gb", 4))
		w.passes("an eviction", func() bool { return !w.runs("late") })
		w.reach("first")
		if !w.runs("part") {
			t.Error("a pod with a part of GPU 0 has left")
		}
	})
}

// What claims have is named by instance. An instance that no claim has is left over, and so is one without a compute instance; it still takes its place.
func TestTheDiagnosisNamesWhatTheDRADriverHasLeftOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w, _ := dynamic(t)
		w.label("first")
		w.reach("first")
		gpu := w.snapshot()[0]
		w.makes("part", gpu, nvml.Placed{Profile: "2g.20gb", Span: nvml.Span{Start: 0, Size: 2}})
		w.makes("ended", gpu, nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 5, Size: 1}})
		w.endPod("ended")
		w.spend(time.Minute)
		d := w.ask(config.RequestDiagnosis).Diagnosis
		var got []string
		for _, i := range d.GPUs.Now[0].Instances {
			got = append(got, fmt.Sprintf("%s %t", i.Is, i.Left))
		}
		if diff := cmp.Diff([]string{"2g.20gb@0 false", "1g.10gb@5 true"}, got); diff != "" || d.GPUs.Now[0].Fits != "2g.20gb" || d.GPUs.Now[1].Fits != "" {
			t.Errorf("room for %q and %q; instances that are left over (-want +got):\n%s", d.GPUs.Now[0].Fits, d.GPUs.Now[1].Fits, diff)
		}
		if len(d.Pods) != 1 || !slices.Equal(d.Pods[0].Devices, []string{"GPU 0 2g.20gb@0"}) {
			t.Errorf("pods are %+v", d.Pods)
		}
		w.removeRequest()
		w.readsClaim = func(context.Context, string) error { return errors.New("the API server is away") }
		w.restart()
		d = w.ask(config.RequestDiagnosis).Diagnosis
		if slices.ContainsFunc(d.GPUs.Now[0].Instances, func(i api.StatusInstance) bool { return i.Left }) {
			t.Errorf("claims cannot be read, and instances are left over: %+v", d.GPUs.Now[0])
		}
	})
}

// A mode that cannot be switched is undone, and so is a change whose label goes while the driver is away.
func TestASwitchOfMIGModesForADRADriverIsUndone(t *testing.T) {
	t.Parallel()
	for name, fails := range map[string]func(w *world){
		"the other GPU is not switched": func(w *world) { w.failForGood(gpusim.SetMigMode) },
		"another label":                 func(w *world) { w.label("all-1g.10gb") },
		"no label":                      func(w *world) { w.unset(config.LabelMIGConfig) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, modes := dynamic(t)
				w.label("two")
				before := *modes
				w.passes("a first call", func() bool { return *modes > before })
				fails(w)
				w.passes("the end of the change", func() bool { return w.node().Annotations[config.AnnotationJournal] == "" })
				w.expectModes(w.gpus.Calls(), false, false, false)
				w.expectGivenBack()
				if slices.ContainsFunc(w.snapshot(), func(g nvml.GPU) bool { return len(g.Instances) > 0 }) {
					t.Errorf("GPUs have instances:\n%s", w.gpus)
				}
			})
		})
	}
}

// A reboot takes the instances and leaves the modes. What the agent cut before the driver did is not restored: the instances are the driver's now.
func TestNothingIsRestoredAfterARebootWhereTheDRADriverCutsTheGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, a100)
		w.noPlugin, w.draDriver = true, true
		w.setConfigs(map[string]catalog.MIGConfig{
			"cut": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}, "second": {{Indices: []int{1}, MIG: true, Devices: map[string]int{}}},
		})
		w.spend(time.Minute)
		w.label("cut")
		w.reach("cut")
		w.driverGates = dynamicGate
		w.restartDRADriver()
		w.rebootUnderDriver()
		calls := w.gpus.Calls()
		w.label("second")
		w.reach("second")
		w.expectModes(calls, true, true, false)

		w.makes("part", w.snapshot()[1], placed("3g.40gb", 4, 4))
		w.spend(time.Hour)
		calls = w.gpus.Calls()
		w.rebootUnderDriver()
		w.spend(time.Hour)
		w.expectModes(calls, true, true, false)
		if c := w.condition(); c.Status != corev1.ConditionTrue || !w.runs("part") {
			t.Errorf("the pod runs: %t; the node says %s %s", w.runs("part"), c.Status, c.Message)
		}
	})
}
