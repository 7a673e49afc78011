package hardware_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// libraryPath is where TestMain has the library built. A process can load only one.
var libraryPath string

func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" {
		os.Exit(work())
	}
	var err error
	if libraryPath, err = (binaries.Builder{}).LibNVML(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// load makes a node and opens the library over it.
func load(t *testing.T, spec string) (nvml.Interface, *gpusim.Node) {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	n, err := gpusim.Create(t.TempDir(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("GPUSIM_NODE", n.Dir())
	l := nvml.New(nvml.WithLibraryPath(libraryPath))
	expect(t, "Init", l.Init(), nvml.SUCCESS)
	t.Cleanup(func() {
		expect(t, "Shutdown", l.Shutdown(), nvml.SUCCESS)
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return l, n
}

func expect(t *testing.T, doing string, got, want nvml.Return) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %d (%v), want %d (%v)", doing, got, nvml.ErrorString(got), want, nvml.ErrorString(want))
	}
}

// same fails unless a call has succeeded with a value.
func same[T any](t *testing.T, what string, want, got T, r nvml.Return) {
	t.Helper()
	expect(t, what, r, nvml.SUCCESS)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-measured +simulated):\n%s", what, diff)
	}
}

const h200 = "gpus: [{model: H200, passthrough: true, persistence: true}]"

func TestH200AnswersWhatTheRealOneDid(t *testing.T) {
	l, _ := load(t, h200)
	driver, r := l.SystemGetDriverVersion()
	same(t, "driver", "580.159.04", driver, r)
	version, r := l.SystemGetNVMLVersion()
	same(t, "NVML", "13.580.159.04", version, r)
	cuda, r := l.SystemGetCudaDriverVersion()
	same(t, "CUDA", 13000, cuda, r)
	n, r := l.DeviceGetCount()
	same(t, "count", 1, n, r)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)

	name, r := d.GetName()
	same(t, "name", "NVIDIA H200", name, r)
	pci, r := d.GetPciInfo()
	same(t, "PCI device id", 0x233510DE, pci.PciDeviceId, r)
	same(t, "PCI subsystem id", 0x18BF10DE, pci.PciSubSystemId, r)
	major, minor, r := d.GetCudaComputeCapability()
	same(t, "compute capability", "9.0", fmt.Sprintf("%d.%d", major, minor), r)
	arch, r := d.GetArchitecture()
	same(t, "architecture", nvml.DeviceArchitecture(9), arch, r)
	brand, r := d.GetBrand()
	same(t, "brand", nvml.BrandType(14), brand, r)
	memory, r := d.GetMemoryInfo()
	same(t, "memory", 150754820096, memory.Total, r)
	virtualization, r := d.GetVirtualizationMode()
	same(t, "virtualization", nvml.GPU_VIRTUALIZATION_MODE_PASSTHROUGH, virtualization, r)
	persistence, r := d.GetPersistenceMode()
	same(t, "persistence", nvml.FEATURE_ENABLED, persistence, r)
	ecc, pending, r := d.GetEccMode()
	same(t, "ECC", [2]nvml.EnableState{nvml.FEATURE_ENABLED, nvml.FEATURE_ENABLED}, [2]nvml.EnableState{ecc, pending}, r)
	mode, r := d.GetComputeMode()
	same(t, "compute mode", nvml.COMPUTEMODE_DEFAULT, mode, r)
	number, r := d.GetMinorNumber()
	same(t, "minor number", 0, number, r)
	types, r := d.GetSupportedEventTypes()
	same(t, "event types", 0xff9f, types, r)
	corrected, uncorrected, isPending, failed, r := d.GetRemappedRows()
	same(t, "remapped rows", "0 0 false false", fmt.Sprint(corrected, uncorrected, isPending, failed), r)
	fabric, r := d.GetGpuFabricInfo()
	same(t, "fabric state", 0, fabric.State, r)
	fields := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	expect(t, "fields", d.GetFieldValues(fields), nvml.SUCCESS)
	same(t, "recovery action", "0 [0 0 0 0 0 0 0 0]", fmt.Sprint(fields[0].NvmlReturn, fields[0].Value), nvml.SUCCESS)
}

func TestH200WithMIGOffAnswersWhatTheRealOneDid(t *testing.T) {
	l, _ := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	current, pending, r := d.GetMigMode()
	same(t, "mode", "0 0", fmt.Sprint(current, pending), r)
	most, r := d.GetMaxMigDeviceCount()
	same(t, "MIG devices at most", 0, most, r)
	_, r = d.GetMigDeviceHandleByIndex(0)
	expect(t, "MIG device 0", r, nvml.ERROR_NOT_FOUND)
	for _, id := range []int{0, 1, 7, 14} {
		_, r = d.GetGpuInstanceById(id)
		expect(t, "GPU instance by id", r, nvml.ERROR_NOT_FOUND)
	}
	_, r = d.GetGpuInstanceId()
	expect(t, "GPU instance id of a GPU", r, nvml.ERROR_INVALID_ARGUMENT)
	_, r = d.GetAttributes()
	expect(t, "attributes of a GPU", r, nvml.ERROR_NOT_SUPPORTED)
	is, r := d.IsMigDeviceHandle()
	same(t, "is a MIG device", false, is, r)
	_, r = d.GetGpuInstanceProfileInfo(99)
	expect(t, "profile 99", r, nvml.ERROR_INVALID_ARGUMENT)
	unknown := nvml.GpuInstanceProfileInfo{Id: 77, InstanceCount: 1}
	_, r = d.GetGpuInstancePossiblePlacements(&unknown)
	expect(t, "placements of an unknown id", r, nvml.ERROR_INVALID_ARGUMENT)
	_, r = d.GetGpuInstanceRemainingCapacity(&unknown)
	expect(t, "capacity of an unknown id", r, nvml.ERROR_INVALID_ARGUMENT)
	_, r = d.GetGpuInstances(&unknown)
	expect(t, "instances of an unknown id", r, nvml.ERROR_INVALID_ARGUMENT)
	for _, uuid := range []string{"GPU-00000000-0000-0000-0000-000000000000", "MIG-00000000-0000-0000-0000-000000000000"} {
		_, r = l.DeviceGetHandleByUUID(uuid)
		expect(t, uuid, r, nvml.ERROR_NOT_FOUND)
	}
	_, r = l.DeviceGetHandleByIndex(9)
	expect(t, "handle of a GPU that is not there", r, nvml.ERROR_INVALID_ARGUMENT)
}

// measuredProfiles is the table of the real H200: driver 580.159.04, MIG mode off.
const measuredProfiles = `
0 19 1g.18gb slices=1 count=7 SM=16 CE=1 dec=1 enc=0 jpeg=1 ofa=0 MB=16384 P2P=0 free=7 {0,1,2,3,4,5,6}:1
1 14 2g.35gb slices=2 count=3 SM=32 CE=2 dec=2 enc=0 jpeg=2 ofa=0 MB=33280 P2P=0 free=3 {0,2,4}:2
2 9 3g.71gb slices=3 count=2 SM=60 CE=3 dec=3 enc=0 jpeg=3 ofa=0 MB=71424 P2P=0 free=2 {0,4}:4
3 5 4g.71gb slices=4 count=1 SM=64 CE=4 dec=4 enc=0 jpeg=4 ofa=0 MB=71424 P2P=0 free=1 {0}:4
4 0 7g.141gb slices=7 count=1 SM=132 CE=8 dec=7 enc=0 jpeg=7 ofa=1 MB=143360 P2P=0 free=1 {0}:8
5 ERROR_NOT_SUPPORTED
6 ERROR_NOT_SUPPORTED
7 20 1g.18gb+me slices=1 count=1 SM=16 CE=1 dec=1 enc=0 jpeg=1 ofa=1 MB=16384 P2P=0 free=1 {0,1,2,3,4,5,6}:1
8 ERROR_NOT_SUPPORTED
9 15 1g.35gb slices=1 count=4 SM=26 CE=1 dec=1 enc=0 jpeg=1 ofa=0 MB=33280 P2P=0 free=4 {0,2,4,6}:2
10 ERROR_NOT_SUPPORTED
11 ERROR_NOT_SUPPORTED
12 ERROR_NOT_SUPPORTED
13 ERROR_NOT_SUPPORTED
14 ERROR_NOT_SUPPORTED
15 ERROR_NOT_SUPPORTED
16 ERROR_NOT_SUPPORTED
17 ERROR_INVALID_ARGUMENT
18 ERROR_INVALID_ARGUMENT
`

func TestH200HasTheProfilesOfTheRealOne(t *testing.T) {
	l, _ := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	var b strings.Builder
	b.WriteString("\n")
	var names []string // that V3 gives
	for kind := range 19 {
		p, r := d.GetGpuInstanceProfileInfo(kind)
		if r == nvml.ERROR_NOT_SUPPORTED || r == nvml.ERROR_INVALID_ARGUMENT {
			_, v2 := d.GetGpuInstanceProfileInfoV(kind).V2()
			_, v3 := d.GetGpuInstanceProfileInfoV(kind).V3()
			expect(t, "V2", v2, r)
			expect(t, "V3", v3, r)
			fmt.Fprintf(&b, "%d %s\n", kind, map[nvml.Return]string{
				nvml.ERROR_NOT_SUPPORTED: "ERROR_NOT_SUPPORTED", nvml.ERROR_INVALID_ARGUMENT: "ERROR_INVALID_ARGUMENT",
			}[r])
			continue
		}
		expect(t, "profile", r, nvml.SUCCESS)
		v2, r := d.GetGpuInstanceProfileInfoV(kind).V2()
		expect(t, "V2", r, nvml.SUCCESS)
		v3, r := d.GetGpuInstanceProfileInfoV(kind).V3()
		expect(t, "V3", r, nvml.SUCCESS)
		if v2.Id != p.Id || v3.Id != p.Id || v2.MemorySizeMB != p.MemorySizeMB || v3.MemorySizeMB != p.MemorySizeMB || v2.Version != 0 || v3.Version != 0 {
			t.Errorf("the versions of profile %d differ: %+v, %+v, %+v", kind, p, v2, v3)
		}
		places, r := d.GetGpuInstancePossiblePlacements(&p)
		expect(t, "placements", r, nvml.SUCCESS)
		free, r := d.GetGpuInstanceRemainingCapacity(&p)
		expect(t, "capacity", r, nvml.SUCCESS)
		standing, r := d.GetGpuInstances(&p)
		expect(t, "instances", r, nvml.SUCCESS)
		if len(standing) > 0 {
			t.Errorf("instances with MIG off: %v", standing)
		}
		var starts []string
		for _, s := range places {
			starts = append(starts, fmt.Sprint(s.Start))
		}
		name, ok := strings.CutPrefix(cString(v2.Name[:]), "MIG ")
		if !ok {
			t.Errorf("the name of profile %d is %q", kind, cString(v2.Name[:]))
		}
		names = append(names, fmt.Sprintf("%d %q", p.Id, strings.TrimRight(asText(v3.Name[:]), "\x00")))
		fmt.Fprintf(&b, "%d %d %s slices=%d count=%d SM=%d CE=%d dec=%d enc=%d jpeg=%d ofa=%d MB=%d P2P=%d free=%d {%s}:%d\n",
			kind, p.Id, name, p.SliceCount, p.InstanceCount, p.MultiprocessorCount, p.CopyEngineCount, p.DecoderCount,
			p.EncoderCount, p.JpegCount, p.OfaCount, p.MemorySizeMB, p.IsP2pSupported, free, strings.Join(starts, ","), places[0].Size)
	}
	if diff := cmp.Diff(measuredProfiles, b.String()); diff != "" {
		t.Errorf("profiles (-measured +simulated):\n%s", diff)
	}
	const zeros = `\x00\x00\x00\x00\x00\x00\x00\x00MIG `
	slices.Sort(names)
	if diff := cmp.Diff([]string{
		`0 "` + zeros + `1g.0gb"`, `14 "` + zeros + `3g.0gb"`, `15 "` + zeros + `4g.0gb"`, `19 "` + zeros + `7g.0gb"`,
		`20 "` + zeros + `1g.0gb+me"`, `5 "` + zeros + `1g.0gb"`, `9 "` + zeros + `2g.0gb"`,
	}, names); diff != "" {
		t.Errorf("names by V3 (-measured +simulated):\n%s", diff)
	}
}

func TestH200SaysThatItRunsByTheGSPsFirmware(t *testing.T) {
	l, _ := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	enabled, byDefault, r := d.GetGspFirmwareMode()
	expect(t, "mode of the GSP", r, nvml.SUCCESS)
	if !enabled || !byDefault {
		t.Errorf("enabled %t, by default %t; both are true on a real one", enabled, byDefault)
	}
}

// asText is the field with all its zeros.
func asText[C int8 | uint8](field []C) string {
	b := make([]byte, len(field))
	for i, c := range field {
		b[i] = byte(c)
	}
	return string(b)
}

func cString[C int8 | uint8](field []C) string {
	var b []byte
	for _, c := range field {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

func TestH200ShowsProcessesAsTheRealOneDid(t *testing.T) {
	l, n := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	for pid, used := range map[int]int{1001: 2048, 1002: 1456} {
		if err := n.Hold(n.UUIDs()[0], pid, "trainer", used); err != nil {
			t.Fatal(err)
		}
	}
	ps, r := d.GetComputeRunningProcesses()
	same(t, "number of processes", 2, len(ps), r)
	for _, p := range ps {
		want := nvml.ProcessInfo{Pid: p.Pid, UsedGpuMemory: uint64(map[uint32]int{1001: 2048, 1002: 1456}[p.Pid]) << 20, GpuInstanceId: 4294967295, ComputeInstanceId: 4294967295}
		same(t, "process", want, p, r)
	}
	graphics, r := d.GetGraphicsRunningProcesses()
	same(t, "graphics processes", 0, len(graphics), r)
	v1, r := d.GetMemoryInfo()
	expect(t, "memory", r, nvml.SUCCESS)
	v2, r := d.GetMemoryInfo_v2()
	expect(t, "memory v2", r, nvml.SUCCESS)
	same(t, "reserved memory, which the first version counts as used", v1.Used, v2.Used+v2.Reserved, r)
	same(t, "reserved memory", uint64(644_939_776), v2.Reserved, r)
	same(t, "used memory", uint64(2048+1456)<<20, v2.Used, r)
	name, r := l.SystemGetProcessName(1001)
	same(t, "process name", "trainer", name, r)
}

func TestEventsComeThroughTheLibrary(t *testing.T) {
	l, n := load(t, h200)
	d, r := l.DeviceGetHandleByIndex(0)
	expect(t, "handle", r, nvml.SUCCESS)
	set, r := l.EventSetCreate()
	expect(t, "event set", r, nvml.SUCCESS)
	expect(t, "register", d.RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError|nvml.EventTypeSingleBitEccError, set), nvml.SUCCESS)
	began := time.Now()
	_, r = set.Wait(200)
	expect(t, "waiting for nothing", r, nvml.ERROR_TIMEOUT)
	if took := time.Since(began); took < 200*time.Millisecond {
		t.Errorf("waited %v, want 200ms or more", took)
	}
	if err := n.Xid(0, 79); err != nil {
		t.Fatal(err)
	}
	e, r := set.Wait(5000)
	same(t, "Xid", 79, e.EventData, r)
	same(t, "event type", uint64(nvml.EventTypeXidCriticalError), e.EventType, r)
	same(t, "instance", 0xffffffff, e.GpuInstanceId, r)
	uuid, r := e.Device.GetUUID()
	same(t, "GPU", n.UUIDs()[0], uuid, r)
	expect(t, "free", set.Free(), nvml.SUCCESS)
}

func TestWithoutANodeTheDriverIsNotLoaded(t *testing.T) {
	t.Setenv("GPUSIM_NODE", t.TempDir())
	l := nvml.New(nvml.WithLibraryPath(libraryPath))
	expect(t, "Init", l.Init(), nvml.ERROR_DRIVER_NOT_LOADED)
	_, r := l.DeviceGetCount()
	expect(t, "count", r, nvml.ERROR_UNINITIALIZED)
}
