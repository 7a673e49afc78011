package node_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// partConfigs differ by a compute instance of one GPU instance.
const partConfigs = `version: v1
mig-configs:
  one-part:
  - {devices: all, mig-enabled: true, mig-devices: {1c.3g.40gb: 1}}
  two-parts:
  - {devices: all, mig-enabled: true, mig-devices: {1c.3g.40gb: 2}}
`

// partsOf is the mode with that config. NVIDIA's device plugin offers parts under the strategy single alone.
func partsOf(mig string, n int) mode {
	return mode{name: mig, mig: mig, plugin: "single", strategy: "single", devices: map[string]int{"1c.3g.40gb": n}}
}

// Promise 2, to the letter: a compute instance comes and goes in a GPU instance that stands, by one call, and whoever has another
// one of the same GPU instance cannot tell.
func TestAPartComesAndAnIdleOneGoesBesideABusyOne(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: H100-80GB}]", "migConfigMap: {name: parts}\ndevicePlugin: {configMap: {name: parts-plugin}}\n", configFile)
	r.configMap("parts", partConfigs)
	r.configMapOf("parts-plugin", sharingConfigs)
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.becomes(partsOf("one-part", 1))
	namespace := clustertest.Namespace(t)
	r.has(namespace, "first")

	r.changesByOneCall(namespace, partsOf("two-parts", 2), gpusim.CreateComputeInstanceWithPlacement)
	r.has(namespace, "second")
	r.leaves(namespace, "first") // so that the lowest part is the idle one
	r.changesByOneCall(namespace, partsOf("one-part", 1), gpusim.ComputeInstanceDestroy)
	r.changesByOneCall(namespace, partsOf("two-parts", 2), gpusim.CreateComputeInstanceWithPlacement)
}

// has gives a pod the device that is free.
func (r *rig) has(namespace, name string) {
	r.t.Helper()
	r.pod(namespace, name, map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, name)
}

// leaves has a pod end, as its owner ends it.
func (r *rig) leaves(namespace, name string) {
	r.t.Helper()
	if err := r.client.CoreV1().Pods(namespace).Delete(r.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.awaitPods(namespace, "pod "+name+" to be gone", func(pods map[types.UID]*corev1.Pod) bool {
		return all(pods, func(pod *corev1.Pod) bool { return pod.Name != name })
	})
}

// changesByOneCall takes the node to a mode, and fails the test unless that takes one call that changes a GPU, evicts nobody,
// and leaves the pods on the devices that they had.
func (r *rig) changesByOneCall(namespace string, to mode, function string) {
	r.t.Helper()
	pods, devices := r.podsOf(namespace), r.assignments(namespace)
	if len(pods) == 0 || len(devices) != len(pods) {
		r.t.Fatalf("%d pods have devices, of %d", len(devices), len(pods))
	}
	if err := r.GPUs.ForgetCalls(); err != nil {
		r.t.Fatal(err)
	}
	r.becomes(to)
	calls := r.GPUs.Calls()
	maps.DeleteFunc(calls, func(function string, n int) bool {
		changes := strings.HasPrefix(function, "Create") || strings.HasSuffix(function, "Destroy") || strings.HasPrefix(function, "Set")
		return n == 0 || !changes && function != gpusim.Reset
	})
	if diff := cmp.Diff(map[string]int{function: 1}, calls); diff != "" {
		r.t.Errorf("%s: calls that change a GPU (-want +made):\n%s", to.name, diff)
	}
	if evicted := r.evictions(namespace); len(evicted) > 0 {
		r.t.Errorf("%s: evicted are %v", to.name, slices.Sorted(maps.Values(evicted)))
	}
	r.undisturbed(namespace, pods, devices)
	if got := len(r.snapshot()[0].Instances); got != 1 {
		r.t.Errorf("%s: there are %d GPU instances, want one", to.name, got)
	}
}
