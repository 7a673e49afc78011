package judge

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// offers makes the node ready, with so many instances.
func offers(n *corev1.Node, instances string) {
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue})
	n.Status.Allocatable = corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse(instances), corev1.ResourcePods: resource.MustParse("110")}
}

// budget lets so many of the pods with the label go.
func budget(w *world, name, label string, allowed int32) {
	w.T.Helper()
	_, err := w.Client.PolicyV1().PodDisruptionBudgets("team").Create(w.T.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": label}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, CurrentHealthy: 2, DesiredHealthy: 2 - allowed},
	}, metav1.CreateOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
}

// leave is what is said of pods that leave gpu-1, and why not all of them would.
func leave(w *world, pods ...string) (said, stuck string) {
	w.T.Helper()
	said, verdict := judged(w, pods...)
	return said, verdict.Stuck
}

// judged is what is said of pods that leave gpu-1, with the verdict.
func judged(w *world, pods ...string) (said string, verdict Verdict) {
	w.T.Helper()
	var out strings.Builder
	verdicts := Fit(w.T.Context(), clientset.Of(w.Client), []Leaving{{Node: "gpu-1", Pods: pods}}, &cli.Printer{W: &out})
	return out.String(), verdicts["gpu-1"]
}

func TestPodsThatLeaveHaveAPlaceOrNot(t *testing.T) {
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
				w.RunsOn("gpu-1", "a", "app", "x")
				w.RunsOn("gpu-1", "b", "app", "x")
				w.Edit("gpu-2", c.others)
				w.Edit("gpu-1", func(n *corev1.Node) { offers(n, "7") })
				if said, _ := leave(w, "team/a", "team/b"); !strings.Contains(said, c.want) {
					t.Errorf("want %q:\n%s", c.want, said)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}

// A budget that lets one pod go passes the dry run of the eviction: the second pod is kept where the first one's successor has nowhere to go.
func TestABudgetThatStandsInTheWayIsNamed(t *testing.T) {
	const (
		slow  = "budget team/x lets 1 of 2 pods go at a time: the next one waits until a successor is ready\n"
		stuck = "budget team/x lets 1 of 2 pods go, and stays in the way then: the next one waits for a successor, and %s no place elsewhere\n"
	)
	for room, c := range map[string]struct {
		want string
		ends bool // all pods leave in the end
	}{
		"2": {slow, true},
		"1": {slow, true}, // the first has a place, and the last one may go as the budget has then
		"0": {fmt.Sprintf(stuck, "2 of them have"), false},
	} {
		inWorld(t, func(w *world) {
			w.RunsOn("gpu-1", "a", "app", "x")
			w.RunsOn("gpu-1", "b", "app", "x")
			budget(w, "x", "x", 1)
			budget(w, "other", "other", 0)
			w.Edit("gpu-2", func(n *corev1.Node) { offers(n, room) })
			said, why := leave(w, "team/a", "team/b")
			if !strings.Contains(said, "gpu-1: "+c.want) || strings.Contains(said, "team/other") {
				t.Errorf("with room for %s, want %q:\n%s", room, c.want, said)
			}
			if want := strings.TrimSuffix(c.want, "\n"); c.ends && why != "" || !c.ends && why != want {
				t.Errorf("with room for %s, they are stuck by %q", room, why)
			}
		}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
	}
	inWorld(t, func(w *world) {
		w.RunsOn("gpu-1", "a", "app", "x")
		budget(w, "x", "x", 0)
		budget(w, "second", "x", 5)
		said, _ := leave(w, "team/a", "team/gone")
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
	}, agenttest.GPU("gpu-1"))
}

func TestAUserWhoMayNotListPodsReadsSo(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil)
		})
		if said, _ := leave(w, "team/a"); !strings.Contains(said, "whether the pods that leave fit elsewhere is not known: listing pods: ") {
			t.Error(said)
		}
	}, agenttest.GPU("gpu-1"))
}
