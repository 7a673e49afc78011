package realkubelet

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Processes are the processes of the pod's containers, without the one that keeps its namespaces.
func (k *Kubelet) Processes(ctx context.Context, pod *corev1.Pod) ([]int, error) {
	sandbox, err := k.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	return processes(func(pid int) bool {
		group := cgroupOf(pid)
		return strings.Contains(group, "/pod"+string(pod.UID)+"/") && !slices.ContainsFunc(sandbox, func(id string) bool { return strings.HasSuffix(group, id) })
	})
}

// sandboxes are the ids of the containers that keep the namespaces of pods.
func (k *Kubelet) sandboxes(ctx context.Context) ([]string, error) {
	out, err := k.ctr(ctx, "containers", "list", "-q", `labels."io.cri-containerd.kind"==sandbox`)
	if err != nil {
		return nil, err
	}
	return strings.Fields(out), nil
}

// killContainers ends the processes of all pods, and the shims that look after them.
func (k *Kubelet) killContainers(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	shim := filepath.Join(k.Runtime, "containerd-shim-runc-v2")
	return wait.PollUntilContextCancel(ctx, pollEvery, true, func(context.Context) (bool, error) {
		left, err := processes(func(pid int) bool {
			exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			return err == nil && (exe == shim || strings.Contains(cgroupOf(pid), "/kubepods/"))
		})
		for _, pid := range left {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return false, fmt.Errorf("killing process %d: %w", pid, err)
			}
		}
		return len(left) == 0, err
	})
}

// processes lists those of the machine that are wanted.
func processes(wanted func(pid int) bool) ([]int, error) {
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	var all []int
	for _, dir := range dirs {
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil && wanted(pid) {
			all = append(all, pid)
		}
	}
	return all, nil
}

// cgroupOf is the path of a process's cgroup in the first hierarchy where it is not in the root; "" if it has ended.
func cgroupOf(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.SplitN(strings.TrimSpace(line), ":", 3); len(fields) == 3 && strings.Contains(fields[2], "/kubepods") {
			return fields[2]
		}
	}
	return ""
}

// unmountBelow unmounts everything on the paths and below them, innermost first.
func unmountBelow(paths ...string) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	var targets []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		const mountPoint = 4
		fields := strings.Fields(lines.Text())
		if len(fields) <= mountPoint {
			continue
		}
		if slices.ContainsFunc(paths, func(path string) bool { return strings.HasPrefix(fields[mountPoint]+"/", path+"/") }) {
			targets = append(targets, fields[mountPoint])
		}
	}
	for _, target := range slices.Backward(targets) {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: it went with another
			return fmt.Errorf("unmounting %s: %w", target, err)
		}
	}
	return nil
}
