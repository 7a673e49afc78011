package nodewrite_test

import (
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// Resources of former configs go by a write like any other: it is repeated if the API server is busy, and its answer is what the agent has seen
// last.
func TestResourcesAreRemovedByAWriteThatIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		zero, one := resource.MustParse("0"), resource.MustParse("1")
		amounts := func() corev1.ResourceList {
			return corev1.ResourceList{"nvidia.com/gpu.shared": zero, "nvidia.com/gpu": one}
		}
		client := fake.NewClientset(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}, Status: corev1.NodeStatus{Capacity: amounts(), Allocatable: amounts()},
		})
		busy := 1
		client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			if busy > 0 {
				busy--
				return true, nil, apierrors.NewTooManyRequests("busy", 0)
			}
			return false, nil, nil
		})
		var seen *corev1.Node
		w := nodewrite.Writer{Client: clientset.Of(client), Timeout: 10 * time.Second, Saw: func(n *corev1.Node) { seen = n }}
		if err := w.RemoveEmptyResources(t.Context(), "gpu-1", []string{"nvidia.com/gpu.shared"}); err != nil {
			t.Fatal(err)
		}
		if seen == nil {
			t.Fatal("the resulting node was not handed on")
		}
		for _, list := range []corev1.ResourceList{seen.Status.Capacity, seen.Status.Allocatable} {
			if _, there := list["nvidia.com/gpu.shared"]; there || len(list) != 1 {
				t.Errorf("left are %v", list)
			}
		}
		if err := w.RemoveEmptyResources(t.Context(), "gpu-1", []string{"nvidia.com/gpu"}); err == nil {
			t.Error("a resource that is not 0 was removed")
		}
	})
}

// What another has written since the observation does not hold up a write, unless the agent may decide by it.
func TestAWriteIsRepeatedUnlessTheAgentMayDecideByWhatHasChanged(t *testing.T) {
	t.Parallel()
	for key, repeated := range map[string]bool{
		"example.com/note":         true,
		config.AnnotationPreview:   true,
		config.AnnotationPlan:      true,
		config.AnnotationHold:      false,
		config.AnnotationHealthAck: false,
		"gpuslice.io/of-tomorrow":  false,
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid"}}
		changed := node.DeepCopy()
		changed.Annotations = map[string]string{key: "x"}
		client := fake.NewClientset(changed)
		tries := 0
		client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			if tries++; tries == 1 {
				return true, nil, apierrors.NewConflict(corev1.Resource("nodes"), "gpu-1", nil)
			}
			return false, nil, nil
		})
		w := nodewrite.Writer{Client: clientset.Of(client), Timeout: 10 * time.Second}
		err := w.Patch(t.Context(), node, func(n *corev1.Node) ([]byte, error) {
			return json.Marshal(map[string]any{"metadata": map[string]any{"uid": n.UID, "labels": map[string]string{"a": "b"}}})
		})
		if err == nil != repeated || apierrors.IsConflict(err) == repeated {
			t.Errorf("after %s has changed: %v, tried %d times", key, err, tries)
		}
	}
}
