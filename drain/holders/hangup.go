package holders

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders/openfiles"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Hangup sends SIGHUP, on which daemons read their config anew, to every process of the pods whose command, as the kernel
// names it, is one of commands. The kernel keeps the first 15 bytes of a command, and so many count here. It returns the processes that
// got the signal. A command alone is not enough: many nodes run a program of the same name twice.
//
// A process that ends meanwhile is none. The error is of the first process that Hangup could not read or signal; the others
// get the signal all the same.
func (p Processes) Hangup(ctx context.Context, pods []types.UID, commands []string) ([]Client, error) {
	pids, err := openfiles.Numbers(p.root())
	if err != nil {
		return nil, fmt.Errorf("looking for the processes of pods: %w", err)
	}
	var told []Client
	var failed error
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return told, fmt.Errorf("looking for the processes of pods: %w", err)
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
			told = append(told, c)
		case !errors.Is(err, os.ErrProcessDone) && failed == nil:
			failed = fmt.Errorf("sending SIGHUP to %s of pod %s: %w", c.process(), c.PodUID, err)
		}
	}
	return told, failed
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
// The pod may have anything mounted there, so a look that does not end before ctx is abandoned; see Holders.
func (p Processes) FileOf(ctx context.Context, pod types.UID, command, path string) (bool, error) {
	what := fmt.Sprintf("looking for %s in pod %s", path, pod)
	return aside.Do(ctx, &p.lanes().files, what, func(context.Context, aside.At) (bool, error) { return p.fileOf(pod, command, path) })
}

func (p Processes) fileOf(pod types.UID, command, path string) (bool, error) {
	pids, err := openfiles.Numbers(p.root())
	if err != nil {
		return false, fmt.Errorf("looking for the processes of pods: %w", err)
	}
	for _, pid := range pids {
		c := Client{PID: pid}
		if p.identify(&c) != nil || c.PodUID != pod || !commandIn(c.Command, []string{command}) {
			continue
		}
		_, err := os.Stat(filepath.Join(p.root(), strconv.Itoa(pid), "root", path))
		switch {
		case err == nil:
			return true, nil
		case !openfiles.Gone(err):
			return false, fmt.Errorf("looking for %s in pod %s: %w", path, pod, err)
		}
		return false, nil
	}
	return false, fmt.Errorf("looking for %s in pod %s: %w", path, pod, errNoProcess)
}

var errNoProcess = errors.New("no such process; the agent's pod needs hostPID: true")
