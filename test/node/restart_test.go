package node_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// For a second after its start a kubelet answers, and lists no pods. Promise 3: a pod is not taken for one that holds every
// GPU because of that.
func TestAKubeletThatHasJustStartedIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "migConfigMap: {name: first-when-restarted}\n")
	r.configMap("first-when-restarted", "version: v1\nmig-configs:\n  first:\n  - {devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	pods := map[string]*corev1.Pod{}
	for _, name := range []string{"a", "b"} {
		r.pod(namespace, name, map[string]string{"nvidia.com/gpu": "1"})
		pods[name] = r.awaitPod(namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + name}, running)
	}
	evicted := map[types.UID]string{}
	deadline := time.After(patience)
	devices := r.assignments(namespace)
	for ; len(devices) < len(pods); devices = r.assignments(namespace) {
		select {
		case <-deadline:
			t.Fatalf("kubelet lists %v", devices)
		case <-time.After(50 * time.Millisecond):
		}
	}
	for name, ids := range devices {
		if slices.Contains(ids, r.GPUs.UUIDs()[0]) {
			evicted[pods[name].UID] = name
		}
	}
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	r.Kubelet.Stop()
	r.label(config.LabelMIGConfig, "first")
	r.awaitReason(config.ReasonKubeletUnavailable)
	if err := r.StartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.awaitConverged("first")
	if diff := cmp.Diff(evicted, r.evictions(namespace)); diff != "" {
		t.Errorf("evicted pods (-those on GPU 0 +asked for):\n%s", diff)
	}
}
