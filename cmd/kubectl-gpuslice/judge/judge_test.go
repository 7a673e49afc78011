package judge

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
)

// instance is the resource that most pods of the tests request.
const instance = "nvidia.com/mig-1g.10gb"

// node is one that is ready, with so many instances.
func node(name, instances string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		Allocatable: corev1.ResourceList{instance: resource.MustParse(instances), corev1.ResourcePods: resource.MustParse("110")},
	}}
}

// pod is one of a StatefulSet on gpu-1 that requests an instance, and is changed.
func pod(name string, changes ...func(p *corev1.Pod)) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "x"}, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "team", Controller: new(true)},
		}},
		Spec: corev1.PodSpec{NodeName: "gpu-1", Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{instance: resource.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	for _, change := range changes {
		change(&p)
	}
	return p
}

// budget lets so many of the pods with the label go.
func budget(name, label string, allowed int32) policyv1.PodDisruptionBudget {
	return policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": label}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, CurrentHealthy: 2, DesiredHealthy: 2 - allowed},
	}
}

// leave judges these pods of gpu-1, each by its name alone, and returns it with what is said of it. It fails the test if a judgement changes the cluster, or the
// next one.
func leave(t *testing.T, c *Cluster, pods ...string) (said string, of Judgement) {
	t.Helper()
	l := Leaving{Node: "gpu-1"}
	for _, name := range pods {
		l.Pods = append(l.Pods, "team/"+name)
	}
	before := texts(t, c)
	both := Judge(t.Context(), c, l, l)
	if diff := cmp.Diff(both[0], both[1]); diff != "" {
		t.Errorf("the second judgement is another (-first +second):\n%s", diff)
	}
	if diff := cmp.Diff(before, texts(t, c)); diff != "" {
		t.Errorf("the judgement has changed the cluster (-before +after):\n%s", diff)
	}
	return strings.Join(both[0].Lines(), "\n") + "\n", both[0]
}

// texts is the cluster in texts, to compare.
func texts(t testing.TB, c *Cluster) string {
	t.Helper()
	text, err := json.MarshalIndent(c, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPodsThatLeaveHaveAPlaceOrNot(t *testing.T) {
	for name, row := range map[string]struct {
		room   string // instances of gpu-2
		change func(gpu1, gpu2 *corev1.Node, a, b *corev1.Pod)
		want   string
	}{
		"room":     {"2", nil, "2 pods have a place on other nodes: team/a; team/b\n"},
		"for one":  {"1", nil, "1 pod has a place on other nodes: team/a\nteam/b fits on no other node: 1 node: too little free nvidia.com/mig-1g.10gb\n"},
		"cordoned": {"2", func(_, n *corev1.Node, _, _ *corev1.Pod) { n.Spec.Unschedulable = true }, "1 node: cordoned\n"},
		"tainted": {"2", func(_, n *corev1.Node, _, _ *corev1.Pod) {
			n.Spec.Taints = []corev1.Taint{{Key: "dedicated", Effect: corev1.TaintEffectNoSchedule}}
		}, "1 node: taint dedicated\n"},
		"cordoned, which one tolerates": {
			"2", func(_, n *corev1.Node, a, _ *corev1.Pod) {
				n.Spec.Unschedulable = true
				a.Spec.Tolerations = []corev1.Toleration{{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists}}
			},
			"1 pod has a place on other nodes: team/a\nteam/b fits on no other node: 1 node: cordoned\n",
		},
		"not ready": {"2", func(_, n *corev1.Node, _, _ *corev1.Pod) { n.Status.Conditions = nil }, "1 node: not ready\n"},
		"no GPUs":   {"2", func(_, n *corev1.Node, _, _ *corev1.Pod) { delete(n.Status.Allocatable, instance) }, "1 node: no nvidia.com/mig-1g.10gb\n"},
		"another selector": {"2", func(_, _ *corev1.Node, a, _ *corev1.Pod) {
			a.Spec.NodeSelector = map[string]string{"pool": "a"}
		}, "1 pod has a place on other nodes: team/b\nteam/a fits on no other node: 1 node: excluded by the pod's node selector or affinity\n"},
		"one that comes back": {"1", func(_, _ *corev1.Node, a, _ *corev1.Pod) { a.OwnerReferences[0].Kind = "DaemonSet" }, "1 pod has a place on other nodes: team/b\n"},
		"a bare one":          {"1", func(_, _ *corev1.Node, a, _ *corev1.Pod) { a.OwnerReferences = nil }, "1 pod has a place on other nodes: team/b\n"},
		"one that has moved": {
			"2", func(_, _ *corev1.Node, a, _ *corev1.Pod) { a.Spec.NodeName = "gpu-2" },
			"1 pod has a place on other nodes: team/b\nwhether 1 pod more would fit elsewhere is not known\n",
		},
		"one that has ended there": {
			"1", func(_, _ *corev1.Node, a, _ *corev1.Pod) {
				a.Spec.NodeName, a.Status.Phase = "gpu-2", corev1.PodSucceeded
			},
			"1 pod has a place on other nodes: team/b\nwhether 1 pod more would fit elsewhere is not known\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{Nodes: []corev1.Node{node("gpu-1", "7"), node("gpu-2", row.room)}, Pods: []corev1.Pod{pod("a"), pod("b")}}
			if row.change != nil {
				row.change(&c.Nodes[0], &c.Nodes[1], &c.Pods[0], &c.Pods[1])
			}
			if said, of := leave(t, c, "a", "b"); !strings.HasSuffix(said, row.want) || of.Stuck+of.Unknown != "" {
				t.Errorf("want %q:\n%s%+v", row.want, said, of)
			}
		})
	}
}

// The scheduler asks more than is asked here. Where that may decide, it is not known whether a pod has a place.
func TestWhatTheSchedulerAloneKnowsIsNotKnown(t *testing.T) {
	other := []corev1.PodAffinityTerm{{TopologyKey: corev1.LabelHostname}}
	full := func(change func(p *corev1.Pod)) func(*Cluster, *corev1.Pod) { // of a pod that is on the other node
		return func(c *Cluster, p *corev1.Pod) {
			p.Spec.Priority = new(int32(7))
			there := pod("there", func(p *corev1.Pod) { p.Spec.NodeName = "gpu-2" }, change)
			there.Spec.Containers[0].Resources.Requests[instance] = resource.MustParse("2")
			c.Pods = append(c.Pods, there)
		}
	}
	lower := func(*corev1.Pod) {}
	for name, row := range map[string]struct {
		change func(c *Cluster, p *corev1.Pod)
		want   string // why it is not known; empty if it is
		stuck  bool
	}{
		"affinity": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: other}}
		}, "its affinity to other pods is not checked", false},
		"anti-affinity": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: other}}
		}, "its affinity to other pods is not checked", false},
		"affinity that is preferred": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAffinity: &corev1.PodAffinity{}, PodAntiAffinity: &corev1.PodAntiAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{PodAffinityTerm: other[0]}},
			}}
		}, "", false},
		"spread": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}
		}, "its topology spread is not checked", false},
		"spread that is preferred": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.ScheduleAnyway}}
		}, "", false},
		"a volume": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{}}}}
		}, "its volumes are not checked", false},
		"a volume of its own": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}}}
		}, "its volumes are not checked", false},
		"an emptyDir": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}, "", false},
		"a port of the host": {func(_ *Cluster, p *corev1.Pod) {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}, {HostPort: 80}}
		}, "its host ports are not checked", false},
		"another scheduler":   {func(_ *Cluster, p *corev1.Pod) { p.Spec.SchedulerName = "gang\x1b" }, `its scheduler, gang\x1b, is not asked`, false},
		"the usual scheduler": {func(_ *Cluster, p *corev1.Pod) { p.Spec.SchedulerName = corev1.DefaultSchedulerName }, "", false},
		"another node that is being changed": {func(c *Cluster, _ *corev1.Pod) {
			n := &c.Nodes[1]
			n.Spec.Unschedulable, n.Annotations = true, map[string]string{config.AnnotationJournal: "{}"}
		}, "gpu-2 is being changed", false},
		"another node that is being changed, and the pod is for another host": {func(c *Cluster, p *corev1.Pod) {
			n := &c.Nodes[1]
			n.Spec.Unschedulable, n.Annotations = true, map[string]string{config.AnnotationJournal: "{}"}
			p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "gpu-1"}
		}, "", true},
		"a lower priority there":          {full(lower), "it may preempt pods on gpu-2", false},
		"the same priority there":         {full(func(p *corev1.Pod) { p.Spec.Priority = new(int32(7)) }), "", true},
		"a lower priority that has ended": {full(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), "", false},
		"a lower priority, and it never preempts": {func(c *Cluster, p *corev1.Pod) {
			full(lower)(c, p)
			p.Spec.PreemptionPolicy = new(corev1.PreemptNever)
		}, "", true},
		"a lower priority, which has what the node no longer offers": {func(c *Cluster, p *corev1.Pod) {
			full(lower)(c, p)
			delete(c.Nodes[1].Status.Allocatable, instance)
		}, "", true},
		"a lower priority, which would not do": {func(c *Cluster, p *corev1.Pod) {
			full(lower)(c, p)
			p.Spec.Containers[0].Resources.Requests[instance] = resource.MustParse("3")
		}, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			a := pod("a")
			c := &Cluster{Nodes: []corev1.Node{node("gpu-1", "7"), node("gpu-2", "2")}, Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 1)}}
			row.change(c, &a)
			b := *a.DeepCopy()
			b.Name, b.UID = "b", "uid-b"
			c.Pods = append(c.Pods, a, b)
			said, of := leave(t, c, "a", "b")
			want := ""
			if row.want != "" {
				want = fmt.Sprintf("pods with a budget may have no place: team/a (%[1]s); team/b (%[1]s)", row.want)
			}
			if of.Unknown != want || (of.Stuck != "") != row.stuck {
				t.Errorf("stuck: %t, not known: %q, want %q; all of it:\n%s%+v", row.stuck, of.Unknown, want, said, of)
			}
		})
	}
}

// A pod that does not know its place may take it from the next one.
func TestAPodOfWhichItIsNotKnownTakesRoom(t *testing.T) {
	c := &Cluster{Nodes: []corev1.Node{node("gpu-1", "7"), node("gpu-2", "1")}, Pods: []corev1.Pod{
		pod("a", func(p *corev1.Pod) { p.Spec.SchedulerName = "gang" }), pod("b"),
	}}
	if said, _ := leave(t, c, "a", "b"); !strings.Contains(said, "team/b fits on no other node") {
		t.Error(said)
	}
}

// Users write what is computed here, in any number and as slow as they like.
func TestAfterTheDeadlineNoPlaceIsKnown(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := &Cluster{
		Nodes: []corev1.Node{node("gpu-1", "2"), node("gpu-2", "1")}, Pods: []corev1.Pod{pod("a"), pod("b")},
		Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 1)},
	}
	of := Judge(ctx, c, Leaving{Node: "gpu-1", Pods: []string{"team/a", "team/b"}})[0]
	if len(of.Unplaced) != 2 || !strings.Contains(of.Unknown, "took too long") || of.Stuck != "" {
		t.Errorf("after the deadline the judgement is %+v", of)
	}
}

// Nodes that change together may each be the place of the other's pods, and then neither is.
func TestNodesThatChangeTogetherAreNoPlace(t *testing.T) {
	on := func(node, app string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeName, p.Labels = node, map[string]string{"app": app} }
	}
	c := &Cluster{
		Nodes: []corev1.Node{node("gpu-1", "4"), node("gpu-2", "4")}, Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 1), budget("y", "y", 1)},
		Pods: []corev1.Pod{pod("a", on("gpu-1", "x")), pod("b", on("gpu-1", "x")), pod("c", on("gpu-2", "y")), pod("d", on("gpu-2", "y"))},
	}
	one, other := Leaving{Node: "gpu-1", Pods: []string{"team/a", "team/b"}}, Leaving{Node: "gpu-2", Pods: []string{"team/c", "team/d"}}
	both := Judge(t.Context(), c, one, other)
	if want := "pods with a budget may have no place: team/a (gpu-2 is to change, too); team/b (gpu-2 is to change, too)"; both[0].Unknown != want || both[1].Unknown == "" {
		t.Errorf("%+v", both)
	}
	empty := Judge(t.Context(), c, one, Leaving{Node: "gpu-2"})
	if empty[0].Unknown != both[0].Unknown || len(empty[1].Lines()) > 0 {
		t.Errorf("beside a node that no pod leaves: %+v", empty)
	}
	c.Nodes = append(c.Nodes, node("gpu-3", "2"))
	for _, of := range append(Judge(t.Context(), c, one, other), Judge(t.Context(), c, one)...) {
		if len(of.Placed) != 2 || of.Stuck+of.Unknown != "" {
			t.Errorf("where a third has room, or the other stays as it is: %+v", of)
		}
	}
}

// The API server evicts a pod that is not ready, or not running, though its budget is used up.
func TestPodsThatABudgetDoesNotKeepAreNotCounted(t *testing.T) {
	unready := func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }
	always := func(b *policyv1.PodDisruptionBudget) { b.Spec.UnhealthyPodEvictionPolicy = new(policyv1.AlwaysAllow) }
	short := func(b *policyv1.PodDisruptionBudget) {
		b.Status.CurrentHealthy, b.Status.DesiredHealthy, b.Status.DisruptionsAllowed = 1, 2, 0
	}
	for name, row := range map[string]struct {
		pod    func(*corev1.Pod)
		budget func(*policyv1.PodDisruptionBudget)
		of     int // how many of them the budget keeps
	}{
		"a ready one":                               {func(*corev1.Pod) {}, func(*policyv1.PodDisruptionBudget) {}, 2},
		"an unready one, and enough that are":       {unready, func(*policyv1.PodDisruptionBudget) {}, 0},
		"an unready one, and too few that are":      {unready, short, 2},
		"an unready one, which always goes":         {unready, func(b *policyv1.PodDisruptionBudget) { short(b); always(b) }, 1},
		"a ready one, where unready ones always go": {func(*corev1.Pod) {}, func(b *policyv1.PodDisruptionBudget) { short(b); always(b) }, 2},
		"an unready one, and none are needed":       {unready, func(b *policyv1.PodDisruptionBudget) { b.Status.DesiredHealthy, b.Status.DisruptionsAllowed = 0, 0 }, 2},
		"one that ends":                             {func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, short, 1},
		"one that has not started":                  {func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }, short, 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{Nodes: []corev1.Node{node("gpu-1", "7")}, Pods: []corev1.Pod{pod("a"), pod("b", row.pod)}, Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 1)}}
			row.budget(&c.Budgets[0])
			said, of := leave(t, c, "a", "b")
			got := 0
			for _, b := range of.Budgets {
				got += b.Of
			}
			if got != row.of || (of.Stuck+of.Unknown == "") != (row.of == 0) {
				t.Errorf("the budget keeps %d of the pods, want %d:\n%s%+v", got, row.of, said, of)
			}
		})
	}
}

// A budget that lets one pod go passes the dry run of the eviction: the second pod is kept where the first one's successor has nowhere to go.
func TestABudgetThatStandsInTheWayIsNamed(t *testing.T) {
	const (
		slow  = "budget team/x lets 1 of 2 pods go at a time: the next one waits until a successor is ready\n"
		stuck = "budget team/x lets 1 of 2 pods go, and then no more: %s no successor\n"
	)
	bare := func(p *corev1.Pod) { p.OwnerReferences = nil }
	for name, row := range map[string]struct {
		room  string
		of    []corev1.Pod
		want  string
		stuck bool
	}{
		"room for both": {"2", []corev1.Pod{pod("a"), pod("b")}, slow, false},
		"room for one":  {"1", []corev1.Pod{pod("a"), pod("b")}, slow, false}, // the first has a place, and the last one may go as the budget has then
		"no room":       {"0", []corev1.Pod{pod("a"), pod("b")}, fmt.Sprintf(stuck, "2 of them get"), true},
		"one that comes back once the node is open, and room for the other": {
			"2", []corev1.Pod{pod("a", func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "DaemonSet" }), pod("b")}, fmt.Sprintf(stuck, "1 of them gets"), true,
		},
		"bare pods":                          {"2", []corev1.Pod{pod("a", bare), pod("b", bare)}, fmt.Sprintf(stuck, "2 of them get"), true},
		"a bare one first":                   {"2", []corev1.Pod{pod("a", bare), pod("b")}, fmt.Sprintf(stuck, "1 of them gets"), true},
		"a bare one last, once there is one": {"2", []corev1.Pod{pod("a"), pod("b", bare)}, slow, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := &Cluster{
				Nodes: []corev1.Node{node("gpu-1", "7"), node("gpu-2", row.room)}, Pods: row.of,
				Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 1), budget("other", "other", 0)},
			}
			said, of := leave(t, c, "a", "b")
			if !strings.Contains(said, row.want) || strings.Contains(said, "team/other") {
				t.Errorf("want %q:\n%s", row.want, said)
			}
			want := ""
			if row.stuck {
				want = strings.TrimSuffix(row.want, "\n")
			}
			if of.Stuck != want || of.Unknown != "" {
				t.Errorf("they are stuck by %q, want %q; not known: %q", of.Stuck, want, of.Unknown)
			}
		})
	}
	c := &Cluster{
		Nodes: []corev1.Node{node("gpu-1", "7")}, Pods: []corev1.Pod{pod("a")},
		Budgets: []policyv1.PodDisruptionBudget{budget("x", "x", 0), budget("second", "x", 5)},
	}
	uncounted := budget("uncounted", "x", 0)
	uncounted.Status.Conditions = []metav1.Condition{{Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: "found no controller"}}
	c.Budgets = append(c.Budgets, uncounted)
	said, of := leave(t, c, "a", "gone")
	if want := `team/a fits on no other node: there is none
whether 1 pod more would fit elsewhere is not known
budget team/x lets none of 1 pod go now: it needs 2 healthy and has 2
budget team/uncounted lets none of 1 pod go, since its pods cannot be counted: found no controller
team/a is in more than one budget, and the API server evicts no such pod: team/x; team/second; team/uncounted
`; said != want || of.Stuck != "" || of.Unknown != "budget team/x lets none of 1 pod go now: it needs 2 healthy and has 2" {
		t.Errorf("want\n%s, got\n%s%+v", want, said, of)
	}
}
