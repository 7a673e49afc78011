package capacity_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// resources are "name: id id; name: id", without the prefix of NVIDIA's names.
func resources(text string) capacity.Resources {
	out := capacity.Resources{}
	for part := range strings.SplitSeq(text, "; ") {
		if name, ids, ok := strings.Cut(part, ":"); ok {
			out["nvidia.com/"+name] = strings.Fields(ids)
		}
	}
	return out
}

// allocatable reads "gpu=1 mig-1g.10gb=2".
func allocatable(text string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for _, word := range strings.Fields(text) {
		name, n, _ := strings.Cut(word, "=")
		out[corev1.ResourceName("nvidia.com/"+name)] = resource.MustParse(n)
	}
	return out
}

func TestCapacityIsProvenByDevicesAndNotByCounts(t *testing.T) {
	t.Parallel()
	whole := nvml.GPU{UUID: "GPU-a", Capable: true}
	cut := nvml.GPU{UUID: "GPU-b", Capable: true, Enabled: true, Instances: []nvml.Instance{
		{Devices: []nvml.Device{{UUID: "MIG-1", Profile: "1g.10gb"}}},
		{Devices: []nvml.Device{{UUID: "MIG-2", Profile: "1g.10gb+me"}}},
	}}
	lost := nvml.GPU{UUID: "GPU-c", Lost: true}
	for _, row := range []struct {
		name     string
		gpus     []nvml.GPU
		strategy config.MIGStrategy
		kubelet  string // "resource: id id; resource: id"
		node     string // as allocatable reads it
		want     string // empty: all agree
	}{
		{"whole GPUs", []nvml.GPU{lost, whole}, config.MIGStrategyMixed, "gpu: GPU-a", "gpu=1", ""},
		{
			"slices under their own names",
			[]nvml.GPU{whole, cut},
			config.MIGStrategyMixed,
			"gpu: GPU-a; mig-1g.10gb: MIG-1; mig-1g.10gb.me: MIG-2",
			"gpu=1 mig-1g.10gb=1 mig-1g.10gb.me=1",
			"",
		},
		{
			"a plugin that drops attributes from names",
			[]nvml.GPU{cut},
			config.MIGStrategyMixed,
			"mig-1g.10gb: MIG-1 MIG-2",
			"mig-1g.10gb=2",
			"",
		},
		{"slices as GPUs", []nvml.GPU{cut}, config.MIGStrategySingle, "gpu: MIG-1 MIG-2", "gpu=2", ""},
		{"strategy none", []nvml.GPU{cut}, config.MIGStrategyNone, "gpu: GPU-b", "gpu=1", ""},
		{
			"shared GPUs",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed, "gpu: GPU-a::0 GPU-a::1",
			"gpu=2",
			"",
		},
		{
			"shared and renamed GPUs, and the old name at 0",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed,
			"gpu.shared: GPU-a::0 GPU-a::1",
			"gpu.shared=2 gpu=0",
			"",
		},
		{
			"equal counts of old devices",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed, "gpu: GPU-old",
			"gpu=1",
			"nvidia.com/gpu: kubelet still has devices that no longer exist",
		},
		{
			"a node object that lags behind",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed, "gpu: GPU-a", "",
			"nvidia.com/gpu: kubelet has 1, the node object 0",
		},
		{
			"a resource of a former plugin",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed, "gpu: GPU-a",
			"gpu=1 mig-3g.40gb=2",
			"nvidia.com/mig-3g.40gb: the GPUs have none, the node object 2",
		},
		{
			"a plugin that is away",
			[]nvml.GPU{cut},
			config.MIGStrategySingle, "",
			"gpu=0",
			"nvidia.com/gpu: the GPUs have 2, kubelet 0",
		},
		{
			"resources of other devices",
			[]nvml.GPU{whole},
			config.MIGStrategyMixed, "gpu: GPU-a; hostdev: pci-1",
			"gpu=1 hostdev=4",
			"",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			got := strings.Join(capacity.Disagreements(capacity.Expected(row.gpus, row.strategy), resources(row.kubelet), allocatable(row.node)), "; ")
			if diff := cmp.Diff(row.want, got); diff != "" {
				t.Errorf("disagreements (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatGPUFeatureDiscoveryStillSaysOfAFormerSharingIsNamed(t *testing.T) {
	t.Parallel()
	shared := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{nvml.ResourceGPU: 2}}
	gpus := resources("gpu: GPU-a; mig-1g.10gb: MIG-1")
	for name, row := range map[string]struct {
		labels map[string]string
		want   string
	}{
		"it does not run": {nil, ""},
		"all is new": {map[string]string{
			"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/mig-1g.10gb.replicas": "1",
		}, ""},
		"the former count":          {map[string]string{"nvidia.com/gpu.replicas": "4"}, "GPU feature discovery still says nvidia.com/gpu.replicas=4, not 2"},
		"the former way":            {map[string]string{"nvidia.com/gpu.sharing-strategy": "mps"}, "GPU feature discovery still says nvidia.com/gpu.sharing-strategy=mps, not time-slicing"},
		"what is shared no more":    {map[string]string{"nvidia.com/mig-1g.10gb.sharing-strategy": "mps"}, "GPU feature discovery still says nvidia.com/mig-1g.10gb.sharing-strategy=mps, not none"},
		"of a resource of the past": {map[string]string{"nvidia.com/mig-2g.20gb.replicas": "4"}, ""},
	} {
		if got := strings.Join(capacity.StaleFeatures(gpus, shared, row.labels), "; "); got != row.want {
			t.Errorf("%s: %q, want %q", name, got, row.want)
		}
	}
	former := map[string]string{"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "time-slicing", "nvidia.com/mig-1g.10gb.replicas": "1"}
	if got := capacity.StaleFeatures(gpus, catalog.Sharing{Strategy: catalog.SharingNone}, former); len(got) != 2 {
		t.Errorf("where nothing is shared any more, stale are %v, want both labels of nvidia.com/gpu", got)
	}
}

func TestAGPUIsWithheldWhileOneOfItsDevicesIsNotGivenOut(t *testing.T) {
	t.Parallel()
	whole := nvml.GPU{UUID: "GPU-a", Capable: true}
	cut := nvml.GPU{UUID: "GPU-b", Capable: true, Enabled: true, Instances: []nvml.Instance{
		{Devices: []nvml.Device{{UUID: "MIG-1", Profile: "1g.10gb"}}}, {Devices: []nvml.Device{{UUID: "MIG-2", Profile: "1g.10gb"}}},
	}}
	for _, row := range []struct {
		name     string
		gpu      nvml.GPU
		strategy config.MIGStrategy
		kubelet  string
		want     bool
	}{
		{"given out", whole, config.MIGStrategyNone, "gpu: GPU-a GPU-b", false},
		{"given out, shared", whole, config.MIGStrategyNone, "gpu.shared: GPU-a::0", false},
		{"another one is", whole, config.MIGStrategyNone, "gpu: GPU-b", true},
		{"nothing is", whole, config.MIGStrategyNone, "", true},
		{"as a device that is no GPU", whole, config.MIGStrategyNone, "hostdev: GPU-a", true},
		{"all its slices are given out", cut, config.MIGStrategyMixed, "mig-1g.10gb: MIG-1 MIG-2", false},
		{"one of its slices is not", cut, config.MIGStrategyMixed, "mig-1g.10gb: MIG-1", true},
		{"cut, and the plugin offers it as a whole", cut, config.MIGStrategyNone, "gpu: GPU-b", false},
	} {
		if got := capacity.Withheld(row.gpu, row.strategy, resources(row.kubelet)); got != row.want {
			t.Errorf("%s: withheld is %t, want %t", row.name, got, row.want)
		}
	}
}
