package drain_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// readyPod is the pod of that name, which is ready, under a label by which budgets select it.
func readyPod(name, app string) holders.Pod {
	p := holder(name)
	p.Ready, p.Labels = true, map[string]string{"app": app}
	return p
}

// budgetOf is the budget of another app.
func budgetOf(b *policyv1.PodDisruptionBudget, app string) *policyv1.PodDisruptionBudget {
	b.Spec.Selector.MatchLabels["app"] = app
	return b
}

func TestASummaryNamesEachCauseOnce(t *testing.T) {
	const full = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu"
	five := []holders.Pod{readyPod("a", "api"), readyPod("b", "api"), readyPod("c", "api"), readyPod("d", "api"), readyPod("e", "api")}
	uncounted, uncountable := budget("api", 2, 2, 3), budget("api", 2, 2, 3)
	uncounted.Generation = 1
	uncountable.Status.Conditions = []metav1.Condition{{
		Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: "found no controllers",
	}}
	elsewhere := pending("x", "")
	elsewhere.Status.Conditions, elsewhere.Spec.NodeName = nil, "gpu-7"
	for name, c := range map[string]struct {
		objects []runtime.Object
		pods    []holders.Pod
		policy  drain.Policy
		after   time.Duration // of the deadline that its reader knows, from the cordon on
		want    []string
	}{
		"a budget that keeps one": {
			[]runtime.Object{budget("api", 2, 2, 3)},
			five[:1],
			drain.Policy{},
			0,
			[]string{"make room in PDB team/api: it needs 2 healthy pods and has 2, and keeps team/a"},
		},
		"a budget that never lets one go": {
			[]runtime.Object{budget("api", 5, 5, 5)},
			five,
			drain.Policy{},
			0,
			[]string{"change PDB team/api or add pods to it: it needs 5 healthy pods and has 5 of 5, and keeps team/a, team/b, team/c and 2 more"},
		},
		"two budgets": {
			[]runtime.Object{budget("api", 2, 2, 3), budgetOf(budget("db", 1, 1, 1), "db")},
			[]holders.Pod{five[0], readyPod("y", "db"), five[1], readyPod("z", "db")},
			drain.Policy{},
			0,
			[]string{
				"make room in PDB team/api: it needs 2 healthy pods and has 2, and keeps team/a, team/b",
				"change PDB team/db or add pods to it: it needs 1 healthy pod and has 1 of 1, and keeps team/y, team/z",
			},
		},
		"two budgets for each pod": {
			[]runtime.Object{budget("api", 2, 2, 3), budget("too", 1, 1, 2)},
			five[:2],
			drain.Policy{},
			0,
			[]string{"change the selectors of PDBs team/api, team/too: the API server evicts no pod that more than one PodDisruptionBudget selects, and keeps team/a, team/b"},
		},
		"a successor without a place": {
			[]runtime.Object{budget("api", 2, 2, 3), pending("x", full+". preemption: no")},
			five[:2],
			drain.Policy{},
			0,
			[]string{"give team/x room on another node: it is Pending (" + full + "), and PDB team/api needs 2 healthy pods and has 2, and keeps team/a, team/b"},
		},
		"a successor that does not start": {
			[]runtime.Object{budget("api", 2, 2, 3), elsewhere},
			five[:1],
			drain.Policy{},
			0,
			[]string{"see why team/x has not started on node gpu-7: PDB team/api needs 2 healthy pods and has 2, and keeps team/a"},
		},
		"a budget that was changed just now": {
			[]runtime.Object{uncounted},
			five[:1],
			drain.Policy{},
			0,
			[]string{"see why the controller manager does not count PDB team/api: it was changed, and the controller manager has not counted its pods since, and keeps team/a"},
		},
		"a budget that cannot count": {
			[]runtime.Object{uncountable},
			five[:1],
			drain.Policy{},
			0,
			[]string{"fix PDB team/api: it cannot count its pods (found no controllers), and keeps team/a"},
		},
		"a budget that may not be read": {
			nil, five[:2],
			drain.Policy{},
			0,
			[]string{"make room in PDB team/api: " + needsTwo + ", and keeps team/a, team/b"},
		},
		"one that is not ready": {
			[]runtime.Object{budget("api", 2, 1, 3)},
			[]holders.Pod{five[0], holder("b")},
			drain.Policy{},
			0,
			[]string{"make room in PDB team/api: it needs 2 healthy pods and has 1, and keeps team/a, team/b; one that is not ready would go if the PDB had unhealthyPodEvictionPolicy: AlwaysAllow"},
		},
		"the deadline that its reader knows": {
			[]runtime.Object{budget("api", 2, 2, 3)},
			five[:2],
			drain.Policy{Deadline: time.Hour},
			time.Hour,
			[]string{"make room in PDB team/api: it needs 2 healthy pods and has 2, and keeps team/a, team/b"},
		},
		"another deadline": {
			[]runtime.Object{budget("api", 2, 2, 3)},
			five[:2],
			drain.Policy{Deadline: time.Hour},
			2 * time.Hour,
			[]string{"make room in PDB team/api: it needs 2 healthy pods and has 2, and keeps team/a, team/b; retried until 13:00Z"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(c.objects...)
			s.answer = refusal(needsTwo, 0)
			e, _ := s.evictor()
			verdicts := e.Evict(t.Context(), c.pods, c.policy, noon)
			if diff := cmp.Diff(c.want, drain.Summary(verdicts, noon.Add(c.after))); diff != "" {
				t.Errorf("summary (-want +got):\n%s", diff)
			}
			for _, v := range verdicts { // tools find each pod with its budget
				if v.PDB != "" && !strings.Contains(v.Message, "team/api") && !strings.Contains(v.Message, "team/db") {
					t.Errorf("the verdict on %s does not name its budget: %s", v.Pod, v.Message)
				}
			}
		})
	}
}

func TestASummaryCountsPodsOfWhichTheSameIsSaid(t *testing.T) {
	s := newServer()
	e, _ := s.evictor()
	static, late := readyPod("s", "api"), readyPod("late", "api")
	static.Mirror, late.Terminating, late.GraceEnds = true, true, noon.Add(time.Minute)
	soon := late
	soon.Name, soon.UID = "soon", "uid-soon"
	got := drain.Summary(e.Evict(t.Context(), []holders.Pod{readyPod("a", "api"), late, static, readyPod("b", "api"), soon}, drain.Policy{}, noon), time.Time{})
	if diff := cmp.Diff([]string{
		"team/a, team/b", // evictions were requested: nothing more is to be said
		"team/late, team/soon: terminating, its grace ends at 12:01:00Z",
		"team/s: it is a static pod, which cannot be evicted: move its manifest out of kubelet's directory on the node",
	}, got); diff != "" {
		t.Errorf("summary (-want +got):\n%s", diff)
	}
}
