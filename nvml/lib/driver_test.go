package lib_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/receive"
)

func snapshot(t *testing.T, d nvml.Driver) []nvml.GPU {
	t.Helper()
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus
}

func expectError(t *testing.T, err, cause error, text string) {
	t.Helper()
	if e := new(nvml.Error); !errors.Is(err, cause) || !errors.As(err, &e) || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want a *nvml.Error for %q that says %q", err, cause, text)
	}
}

func fail(t *testing.T, n *gpusim.Node, function string, f gpusim.Fault) {
	t.Helper()
	if err := n.Fail(function, f); err != nil {
		t.Fatal(err)
	}
}

func create(t *testing.T, d nvml.Driver, g nvml.GPU, name string) nvml.Placed {
	t.Helper()
	p := placed(t, d, g.Index, name)
	if err := d.Create(t.Context(), g.UUID, p); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestADriverThatIsInstalledLaterIsFound(t *testing.T) {
	gpusimtest.Node(t, "gpus: [{model: H200}]")
	root := t.TempDir()
	d := releasing(t, lib.Open(lib.Options{DriverRoot: root}))
	_, err := d.Snapshot(t.Context())
	expectError(t, err, nvml.ErrNoDriver, "there is no libnvidia-ml.so.1 under "+root)
	install(t, root)
	if gpus := snapshot(t, d); len(gpus) != 1 {
		t.Errorf("got %d GPUs, want 1", len(gpus))
	}
}

func TestALibraryThatCannotBeOpenedIsNoDriver(t *testing.T) {
	file := t.TempDir() + "/libnvidia-ml.so.1"
	if err := os.WriteFile(file, []byte("not a library"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := lib.Open(lib.Options{Library: file}).Snapshot(t.Context())
	expectError(t, err, nvml.ErrNoDriver, file)
}

func TestADriverThatGoesAwayIsTriedAgain(t *testing.T) {
	for _, c := range []struct {
		function string
		code     gpusim.Return
	}{{gpusim.Init, gpusim.DriverNotLoaded}, {gpusim.GetCount, gpusim.Uninitialized}} {
		t.Run(c.code.String(), func(t *testing.T) {
			n := gpusimtest.Node(t, "gpus: [{model: H200}]")
			d := openDriver(t)
			if c.function != gpusim.Init {
				snapshot(t, d)
			}
			fail(t, n, c.function, gpusim.Fault{Return: c.code})
			_, err := d.Snapshot(t.Context())
			expectError(t, err, nvml.ErrNoDriver, c.code.String())
			snapshot(t, d)
		})
	}
}

func TestGPUsAreLookedUpAgainAfterTheDriverWasAway(t *testing.T) {
	before := gpusimtest.Node(t, "seed: 1\ngpus: [{model: H200}]")
	d := openDriver(t)
	snapshot(t, d)
	old := nvml.UUID(before.UUIDs()[0])
	n := gpusimtest.Node(t, "seed: 2\ngpus: [{model: H200}]") // the GPU was replaced in the meantime
	fail(t, n, gpusim.GetMigMode, gpusim.Fault{Return: gpusim.Uninitialized})
	expectError(t, d.SetMode(t.Context(), old, true), nvml.ErrNoDriver, "ERROR_UNINITIALIZED")
	expectError(t, d.SetMode(t.Context(), old, true), nvml.ErrNotFound, "none of the node's 1 GPUs")
	if err := d.SetMode(t.Context(), nvml.UUID(n.UUIDs()[0]), true); err != nil {
		t.Error(err)
	}
}

func TestADriverThatLosesAllGPUsIsOpenedAgain(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}, {model: H200}]")
	d := openDriver(t)
	lose := func(gpu int) {
		t.Helper()
		if err := n.SetHealth(gpu, gpusim.Health{Lost: true}); err != nil {
			t.Fatal(err)
		}
	}
	fail(t, n, gpusim.Init, gpusim.Fault{Return: gpusim.Unknown, After: 1}) // the second Init returns it
	lose(1)
	snapshot(t, d)
	snapshot(t, d)
	lose(0)
	snapshot(t, d)
	if _, err := d.Snapshot(t.Context()); err == nil {
		t.Error("the library was not initialised again")
	}
	if gpus := snapshot(t, d); !gpus[0].Lost || !gpus[1].Lost || gpus[0].UUID != nvml.UUID(n.UUIDs()[0]) {
		t.Errorf("got %+v", gpus)
	}
}

func TestACallThatHangsIsLeftAloneUntilItIsBack(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	snapshot(t, d)
	fail(t, n, gpusim.GetMigMode, gpusim.Fault{Hang: true})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	_, err := d.Snapshot(ctx)
	expectError(t, err, nvml.ErrUnresponsive, "context deadline exceeded")

	// t.Context has no deadline: this returns only because the call before is still out.
	_, err = d.Snapshot(t.Context())
	expectError(t, err, nvml.ErrUnresponsive, "an earlier call has not returned")

	fail(t, n, gpusim.GetMigMode, gpusim.Fault{})
	eventually(t, func() bool {
		_, err = d.Snapshot(t.Context())
		return err == nil
	})
}

// eventually waits for what another goroutine inside the driver does, of which nothing informs.
func eventually(t *testing.T, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(30 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("it does not happen")
		}
	}
}

func TestACallThatIsGivenUpIsStillCompleted(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := placed(t, d, 0, "3g.71gb@4")
	fail(t, n, gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Hang: true})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	expectError(t, d.Create(ctx, g.UUID, p), nvml.ErrUnresponsive, "creating 3g.71gb@4 on "+string(g.UUID))
	fail(t, n, gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{})
	var gpus []nvml.GPU
	eventually(t, func() (done bool) {
		var err error
		gpus, err = d.Snapshot(t.Context())
		return err == nil
	})
	if i := gpus[0].Instances; len(i) != 1 || i[0].HalfMade() {
		t.Errorf("got instances %v, want 3g.71gb@4 made to the end", i)
	}
}

func TestAnEndedContextCallsNothing(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	expectError(t, d.SetMode(ctx, g.UUID, true), context.Canceled, "turning MIG mode on")
	if calls := n.Calls()[gpusim.SetMigMode]; calls != 0 {
		t.Errorf("SetMigMode was called %d times", calls)
	}
}

func TestALostGPUIsReportedAndHidesNoOther(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}, {model: H200, mig: true}]")
	d := openDriver(t)
	before := snapshot(t, d)
	create(t, d, before[0], "3g.71gb@0")
	create(t, d, before[1], "3g.71gb@0")
	if err := n.SetHealth(0, gpusim.Health{Lost: true}); err != nil {
		t.Fatal(err)
	}
	fresh := snapshot(t, openDriver(t))
	if !fresh[0].Lost || fresh[0].UUID != "" || fresh[1].Lost {
		t.Errorf("to a driver that knows nothing from before, it is %+v", fresh[0])
	}
	after := snapshot(t, d)
	lost := before[0]
	lost.Lost, lost.Capable, lost.Enabled, lost.Pending, lost.Persistent = true, true, false, false, false
	lost.UsedMiB, lost.ComputeMode = -1, ""
	after[0].Profiles, lost.Profiles = nil, nil // an instance has reported its compute profiles in between
	if diff := cmp.Diff(lost, after[0]); diff != "" {
		t.Errorf("the lost GPU (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff("3g.71gb@0", after[1].Geometry().String()); diff != "" || after[1].Lost {
		t.Errorf("the other GPU (-want +got):\n%s", diff)
	}
	err := d.Create(t.Context(), before[0].UUID, nvml.Placed{Profile: "1g.18gb", Span: nvml.Span{Start: 4, Size: 1}})
	expectError(t, err, nvml.ErrLost, "ERROR_GPU_IS_LOST")
}

func TestAnUnknownGPUOrProfileIsNamed(t *testing.T) {
	gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	expectError(t, d.Reset(t.Context(), "GPU-0"), nvml.ErrNotFound, "none of the node's 1 GPUs")
	err := d.Create(t.Context(), snapshot(t, d)[0].UUID, nvml.Placed{Profile: "9g.9gb", Span: nvml.Span{Size: 1}})
	expectError(t, err, nvml.ErrNotSupported, "the GPU offers no 9g.9gb")
}

func TestBothCodesOfAModeChangeCount(t *testing.T) {
	for _, c := range []struct {
		name    string
		model   string
		fault   gpusim.Fault
		cause   string
		pending bool
	}{
		{"the call fails", "A100-80GB", gpusim.Fault{Return: gpusim.NoPermission}, nvml.ErrPermission.Error(), false},
		{"in use, noted", "A100-80GB", gpusim.Fault{Activation: gpusim.InUse}, "", true},
		{"reset required, noted", "A100-80GB", gpusim.Fault{Activation: gpusim.ResetRequired}, "", true},
		{"another reason, noted", "A100-80GB", gpusim.Fault{Activation: gpusim.Unknown}, "ERROR_UNKNOWN", true},
		{"in use, not noted", "H200", gpusim.Fault{Activation: gpusim.InUse}, nvml.ErrInUse.Error(), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := gpusimtest.Node(t, "gpus: [{model: "+c.model+"}]")
			d := openDriver(t)
			g := snapshot(t, d)[0]
			fail(t, n, gpusim.SetMigMode, c.fault)
			if got := causeOf(d.SetMode(t.Context(), g.UUID, true)); got != c.cause {
				t.Errorf("got cause %q, want %q", got, c.cause)
			}
			if g = snapshot(t, d)[0]; g.Enabled || g.Pending != c.pending {
				t.Errorf("enabled is %v and pending %v, want false and %v", g.Enabled, g.Pending, c.pending)
			}
		})
	}
}

func TestResetMakesAPendingModeCurrentIfItCan(t *testing.T) {
	for _, c := range []struct {
		name, spec string
		prepare    func(*testing.T, *gpusim.Node, nvml.Driver, nvml.GPU)
		cause      error
		text       string
	}{
		{
			"held by a client without a process", "gpus: [{model: A100-80GB}]",
			func(t *testing.T, n *gpusim.Node, d nvml.Driver, g nvml.GPU) {
				t.Helper()
				if err := errors.Join(n.HoldHidden(string(g.UUID), 99, "dcgm"), d.SetMode(t.Context(), g.UUID, true)); err != nil {
					t.Fatal(err)
				}
			}, nvml.ErrInUse, "ERROR_IN_USE",
		},
		{
			"in a virtual machine", "gpus: [{model: A100-80GB, passthrough: true}]",
			func(t *testing.T, _ *gpusim.Node, d nvml.Driver, g nvml.GPU) {
				t.Helper()
				if err := d.SetMode(t.Context(), g.UUID, true); err != nil {
					t.Fatal(err)
				}
			}, nvml.ErrNotSupported, "only a reboot",
		},
		{
			"nothing pending", "gpus: [{model: A100-80GB}]",
			func(*testing.T, *gpusim.Node, nvml.Driver, nvml.GPU) {}, nvml.ErrNotSupported, "its program nvidia-smi is missing",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := gpusimtest.Node(t, c.spec)
			d := openDriver(t)
			g := snapshot(t, d)[0]
			c.prepare(t, n, d, g)
			expectError(t, d.Reset(t.Context(), g.UUID), c.cause, c.text)
		})
	}
}

func TestADividedInstanceIsMadeWholeOrNotAtAll(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := placed(t, d, 0, "4g.40gb(1c+1c+2c)@0")
	before := n.String()
	fail(t, n, gpusim.CreateComputeInstanceWithPlacement, gpusim.Fault{Return: gpusim.InsufficientResources, After: 2})
	expectError(t, d.Create(t.Context(), g.UUID, p), nvml.ErrNoRoom, "creating 4g.40gb(1c+1c+2c)@0")
	if diff := cmp.Diff(before, n.String()); diff != "" {
		t.Errorf("-before +after:\n%s", diff)
	}
}

func TestADividedInstanceThatCannotBeUndoneIsShownAndGoesLater(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := placed(t, d, 0, "4g.40gb(1c+1c+2c)@0")
	fail(t, n, gpusim.CreateComputeInstanceWithPlacement, gpusim.Fault{Return: gpusim.InsufficientResources, After: 2})
	fail(t, n, gpusim.ComputeInstanceDestroy, gpusim.Fault{Return: gpusim.InUse, After: 1})
	err := d.Create(t.Context(), g.UUID, p)
	expectError(t, err, nvml.ErrNoRoom, "then removing the half-made 4g.40gb@0 on "+string(g.UUID)+": in use")
	if errors.Is(err, nvml.ErrInUse) {
		t.Errorf("got %v, which says that what was asked for is in use", err)
	}
	if got := snapshot(t, d)[0].Geometry().String(); got != "4g.40gb(1c)@0" && got != "4g.40gb(2c)@0" {
		t.Errorf("left are %s, want the GPU instance with one of its compute instances", got)
	}
	if err := d.Destroy(t.Context(), g.UUID, p); err != nil {
		t.Error(err)
	}
	if got := snapshot(t, d)[0].Geometry(); len(got) > 0 {
		t.Errorf("left are %v, want nothing", got)
	}
}

func TestAnInstanceThatCannotGoStandsAsBefore(t *testing.T) {
	for _, c := range []struct {
		name, function string
		fault          gpusim.Fault
	}{
		{"its second compute instance is in use", gpusim.ComputeInstanceDestroy, gpusim.Fault{Return: gpusim.InUse, After: 1}},
		{"the GPU instance is in use", gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true}]")
			d := openDriver(t)
			g := snapshot(t, d)[0]
			p := create(t, d, g, "4g.40gb(1c+1c+2c)@0")
			before := n.String()
			fail(t, n, c.function, c.fault)
			expectError(t, d.Destroy(t.Context(), g.UUID, p), nvml.ErrInUse, "destroying 4g.40gb(1c+1c+2c)@0")
			if diff := cmp.Diff(before, n.String()); diff != "" {
				t.Errorf("-before +after:\n%s", diff)
			}
			if err := d.Destroy(t.Context(), g.UUID, p); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestAnInstanceThatNeitherGoesNorStandsAgainIsHalfMade(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := create(t, d, g, "3g.40gb@4")
	fail(t, n, gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse})
	fail(t, n, gpusim.CreateComputeInstanceWithPlacement, gpusim.Fault{Return: gpusim.InsufficientResources})
	expectError(t, d.Destroy(t.Context(), g.UUID, p), nvml.ErrInUse, "then restoring 3g.40gb@4")
	if i := snapshot(t, d)[0].Instances; len(i) != 1 || !i[0].HalfMade() || i[0].Span != p.Span {
		t.Fatalf("got instances %v, want a half-made 3g.40gb@4", i)
	}
	if err := d.Destroy(t.Context(), g.UUID, p); err != nil {
		t.Error(err)
	}
	if i := snapshot(t, d)[0].Instances; len(i) > 0 {
		t.Errorf("got instances %v, want none", i)
	}
}

func TestABusyInstanceIsNotTouched(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := create(t, d, g, "3g.40gb(1c+2c)@4")
	if err := n.Hold(n.MIGDevice(0, 4), 4711, "train", 100); err != nil {
		t.Fatal(err)
	}
	expectError(t, d.Destroy(t.Context(), g.UUID, p), nvml.ErrInUse, "process 4711")
	if calls := n.Calls(); calls[gpusim.ComputeInstanceDestroy]+calls[gpusim.GpuInstanceDestroy] != 0 {
		t.Errorf("destroying was tried: %v", calls)
	}
}

func TestProcessesThatNVMLDoesNotReportAreAnError(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := create(t, d, g, "3g.71gb@4")
	fail(t, n, gpusim.GetRunningProcesses, gpusim.Fault{Return: gpusim.Unknown, Times: -1})
	if _, err := d.Snapshot(t.Context()); err == nil {
		t.Error("Snapshot reports no processes where it does not know")
	}
	if err := d.Destroy(t.Context(), g.UUID, p); err == nil {
		t.Error("Destroy goes on without knowing who is there")
	}
}

func TestAnObservationDoesWithoutWhatOldDriversDoNotReport(t *testing.T) {
	for _, code := range []gpusim.Return{gpusim.NotSupported, gpusim.FunctionNotFound} {
		t.Run(code.String(), func(t *testing.T) {
			n := gpusimtest.Node(t, "gpus: [{model: H200}, {model: H200, persistence: true}]")
			if reported := snapshot(t, openDriver(t))[1]; reported.Minor != 1 || !reported.Persistent {
				t.Errorf("got minor number %d and persistence %t, want 1 and true", reported.Minor, reported.Persistent)
			}
			fail(t, n, gpusim.GetMinorNumber, gpusim.Fault{Return: code, Times: -1})
			fail(t, n, gpusim.GetPersistenceMode, gpusim.Fault{Return: code, Times: -1})
			fail(t, n, gpusim.GetComputeMode, gpusim.Fault{Return: code, Times: -1})
			fail(t, n, gpusim.SetComputeMode, gpusim.Fault{Return: code, Times: -1})
			fail(t, n, gpusim.GetStatic, gpusim.Fault{Return: code, Times: -1})
			d := openDriver(t)
			g := snapshot(t, d)[1]
			if g.Minor != -1 || g.Persistent || g.ComputeMode != "" || g.Virtualization != "" || g.ComputeCapability.Major != 0 {
				t.Errorf("got minor number %d, persistence %t, compute mode %q, virtualization %q and compute capability %v, want -1 and nothing",
					g.Minor, g.Persistent, g.ComputeMode, g.Virtualization, g.ComputeCapability)
			}
			expectError(t, d.SetPersistence(t.Context(), g.UUID, true), nvml.ErrNotSupported, "persistence mode on GPU-")
			expectError(t, d.SetComputeMode(t.Context(), g.UUID, nvml.ComputeDefault), nvml.ErrNotSupported, "compute mode to default on GPU-")
		})
	}
}

func TestPartsThatFitOnlyInOneWayAreCreated(t *testing.T) {
	gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	create(t, d, g, "7g.141gb(2c+2c+3c)@0")
	if got := snapshot(t, d)[0].Geometry().String(); got != "7g.141gb(2c+2c+3c)@0" {
		t.Errorf("got %s", got)
	}
}

func TestDerivedNamesAreThoseThatAnH200GaveItself(t *testing.T) {
	const total = 150754820096
	for _, c := range []struct {
		kind, slices int
		memory       uint64
		want         string
	}{
		{0, 1, 16384, "1g.18gb"},
		{1, 2, 33280, "2g.35gb"},
		{2, 3, 71424, "3g.71gb"},
		{3, 4, 71424, "4g.71gb"},
		{4, 7, 143360, "7g.141gb"},
		{7, 1, 16384, "1g.18gb+me"},
		{9, 1, 33280, "1g.35gb"},
	} {
		if got, err := lib.DeriveName(c.kind, c.slices, c.memory, total); got != c.want || err != nil {
			t.Errorf("profile %d is named %q, %v; want %q", c.kind, got, err, c.want)
		}
	}
	if got, err := lib.DeriveName(0, 5, 16384, total); err == nil {
		t.Errorf("a profile of 5 slices is named %q", got)
	}
}

func TestEventsComeUntilTheContextEnds(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}, {model: H200}]")
	d := openDriver(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events, err := d.Events(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(n.Xid(1, 79), n.ECC(0)); err != nil {
		t.Fatal(err)
	}
	want := []nvml.Event{
		{GPU: nvml.UUID(n.UUIDs()[1]), Kind: nvml.EventXid, Xid: 79, GI: nvml.WholeGPU, CI: nvml.WholeGPU},
		{GPU: nvml.UUID(n.UUIDs()[0]), Kind: nvml.EventECC, GI: nvml.WholeGPU, CI: nvml.WholeGPU},
	}
	if diff := cmp.Diff(want, []nvml.Event{receive.From(t, events), receive.From(t, events)}); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	snapshot(t, d) // waiting for events does not keep others out
	cancel()
	for range events {
		t.Error("an event after the context ended")
	}
}

func TestEventsWithoutADriverSaySo(t *testing.T) {
	_, err := lib.Open(lib.Options{DriverRoot: t.TempDir()}).Events(t.Context())
	expectError(t, err, nvml.ErrNoDriver, "libnvidia-ml.so.1")
}

func TestADriverThatGoesAwayWhileEventsAreRegisteredIsReported(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}, {model: H200}]")
	fail(t, n, gpusim.GetHandleByIndex, gpusim.Fault{Return: gpusim.Uninitialized, After: 1})
	_, err := openDriver(t).Events(t.Context())
	expectError(t, err, nvml.ErrNoDriver, "ERROR_UNINITIALIZED")
}

// The kernel does not unload a driver that a process has open: every initialisation is ended, and none is made by what
// goes on in the background, until someone looks at the GPUs again.
func TestADriverThatIsReleasedIsNotHeldByAnything(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	snapshot(t, d)
	news, err := d.Events(t.Context())
	if err != nil || !held(t, n) {
		t.Fatalf("error %v; while events are waited for, something has the driver open: %t", err, held(t, n))
	}
	if err := d.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Events(t.Context()); !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("asking for events: %v, want %v", err, nvml.ErrNoDriver)
	}
	if held(t, n) {
		t.Error("something has the driver open")
	}
	select {
	case e, open := <-news:
		if !open || e.Kind != nvml.EventSilence {
			t.Errorf("events have come to an end, or one has come (%t, %+v)", open, e)
		}
	default:
	}
	snapshot(t, d)
	if !held(t, n) {
		t.Error("after another look nothing has the driver open")
	}
}

func held(t *testing.T, n *gpusim.Node) bool {
	t.Helper()
	held, err := n.Held()
	if err != nil {
		t.Fatal(err)
	}
	return held
}

func BenchmarkSnapshot(b *testing.B) {
	gpusimtest.Node(b, "gpus: [{model: H100-80GB, count: 8, mig: true}]")
	d := lib.Open(lib.Options{Library: gpusimtest.Library(b)})
	gpus, err := d.Snapshot(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	for _, g := range gpus {
		s, err := nvml.Solve(g, map[string]int{"1g.10gb": 7})
		if err != nil {
			b.Fatal(err)
		}
		for _, p := range s.Create {
			if err := d.Create(b.Context(), g.UUID, p); err != nil {
				b.Fatal(err)
			}
		}
	}
	for b.Loop() {
		if _, err := d.Snapshot(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func TestAnObservationHasWhatAGPUIsAndHowMuchOfItsMemoryIsInUse(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}, {model: A100-40GB, passthrough: true}, {model: T4, virtual: vgpu}]")
	d := openDriver(t)
	gpus := snapshot(t, d)
	create(t, d, gpus[0], "3g.71gb(1c+2c)@4")
	create(t, d, gpus[0], "1g.18gb@0")
	for device, held := range map[string][2]int{n.MIGDevice(0, 4): {1, 1000}, n.MIGDevice(0, 0): {2, 200}, n.UUIDs()[1]: {3, 30000}} {
		if err := n.Hold(device, held[0], "trainer", held[1]); err != nil {
			t.Fatal(err)
		}
	}
	type facts struct {
		Board      uint32
		Capability nvml.ComputeCapability
		Part       nvml.Virtualization
		Mode       nvml.ComputeMode
		Used       int
		Instances  []int
	}
	var got []facts
	for _, g := range snapshot(t, d) {
		f := facts{g.SubsystemID, g.ComputeCapability, g.Virtualization, g.ComputeMode, g.UsedMiB, nil}
		for _, i := range g.Instances {
			f.Instances = append(f.Instances, i.UsedMiB)
		}
		got = append(got, f)
	}
	want := []facts{
		{0x18BF10DE, nvml.ComputeCapability{Major: 9}, nvml.NotVirtualized, "", 1200, []int{200, 1000}},
		{0x144E10DE, nvml.ComputeCapability{Major: 8}, nvml.PassedThrough, nvml.ComputeDefault, 30000, nil},
		{0x12A210DE, nvml.ComputeCapability{Major: 7, Minor: 5}, nvml.VirtualGPU, nvml.ComputeDefault, 0, nil},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestMemoryThatTheDriverDoesNotReportIsNotTakenForNone(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	create(t, d, snapshot(t, d)[0], "1g.18gb@0")
	for _, code := range []gpusim.Return{gpusim.NotSupported, gpusim.NoPermission} {
		fail(t, n, gpusim.GetMemoryInfo, gpusim.Fault{Return: code, Times: -1})
		if g := snapshot(t, d)[0]; g.UsedMiB != -1 || g.Instances[0].UsedMiB != -1 {
			t.Errorf("%s: got %d MiB on the GPU and %d on the instance, want -1", code, g.UsedMiB, g.Instances[0].UsedMiB)
		}
		fail(t, n, gpusim.GetMemoryInfo, gpusim.Fault{})
	}
	fail(t, n, gpusim.GetMemoryInfo, gpusim.Fault{Return: gpusim.Unknown, Times: -1})
	if _, err := d.Snapshot(t.Context()); err == nil {
		t.Error("a failure is taken for an answer")
	}
}

// What a GPU offers is asked for once in the life of a process: an instance of a profile that it seems not to have would
// never be seen.
func TestWhatIsSaidNotToBeThereIsAskedForAgain(t *testing.T) {
	for _, function := range []string{gpusim.GetGpuInstanceProfileInfo, gpusim.GetComputeInstanceProfileInfo, gpusim.GetPersistenceMode, gpusim.GetStatic, gpusim.GetComputeMode} {
		for _, code := range []gpusim.Return{gpusim.NotSupported, gpusim.InvalidArgument} {
			t.Run(function+" "+code.String(), func(t *testing.T) {
				n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, mig: true, persistence: true}, {model: T4, virtual: vgpu}]")
				create(t, n.Driver(), snapshot(t, n.Driver())[0], "1g.10gb@0")
				want := snapshot(t, openDriver(t))
				fail(t, n, function, gpusim.Fault{Return: code})
				if diff := cmp.Diff(want, snapshot(t, openDriver(t))); diff != "" {
					t.Errorf("GPUs (-without the fault +with it):\n%s", diff)
				}
			})
		}
	}
}

func TestASingleNoToWhatTheGPUHasIsNotBelieved(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A100-80GB, persistence: true}, {model: T4}]")
	d := openDriver(t)
	gpus := snapshot(t, d)
	gpu, other := gpus[0].UUID, gpus[1].UUID
	if err := d.SetMode(t.Context(), gpu, true); err != nil { // pending, since persistence mode holds the GPU
		t.Fatal(err)
	}
	for _, step := range []struct {
		name, function string
		do             func() error
	}{
		{"persistence mode off", gpusim.SetPersistenceMode, func() error { return d.SetPersistence(t.Context(), gpu, false) }},
		{"reset", gpusim.SetMigMode, func() error { return d.Reset(t.Context(), gpu) }},
		{"persistence mode on", gpusim.SetPersistenceMode, func() error { return d.SetPersistence(t.Context(), gpu, true) }},
		{"compute mode", gpusim.SetComputeMode, func() error { return d.SetComputeMode(t.Context(), other, nvml.ComputeExclusiveProcess) }},
	} {
		fail(t, n, step.function, gpusim.Fault{Return: gpusim.NotSupported})
		if err := step.do(); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
	if diff := cmp.Diff("gpu 0 A100-80GB mig=on persistence=on\ngpu 1 T4 compute-mode=3\n", n.String()); diff != "" {
		t.Errorf("GPU (-want +got):\n%s", diff)
	}
}

// NVIDIA's library counts wrongly on the A30: too many are bounded by what stands beside each other, and an empty GPU in MIG mode says how many
// it holds, also where the profiles say fewer.
func TestAnEmptyGPUSaysHowManyInstancesItHolds(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: A30, mig: true, counts: {2g.12gb: 1, 2g.12gb+me: 2, 1g.6gb: 3}}]")
	d := openDriver(t)
	fail(t, n, gpusim.GetGpuInstanceRemainingCapacity, gpusim.Fault{Return: gpusim.Unknown, Times: 100})
	most := func() map[string]int {
		out := map[string]int{}
		for _, p := range snapshot(t, d)[0].Profiles {
			out[p.Name] = p.Max
		}
		return out
	}
	reported := map[string]int{"1g.6gb": 3, "1g.6gb+me": 1, "2g.12gb": 1, "2g.12gb+me": 2, "4g.24gb": 1}
	if diff := cmp.Diff(reported, most()); diff != "" {
		t.Errorf("while the GPU does not answer (-want +got):\n%s", diff)
	}
	fail(t, n, gpusim.GetGpuInstanceRemainingCapacity, gpusim.Fault{})
	holds := map[string]int{"1g.6gb": 4, "1g.6gb+me": 1, "2g.12gb": 2, "2g.12gb+me": 1, "4g.24gb": 1}
	if diff := cmp.Diff(holds, most()); diff != "" {
		t.Errorf("an empty GPU (-want +got):\n%s", diff)
	}
	create(t, d, snapshot(t, d)[0], "2g.12gb@0")
	if diff := cmp.Diff(holds, most()); diff != "" {
		t.Errorf("a GPU with an instance (-want +got):\n%s", diff)
	}
}
