package cleanup_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/cleanup"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// The agent did not put them there, and pods would come to GPUs that are not as asked.
func TestStartupTaintsAreLeftAndNamed(t *testing.T) {
	t.Parallel()
	taints := []corev1.Taint{
		{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule},
		{Key: "example.com/fresh", Effect: corev1.TaintEffectNoExecute},
		{Key: "team", Effect: corev1.TaintEffectNoSchedule},
	}
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "u", ResourceVersion: "1"}, Spec: corev1.NodeSpec{Taints: taints}})
	c := &cleanup.Cleaner{
		Client: clientset.Of(client), Node: "gpu-1", Timeout: time.Minute, Startup: config.Settings{StartupTaint: "example.com/fresh"}.StartupTaints(),
		Published: func(context.Context) (nodekeys.Keys, error) { return nodekeys.Keys{}, nil },
	}
	report, err := c.Clean(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(cleanup.Report{Left: []string{
		"taint gpuslice.io/not-ready, which the node was registered with; to remove it: kubectl taint node gpu-1 gpuslice.io/not-ready:NoSchedule-",
		"taint example.com/fresh, which the node was registered with; to remove it: kubectl taint node gpu-1 example.com/fresh:NoExecute-",
	}}, report); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
	node, err := client.CoreV1().Nodes().Get(t.Context(), "gpu-1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(taints, node.Spec.Taints); diff != "" {
		t.Errorf("taints (-before +after):\n%s", diff)
	}
}

func TestWhatUsersAskForIsLeftAndNamed(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "gpu-1", UID: "u", ResourceVersion: "1", Labels: map[string]string{config.LabelProfile: "small"}, Annotations: map[string]string{config.AnnotationHold: ""},
	}})
	c := &cleanup.Cleaner{
		Client: clientset.Of(client), Node: "gpu-1", Timeout: time.Minute,
		Published: func(context.Context) (nodekeys.Keys, error) { return nodekeys.Keys{}, nil },
	}
	report, err := c.Clean(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(cleanup.Report{Left: []string{
		"label gpuslice.io/profile=small, which an agent would follow if it is installed again; to remove it: kubectl label node gpu-1 gpuslice.io/profile-",
		"annotation gpuslice.io/hold, which is a user's; to remove it: kubectl annotate node gpu-1 gpuslice.io/hold-",
	}}, report); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}
