package holders

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders/openfiles"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Hangup sends SIGHUP, which makes daemons read their config again, to every process of the pods with one of these commands, in the kernel's
// spelling. The kernel keeps the first 15 bytes of a command, and so many count here. It returns the processes that got the signal. A command alone
// is not enough: many nodes run a program of the same name twice.
//
// A process that ends before its signal is none. The error is of the first process that Hangup could not read or signal; the others still get the
// signal.
func (p Processes) Hangup(ctx context.Context, pods []types.UID, commands []string) ([]Client, error) {
	pids, err := openfiles.Numbers(p.root())
	if err != nil {
		return nil, fmt.Errorf("looking for the processes of pods: %w", err)
	}
	var signaled []Client
	var failed error
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return signaled, fmt.Errorf("looking for the processes of pods: %w", err)
		}
		c := Client{PID: pid}
		is := func() bool {
			return p.identify(&c) == nil && commandIn(c.Command, commands) && slices.Contains(pods, c.PodUID)
		}
		if !is() {
			continue
		}
		switch err := p.signal(pid, is); {
		case err == nil:
			signaled = append(signaled, c)
		case !errors.Is(err, os.ErrProcessDone) && failed == nil:
			failed = fmt.Errorf("sending SIGHUP to %s of pod %s: %w", c.process(), c.PodUID, err)
		}
	}
	return signaled, failed
}

// signal sends SIGHUP to a process that still is the one which was found: the kernel may have given its pid to another since. A handle of
// it is taken before the check, so that the pid cannot go to another in between.
func (p Processes) signal(pid int, is func() bool) error {
	if p.Signal != nil {
		return p.Signal(pid, unix.SIGHUP)
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	defer process.Release() //nolint:errcheck // no caller could react to it
	if !is() {
		return os.ErrProcessDone
	}
	return process.Signal(unix.SIGHUP)
}

// maxCommand is how much of a command the kernel keeps.
const maxCommand = 15

func commandIn(command string, commands []string) bool {
	return slices.ContainsFunc(commands, func(name string) bool { return name[:min(len(name), maxCommand)] == command })
}

// FileOf reports whether a process of the pod has the file, as the process itself sees it. Without the rights to look it is an error.
// The pod may have anything mounted there, so an observation that does not end before ctx is abandoned; see Holders.
func (p Processes) FileOf(ctx context.Context, pod types.UID, command, path string) (bool, error) {
	what := fmt.Sprintf("looking for %s in pod %s", path, pod)
	return aside.Do(ctx, &p.lanes().files, what, func(ctx context.Context, _ aside.At) (bool, error) { return p.fileOf(ctx, pod, command, path) })
}

func (p Processes) fileOf(ctx context.Context, pod types.UID, command, path string) (bool, error) {
	process, err := p.processOf(ctx, pod, command)
	if err != nil {
		return false, fmt.Errorf("looking for %s in pod %s: %w", path, pod, err)
	}
	_, err = os.Stat(filepath.Join(process, "root", path))
	if err != nil && !openfiles.Gone(err) {
		return false, fmt.Errorf("looking for %s in pod %s: %w", path, pod, err)
	}
	return err == nil, nil
}

// processOf returns the folder of the process table for the first process of the pod with this command.
func (p Processes) processOf(ctx context.Context, pod types.UID, command string) (string, error) {
	pids, err := openfiles.Numbers(p.root())
	if err != nil {
		return "", err
	}
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		process := filepath.Join(p.root(), strconv.Itoa(pid))
		name, err := openfiles.Read(filepath.Join(process, "comm")) // first, since it rules out most processes
		if err != nil || !commandIn(strings.TrimSuffix(name, "\n"), []string{command}) {
			continue
		}
		if c := (Client{PID: pid}); p.identify(&c) == nil && c.PodUID == pod {
			return process, nil
		}
	}
	return "", ErrNoProcess
}

// ErrNoProcess is matched by errors about a pod that has no process with the command, as far as the agent can see.
var ErrNoProcess = errors.New("no such process; the agent's pod needs hostPID: true")

// Listeners returns the paths of the Unix sockets that are listened on in the network namespace of the pod's process with this command, as a device
// plugin does for kubelet. Without the rights to look it is an error, as with a namespace that has too many sockets to be a pod's own. An observation
// that does not end before ctx is abandoned; see Holders.
func (p Processes) Listeners(ctx context.Context, pod types.UID, command string) ([]string, error) {
	what := fmt.Sprintf("looking for the Unix sockets of pod %s", pod)
	return aside.Do(ctx, &p.lanes().sockets, what, func(ctx context.Context, _ aside.At) ([]string, error) {
		process, err := p.processOf(ctx, pod, command)
		var table string
		if err == nil {
			table, err = openfiles.Read(filepath.Join(process, "net", "unix"))
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		var paths []string
		for line := range strings.Lines(table) {
			if path := listenedPath(line); path != "" {
				paths = append(paths, path)
			}
		}
		return paths, nil
	})
}

// listenedPath reads a line of /proc/net/unix: "Num RefCount Protocol Flags Type St Inode Path", with the flags in hexadecimal digits. It returns the
// path of a socket that is listened on; empty for another. An abstract name in place of a path begins with an @; a socket without a name has none.
func listenedPath(line string) string {
	const accepts = 1 << 16 // __SO_ACCEPTCON of the kernel's linux/net.h: it listens
	fields := strings.Fields(line)
	if len(fields) < 8 || !strings.HasPrefix(fields[7], "/") {
		return ""
	}
	if flags, err := strconv.ParseUint(fields[3], 16, 64); err != nil || flags&accepts == 0 {
		return ""
	}
	return fields[7]
}
