package fence_test

import (
	"context"
	"os/exec"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// The tests in this file have a real kubectl cordon and uncordon: what it leaves in managedFields is what people are told.

// kubectl runs a kubectl of the control plane's version as the administrator.
func kubectl(t *testing.T, args ...string) {
	t.Helper()
	cluster := clustertest.Start(t)
	out, err := exec.CommandContext(t.Context(), cluster.Kubectl(), append([]string{"--kubeconfig", cluster.AdminKubeconfig()}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %q: %v\n%s", args, err, out)
	}
}

func TestClusterTellsThatKubectlCordoned(t *testing.T) {
	client := clustertest.Client(t)
	for _, command := range []string{"cordon", "drain"} {
		t.Run(command, func(t *testing.T) {
			name := clustertest.Node(t).Name
			before := time.Now().Add(-time.Second) // the API server's times have no fractions
			kubectl(t, command, name)
			if who, since, ok := fence.Cordoner(readNode(t.Context(), t, client, name)); who != "kubectl" || since.Before(before) || !ok {
				t.Errorf("Cordoner is %q since %v, %v; want kubectl since %v or later", who, since, ok, before)
			}
		})
	}
}

// fencedNode is a node that nobody but the agent has written to: it has cordoned it, and the control plane has tainted
// it for that.
func fencedNode(t *testing.T) string {
	t.Helper()
	client := clustertest.Client(t)
	nodes := client.CoreV1().Nodes()
	n, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: "drain-"}}, metav1.CreateOptions{FieldManager: "agent"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := nodes.Delete(context.WithoutCancel(t.Context()), n.Name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("deleting node %s: %v", n.Name, err)
		}
	})
	change(t, client, n.Name, raise)
	clustertest.Eventually(t, "the cordon's taint is there", func(ctx context.Context) (bool, error) {
		return fence.CordonTaint(readNode(ctx, t, client, n.Name)) != nil, nil
	})
	return n.Name
}

// lifted waits until the control plane has taken the cordon's taint away, and gives the node as it is then.
func lifted(t *testing.T, name string) (now *corev1.Node) {
	t.Helper()
	client := clustertest.Client(t)
	clustertest.Eventually(t, "the cordon's taint is gone", func(ctx context.Context) (bool, error) {
		now = readNode(ctx, t, client, name)
		return !now.Spec.Unschedulable && fence.CordonTaint(now) == nil, nil
	})
	return now
}

func TestClusterKnowsWhenKubectlUncordonedAndNotWho(t *testing.T) {
	name := fencedNode(t)
	before := time.Now().Add(-time.Second)
	kubectl(t, "uncordon", name)
	now := lifted(t, name)
	if who, when := fence.Uncordoner(now, "agent"); who != "" || when.Before(before) || when.After(time.Now()) {
		t.Errorf("Uncordoner is %q at %v, want nobody at %v or later", who, when, before)
	}
	for _, m := range now.ManagedFields {
		if m.Manager == "kubectl" {
			t.Errorf("kubectl is in managedFields after all: %+v", m)
		}
	}
	if who, _, ok := fence.Cordoner(now); who != "" || ok {
		t.Errorf("Cordoner of an uncordoned node is %q, %v", who, ok)
	}
}

func TestClusterNamesAControllerThatUncordonsAndNotesIt(t *testing.T) {
	name := fencedNode(t)
	patched := mustPatchNode(t, clustertest.Client(t), name, "machine-config-controller",
		`{"metadata":{"annotations":{"machineconfiguration.openshift.io/lastAppliedDrain":"uncordon-1"}},"spec":{"unschedulable":false}}`)
	// The controller manager cannot have seen what the patch answers with.
	if patched.Spec.Unschedulable || fence.CordonTaint(patched) == nil {
		t.Errorf("no taint is left at the moment of the uncordon: %v", patched.Spec)
	}
	if who, when := fence.Uncordoner(patched, "agent"); who != "" || !when.IsZero() {
		t.Errorf("Uncordoner is %q at %v while the taint is there, want it not known", who, when)
	}
	if who, when := fence.Uncordoner(lifted(t, name), "agent"); who != "machine-config-controller" || when.IsZero() {
		t.Errorf("Uncordoner is %q at %v, want machine-config-controller", who, when)
	}
}
