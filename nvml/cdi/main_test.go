package cdi_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// hostDir names the environment variable of the directory that /proc/driver and /proc/devices show.
const hostDir = "GPUSIM_HOST"

// TestMain runs the tests in a sandbox in which the simulated driver's files stand at their paths in /proc, where NVIDIA's
// library looks for them.
func TestMain(m *testing.M) {
	if os.Getenv(gpusimtest.LibraryVariable) != "" {
		os.Exit(m.Run())
	}
	code, err := inSandbox()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func inSandbox() (code int, err error) {
	ctx := context.Background()
	library, err := binaries.Builder{}.LibNVML(ctx)
	if err != nil {
		return 0, err
	}
	program, err := binaries.Builder{}.Tool(ctx, "./test/sandbox/cmd/sandbox")
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "gpusim")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	host := filepath.Join(dir, "host")
	err = errors.Join(os.MkdirAll(filepath.Join(host, "proc/driver"), 0o755), os.WriteFile(filepath.Join(host, "proc/devices"), nil, 0o600))
	if err != nil {
		return 0, err
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	cmd := sandbox.Command(ctx, program, sandbox.Options{
		Mounts: []sandbox.Mount{
			{Source: filepath.Join(host, "proc/driver"), Target: "/proc/driver"},
			{Source: filepath.Join(host, "proc/devices"), Target: "/proc/devices"},
		},
		Env: []string{
			gpusimtest.NodeVariable + "=" + filepath.Join(dir, "node"), gpusimtest.LibraryVariable + "=" + library, hostDir + "=" + host,
		},
	}, self, os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// world is a node with simulated GPUs, a driver installed in a root of its own, and directories of specs.
type world struct {
	*testing.T
	node   *gpusim.Node
	driver nvml.Driver
	root   string // of the driver and of the device files
	dirs   []string
	specs  *cdi.Specs
	files  map[string]int // device files that were made, as paths below root, with their device numbers
}

// driverVersion is what the simulated GPUs answer.
const driverVersion = "580.159.04"

// newWorld makes a node. It replaces that of the test before, so that no two tests may run at the same time.
func newWorld(t *testing.T, spec string) *world {
	t.Helper()
	n := gpusimtest.Node(t, spec)
	host := os.Getenv(hostDir)
	must(t, os.RemoveAll(filepath.Join(host, "proc/driver/nvidia"))) // what the test before has left
	must(t, n.RenderHost(host))

	w := &world{T: t, node: n, root: t.TempDir(), files: map[string]int{}}
	w.dirs = []string{filepath.Join(w.root, "etc/cdi"), filepath.Join(w.root, "run/cdi")}
	for _, dir := range w.dirs {
		must(t, os.MkdirAll(dir, 0o755))
	}
	w.install()
	w.driver = lib.Open(lib.Options{DriverRoot: w.root})
	w.specs = cdi.New(cdi.Options{Dirs: w.dirs, DriverRoot: w.root})
	t.Cleanup(cdi.SetMknod(w.mknod))
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// install puts a driver into the root: the simulated library, others that are only files, and the device files that
// stand as long as the driver is loaded.
func (w *world) install() {
	w.Helper()
	folder := filepath.Join(w.root, "usr/lib/x86_64-linux-gnu")
	must(w.T, os.MkdirAll(folder, 0o755))
	must(w.T, os.Symlink(gpusimtest.Library(w.T), filepath.Join(folder, "libnvidia-ml.so.1")))
	for _, name := range []string{"libcuda.so.", "libnvidia-ptxjitcompiler.so."} {
		must(w.T, os.WriteFile(filepath.Join(folder, name+driverVersion), nil, 0o600))
	}
	must(w.T, os.MkdirAll(filepath.Join(w.root, "dev/nvidia-caps"), 0o755))
	for i := range w.node.UUIDs() {
		w.device(fmt.Sprintf("dev/nvidia%d", i), 195, uint32(i))
	}
	w.device("dev/nvidiactl", 195, 255)
	w.device("dev/nvidia-uvm", 236, 0)
	w.device("dev/nvidia-uvm-tools", 236, 1)
	w.device("dev/nvidia-caps/nvidia-cap1", 235, 1)
	w.device("dev/nvidia-caps/nvidia-cap2", 235, 2)
}

func (w *world) device(name string, major, minor uint32) {
	w.Helper()
	must(w.T, w.mknod(filepath.Join(w.root, name), unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))))
}

// mknod makes a device file, or shows another one at its place where this process may not make any.
func (w *world) mknod(path string, mode uint32, dev int) error {
	rel, err := filepath.Rel(w.root, path)
	if err != nil {
		return err
	}
	w.files[rel] = dev
	err = unix.Mknod(path, mode, dev)
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	w.Cleanup(func() { must(w.T, unix.Unmount(path, 0)) })
	return unix.Mount("/dev/null", path, "", unix.MS_BIND, "")
}

// gpus looks at the GPUs.
func (w *world) gpus() []nvml.GPU {
	w.Helper()
	gpus, err := w.driver.Snapshot(w.Context())
	must(w.T, err)
	return gpus
}

// cut brings a GPU to a geometry, as the agent does: what is right stays.
func (w *world) cut(gpu int, geometry ...string) {
	w.Helper()
	g := w.gpus()[gpu]
	keep := map[string]bool{}
	for _, i := range g.Instances {
		keep[i.String()] = true
	}
	want := map[string]bool{}
	for _, p := range geometry {
		want[p] = true
	}
	for _, i := range g.Instances {
		if !want[i.String()] {
			must(w.T, w.driver.Destroy(w.Context(), g.UUID, i.Placed))
		}
	}
	for _, p := range geometry {
		if !keep[p] {
			must(w.T, w.driver.Create(w.Context(), g.UUID, placed(w.T, g, p)))
		}
	}
}

func placed(t *testing.T, g nvml.GPU, name string) nvml.Placed {
	t.Helper()
	for _, p := range g.Profiles {
		for _, at := range p.Placements {
			for _, compute := range []string{"", "1c+2c"} {
				if p := (nvml.Placed{Profile: p.Name, Span: at, Compute: compute}); p.String() == name {
					return p
				}
			}
		}
	}
	t.Fatalf("%s is no place on %s", name, g.Model)
	return nvml.Placed{}
}

func (w *world) glob(pattern string) []string {
	w.Helper()
	found, err := filepath.Glob(pattern)
	must(w.T, err)
	return found
}

// missing are the functions that the simulated library was asked for and does not have.
func (w *world) missing() []string {
	w.Helper()
	text, err := os.ReadFile(filepath.Join(w.node.Dir(), "trace.log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.Fatal(err)
	}
	return strings.Fields(string(text))
}
