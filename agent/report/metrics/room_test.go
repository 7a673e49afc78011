package metrics

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// simulated are two GPUs that can be cut, 0 and 1, and one that cannot, which are cut as the geometries say: "1g.10gb@0 3g.40gb@4". The UUID of a MIG
// device is its GPU's index and its place: "MIG-1/4".
func simulated(t *testing.T, geometries ...string) []nvml.GPU {
	t.Helper()
	n, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: "H100-80GB"}, {Model: "H100-80GB"}, {Model: "T4"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	gpus, err := n.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for index, geometry := range geometries {
		for text := range strings.FieldsSeq(geometry) {
			name, at, _ := strings.Cut(text, "@")
			p, _ := gpus[index].Profile(name)
			start := int(at[0] - '0')
			gpus[index].Enabled = true
			gpus[index].Instances = append(gpus[index].Instances, nvml.Instance{
				Placed:  nvml.Placed{Profile: name, Span: nvml.Span{Start: start, Size: p.Placements[0].Size}},
				Devices: []nvml.Device{{UUID: fmt.Sprintf("MIG-%d/%d", index, start), Profile: name}},
			})
		}
	}
	for i := range gpus {
		gpus[i].UUID = nvml.UUID(fmt.Sprintf("GPU-%d", i))
	}
	return gpus
}

const sevenSmall = "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"

func TestWhatTheNodeCouldOfferBesideWhatPodsHave(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		cut    []string
		held   string // devices, of a pod each; "?" is a pod that may have any
		change func(*state.Observed)
		// Devices of 1g.10gb, 3g.40gb and 7g.80gb, whole GPUs, and the fragmentation of both GPUs; empty if there are no figures.
		want string
	}{
		"no pods, MIG off":                    {want: "14 4 2 3; 0.00 0.00"},
		"no pods, cut in seven":               {cut: []string{sevenSmall, sevenSmall}, want: "14 4 2 3; 0.00 0.00"},
		"one small one stands in the way":     {cut: []string{sevenSmall, sevenSmall}, held: "MIG-0/5", want: "14 3 1 2; 0.43 0.00"},
		"one in each half of both":            {cut: []string{sevenSmall, sevenSmall}, held: "MIG-0/1 MIG-0/5 MIG-1/1 MIG-1/5", want: "14 0 0 1; 0.67 0.67"},
		"all small ones":                      {cut: []string{sevenSmall}, held: "MIG-0/0 MIG-0/1 MIG-0/2 MIG-0/3 MIG-0/4 MIG-0/5 MIG-0/6", want: "14 2 1 2; 0.00 0.00"},
		"their own count":                     {cut: []string{"3g.40gb@4", "7g.80gb@0"}, held: "MIG-0/4 MIG-1/0", want: "4 2 1 1; 0.00 0.00"},
		"a pod on a GPU that is not cut":      {held: "GPU-1", want: "7 2 1 3; 0.00 0.00"},
		"a pod on one that cannot be":         {held: "GPU-2", want: "14 4 2 3; 0.00 0.00"},
		"two pods that share an instance":     {cut: []string{"3g.40gb@4"}, held: "MIG-0/4 MIG-0/4", want: "11 4 1 2; 0.00 0.00"},
		"a GPU that is lost":                  {change: func(seen *state.Observed) { seen.GPUs[0].Lost = true }, want: "7 2 1 2; 0.00"},
		"a vGPU":                              {change: func(seen *state.Observed) { seen.GPUs[0].Virtualization = nvml.VirtualGPU }, want: "7 2 1 3; 0.00"},
		"a pod that may have any":             {held: "?"},
		"kubelet does not answer":             {change: func(seen *state.Observed) { seen.Kubelet.Err = errors.New("no answer") }},
		"the process table cannot be read":    {change: func(seen *state.Observed) { seen.Holders.Err = errors.New("forbidden") }},
		"an observation that has ended early": {change: func(seen *state.Observed) { seen.Complete = false }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seen := &state.Observed{Complete: true, Node: &corev1.Node{}, GPUs: simulated(t, row.cut...)}
			for device := range strings.FieldsSeq(row.held) {
				p := holders.Pod{UID: types.UID(fmt.Sprint(len(seen.Holders.Pods))), Sources: []holders.Source{holders.SourceKubelet}}
				if device != "?" {
					p.Devices, p.DevicesKnown = []string{device}, true
				}
				seen.Holders.Pods = append(seen.Holders.Pods, p)
			}
			if row.change != nil {
				row.change(seen)
			}
			m := New(clock.RealClock{})
			m.Observed(seen, state.Desired{})
			if got := figures(m.observed); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
			count, err := testutil.GatherAndCount(m.Gatherer(), config.MetricPossibleDevices, config.MetricGPUFragmentation)
			if err != nil || (count > 0) != (row.want != "") {
				t.Errorf("%d series, error %v", count, err)
			}
		})
	}
}

// figures are those of the last observation.
func figures(o *observation) string {
	if o == nil || o.room.possible == nil {
		return ""
	}
	p := o.room.possible
	out := fmt.Sprint(p["nvidia_com_mig_1g_10gb"], p["nvidia_com_mig_3g_40gb"], p["nvidia_com_mig_7g_80gb"], p["nvidia_com_gpu"]) + ";"
	for _, gpu := range []nvml.UUID{"GPU-0", "GPU-1"} {
		if value, is := o.room.fragmentation[gpu]; is {
			out += fmt.Sprintf(" %.2f", value)
		}
	}
	return out
}

func TestAResourceHasTheNameThatKubeStateMetricsGivesIt(t *testing.T) {
	t.Parallel()
	for resource, want := range map[string]string{
		"nvidia.com/gpu": "nvidia_com_gpu", "nvidia.com/mig-3g.40gb": "nvidia_com_mig_3g_40gb", "nvidia.com/mig-1g.10gb+me": "nvidia_com_mig_1g_10gb_me",
	} {
		if got := resourceLabel(resource); got != want {
			t.Errorf("%s: %s, want %s", resource, got, want)
		}
	}
}
