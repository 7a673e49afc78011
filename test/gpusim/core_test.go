package gpusim_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func node(t *testing.T, spec string) *gpusim.Node {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	n, err := gpusim.Create(t.TempDir(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func library(t *testing.T, n *gpusim.Node) *gpusim.Library {
	t.Helper()
	l := n.Library()
	if r := l.Init(); r != gpusim.Success {
		t.Fatal(r)
	}
	return l
}

func one(model string) string { return "gpus: [{model: " + model + ", mig: true}]" }

func expect(t *testing.T, n *gpusim.Node, want string) {
	t.Helper()
	want = strings.TrimPrefix(want, "\n")
	if diff := cmp.Diff(want, n.String()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func expectReturn(t *testing.T, doing string, got, want gpusim.Return) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %s, want %s", doing, got, want)
	}
}

// The ids and places are those that NVIDIA's MIG user guide and logs of nvidia-smi show for the same commands.
func TestDriverChoosesPlacesAsTheUserGuideShows(t *testing.T) {
	const none = -1
	for _, tt := range []struct {
		model    string
		profiles []int
		ids      []int // of the instances, in order of creation
		want     string
	}{
		{"A100-40GB", []int{19, 14, 5}, []int{13, 5, 1}, "4g.20gb@0 2g.10gb@4 1g.5gb@6"},
		{"A100-40GB", []int{9, 19, 14, 19}, []int{2, 7, 4, 8}, "1g.5gb@0 1g.5gb@1 2g.10gb@2 3g.20gb@4"},
		{"A100-40GB", []int{19, 19, 14, 9}, []int{13, 11, 3, none}, "2g.10gb@0 1g.5gb@4 1g.5gb@6"},
		{"A100-80GB", []int{14, 14, 14, 20}, []int{5, 3, 4, 13}, "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb+me@6"},
		{"H100-80GB", []int{19, 19, 19, 19, 19, 19, 19, 19}, []int{13, 11, 12, 7, 8, 9, 10, none}, "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"},
		{"RTX-PRO-6000", []int{14, 14, 14, 14}, []int{3, 4, 5, 6}, "1g.24gb@0 1g.24gb@3 1g.24gb@6 1g.24gb@9"},
		{"RTX-PRO-6000", []int{5, 14, 14}, []int{1, 5, 6}, "2g.48gb@0 1g.24gb@6 1g.24gb@9"},
	} {
		t.Run(fmt.Sprint(tt.model, tt.profiles), func(t *testing.T) {
			n := node(t, one(tt.model))
			l := library(t, n)
			var ids []int
			for _, p := range tt.profiles {
				gi, r := l.CreateGPUInstance(gpusim.Device{}, p)
				if r == gpusim.InsufficientResources {
					ids = append(ids, none)
					continue
				}
				expectReturn(t, "creating", r, gpusim.Success)
				facts, r := l.DescribeGPUInstance(gi)
				expectReturn(t, "describing", r, gpusim.Success)
				ids = append(ids, facts.ID)
			}
			if diff := cmp.Diff(tt.ids, ids); diff != "" {
				t.Errorf("ids (-want +got):\n%s", diff)
			}
			if got := geometry(t, n.Driver(), 0).String(); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func geometry(t *testing.T, d nvml.Driver, gpu int) nvml.Geometry {
	t.Helper()
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus[gpu].Geometry()
}

func placed(text string) nvml.Placed {
	var p nvml.Placed
	name, start, _ := strings.Cut(text, "@")
	if _, err := fmt.Sscanf(start, "%d:%d", &p.Start, &p.Size); err != nil {
		panic(err)
	}
	if before, compute, ok := strings.Cut(strings.TrimSuffix(name, ")"), "("); ok {
		name, p.Compute = before, compute
	}
	p.Profile = name
	return p
}

func TestOnlyWhatFitsCanBeCreated(t *testing.T) {
	const a100 = "A100-80GB"
	for _, tt := range []struct {
		name, model string
		ask         []string
		want        error // of the last one; the others succeed
	}{
		{"3g at 0 leaves room for one 2g", a100, []string{"3g.40gb@0:4", "2g.20gb@4:2", "2g.20gb@2:2"}, nvml.ErrNoRoom},
		{"3g at 4 leaves room for two 2g", a100, []string{"3g.40gb@4:4", "2g.20gb@0:2", "2g.20gb@2:2"}, nil},
		{"two 3g take all memory", a100, []string{"3g.40gb@0:4", "3g.40gb@4:4", "1g.10gb@6:1"}, nvml.ErrNoRoom},
		{"4g at 0 and 3g at 4", a100, []string{"4g.40gb@0:4", "3g.40gb@4:4"}, nil},
		{"only one has the media engines", a100, []string{"1g.10gb+me@0:1", "1g.10gb+me@1:1"}, nvml.ErrNoRoom},
		{"7g takes the media engines", a100, []string{"7g.80gb@0:8", "1g.10gb+me@1:1"}, nvml.ErrNoRoom},
		{"four 1g of double memory", a100, []string{"1g.20gb@0:2", "1g.20gb@2:2", "1g.20gb@4:2", "1g.20gb@6:2"}, nil},
		{"all media engines and some more", "RTX-PRO-6000", []string{"1g.24gb+me.all@0:3", "1g.24gb@3:3"}, nvml.ErrNoRoom},
		{"all media engines and none", "RTX-PRO-6000", []string{"1g.24gb+me.all@0:3", "2g.48gb-me@6:6"}, nil},
		{"a 2g with media and a 1g with media", "A30", []string{"2g.12gb+me@0:2", "1g.6gb+me@2:1"}, nvml.ErrNoRoom},
		{"divided", a100, []string{"3g.40gb(1c+2c)@4:4"}, nil},
		{"divided into too much", a100, []string{"3g.40gb(2c+2c)@4:4"}, nvml.ErrNoRoom},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := node(t, one(tt.model))
			d := n.Driver()
			for i, a := range tt.ask {
				err := d.Create(t.Context(), nvml.UUID(n.UUIDs()[0]), placed(a))
				if i < len(tt.ask)-1 && err != nil {
					t.Fatal(err)
				}
				if i == len(tt.ask)-1 && !errors.Is(err, tt.want) {
					t.Errorf("creating %s: got %v, want %v", a, err, tt.want)
				}
				if i == len(tt.ask)-1 && tt.want != nil && len(geometry(t, d, 0)) != i {
					t.Errorf("a refused creation left something:\n%s", n)
				}
			}
		})
	}
}

func TestNothingIsLeftOfAnInstanceWhoseComputeInstancesDoNotFit(t *testing.T) {
	n := node(t, one("A100-80GB"))
	err := n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[0]), placed("3g.40gb(2c+2c)@0:4"))
	if !errors.Is(err, nvml.ErrNoRoom) {
		t.Errorf("got %v, want %v", err, nvml.ErrNoRoom)
	}
	expect(t, n, "gpu 0 A100-80GB mig=on\n")
}

func TestInstancesInUseStand(t *testing.T) {
	n := node(t, one("A100-80GB"))
	d, gpu := n.Driver(), nvml.UUID(n.UUIDs()[0])
	p := placed("3g.40gb@4:4")
	if err := d.Create(t.Context(), gpu, p); err != nil {
		t.Fatal(err)
	}
	if err := n.Hold(n.MIGDevice(0, 4), 4711, "trainer", 1000); err != nil {
		t.Fatal(err)
	}
	if err := d.Destroy(t.Context(), gpu, p); !errors.Is(err, nvml.ErrInUse) {
		t.Errorf("got %v, want %v", err, nvml.ErrInUse)
	}
	l := library(t, n)
	gi, r := l.GPUInstanceByID(gpusim.Device{}, 2)
	expectReturn(t, "finding", r, gpusim.Success)
	expectReturn(t, "destroying a GPU instance before its compute instance", l.DestroyGPUInstance(gi), gpusim.InUse)
	expect(t, n, `
gpu 0 A100-80GB mig=on
  3g.40gb@4
    process 4711 trainer 1000 MiB
`)
	if err := n.Release(4711); err != nil {
		t.Fatal(err)
	}
	for range 2 { // what is gone need not be destroyed
		if err := d.Destroy(t.Context(), gpu, p); err != nil {
			t.Error(err)
		}
	}
	expect(t, n, "gpu 0 A100-80GB mig=on\n")
	_, r = l.DescribeGPUInstance(gi)
	expectReturn(t, "describing what is gone", r, gpusim.NotFound)
}

// A mode that is once said not to be there is asked for again, as nvml/lib does.
func TestTheDriverAsksTwiceForAModeThatIsNotThere(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB, mig: true}]")
	must(t, n.Fail(gpusim.GetMigMode, gpusim.Fault{Return: gpusim.NotSupported}))
	gpus, err := n.Driver().Snapshot(t.Context())
	must(t, err)
	if !gpus[0].Capable || !gpus[0].Enabled {
		t.Errorf("capable %t, enabled %t", gpus[0].Capable, gpus[0].Enabled)
	}
}

// A virtual machine has its GPUs side by side on one bus.
func TestGPUsOfAVirtualMachineDifferByTheirDeviceNumber(t *testing.T) {
	gpus, err := node(t, "gpus: [{model: A100-80GB, count: 2, passthrough: true}]").Driver().Snapshot(t.Context())
	must(t, err)
	if a, b := gpus[0].PCI, gpus[1].PCI; a != "0000:00:05.0" || b != "0000:00:06.0" {
		t.Errorf("the GPUs are at %s and %s", a, b)
	}
}

func TestModeOnAmpereWaitsForAReset(t *testing.T) {
	n := node(t, "gpus: [{model: A100-40GB, count: 3}, {model: A100-40GB, passthrough: true}]")
	l := library(t, n)
	set := func(gpu int, on bool, wantActivation gpusim.Return) {
		t.Helper()
		d, r := l.DeviceByIndex(gpu)
		expectReturn(t, "finding", r, gpusim.Success)
		activation, r := l.SetMIGMode(d, on)
		expectReturn(t, "setting the mode", r, gpusim.Success)
		expectReturn(t, "activating the mode", activation, wantActivation)
	}
	must(t, n.Hold(n.UUIDs()[1], 12, "trainer", 5))
	must(t, n.HoldHidden(n.UUIDs()[2], 13, "dcgm"))
	set(0, true, gpusim.Success)
	set(1, true, gpusim.InUse)
	set(2, true, gpusim.InUse)
	set(3, true, gpusim.ResetRequired)
	expect(t, n, `
gpu 0 A100-40GB mig=on
gpu 1 A100-40GB mig=off pending=on
  process 12 trainer 5 MiB
gpu 2 A100-40GB mig=off pending=on
  client 13 dcgm
gpu 3 A100-40GB mig=off pending=on
`)
	if err := n.Reset(1); err == nil {
		t.Error("a GPU in use was reset")
	}
	must(t, n.Release(12))
	must(t, n.Reset(1))
	set(2, false, gpusim.Success) // a pending request can be taken back
	if err := n.Driver().Reset(t.Context(), nvml.UUID(n.UUIDs()[3])); !errors.Is(err, nvml.ErrNotSupported) {
		t.Errorf("resetting a GPU that is passed through: got %v, want %v", err, nvml.ErrNotSupported)
	}
	boot := n.BootID()
	must(t, n.Reboot())
	if n.BootID() == boot {
		t.Error("the boot id is the same after a reboot")
	}
	expect(t, n, `
gpu 0 A100-40GB mig=on
gpu 1 A100-40GB mig=on
gpu 2 A100-40GB mig=off
gpu 3 A100-40GB mig=on
`)
}

func TestTheComputeModeDecidesWhoMayCompute(t *testing.T) {
	n := node(t, "gpus: [{model: A100-40GB}, {model: T4}]")
	l := library(t, n)
	gpus := n.UUIDs()
	set := func(gpu int, mode uint32, want gpusim.Return) {
		t.Helper()
		d, r := l.DeviceByIndex(gpu)
		expectReturn(t, "finding", r, gpusim.Success)
		expectReturn(t, "setting the compute mode", l.SetComputeMode(d, mode), want)
	}
	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "busy or unavailable") {
			t.Errorf("%s: got %v", what, err)
		}
	}
	set(0, 1, gpusim.InvalidArgument)
	set(0, 4, gpusim.InvalidArgument)
	set(0, 3, gpusim.Success)
	must(t, n.Hold(gpus[0], 1, "server", 10))
	refused("a second process", n.Hold(gpus[0], 2, "trainer", 10))
	must(t, n.HoldAsMPSClient(gpus[0], 3, "client", 10))
	must(t, n.HoldAsMPSClient(gpus[0], 4, "client", 10))
	must(t, n.HoldHidden(gpus[0], 5, "dcgm"))
	must(t, n.Hold(gpus[1], 2, "trainer", 10))
	set(1, 2, gpusim.Success)
	refused("a process on a GPU that lets none in", n.Hold(gpus[1], 6, "trainer", 10))
	refused("a client of MPS on a GPU that lets none in", n.HoldAsMPSClient(gpus[1], 7, "trainer", 10))
	expect(t, n, `
gpu 0 A100-40GB mig=off compute-mode=3
  process 1 server 10 MiB
  MPS client 3 client 10 MiB
  MPS client 4 client 10 MiB
  client 5 dcgm
gpu 1 T4 compute-mode=2
  process 2 trainer 10 MiB
`)
	must(t, n.Reboot())
	expect(t, n, "gpu 0 A100-40GB mig=off\ngpu 1 T4\n")
}

func TestPersistenceModeKeepsAGPUFromBeingReset(t *testing.T) {
	n := node(t, "gpus: [{model: A100-40GB, persistence: true}, {model: A100-40GB}, {model: H100-80GB, persistence: true}]")
	l := library(t, n)
	d := make([]gpusim.Device, 3)
	for i := range d {
		var r gpusim.Return
		d[i], r = l.DeviceByIndex(i)
		expectReturn(t, "finding", r, gpusim.Success)
	}
	expectReturn(t, "turning it on where no daemon does", l.SetPersistence(d[1], true), gpusim.Success)
	for i, want := range []gpusim.Return{gpusim.InUse, gpusim.InUse, gpusim.Success} {
		activation, r := l.SetMIGMode(d[i], true)
		expectReturn(t, "setting the mode", r, gpusim.Success)
		expectReturn(t, "activating the mode", activation, want)
		expectReturn(t, "resetting", l.Reset(d[i]), gpusim.InUse)
	}
	expect(t, n, `
gpu 0 A100-40GB mig=off pending=on persistence=on
gpu 1 A100-40GB mig=off pending=on persistence=on
gpu 2 H100-80GB mig=on persistence=on
`)
	for i := range d {
		expectReturn(t, "turning it off", l.SetPersistence(d[i], false), gpusim.Success)
	}
	activation, r := l.SetMIGMode(d[0], true)
	expectReturn(t, "setting the mode", r, gpusim.Success)
	expectReturn(t, "activating the mode", activation, gpusim.Success)
	expectReturn(t, "resetting", l.Reset(d[1]), gpusim.Success)
	expect(t, n, `
gpu 0 A100-40GB mig=on
gpu 1 A100-40GB mig=on
gpu 2 H100-80GB mig=on
`)
	for name, start := range map[string]func() error{"reboot": n.Reboot, "reload": n.Reload} {
		expectReturn(t, "turning it on where no daemon does", l.SetPersistence(d[1], true), gpusim.Success)
		expectReturn(t, "turning it off where the daemon turns it on", l.SetPersistence(d[0], false), gpusim.Success)
		must(t, start())
		t.Log("after a", name)
		expect(t, n, `
gpu 0 A100-40GB mig=on persistence=on
gpu 1 A100-40GB mig=on
gpu 2 H100-80GB mig=off persistence=on
`)
	}
}

func TestALibraryIsOfNoUseToAnotherVersionOfTheDriver(t *testing.T) {
	n := node(t, "driverVersion: 570.1.2\ngpus: [{model: A100-40GB, mig: true}, {model: H100-80GB, mig: true}]")
	d, gpu := n.Driver(), nvml.UUID(n.UUIDs()[0])
	must(t, d.Create(t.Context(), gpu, placed("3g.20gb@4:4")))
	before, r := gpusim.OpenLibrary(n.Dir(), "")
	expectReturn(t, "opening the library", r, gpusim.Success)
	t.Cleanup(func() { must(t, before.Close()) })
	expectReturn(t, "initializing it", before.Init(), gpusim.Success)
	must(t, n.Upgrade("580.3.4"))
	expect(t, n, "gpu 0 A100-40GB mig=on\ngpu 1 H100-80GB mig=off\n")

	_, r = before.DeviceCount()
	expectReturn(t, "reading", r, gpusim.LibRMVersionMismatch)
	expectReturn(t, "writing", before.SetPersistence(gpusim.Device{}, true), gpusim.LibRMVersionMismatch)
	expectReturn(t, "initializing it again", before.Init(), gpusim.LibRMVersionMismatch)
	if err := d.SetPersistence(t.Context(), gpu, true); !errors.Is(err, nvml.ErrReplaced) {
		t.Errorf("a driver from before: got %v, want %v", err, nvml.ErrReplaced)
	}
	must(t, n.Driver().SetPersistence(t.Context(), gpu, true))
	after := library(t, n)
	version, _, _, r := after.Versions()
	expectReturn(t, "reading the version", r, gpusim.Success)
	if version != "580.3.4" || n.DriverVersion() != version {
		t.Errorf("the driver's version is %s and %s, want 580.3.4", version, n.DriverVersion())
	}
	must(t, n.Upgrade("570.1.2"))
	_, r = before.DeviceCount()
	expectReturn(t, "reading when the version is back", r, gpusim.Success)
	must(t, d.SetPersistence(t.Context(), gpu, true))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestModeOnHopperChangesAtOnceOrNotAtAll(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB, count: 2, passthrough: true}]")
	l := library(t, n)
	must(t, n.HoldHidden(n.UUIDs()[0], 13, "dcgm"))
	must(t, n.Hold(n.UUIDs()[1], 12, "trainer", 5))
	_, r := l.SetMIGMode(gpusim.Device{}, true)
	expectReturn(t, "with a client that has no context", r, gpusim.Success)
	busy, _ := l.DeviceByIndex(1)
	_, r = l.SetMIGMode(busy, true)
	expectReturn(t, "with a CUDA process", r, gpusim.InUse)
	must(t, n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[0]), placed("7g.80gb@0:8")))
	expect(t, n, `
gpu 0 H100-80GB mig=on
  client 13 dcgm
  7g.80gb@0
gpu 1 H100-80GB mig=off
  process 12 trainer 5 MiB
`)
	must(t, n.Reboot())
	expect(t, n, `
gpu 0 H100-80GB mig=off
gpu 1 H100-80GB mig=off
`)
}

func TestGPUsThatCannotBeCutSaySo(t *testing.T) {
	n := node(t, "gpus: [{model: T4}]")
	gpus, err := n.Driver().Snapshot(t.Context())
	must(t, err)
	if gpus[0].Capable || len(gpus[0].Profiles) > 0 {
		t.Errorf("got %+v", gpus[0])
	}
	if err := n.Driver().SetMode(t.Context(), gpus[0].UUID, true); !errors.Is(err, nvml.ErrNotSupported) {
		t.Errorf("got %v, want %v", err, nvml.ErrNotSupported)
	}
}

func TestFaultsBefallTheCallsTheyAreSetFor(t *testing.T) {
	n := node(t, one("A100-80GB"))
	d, gpu := n.Driver(), nvml.UUID(n.UUIDs()[0])
	must(t, n.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, After: 1}))
	must(t, d.Create(t.Context(), gpu, placed("1g.10gb@0:1")))
	if diff := cmp.Diff(map[string][]gpusim.Fault{gpusim.CreateGpuInstanceWithPlacement: {{Return: gpusim.Unknown}}}, n.Faults()); diff != "" {
		t.Errorf("faults to come (-want +got):\n%s", diff)
	}
	if err := d.Create(t.Context(), gpu, placed("1g.10gb@1:1")); err == nil {
		t.Error("the second call went well")
	}
	if left := n.Faults(); len(left) > 0 {
		t.Errorf("faults to come are %v, want none", left)
	}
	must(t, d.Create(t.Context(), gpu, placed("1g.10gb@1:1")))

	must(t, n.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Timeout, Done: true}))
	if err := d.Create(t.Context(), gpu, placed("1g.10gb@2:1")); err == nil {
		t.Error("the answer was not lost")
	}
	must(t, n.Fail(gpusim.CreateComputeInstance, gpusim.Fault{Return: gpusim.InsufficientResources}))
	must(t, n.Fail(gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse}))
	if err := d.Create(t.Context(), gpu, placed("1g.10gb@3:1")); !errors.Is(err, nvml.ErrNoRoom) {
		t.Errorf("got %v, want %v", err, nvml.ErrNoRoom)
	}
	expect(t, n, `
gpu 0 A100-80GB mig=on
  1g.10gb@0
  1g.10gb@1
  1g.10gb@2 half-made
  1g.10gb@3 half-made
`)
	want := map[string]int{"CreateGpuInstanceWithPlacement": 5, "CreateComputeInstance": 3, "GpuInstanceDestroy": 1}
	if diff := cmp.Diff(want, n.Calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	must(t, d.Create(t.Context(), gpu, placed("1g.10gb@3:1"))) // finishes what stands half made
	if err := n.Fail("SetMIG", gpusim.Fault{Return: gpusim.InUse}); err == nil {
		t.Error("a function that does not exist got a fault")
	}
}

func TestModeChangeCanSucceedWithoutActivation(t *testing.T) {
	n := node(t, "gpus: [{model: A100-80GB}]")
	must(t, n.Fail(gpusim.SetMigMode, gpusim.Fault{Activation: gpusim.InUse}))
	must(t, n.Driver().SetMode(t.Context(), nvml.UUID(n.UUIDs()[0]), true))
	expect(t, n, "gpu 0 A100-80GB mig=off pending=on\n")
}

func TestCallsThatHangAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node(t, "gpus: [{model: H100-80GB}]")
		d, gpu := n.Driver(), nvml.UUID(n.UUIDs()[0])
		must(t, n.Fail(gpusim.SetMigMode, gpusim.Fault{Hang: true}))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		if err := d.SetMode(ctx, gpu, true); !errors.Is(err, nvml.ErrUnresponsive) {
			t.Errorf("got %v, want %v", err, nvml.ErrUnresponsive)
		}
		if took := time.Since(began); took != 5*time.Second {
			t.Errorf("took %v, want 5s", took)
		}
		if _, err := d.Snapshot(t.Context()); !errors.Is(err, nvml.ErrUnresponsive) {
			t.Errorf("a call after one that hangs: got %v, want %v", err, nvml.ErrUnresponsive)
		}
		must(t, n.Fail(gpusim.SetMigMode, gpusim.Fault{}))
		synctest.Wait()
		if _, err := d.Snapshot(t.Context()); err != nil {
			t.Error(err)
		}
		expect(t, n, "gpu 0 H100-80GB mig=on\n") // it came back late, and did its work
	})
}

func TestDelaysTakeTheirTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node(t, "gpus: [{model: A100-80GB}]\nlatency: cautious\n")
		began := time.Now()
		must(t, n.Driver().SetMode(t.Context(), nvml.UUID(n.UUIDs()[0]), true))
		if took := time.Since(began); took < 4*time.Second || took > 5*time.Second {
			t.Errorf("took %v, want a little over 4s", took)
		}
	})
}

// As FAR_MIG_scheduler saw it on an A30: the instance is in use for a while after its last process has ended.
func TestADestroyCanBeRefusedForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node(t, one("A30"))
		gpu := nvml.UUID(n.UUIDs()[0])
		must(t, n.Driver().Create(t.Context(), gpu, placed("1g.6gb@0:1")))
		must(t, n.Fail(gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse, For: 300 * time.Millisecond}))
		<-time.After(time.Minute) // the time counts from the first call on
		began, refused := time.Now(), 0
		for n.Driver().Destroy(t.Context(), gpu, placed("1g.6gb@0:1")) != nil {
			refused++
			<-time.After(50 * time.Millisecond)
		}
		if took := time.Since(began); took != 350*time.Millisecond || refused != 7 {
			t.Errorf("refused %d times, in %s", refused, took)
		}
		expect(t, n, "gpu 0 A30 mig=on\n")
		if left := n.Faults(); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	})
}

func TestEventsArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node(t, "gpus: [{model: H100-80GB, count: 2}]")
		ctx, cancel := context.WithCancel(t.Context())
		events, err := n.Driver().Events(ctx)
		must(t, err)
		must(t, n.Xid(1, 79))
		want := nvml.Event{GPU: nvml.UUID(n.UUIDs()[1]), Kind: nvml.EventXid, Xid: 79, GI: nvml.WholeGPU, CI: nvml.WholeGPU}
		if diff := cmp.Diff(want, <-events); diff != "" {
			t.Errorf("event (-want +got):\n%s", diff)
		}
		cancel()
		if _, open := <-events; open {
			t.Error("the channel is open after its context has ended")
		}
	})
}

func TestALostGPUHidesNoOther(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB, count: 2}]")
	d := n.Driver()
	before, err := d.Snapshot(t.Context())
	must(t, err)
	must(t, n.SetHealth(1, gpusim.Health{Lost: true}))
	want := slices.Clone(before)
	want[1].Lost, want[1].UsedMiB, want[1].ComputeMode = true, -1, ""
	got, err := d.Snapshot(t.Context())
	must(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if err := d.SetMode(t.Context(), before[1].UUID, true); !errors.Is(err, nvml.ErrLost) {
		t.Errorf("changing it: got %v, want %v", err, nvml.ErrLost)
	}
	fresh, err := n.Driver().Snapshot(t.Context())
	must(t, err)
	if diff := cmp.Diff(nvml.GPU{Index: 1, Minor: -1, Lost: true, UsedMiB: -1}, fresh[1]); diff != "" {
		t.Errorf("a GPU that was never seen well (-want +got):\n%s", diff)
	}
}

func TestSpecsAreRefusedWithTheReason(t *testing.T) {
	for _, tt := range []struct{ spec, want string }{
		{"driverVersion: new\ngpus: [{model: T4}]", `driverVersion is "new": use one such as "580.159.04"`},
		{"gpus: [{model: A1000}]", `gpus[0].model "A1000" is not known`},
		{"gpus: []", "gpus describes 0 GPUs"},
		{"gpus: [{model: A30, count: 17}]", "gpus describes 17 GPUs"},
		{"gpus: [{model: T4, mig: true}]", "gpus[0].mig is true"},
		{"gpus: [{model: A30, migs: true}]", "unknown field"},
		{"gpus: [{model: A30, virtual: full}]", `gpus[0].virtual is "full": use one of host-vgpu, host-vsga, vgpu`},
		{"gpus: [{model: A30, virtual: vgpu, mig: true}]", "gpus[0].mig is true, but a vGPU has no MIG mode"},
		{"gpus: [{model: A30, virtual: vgpu, passthrough: true}]", "gpus[0].virtual is set beside passthrough"},
		{"gpus: [{model: A30}]\ndelays: {SetMigMode: soon}", `delays.SetMigMode is "soon"`},
		{"gpus: [{model: A30}]\ndelays: {SetMig: 1s}", `function "SetMig" is not known`},
	} {
		if _, err := gpusim.ParseSpec([]byte(tt.spec)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %s", tt.spec, err, tt.want)
		}
	}
}

func TestARealGPUIsLikeTheModelWithItsProfiles(t *testing.T) {
	for _, model := range gpusim.Models() {
		gpus, err := node(t, "gpus: [{model: "+model+"}]").Driver().Snapshot(t.Context())
		must(t, err)
		if like, all := gpusim.Like(gpus[0]); like != model || !all {
			t.Errorf("%s is like %s, %t", model, like, all)
		}
	}
	unknown := nvml.GPU{ComputeCapability: nvml.ComputeCapability{Major: 10}, Profiles: []nvml.Profile{{Name: "1g.23gb"}, {Name: "1g.99gb"}}}
	if like, all := gpusim.Like(unknown); like != "B200" || all {
		t.Errorf("a GPU with a profile of a B200 is like %s, %t", like, all)
	}
}

// A walk of legal and illegal operations, on every model, keeps what must always hold.
func TestRandomWalksKeepTheInvariants(t *testing.T) {
	for _, model := range gpusim.Models() {
		t.Run(model, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			n := node(t, "gpus: [{model: "+model+"}]")
			d, gpu := n.Driver(), nvml.UUID(n.UUIDs()[0])
			pid := 100
			for range 400 {
				gpus, err := d.Snapshot(t.Context())
				must(t, err)
				before := gpus[0]
				checkInvariants(t, before)
				switch act := r.IntN(12); {
				case act < 2 || act == 2 && r.IntN(3) == 0:
					stepOfTheWhole(t, r, n, before)
				case act < 4 && len(before.Instances) > 0:
					pid++
					if i := before.Instances[r.IntN(len(before.Instances))]; len(i.Devices) > 0 {
						must(t, n.Hold(i.Devices[0].UUID, pid, "walker", 1))
					}
				case act < 6:
					_ = n.Release(100 + r.IntN(pid))
				case act < 8 && len(before.Instances) > 0:
					i := before.Instances[r.IntN(len(before.Instances))]
					err := d.Destroy(t.Context(), gpu, i.Placed)
					if busy := len(i.Processes) > 0; busy != errors.Is(err, nvml.ErrInUse) {
						t.Errorf("destroying %v with %d processes: got %v", i.Placed, len(i.Processes), err)
					}
				case len(before.Profiles) > 0:
					p := before.Profiles[r.IntN(len(before.Profiles))]
					_ = d.Create(t.Context(), gpu, nvml.Placed{Profile: p.Name, Span: p.Placements[r.IntN(len(p.Placements))]})
				}
			}
		})
	}
}

// stepOfTheWhole is a step of a walk that is about the GPU as such.
func stepOfTheWhole(t *testing.T, r *rand.Rand, n *gpusim.Node, g nvml.GPU) {
	t.Helper()
	d := n.Driver()
	switch act := r.IntN(20); {
	case act == 0:
		must(t, n.Reboot())
	case act < 3:
		must(t, d.SetPersistence(t.Context(), g.UUID, !g.Persistent))
	case act < 11:
		if err := d.Reset(t.Context(), g.UUID); g.Persistent && !errors.Is(err, nvml.ErrInUse) {
			t.Errorf("resetting a GPU in persistence mode: got %v, want %v", err, nvml.ErrInUse)
		}
	default:
		_ = d.SetMode(t.Context(), g.UUID, r.IntN(4) > 0) // refusals are part of the walk
	}
}

func checkInvariants(t *testing.T, g nvml.GPU) {
	t.Helper()
	if !g.Enabled && len(g.Instances) > 0 {
		t.Errorf("instances with MIG mode off: %v", g.Geometry())
	}
	seen := map[string]bool{}
	media := 0
	for k, i := range g.Instances {
		p, ok := g.Profile(i.Profile)
		if !ok || !slices.Contains(p.Placements, i.Span) {
			t.Errorf("%v is not where its profile may be", i.Placed)
		}
		media += p.Engines.OFA
		for _, other := range g.Instances[k+1:] {
			if i.Overlaps(other.Span) {
				t.Errorf("%v overlaps %v", i.Placed, other.Placed)
			}
		}
		for _, dev := range i.Devices {
			if seen[dev.UUID] {
				t.Errorf("two MIG devices are %s", dev.UUID)
			}
			seen[dev.UUID] = true
		}
	}
	if media > 1 {
		t.Errorf("%d instances have the one optical flow engine: %v", media, g.Geometry())
	}
}
