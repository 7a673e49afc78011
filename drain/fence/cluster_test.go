package fence_test

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// The tests in this file ask a real API server and controller manager what the fake clientset does not know: conflicts and managed
// fields.

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

func TestClusterRefusesAFencePatchOfANodeThatHasChanged(t *testing.T) {
	client := clustertest.Client(t)
	for name, patch := range map[string]func(*corev1.Node) ([]byte, error){"Raise": raise, "Record": record, "Open": theFence.Open, "Lift": lift} {
		t.Run(name, func(t *testing.T) {
			stale := clustertest.Node(t)
			const theirs = `{"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`
			changed := mustPatchNode(t, client, stale.Name, "somebody", theirs)

			p, err := patch(stale)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := patchNode(t.Context(), client, stale.Name, "agent", string(p)); !apierrors.IsConflict(err) {
				t.Errorf("error of a patch of a stale node is %v, want a conflict", err)
			}
			now := readNode(t.Context(), t, client, stale.Name)
			if _, ours := now.Annotations[theFence.JournalKey]; ours || now.Spec.Unschedulable || !slices.ContainsFunc(now.Spec.Taints, isForeign) {
				t.Errorf("the refused patch changed the node: %v, annotations %v; it was %v", now.Spec, now.Annotations, changed.Spec)
			}
		})
	}
}

func isForeign(t corev1.Taint) bool { return t.Key == foreignTaint.Key }

func TestClusterRefusesAFencePatchOfANodeThatWasReplacedByANamesake(t *testing.T) {
	client := clustertest.Client(t)
	former := clustertest.Node(t)
	nodes := client.CoreV1().Nodes()
	if err := nodes.Delete(t.Context(), former.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: former.Name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := theFence.Raise(former, "J")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := patchNode(t.Context(), client, former.Name, "agent", string(p)); !apierrors.IsConflict(err) {
		t.Errorf("error of a patch of a namesake is %v, want a conflict", err)
	}
}

func TestClusterFenceGoesUpAndDownAndLeavesForeignTaintsAlone(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	mustPatchNode(t, client, name, "somebody", `{"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`)
	for _, step := range []struct {
		name             string
		patch            func(*corev1.Node) ([]byte, error)
		stands, cordoned bool
		journal          string
	}{
		{"Raise", raise, true, true, "J"},
		{"Record", func(n *corev1.Node) ([]byte, error) { return theFence.Record(n, "K") }, true, true, "K"},
		{"Open", theFence.Open, false, true, "K"},
		{"Lift", lift, false, false, ""},
	} {
		// The controllers put their own taints on the node meanwhile, so a patch may have to be made anew, as in the agent.
		var now *corev1.Node
		clustertest.Eventually(t, step.name+" is accepted", func(ctx context.Context) (bool, error) {
			p, err := step.patch(readNode(ctx, t, client, name))
			if err != nil {
				return false, err
			}
			now, err = patchNode(ctx, client, name, "agent", string(p))
			if apierrors.IsConflict(err) {
				return false, nil
			}
			return err == nil, err
		})
		if got := theFence.Stands(now); got != step.stands || now.Spec.Unschedulable != step.cordoned || now.Annotations[theFence.JournalKey] != step.journal {
			t.Errorf("after %s: taint %v, cordon %v, journal %q; want %v, %v, %q", step.name,
				got, now.Spec.Unschedulable, now.Annotations[theFence.JournalKey], step.stands, step.cordoned, step.journal)
		}
		if !slices.ContainsFunc(now.Spec.Taints, isForeign) {
			t.Errorf("after %s the foreign taint is gone: %v", step.name, now.Spec.Taints)
		}
	}
}

func TestClusterTellsWhoCordonedFirstAndSinceWhen(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	before := time.Now().Add(-time.Second) // the API server's times have no fractions
	n := mustPatchNode(t, client, name, "kubectl-cordon", `{"spec":{"unschedulable":true}}`)
	if who, since, ok := fence.Cordoner(n); who != "kubectl-cordon" || since.Before(before) || !ok {
		t.Errorf("just cordoned: Cordoner is %q since %v, %v; want kubectl-cordon since %v or later", who, since, ok, before)
	}

	var tainted metav1.Time
	clustertest.Eventually(t, "the cordon's taint is there", func(ctx context.Context) (bool, error) {
		for _, taint := range readNode(ctx, t, client, name).Spec.Taints {
			if taint.Key == corev1.TaintNodeUnschedulable && taint.TimeAdded != nil {
				tainted = *taint.TimeAdded
				return true, nil
			}
		}
		return false, nil
	})
	mustPatchNode(t, client, name, "somebody-else", `{"spec":{"unschedulable":true}}`)
	var fenced *corev1.Node
	clustertest.Eventually(t, "the fence is raised", func(ctx context.Context) (bool, error) {
		p, err := theFence.Raise(readNode(ctx, t, client, name), "J")
		if err != nil {
			return false, err
		}
		fenced, err = patchNode(ctx, client, name, "agent", string(p))
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return err == nil, err
	})
	if who, since, ok := fence.Cordoner(fenced); who != "kubectl-cordon" || !since.Equal(tainted.Time) || !ok {
		t.Errorf("cordoned again and fenced: Cordoner is %q since %v, %v; want kubectl-cordon since %v", who, since, ok, tainted)
	}
}
