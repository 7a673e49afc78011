package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// machine is this machine with its GPUs, or with simulated ones.
type machine struct {
	simulated bool
	programs  tree
	dir       string // of the run: all that it writes is in it
	self      string // this program
	log       *zap.Logger

	driver     *guard
	smi        string          // nvidia-smi
	driverRoot string          // where NVIDIA's driver is; empty for the machine's own root
	env        []string        // of programs that use the GPUs, beside their own
	mounts     []sandbox.Mount // what NVIDIA's programs see at other paths
	pciDevices string
	kernelLog  string
	bootID     string

	gpus *gpusim.Node // simulated ones
	pipe *os.File     // that stands for their kernel's log
}

// machine finds the GPUs.
func (o options) machine(programs, dir string) (*machine, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("looking for this program: %w", err)
	}
	log, err := logTo(filepath.Join(dir, "agent.log"))
	if err != nil {
		return nil, err
	}
	m := &machine{simulated: o.simulated, programs: tree(programs), dir: dir, self: self, log: log}
	if o.simulated {
		err = m.simulate(o.gpus)
	} else {
		err = m.find()
	}
	if err != nil {
		return nil, err
	}
	m.driver = &guard{reader: lib.Open(lib.Options{DriverRoot: m.driverRoot, Logger: log})}
	return m, nil
}

func logTo(file string) (*zap.Logger, error) {
	logs := zap.NewDevelopmentConfig()
	logs.OutputPaths = []string{file}
	return logs.Build()
}

// passedOn are variables of this process that programs need to find NVIDIA's libraries.
var passedOn = []string{"LD_LIBRARY_PATH", "PATH"}

// find finds what this machine has.
func (m *machine) find() error {
	var err error
	if m.smi, err = exec.LookPath("nvidia-smi"); err != nil {
		return fmt.Errorf("looking for NVIDIA's driver: %w; on a machine without a GPU, run with --simulated", err)
	}
	for _, name := range passedOn {
		if value := os.Getenv(name); value != "" {
			m.env = append(m.env, name+"="+value)
		}
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("reading the id of this boot: %w", err)
	}
	m.bootID = string(boot[:len(boot)-1])
	m.pciDevices, m.kernelLog = "/sys/bus/pci/devices", "/dev/kmsg"
	return nil
}

// simulate makes the GPUs and what the machine shows of them.
func (m *machine) simulate(gpus string) error {
	spec, err := gpusim.ParseSpec([]byte(gpus))
	if err != nil {
		return err
	}
	node := filepath.Join(m.dir, "gpus")
	if m.gpus, err = gpusim.Create(node, spec); err != nil {
		return err
	}
	host := filepath.Join(m.dir, "host")
	if err := m.gpus.RenderHost(host); err != nil {
		return err
	}
	m.driverRoot = filepath.Join(m.dir, "driver")
	libraries := filepath.Join(m.driverRoot, "usr", "lib64")
	m.smi = filepath.Join(m.driverRoot, "usr", "bin", "nvidia-smi")
	err = m.gpus.RenderDriver(m.driverRoot, m.programs.simulated("libnvidia-ml.so.1"), m.programs.simulated("gpusim"))
	if err == nil {
		err = os.Symlink(m.programs.simulated("libcuda.so.1"), filepath.Join(libraries, "libcuda.so.1"))
	}
	if err != nil {
		return fmt.Errorf("installing the simulated driver: %w", err)
	}
	m.kernelLog = filepath.Join(m.dir, "kmsg")
	if m.pipe, err = makePipe(m.kernelLog); err != nil {
		return fmt.Errorf("making the kernel's log: %w", err)
	}
	m.bootID, m.pciDevices = m.gpus.BootID(), filepath.Join(host, "sys", "bus", "pci", "devices")
	m.mounts = []sandbox.Mount{{Source: filepath.Join(host, "proc", "driver"), Target: "/proc/driver"}}
	m.env = []string{"GPUSIM_NODE=" + node, "GPUSIM_KERNEL_LOG=" + m.kernelLog, "LD_LIBRARY_PATH=" + libraries, "PATH=" + filepath.Dir(m.smi) + ":/usr/bin:/bin"}
	return os.Setenv("GPUSIM_NODE", node) // for the library in this process
}

// makePipe makes a pipe that keeps separate writes apart, and is open for as long as this process has it.
func makePipe(path string) (*os.File, error) {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, err
	}
	pipe, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if err == nil {
		_, err = unix.FcntlInt(pipe.Fd(), unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK)
	}
	return pipe, err
}

func (m *machine) close() {
	_ = m.log.Sync() // a file that is not synced is there all the same
	if m.gpus != nil {
		_ = errors.Join(m.gpus.Close(), m.pipe.Close()) // the directory goes, or is kept as it is
	}
}

// program is one that uses a GPU, not yet started. It ends with ctx, or with this process.
func (m *machine) program(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, name, args...)
	c.Env = append(os.Environ(), m.env...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return c
}
