package offer

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// Every pod of NVIDIA's DRA driver has these, whatever its chart is called and however it is labelled.
const (
	driverContainer = "gpus"
	driverCommand   = "gpu-kubelet-plugin"
	driverRegistry  = "plugins_registry"
)

// specsFolder is where a DRA driver writes what a container runtime needs for a device (/var/run/cdi). Storage drivers register with kubelet too, and have none.
const specsFolder = "cdi"

// driverPods returns the pods of NVIDIA's DRA driver for GPUs that have not ended, those that are about to end last.
func driverPods(pods []corev1.Pod) []*corev1.Pod {
	var out, ending []*corev1.Pod
	for i := range pods {
		switch p := &pods[i]; {
		case state.Ended(p) || gpuDriver(p) == nil:
		case p.DeletionTimestamp != nil:
			ending = append(ending, p)
		default:
			out = append(out, p)
		}
	}
	return append(out, ending...)
}

// gpuDriver returns the container of the pod that runs NVIDIA's DRA driver for GPUs; nil if none does. Labels do not count: they depend on the name of the
// chart, and any user may set them.
func gpuDriver(pod *corev1.Pod) *corev1.Container {
	if !registers(pod) {
		return nil
	}
	for i := range pod.Spec.Containers {
		if c := &pod.Spec.Containers[i]; c.Name == driverContainer && startsDriver(c) {
			return c
		}
	}
	return nil
}

// NamesDriver reports whether the pod says that it starts NVIDIA's DRA driver for GPUs, or looks like another DRA driver. Any pod may say so: it costs the API
// server a watch, and has no other effect.
func NamesDriver(pod corev1.Pod) bool {
	return registers(&pod) && mounts(&pod, specsFolder) || slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return startsDriver(&c) })
}

// startsDriver reports whether the container's command names the driver's program.
func startsDriver(c *corev1.Container) bool {
	return slices.ContainsFunc(wordsOf(c), func(word string) bool { return path.Base(word) == driverCommand })
}

// registers reports whether the pod is of a DaemonSet, and mounts the folder where DRA drivers register with kubelet.
func registers(pod *corev1.Pod) bool {
	_, of := holders.DaemonSetOf(pod)
	return of && mounts(pod, driverRegistry)
}

// mounts reports whether the pod mounts a folder of the host with this name.
func mounts(pod *corev1.Pod, folder string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.HostPath != nil && path.Base(v.HostPath.Path) == folder })
}

// wordsOf are the words of a container's command, which may be a script for a shell.
func wordsOf(c *corev1.Container) []string {
	var out []string
	for _, text := range slices.Concat(c.Command, c.Args) {
		for word := range strings.FieldsSeq(text) {
			out = append(out, strings.Trim(word, `"';`))
		}
	}
	return out
}
