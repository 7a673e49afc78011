package offer_test

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
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
			Node: &corev1.Node{Status: corev1.NodeStatus{
				Capacity:    corev1.ResourceList{nvml.ResourceGPU: resource.MustParse("4")},
				Allocatable: corev1.ResourceList{nvml.ResourceGPU: resource.MustParse("2")},
			}},
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
		"it has not registered again since kubelet restarted": {func(s *state.Observed) {
			s.Kubelet.Offered, s.Node.Status.Capacity, s.Node.Status.Allocatable = nil, nil, nil
		}, false},
		"another program gives out the GPUs, too": {func(s *state.Observed) { s.Owner.Kind = api.OwnerBoth }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := offer.HasOutdatedPod(observe(c.change), config.MIGStrategyNone); got != c.want {
				t.Errorf("the plugin is to be restarted: %t, want %t", got, c.want)
			}
		})
	}
}

func TestWhatIsGoneIsOfferedByAPluginThatReadTheGPUsBeforeTheyWereCut(t *testing.T) {
	t.Parallel()
	const mig = nvml.ResourceMIGPrefix + "1g.10gb"
	cut := nvml.GPU{UUID: "GPU-b", Index: 1, Enabled: true, Instances: []nvml.Instance{{Devices: []nvml.Device{{UUID: "MIG-b0", Profile: "1g.10gb"}}}}}
	observe := func(change func(*state.Observed)) *state.Observed {
		s := &state.Observed{
			GPUs:     []nvml.GPU{{UUID: "GPU-a"}, cut},
			Kubelet:  state.Kubelet{Offered: capacity.Resources{nvml.ResourceGPU: {"GPU-a"}, mig: {"MIG-b0"}, "example.com/nic": {"MIG-x"}}},
			Capacity: state.Capacity{Strategy: config.MIGStrategyMixed},
			Owner:    state.Owner{Kind: api.OwnerPlugin},
		}
		change(s)
		return s
	}
	offers := func(name string, ids ...string) func(*state.Observed) {
		return func(s *state.Observed) { s.Kubelet.Offered[name] = ids }
	}
	explicit := func(s *state.Observed) {
		s.DevicePlugin.Pods = []corev1.Pod{{Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "nvidia-device-plugin-ctr", Env: []corev1.EnvVar{{Name: "MIG_STRATEGY", Value: "mixed"}},
		}}}}}
	}
	for name, c := range map[string]struct {
		changes []func(*state.Observed)
		want    bool
	}{
		"it offers what there is":                               {nil, false},
		"it offers less":                                        {[]func(*state.Observed){offers(mig)}, false},
		"a MIG device is gone":                                  {[]func(*state.Observed){offers(mig, "MIG-b0", "MIG-b1")}, true},
		"a MIG device of another profile is gone":               {[]func(*state.Observed){offers(nvml.ResourceMIGPrefix+"3g.40gb", "MIG-b1")}, true},
		"a shared MIG device is gone":                           {[]func(*state.Observed){offers(mig+nvml.SharedSuffix, "MIG-b1::0")}, true},
		"replicas of what there is":                             {[]func(*state.Observed){offers(mig, "MIG-b0::0", "MIG-b0::1")}, false},
		"a GPU in MIG mode, under a strategy that is known":     {[]func(*state.Observed){explicit, offers(nvml.ResourceGPU, "GPU-a", "GPU-b")}, true},
		"a GPU in MIG mode, under a strategy that is not known": {[]func(*state.Observed){offers(nvml.ResourceGPU, "GPU-a", "GPU-b")}, false},
		"a GPU in MIG mode, under the strategy none": {[]func(*state.Observed){
			offers(nvml.ResourceGPU, "GPU-a", "GPU-b"), func(s *state.Observed) { s.Capacity.Strategy = config.MIGStrategyNone },
		}, false},
		"kubelet is silent": {[]func(*state.Observed){offers(mig, "MIG-b1"), func(s *state.Observed) { s.Kubelet.Err = errors.New("silent") }}, false},
		"a GPU is lost":     {[]func(*state.Observed){offers(mig, "MIG-b1"), func(s *state.Observed) { s.GPUs[1].Lost = true }}, false},
		"another program cuts the GPUs": {[]func(*state.Observed){
			offers(mig, "MIG-b1"), func(s *state.Observed) { s.Owner.Kind = api.OwnerDRADynamic },
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := observe(func(s *state.Observed) {
				for _, change := range c.changes {
					change(s)
				}
			})
			if got := offer.OffersGone(seen); got != c.want {
				t.Errorf("what is gone is offered: %t, want %t", got, c.want)
			}
		})
	}
}
