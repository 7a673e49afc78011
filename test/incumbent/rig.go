// Package incumbent runs NVIDIA's mig-parted v0.14.4, unchanged, on simulated GPUs, so that tests can compare gpuslice
// with it on the same hardware. Its tests do so; test/bench measures with it.
//
// It knows no Kubernetes: a Host here is GPUs with as much of a machine around them as nvidia-mig-parted looks at.
package incumbent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// Programs are what a Host consists of.
type Programs struct {
	MIGParted string // directory of nvidia-mig-parted and nvidia-mig-manager
	LibNVML   string // the simulated library
	GPUSim    string // stands in for nvidia-smi when it is started under that name
	Sandbox   string
}

// Build builds what is missing.
func Build(ctx context.Context, b binaries.Builder) (Programs, error) {
	p, err := BuildSimulated(ctx, b)
	if err == nil {
		p.MIGParted, err = b.MigParted(ctx)
	}
	return p, err
}

// BuildSimulated builds all but NVIDIA's programs, which take minutes to compile. A host without them has its GPUs and nvidia-smi.
func BuildSimulated(ctx context.Context, b binaries.Builder) (Programs, error) {
	var p Programs
	for _, program := range []struct {
		into  *string
		build func(context.Context) (string, error)
	}{
		{&p.LibNVML, b.LibNVML},
		{&p.GPUSim, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/gpusim/cmd/gpusim") }},
		{&p.Sandbox, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/sandbox/cmd/sandbox") }},
	} {
		var err error
		if *program.into, err = program.build(ctx); err != nil {
			return Programs{}, err
		}
	}
	return p, nil
}

// InstallTools puts nvidia-mig-parted and nvidia-smi into dir. PATH must begin with dir for NVIDIA's programs that
// start them.
func (p Programs) InstallTools(dir string) error {
	return link(map[string]string{
		filepath.Join(dir, "nvidia-smi"):        p.GPUSim,
		filepath.Join(dir, "nvidia-mig-parted"): filepath.Join(p.MIGParted, "nvidia-mig-parted"),
	})
}

// PathWith is the variable PATH of this process with dir in front.
func PathWith(dir string) string {
	return "PATH=" + dir + string(os.PathListSeparator) + os.Getenv("PATH")
}

// Host is a machine with simulated GPUs and NVIDIA's tools.
type Host struct {
	GPUs *gpusim.Node

	dir      string
	programs Programs
	pciNames string // file, if there is one
}

// NewHost makes a machine with the GPUs of the spec in dir, in place of the one that is there.
func NewHost(dir string, spec gpusim.Spec, p Programs) (*Host, error) {
	h := &Host{dir: dir, programs: p}
	var err error
	if h.GPUs, err = gpusim.Create(filepath.Join(dir, "gpus"), spec); err != nil {
		return nil, fmt.Errorf("making the GPUs of host %s: %w", dir, err)
	}
	if err := h.GPUs.RenderHost(h.files()); err != nil {
		return nil, fmt.Errorf("rendering host %s: %w", dir, err)
	}
	if err := link(map[string]string{filepath.Join(h.lib(), "libnvidia-ml.so.1"): p.LibNVML}); err != nil {
		return nil, err
	}
	if err := p.InstallTools(h.bin()); err != nil {
		return nil, err
	}
	return h, nil
}

// Close lets go of the GPUs. The directory stays.
func (h *Host) Close() error { return h.GPUs.Close() }

// NamePCIDevices gives the machine a pci.ids, of its GPUs alone. NVIDIA's programs read that file once for each GPU that they
// look at. Without it, they read their own copy, of every PCI device in the world. That is nine tenths of their work.
func (h *Host) NamePCIDevices() error {
	files, err := filepath.Glob(filepath.Join(h.files(), "sys/bus/pci/devices/*/device"))
	if err != nil {
		return err
	}
	text := "10de  NVIDIA Corporation\n"
	for _, file := range files {
		id, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("naming the GPUs of host %s: %w", h.dir, err)
		}
		text += fmt.Sprintf("\t%s  GPU\n", strings.TrimPrefix(strings.TrimSpace(string(id)), "0x"))
	}
	text += "C 03  Display controller\n\t02  3D controller\n"
	h.pciNames = filepath.Join(h.dir, "pci.ids")
	return os.WriteFile(h.pciNames, []byte(text), 0o600)
}

// Sandbox is where a program sees the GPUs, driver and buses as its own.
func (h *Host) Sandbox() sandbox.Options {
	o := sandbox.Options{
		Mounts: []sandbox.Mount{
			{Source: filepath.Join(h.files(), "proc", "driver"), Target: "/proc/driver"},
			{Source: filepath.Join(h.files(), "proc", "modules"), Target: "/proc/modules"},
			{Source: filepath.Join(h.files(), "sys", "bus", "pci"), Target: "/sys/bus/pci"},
			{Source: filepath.Join(h.files(), "sys", "devices"), Target: "/sys/devices"},
		},
		Env: []string{"GPUSIM_NODE=" + h.GPUs.Dir(), "LD_LIBRARY_PATH=" + h.lib(), PathWith(h.bin())},
	}
	if h.pciNames != "" {
		o.Mounts = append(o.Mounts, sandbox.Mount{Source: h.pciNames, Target: "/usr/share/misc/pci.ids"})
	}
	return o
}

// Command is a program of NVIDIA's on this machine: nvidia-mig-parted or nvidia-mig-manager.
func (h *Host) Command(ctx context.Context, program string, args ...string) *exec.Cmd {
	return sandbox.Command(ctx, h.programs.Sandbox, h.Sandbox(), filepath.Join(h.programs.MIGParted, program), args...)
}

// MIGParted runs nvidia-mig-parted and returns what it prints. The error has what it said on stderr.
func (h *Host) MIGParted(ctx context.Context, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := h.Command(ctx, "nvidia-mig-parted", args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("running nvidia-mig-parted %s: %w\n%s", strings.Join(args, " "), err, stderr.String())
	}
	return stdout.String(), nil
}

func (h *Host) files() string { return filepath.Join(h.dir, "host") }

func (h *Host) lib() string { return filepath.Join(h.dir, "lib") }

func (h *Host) bin() string { return filepath.Join(h.dir, "bin") }

// link makes symbolic links, by their names.
func link(links map[string]string) error {
	for name, target := range links {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return fmt.Errorf("making a directory for %s: %w", name, err)
		}
		if err := os.Remove(name); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("replacing %s: %w", name, err)
		}
		if err := os.Symlink(target, name); err != nil {
			return fmt.Errorf("installing %s: %w", name, err)
		}
	}
	return nil
}
