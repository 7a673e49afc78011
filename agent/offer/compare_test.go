package offer_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// What kubelet offers is compared with the config of the device plugin where that is known, and else with the GPUs. Pods may not hold what others are given
// where that is what the labels ask for, and may after an undo.
func TestWhatIsMissingOfTheCapacity(t *testing.T) {
	t.Parallel()
	const gpu = nvml.ResourceGPU
	whole, two := []string{"GPU-a", "GPU-b"}, []string{"GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1"}
	shared := state.Desired{Plugin: &state.DesiredPlugin{Known: true, Sharing: catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{gpu: 2}}}}
	mps := state.Desired{Plugin: &state.DesiredPlugin{Known: true, Sharing: catalog.Sharing{Strategy: catalog.SharingMPS, Replicas: map[string]int{gpu: 2}}}}
	unknown, undo, undoOfSharing := state.Desired{Plugin: &state.DesiredPlugin{}}, state.Desired{Undo: true}, shared
	undoOfSharing.Undo = true
	for name, row := range map[string]struct {
		want     state.Desired
		offered  []string
		pod      string // what it holds
		change   func(s *state.Observed)
		missing  string // empty: nothing
		verified bool   // whatever the labels ask for
		stale    bool
	}{
		"all agree":                              {offered: whole, pod: "GPU-a", verified: true},
		"the plugin offers too little":           {offered: whole[:1], missing: gpu + ": the GPUs have 2, kubelet 1"},
		"the plugin shares as asked":             {want: shared, offered: two, verified: true},
		"the plugin shares, which is not asked":  {offered: two, verified: true},
		"the plugin does not share yet":          {want: shared, offered: whole, missing: gpu + ": 4 desired, kubelet has 2", verified: true},
		"what is asked of the plugin is unknown": {want: unknown, offered: two, verified: true},
		"a pod holds what others are given":      {offered: whole, pod: "GPU-a::0", missing: "pod team/a holds GPU 0", verified: true},
		"after an undo it may":                   {want: undo, offered: whole, pod: "GPU-a::0", verified: true},
		"after an undo of sharing it may":        {want: undoOfSharing, offered: two, pod: "GPU-a", verified: true},
		"it does so by the config":               {want: shared, offered: two, pod: "GPU-a", missing: "pod team/a holds GPU 0", verified: true},
		"the config gives it that, and the plugin not yet": {
			want: shared, offered: whole, pod: "GPU-a::0", missing: gpu + ": 4 desired, kubelet has 2", verified: true,
		},
		"kubelet is silent": {change: func(s *state.Observed) { s.Kubelet.Err = errors.New("silent") }, missing: "silent"},
		"two plugins are there": {
			offered: whole, change: func(s *state.Observed) { s.DevicePlugin.Rivals = "two plugins" }, missing: "two plugins",
		},
		"the plugin does not serve kubelet": {
			want: shared, offered: two, pod: "GPU-a", change: func(s *state.Observed) { s.DevicePlugin.Unconnected = "unconnected" }, missing: "unconnected",
		},
		"nothing shares by MPS yet": {want: mps, offered: two, missing: "no MPS control daemon", verified: true},
		"labels are behind": {
			want: shared, offered: two, verified: true, stale: true,
			change: func(s *state.Observed) { s.Node.Labels = map[string]string{gpu + ".replicas": "1"} },
		},
	} {
		pods := map[string][2]string{}
		if row.pod != "" {
			pods["a"] = [2]string{gpu, row.pod}
		}
		s := given(capacity.Resources{gpu: row.offered}, pods)
		s.Node = &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "node"},
			Status:     corev1.NodeStatus{Allocatable: corev1.ResourceList{gpu: *resource.NewQuantity(int64(len(row.offered)), resource.DecimalSI)}},
		}
		if row.change != nil {
			row.change(s)
		}
		s.Capacity = offer.CompareHardware(s, config.MIGStrategyNone)
		before := s.Capacity
		got := offer.Compare(s, row.want, config.MIGStrategyNone)
		if missing := strings.Join(got.Missing, "; "); !strings.HasPrefix(missing, row.missing) || missing != "" && row.missing == "" {
			t.Errorf("%s: %q is missing, want %q", name, missing, row.missing)
		}
		if got.Verified != row.verified || len(got.Stale) > 0 != row.stale || (len(got.Withdrawn) > 0) != strings.HasPrefix(row.missing, "pod") {
			t.Errorf("%s: %+v", name, got)
		}
		if diff := cmp.Diff(before, s.Capacity, cmp.AllowUnexported(capacity.Agreement{})); diff != "" {
			t.Errorf("%s: the comparison has changed the observation: %s", name, diff)
		}
	}
}

func TestTheAdviceNamesALostGPUFirst(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		owner state.Owner
		lost  bool
		want  string
	}{
		"the device plugin's":           {state.Owner{}, false, "see the device plugin's log on this node"},
		"the device plugin's, GPU lost": {state.Owner{}, true, "GPU 1 does not answer: do first what condition GPUUnhealthy says; then see the device plugin's log on this node"},
		"the DRA driver's, GPU lost": {
			state.Owner{Kind: api.OwnerDRAStatic, Driver: "pod dra/driver"},
			true,
			"GPU 1 does not answer: do first what condition GPUUnhealthy says; then see the log of pod dra/driver",
		},
	} {
		seen := &state.Observed{Owner: row.owner, GPUs: []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Index: 1, Lost: row.lost}}}
		if got := offer.Advice(seen); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
}

// What is offered after a change follows from the planned GPUs, and from how the plugin shares then: by the config that is asked for, or by the present one.
func TestWhatIsOfferedAfterAChange(t *testing.T) {
	t.Parallel()
	const gpu = nvml.ResourceGPU
	after := []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Enabled: true, Instances: []nvml.Instance{{Devices: []nvml.Device{{Profile: "1g.10gb+me"}}}, {Devices: []nvml.Device{{Profile: "3g.40gb"}}}}}}
	twice := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{gpu: 2}}
	for name, row := range map[string]struct {
		seen state.Observed
		want *state.DesiredPlugin
		says string
	}{
		"no config of the plugin": {says: gpu + " 1, nvidia.com/mig-1g.10gb.me 1, nvidia.com/mig-3g.40gb 1"},
		"one that shares":         {want: &state.DesiredPlugin{Known: true, Sharing: twice}, says: gpu + " 2 = 1 x 2 time-slicing, nvidia.com/mig-1g.10gb.me 1, nvidia.com/mig-3g.40gb 1"},
		"one that stays":          {seen: state.Observed{Plugin: state.PluginConfig{Current: &catalog.PluginConfig{Sharing: twice}}}, says: gpu + " 2 = 1 x 2 time-slicing, nvidia.com/mig-1g.10gb.me 1, nvidia.com/mig-3g.40gb 1"},
		"one that is not known":   {want: &state.DesiredPlugin{}},
		"one that was not read":   {seen: state.Observed{Kubelet: state.Kubelet{Offered: capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}}}}},
		"claims":                  {seen: state.Observed{Owner: state.Owner{Kind: api.OwnerDRAStatic}}, says: "gpu.nvidia.com 1, mig.nvidia.com 1g.10gb+me 1, mig.nvidia.com 3g.40gb 1"},
		"claims that decide":      {seen: state.Observed{Owner: state.Owner{Kind: api.OwnerDRADynamic}}},
	} {
		if got := offer.Of(&row.seen).After(after, row.want, config.MIGStrategyMixed); got != row.says {
			t.Errorf("%s: it offers %q, want %q", name, got, row.says)
		}
	}
}
