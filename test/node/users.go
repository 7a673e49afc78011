package node

import (
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	// firstPID is above what Linux gives to real processes, so that no tool takes a simulated one for one of them.
	firstPID = 5_000_000
	// usedMiB is what a pod's program holds on its GPU.
	usedMiB = 512
)

// users let a program of each GPU pod hold its device, so that the simulated driver refuses to destroy what a pod still
// uses, as the real one does.
type users struct {
	gpus *gpusim.Node

	mu   sync.Mutex
	pids map[string]int // by pod UID and device
	next int
	errs []error
}

func (u *users) hold(pod *corev1.Pod, ids []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, id := range ids {
		device, _, _ := strings.Cut(id, "::")
		pid := u.next
		u.next++
		u.pids[string(pod.UID)+id] = pid
		if err := u.gpus.Hold(device, pid, pod.Name, usedMiB); err != nil {
			u.errs = append(u.errs, fmt.Errorf("pod %s/%s on %s: %w", pod.Namespace, pod.Name, device, err))
		}
	}
}

func (u *users) release(pod *corev1.Pod, ids []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, id := range ids {
		key := string(pod.UID) + id
		if err := u.gpus.Release(u.pids[key]); err != nil {
			u.errs = append(u.errs, fmt.Errorf("pod %s/%s leaving %s: %w", pod.Namespace, pod.Name, id, err))
		}
		delete(u.pids, key)
	}
}
