package gpusim_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvlib/pkg/nvpci"
	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
)

func render(t *testing.T, spec string) string {
	t.Helper()
	dir := t.TempDir()
	must(t, node(t, spec).RenderHost(dir))
	return dir
}

// The rule is the one that a real H200's file follows: 4,322 lines, counting up from 3.
func TestMinorNumbersAreTheListOfARealNode(t *testing.T) {
	f, err := os.Open(filepath.Join(render(t, "gpus: [{model: T4}]"), "proc/driver/nvidia-caps/mig-minors"))
	must(t, err)
	defer f.Close()
	minors := map[string]int{}
	lines := 0
	for s := bufio.NewScanner(f); s.Scan(); lines++ {
		var name string
		var minor int
		if _, err := fmt.Sscan(s.Text(), &name, &minor); err != nil {
			t.Fatalf("line %q: %v", s.Text(), err)
		}
		minors[name] = minor
	}
	if lines != 4322 || len(minors) != lines {
		t.Errorf("%d lines with %d names, want 4322 of both", lines, len(minors))
	}
	for g := range 32 {
		for i := range 15 {
			if got, want := minors[fmt.Sprintf("gpu%d/gi%d/access", g, i)], 3+135*g+9*i; got != want {
				t.Errorf("gpu%d/gi%d: got %d, want %d", g, i, got, want)
			}
			for c := range 8 {
				if got, want := minors[fmt.Sprintf("gpu%d/gi%d/ci%d/access", g, i, c)], 3+135*g+9*i+1+c; got != want {
					t.Errorf("gpu%d/gi%d/ci%d: got %d, want %d", g, i, c, got, want)
				}
			}
		}
	}
	if minors["config"] != 1 || minors["monitor"] != 2 {
		t.Errorf("config is %d and monitor %d, want 1 and 2", minors["config"], minors["monitor"])
	}
}

type quiet struct{}

func (quiet) Warningf(string, ...any) {} // of a vfio-dev that real hosts do not have either

func TestNvlibFindsTheGPUsOnTheBus(t *testing.T) {
	dir := render(t, "gpus: [{model: A100-80GB}, {model: RTX-PRO-6000}, {model: T4, count: 2}]")
	gpus, err := nvpci.New(nvpci.WithPCIDevicesRoot(filepath.Join(dir, "sys/bus/pci/devices")), nvpci.WithLogger(quiet{})).GetGPUs()
	must(t, err)
	var got []string
	for _, g := range gpus {
		config, err := g.Config.Read()
		must(t, err)
		caps, err := config.GetPCICapabilities()
		must(t, err)
		got = append(got, fmt.Sprintf("%s %04x:%04x %04x:%04x driver=%s numa=%d 3d=%v reset=%v bars=%d config=%04x caps=%d",
			g.Address, g.Vendor, g.Device, g.SubsystemVendor, g.SubsystemDevice, g.Driver, g.NumaNode, g.Is3DController(),
			g.IsResetAvailable(), len(g.Resources), config.GetDeviceID(), len(caps.Standard)))
	}
	want := []string{
		"0000:07:00.0 10de:20b2 10de:147f driver=nvidia numa=0 3d=true reset=true bars=3 config=20b2 caps=1",
		"0000:15:00.0 10de:2bb5 10de:204e driver=nvidia numa=0 3d=true reset=true bars=3 config=2bb5 caps=1",
		"0000:23:00.0 10de:1eb8 10de:12a2 driver=nvidia numa=1 3d=true reset=true bars=3 config=1eb8 caps=1",
		"0000:31:00.0 10de:1eb8 10de:12a2 driver=nvidia numa=1 3d=true reset=true bars=3 config=1eb8 caps=1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

func TestHostShowsTheLoadedDriver(t *testing.T) {
	dir := render(t, "driverVersion: 570.1.2\ngpus: [{model: H200}]")
	for name, want := range map[string]string{
		"proc/modules":                                     "nvidia 14376960",
		"proc/driver/nvidia/version":                       "  570.1.2  ",
		"proc/driver/nvidia/capabilities/mig/config":       "DeviceFileMinor: 1\nDeviceFileMode: 256\n",
		"proc/driver/nvidia/capabilities/mig/monitor":      "DeviceFileMinor: 2\nDeviceFileMode: 292\n",
		"proc/driver/nvidia/gpus/0000:07:00.0/information": "NVIDIA H200",
		"proc/sys/kernel/random/boot_id":                   "-",
		"sys/bus/pci/devices/0000:07:00.0/reset_method":    "flr",
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		must(t, err)
		if !strings.Contains(string(text), want) {
			t.Errorf("%s does not contain %q:\n%s", name, want, text)
		}
	}
}

// A DRA driver reads the root of a GPU's bus from where the link leads.
func TestTheBusListsLinksIntoTheTreeOfDevices(t *testing.T) {
	dir := filepath.Join(render(t, "gpus: [{model: H100-80GB, count: 2}]"), "sys/bus/pci/devices")
	got := map[string]string{}
	entries, err := os.ReadDir(dir)
	must(t, err)
	for _, e := range entries {
		got[e.Name()], err = os.Readlink(filepath.Join(dir, e.Name()))
		must(t, err)
	}
	want := map[string]string{
		"0000:07:00.0": "../../../devices/pci0000:00/0000:07:00.0",
		"0000:15:00.0": "../../../devices/pci0000:40/0000:15:00.0",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
}

func TestTheDriverRootHasWhatAPackageInstalls(t *testing.T) {
	dir, library := t.TempDir(), filepath.Join(t.TempDir(), "library")
	must(t, os.WriteFile(library, nil, 0o600))
	n := node(t, "driverVersion: 570.1.2\ngpus: [{model: H200, count: 2}]")
	for range 2 { // what is there is replaced
		must(t, n.RenderDriver(dir, library, "/bin/true"))
	}
	var got []string
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			_, err = os.Stat(path) // no link leads nowhere
			got = append(got, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	}))
	want := []string{
		"dev/nvidia-uvm", "dev/nvidia-uvm-tools", "dev/nvidia0", "dev/nvidia1", "dev/nvidiactl",
		"usr/bin/nvidia-cuda-mps-control", "usr/bin/nvidia-smi",
		"usr/lib64/libcuda.so.570.1.2", "usr/lib64/libnvidia-ml.so.1", "usr/lib64/libnvidia-ml.so.570.1.2",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestDeviceFilesOpenTheDevicesThatTheyAreOf(t *testing.T) {
	n := node(t, "gpus: [{model: H100-80GB, count: 2, mig: true}, {model: H100-80GB}]")
	must(t, n.RenderHost(t.TempDir()))
	must(t, n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[1]), placed("3g.40gb@0:4")))
	must(t, n.Driver().Create(t.Context(), nvml.UUID(n.UUIDs()[1]), placed("3g.40gb@4:4")))
	// The second GPU's capabilities begin at 3+135: those of instance 1 at 3+135+9, those of instance 2 nine later.
	for _, tt := range []struct {
		name  string
		files []string
		want  []string
	}{
		{"none", nil, nil},
		{"a whole GPU", []string{"nvidia2", "nvidiactl"}, []string{n.UUIDs()[2]}},
		{"a GPU in MIG mode, and no instance", []string{"nvidia1"}, nil},
		{"the GPU instance alone", []string{"nvidia1", "nvidia-caps/nvidia-cap147"}, nil},
		{"both instances", []string{"nvidia1", "nvidia-caps/nvidia-cap147", "nvidia-caps/nvidia-cap148"}, []string{n.MIGDevice(1, 0)}},
		{"both instances without their GPU", []string{"nvidia0", "nvidia-caps/nvidia-cap147", "nvidia-caps/nvidia-cap148"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dev := t.TempDir()
			must(t, os.Mkdir(filepath.Join(dev, "nvidia-caps"), 0o755))
			for _, file := range tt.files {
				must(t, os.WriteFile(filepath.Join(dev, file), nil, 0o600))
			}
			if diff := cmp.Diff(tt.want, n.OpenTo(dev)); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}
