package cdi_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	transformroot "github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/receive"
)

// ctk is nvidia-ctk: it writes a whole spec as the options say.
type ctk struct {
	names    []string // --device-name-strategy; nvidia-ctk's default if there are none
	onNode   string   // what the driver's root is on the node, "/" or a driver container's
	mode     nvcdi.Mode
	vendor   string
	disabled []string // --disable-hook
	noAll    bool
}

func (c ctk) generate(w *world, path string) *specs.Spec {
	w.Helper()
	if len(c.names) == 0 {
		c.names = []string{nvcdi.DeviceNameStrategyIndex, nvcdi.DeviceNameStrategyUUID}
	}
	if c.mode == "" {
		c.mode, c.vendor = nvcdi.ModeNvml, "nvidia.com"
	}
	var namers []nvcdi.DeviceNamer
	for _, name := range c.names {
		namer, err := nvcdi.NewDeviceNamer(name)
		must(w.T, err)
		namers = append(namers, namer)
	}
	w.gpus() // keeps the library loaded
	lib, err := nvcdi.New(nvcdi.WithMode(c.mode), nvcdi.WithDriverRoot(w.root), nvcdi.WithDeviceNamers(namers...),
		nvcdi.WithDisabledHooks(c.disabled...), nvcdi.WithLogger(quiet{}))
	must(w.T, err)
	devices, err := lib.GetDeviceSpecsByID("all")
	must(w.T, err)
	common, err := lib.GetCommonEdits()
	must(w.T, err)
	options := []spec.Option{
		spec.WithVendor(c.vendor), spec.WithClass("gpu"), spec.WithDeviceSpecs(devices), spec.WithEdits(*common.ContainerEdits),
	}
	if !c.noAll {
		options = append(options, spec.WithMergedDeviceOptions(transform.WithName("all"), transform.WithSkipIfExists(true)))
	}
	out, err := spec.New(options...)
	must(w.T, err)
	onNode := c.onNode
	if onNode == "" {
		onNode = "/"
	}
	must(w.T, transformroot.NewDriverTransformer(transformroot.WithDriverRoot(w.root), transformroot.WithTargetDriverRoot(onNode)).Transform(out.Raw()))
	if onNode == "/" { // as where nvidia-ctk runs on the node itself
		for _, d := range append(out.Raw().Devices, specs.Device{ContainerEdits: out.Raw().ContainerEdits}) {
			for _, n := range d.ContainerEdits.DeviceNodes {
				n.HostPath = ""
			}
		}
	}
	must(w.T, out.Save(path))
	return w.spec(path)
}

// quiet is a logger of nvcdi that says nothing.
type quiet struct{}

func (quiet) Tracef(string, ...any)   {}
func (quiet) Debugf(string, ...any)   {}
func (quiet) Infof(string, ...any)    {}
func (quiet) Warningf(string, ...any) {}
func (quiet) Errorf(string, ...any)   {}

// spec reads a spec with the checks of a container runtime.
func (w *world) spec(path string) *specs.Spec {
	w.Helper()
	s, err := cdilib.ReadSpec(path, 0)
	must(w.T, err)
	return s.Spec
}

func (w *world) stale(want ...string) {
	w.Helper()
	got, err := w.specs.Stale(w.Context(), w.gpus())
	must(w.T, err)
	if !slices.Equal(got, want) {
		w.Fatalf("stale are %q, want %q", got, want)
	}
}

func (w *world) write() {
	w.Helper()
	must(w.T, w.specs.Write(w.Context(), w.gpus()))
}

func (w *world) text(path string) string {
	w.Helper()
	text, err := os.ReadFile(path)
	must(w.T, err)
	return string(text)
}

const twoH100 = "gpus: [{model: H100-80GB, mig: true}, {model: H100-80GB}]"

// The oracle is NVIDIA's own generation of a whole spec: ours replaces the devices only, and must come to the same.
func TestASpecFollowsTheGeometryAsNVIDIAsToolWouldWriteIt(t *testing.T) {
	for _, row := range []struct {
		name, file string
		ctk        ctk
	}{
		{"nvidia-cdi-refresh", "run/cdi/nvidia.yaml", ctk{}},
		{"in JSON", "etc/cdi/nvidia.json", ctk{}},
		{"by index", "etc/cdi/nvidia.yaml", ctk{names: []string{"index"}}},
		{"by type and index", "etc/cdi/nvidia.yaml", ctk{names: []string{"type-index"}}},
		{"by UUID", "etc/cdi/nvidia.yaml", ctk{names: []string{"uuid"}}},
		{"by all", "etc/cdi/nvidia.yaml", ctk{names: []string{"index", "type-index", "uuid"}}},
		{"a driver container's", "run/cdi/nvidia.yaml", ctk{onNode: "/run/nvidia/driver"}},
		{"without hooks", "run/cdi/nvidia.yaml", ctk{disabled: []string{"all"}}},
		{"without all", "run/cdi/nvidia.yaml", ctk{noAll: true}},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWorld(t, twoH100)
			w.cut(0, "3g.40gb@0", "1g.10gb@4")
			must(t, w.makeAll())
			path := filepath.Join(w.root, row.file)
			row.ctk.generate(w, path)
			must(t, os.Chmod(path, 0o604))
			w.stale()

			w.cut(0, "1g.10gb@0", "1g.10gb@1", "2g.20gb@2", "3g.40gb(1c+2c)@4")
			w.stale(path)
			w.write()
			w.stale()
			oracle := row.ctk.generate(w, filepath.Join(t.TempDir(), filepath.Base(path)))
			if diff := cmp.Diff(oracle, w.spec(path)); diff != "" {
				t.Errorf("it is not what nvidia-ctk gives (-nvidia-ctk +it):\n%s", diff)
			}
			if isJSON := json.Valid([]byte(w.text(path))); isJSON != strings.HasSuffix(path, ".json") {
				t.Errorf("it is\n%s", w.text(path))
			}
			info, err := os.Stat(path)
			must(t, err)
			if info.Mode() != 0o604 {
				t.Errorf("its mode is %v, want that of before", info.Mode())
			}
			if found := w.glob(filepath.Join(filepath.Dir(path), "*")); len(found) != 1 {
				t.Errorf("files are %q, want one", found)
			}
			if found := w.missing(); len(found) > 0 {
				t.Errorf("the simulated library lacks %q", found)
			}

			must(t, w.driver.SetMode(t.Context(), w.gpus()[1].UUID, true))
			w.stale(path)
			w.write()
			w.cut(0)
			w.stale(path)
			w.write()
			w.stale()
			if got := names(w.spec(path)); !slices.Equal(got, []string{"none"}) {
				t.Errorf("no device is left, and it names %q", got)
			}
			must(t, w.driver.SetMode(t.Context(), w.gpus()[0].UUID, false))
			w.stale(path)
			w.write()
			w.stale()
		})
	}
}

func names(s *specs.Spec) []string {
	var out []string
	for _, d := range s.Devices {
		out = append(out, d.Name)
	}
	return out
}

// makeAll makes the device files of all instances, as nvidia-smi does.
func (w *world) makeAll() error {
	caps := w.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*/access")
	caps = append(caps, w.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access")...)
	for _, c := range caps {
		_, number, _ := strings.Cut(strings.SplitN(w.text(c), "\n", 2)[0], ": ")
		path := filepath.Join(w.root, "dev/nvidia-caps/nvidia-cap"+number)
		if err := w.mknod(path, unix.S_IFCHR|0o444, int(unix.Mkdev(235, 3))); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return nil
}

func TestTheSameNamesForOtherInstancesAreStale(t *testing.T) {
	w := newWorld(t, twoH100)
	w.cut(0, "1g.10gb@0", "1g.10gb@1")
	must(t, w.makeAll())
	path := filepath.Join(w.dirs[0], "nvidia.yaml")
	before := ctk{names: []string{"index"}}.generate(w, path)
	w.cut(0, "1g.10gb@1", "3g.40gb@4")
	w.stale(path)
	w.write()
	w.stale()
	after := w.spec(path)
	if diff := cmp.Diff(names(before), names(after)); diff != "" {
		t.Errorf("names (-before +after):\n%s", diff)
	}
	if cmp.Equal(before.Devices, after.Devices) {
		t.Error("the devices are as before")
	}
}

func TestDeviceFilesOfNewInstancesAreMade(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[1], "nvidia.yaml")
	ctk{}.generate(w, path)
	w.cut(0, "7g.80gb@0")
	w.files = map[string]int{}
	w.write()
	caps := w.glob(filepath.Join(os.Getenv(hostDir), "proc/driver/nvidia/capabilities/gpu0/mig/*"))
	if len(caps) != 1 || len(w.files) != 2 {
		t.Fatalf("for the instance %q, device files %v were made, want 2", caps, w.files)
	}
	for name, dev := range w.files {
		if unix.Major(uint64(dev)) != 235 || !strings.HasPrefix(name, "dev/nvidia-caps/nvidia-cap") {
			t.Errorf("%s has device number %d:%d, want major 235", name, unix.Major(uint64(dev)), unix.Minor(uint64(dev)))
		}
	}
}

func TestASpecWithoutTheDeviceFilesIsNotWritten(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[1], "nvidia.yaml")
	ctk{}.generate(w, path)
	before := w.text(path)
	w.cut(0, "7g.80gb@0")
	must(t, os.RemoveAll(filepath.Join(os.Getenv(hostDir), "proc/driver/nvidia/capabilities/gpu0"))) // so that they are not known
	err := w.specs.Write(t.Context(), w.gpus())
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "run nvidia-smi on the node") {
		t.Errorf("got %v, want what to do about %s", err, path)
	}
	if w.text(path) != before {
		t.Error("it was written")
	}
	elsewhere := cdi.New(cdi.Options{Dirs: w.dirs, DriverRoot: w.root, DevRoot: t.TempDir()})
	err = elsewhere.Write(t.Context(), w.gpus())
	if err == nil || !strings.Contains(err.Error(), "must hold the node's own /dev") {
		t.Errorf("got %v, want that the device files are not there", err)
	}
}

// The operator's spec for containers that manage GPUs holds every device file of the node.
func TestTheManagementSpecFollowsTheDeviceFiles(t *testing.T) {
	w := newWorld(t, twoH100)
	w.cut(0, "3g.40gb@0")
	must(t, w.makeAll())
	path := filepath.Join(w.dirs[1], "management.nvidia.com-gpu.yaml")
	operator := ctk{mode: nvcdi.ModeManagement, vendor: "management.nvidia.com", onNode: "/run/nvidia/driver"}
	operator.generate(w, path)
	w.stale()
	w.cut(0, "3g.40gb@0", "3g.40gb@4")
	w.stale(path)
	w.write()
	w.stale()
	if diff := cmp.Diff(operator.generate(w, filepath.Join(t.TempDir(), "oracle.yaml")), w.spec(path)); diff != "" {
		t.Errorf("it is not what the operator's toolkit gives (-toolkit +it):\n%s", diff)
	}
	elsewhere := cdi.New(cdi.Options{Dirs: w.dirs, DevRoot: t.TempDir()})
	_, err := elsewhere.Stale(t.Context(), w.gpus())
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "must hold the node's own /dev") {
		t.Errorf("got %v, want that the device files of %s are not there", err, path)
	}
}

// A hook that the node's toolkit did not write may be unknown to its program, and would keep containers from starting.
func TestNoHookComesIntoASpecThatTheNodesToolkitDidNotWrite(t *testing.T) {
	for _, row := range []struct {
		disabled []string
		want     int
	}{
		{nil, 1},
		{[]string{"apply-cuda-memory-limits"}, 0},
	} {
		w := newWorld(t, "gpus: [{model: H100-80GB, mig: true}, {model: H100-80GB}]")
		path := filepath.Join(w.dirs[0], "nvidia.yaml")
		ctk{disabled: row.disabled}.generate(w, path)
		must(t, w.driver.SetMode(t.Context(), w.gpus()[0].UUID, false))
		w.write()
		for _, d := range w.spec(path).Devices {
			if d.Name == "0" && len(d.ContainerEdits.Hooks) != row.want {
				t.Errorf("with %q disabled, GPU 0 has %d hooks, want %d", row.disabled, len(d.ContainerEdits.Hooks), row.want)
			}
		}
		oracle := ctk{disabled: row.disabled}.generate(w, filepath.Join(t.TempDir(), "oracle.yaml"))
		if diff := cmp.Diff(oracle, w.spec(path)); diff != "" {
			t.Errorf("with %q disabled, it is not what nvidia-ctk gives (-nvidia-ctk +it):\n%s", row.disabled, diff)
		}
		w.stale()
	}
}

func TestWhatIsNotOursIsNotTouched(t *testing.T) {
	w := newWorld(t, twoH100)
	w.cut(0, "1g.10gb@0")
	texts := map[string]string{
		"k8s.device-plugin.nvidia.com-gpu.json": `{"cdiVersion":"0.5.0","kind":"k8s.device-plugin.nvidia.com/gpu","devices":[` +
			`{"name":"0:0","containerEdits":{"env":["A=B"]}}],"containerEdits":{}}`,
		"vendor.yaml":       "cdiVersion: 0.5.0\nkind: vendor.com/net\ndevices: [{name: all, containerEdits: {env: [A=B]}}]\n",
		"broken.yaml":       "cdiVersion: 9.9.9\nkind: vendor.com/other\nfuture: [\n",
		"nothing.yaml":      "",
		"nvidia.yaml.old":   "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n",
		".nvidia.yaml12345": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevi", // what a write that was killed leaves
	}
	for name, text := range texts {
		must(t, os.WriteFile(filepath.Join(w.dirs[0], name), []byte(text), 0o600))
	}
	gpus := w.gpus()
	unused := cdi.New(cdi.Options{Dirs: w.dirs, Library: "/missing"}) // CDI is not in use: nothing may call it
	got, err := unused.Stale(t.Context(), gpus)
	must(t, err)
	must(t, unused.Write(t.Context(), gpus))
	if len(got) > 0 {
		t.Errorf("%q are stale, want none", got)
	}
	for name, text := range texts {
		if now := w.text(filepath.Join(w.dirs[0], name)); now != text {
			t.Errorf("%s is now\n%s", name, now)
		}
	}
	none := cdi.New(cdi.Options{Dirs: []string{filepath.Join(w.root, "missing")}})
	if got, err := none.Stale(t.Context(), gpus); len(got) > 0 || err != nil {
		t.Errorf("without a directory: %q, %v", got, err)
	}
}

func TestASpecThatCannotBeReadIsNamedAndTheOthersFollow(t *testing.T) {
	w := newWorld(t, twoH100)
	good, broken := filepath.Join(w.dirs[1], "nvidia.yaml"), filepath.Join(w.dirs[0], "nvidia.yaml")
	ctk{}.generate(w, good)
	text := "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [\n"
	must(t, os.WriteFile(broken, []byte(text), 0o600))
	w.cut(0, "1g.10gb@0")
	got, err := w.specs.Stale(t.Context(), w.gpus())
	if !slices.Equal(got, []string{good}) || err == nil || !strings.Contains(err.Error(), broken) {
		t.Errorf("got %q and %v, want %s stale and %s named", got, err, good, broken)
	}
	if err := w.specs.Write(t.Context(), w.gpus()); err == nil || !strings.Contains(err.Error(), broken) {
		t.Errorf("got %v, want %s named", err, broken)
	}
	if w.text(broken) != text {
		t.Error("it was written")
	}
	if got, _ := w.specs.Stale(t.Context(), w.gpus()); len(got) > 0 {
		t.Errorf("%q are still stale", got)
	}
}

func TestACallThatHangsIsGivenUpAndTheFileStays(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[1], "nvidia.yaml")
	ctk{}.generate(w, path)
	before := w.text(path)
	w.cut(0, "1g.10gb@0")
	gpus := w.gpus()
	must(t, w.node.Fail(gpusim.GetMinorNumber, gpusim.Fault{Hang: true}))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := w.specs.Write(ctx, gpus); !errors.Is(err, nvml.ErrUnresponsive) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v, want %v about %s", err, nvml.ErrUnresponsive, path)
	}
	if err := w.specs.Write(t.Context(), gpus); !errors.Is(err, nvml.ErrUnresponsive) {
		t.Errorf("while it hangs: got %v, want %v", err, nvml.ErrUnresponsive)
	}
	if w.text(path) != before {
		t.Error("the file was written")
	}
	must(t, w.node.Fail(gpusim.GetMinorNumber, gpusim.Fault{}))
	err := w.specs.Write(t.Context(), gpus)
	for errors.Is(err, nvml.ErrUnresponsive) { // until it is back
		err = w.specs.Write(t.Context(), gpus)
	}
	must(t, err)
	w.stale()
}

func TestAFileThatCannotBeReplacedStays(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[1], "nvidia.yaml")
	ctk{}.generate(w, path)
	before := w.text(path)
	w.cut(0, "1g.10gb@0")
	must(t, unix.Mount(w.dirs[1], w.dirs[1], "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(w.dirs[1], 0)) })
	must(t, unix.Mount("", w.dirs[1], "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	err := w.specs.Write(t.Context(), w.gpus())
	if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "must be mounted writable") {
		t.Errorf("got %v, want what to do about %s", err, path)
	}
	if w.text(path) != before {
		t.Error("the file was written")
	}
}

func TestALinkStaysALink(t *testing.T) {
	w := newWorld(t, twoH100)
	real, link := filepath.Join(w.root, "nvidia.yaml"), filepath.Join(w.dirs[0], "nvidia.yaml")
	ctk{}.generate(w, real)
	must(t, os.Symlink(real, link))
	w.cut(0, "1g.10gb@0")
	w.write()
	w.stale()
	if to, err := os.Readlink(link); err != nil || to != real {
		t.Errorf("it leads to %q (%v), want %s", to, err, real)
	}
}

func TestALostGPUHidesNoOther(t *testing.T) {
	w := newWorld(t, "gpus: [{model: H100-80GB, mig: true, count: 2}]")
	w.cut(0, "1g.10gb@0")
	w.cut(1, "1g.10gb@0")
	must(t, w.makeAll())
	path := filepath.Join(w.dirs[0], "nvidia.yaml")
	ctk{}.generate(w, path)
	must(t, w.node.SetHealth(1, gpusim.Health{Lost: true}))
	w.stale()
	must(t, w.node.SetHealth(1, gpusim.Health{}))
	w.cut(0, "1g.10gb@0", "1g.10gb@1")
	must(t, w.node.SetHealth(1, gpusim.Health{Lost: true}))
	w.stale(path)
	w.write()
	w.stale()
	if got := names(w.spec(path)); !slices.Contains(got, "0:1") || slices.Contains(got, "1:0") {
		t.Errorf("it names %q, want the devices of GPU 0 only", got)
	}
	must(t, w.node.SetHealth(1, gpusim.Health{}))
	w.stale(path)
}

func TestWithoutALibraryTheErrorSaysSo(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[0], "nvidia.yaml")
	ctk{}.generate(w, path)
	w.cut(0, "1g.10gb@0")
	empty := t.TempDir()
	elsewhere := cdi.New(cdi.Options{Dirs: w.dirs, DriverRoot: empty, DevRoot: w.root})
	err := elsewhere.Write(t.Context(), w.gpus())
	if !errors.Is(err, nvml.ErrNoDriver) || !strings.Contains(err.Error(), "there is no libnvidia-ml.so.1 under "+empty) {
		t.Errorf("got %v, want %v", err, nvml.ErrNoDriver)
	}
}

// NVIDIA's CDI library initialises the driver's library and shuts it down, while the agent has it open.
func TestTheAgentsOwnSessionGoesOn(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[0], "nvidia.yaml")
	ctk{}.generate(w, path)
	driver := lib.Open(lib.Options{DriverRoot: w.root})
	events, err := driver.Events(t.Context())
	must(t, err)
	w.cut(0, "1g.10gb@0")
	w.write()
	must(t, w.node.Xid(0, 79))
	if e := receive.From(t, events); e.Xid != 79 {
		t.Errorf("got event %v, want Xid 79", e)
	}
	if _, err := driver.Snapshot(t.Context()); err != nil {
		t.Error(err)
	}
}

// As nvidia-ctk 1.14 writes it: names by index only, device files by path only, hooks of nvidia-ctk itself.
const olderSpec = `---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
  hooks:
  - args: [nvidia-ctk, hook, update-ldcache, --folder, /usr/lib64]
    hookName: createContainer
    path: /usr/local/nvidia/toolkit/nvidia-ctk
  mounts:
  - containerPath: /usr/lib64/libcuda.so.525.60.13
    hostPath: /usr/lib64/libcuda.so.525.60.13
    options: [ro, nosuid, nodev, bind]
  - containerPath: /usr/bin/nvidia-smi
    hostPath: /usr/bin/nvidia-smi
    options: [ro, nosuid, nodev, bind]
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
    - path: /dev/dri/card1
    hooks:
    - args: [nvidia-ctk, hook, create-symlinks, --link, "../card1::/dev/dri/by-path/pci-0000:16:00.0-card"]
      hookName: createContainer
      path: /usr/local/nvidia/toolkit/nvidia-ctk
  name: "1"
kind: nvidia.com/gpu
`

func TestOnlyTheDevicesThatChangedAreWrittenIntoAnOlderToolkitsSpec(t *testing.T) {
	w := newWorld(t, twoH100)
	path := filepath.Join(w.dirs[0], "nvidia.yaml")
	must(t, os.WriteFile(path, []byte(olderSpec), 0o600))
	w.stale()
	want := w.spec(path)
	w.cut(0, "3g.40gb@0")
	w.stale(path)
	w.write()
	w.stale()
	got := w.spec(path)
	if n := names(got); !slices.Equal(n, []string{"0:0", "1"}) {
		t.Fatalf("it names %q", n)
	}
	if nodes := got.Devices[0].ContainerEdits.DeviceNodes; len(nodes) != 3 || nodes[0].Path != "/dev/nvidia0" || nodes[0].HostPath != "" {
		t.Errorf("the device files of the instance are %v", nodes)
	}
	got.Devices = got.Devices[1:]
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("all but the instance (-before +after):\n%s", diff)
	}
}
