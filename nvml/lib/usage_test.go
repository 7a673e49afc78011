package lib_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// usageOf is what the reader says that processes use, with all instances sampled.
func usageOf(t *testing.T, r nvml.UsageReader, d nvml.Driver) []nvml.Usage {
	t.Helper()
	sampled := map[nvml.UUID][]int{}
	for _, g := range snapshotOf(t, d) {
		for _, i := range g.Instances {
			sampled[g.UUID] = append(sampled[g.UUID], i.ID)
		}
	}
	out, err := r.Usage(t.Context(), sampled)
	must(t, err)
	return out
}

func snapshotOf(t *testing.T, d nvml.Driver) []nvml.GPU {
	t.Helper()
	out, err := d.Snapshot(t.Context())
	must(t, err)
	return out
}

// inUse puts processes on two GPUs: a busy and an idle one on the first, and on two of the three instances of the second.
func inUse(t *testing.T, n *gpusim.Node, d nvml.Driver) {
	t.Helper()
	gpus := snapshotOf(t, d)
	for start := range 3 {
		must(t, d.Create(t.Context(), gpus[1].UUID, nvml.Placed{Profile: gpus[1].Profiles[0].Name, Span: nvml.Span{Start: start, Size: 1}}))
	}
	for pid, device := range map[int]string{11: n.UUIDs()[0], 12: n.UUIDs()[0], 13: n.MIGDevice(1, 0), 14: n.MIGDevice(1, 1)} {
		must(t, n.Hold(device, pid, "python", 100*pid))
	}
	must(t, n.Busy(11, 70))
	must(t, n.Busy(13, 40))
}

const usageVersion = "USAGE_DRIVER_VERSION"

func TestTheLibraryAndTheSimulatorsOwnDriverAgreeOnUse(t *testing.T) {
	if version := os.Getenv(usageVersion); version != "" {
		for _, models := range [][2]string{{"A100-80GB", "A100-80GB"}, {"H100-80GB", "H200"}, {"T4", "A30"}} {
			t.Run(models[0], func(t *testing.T) {
				agreeOnUse(t, fmt.Sprintf("driverVersion: %q\ngpus: [{model: %s}, {model: %s, mig: true}]", version, models[0], models[1]))
			})
		}
		return
	}
	program, err := os.Executable()
	must(t, err)
	for _, version := range []string{"470.256.02", "535.230.02", "580.159.04"} {
		c := exec.CommandContext(t.Context(), program, "-test.v", "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), usageVersion+"="+version)
		if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()+"/T4") {
			t.Errorf("driver %s: %v\n%s", version, err, out)
		}
	}
}

func agreeOnUse(t *testing.T, spec string) {
	t.Helper()
	var got [2][][]nvml.Usage
	for i := range got {
		var n *gpusim.Node
		var r nvml.UsageReader
		var d nvml.Driver
		if i == 0 {
			n = gpusimtest.NodeIn(t, t.TempDir(), spec)
			r, d = n.Usage(), n.Driver()
		} else {
			n = gpusimtest.Node(t, spec)
			driver := openDriver(t)
			r, d = driver, driver
		}
		inUse(t, n, d)
		got[i] = append(got[i], usageOf(t, r, d))
		must(t, n.Busy(11, 0))
		must(t, n.Release(13))
		got[i] = append(got[i], usageOf(t, r, d))
		must(t, n.SetHealth(0, gpusim.Health{Lost: true}))
		got[i] = append(got[i], usageOf(t, r, d))
	}
	if diff := cmp.Diff(got[0], got[1]); diff != "" {
		t.Errorf("-simulator's own Driver +library:\n%s", diff)
	}
}

func TestHowBusyProcessesAndInstancesAreIsReportedWhereNVMLHasIt(t *testing.T) {
	for _, c := range []struct {
		model          string
		withProcess    nvml.Reading[float64]
		withoutProcess nvml.Reading[float64]
	}{
		{"H100-80GB", nvml.Answered(40.0), nvml.Answered(0.0)},
		{"A100-80GB", nvml.Reading[float64]{Code: "ERROR_NOT_SUPPORTED"}, nvml.Answered(0.0)},
	} {
		t.Run(c.model, func(t *testing.T) {
			n := gpusimtest.Node(t, fmt.Sprintf("gpus: [{model: %s}, {model: %s, mig: true}]", c.model, c.model))
			d := openDriver(t)
			inUse(t, n, d)
			got := usageOf(t, d, d)
			want := []nvml.ProcessUsage{
				{PID: 11, GI: nvml.WholeGPU, UsedMiB: 1100, Busy: nvml.Answered(70.0)}, {PID: 12, GI: nvml.WholeGPU, UsedMiB: 1200, Busy: nvml.Answered(0.0)},
			}
			if diff := cmp.Diff(nvml.Answered(want), got[0].Processes); diff != "" {
				t.Errorf("processes of the GPU (-want +got):\n%s", diff)
			}
			for _, p := range got[1].Processes.Value {
				if p.Busy.Known || p.Busy.Code != "ERROR_NOT_SUPPORTED" {
					t.Errorf("a process on an instance is busy by %+v, want that the driver does not report", p.Busy)
				}
			}
			standing := snapshotOf(t, d)[1].Instances
			if got := got[1].Instances[standing[0].ID]; got != c.withProcess {
				t.Errorf("an instance with a process is at %+v, want %+v", got, c.withProcess)
			}
			if got := got[1].Instances[standing[2].ID]; got != c.withoutProcess {
				t.Errorf("an instance without a process is at %+v, want %+v", got, c.withoutProcess)
			}
		})
	}
}

// The simulated driver keeps an instance from being destroyed for as long as a program keeps a sample of it.
func TestNoSampleOfAnInstanceIsKept(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H100-80GB}, {model: H100-80GB, mig: true}]")
	d := openDriver(t)
	inUse(t, n, d)
	gone := snapshotOf(t, d)[1].Instances[0]
	for _, f := range []gpusim.Fault{{}, {Return: gpusim.Unknown}, {Return: gpusim.Unknown, After: 1}} {
		if f != (gpusim.Fault{}) {
			must(t, n.Fail(gpusim.GpmMigSampleGet, f))
		}
		usageOf(t, d, d)
	}
	must(t, n.Fail(gpusim.GpmMetricsGet, gpusim.Fault{Return: gpusim.Unknown, Times: -1}))
	if got := usageOf(t, d, d)[1].Instances[gone.ID]; got.Code != "ERROR_UNKNOWN" {
		t.Errorf("a sample that fails is %+v", got)
	}
	must(t, n.Release(13))
	if err := d.Destroy(t.Context(), snapshotOf(t, d)[1].UUID, gone.Placed); err != nil {
		t.Error(err)
	}
}

func TestASampleThatHangsHoldsUpNoCallOfTheDriver(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H100-80GB}, {model: H100-80GB, mig: true}]")
	d := lib.Open(lib.Options{Library: gpusimtest.Library(t)})
	releasing(t, d)
	inUse(t, n, d)
	must(t, n.Fail(gpusim.GpmMigSampleGet, gpusim.Fault{Hang: true}))
	g := snapshotOf(t, d)[1]
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := d.Usage(ctx, map[nvml.UUID][]int{g.UUID: {g.Instances[0].ID}}); !errors.Is(err, nvml.ErrUnresponsive) {
		t.Errorf("a sample that hangs: %v", err)
	}
	snapshotOf(t, d)
	if _, err := d.Usage(t.Context(), nil); !errors.Is(err, nvml.ErrUnresponsive) || !strings.Contains(err.Error(), "GPU 1") {
		t.Errorf("a read behind a sample that hangs: %v", err)
	}
	must(t, n.Fail(gpusim.GpmMigSampleGet, gpusim.Fault{}))
}

// What a node of 8 GPUs with 7 instances each takes, with a process on every instance. A fifth of a second of it is the wait.
func BenchmarkUsage(b *testing.B) {
	n := gpusimtest.Node(b, "gpus: [{model: H100-80GB, mig: true, count: 8}]")
	d := lib.Open(lib.Options{Library: gpusimtest.Library(b)})
	gpus, err := d.Snapshot(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	sampled := map[nvml.UUID][]int{}
	for i, g := range gpus {
		for start := range 7 {
			err := d.Create(b.Context(), g.UUID, nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: start, Size: 1}})
			if err == nil {
				err = n.Hold(n.MIGDevice(i, start), 100*i+start+1, "python", 100)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	if gpus, err = d.Snapshot(b.Context()); err != nil {
		b.Fatal(err)
	}
	for _, g := range gpus {
		for _, i := range g.Instances {
			sampled[g.UUID] = append(sampled[g.UUID], i.ID)
		}
	}
	for b.Loop() {
		all, err := d.Usage(b.Context(), sampled)
		if err != nil || len(all) != 8 || len(all[7].Instances) != 7 || !all[7].Instances[gpus[7].Instances[6].ID].Known {
			b.Fatal(all, err)
		}
	}
	if err := d.Release(context.WithoutCancel(b.Context())); err != nil {
		b.Fatal(err)
	}
}
