package drain_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// The tests in this file ask a real API server and controller manager what the fake clientset does not know: conflicts,
// managed fields, disruption budgets and preconditions. There is no kubelet; the tests say what it would.

func TestMain(m *testing.M) { clustertest.Main(m) }

// workload is a ReplicaSet of GPU pods on one node.
type workload struct {
	client    kubernetes.Interface
	namespace string
	node      string
	labels    map[string]string
}

// run makes the workload and returns when its pods exist. None of them is ready.
func run(t *testing.T, client kubernetes.Interface, replicas int32) workload {
	t.Helper()
	w := workload{client: client, namespace: clustertest.Namespace(t), node: clustertest.Node(t).Name, labels: map[string]string{"app": "api"}}
	spec := podSpec(w.node)
	_, err := client.AppsV1().ReplicaSets(w.namespace).Create(t.Context(), &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "api"},
		Spec: appsv1.ReplicaSetSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: w.labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: w.labels}, Spec: spec},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	clustertest.Eventually(t, fmt.Sprintf("%d pods exist", replicas), func(ctx context.Context) (bool, error) {
		return len(w.pods(ctx, t)) == int(replicas), nil
	})
	return w
}

func podSpec(node string) corev1.PodSpec {
	return corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "main", Image: "none", Resources: oneGPU}}}
}

func (w workload) pods(ctx context.Context, t *testing.T) []holders.Pod {
	t.Helper()
	list, err := w.client.CoreV1().Pods(w.namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return holders.GPUPods(list.Items, nil, nil, holders.Claimed{}, nil)
}

// ready says what kubelet would say of a pod that runs and passes its probes.
func ready(t *testing.T, client kubernetes.Interface, p holders.Pod) {
	t.Helper()
	const running = `{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`
	_, err := client.CoreV1().Pods(p.Namespace).Patch(t.Context(), p.Name, types.StrategicMergePatchType, []byte(running), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
}

// running says what kubelet would say of a pod that runs and does not pass its probes.
func running(t *testing.T, client kubernetes.Interface, p holders.Pod) {
	t.Helper()
	const unready = `{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"False"}]}}`
	_, err := client.CoreV1().Pods(p.Namespace).Patch(t.Context(), p.Name, types.StrategicMergePatchType, []byte(unready), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
}

// guard makes a budget for the workload and waits until its healthy pods are counted.
func (w workload) guard(t *testing.T, name string, minAvailable int, healthy int32) {
	t.Helper()
	atLeast := intstr.FromInt(minAvailable)
	budgets := w.client.PolicyV1().PodDisruptionBudgets(w.namespace)
	_, err := budgets.Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &atLeast, Selector: &metav1.LabelSelector{MatchLabels: w.labels}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w.counted(t, name, healthy)
}

func (w workload) counted(t *testing.T, name string, healthy int32) {
	t.Helper()
	clustertest.Eventually(t, fmt.Sprintf("budget %s counts %d healthy pods", name, healthy), func(ctx context.Context) (bool, error) {
		b, err := w.client.PolicyV1().PodDisruptionBudgets(w.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return b.Status.ObservedGeneration == b.Generation && b.Status.CurrentHealthy == healthy, nil
	})
}

func evictor(t *testing.T) *drain.Evictor {
	t.Helper()
	return drain.NewEvictor(programs(t), clock.RealClock{}, zap.NewNop())
}

// programs is the client of the programs.
func programs(t *testing.T) kube.Interface {
	t.Helper()
	client, err := kube.New(clustertest.Start(t).Config())
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// outcome is what a person reads of verdicts.
func outcome(verdicts []drain.Verdict) []string {
	var out []string
	for _, v := range verdicts {
		out = append(out, strings.TrimSpace(string(v.State)+" "+v.Message))
	}
	return out
}

func TestClusterEvictsOnlyWhatTheBudgetLetsGo(t *testing.T) {
	client := clustertest.Client(t)
	w := run(t, client, 3)
	pods := w.pods(t.Context(), t)
	ready(t, client, pods[0])
	ready(t, client, pods[1])
	w.guard(t, "api", 2, 2)
	pods = w.pods(t.Context(), t)

	blocked := fmt.Sprintf("Blocked PDB %[1]s/api: needs 2 healthy pods and has 2; one of its pods, %[1]s/%[2]s, has not started on node %[3]s",
		w.namespace, pods[2].Name, w.node)
	if diff := cmp.Diff([]string{blocked}, outcome(evictor(t).DryRun(t.Context(), pods[:1], drain.Policy{}))); diff != "" {
		t.Errorf("dry run with no room (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{blocked}, outcome(evictor(t).Evict(t.Context(), pods[:1], drain.Policy{}, time.Time{}))); diff != "" {
		t.Errorf("eviction with no room (-want +got):\n%s", diff)
	}

	ready(t, client, pods[2])
	w.counted(t, "api", 3)
	if diff := cmp.Diff([]string{"Requested", "Requested", "Requested"}, outcome(evictor(t).DryRun(t.Context(), pods, drain.Policy{}))); diff != "" {
		t.Errorf("dry run with room for one (-want +got):\n%s", diff)
	}
	for _, p := range w.pods(t.Context(), t) {
		if p.Terminating {
			t.Errorf("the dry run sent %s away", p)
		}
	}

	verdicts := evictor(t).Evict(t.Context(), pods, drain.Policy{}, time.Time{})
	if got := verdicts[0].State; got != drain.Requested {
		t.Errorf("eviction with room for one is %v, want Requested", outcome(verdicts[:1]))
	}
	for _, v := range verdicts[1:] {
		if v.State != drain.Blocked || v.PDB != w.namespace+"/api" {
			t.Errorf("eviction of a second pod is %v by %q, want Blocked by %s/api", outcome([]drain.Verdict{v}), v.PDB, w.namespace)
		}
	}
	evicted, err := client.CoreV1().Pods(w.namespace).Get(t.Context(), pods[0].Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if evicted.DeletionTimestamp == nil || *evicted.DeletionGracePeriodSeconds != corev1.DefaultTerminationGracePeriodSeconds {
		t.Errorf("evicted pod is deleted at %v with grace %v, want it terminating with its own grace", evicted.DeletionTimestamp, evicted.DeletionGracePeriodSeconds)
	}
	if !slices.ContainsFunc(evicted.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.DisruptionTarget }) {
		t.Errorf("evicted pod has conditions %v, want DisruptionTarget, which a Job's failure policy goes by", evicted.Status.Conditions)
	}
}

func TestClusterBlocksAPodOfTwoBudgetsAndNamesBoth(t *testing.T) {
	client := clustertest.Client(t)
	w := run(t, client, 1)
	pods := w.pods(t.Context(), t)
	ready(t, client, pods[0])
	w.guard(t, "one", 0, 1)
	w.guard(t, "two", 0, 1)
	got := evictor(t).Evict(t.Context(), pods, drain.Policy{}, time.Time{})[0]
	if want := w.namespace + "/one, " + w.namespace + "/two"; got.State != drain.Blocked || got.PDB != want {
		t.Errorf("verdict is %v by %q, want Blocked by %q", outcome([]drain.Verdict{got}), got.PDB, want)
	}
}

func TestClusterSaysWhichBudgetNeverLetsGo(t *testing.T) {
	client := clustertest.Client(t)
	w := run(t, client, 1)
	pods := w.pods(t.Context(), t)
	ready(t, client, pods[0])
	w.guard(t, "strict", 1, 1)
	pods = w.pods(t.Context(), t)
	want := fmt.Sprintf("Blocked PDB %s/strict: needs 1 healthy pod and has 1 of 1: it allows no eviction until it is changed or has more pods", w.namespace)
	if diff := cmp.Diff([]string{want}, outcome(evictor(t).Evict(t.Context(), pods, drain.Policy{}, time.Time{}))); diff != "" {
		t.Errorf("eviction (-want +got):\n%s", diff)
	}
}

func TestClusterLeavesARecreatedPodOfTheSameNameAlone(t *testing.T) {
	client := clustertest.Client(t)
	pods := client.CoreV1().Pods(clustertest.Namespace(t))
	create := func() *corev1.Pod {
		p, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "db-0"}, Spec: podSpec(clustertest.Node(t).Name)}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	former := holders.GPUPods([]corev1.Pod{*create()}, nil, nil, holders.Claimed{}, nil)
	now := int64(0)
	if err := pods.Delete(t.Context(), "db-0", metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"Gone"}, outcome(evictor(t).Evict(t.Context(), former, drain.Policy{}, time.Time{}))); diff != "" {
		t.Errorf("eviction of a deleted pod (-want +got):\n%s", diff)
	}

	successor := create()
	ready(t, client, holders.Pod{Namespace: successor.Namespace, Name: successor.Name})
	for name, verdicts := range map[string][]drain.Verdict{
		"eviction": evictor(t).Evict(t.Context(), former, drain.Policy{}, time.Time{}),
		"dry run":  evictor(t).DryRun(t.Context(), former, drain.Policy{}),
	} {
		if diff := cmp.Diff([]string{"Gone another pod has its name now"}, outcome(verdicts)); diff != "" {
			t.Errorf("%s of a pod that was replaced (-want +got):\n%s", name, diff)
		}
	}
	after, err := pods.Get(t.Context(), "db-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if after.UID != successor.UID || after.DeletionTimestamp != nil {
		t.Errorf("the successor is %s, deleted at %v; want %s, untouched", after.UID, after.DeletionTimestamp, successor.UID)
	}
}

func TestClusterTakesPodsOfATerminatingNamespaceAlong(t *testing.T) {
	client := clustertest.Client(t)
	ns, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "ending-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pods := client.CoreV1().Pods(ns.Name)
	held := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "held", Finalizers: []string{"example.io/wait"}}, Spec: podSpec(clustertest.Node(t).Name)}
	var created *corev1.Pod
	clustertest.Eventually(t, "the namespace has the service account that pods run as", func(ctx context.Context) (bool, error) {
		created, err = pods.Create(ctx, held, metav1.CreateOptions{})
		if apierrors.IsForbidden(err) {
			return false, nil
		}
		return err == nil, err
	})
	t.Cleanup(func() {
		if _, err := pods.Patch(context.WithoutCancel(t.Context()), "held", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
			t.Errorf("letting the pod go: %v", err)
		}
	})
	if err := client.CoreV1().Namespaces().Delete(t.Context(), ns.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	want := []string{"Terminating namespace " + ns.Name + " is terminating, with its pods"}
	if diff := cmp.Diff(want, outcome(evictor(t).Evict(t.Context(), holders.GPUPods([]corev1.Pod{*created}, nil, nil, holders.Claimed{}, nil), drain.Policy{}, time.Time{}))); diff != "" {
		t.Errorf("eviction (-want +got):\n%s", diff)
	}
}

// requests returns the evictions and deletions of pods of the namespace, in the order in which the API server answered them.
func requests(t *testing.T, namespace string) []string {
	t.Helper()
	events, err := clustertest.Start(t).Requests(func(e cluster.AuditEvent) bool {
		return e.Namespace == namespace && (e.Resource == "pods/eviction" || e.Resource == "pods" && e.Verb == "delete")
	})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range events {
		name := strings.TrimPrefix(e.String(), e.Verb+" "+e.Resource+" "+namespace+"/")
		out = append(out, e.Verb+" "+e.Resource+" "+name)
	}
	return out
}

// evictorAt is an evictor for which the time is another one.
func evictorAt(t *testing.T, now time.Time) *drain.Evictor {
	t.Helper()
	return drain.NewEvictor(programs(t), clocktesting.NewFakePassiveClock(now), zap.NewNop())
}

// end says what kubelet says when a pod's containers have ended and its volumes are gone.
func end(ctx context.Context, t *testing.T, client kubernetes.Interface, p holders.Pod) {
	t.Helper()
	now := int64(0)
	err := client.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &p.UID}})
	if err != nil {
		t.Fatal(err)
	}
}

func TestClusterDeletesAPodAfterItsDeadline(t *testing.T) {
	client := clustertest.Client(t)
	for _, c := range []struct {
		name        string
		deleteGrace time.Duration
		want        int64 // the pod has 30 s
		late        string
	}{
		{"with its own grace, if the budget does not let it go still", time.Minute, 30, "create pods/eviction POD: 429, delete pods POD: 200"},
		{"with less than its own grace", 5 * time.Second, 5, "delete pods POD: 200"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := run(t, client, 1)
			ready(t, client, w.pods(t.Context(), t)[0])
			w.guard(t, "strict", 1, 1)
			pods := w.pods(t.Context(), t)
			policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: c.deleteGrace}

			early := evictorAt(t, noon.Add(time.Hour-1)).Evict(t.Context(), pods, policy, noon)[0]
			if early.State != drain.Blocked || early.Overdue {
				t.Errorf("before the deadline it is %v, want Blocked", outcome([]drain.Verdict{early}))
			}
			before := requests(t, w.namespace)
			late := evictorAt(t, noon.Add(time.Hour)).Evict(t.Context(), pods, policy, noon)[0]
			if late.State != drain.Deleted || late.Overdue {
				t.Errorf("at the deadline it is %v, want Deleted", outcome([]drain.Verdict{late}))
			}
			got := strings.Join(requests(t, w.namespace)[len(before):], ", ")
			if want := strings.ReplaceAll(c.late, "POD", pods[0].Name); got != want {
				t.Errorf("at the deadline the API server was asked %q, want %q", got, want)
			}
			after, err := client.CoreV1().Pods(w.namespace).Get(t.Context(), pods[0].Name, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if after.DeletionTimestamp == nil || *after.DeletionGracePeriodSeconds != c.want {
				t.Errorf("the pod is deleted at %v with grace %v, want %d", after.DeletionTimestamp, after.DeletionGracePeriodSeconds, c.want)
			}
			again := evictorAt(t, noon.Add(time.Hour+time.Second)).Evict(t.Context(), []holders.Pod{holders.Describe(after)}, policy, noon)[0]
			if again.State != drain.Terminating || again.Overdue || len(requests(t, w.namespace)) != len(before)+strings.Count(c.late, ":") {
				t.Errorf("a second later it is %v after requests %v, want Terminating after none", outcome([]drain.Verdict{again}), requests(t, w.namespace))
			}
		})
	}
}

func TestClusterDeletesNoNamesake(t *testing.T) {
	client := clustertest.Client(t)
	pods := client.CoreV1().Pods(clustertest.Namespace(t))
	node := clustertest.Node(t).Name
	create := func() holders.Pod {
		p, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "db-0"}, Spec: podSpec(node)}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return holders.Describe(p)
	}
	former := create()
	end(t.Context(), t, client, former)
	successor := create()
	policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: time.Second} // less than its grace, so that it is not evicted
	got := evictorAt(t, noon.Add(time.Hour)).Evict(t.Context(), []holders.Pod{former}, policy, noon)
	if diff := cmp.Diff([]string{"Gone another pod has its name now"}, outcome(got)); diff != "" {
		t.Errorf("deletion of a pod that was replaced (-want +got):\n%s", diff)
	}
	after, err := pods.Get(t.Context(), "db-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if after.UID != successor.UID || after.DeletionTimestamp != nil {
		t.Errorf("the successor is %s, deleted at %v; want %s, untouched", after.UID, after.DeletionTimestamp, successor.UID)
	}
}

func TestClusterSaysThatAFinalizerKeepsAPod(t *testing.T) {
	client := clustertest.Client(t)
	pods := client.CoreV1().Pods(clustertest.Namespace(t))
	held := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "held", Finalizers: []string{"example.io/wait"}}, Spec: podSpec(clustertest.Node(t).Name)}
	created, err := pods.Create(t.Context(), held, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := pods.Patch(context.WithoutCancel(t.Context()), "held", types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}); err != nil {
			t.Errorf("letting the pod go: %v", err)
		}
	})
	end(t.Context(), t, client, holders.Describe(created))
	after, err := pods.Get(t.Context(), "held", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ended := after.DeletionTimestamp.UTC()
	got := evictorAt(t, ended.Add(time.Minute)).Evict(t.Context(), []holders.Pod{holders.Describe(after)}, drain.Policy{}, time.Time{})
	if len(got) != 1 || got[0].State != drain.Terminating || !strings.HasSuffix(got[0].Message, "; finalizers example.io/wait keep it until the programs that set them remove them") {
		t.Errorf("verdict is %v, want Terminating for its finalizer", outcome(got))
	}
}

func TestClusterLetsAnUnreadyPodGoIfTheBudgetSaysAlwaysAllow(t *testing.T) {
	client := clustertest.Client(t)
	w := run(t, client, 2)
	pods := w.pods(t.Context(), t)
	ready(t, client, pods[0])
	running(t, client, pods[1])
	w.guard(t, "api", 2, 1)
	pods = w.pods(t.Context(), t)[1:]
	want := fmt.Sprintf("Blocked PDB %s/api: needs 2 healthy pods and has 1 of 2: it allows no eviction until it is changed or has more pods; "+
		"this pod is not ready, and would go if the PDB had unhealthyPodEvictionPolicy: AlwaysAllow", w.namespace)
	if diff := cmp.Diff([]string{want}, outcome(evictor(t).DryRun(t.Context(), pods, drain.Policy{}))); diff != "" {
		t.Errorf("dry run (-want +got):\n%s", diff)
	}
	patch := []byte(`{"spec":{"unhealthyPodEvictionPolicy":"AlwaysAllow"}}`)
	if _, err := client.PolicyV1().PodDisruptionBudgets(w.namespace).Patch(t.Context(), "api", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	asks := programs(t)
	clustertest.Eventually(t, "the API server goes by it", func(ctx context.Context) (bool, error) {
		return drain.NewEvictor(asks, clock.RealClock{}, zap.NewNop()).DryRun(ctx, pods, drain.Policy{})[0].State == drain.Requested, nil
	})
}

// Why a DaemonSet that tolerates the fence is refused, and no other is: the controller, asked.
func TestClusterBringsThePodOfADaemonSetBackIfItToleratesTheFence(t *testing.T) {
	client := clustertest.Client(t)
	for name, tolerations := range map[string][]corev1.Toleration{"one that does": {{Operator: "Exists"}}, "one that does not": nil} {
		t.Run(name, func(t *testing.T) {
			w := workload{client: client, namespace: clustertest.Namespace(t), labels: map[string]string{"app": "monitor"}}
			node := clustertest.Node(t).Name
			const room = `{"status":{"capacity":{"pods":"9","nvidia.com/gpu":"9"},"allocatable":{"pods":"9","nvidia.com/gpu":"9"}}}`
			if _, err := client.CoreV1().Nodes().Patch(t.Context(), node, types.StrategicMergePatchType, []byte(room), metav1.PatchOptions{}, "status"); err != nil {
				t.Fatal(err)
			}
			spec := podSpec("")
			spec.Tolerations, spec.NodeSelector = tolerations, map[string]string{"drain": node}
			_, err := client.AppsV1().DaemonSets(w.namespace).Create(t.Context(), &appsv1.DaemonSet{
				ObjectMeta: metav1.ObjectMeta{Name: "monitor"},
				Spec: appsv1.DaemonSetSpec{
					Selector: &metav1.LabelSelector{MatchLabels: w.labels},
					Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: w.labels}, Spec: spec},
				},
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			label := fmt.Appendf(nil, `{"metadata":{"labels":{"drain":%q}}}`, node)
			if _, err := client.CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType, label, metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			var pods []holders.Pod
			clustertest.Eventually(t, "the DaemonSet has its pod", func(ctx context.Context) (bool, error) {
				pods = w.pods(ctx, t)
				return len(pods) == 1, nil
			})
			clustertest.Eventually(t, "the node is fenced", func(ctx context.Context) (bool, error) {
				n, err := client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
				if err != nil {
					return false, err
				}
				p, err := fence.Fence{Taint: fenceTaint, JournalKey: "example.io/journal"}.Raise(n, "J")
				if err != nil {
					return false, err
				}
				_, err = client.CoreV1().Nodes().Patch(ctx, node, types.MergePatchType, p, metav1.PatchOptions{})
				return err == nil, nil
			})

			policy := drain.Policy{Fence: fenceTaint, Daemons: []string{w.namespace}}
			if tolerations == nil {
				got := evictor(t).Evict(t.Context(), pods, policy, noon)
				if diff := cmp.Diff([]string{"Requested"}, outcome(got)); diff != "" {
					t.Errorf("eviction (-want +got):\n%s", diff)
				}
				clustertest.Eventually(t, "the pod is gone, or kubelet would end it", func(ctx context.Context) (bool, error) {
					left := w.pods(ctx, t)
					if len(left) == 1 && left[0].UID == pods[0].UID {
						end(ctx, t, client, left[0])
					}
					return len(left) == 0, nil
				})
				return
			}
			if got := evictor(t).Evict(t.Context(), pods, policy, noon)[0]; got.State != drain.Refused || len(requests(t, w.namespace)) > 0 {
				t.Errorf("verdict is %v after requests %v, want Refused after none", outcome([]drain.Verdict{got}), requests(t, w.namespace))
			}
			end(t.Context(), t, client, pods[0])
			clustertest.Eventually(t, "the pod is back", func(ctx context.Context) (bool, error) {
				now := w.pods(ctx, t)
				return len(now) == 1 && now[0].UID != pods[0].UID, nil
			})
		})
	}
}
