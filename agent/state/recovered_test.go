package state_test

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestAPluginIsRestartedForWhatHasRecoveredSinceItBegan(t *testing.T) {
	t.Parallel()
	recovered := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	since := func(d time.Duration) corev1.ContainerStatus {
		return corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(recovered.Add(d))}}}
	}
	observe := func(change func(*state.Observed)) *state.Observed {
		s := &state.Observed{
			GPUs:         []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Index: 1}},
			Recovered:    map[nvml.UUID]time.Time{"GPU-b": recovered},
			Kubelet:      state.Kubelet{Offered: capacity.Resources{nvml.ResourceGPU: {"GPU-a::0", "GPU-a::1"}}},
			DevicePlugin: state.DevicePlugin{Pods: []corev1.Pod{{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{since(time.Hour), since(-time.Hour)}}}}},
		}
		change(s)
		return s
	}
	for name, c := range map[string]struct {
		change func(*state.Observed)
		want   bool
	}{
		"it withholds the GPU":               {func(*state.Observed) {}, true},
		"it offers the GPU":                  {func(s *state.Observed) { s.Kubelet.Offered[nvml.ResourceGPU] = []string{"GPU-a", "GPU-b"} }, false},
		"it offers the shared GPU":           {func(s *state.Observed) { s.Kubelet.Offered["nvidia.com/gpu.shared"] = []string{"GPU-b::0"} }, false},
		"the GPU is not well":                {func(s *state.Observed) { s.Recovered = nil }, false},
		"another GPU has recovered":          {func(s *state.Observed) { s.Recovered = map[nvml.UUID]time.Time{"GPU-a": recovered} }, false},
		"it began after that":                {func(s *state.Observed) { s.DevicePlugin.Pods[0].Status.ContainerStatuses[1] = since(time.Second) }, false},
		"none of its containers runs":        {func(s *state.Observed) { s.DevicePlugin.Pods[0].Status.ContainerStatuses = nil }, false},
		"it ends":                            {func(s *state.Observed) { s.DevicePlugin.Pods[0].DeletionTimestamp = &metav1.Time{Time: recovered} }, false},
		"kubelet does not say what it has":   {func(s *state.Observed) { s.Kubelet = state.Kubelet{Err: errors.New("silent")} }, false},
		"kubelet gives out none of its GPUs": {func(s *state.Observed) { s.Kubelet.Offered = nil }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := observe(c.change).WithholdsRecovered(config.MIGStrategyNone); got != c.want {
				t.Errorf("the plugin is to be restarted: %t, want %t", got, c.want)
			}
		})
	}
}
