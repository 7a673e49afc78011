package fence_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// A real API server takes no key, value or taint that cannot be, so none of the signs can be mistyped in that way.
func TestClusterTakesEverySignOfAnotherTool(t *testing.T) {
	nodes := clustertest.Client(t).CoreV1().Nodes()
	for _, s := range signs() {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "marked-"}}
		s.on(n)
		created, err := nodes.Create(t.Context(), n, metav1.CreateOptions{})
		if err != nil {
			t.Errorf("%s: %v", s.sign, err)
			continue
		}
		t.Cleanup(func() {
			if err := nodes.Delete(context.WithoutCancel(t.Context()), created.Name, metav1.DeleteOptions{}); err != nil {
				t.Errorf("deleting node %s: %v", created.Name, err)
			}
		})
		if diff := cmp.Diff(s.marker(), fence.Markers(created, operands), exceptAdvice); diff != "" {
			t.Errorf("Markers of %s (-want +got):\n%s", s.sign, diff)
		}
	}
}

func TestClusterDistinguishesTheMIGManagersStateFromOurs(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	const pending = `{"metadata":{"labels":{"nvidia.com/mig.config.state":"pending"}}}`
	theirs := mustPatchNode(t, client, name, "nvidia-mig-manager", pending)
	want := []fence.Marker{{Tool: "mig-manager", Sign: "label nvidia.com/mig.config.state=pending"}}
	if diff := cmp.Diff(want, fence.Markers(theirs, operands), exceptAdvice); diff != "" {
		t.Errorf("Markers (-want +got):\n%s", diff)
	}
	mustPatchNode(t, client, name, "gpuslice-agent", `{"metadata":{"labels":{"nvidia.com/mig.config.state":"success"}}}`)
	if got := fence.Markers(mustPatchNode(t, client, name, "gpuslice-agent", pending), operands); got != nil {
		t.Errorf("Markers of our own state are %+v, want none", got)
	}
}
