// Package pods shows the pods of a simulated node as processes on its simulated GPUs, and in a simulated process table.
// It knows pods and device ids, but neither the kubelet that allocates the devices nor the plugin that advertises them.
package pods

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

const (
	// firstPID is above what Linux gives to real processes, so that no tool takes a simulated one for one of them.
	firstPID = 5_000_000
	// usedMiB is what a program holds on each device.
	usedMiB = 512
)

// Users makes a process hold each device of a pod, so that the simulated driver refuses to destroy devices that pods
// use.
type Users struct {
	GPUs  *gpusim.Node
	Table *Table // where the processes are seen besides; nowhere if nil
	// DeviceOf is the UUID of a device that a pod has by a claim, by its "driver/pool/device"; nil where none has.
	DeviceOf func(id string) string
	Log      *zap.Logger
}

// Hold puts a process of the pod on each device. The ids are the device plugin's, or those of devices by claims.
func (u Users) Hold(pod *corev1.Pod, ids []string) {
	for _, id := range ids {
		device, _, _ := strings.Cut(id, "::") // a share of a device is held like the whole
		if u.DeviceOf != nil && strings.Contains(id, "/") {
			device = u.DeviceOf(id)
		}
		_ = u.GPUs.Release(pidOf(pod, id)) // it is held already if the pod survived its kubelet
		if err := u.Start(Process{PID: pidOf(pod, id), Command: pod.Name, Cgroup: OfPod(pod)}, device); err != nil {
			u.Log.Warn("pod not shown on its device", zap.String("pod", pod.Namespace+"/"+pod.Name), zap.Error(err))
		}
	}
}

// Grow has the process of the pod on a device, by the device plugin's id, use so much memory there.
func (u Users) Grow(pod *corev1.Pod, id string, mib int) error {
	return u.GPUs.Use(pidOf(pod, id), mib)
}

// Busy has the process of the pod on a device, by the device plugin's id, compute for so many percent of the time.
func (u Users) Busy(pod *corev1.Pod, id string, percent int) error {
	return u.GPUs.Busy(pidOf(pod, id), percent)
}

// Release takes the pod's processes off its devices.
func (u Users) Release(pod *corev1.Pod, ids []string) {
	for _, id := range ids {
		if err := u.End(pidOf(pod, id)); err != nil {
			u.Log.Warn("pod not taken off its device", zap.String("pod", pod.Namespace+"/"+pod.Name), zap.Error(err))
		}
	}
}

// Start has a process compute on devices, GPUs and MIG devices by their UUIDs, with their files open: one of a pod, of the
// host, or of no one.
func (u Users) Start(p Process, devices ...string) error {
	// It is in the table before NVML reports it, and until NVML does no more, as a process of a real host.
	if err := u.show(p, devices); err != nil {
		return err
	}
	for _, device := range devices {
		if err := u.compute(p, device); err != nil {
			return errors.Join(err, u.hide(p.PID))
		}
	}
	return nil
}

// compute puts a process on a device. If the compute mode admits only one process, that one is the server of MPS. The
// process is then a client of it, as in a pod that the device plugin has pointed to the server.
func (u Users) compute(p Process, device string) error {
	mode, err := u.GPUs.ComputeMode(device)
	if err != nil {
		return err
	}
	if mode == "EXCLUSIVE_PROCESS" {
		return u.GPUs.HoldAsMPSClient(device, p.PID, p.Command, usedMiB)
	}
	return u.GPUs.Hold(device, p.PID, p.Command, usedMiB)
}

// StartMonitor makes a process watch devices. It has their files open, which keeps a GPU from being reset, and computes
// nothing, so NVML does not report it.
func (u Users) StartMonitor(p Process, devices ...string) error {
	if err := u.show(p, devices); err != nil {
		return err
	}
	for _, device := range devices {
		if err := u.GPUs.HoldHidden(device, p.PID, p.Command); err != nil {
			return errors.Join(err, u.hide(p.PID))
		}
	}
	return nil
}

// Open shows, in the table alone, a process that has the files of devices open. The process is real: the GPUs know it
// already if it holds them.
func (u Users) Open(p Process, devices ...string) {
	if err := u.show(p, devices); err != nil {
		u.Log.Warn("process not shown in the table", zap.Int("pid", p.PID), zap.Error(err))
	}
}

// Close removes it from the table. It need not be there.
func (u Users) Close(pid int) {
	if err := u.hide(pid); err != nil {
		u.Log.Warn("process not taken out of the table", zap.Int("pid", pid), zap.Error(err))
	}
}

// End ends a process that was started.
func (u Users) End(pid int) error { return errors.Join(u.GPUs.Release(pid), u.hide(pid)) }

func (u Users) show(p Process, devices []string) error {
	if u.Table == nil {
		return nil
	}
	if len(devices) > 0 {
		p.Files = append([]string{"/dev/nvidiactl", "/dev/nvidia-uvm"}, p.Files...)
	}
	for _, device := range devices {
		gpu, ok := u.GPUs.GPUOf(device)
		if !ok {
			return fmt.Errorf("starting process %d: no GPU has the device %s", p.PID, device)
		}
		p.Files = append(p.Files, fmt.Sprintf("/dev/nvidia%d", gpu))
	}
	return u.Table.Add(p)
}

func (u Users) hide(pid int) error {
	if u.Table == nil {
		return nil
	}
	return u.Table.Remove(pid)
}

// pidOf is the same for a pod and device in every kubelet, so that the next one can release what the last one held.
func pidOf(pod *corev1.Pod, id string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(string(pod.UID) + id)) // a hash takes everything
	return firstPID + int(h.Sum32()%1_000_000_000)
}
