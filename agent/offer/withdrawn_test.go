package offer_test

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// at is so many minutes after noon.
func at(minutes int) metav1.Time {
	return metav1.NewTime(time.Date(2026, 5, 4, 12, minutes, 0, 0, time.UTC))
}

// given is a node on which pods have been given devices: "a: gpu GPU-a::0" is pod a, which has run since noon.
func given(offered capacity.Resources, pods map[string][2]string) *state.Observed {
	s := &state.Observed{GPUs: []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Index: 1}}, Kubelet: state.Kubelet{Offered: offered, Assigned: holders.Assignments{}}}
	for name, has := range pods {
		s.Pods = append(s.Pods, corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name)},
			Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: at(0)}}}}},
		})
		s.Kubelet.Assigned[types.NamespacedName{Namespace: "team", Name: name}] = map[string][]string{has[0]: strings.Fields(has[1])}
	}
	s.Holders.Pods = holders.GPUPods(s.Pods, s.Kubelet.Assigned, nil, holders.Claimed{}, nil)
	return s
}

func texts(s *state.Observed, stands capacity.Resources, want state.Desired) string {
	s.Capacity.Withdrawn = offer.Of(s).Withdrawn(stands, want)
	return strings.Join(offer.WithdrawnTexts(s), "; ")
}

// Promise 19.
func TestWhoHoldsWhatOthersAreGivenIsNamed(t *testing.T) {
	t.Parallel()
	const gpu = nvml.ResourceGPU
	whole, two := capacity.Resources{gpu: {"GPU-a", "GPU-b"}}, capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"}}
	for name, row := range map[string]struct {
		offered, stands capacity.Resources
		pods            map[string][2]string
		want            string
	}{
		"no one": {whole, whole, map[string][2]string{"a": {gpu, "GPU-a"}}, ""},
		"one, beside another": {
			two, two,
			map[string][2]string{"a": {gpu, "GPU-a"}, "b": {gpu, "GPU-a::1"}},
			"pod team/a holds GPU 0 (nvidia.com/gpu), which kubelet now allocates as nvidia.com/gpu x 2: team/b has it too",
		},
		"one, of several devices": {
			whole, nil,
			map[string][2]string{"a": {gpu + ".shared", "GPU-a::0 GPU-a::1 GPU-b::0 GPU-b::1"}},
			"pod team/a holds GPU 0 (nvidia.com/gpu.shared, replica 0), GPU 0 (nvidia.com/gpu.shared, replica 1), GPU 1 (nvidia.com/gpu.shared, replica 0) and 1 more, which kubelet now allocates as nvidia.com/gpu",
		},
		"two": {
			whole, whole,
			map[string][2]string{"a": {gpu, "GPU-a::0"}, "b": {gpu, "GPU-b::0"}},
			"pod team/a holds GPU 0 (nvidia.com/gpu, replica 0), which kubelet now allocates as nvidia.com/gpu; " +
				"pod team/b holds GPU 1 (nvidia.com/gpu, replica 0), which kubelet now allocates as nvidia.com/gpu",
		},
		"no one, before the plugin has read a config by which its pods have what they hold": {whole, two, map[string][2]string{"a": {gpu, "GPU-a::0"}}, ""},
		"an id without an end": {
			whole, whole,
			map[string][2]string{"a": {gpu, "GPU-a::" + strings.Repeat("0", 1000)}},
			"pod team/a holds GPU 0 (nvidia.com/gpu, replica " + strings.Repeat("0", 109) + "…), which kubelet now allocates as nvidia.com/gpu",
		},
	} {
		if got := texts(given(row.offered, row.pods), row.stands, state.Desired{}); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
	ended := given(two, map[string][2]string{"a": {gpu, "GPU-a"}})
	ended.Pods[0].Status.Phase = corev1.PodSucceeded
	ended.Holders.Pods = holders.GPUPods(ended.Pods, ended.Kubelet.Assigned, []holders.Client{{PID: 1, Owner: holders.Owner{PodUID: "a"}, Devices: []string{"GPU-a"}}}, holders.Claimed{}, nil)
	if got := texts(ended, two, state.Desired{}); got != "" {
		t.Errorf("a pod that has ended: %q", got)
	}
}

// The ids are the same with MPS and without, and a pod that was given one before is no client of MPS.
func TestAPodFromBeforeMPSDoesNotShareByIt(t *testing.T) {
	t.Parallel()
	const gpu = nvml.ResourceGPU
	two := capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"}}
	mps := catalog.Sharing{Strategy: catalog.SharingMPS, Replicas: map[string]int{gpu: 2}}
	for name, row := range map[string]struct {
		sharing  catalog.SharingStrategy
		verified string
		daemons  []int // minutes after noon, when the pod began
		is       bool
	}{
		"MPS has come since":                            {catalog.SharingMPS, "former", []int{1}, true},
		"MPS was there before":                          {catalog.SharingMPS, "former", []int{-1}, false},
		"MPS has come in the same second":               {catalog.SharingMPS, "former", []int{0}, true},
		"one of its pods was there before":              {catalog.SharingMPS, "former", []int{1, -1}, false},
		"MPS is not there yet":                          {catalog.SharingMPS, "former", nil, false},
		"its daemon was replaced, and nothing is asked": {catalog.SharingMPS, "present", []int{1}, false},
		"nothing was verified before":                   {catalog.SharingMPS, "", []int{1}, false},
		"time-slicing":                                  {catalog.SharingTimeSlicing, "former", []int{1}, false},
	} {
		s := given(two, map[string][2]string{"a": {gpu, "GPU-a::0"}})
		s.Record.Learnt.Verified = row.verified
		for _, minutes := range row.daemons {
			s.DevicePlugin.MPSDaemons = append(s.DevicePlugin.MPSDaemons, corev1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: at(minutes)}})
		}
		sharing := mps
		sharing.Strategy = row.sharing
		got := texts(s, two, state.Desired{Fingerprint: "present", Plugin: &state.DesiredPlugin{Known: true, Sharing: sharing}})
		want := ""
		if row.is {
			want = "pod team/a holds GPU 0 (nvidia.com/gpu, replica 0), which kubelet now allocates as nvidia.com/gpu by MPS"
		}
		if got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}
