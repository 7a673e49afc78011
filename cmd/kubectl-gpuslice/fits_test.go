package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
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

// byClaim is what makes a pod one that asks for its devices by claims.
var byClaim = map[string]func(p *corev1.Pod){
	"a claim of the spec": func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("mig-1g.10gb")}}
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
	},
	"a claim by the scheduler": func(p *corev1.Pod) {
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "made"}
	},
	"a resource of a class's own name": func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": resource.MustParse("1")}
	},
	"a resource that a class names": func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"example.com/slice": resource.MustParse("1")}
	},
}

// asksBy makes a pod on gpu-1, as runsOn, and changes it.
func (w *world) asksBy(name string, change func(p *corev1.Pod)) {
	w.t.Helper()
	p := w.runsOn("gpu-1", name, "app", "x")
	change(p)
	if _, err := w.client.CoreV1().Pods("team").Update(w.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// class makes a DeviceClass that gives the extended resource.
func (w *world) class(resource string) {
	w.t.Helper()
	_, err := w.client.ResourceV1().DeviceClasses().Create(w.t.Context(), &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "slices"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: &resource},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
}

// What claims would get elsewhere, no allocatable says: a node with room for the rest of the pod may have no GPU, and one without the resource may.
func TestADryRunJudgesNoPodThatAsksByClaims(t *testing.T) {
	for name, change := range byClaim {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.asksBy("a", change)
				w.asksBy("b", change)
				w.class("example.com/slice")
				w.budget("x", "x", 1)
				w.edit("gpu-2", func(n *corev1.Node) {
					offers(n, "0")
					delete(n.Status.Allocatable, "nvidia.com/mig-1g.10gb")
				})
				said := w.dryRun("team/a", "team/b")
				if want := "gpu-1: whether 2 pods with claims for devices would fit elsewhere is not judged: team/a; team/b\n"; !strings.Contains(said, want) ||
					!strings.HasPrefix(said, "gpu-1: runs at once\n") || strings.Contains(said, " place on other nodes") || strings.Contains(said, "fits on no other node") {
					t.Errorf("want %q, and neither that they fit nor that they do not:\n%s", want, said)
				}
			}, gpu("gpu-1"), gpu("gpu-2"))
		})
	}
}

// The other pods are judged as ever, also where the user may not list the classes.
func TestADryRunWithoutTheClassesSaysSoAndJudgesByAllocatable(t *testing.T) {
	const unknown = "which extended resources are given by claims is not known, and such pods may fit where it says otherwise: listing DeviceClasses: "
	for _, c := range []struct {
		err   error
		warns bool
	}{
		{apierrors.NewForbidden(schema.GroupResource{Resource: "deviceclasses"}, "", nil), true},
		{apierrors.NewNotFound(schema.GroupResource{Resource: "deviceclasses"}, ""), false}, // an API server that has none yet
	} {
		inWorld(t, func(w *world) {
			w.runsOn("gpu-1", "a", "app", "x")
			w.asksBy("b", byClaim["a claim of the spec"])
			w.client.PrependReactor("list", "deviceclasses", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, c.err })
			w.edit("gpu-2", func(n *corev1.Node) { offers(n, "1") })
			said := w.dryRun("team/a", "team/b")
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
		}, gpu("gpu-1"), gpu("gpu-2"))
	}
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
