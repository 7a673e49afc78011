package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
)

// offers makes the node ready, with so many instances.
func offers(n *corev1.Node, instances string) {
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue})
	n.Status.Allocatable = corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse(instances), corev1.ResourcePods: resource.MustParse("110")}
}

// budget lets so many of the pods with the label go.
func (w *world) budget(name, label string, allowed int32) {
	w.t.Helper()
	_, err := w.client.PolicyV1().PodDisruptionBudgets("team").Create(w.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": label}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, CurrentHealthy: 2, DesiredHealthy: 2 - allowed},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// dryRun is the verdict on gpu-1 and what is said of it beyond its plan, where the pods have to leave it.
func (w *world) dryRun(pods ...string) string {
	w.t.Helper()
	w.start("plan", "gpu-1", "--profile", "research")
	w.answers("gpu-1", api.Answer{Steps: []string{"evict"}, Pods: pods, Patience: api.Duration(time.Hour)})
	said, code := w.ended()
	verdict, _, _ := strings.Cut(said, "\n")
	_, rest, found := strings.Cut(said, "   1  evict\n")
	if wantCode := map[bool]int{true: exitHeldUp}[strings.HasPrefix(verdict, "gpu-1: would give up after 1h: ")]; code != wantCode || !found {
		w.t.Fatalf("exit code %d: %s", code, said)
	}
	return verdict + "\n" + rest
}

func TestADryRunSaysWhetherThePodsFitElsewhere(t *testing.T) {
	for name, c := range map[string]struct {
		others func(n *corev1.Node) // what gpu-2 is like
		want   string
	}{
		"room":     {func(n *corev1.Node) { offers(n, "2") }, "gpu-1: 2 pods have a place on other nodes: team/a; team/b\n"},
		"for one":  {func(n *corev1.Node) { offers(n, "1") }, "gpu-1: 1 pod has a place on other nodes: team/a\ngpu-1: team/b fits on no other node: 1 node: too little free nvidia.com/mig-1g.10gb\n"},
		"cordoned": {func(n *corev1.Node) { offers(n, "2"); n.Spec.Unschedulable = true }, "1 node: cordoned\n"},
		"tainted": {func(n *corev1.Node) {
			offers(n, "2")
			n.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
		}, "1 node: taint dedicated\n"},
		"not ready": {func(n *corev1.Node) { offers(n, "2"); n.Status.Conditions = nil }, "1 node: not ready\n"},
		"no GPUs": {func(n *corev1.Node) {
			offers(n, "2")
			delete(n.Status.Allocatable, "nvidia.com/mig-1g.10gb")
		}, "1 node: no nvidia.com/mig-1g.10gb\n"},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.runsOn("gpu-1", "a", "app", "x")
				w.runsOn("gpu-1", "b", "app", "x")
				w.edit("gpu-2", c.others)
				w.edit("gpu-1", func(n *corev1.Node) { offers(n, "7") })
				if said := w.dryRun("team/a", "team/b"); !strings.Contains(said, c.want) {
					t.Errorf("want %q:\n%s", c.want, said)
				}
			}, gpu("gpu-1"), gpu("gpu-2"))
		})
	}
}

// A budget that lets one pod go passes the dry run of the eviction: the second pod is kept where the first one's successor has nowhere to go.
func TestADryRunSaysWhichBudgetWillStandInTheWay(t *testing.T) {
	const (
		slow  = "budget team/x lets 1 of 2 pods go at a time: the next one waits until a successor is ready\n"
		stuck = "budget team/x lets 1 of 2 pods go, and stays in the way then: the next one waits for a successor, and %s no place elsewhere\n"
	)
	for room, c := range map[string]struct{ verdict, want string }{
		"2": {"gpu-1: runs at once\n", slow},
		"1": {"gpu-1: runs at once\n", slow}, // the first has a place, and the last one may go as the budget has then
		"0": {"gpu-1: would give up after 1h: ", fmt.Sprintf(stuck, "2 of them have")},
	} {
		inWorld(t, func(w *world) {
			w.runsOn("gpu-1", "a", "app", "x")
			w.runsOn("gpu-1", "b", "app", "x")
			w.budget("x", "x", 1)
			w.budget("other", "other", 0)
			w.edit("gpu-2", func(n *corev1.Node) { offers(n, room) })
			if said := w.dryRun("team/a", "team/b"); !strings.HasPrefix(said, c.verdict) || !strings.Contains(said, "gpu-1: "+c.want) || strings.Contains(said, "team/other") {
				t.Errorf("with room for %s, want %q and %q:\n%s", room, c.verdict, c.want, said)
			}
		}, gpu("gpu-1"), gpu("gpu-2"))
	}
	inWorld(t, func(w *world) {
		w.runsOn("gpu-1", "a", "app", "x")
		w.budget("x", "x", 0)
		w.budget("second", "x", 5)
		said := w.dryRun("team/a", "team/gone")
		for _, want := range []string{
			"gpu-1: team/a fits on no other node: there is none\n",
			"gpu-1: budget team/x lets none of 1 pod go now: it needs 2 healthy and has 2\n",
			"gpu-1: team/a is in more than one budget, and the API server evicts no such pod: team/second; team/x\n",
			"gpu-1: whether 1 pod more would fit elsewhere is not known\n",
		} {
			if !strings.Contains(said, want) {
				t.Errorf("want %q:\n%s", want, said)
			}
		}
	}, gpu("gpu-1"))
}

func TestADryRunOfAUserWhoMayNotListPodsSaysSo(t *testing.T) {
	inWorld(t, func(w *world) {
		w.client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil)
		})
		if said := w.dryRun("team/a"); !strings.Contains(said, "whether the pods that leave fit elsewhere is not known: listing pods: ") {
			t.Error(said)
		}
	}, gpu("gpu-1"))
}
