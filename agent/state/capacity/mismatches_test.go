package capacity_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// Promise 9, where the agent knows how the device plugin shares: devices are compared one by one, kubelet's with the wanted ones, and the counts of
// the node object with kubelet's. What only one of the three has is named.
func TestCapacityIsProvenByEachReplicaWhereTheSharingIsKnown(t *testing.T) {
	t.Parallel()
	const gpu, slice = nvml.ResourceGPU, nvml.ResourceMIGPrefix + "3g.40gb"
	twice := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{gpu: 2}}
	gpus := []nvml.GPU{{UUID: "GPU-a"}}
	for name, row := range map[string]struct {
		kubelet capacity.Resources
		node    map[string]int
		want    string // empty: all agree
	}{
		"all agree": {capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}}, map[string]int{gpu: 2}, ""},
		"a resource at 0, as kubelet leaves it": {
			capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}, slice: nil}, map[string]int{gpu: 2, slice: 0}, "",
		},
		"resources of other devices": {
			capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}, "nvidia.com/hostdev": {"pci-1"}}, map[string]int{gpu: 2, "nvidia.com/hostdev": 4}, "",
		},
		"a plugin that shares as before": {
			capacity.Resources{gpu: {"GPU-a"}}, map[string]int{gpu: 1}, "nvidia.com/gpu: 2 desired, kubelet has 1",
		},
		"as many replicas of another GPU": {
			capacity.Resources{gpu: {"GPU-old::0", "GPU-old::1"}}, map[string]int{gpu: 2}, "nvidia.com/gpu: kubelet has 2, but other devices than desired",
		},
		"a node object that lags behind": {
			capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}}, map[string]int{gpu: 1}, "nvidia.com/gpu: kubelet has 2, the node object 1",
		},
		"a resource that kubelet still gives out": {
			capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}, slice: {"MIG-1"}}, map[string]int{gpu: 2, slice: 1}, slice + ": 0 desired, kubelet has 1",
		},
		"a resource that the node object alone promises": {
			capacity.Resources{gpu: {"GPU-a::0", "GPU-a::1"}}, map[string]int{gpu: 2, slice: 2}, slice + ": kubelet has 0, the node object 2",
		},
	} {
		t.Run(name, func(t *testing.T) {
			allocatable := corev1.ResourceList{}
			for _, resourceName := range slices.Sorted(maps.Keys(row.node)) {
				allocatable[corev1.ResourceName(resourceName)] = *resource.NewQuantity(int64(row.node[resourceName]), resource.DecimalSI)
			}
			wanted := capacity.Shared(capacity.Expected(gpus, config.MIGStrategyMixed), twice)
			if diff := cmp.Diff(row.want, strings.Join(capacity.Mismatches(wanted, row.kubelet, allocatable), "; ")); diff != "" {
				t.Errorf("mismatches (-want +got):\n%s", diff)
			}
		})
	}
}

// Promise 9: two observations in a row, and not two at the same moment.
func TestTwoObservationsInARowVerifyAndNotTwoAtTheSameMoment(t *testing.T) {
	t.Parallel()
	const soon, later = capacity.VerifyInterval / 2, capacity.VerifyInterval
	type observation struct {
		after  time.Duration
		agrees bool
	}
	for name, row := range map[string]struct {
		observations []observation
		agreed       int
	}{
		"one observation":                  {[]observation{{0, true}}, 1},
		"a second one at the same moment":  {[]observation{{0, true}, {0, true}, {0, true}}, 1},
		"a second one too soon":            {[]observation{{0, true}, {soon, true}}, 1},
		"too soon, and then late enough":   {[]observation{{0, true}, {soon, true}, {soon, true}}, 2},
		"a second one after the interval":  {[]observation{{0, true}, {later, true}}, 2},
		"one that disagrees between two":   {[]observation{{0, true}, {later, false}, {later, true}}, 1},
		"one that disagrees between, soon": {[]observation{{0, true}, {soon, false}, {soon, true}}, 1},
		"one that disagrees in the end":    {[]observation{{0, true}, {later, true}, {0, false}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			var proof capacity.Agreement
			now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
			for _, l := range row.observations {
				now = now.Add(l.after)
				proof.Count(l.agrees, now)
			}
			if proof.Agreed != row.agreed {
				t.Errorf("%d looks in a row agree, want %d", proof.Agreed, row.agreed)
			}
		})
	}
}
