package state

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// HasOutdatedPlugin reports whether the agent has to restart a device plugin, which runs under this strategy, so that it offers the GPUs as they are.
func (s *Observed) HasOutdatedPlugin(under config.MIGStrategy) bool {
	return slices.ContainsFunc(s.KubeletPlugins(), func(p corev1.Pod) bool { return s.isOutdated(&p, under) })
}

// isOutdated reports whether the device plugin's pod started before a GPU recovered, and withholds that GPU: NVIDIA's device plugin takes a GPU that has had an
// error for unhealthy until the plugin starts again. So it does if the pod has offered for long what is gone.
func (s *Observed) isOutdated(plugin *corev1.Pod, under config.MIGStrategy) bool {
	began, runs := startOf(plugin)
	if !runs || s.Kubelet.Err != nil {
		return false
	}
	if began.Before(s.Outdated) && s.OffersGone() {
		return true
	}
	if !s.Owner.MayCut() || !s.Owner.ByClaims() && !s.TakesDevicesForUnhealthy() {
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

// OffersGone reports whether the device plugin offers MIG devices that are gone, or as a whole a GPU in MIG mode: it read the GPUs before they were cut.
// A plugin that runs under another MIG strategy offers whole GPUs, too, so that these count only where its strategy is known. Nothing counts while a GPU
// is lost, or where another program cuts the GPUs.
func (s *Observed) OffersGone() bool {
	if s.Kubelet.Err != nil || !s.Owner.MayCut() || slices.ContainsFunc(s.GPUs, func(g nvml.GPU) bool { return g.Lost }) {
		return false
	}
	exists, isCut := map[string]bool{}, map[string]bool{}
	for _, g := range s.GPUs {
		isCut[string(g.UUID)] = g.Enabled
		for _, i := range g.Instances {
			for _, d := range i.Devices {
				exists[d.UUID] = true
			}
		}
	}
	under := s.Capacity.Strategy
	parts := s.Owner.ByClaims() || under != config.MIGStrategyNone && s.ExplicitStrategy() == under
	for _, ids := range capacity.Offered(s.Offered()) {
		if slices.ContainsFunc(capacity.Physical(ids), func(id string) bool {
			return strings.HasPrefix(id, plan.MIGDeviceID) && !exists[id] || parts && isCut[id]
		}) {
			return true
		}
	}
	return false
}

// TakesDevicesForUnhealthy reports whether the device plugin has reported to kubelet of a device that it is unhealthy: kubelet counts such a device in the
// node's capacity, and not in what pods may have. After a restart of kubelet it counts none of a plugin that has not registered again.
func (s *Observed) TakesDevicesForUnhealthy() bool {
	for name, all := range s.Node.Status.Capacity {
		if !nvml.GPUResource(string(name)) {
			continue
		}
		if usable := s.Node.Status.Allocatable[name]; usable.Cmp(all) < 0 {
			return true
		}
	}
	return false
}
