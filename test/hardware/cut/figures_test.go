package cut_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
)

// Each figure is of its own call: another's is shorter in one of two directions.
func TestTheProfileForTheSimulatorHasWhatEachCallTook(t *testing.T) {
	const spec = `gpus: [{model: A30, count: 2}]
delays: {SetMigMode: 35ms, CreateGpuInstanceWithPlacement: 5ms, CreateComputeInstance: 10ms, ComputeInstanceDestroy: 15ms, GpuInstanceDestroy: 20ms,
  Init: 25ms, GetMigDeviceHandleByIndex: 3ms, WalkMIGDevice: 4ms, ComputeInstanceGetInfo: 2ms, GetMigMode: 1ms}`
	n := gpusimtest.Node(t, spec)
	calls := &cut.Calls{}
	d := lib.Open(lib.Options{Library: gpusimtest.Library(t), Wrap: calls.Wrap})
	t.Cleanup(func() { must(t, d.Release(context.WithoutCancel(t.Context()))) })
	gpus, err := d.Snapshot(t.Context())
	must(t, err)
	b := &cut.Bench{Driver: d, Calls: calls, GPUs: gpus[:1], Rounds: 2, Figures: &cut.Figures{}}
	must(t, n.Fail(gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse}))
	for _, step := range b.Steps() {
		if _, err := step.Do(t.Context()); err != nil {
			t.Fatalf("%s: %v", step.Name, err)
		}
	}
	_, err = b.Change("a change", func() error { return d.SetMode(t.Context(), gpus[0].UUID, true) })
	must(t, err)
	text, err := b.Figures.Profile(calls.Title(t.Context(), gpus[0], true), gpus[0])
	must(t, err)
	got, err := gpusim.ParseSpec([]byte(text))
	if err != nil {
		t.Fatalf("the simulator does not read it: %v\n%s", err, text)
	}
	want, err := gpusim.ParseSpec([]byte(spec))
	must(t, err)
	if got.GPUs[0].Model != "A30" {
		t.Errorf("the model is %s", got.GPUs[0].Model)
	}
	for function, least := range want.Delays {
		took, err := time.ParseDuration(got.Delays[function])
		if min, _ := time.ParseDuration(least); err != nil || took < min || took > min+time.Minute {
			t.Errorf("%s takes %q, want at least %s", function, got.Delays[function], least)
		}
	}
	if got.Delays[gpusim.CreateGpuInstance] != got.Delays[gpusim.CreateGpuInstanceWithPlacement] {
		t.Errorf("the simulated driver creates instances without a place in no time:\n%s", text)
	}
	table := b.Figures.Markdown(calls.Title(t.Context(), gpus[0], true))
	for _, want := range []string{
		"### SIMULATED NVIDIA A30, driver 580.159.04", "| turning MIG mode on | SetMigMode |", "| creating 2g.12gb+me | CreateGpuInstanceWithPlacement |",
		"| refused calls, until the same call was done | GpuInstanceDestroy |", "| filling a GPU with 4 x 1g.6gb |", ", with 4 MIG devices |", "| a change: without the driver's calls |",
	} {
		if !strings.Contains(table, want) {
			t.Errorf("%q is missing in\n%s", want, table)
		}
	}
}

// unplaced is a driver that has no place for some profiles.
type unplaced struct {
	nvml.Driver
	profiles []string
}

func (u unplaced) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	all, err := u.Driver.Snapshot(ctx)
	for n := range all {
		for i, p := range all[n].Profiles {
			if slices.Contains(u.profiles, p.Name) {
				all[n].Profiles[i].Placements = nil
			}
		}
	}
	return all, err
}

func TestAProfileWithoutAPlaceIsNotMeasured(t *testing.T) {
	d := unplaced{simulated(t, "gpus: [{model: A30, mig: true}]").Driver(), []string{"1g.6gb", "4g.24gb"}}
	gpus, err := d.Snapshot(t.Context())
	must(t, err)
	b := &cut.Bench{Driver: d, Calls: &cut.Calls{}, GPUs: gpus, Rounds: 1, Figures: &cut.Figures{}}
	saw, err := b.Profiles(t.Context())
	if want := fmt.Sprintf("%d profiles, 1 times each", len(gpus[0].Profiles)-2); err != nil || saw != want {
		t.Errorf("saw %q, want %q: %v", saw, want, err)
	}
	if small := cut.Smallest(gpus[0]); len(small.Placements) == 0 {
		t.Errorf("GPUs are filled with %s", small.Name)
	}
}

func TestACallOfTheBenchThatHangsIsAbandonedAtItsDeadline(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A30, mig: true}]")
	calls := &cut.Calls{}
	d := lib.Open(lib.Options{Library: gpusimtest.Library(t), Wrap: calls.Wrap})
	gpus, err := d.Snapshot(t.Context())
	must(t, err)
	must(t, n.Fail(gpusim.GetMigDeviceHandleByIndex, gpusim.Fault{Hang: true}))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	b := &cut.Bench{Driver: d, Calls: calls, GPUs: gpus, Rounds: 1, Figures: &cut.Figures{}}
	if _, err := b.Look(ctx); !errors.Is(err, nvml.ErrUnresponsive) || !strings.Contains(err.Error(), "walking through the MIG devices") {
		t.Errorf("the walk: %v", err)
	}
	must(t, n.Fail(gpusim.GetMigDeviceHandleByIndex, gpusim.Fault{}))
	must(t, d.Release(t.Context()))
}
