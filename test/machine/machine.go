// Package machine lets a program have a machine to itself: its own namespaces for mounts, network, processes and IPC. The machine has one address on
// loopback, an empty /run, /var/lib and /var/log, and an /etc that no one else sees written. When the program ends, however it ends, the kernel ends
// everything that it has started. The machine's mounts, links and addresses end with the namespaces.
//
// It knows neither containers nor Kubernetes. It cannot isolate cgroups: the program gets its own, which is removed when it
// has ended.
package machine

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/test/sandbox"
)

// Address is the machine's own. Kubelet takes none of 127.0.0.0/8 for its node.
const Address = "10.99.0.1"

// stageVariable says to the program how far it is inside: it starts itself twice.
const (
	stageVariable  = "GPUSLICE_MACHINE"
	stageInit      = "init"
	stageInside    = "inside"
	cgroupVariable = "GPUSLICE_MACHINE_CGROUP"
)

// emptied are directories that programs of a node write to at fixed paths.
var emptied = []string{"/run", "/var/lib", "/var/log"}

// Enter returns inside a machine. It belongs at the beginning of main or TestMain. Outside, it runs the same program again
// with the same arguments on its own machine, and then ends this process with that one's exit code.
func Enter() error {
	switch os.Getenv(stageVariable) {
	case stageInside:
		return nil
	case stageInit:
		code, err := boot()
		if err != nil {
			return err
		}
		os.Exit(code)
	}
	if err := Possible(); err != nil {
		return err
	}
	code, err := outside()
	if err != nil {
		return err
	}
	os.Exit(code)
	return nil
}

// Cgroup is the path of the machine's own cgroup in each hierarchy. Only a program inside has one.
func Cgroup() string { return os.Getenv(cgroupVariable) }

// Possible reports why this process can have no machine, in words a person can act on; nil means it can.
func Possible() error {
	if os.Geteuid() != 0 {
		return errors.New("this needs root, for namespaces, mounts and cgroups: run it as root")
	}
	if !sandbox.Privileged() {
		return errors.New("this needs CAP_SYS_ADMIN, which root in a container lacks: run the container privileged")
	}
	program, err := exec.LookPath("true")
	if err != nil {
		return fmt.Errorf("looking for a program to try namespaces with: %w", err)
	}
	probe := exec.Command(program)
	probe.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces}
	if err := probe.Run(); err != nil {
		return fmt.Errorf("this process can make no namespaces of its own (%w): run it as root of the host, or in a privileged container", err)
	}
	return nil
}

const namespaces = syscall.CLONE_NEWNS | syscall.CLONE_NEWNET | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS

// outside runs this program as the first process of new namespaces, and cleans up what no namespace holds.
func outside() (code int, err error) {
	group := cgroup(fmt.Sprintf("gpuslice-%d", os.Getpid()))
	if err := group.create(); err != nil {
		return 0, errors.Join(err, group.remove())
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM) // they end the machine first, and this process by its end
	cmd := self(stageInit)
	cmd.Env = append(cmd.Env, cgroupVariable+"=/"+string(group))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: namespaces, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	runtime.LockOSThread() // the end of this thread is what kills the machine, not that of the process
	if err := cmd.Start(); err != nil {
		return 0, errors.Join(fmt.Errorf("starting a machine: %w", err), group.remove())
	}
	over := make(chan struct{})
	go func() {
		for {
			select {
			case <-interrupts:
				_ = cmd.Process.Kill() // it may have ended in the meantime
			case <-over:
				return
			}
		}
	}()
	err = cmd.Wait()
	close(over)
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitCode(), nil
	}
	if code < 0 {
		code = 1 // a signal ended it
	}
	return code, errors.Join(err, group.remove())
}

// self is this program once more, at another stage.
func self(stage string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), stageVariable+"="+stage)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd
}

// boot is what the first process of the machine does: it sets up what a host has, runs the program, and buries orphans until
// the program ends. Its own end is the machine's.
func boot() (code int, err error) {
	if err := mounts(); err != nil {
		return 0, err
	}
	if err := loopback(); err != nil {
		return 0, err
	}
	cmd := self(stageInside)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("starting the program on its machine: %w", err)
	}
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("waiting for the program of the machine: %w", err)
		case pid != cmd.Process.Pid:
		case status.Signaled():
			return 128 + int(status.Signal()), nil
		case status.Exited():
			return status.ExitStatus(), nil
		}
	}
}

func mounts() error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private to the machine: %w", err)
	}
	// As on a host: what kubelet mounts for a pod, its containers see.
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("making mounts shared within the machine: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting the machine's /proc: %w", err)
	}
	for _, dir := range emptied {
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
			return fmt.Errorf("mounting an empty %s: %w", dir, err)
		}
	}
	return ownEtc()
}

// ownEtc lets programs of the machine write to /etc, and does not change the /etc outside.
func ownEtc() error {
	const written, work = "/var/lib/.etc/written", "/var/lib/.etc/work"
	for _, dir := range []string{written, work} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("making the machine's /etc: %w", err)
		}
	}
	if err := unix.Mount("overlay", "/etc", "overlay", 0, "lowerdir=/etc,upperdir="+written+",workdir="+work); err != nil {
		return fmt.Errorf("mounting the machine's /etc: %w", err)
	}
	return nil
}

// loopback brings lo up and gives it the machine's address.
func loopback() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("setting up loopback: %w", err)
	}
	defer func() { _ = unix.Close(socket) }() // nothing is written to it
	up, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("setting up loopback: %w", err)
	}
	up.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, up); err != nil {
		return fmt.Errorf("bringing loopback up: %w", err)
	}
	return AddAddress("lo:1", netip.MustParseAddr(Address)) // beside 127.0.0.1, which comes with "up"
}

// AddAddress gives loopback another IPv4 address, under a name like "lo:2".
func AddAddress(name string, address netip.Addr) error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("giving loopback the address %s: %w", address, err)
	}
	defer func() { _ = unix.Close(socket) }() // nothing is written to it
	alias, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("giving loopback the address %s: %w", address, err)
	}
	if err := alias.SetInet4Addr(address.AsSlice()); err != nil {
		return fmt.Errorf("giving loopback the address %s: %w", address, err)
	}
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFADDR, alias); err != nil {
		return fmt.Errorf("giving loopback the address %s: %w", address, err)
	}
	return nil
}
