package judge

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
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
	var out strings.Builder
	why := Fit(w.T.Context(), clientset.Of(w.Client), []Leaving{{Node: "gpu-1", Pods: pods}}, &cli.Printer{W: &out})
	return out.String(), why["gpu-1"]
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

// class makes a DeviceClass that gives the extended resource.
func class(w *world, resource string) {
	w.T.Helper()
	_, err := w.Client.ResourceV1().DeviceClasses().Create(w.T.Context(), &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "slices"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: &resource},
	}, metav1.CreateOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
}

// What claims would get elsewhere, no allocatable says: a node with room for the rest of the pod may have no GPU, and one without the resource may.
func TestNoPodThatAsksByClaimsIsJudged(t *testing.T) {
	for name, change := range agenttest.ByClaim {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.AsksBy("a", change)
				w.AsksBy("b", change)
				class(w, "example.com/slice")
				budget(w, "x", "x", 1)
				w.Edit("gpu-2", func(n *corev1.Node) {
					offers(n, "0")
					delete(n.Status.Allocatable, "nvidia.com/mig-1g.10gb")
				})
				said, why := leave(w, "team/a", "team/b")
				if want := "gpu-1: whether 2 pods with claims for devices would fit elsewhere is not judged: team/a; team/b\n"; !strings.Contains(said, want) ||
					why != "" || strings.Contains(said, " place on other nodes") || strings.Contains(said, "fits on no other node") {
					t.Errorf("want %q, and neither that they fit nor that they do not:\n%s", want, said)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}

// The other pods are judged as ever, also where the user may not list the classes.
func TestWithoutTheClassesPodsAreJudgedByAllocatable(t *testing.T) {
	const unknown = "which extended resources are given by claims is not known, and such pods may fit where it says otherwise: listing DeviceClasses: "
	for _, c := range []struct {
		err   error
		warns bool
	}{
		{apierrors.NewForbidden(schema.GroupResource{Resource: "deviceclasses"}, "", nil), true},
		{apierrors.NewNotFound(schema.GroupResource{Resource: "deviceclasses"}, ""), false}, // an API server that has none yet
	} {
		inWorld(t, func(w *world) {
			w.RunsOn("gpu-1", "a", "app", "x")
			w.AsksBy("b", agenttest.ByClaim["a claim of the spec"])
			w.Client.PrependReactor("list", "deviceclasses", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, c.err })
			w.Edit("gpu-2", func(n *corev1.Node) { offers(n, "1") })
			said, _ := leave(w, "team/a", "team/b")
			for _, want := range []string{
				"gpu-1: 1 pod has a place on other nodes: team/a\n",
				"gpu-1: whether 1 pod with claims for devices would fit elsewhere is not judged: team/b\n",
			} {
				if !strings.Contains(said, want) {
					t.Errorf("want %q:\n%s", want, said)
				}
			}
			if strings.Contains(said, unknown) != c.warns {
				t.Errorf("%v, and that is said: %t, want %t:\n%s", c.err, !c.warns, c.warns, said)
			}
		}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
	}
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
