package fence_test

import (
	"context"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/managed"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestClusterRefusesAFencePatchOfANodeThatHasChanged(t *testing.T) {
	client := clustertest.Client(t)
	for name, patch := range map[string]func(*corev1.Node) ([]byte, error){"Raise": raise, "Record": record, "Open": theFence.Open, "Lift": lift} {
		t.Run(name, func(t *testing.T) {
			stale := clustertest.Node(t)
			const theirs = `{"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`
			changed := mustPatchNode(t, client, stale.Name, "someone", theirs)

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

// The patch has the namesake's resourceVersion, so that its UID alone distinguishes the nodes.
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
	clustertest.Eventually(t, "a patch meets the namesake as it is", func(ctx context.Context) (bool, error) {
		namesake := readNode(ctx, t, client, former.Name)
		former.ResourceVersion = namesake.ResourceVersion
		p, err := theFence.Raise(former, "J")
		if err != nil {
			return false, err
		}
		if _, err := patchNode(ctx, client, former.Name, "agent", string(p)); !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) {
			t.Errorf("error of a patch of a namesake is %v, want that it is refused for its UID", err)
		}
		// A controller may have written the namesake in between, and the conflict be of its resourceVersion.
		return readNode(ctx, t, client, former.Name).ResourceVersion == namesake.ResourceVersion, nil
	})
}

func TestClusterFenceGoesUpAndDownAndLeavesForeignTaintsAlone(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	mustPatchNode(t, client, name, "someone", `{"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`)
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
		// The controllers put their own taints on the node in the meantime, so a patch may have to be made again, as in the agent.
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
		if got := theFence.IsRaised(now); got != step.stands || now.Spec.Unschedulable != step.cordoned || now.Annotations[theFence.JournalKey] != step.journal {
			t.Errorf("after %s: taint %v, cordon %v, journal %q; want %v, %v, %q", step.name,
				got, now.Spec.Unschedulable, now.Annotations[theFence.JournalKey], step.stands, step.cordoned, step.journal)
		}
		if !slices.ContainsFunc(now.Spec.Taints, isForeign) {
			t.Errorf("after %s the foreign taint is gone: %v", step.name, now.Spec.Taints)
		}
	}
}

func TestClusterShowsWhoCordonedFirstAndSinceWhen(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	before := time.Now().Add(-time.Second) // the API server's times have no fractions
	n := mustPatchNode(t, client, name, "kubectl-cordon", `{"spec":{"unschedulable":true}}`)
	if who, since, ok := managed.Cordoner(n); who != "kubectl-cordon" || since.Before(before) || !ok {
		t.Errorf("just cordoned: Cordoner is %q since %v, %v; want kubectl-cordon since %v or later", who, since, ok, before)
	}

	mustPatchNode(t, client, name, "another-user", `{"spec":{"unschedulable":true}}`)
	var fenced *corev1.Node
	var tainted metav1.Time // on the node that is fenced: a controller that is behind writes its taint again, with another time
	clustertest.Eventually(t, "the cordon's taint is there, and the fence is raised", func(ctx context.Context) (bool, error) {
		n := readNode(ctx, t, client, name)
		taint := managed.CordonTaint(n)
		if taint == nil || taint.TimeAdded == nil {
			return false, nil
		}
		tainted = *taint.TimeAdded
		p, err := theFence.Raise(n, "J")
		if err != nil {
			return false, err
		}
		fenced, err = patchNode(ctx, client, name, "agent", string(p))
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return err == nil, err
	})
	if who, since, ok := managed.Cordoner(fenced); who != "kubectl-cordon" || !since.Equal(tainted.Time) || !ok {
		t.Errorf("cordoned again and fenced: Cordoner is %q since %v, %v; want kubectl-cordon since %v", who, since, ok, tainted)
	}
}

// In the tests that follow a real kubectl cordons and uncordons: the agent reports what it leaves in managedFields.

// kubectl runs a kubectl of the control plane's version as the administrator.
func kubectl(t *testing.T, args ...string) {
	t.Helper()
	if _, err := clustertest.Start(t).RunKubectl(t.Context(), args...); err != nil {
		t.Fatal(err)
	}
}

func TestClusterShowsThatKubectlCordoned(t *testing.T) {
	client := clustertest.Client(t)
	for _, command := range []string{"cordon", "drain"} {
		t.Run(command, func(t *testing.T) {
			name := clustertest.Node(t).Name
			before := time.Now().Add(-time.Second) // the API server's times have no fractions
			kubectl(t, command, name)
			if who, since, ok := managed.Cordoner(readNode(t.Context(), t, client, name)); who != "kubectl" || since.Before(before) || !ok {
				t.Errorf("Cordoner is %q since %v, %v; want kubectl since %v or later", who, since, ok, before)
			}
		})
	}
}

// fencedNode returns a node that only the agent has written to: it has cordoned the node, and the control plane has tainted
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
		return managed.CordonTaint(readNode(ctx, t, client, n.Name)) != nil, nil
	})
	return n.Name
}

// lifted waits until the control plane has taken the cordon's taint away, and gives the node as it is then.
func lifted(t *testing.T, name string) (now *corev1.Node) {
	t.Helper()
	client := clustertest.Client(t)
	clustertest.Eventually(t, "the cordon's taint is gone", func(ctx context.Context) (bool, error) {
		now = readNode(ctx, t, client, name)
		return !now.Spec.Unschedulable && managed.CordonTaint(now) == nil, nil
	})
	return now
}

func TestClusterKnowsWhenKubectlUncordonedAndNotWho(t *testing.T) {
	name := fencedNode(t)
	before := time.Now().Add(-time.Second)
	kubectl(t, "uncordon", name)
	now := lifted(t, name)
	if who, when := fence.Uncordoner(now, "agent"); who != "" || when.Before(before) || when.After(time.Now()) {
		t.Errorf("Uncordoner is %q at %v, want no one at %v or later", who, when, before)
	}
	for _, m := range now.ManagedFields {
		if m.Manager == "kubectl" {
			t.Errorf("kubectl is in managedFields after all: %+v", m)
		}
	}
	if who, _, ok := managed.Cordoner(now); who != "" || ok {
		t.Errorf("Cordoner of an uncordoned node is %q, %v", who, ok)
	}
}

func TestClusterDoesNotNameAControllerThatUncordonsAndNotesIt(t *testing.T) {
	name := fencedNode(t)
	patched := mustPatchNode(t, clustertest.Client(t), name, "machine-config-controller",
		`{"metadata":{"annotations":{"machineconfiguration.openshift.io/lastAppliedDrain":"uncordon-1"}},"spec":{"unschedulable":false}}`)
	// The controller manager cannot have seen what the patch answers with.
	if patched.Spec.Unschedulable || managed.CordonTaint(patched) == nil {
		t.Errorf("no taint is left at the moment of the uncordon: %v", patched.Spec)
	}
	if who, when := fence.Uncordoner(patched, "agent"); who != "" || !when.IsZero() {
		t.Errorf("Uncordoner is %q at %v while the taint is there, want it not known", who, when)
	}
	if who, when := fence.Uncordoner(lifted(t, name), "agent"); who != "" || when.IsZero() {
		t.Errorf("Uncordoner is %q at %v, want no one: the note may be of another write", who, when)
	}
}
