// Package pods shows the pods of a simulated node as processes on its simulated GPUs. It knows pods and device ids, and
// neither the kubelet that gives out the devices nor the plugin that offers them.
package pods

import (
	"hash/fnv"
	"strings"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	// firstPID is above what Linux gives to real processes, so that no tool takes a simulated one for one of them.
	firstPID = 5_000_000
	// usedMiB is what a pod's program holds on each device.
	usedMiB = 512
)

// Users has each device of a pod held by a process, so that the simulated driver refuses to destroy what a pod uses.
type Users struct {
	GPUs *gpusim.Node
	Log  *zap.Logger
}

// Hold puts a process of the pod on each device. The ids are the device plugin's.
func (u Users) Hold(pod *corev1.Pod, ids []string) {
	for _, id := range ids {
		device, _, _ := strings.Cut(id, "::") // a share of a device is held like the whole
		_ = u.GPUs.Release(pidOf(pod, id))    // it is held already if the pod survived its kubelet
		if err := u.GPUs.Hold(device, pidOf(pod, id), pod.Name, usedMiB); err != nil {
			u.Log.Warn("pod not shown on its device", zap.String("pod", pod.Namespace+"/"+pod.Name), zap.Error(err))
		}
	}
}

// Release takes the pod's processes off its devices.
func (u Users) Release(pod *corev1.Pod, ids []string) {
	for _, id := range ids {
		if err := u.GPUs.Release(pidOf(pod, id)); err != nil {
			u.Log.Warn("pod not taken off its device", zap.String("pod", pod.Namespace+"/"+pod.Name), zap.Error(err))
		}
	}
}

// pidOf is the same for a pod and device in every kubelet, so that the next one can release what the last one held.
func pidOf(pod *corev1.Pod, id string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(string(pod.UID) + id)) // a hash takes everything
	return firstPID + int(h.Sum32()%1_000_000_000)
}
