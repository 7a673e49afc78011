package hardware_test

import (
	"bytes"
	"debug/elf"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/receive"
)

func TestInstancesAreMadeAndUndone(t *testing.T) {
	l, n := load(t, "gpus: [{model: A100-80GB}]")
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	big, r := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	expect(t, "profile", r, nvml.SUCCESS)
	_, r = d.CreateGpuInstance(&big)
	expect(t, "creating with MIG off", r, nvml.ERROR_NOT_SUPPORTED)

	activation, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	same(t, "activation", nvml.SUCCESS, activation, r)
	most, r := d.GetMaxMigDeviceCount()
	same(t, "MIG devices at most", 7, most, r)

	gi, r := d.CreateGpuInstanceWithPlacement(&big, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	expect(t, "creating", r, nvml.SUCCESS)
	_, r = d.CreateGpuInstanceWithPlacement(&big, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	expect(t, "creating where one stands", r, nvml.ERROR_INSUFFICIENT_RESOURCES)
	_, r = d.CreateGpuInstanceWithPlacement(&big, &nvml.GpuInstancePlacement{Start: 3, Size: 4})
	expect(t, "creating between places", r, nvml.ERROR_INVALID_ARGUMENT)
	info, r := gi.GetInfo()
	same(t, "instance", "2 9 4 4", fmt.Sprint(info.Id, info.ProfileId, info.Placement.Start, info.Placement.Size), r)

	one, r := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 0)
	same(t, "1c", "0 1 3 14 2", fmt.Sprint(one.Id, one.SliceCount, one.InstanceCount, one.MultiprocessorCount, one.SharedDecoderCount), r)
	_, r = gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_4_SLICE, 0)
	expect(t, "4c of a 3g", r, nvml.ERROR_NOT_SUPPORTED)
	_, r = gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 1)
	expect(t, "another engine profile", r, nvml.ERROR_INVALID_ARGUMENT)
	named, r := gi.GetComputeInstanceProfileInfoV(nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, 0).V2()
	same(t, "name of 1c", "MIG 1c.3g.40gb", cString(named.Name[:]), r)
	places, r := gi.GetComputeInstancePossiblePlacements(&one)
	same(t, "places of 1c", "[{0 1} {1 1} {2 1}]", fmt.Sprint(places), r)
	ci, r := gi.CreateComputeInstance(&one)
	expect(t, "creating 1c", r, nvml.SUCCESS)
	two, r := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0)
	expect(t, "2c", r, nvml.SUCCESS)
	_, r = gi.CreateComputeInstance(&two)
	expect(t, "creating 2c where 1c stands", r, nvml.ERROR_INSUFFICIENT_RESOURCES)
	second, r := gi.CreateComputeInstanceWithPlacement(&one, &nvml.ComputeInstancePlacement{Start: 2, Size: 1})
	expect(t, "creating 1c at 2", r, nvml.SUCCESS)
	expect(t, "destroying it", second.Destroy(), nvml.SUCCESS)

	made, r := ci.GetInfo()
	expect(t, "describing", r, nvml.SUCCESS)
	uuid, r := made.Device.GetUUID()
	expect(t, "UUID", r, nvml.SUCCESS)
	mig, r := l.DeviceGetHandleByUUID(uuid)
	expect(t, "finding by UUID", r, nvml.SUCCESS)
	isMIG, r := mig.IsMigDeviceHandle()
	same(t, "is a MIG device", true, isMIG, r)
	name, r := mig.GetName()
	same(t, "name", "NVIDIA A100-SXM4-80GB MIG 1c.3g.40gb", name, r)
	a, r := mig.GetAttributes()
	same(t, "attributes", nvml.DeviceAttributes{
		MultiprocessorCount: 14, SharedCopyEngineCount: 3, SharedDecoderCount: 2, GpuInstanceSliceCount: 3,
		ComputeInstanceSliceCount: 1, MemorySizeMB: 40192,
	}, a, r)
	gid, r := mig.GetGpuInstanceId()
	same(t, "GPU instance id", 2, gid, r)
	parent, r := mig.GetDeviceHandleFromMigDeviceHandle()
	expect(t, "parent", r, nvml.SUCCESS)
	if index, r := parent.GetIndex(); index != 0 || r != nvml.SUCCESS {
		t.Errorf("index of the parent: got %d, %v", index, r)
	}
	memory, r := mig.GetMemoryInfo()
	same(t, "memory", uint64(40192)<<20, memory.Total, r)

	if err := n.Hold(uuid, 4711, "trainer", 100); err != nil {
		t.Fatal(err)
	}
	ps, r := d.GetComputeRunningProcesses()
	same(t, "processes", []nvml.ProcessInfo{{Pid: 4711, UsedGpuMemory: 100 << 20, GpuInstanceId: 2}}, ps, r)
	expect(t, "destroying a compute instance in use", ci.Destroy(), nvml.ERROR_IN_USE)
	expect(t, "destroying a GPU instance with a compute instance", gi.Destroy(), nvml.ERROR_IN_USE)
	if err := n.Release(4711); err != nil {
		t.Fatal(err)
	}
	expect(t, "destroying the compute instance", ci.Destroy(), nvml.SUCCESS)
	expect(t, "destroying the GPU instance", gi.Destroy(), nvml.SUCCESS)
	expect(t, "destroying it again", gi.Destroy(), nvml.ERROR_NOT_FOUND)
	_, r = mig.GetUUID()
	expect(t, "asking a MIG device that is gone", r, nvml.ERROR_NOT_FOUND)
	_, r = l.DeviceGetHandleByUUID(uuid)
	expect(t, "finding what is gone", r, nvml.ERROR_NOT_FOUND)
}

func TestSetMigModeGivesBothCodes(t *testing.T) {
	l, n := load(t, "gpus: [{model: A100-80GB}]")
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	if err := n.Hold(n.UUIDs()[0], 1, "trainer", 1); err != nil {
		t.Fatal(err)
	}
	activation, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	expect(t, "result", r, nvml.SUCCESS)
	expect(t, "activation", activation, nvml.ERROR_IN_USE)
	current, pending, r := d.GetMigMode()
	same(t, "mode", "0 1", fmt.Sprint(current, pending), r)
	if err := n.Fail(gpusim.SetMigMode, gpusim.Fault{Return: gpusim.NoPermission}); err != nil {
		t.Fatal(err)
	}
	activation, r = d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
	expect(t, "result", r, nvml.ERROR_NO_PERMISSION)
	expect(t, "activation", activation, nvml.SUCCESS)
}

// The names that go-nvlib derives are those that kubelet, the device plugin and config files use.
func TestNvlibWalksTheMIGDevicesOfEveryModel(t *testing.T) {
	for _, model := range gpusim.Models() {
		t.Run(model, func(t *testing.T) {
			l, n := load(t, "gpus: [{model: "+model+"}]")
			d, r := l.DeviceGetHandleByIndex(0)
			expect(t, "handle", r, nvml.SUCCESS)
			if _, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE); r == nvml.ERROR_NOT_SUPPORTED {
				return
			}
			walk := device.New(l)
			for kind := range nvml.GPU_INSTANCE_PROFILE_COUNT {
				p, r := d.GetGpuInstanceProfileInfo(kind)
				if r != nvml.SUCCESS {
					continue
				}
				v2, r := d.GetGpuInstanceProfileInfoV(kind).V2()
				expect(t, "V2", r, nvml.SUCCESS)
				gi, r := d.CreateGpuInstance(&p)
				expect(t, "creating", r, nvml.SUCCESS)
				var full nvml.ComputeInstanceProfileInfo
				for c := range nvml.COMPUTE_INSTANCE_PROFILE_COUNT {
					if cp, r := gi.GetComputeInstanceProfileInfo(c, 0); r == nvml.SUCCESS && cp.SliceCount == p.SliceCount {
						full = cp
					}
				}
				ci, r := gi.CreateComputeInstance(&full)
				expect(t, "creating", r, nvml.SUCCESS)
				found := 0
				err := walk.VisitMigDevices(func(_ int, _ device.Device, _ int, m device.MigDevice) error {
					found++
					profile, err := m.GetProfile()
					if err != nil {
						return err
					}
					if want := strings.TrimPrefix(cString(v2.Name[:]), "MIG "); profile.String() != want {
						t.Errorf("go-nvlib calls %s %s", want, profile)
					}
					return nil
				})
				if err != nil || found != 1 {
					t.Errorf("found %d MIG devices, %v:\n%s", found, err, n)
				}
				expect(t, "destroying", ci.Destroy(), nvml.SUCCESS)
				expect(t, "destroying", gi.Destroy(), nvml.SUCCESS)
			}
		})
	}
}

func TestALibraryAnswersNothingToADriverOfAnotherVersion(t *testing.T) {
	const mismatch = nvml.ERROR_LIB_RM_VERSION_MISMATCH
	t.Run("replaced while it is initialized", func(t *testing.T) {
		l, n := load(t, "gpus: [{model: H200}]")
		d, r := l.DeviceGetHandleByIndex(0)
		expect(t, "handle", r, nvml.SUCCESS)
		version := n.DriverVersion()
		if err := n.Upgrade("590.44.01"); err != nil {
			t.Fatal(err)
		}
		expect(t, "Init", l.Init(), mismatch)
		_, r = l.DeviceGetCount()
		expect(t, "count", r, mismatch)
		_, r = d.GetUUID()
		expect(t, "UUID", r, mismatch)
		_, r = d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
		expect(t, "setting the mode", r, mismatch)
		if err := n.Upgrade(version); err != nil {
			t.Fatal(err)
		}
		_, r = d.GetUUID()
		expect(t, "UUID when the version is back", r, nvml.SUCCESS)
	})
	t.Run("replaced while it is not", func(t *testing.T) {
		s, err := gpusim.ParseSpec([]byte("driverVersion: 590.44.01\ngpus: [{model: H200}]"))
		if err != nil {
			t.Fatal(err)
		}
		n, err := gpusim.Create(t.TempDir(), s)
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		t.Setenv("GPUSIM_NODE", n.Dir())
		expect(t, "Init", nvml.New(nvml.WithLibraryPath(libraryPath)).Init(), mismatch)
	})
}

func TestEveryFunctionOfTheHeaderIsThere(t *testing.T) {
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	header, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "pkg/nvml/nvml.h"))
	if err != nil {
		t.Fatal(err)
	}
	library, err := elf.Open(libraryPath)
	if err != nil {
		t.Fatal(err)
	}
	defer library.Close()
	symbols, err := library.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, s := range symbols {
		have[s.Name] = s.Section != elf.SHN_UNDEF
	}
	n := 0
	for _, m := range regexp.MustCompile(`DECLDIR (nvml\w+)\(`).FindAllSubmatch(header, -1) {
		n++
		if !have[string(m[1])] {
			t.Errorf("%s is missing: run go generate ./test/gpusim/libnvidia-ml", m[1])
		}
	}
	if n < 400 {
		t.Errorf("the header declares %d functions: it was not read right", n)
	}
}

func TestFunctionsThatAreNotSimulatedSaySoAndLeaveTheirName(t *testing.T) {
	l, n := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	for range 2 {
		_, r = d.GetTemperature(nvml.TEMPERATURE_GPU)
		expect(t, "temperature", r, nvml.ERROR_FUNCTION_NOT_FOUND)
	}
	trace, err := os.ReadFile(filepath.Join(n.Dir(), "trace.log"))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(trace), "nvmlDeviceGetTemperature is not simulated"); got != 1 {
		t.Errorf("the trace has it %d times, want once:\n%s", got, trace)
	}
}

// workerVariable makes this test binary a worker: its value is the number of steps.
const workerVariable = "GPUSIM_TEST_WORKER"

// Many processes that load the library and change the same GPUs at once leave them as if one after the other had.
func TestManyProcessesAtOnceKeepTheStateWhole(t *testing.T) {
	_, n := load(t, "gpus: [{model: A100-80GB, count: 2, mig: true}]")
	const workers, steps = 6, 40
	done := make(chan error, workers)
	for i := range workers {
		c, out := worker(t, steps, i)
		go func() {
			err := c.Wait()
			if err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
			done <- err
		}()
	}
	for range workers {
		if err := receive.From(t, done); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff("gpu 0 A100-80GB mig=on\ngpu 1 A100-80GB mig=on\n", n.String()); diff != "" {
		t.Errorf("each worker has undone what it did, and yet (-want +got):\n%s", diff)
	}
	calls := n.Calls()
	if calls["GpuInstanceDestroy"] == 0 || calls["GpuInstanceDestroy"] != calls["ComputeInstanceDestroy"] {
		t.Errorf("calls: %v", calls)
	}
	if got := calls["CreateGpuInstance"]; got != workers*steps {
		t.Errorf("%d creations were counted, want %d", got, workers*steps)
	}
}

// worker starts a process that makes and undoes instances on the test's node.
func worker(t *testing.T, steps, seed int) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	out := &bytes.Buffer{}
	c := exec.CommandContext(t.Context(), os.Args[0])
	c.Env = append(os.Environ(), workerVariable+"="+strconv.Itoa(steps), "GPUSIM_TEST_LIBRARY="+libraryPath,
		"GPUSIM_TEST_SEED="+strconv.Itoa(seed))
	c.Stdout, c.Stderr = out, out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c, out
}

// What a killed process leaves is what a crash of a real one leaves: half-made instances at most, and no one blocked.
func TestKilledProcessesLeaveTheStateWhole(t *testing.T) {
	_, n := load(t, "gpus: [{model: H100-80GB, count: 2, mig: true}]")
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	const kills = 10
	for i := range kills {
		c, _ := worker(t, 1<<30, i)
		late := time.After(5 * time.Minute)
		for before := n.Calls()["CreateGpuInstance"]; n.Calls()["CreateGpuInstance"] < before+5+i; {
			select {
			case <-ticker.C:
			case <-late:
				t.Fatal("the worker does nothing")
			}
		}
		if err := c.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err == nil {
			t.Error("the worker was not killed")
		}
		gpus, err := n.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range gpus {
			for _, p := range g.Instances {
				if err := n.Driver().Destroy(t.Context(), g.UUID, p.Placed); err != nil {
					t.Errorf("destroying what was left: %v", err)
				}
			}
		}
	}
	if diff := cmp.Diff("gpu 0 H100-80GB mig=on\ngpu 1 H100-80GB mig=on\n", n.String()); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

// work makes and undoes instances. Another worker may have taken the room; nothing else may go wrong.
func work() int {
	l := nvml.New(nvml.WithLibraryPath(os.Getenv("GPUSIM_TEST_LIBRARY")))
	steps, _ := strconv.Atoi(os.Getenv(workerVariable))
	seed, _ := strconv.ParseUint(os.Getenv("GPUSIM_TEST_SEED"), 10, 64)
	random := rand.New(rand.NewPCG(seed, 0))
	var bad []string
	check := func(doing string, r nvml.Return, also ...nvml.Return) bool {
		if r != nvml.SUCCESS && !slices.Contains(also, r) {
			bad = append(bad, fmt.Sprintf("%s: %d", doing, r))
		}
		return r == nvml.SUCCESS
	}
	check("init", l.Init())
	for range steps {
		d, r := l.DeviceGetHandleByIndex(random.IntN(2))
		check("handle", r)
		p, r := d.GetGpuInstanceProfileInfo([]int{0, 1, 2, 9}[random.IntN(4)])
		check("profile", r)
		gi, r := d.CreateGpuInstance(&p)
		if !check("create", r, nvml.ERROR_INSUFFICIENT_RESOURCES) {
			continue
		}
		one, r := gi.GetComputeInstanceProfileInfo(0, 0)
		check("1c", r)
		ci, r := gi.CreateComputeInstance(&one)
		check("create 1c", r)
		info, r := ci.GetInfo()
		check("describe", r)
		_, r = info.Device.GetUUID()
		check("UUID", r)
		check("destroy 1c", ci.Destroy())
		check("destroy", gi.Destroy())
	}
	check("shutdown", l.Shutdown())
	if len(bad) > 0 {
		fmt.Println(strings.Join(bad, "\n"))
		return 1
	}
	return 0
}
