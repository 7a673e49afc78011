package state

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
)

// WithholdsRecovered reports whether the agent has to restart a device plugin, which runs under this strategy, so that it offers a GPU again which has
// recovered.
func (s *Observed) WithholdsRecovered(under config.MIGStrategy) bool {
	return slices.ContainsFunc(s.KubeletPlugins(), func(p corev1.Pod) bool { return s.withholds(&p, under) })
}

// withholds reports whether the device plugin's pod started before a GPU recovered, and kubelet does not give out all of that GPU. NVIDIA's
// device plugin takes a GPU that has had an error for unhealthy until the plugin starts again.
func (s *Observed) withholds(plugin *corev1.Pod, under config.MIGStrategy) bool {
	began, runs := startOf(plugin)
	if !runs || s.Kubelet.Err != nil {
		return false
	}
	for _, g := range s.GPUs {
		at, has := s.Recovered[g.UUID]
		if has && began.Before(at) && capacity.Withheld(g, under, s.Offered()) {
			return true
		}
	}
	return false
}

// startOf returns when the first of the pod's running containers started; false if none runs, or the pod is about to end.
func startOf(pod *corev1.Pod) (began time.Time, runs bool) {
	for _, c := range pod.Status.ContainerStatuses {
		if r := c.State.Running; r != nil && (!runs || r.StartedAt.Time.Before(began)) {
			began, runs = r.StartedAt.Time, true
		}
	}
	return began, runs && pod.DeletionTimestamp == nil
}
