package decide_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// twoGPUs are GPU 0, which is whole, and GPU 3 with an instance at slice 0, which is divided, and one at 4.
func twoGPUs() []nvml.GPU {
	instance := func(start int, devices ...string) nvml.Instance {
		i := nvml.Instance{Placed: nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: start, Size: 4}}}
		for _, d := range devices {
			i.Devices = append(i.Devices, nvml.Device{UUID: d})
		}
		return i
	}
	return []nvml.GPU{
		{UUID: "GPU-0", Index: 0},
		{UUID: "GPU-3", Index: 3, Instances: []nvml.Instance{instance(0, "MIG-a", "MIG-b"), instance(4, "MIG-c")}},
	}
}

// What a pod has, as advice and metrics count it, is what a plan would have to take from it.
func TestWhatPodsHave(t *testing.T) {
	t.Parallel()
	pod := func(devices ...string) holders.Pod {
		return holders.Pod{UID: "p", Name: "p", Sources: []holders.Source{holders.SourceKubelet}, Devices: devices, DevicesKnown: true}
	}
	claims := func(p holders.Pod) holders.Pod {
		p.Sources, p.DeviceClaims = []holders.Source{holders.SourceClaim}, []string{"c"}
		return p
	}
	text := func(value string) resourcev1.DeviceAttribute { return resourcev1.DeviceAttribute{StringValue: &value} }
	dynamic := func(device string) func(*state.Observed) {
		return func(seen *state.Observed) {
			seen.Owner.Kind, seen.DRA.Complete = api.OwnerDRADynamic, true
			seen.DRA.Slices = []resourcev1.ResourceSlice{{Spec: resourcev1.ResourceSliceSpec{Devices: []resourcev1.Device{
				{Name: "gpu-3-mig-3g40gb-4", Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"parentUUID": text("GPU-3"), "profile": text("3g.40gb")}},
				{Name: "gpu-3", Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"uuid": text("GPU-3")}},
			}}}}
			seen.DRA.Claims = holders.Claims{{Pod: "p", Name: "c"}: {
				Allocated: true, Pods: []types.UID{"p"}, Devices: []holders.ClaimedDevice{{Device: holders.Device{Driver: holders.ClaimDriver, Name: device}}},
			}}
		}
	}
	for name, row := range map[string]struct {
		pod  holders.Pod
		seen func(*state.Observed)
		want string
	}{
		"a GPU":                       {pod: pod("GPU-0"), want: "0"},
		"an instance":                 {pod: pod("MIG-c"), want: "3/4"},
		"two parts of an instance":    {pod: pod("MIG-a", "MIG-b"), want: "3/0"},
		"several":                     {pod: pod("MIG-c", "MIG-a", "GPU-0"), want: "0 3/0 3/4"},
		"nothing":                     {pod: pod(), want: "none"},
		"what kubelet does not say":   {pod: holders.Pod{UID: "p", Sources: []holders.Source{holders.SourceSpec}}, want: "any"},
		"an instance that is gone":    {pod: pod("MIG-gone"), want: "any"},
		"a GPU that is lost":          {pod: pod("GPU-3"), seen: func(seen *state.Observed) { seen.GPUs[1].Lost = true }, want: "3"},
		"an instance of a lost GPU":   {pod: pod("MIG-c"), seen: func(seen *state.Observed) { seen.GPUs[1].Lost = true }, want: "any"},
		"by a claim":                  {pod: claims(pod("MIG-c")), want: "3/4"},
		"what DynamicMIG has made":    {pod: claims(pod("GPU-3")), seen: dynamic("gpu-3-mig-3g40gb-4"), want: "3/4"},
		"a whole GPU of that driver":  {pod: claims(pod("GPU-3")), seen: dynamic("gpu-3"), want: "3"},
		"a claim that was not read":   {pod: claims(holders.Pod{UID: "p"}), seen: func(seen *state.Observed) { seen.DRA.Unread = errors.New("no answer") }, want: "any"},
		"files that a monitor opened": {pod: holders.Pod{UID: "p", DevicesKnown: true, Devices: []string{"GPU-0"}, Sources: []holders.Source{"device file /dev/nvidia0 of pid 7 dcgm"}}, seen: func(seen *state.Observed) { seen.Holders.OfLibrary = []holders.Pod{{UID: "p"}} }, want: "none"},
		"an operand": {pod: pod("GPU-0"), seen: func(seen *state.Observed) {
			seen.Pauses = []fence.Operand{{Pods: []holders.Pod{{UID: "p"}}}}
		}, want: "none"},
		"a daemon that comes back": {
			pod: holders.Pod{UID: "p", DevicesKnown: true, Daemon: true, Devices: []string{"GPU-0"}, Sources: []holders.Source{holders.SourceContainer}},
			seen: func(seen *state.Observed) {
				seen.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{UID: "p"}, Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}}}}
			},
			want: "none",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &state.Observed{Node: &corev1.Node{}, GPUs: twoGPUs(), Holders: state.Holders{Pods: []holders.Pod{row.pod}}}
			if row.seen != nil {
				row.seen(seen)
			}
			if got := haveTexts(decide.Holdings(seen)); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
		})
	}
}

// haveTexts writes what pods have: "0 3/4", "any" if that is not known, "none" without a pod.
func haveTexts(all []decide.Holding) string {
	var out []string
	for _, h := range all {
		if !h.Known {
			out = append(out, "any")
			continue
		}
		for _, p := range h.On {
			out = append(out, fmt.Sprint(p))
		}
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, " ")
}
