package node_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// awaitPressure waits until the node says this of the memory of its GPUs.
func (r *rig) awaitPressure(status corev1.ConditionStatus) corev1.NodeCondition {
	r.t.Helper()
	var found corev1.NodeCondition
	r.await("GPUMemoryPressure "+string(status), func(n *corev1.Node) bool {
		i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUMemoryPressure })
		if i >= 0 {
			found = n.Status.Conditions[i]
		}
		return found.Status == status
	})
	return found
}

// Two pods on one GPU, by NVIDIA's own plugin. The agent knows whose memory it is by the process table.
func TestAPodThatFillsAGPUThatItSharesIsNamedUntilItLeaves(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: T4}]", "memoryPressure: {for: 1s}\n", configFile)
	namespace := clustertest.Namespace(t)
	r.awaitOffered("nvidia.com/gpu", 1)
	r.awaitLabels(map[string]string{labelCount: "1"})
	r.writeConfig(r.pluginConfigs()["time-slicing-4"])
	r.awaitOffered("nvidia.com/gpu", 4)
	one := map[string]string{"nvidia.com/gpu": "1"}
	modest, greedy := r.pod(namespace, "modest", one), r.pod(namespace, "greedy", one)
	r.awaitRunning(namespace, "modest")
	r.awaitRunning(namespace, "greedy")
	r.run()
	r.awaitPressure(corev1.ConditionFalse)

	given := r.assignments(namespace)
	for pod, mib := range map[*corev1.Pod]int{modest: 2000, greedy: 12000} {
		if err := r.Users.Grow(pod, given[pod.Name][0], mib); err != nil {
			t.Fatal(err)
		}
	}
	told := r.awaitPressure(corev1.ConditionTrue)
	want := "GPU 0 (" + r.GPUs.UUIDs()[0] + ") has 14000 of 15360 MiB in use (91%), shared by " +
		namespace + "/greedy 12000 MiB, " + namespace + "/modest 2000 MiB;"
	if told.Reason != string(config.ReasonGPUMemoryNearlyFull) || !strings.HasPrefix(told.Message, want) {
		t.Errorf("the node says %s: %s, want %s", told.Reason, told.Message, want)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Events(namespace).Watch(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.uid=" + string(greedy.UID) + ",reason=" + told.Reason,
		})
	}
	var heard *corev1.Event
	if err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, e *corev1.Event) bool { heard = e; return true }); err != nil {
		t.Fatal(err)
	}
	if heard == nil || !strings.HasPrefix(heard.Message, "this pod has grown most, by ") {
		t.Errorf("the event on the pod that has grown most is %v", heard)
	}
	if err := r.client.CoreV1().Pods(namespace).Delete(t.Context(), "greedy", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.awaitPressure(corev1.ConditionFalse)
}
