// Package sandbox runs a host program in its own mount namespace. Files and directories of a test stand there at fixed
// paths of the system: a simulated /proc/driver, /sys/bus/pci or /var/lib/kubelet. Nothing of it is seen outside.
//
// It knows neither GPUs nor Kubernetes. A program starts through the command in cmd/sandbox, which sets up the mounts and
// then becomes the program, so that process id, signals and exit status are the program's own.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Mount shows a file or directory of this machine at another path.
type Mount struct {
	Source string // absolute path of what is shown
	Target string // absolute path where the program sees it; it need not exist outside the sandbox
}

// Options say what the program sees.
type Options struct {
	Mounts []Mount  // in this order; all sources are taken before anything is mounted
	Tmpfs  []string // directories that are empty and writable for the program; they come before the mounts
	Env    []string // "KEY=value", added to the environment of this process
	Argv0  string   // the name that the program is to have, which others see in /proc; its path if empty
}

// Command returns the command that runs the named program in a sandbox. The file sandboxBinary is cmd/sandbox of this
// package, built; name is looked up in PATH outside the sandbox.
//
// What only Start can find out is reported by Start; Possible says beforehand whether the machine allows any of it.
// The process group, signals and streams are set on the returned command as on any other.
func Command(ctx context.Context, sandboxBinary string, o Options, name string, args ...string) *exec.Cmd {
	program, err := exec.LookPath(name)
	if err == nil {
		program, err = filepath.Abs(program)
	}
	cmd := exec.CommandContext(ctx, sandboxBinary, append(append(o.flags(), "--", program), args...)...)
	cmd.Env = append(os.Environ(), o.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if !Privileged() {
		ownUserNamespace(cmd.SysProcAttr)
	}
	if err = errors.Join(err, o.Validate()); err != nil && cmd.Err == nil {
		cmd.Err = err
	}
	return cmd
}

// Validate reports paths that are not absolute, or that the command line of the sandbox cannot carry.
func (o Options) Validate() error {
	var errs []error
	for _, m := range o.Mounts {
		errs = append(errs, validPath("source", m.Source), validPath("target", m.Target))
	}
	for _, dir := range o.Tmpfs {
		errs = append(errs, validPath("tmpfs", dir))
	}
	return errors.Join(errs...)
}

func validPath(field, path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s %q of a sandbox is not an absolute path", field, path)
	}
	if strings.Contains(path, "=") {
		return fmt.Errorf("%s %q of a sandbox contains =, which separates source and target", field, path)
	}
	return nil
}

func (o Options) flags() []string {
	var flags []string
	for _, dir := range o.Tmpfs {
		flags = append(flags, "--tmpfs="+dir)
	}
	for _, m := range o.Mounts {
		flags = append(flags, "--bind="+m.Source+"="+m.Target)
	}
	if o.Argv0 != "" {
		flags = append(flags, "--argv0="+o.Argv0)
	}
	return flags
}

// ownUserNamespace makes the process root of a user namespace where only this user exists. This allows an ordinary user
// to mount.
func ownUserNamespace(attr *syscall.SysProcAttr) {
	attr.Cloneflags |= syscall.CLONE_NEWUSER
	attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
}

// Privileged reports whether this process may mount without its own user namespace.
func Privileged() bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return false
	}
	return sets[0].Effective&(1<<unix.CAP_SYS_ADMIN) != 0
}

// Possible reports why this process cannot run programs in a sandbox, in words a person can act on; nil means it can.
func Possible() error {
	probe, err := exec.LookPath("true")
	if err != nil {
		return fmt.Errorf("looking for a program to try a sandbox with: %w", err)
	}
	cmd := exec.Command(probe)
	// With this flag the runtime also remounts / as private, so the probe tries a mount and not the namespaces alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if !Privileged() {
		ownUserNamespace(cmd.SysProcAttr)
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("this process can make no mount namespace (%w): %s", err, remedy())
	}
	return nil
}

// remedy names the switch that most likely forbids user namespaces.
func remedy() string {
	for _, s := range []struct{ file, forbids, say string }{
		{"/proc/sys/user/max_user_namespaces", "0", "run `sysctl user.max_user_namespaces=10000` as root"},
		{"/proc/sys/kernel/unprivileged_userns_clone", "0", "run `sysctl kernel.unprivileged_userns_clone=1` as root"},
		{"/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "run `sysctl kernel.apparmor_restrict_unprivileged_userns=0` as root"},
	} {
		value, err := os.ReadFile(s.file)
		if err == nil && strings.TrimSpace(string(value)) == s.forbids {
			return s.say + ", or run this as root"
		}
	}
	return "run this as root with CAP_SYS_ADMIN (in a container: privileged), or where ordinary users may make user namespaces"
}
