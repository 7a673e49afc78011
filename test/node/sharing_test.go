package node_test

import (
	stdcmp "cmp"
	"context"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/nvml"
)

// mode is a way in which a node's GPUs are divided and shared: a MIG config, and a config of the device plugin.
type mode struct {
	name, mig, plugin string
	strategy          config.MIGStrategy
	replicas          map[string]int // of each resource; those that are not in it are not shared
	compute           nvml.ComputeMode
	devices           map[string]int // that each GPU is cut into
}

// modes are all there are. The configs of the plugin are those of sharingConfigs.
var modes = []mode{
	{name: "none", mig: "all-disabled", plugin: "whole", strategy: config.MIGStrategyNone},
	{
		name: "time-slicing", mig: "all-disabled", plugin: "time-slicing", strategy: config.MIGStrategyNone,
		replicas: map[string]int{"nvidia.com/gpu": 4},
	},
	{
		name: "MIG single", mig: "all-3g.40gb", plugin: "single", strategy: config.MIGStrategySingle,
		devices: map[string]int{"3g.40gb": 2},
	},
	{
		name: "MIG mixed", mig: "all-balanced", plugin: "mixed", strategy: config.MIGStrategyMixed,
		devices: map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
	},
	{
		name: "MIG mixed and time-slicing", mig: "all-balanced", plugin: "mixed-time-slicing", strategy: config.MIGStrategyMixed,
		devices:  map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1},
		replicas: map[string]int{"nvidia.com/mig-1g.10gb": 2, "nvidia.com/mig-3g.40gb": 3},
	},
	{
		name: "MPS", mig: "all-disabled", plugin: "mps", strategy: config.MIGStrategyNone,
		replicas: map[string]int{"nvidia.com/gpu": 4}, compute: nvml.ComputeExclusiveProcess,
	},
}

// sharingConfigs are NVIDIA's format.
var sharingConfigs = map[string]string{
	"whole":        "version: v1\nflags: {migStrategy: none}\n",
	"time-slicing": "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	"mps":          "version: v1\nflags: {migStrategy: none, mpsRoot: /run/nvidia/mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	"single":       "version: v1\nflags: {migStrategy: single}\n",
	"mixed":        "version: v1\nflags: {migStrategy: mixed}\n",
	"mixed-time-slicing": "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [" +
		"{name: nvidia.com/mig-1g.10gb, replicas: 2}, {name: nvidia.com/mig-3g.40gb, replicas: 3}]}}\n",
}

// offers are the ids that kubelet has to give out for GPUs that are cut as the mode has them.
func (m mode) offers(gpus []nvml.GPU) map[string][]string {
	devices := map[string][]string{}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			devices["nvidia.com/gpu"] = append(devices["nvidia.com/gpu"], string(gpu.UUID))
		}
		for _, instance := range gpu.Instances {
			resource := "nvidia.com/gpu"
			if m.strategy == config.MIGStrategyMixed {
				resource = "nvidia.com/mig-" + instance.Profile
			}
			for _, d := range instance.Devices {
				devices[resource] = append(devices[resource], d.UUID)
			}
		}
	}
	for resource, ids := range devices {
		devices[resource] = replicated(ids, max(1, m.replicas[resource]))
	}
	return devices
}

// labels asks for several at once.
func (r *rig) labels(labels map[string]any) {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		r.t.Fatal(err)
	}
	if _, err := r.client.CoreV1().Nodes().Patch(r.t.Context(), r.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// proves waits until the agent says that it is done with what was asked for, and proves that it is the mode: the GPUs are cut as asked,
// kubelet gives out each device by its id as often as asked, and the node offers as many.
func (r *rig) proves(m mode, asked string) {
	r.t.Helper()
	n := r.awaitConverged(asked)
	r.givenBack(n)
	gpus := r.snapshot()
	for _, gpu := range gpus {
		want := m.devices
		if want == nil {
			want = map[string]int{}
		}
		if diff := cmp.Diff(want, counts(gpu)); diff != "" || gpu.Enabled != (m.devices != nil) {
			r.t.Errorf("%s: GPU %d has MIG mode %v and devices (-want +got):\n%s", m.name, gpu.Index, gpu.Enabled, diff)
		}
		if m.devices == nil && (gpu.ComputeMode == nvml.ComputeExclusiveProcess) != (m.compute == nvml.ComputeExclusiveProcess) {
			r.t.Errorf("%s: GPU %d has compute mode %s", m.name, gpu.Index, gpu.ComputeMode)
		}
	}
	want := m.offers(gpus)
	if diff := cmp.Diff(want, r.devices()); diff != "" {
		r.t.Errorf("%s: devices of kubelet (-want +got):\n%s", m.name, diff)
	}
	numbers := map[string]int{}
	for resource, ids := range want {
		numbers[resource] = len(ids)
	}
	if diff := cmp.Diff(numbers, offered(n)); diff != "" {
		r.t.Errorf("%s: allocatable (-want +got):\n%s", m.name, diff)
	}
}

// modeProfiles are the modes as profiles. Where two sizes are cut, or none, the strategy is what fits.
const modeProfiles = `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  whole: {mig: [{gpus: {all: true}, enabled: false}], sharing: none}
  time-slicing-4: {mig: [{gpus: {all: true}, enabled: false}], sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
  mig-single: {mig: [{gpus: {all: true}, enabled: true, instances: {3g.40gb: 2}}], sharing: none, migStrategy: single}
  mig-mixed: {mig: &balanced [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}], sharing: none}
  mig-mixed-shared:
    mig: *balanced
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}, {name: nvidia.com/mig-3g.40gb, replicas: 3}]}}
    migStrategy: mixed
  mps-4: {mig: [{gpus: {all: true}, enabled: false}], sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
`

// What the plugin's config says of the MIG strategy goes with the profile, from the first file that deploy/overlays/device-plugin has
// written: under mixed, which that says, no plugin shares by MPS, and none offers MIG devices as nvidia.com/gpu.
func TestEachWayOfSharingIsReachedByAProfile(t *testing.T) {
	t.Parallel()
	const name = "modes"
	r := newRig(t, twoH100, "devicePlugin: {handover: file}\nprofiles: {name: "+name+"}\n", configFile)
	r.configMapOf(name, map[string]string{"profiles.yaml": modeProfiles})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	for _, next := range []struct {
		profile, mode string
		strategy      config.MIGStrategy // of the config after it
	}{
		{"mps-4", "MPS", config.MIGStrategyNone},
		{"mig-single", "MIG single", config.MIGStrategySingle},
		{"time-slicing-4", "time-slicing", config.MIGStrategySingle},
		{"mig-mixed", "MIG mixed", config.MIGStrategyMixed},
		{"mig-mixed-shared", "MIG mixed and time-slicing", config.MIGStrategyMixed},
		{"whole", "none", config.MIGStrategyMixed},
	} {
		at := slices.IndexFunc(modes, func(m mode) bool { return m.name == next.mode })
		began := time.Now()
		r.label(config.LabelProfile, next.profile)
		r.proves(modes[at], next.profile)
		t.Logf("%s after %s", next.profile, time.Since(began).Round(100*time.Millisecond))
		if got := stdcmp.Or(r.configuredStrategy(), config.MIGStrategyNone); got != next.strategy {
			t.Errorf("%s: the device plugin's config says the MIG strategy %q, want %q", next.profile, got, next.strategy)
		}
	}
}

// configuredStrategy is what the device plugin's config says, in its file or by the node's label.
func (r *rig) configuredStrategy() config.MIGStrategy {
	r.t.Helper()
	text := []byte(r.pluginConfigs()[r.node().Labels[labelPluginConfig]])
	if len(text) == 0 {
		var err error
		if text, err = os.ReadFile(r.PluginConfig()); err != nil {
			r.t.Fatal(err)
		}
	}
	read, err := deviceplugin.Parse(text)
	if err != nil {
		r.t.Fatal(err)
	}
	return read.MIGStrategy
}

// holder is a running pod with one of the first resource that kubelet gives out. A plugin that a config manager has just had read its config
// again registers a second time, and in between kubelet has nothing of it.
func (r *rig) holder(namespace, name string) *corev1.Pod {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var resources []string
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(context.Context) (bool, error) {
		resources = slices.Sorted(maps.Keys(r.devices())) //nolint:contextcheck // it has the test's, as all of a rig
		return len(resources) > 0, nil
	})
	if err != nil {
		r.t.Fatalf("waiting for kubelet to have a device: %v", err)
	}
	r.pod(namespace, name, map[string]string{resources[0]: "1"})
	return r.awaitPod(namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + name}, running)
}

// hasLeft fails the test unless the pod is gone by its eviction.
func (r *rig) hasLeft(pod *corev1.Pod) {
	r.t.Helper()
	if _, err := r.client.CoreV1().Pods(pod.Namespace).Get(r.t.Context(), pod.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		r.t.Errorf("pod %s, whose device is offered no more, is still there: %v", pod.Name, err)
	}
	if name := r.evictions(pod.Namespace)[pod.UID]; name != pod.Name {
		r.t.Errorf("pod %s is gone without an eviction", pod.Name)
	}
}
