package lib_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// healthOf is what the reader says of the GPUs.
func healthOf(t *testing.T, r nvml.HealthReader, thorough bool) []nvml.Health {
	t.Helper()
	out, err := r.Health(t.Context(), thorough)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// ailments are how a GPU may be, by name.
var ailments = map[string]gpusim.Health{
	"well":            {},
	"lost":            {Lost: true},
	"a reset is due":  {RecoveryAction: 1},
	"a new action":    {RecoveryAction: 9},
	"memory errors":   {UncorrectableECC: 7, CorrectableECC: 9, Volatile: gpusim.Volatile{Correctable: 3, Uncorrectable: 2}},
	"rows":            {RemappedRows: 3, RemappedRowsCorrectable: 1, RemapPending: true, RemapFailed: true, SparelessBanks: 2},
	"repairs":         {RepairPending: true, Unrepairable: true, SRAMThreshold: true},
	"pages":           {RetiredPages: 5, RetiringPages: true},
	"another mode":    {ECCModeChanging: true},
	"ECC is off":      {ECCOff: true},
	"a broken fabric": {Fabric: gpusim.FabricHealth{State: 3, Status: gpusim.Unknown, Mask: 0x1}},
	"a sound fabric":  {Fabric: gpusim.FabricHealth{State: 3, Mask: 0x2}},
}

// versionVariable names the version of the driver in a process that the test below starts: the library that a process has once loaded is
// of one version.
const versionVariable = "HEALTH_DRIVER_VERSION"

func TestTheLibraryAndTheSimulatorsOwnDriverAgreeOnHealth(t *testing.T) {
	if version := os.Getenv(versionVariable); version != "" {
		spec := fmt.Sprintf("driverVersion: %q\ngpus: [{model: A100-80GB, mig: true}, {model: H200}, {model: T4}]", version)
		for name, h := range ailments {
			t.Run(name, func(t *testing.T) { agreeOnHealth(t, spec, h) })
		}
		return
	}
	program, err := os.Executable()
	must(t, err)
	for _, version := range []string{"470.256.02", "535.230.02", "550.144.03", "565.57.01", "580.159.04", "610.10"} {
		c := exec.CommandContext(t.Context(), program, "-test.v", "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), versionVariable+"="+version)
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()+"/well") {
			t.Errorf("driver %s: %v\n%s", version, err, out)
		}
	}
}

func agreeOnHealth(t *testing.T, spec string, h gpusim.Health) {
	t.Helper()
	var got [2][]nvml.Health
	for i := range got {
		var n *gpusim.Node
		var reader nvml.HealthReader
		if i == 0 {
			n = gpusimtest.NodeIn(t, t.TempDir(), spec)
			reader = n.Health()
		} else {
			n, reader = gpusimtest.Node(t, spec), openDriver(t)
		}
		first := healthOf(t, reader, true) // what a lost one was is known from before
		for gpu := range n.UUIDs() {
			must(t, n.SetHealth(gpu, h))
		}
		got[i] = slices.Concat(first, healthOf(t, reader, true), healthOf(t, reader, false))
	}
	if diff := cmp.Diff(got[0], got[1]); diff != "" {
		t.Errorf("-simulator's own Driver +library:\n%s", diff)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// As measured on a real H200 with driver 580.159.04, MIG off.
func TestWhatIsNotSupportedIsNotKnown(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	g := healthOf(t, d, true)[0]
	for what, known := range map[string]bool{
		"action": g.Action.Known, "rows": g.Rows.Pending.Known, "volatile errors": g.ECC.UncorrectedVolatile.Known, "SRAM": g.SRAMThreshold.Known,
		"reset status": g.NeedsReset.Known,
	} {
		if !known {
			t.Errorf("%s of an H200 is not known: %+v", what, g)
		}
	}
	if g.Pages.Pending.Known || g.Pages.Pending.Code != "ERROR_NOT_SUPPORTED" {
		t.Errorf("retired pages of an H200 are %+v, want not known", g.Pages.Pending)
	}
	if quick := healthOf(t, d, false)[0]; quick.SRAMThreshold != (nvml.Reading[bool]{}) {
		t.Errorf("SRAM of a quick look is %+v, want that no one asked", quick.SRAMThreshold)
	}
	must(t, d.SetMode(t.Context(), g.UUID, true))
	must(t, d.Create(t.Context(), g.UUID, nvml.Placed{Profile: "1g.18gb", Span: nvml.Span{Size: 1}}))
	must(t, n.SetHealth(0, gpusim.Health{RemapPending: true}))
	if g = healthOf(t, d, true)[0]; g.Rows.Pending.Known || nvml.IsSet(g.Rows.Pending) {
		t.Errorf("with instances a pending remap is %+v, want not known", g.Rows.Pending)
	}
}

// A look at the health that hangs holds up neither the driver's calls nor a later look for longer than that has time.
func TestHealthThatHangsHoldsUpNothingElse(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	if _, err := d.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	must(t, n.Fail(gpusim.GetFieldValues, gpusim.Fault{Hang: true}))
	short, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := d.Health(short, false); !errors.Is(err, nvml.ErrUnresponsive) || !strings.Contains(err.Error(), "GPU 0") {
		t.Errorf("a look that hangs is %v, want ErrUnresponsive that names GPU 0", err)
	}
	if _, err := d.Health(t.Context(), false); !errors.Is(err, nvml.ErrUnresponsive) {
		t.Errorf("the next look is %v, want ErrUnresponsive at once", err)
	}
	if _, err := d.Snapshot(t.Context()); err != nil {
		t.Errorf("a call of the driver in the meantime: %v", err)
	}
	must(t, n.Fail(gpusim.GetFieldValues, gpusim.Fault{}))
	for {
		_, err := d.Health(t.Context(), false)
		if err == nil {
			break
		}
		if !errors.Is(err, nvml.ErrUnresponsive) || t.Context().Err() != nil {
			t.Fatal(err)
		}
	}
}

// A driver that is let go is not taken hold of again by a look at the health.
func TestHealthTakesHoldOfNoDriverThatIsLetGo(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200}]")
	d := openDriver(t)
	healthOf(t, d, true)
	must(t, d.Release(t.Context()))
	if _, err := d.Health(t.Context(), false); !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("health of a driver that is let go is %v, want ErrNoDriver", err)
	}
	if held, err := n.Held(); err != nil || held {
		t.Errorf("held %v, %v, want that no one holds the driver", held, err)
	}
}

func TestHealthOfADriverThatIsNotThere(t *testing.T) {
	_, err := lib.Open(lib.Options{DriverRoot: t.TempDir()}).Health(t.Context(), false)
	if !errors.Is(err, nvml.ErrNoDriver) {
		t.Errorf("health without a driver is %v, want ErrNoDriver", err)
	}
}

// The event names the instance, and is put into words without a call about a GPU that may not answer any more.
func TestEventsNameTheInstance(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H100-80GB, mig: true}, {model: T4}]")
	d := openDriver(t)
	must(t, d.Create(t.Context(), nvml.UUID(n.UUIDs()[0]), nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 2, Size: 1}}))
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	must(t, n.Xid(1, 13)) // no one is registered yet
	news, err := d.Events(ctx)
	if err != nil {
		t.Fatal(err)
	}
	must(t, n.Fail(gpusim.GetUUID, gpusim.Fault{Return: gpusim.Unknown, Times: -1}))
	must(t, n.XidOn(0, 2, 94))
	must(t, n.Xid(0, 48))
	want := []nvml.Event{
		{GPU: gpus[0].UUID, Kind: nvml.EventXid, Xid: 94, GI: gpus[0].Instances[0].ID, CI: 0},
		{GPU: gpus[0].UUID, Kind: nvml.EventXid, Xid: 48, GI: nvml.WholeGPU, CI: nvml.WholeGPU},
	}
	if diff := cmp.Diff(want, []nvml.Event{receive.From(t, news), receive.From(t, news)}); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A GPU that is lost ends the wait again and again; the others still have news, after it was said that there were none.
func TestNewsOfTheOtherGPUsGoOnWhenOneIsLost(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: T4}, {model: T4}]")
	d := openDriver(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	news, err := d.Events(ctx)
	if err != nil {
		t.Fatal(err)
	}
	must(t, n.SetHealth(0, gpusim.Health{Lost: true}))
	var kinds []nvml.EventKind
	for range 3 {
		kinds = append(kinds, receive.From(t, news).Kind)
	}
	if diff := cmp.Diff([]nvml.EventKind{nvml.EventUnavailable, nvml.EventSilence, nvml.EventWatching}, kinds); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	must(t, n.Xid(1, 31))
	if e := receive.From(t, news); e.Xid != 31 || string(e.GPU) != n.UUIDs()[1] {
		t.Errorf("the other GPU reports %+v, want its Xid 31", e)
	}
}

func TestTheBusHasGPUsThatNoDriverAnswersFor(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H100-80GB, count: 3}]")
	root := t.TempDir()
	must(t, n.RenderHost(root))
	devices := filepath.Join(root, "sys/bus/pci/devices")
	must(t, n.SetHealth(1, gpusim.Health{Absent: true}))
	entries, err := os.ReadDir(devices)
	if err != nil {
		t.Fatal(err)
	}
	must(t, os.Remove(filepath.Join(devices, entries[2].Name(), "driver")))
	onBus, err := lib.OpenBus(devices).GPUs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	reported := healthOf(t, openDriver(t), false)
	want := []nvml.BusGPU{{PCI: reported[0].PCI, Driver: "nvidia"}, {PCI: entries[1].Name(), Driver: "nvidia"}, {PCI: reported[1].PCI}}
	if diff := cmp.Diff(want, onBus); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if len(reported) != 2 || reported[1].Index != 1 {
		t.Errorf("the driver reports %+v, want the first and the third", reported)
	}
	if _, err := lib.OpenBus(filepath.Join(root, "nothing")).GPUs(t.Context()); err == nil {
		t.Error("a bus that is not there is no error")
	}
}
