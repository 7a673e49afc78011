package lib_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/receive"
)

// lookups are the functions that take the handle of a MIG device, each a tenth of a second on a large machine.
var lookups = []string{gpusim.ComputeInstanceGetInfo, gpusim.GetMigDeviceHandleByIndex, gpusim.WalkMIGDevice}

// lookedUp counts the handles of MIG devices that a call takes.
func lookedUp(t *testing.T, n *gpusim.Node, call func()) map[string]int {
	t.Helper()
	if err := n.ForgetCalls(); err != nil {
		t.Fatal(err)
	}
	call()
	out := n.Reads()
	maps.DeleteFunc(out, func(function string, _ int) bool {
		return function != lookups[0] && function != lookups[1] && function != lookups[2]
	})
	return out
}

// dense is a node of eight GPUs with seven MIG devices each.
func dense(t *testing.T, d nvml.Driver) {
	t.Helper()
	for _, g := range snapshot(t, d) {
		for at := range 7 {
			create(t, d, g, fmt.Sprintf("1g.23gb@%d", at))
		}
	}
}

func TestAMIGDeviceIsLookedUpOnce(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: B200, count: 8, mig: true}]")
	dense(t, n.Driver())
	d := openDriver(t)
	see := func() { snapshot(t, d) }
	var before []nvml.GPU
	for _, step := range []struct {
		name string
		call func()
		want int
	}{
		{"the first observation", func() { before = snapshot(t, d) }, 56},
		{"the second", see, 0},
		{"the health of all GPUs", func() {
			for _, thorough := range []bool{false, true} {
				if _, err := d.Health(t.Context(), thorough); err != nil {
					t.Fatal(err)
				}
			}
		}, 0},
		{"what processes use of all instances", func() {
			sampled := map[nvml.UUID][]int{}
			for _, g := range before {
				for _, i := range g.Instances {
					sampled[g.UUID] = append(sampled[g.UUID], i.ID)
				}
			}
			if _, err := d.Usage(t.Context(), sampled); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"destroying one instance", func() {
			if err := d.Destroy(t.Context(), before[3].UUID, before[3].Instances[0].Placed); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"the observation after that", see, 0},
		{"creating it again", func() {
			if err := d.Create(t.Context(), before[3].UUID, before[3].Instances[0].Placed); err != nil {
				t.Fatal(err)
			}
		}, 0},
		{"the observation after that", see, 1},
	} {
		want := map[string]int{}
		if step.want > 0 {
			want[gpusim.ComputeInstanceGetInfo] = step.want
		}
		if diff := cmp.Diff(want, lookedUp(t, n, step.call)); diff != "" {
			t.Errorf("%s: handles of MIG devices (-want +got):\n%s", step.name, diff)
		}
	}
	recut(t, n.Driver(), before[5]) // by another process
	if diff := cmp.Diff(map[string]int{gpusim.ComputeInstanceGetInfo: 7}, lookedUp(t, n, see)); diff != "" {
		t.Errorf("the observation after another process has recut a GPU: handles of MIG devices (-want +got):\n%s", diff)
	}
}

// recut destroys the instances of a GPU, and makes them again at the same places.
func recut(t *testing.T, d nvml.Driver, g nvml.GPU) {
	t.Helper()
	for _, i := range g.Instances {
		if err := d.Destroy(t.Context(), g.UUID, i.Placed); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range g.Instances {
		if err := d.Create(t.Context(), g.UUID, i.Placed); err != nil {
			t.Fatal(err)
		}
	}
}

// What is remembered of an instance dies with it. The next one has the same id, the same place, and the handles of the library that the former had.
func TestAnInstanceWithTheIDOfAFormerOneHasItsOwnDeviceAndProcesses(t *testing.T) {
	for name, of := range map[string]func(n *gpusim.Node, d nvml.Driver) nvml.Driver{
		"made by the agent":         func(_ *gpusim.Node, d nvml.Driver) nvml.Driver { return d },
		"made by another process":   func(n *gpusim.Node, _ nvml.Driver) nvml.Driver { return n.Driver() },
		"observed while it is gone": func(n *gpusim.Node, d nvml.Driver) nvml.Driver { return observed{n.Driver(), d} },
	} {
		t.Run(name, func(t *testing.T) {
			n := gpusimtest.Node(t, "gpus: [{model: B200, count: 2, mig: true}]")
			dense(t, n.Driver())
			d := openDriver(t)
			before := snapshot(t, d)
			if err := n.Hold(before[0].Instances[1].Devices[0].UUID, 4711, "python", 100); err != nil {
				t.Fatal(err)
			}
			snapshot(t, d)
			if err := n.Release(4711); err != nil {
				t.Fatal(err)
			}
			recut(t, of(n, d), before[0])
			if err := n.Hold(n.MIGDevice(0, 2), 4712, "python", 100); err != nil {
				t.Fatal(err)
			}
			want, got := snapshot(t, n.Driver()), snapshot(t, d)
			for i := range want {
				if diff := cmp.Diff(want[i].Instances, got[i].Instances); diff != "" {
					t.Errorf("GPU %d (-simulated +library):\n%s", i, diff)
				}
			}
		})
	}
}

// observed is a driver of another process, after each change of which this one observes.
type observed struct {
	nvml.Driver
	by nvml.Driver
}

func (o observed) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	err := o.Driver.Destroy(ctx, gpu, p)
	_, failed := o.by.Snapshot(ctx)
	return errors.Join(err, failed)
}

// With a short setting timeouts.driverCall, the first observation of a large machine takes longer than that, and so would each later one.
func TestWhatAnAbandonedObservationHasSeenIsNotLookedUpAgain(t *testing.T) {
	n := gpusimtest.Node(t, "latency: dense\ngpus: [{model: B200, count: 2, mig: true}]")
	dense(t, n.Outside())
	d := openDriver(t)
	var answered bool
	taken := lookedUp(t, n, func() {
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second) // the handles take 1.3 s
			_, err := d.Snapshot(ctx)
			cancel()
			if answered = err == nil; answered {
				return
			}
			receive.From(t, time.After(200*time.Millisecond))
		}
	})
	if !answered || taken[gpusim.ComputeInstanceGetInfo] != 14 {
		t.Errorf("an observation has answered: %t; handles of MIG devices: %v", answered, taken)
	}
}

// The library as a driver may be that names MIG devices by the ids of their instances alone.
type (
	namedByIDs    struct{ nv.Interface }
	namedDevice   struct{ nv.Device }
	namedInstance struct{ nv.GpuInstance }
	namedPart     struct{ nv.ComputeInstance }
	named         struct {
		nv.Device
		part namedPart
	}
)

func (l namedByIDs) DeviceGetHandleByIndex(index int) (nv.Device, nv.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(index)
	return namedDevice{d}, ret
}

func (d namedDevice) GetGpuInstances(p *nv.GpuInstanceProfileInfo) ([]nv.GpuInstance, nv.Return) {
	out, ret := d.Device.GetGpuInstances(p)
	for n := range out {
		out[n] = namedInstance{out[n]}
	}
	return out, ret
}

func (i namedInstance) GetComputeInstances(p *nv.ComputeInstanceProfileInfo) ([]nv.ComputeInstance, nv.Return) {
	out, ret := i.GpuInstance.GetComputeInstances(p)
	for n := range out {
		out[n] = namedPart{out[n]}
	}
	return out, ret
}

func (c namedPart) GetInfo() (nv.ComputeInstanceInfo, nv.Return) {
	info, ret := c.ComputeInstance.GetInfo()
	info.Device = named{info.Device, c}
	return info, ret
}

func (n named) GetUUID() (string, nv.Return) {
	info, ret := n.part.ComputeInstance.GetInfo()
	if ret != nv.SUCCESS {
		return "", ret
	}
	gpu, ret := info.GpuInstance.GetInfo()
	return fmt.Sprintf("MIG-%d-%d", gpu.Id, info.Id), ret
}

// Another program moves a part within its GPU instance. The next one may have the id, the handle and the UUID of the former.
func TestAPartThatHasMovedIsFoundAtItsPlace(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H100-80GB, mig: true}]")
	other := n.Driver()
	gpu := snapshot(t, other)[0].UUID
	p := placed(t, other, 0, "3g.40gb@4")
	p.Compute = "1c+1c"
	if err := other.Create(t.Context(), gpu, p); err != nil {
		t.Fatal(err)
	}
	d := releasing(t, lib.Open(lib.Options{Library: gpusimtest.Library(t), Wrap: func(l nv.Interface) nv.Interface { return namedByIDs{l} }}))
	parts := func(d nvml.Driver) (out []nvml.Part) {
		for _, device := range snapshot(t, d)[0].Instances[0].Devices {
			out = append(out, device.Part)
		}
		return out
	}
	before := parts(d)
	if err := other.DestroyPart(t.Context(), gpu, p, before[0]); err != nil {
		t.Fatal(err)
	}
	if err := other.CreatePart(t.Context(), gpu, p, nvml.Part{Name: "1c", Span: nvml.Span{Start: 2, Size: 1}}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(parts(other), parts(d)); diff != "" {
		t.Errorf("parts (-simulated +library):\n%s", diff)
	}
}
