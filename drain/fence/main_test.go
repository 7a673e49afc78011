package fence_test

import (
	"context"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// Tests named TestCluster… ask a real API server and controller manager what the fake clientset does not know: conflicts and managed fields.

func TestMain(m *testing.M) { clustertest.Main(m) }

func patchNode(ctx context.Context, client kubernetes.Interface, name, manager, patch string) (*corev1.Node, error) {
	return client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: manager})
}

func mustPatchNode(t *testing.T, client kubernetes.Interface, name, manager, patch string) *corev1.Node {
	t.Helper()
	n, err := patchNode(t.Context(), client, name, manager, patch)
	if err != nil {
		t.Fatalf("patching node %s with %s: %v", name, patch, err)
	}
	return n
}

func readNode(ctx context.Context, t *testing.T, client kubernetes.Interface, name string) *corev1.Node {
	t.Helper()
	n, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return n
}
