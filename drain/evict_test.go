package drain_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	kubetesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

var podResource = schema.GroupResource{Resource: "pods"}

// oneGPU is what a container asks for.
var oneGPU = corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}}

// holder is the pod "team/<name>" with a GPU, as it is found.
func holder(name string) holders.Pod {
	return holders.GPUPods([]corev1.Pod{listed(name)}, nil, nil, holders.Claimed{}, nil)[0]
}

// listed is that pod as the API server has it.
func listed(name string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "api"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Resources: oneGPU}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

// server is a fake API server that answers evictions by a script, and counts them.
type server struct {
	*fake.Clientset
	answer    error // to every eviction
	evictions []*policyv1.Eviction
	removal   error // to every deletion of a pod
	removed   []deletion
}

// deletion is one through the pods API.
type deletion struct {
	Pod   string
	Grace time.Duration
	UID   types.UID // the precondition
}

func newServer(objects ...runtime.Object) *server {
	s := &server{Clientset: fake.NewClientset(objects...)}
	s.PrependReactor("create", "pods/eviction", func(action kubetesting.Action) (bool, runtime.Object, error) {
		create, ok := action.(kubetesting.CreateAction)
		if !ok {
			return true, nil, fmt.Errorf("action is a %T, want a create", action)
		}
		eviction, ok := create.GetObject().(*policyv1.Eviction)
		if !ok {
			return true, nil, fmt.Errorf("object is a %T, want a policy/v1 Eviction", create.GetObject())
		}
		s.evictions = append(s.evictions, eviction)
		return true, nil, s.answer
	})
	s.PrependReactor("delete", "pods", func(action kubetesting.Action) (bool, runtime.Object, error) {
		del, ok := action.(kubetesting.DeleteActionImpl)
		if !ok {
			return true, nil, fmt.Errorf("action is a %T, want a deletion", action)
		}
		o := del.GetDeleteOptions()
		if o.GracePeriodSeconds == nil || o.Preconditions == nil || o.Preconditions.UID == nil || len(o.DryRun) > 0 {
			return true, nil, fmt.Errorf("deletion has options %+v, want a grace and a UID", o)
		}
		s.removed = append(s.removed, deletion{del.Name, time.Duration(*o.GracePeriodSeconds) * time.Second, *o.Preconditions.UID})
		return true, nil, s.removal
	})
	return s
}

// asked returns the pods of the evictions that were no dry runs, in order, since it was last called.
func (s *server) asked() []string {
	var out []string
	for _, e := range s.evictions {
		if len(e.DeleteOptions.DryRun) == 0 {
			out = append(out, e.Name)
		}
	}
	s.evictions = nil
	return out
}

func (s *server) evictor() (*drain.Evictor, *clocktesting.FakePassiveClock) {
	clock := clocktesting.NewFakePassiveClock(noon)
	return drain.NewEvictor(clientset.Of(s), clock, zap.NewNop()), clock
}

func budget(name string, desired, healthy, expected int32) *policyv1.PodDisruptionBudget {
	return &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "api"}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DesiredHealthy: desired, CurrentHealthy: healthy, ExpectedPods: expected},
	}
}

func otherBudget() *policyv1.PodDisruptionBudget {
	b := budget("other", 1, 1, 1)
	b.Spec.Selector.MatchLabels["app"] = "db"
	return b
}

// refusal is how the API server refuses an eviction for a PodDisruptionBudget.
func refusal(cause string, retryAfter int) *apierrors.StatusError {
	err := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", retryAfter)
	err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Type: policyv1.DisruptionBudgetCause, Message: cause})
	return err
}

// exported compares verdicts by what callers see of them.
var exported = cmpopts.IgnoreUnexported(drain.Verdict{})

const needsTwo = "The disruption budget api needs 2 healthy pods and has 2 currently"

func TestEvictSaysWhatBecameOfEachRequest(t *testing.T) {
	severalBudgets := &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInternalServerError,
		Message: "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
	}}
	negative := apierrors.NewForbidden(schema.GroupResource{Group: "policy", Resource: "poddisruptionbudget"}, "api", errors.New("negative"))
	negative.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget api is negative"}}
	terminating := apierrors.NewForbidden(podResource, "a", errors.New("it is being terminated"))
	terminating.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
	uncounted := budget("api", 2, 2, 3)
	uncounted.Generation = 1
	unsynced := budget("api", 2, 2, 3)
	unsynced.Status.Conditions = []metav1.Condition{{
		Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse, Reason: policyv1.SyncFailedReason, Message: "found no controllers",
	}}
	neverSynced := unsynced.DeepCopy()
	neverSynced.Generation = 1
	same, namesake := listed("a"), listed("a")
	namesake.UID = "uid-of-another"
	conflict := apierrors.NewConflict(podResource, "a", errors.New("the UID in the precondition does not match"))

	for _, c := range []struct {
		name    string
		objects []runtime.Object
		answer  error
		state   drain.State
		pdb     string
		message string // a part of it; if empty, there is none
	}{
		{"201", nil, nil, drain.Requested, "", ""},
		{"404", nil, apierrors.NewNotFound(podResource, "a"), drain.Gone, "", ""},
		{
			"404 that is not of the API server", nil,
			apierrors.NewGenericServerResponse(404, "create", podResource, "a", "<html>", 0, true), drain.Failed, "", "not find",
		},
		{"409 while another pod has the name", []runtime.Object{&namesake}, conflict, drain.Gone, "", "another pod has its name now"},
		{"409 while no one has the name", nil, conflict, drain.Gone, "", ""},
		{"409 while the pod is still there", []runtime.Object{&same}, conflict, drain.Failed, "", "does not match"},
		{
			"429 of a budget",
			[]runtime.Object{otherBudget(), budget("api", 2, 2, 3)},
			refusal(needsTwo, 0),
			drain.Blocked, "team/api", "PDB team/api: needs 2 healthy pods and has 2",
		},
		{
			"429 of a budget that never lets go",
			[]runtime.Object{budget("api", 2, 2, 2)},
			refusal(needsTwo, 0),
			drain.Blocked, "team/api", "PDB team/api: needs 2 healthy pods and has 2 of 2: it allows no eviction",
		},
		{
			"429 of a budget that counts on pods that are not ready",
			[]runtime.Object{budget("api", 2, 1, 3)},
			refusal("The disruption budget api needs 2 healthy pods and has 1 currently", 0),
			drain.Blocked, "team/api", "needs 2 healthy pods and has 1; this pod is not ready, and would go if the PDB had unhealthyPodEvictionPolicy: AlwaysAllow",
		},
		{
			"429 of a budget that was changed just now",
			[]runtime.Object{uncounted},
			refusal("The disruption budget api is still being processed by the server.", 10),
			drain.Blocked, "team/api", "has not counted its pods since",
		},
		{
			"429 of a budget whose pods cannot be counted",
			[]runtime.Object{unsynced},
			refusal(needsTwo, 0),
			drain.Blocked, "team/api", "cannot be counted: found no controllers",
		},
		{
			"429 of a new budget whose pods cannot be counted",
			[]runtime.Object{neverSynced},
			refusal("The disruption budget api is still being processed by the server.", 10),
			drain.Blocked, "team/api", "cannot be counted: found no controllers",
		},
		{
			"429 of a budget that has room again by the time it is read",
			[]runtime.Object{budget("api", 2, 3, 3)},
			refusal(needsTwo, 0),
			drain.Blocked, "team/api", needsTwo,
		},
		{"429 of a budget that is gone by the time it is read", nil, refusal(needsTwo, 0), drain.Blocked, "team/api", needsTwo},
		{"429 of a budget in other words", nil, refusal("no", 0), drain.Blocked, "", "no"},
		{"429 of a busy server", []runtime.Object{budget("api", 2, 2, 3)}, apierrors.NewTooManyRequestsError("try later"), drain.Failed, "", "the API server is busy: Too many requests: try later"},
		{"403 of a budget", []runtime.Object{budget("api", 2, 3, 3)}, negative, drain.Blocked, "team/api", "is negative"},
		{"403 of a terminating namespace", nil, terminating, drain.Terminating, "", "namespace team is terminating"},
		{"403 of permissions", nil, apierrors.NewForbidden(podResource, "a", errors.New("no")), drain.Failed, "", "forbidden"},
		{
			"500 of two budgets",
			[]runtime.Object{budget("api", 1, 1, 1), budget("web", 1, 1, 1), otherBudget()},
			severalBudgets,
			drain.Blocked, "team/api, team/web", "more than one PodDisruptionBudget",
		},
		{"500 of anything else", []runtime.Object{budget("api", 1, 1, 1)}, apierrors.NewInternalError(errors.New("webhook is down")), drain.Failed, "", "webhook is down"},
		{"no answer", nil, errors.New("connection refused"), drain.Failed, "", "asking the API server: connection refused"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newServer(c.objects...)
			s.answer = c.answer
			e, _ := s.evictor()
			got := e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0]
			if got.State != c.state || got.PDB != c.pdb || !strings.Contains(got.Message, c.message) || (c.message == "") != (got.Message == "") {
				t.Errorf("verdict is %s, PDB %q, %q; want %s, PDB %q, %q", got.State, got.PDB, got.Message, c.state, c.pdb, c.message)
			}
			refused := c.state == drain.Blocked || c.state == drain.Failed
			if refused != got.Since.Equal(noon) || refused == got.Since.IsZero() {
				t.Errorf("since is %v; want %v only if the pod was refused", got.Since, noon)
			}
			remembered := refused || c.state == drain.Requested
			if remembered != got.RetryAt.After(noon) {
				t.Errorf("RetryAt is %v; want a later time than %v only if there is something to ask again", got.RetryAt, noon)
			}
		})
	}
}

func TestEvictNamesThePodByUIDAndLeavesItsGraceAlone(t *testing.T) {
	s := newServer()
	e, _ := s.evictor()
	e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})
	e.DryRun(t.Context(), []holders.Pod{holder("a")}, drain.Policy{})
	uid := holder("a").UID
	eviction := func(dryRun ...string) *policyv1.Eviction {
		return &policyv1.Eviction{
			ObjectMeta:    metav1.ObjectMeta{Namespace: "team", Name: "a"},
			DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}, DryRun: dryRun},
		}
	}
	if diff := cmp.Diff([]*policyv1.Eviction{eviction(), eviction(metav1.DryRunAll)}, s.evictions); diff != "" {
		t.Errorf("evictions (-want +got):\n%s", diff)
	}
}

func TestEvictSendsNoRequestForPodsThatItCannotHurry(t *testing.T) {
	static := holder("static")
	static.Mirror = true
	nameless := holder("nameless")
	nameless.UID = ""
	undated := holders.Pod{Namespace: "team", Name: "undated", UID: "uid-undated", Terminating: true}
	unlisted := holders.Pod{Namespace: "team", Name: "unlisted", Unlisted: true, Terminating: true, Sources: []holders.Source{holders.SourceKubelet}}
	process := holders.Pod{
		UID: "uid-process", Unlisted: true, Terminating: true,
		Sources: []holders.Source{"NVML pid 4711 python", "device file /dev/nvidia3 of pid 4711 python"},
	}

	for _, c := range []struct {
		pod     holders.Pod
		state   drain.State
		message string
	}{
		{undated, drain.Terminating, "terminating"},
		{unlisted, drain.Terminating, "the API server does not list it; kubelet still has its devices in use"},
		{
			process, drain.Terminating, "the API server does not list it; its processes still have a GPU: " +
				"NVML pid 4711 python, device file /dev/nvidia3 of pid 4711 python",
		},
		{static, drain.Refused, "it is a static pod, which cannot be evicted: move its manifest out of kubelet's directory on the node"},
		{nameless, drain.Refused, "its UID is unknown, so another pod of its name might be evicted"},
	} {
		s := newServer()
		e, _ := s.evictor()
		for _, got := range []drain.Verdict{e.Evict(t.Context(), []holders.Pod{c.pod}, drain.Policy{}, time.Time{})[0], e.DryRun(t.Context(), []holders.Pod{c.pod}, drain.Policy{})[0]} {
			if got.State != c.state || got.Message != c.message {
				t.Errorf("verdict on %s is %s, %q; want %s, %q", c.pod, got.State, got.Message, c.state, c.message)
			}
		}
		if len(s.evictions) > 0 {
			t.Errorf("%d requests were sent for %s, want none", len(s.evictions), c.pod)
		}
	}
}

func TestEvictBacksOffLongerAndLongerUpToTwentyFiveSeconds(t *testing.T) {
	s := newServer(budget("api", 2, 2, 3))
	s.answer = refusal(needsTwo, 0)
	e, clock := s.evictor()
	pods := []holders.Pod{holder("a")}
	previous := time.Duration(0)
	for asked := 1; asked <= 12; asked++ {
		now := clock.Now()
		first := e.Evict(t.Context(), pods, drain.Policy{}, time.Time{})[0]
		if len(s.evictions) != asked {
			t.Fatalf("%d requests at %v, want %d", len(s.evictions), now, asked)
		}
		delay := first.RetryAt.Sub(now)
		if delay < time.Second || delay > 25*time.Second {
			t.Errorf("delay %d is %v, want 1s to 25s", asked, delay)
		}
		if asked <= 5 && delay < previous {
			t.Errorf("delay %d is %v after %v, want it to grow", asked, delay, previous)
		}
		if asked == 12 && delay < 20*time.Second {
			t.Errorf("delay %d is %v, want it near 25s", asked, delay)
		}
		if !first.Since.Equal(noon) {
			t.Errorf("since is %v at request %d, want that of the first, %v", first.Since, asked, noon)
		}
		previous = delay
		clock.SetTime(first.RetryAt.Add(-1))
		if diff := cmp.Diff(first, e.Evict(t.Context(), pods, drain.Policy{}, time.Time{})[0], exported); diff != "" || len(s.evictions) != asked {
			t.Errorf("a nanosecond before RetryAt: %d requests, want %d and the last verdict again:\n%s", len(s.evictions), asked, diff)
		}
		clock.SetTime(first.RetryAt)
	}
}

func TestEvictDelaysOfSeveralPodsDiffer(t *testing.T) {
	s := newServer()
	s.answer = refusal(needsTwo, 0)
	e, _ := s.evictor()
	var pods []holders.Pod
	for _, name := range strings.Split("abcdefgh", "") {
		pods = append(pods, holder(name))
	}
	times := map[time.Time]bool{}
	for _, v := range e.Evict(t.Context(), pods, drain.Policy{}, time.Time{}) {
		times[v.RetryAt] = true
	}
	if len(times) < 2 {
		t.Errorf("all %d pods are asked for again at the same nanosecond", len(pods))
	}
}

func TestEvictWaitsAsLongAsTheServerAsks(t *testing.T) {
	for name, answer := range map[string]error{
		"a budget":      refusal("The disruption budget api is still being processed by the server.", 10),
		"a busy server": apierrors.NewTooManyRequests("try later", 10),
	} {
		s := newServer()
		s.answer = answer
		e, _ := s.evictor()
		if got := e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0].RetryAt; got.Before(noon.Add(10 * time.Second)) {
			t.Errorf("RetryAt after %s is %v, want 10s after %v at least", name, got, noon)
		}
	}
}

func TestEvictAsksOnceForAPodThatAnOldListStillShowsRunning(t *testing.T) {
	s := newServer()
	e, clock := s.evictor()
	pods := []holders.Pod{holder("a")}
	first := e.Evict(t.Context(), pods, drain.Policy{}, time.Time{})
	clock.SetTime(noon.Add(500 * time.Millisecond))
	if diff := cmp.Diff(first, e.Evict(t.Context(), pods, drain.Policy{}, time.Time{}), exported); diff != "" || len(s.evictions) != 1 {
		t.Errorf("%d requests, want 1 and the same verdict:\n%s", len(s.evictions), diff)
	}
	pods[0].Terminating = true
	if got := e.Evict(t.Context(), pods, drain.Policy{}, time.Time{})[0].State; got != drain.Terminating || len(s.evictions) != 1 {
		t.Errorf("verdict is %s after %d requests, want Terminating as soon as it is listed so", got, len(s.evictions))
	}
}

func TestEvictForgetsPodsThatTheCallerNamesNoMore(t *testing.T) {
	s := newServer()
	s.answer = refusal(needsTwo, 0)
	e, clock := s.evictor()
	e.Evict(t.Context(), []holders.Pod{holder("a"), holder("b")}, drain.Policy{}, time.Time{})
	e.Evict(t.Context(), []holders.Pod{holder("b")}, drain.Policy{}, time.Time{})
	if len(s.evictions) != 2 {
		t.Fatalf("%d requests, want 2", len(s.evictions))
	}
	clock.SetTime(noon.Add(time.Millisecond))
	got := e.Evict(t.Context(), []holders.Pod{holder("a"), holder("b")}, drain.Policy{}, time.Time{})
	if len(s.evictions) != 3 || s.evictions[2].Name != "a" {
		t.Errorf("requests are %v, want a third one for a", s.evictions)
	}
	if !got[0].Since.Equal(noon.Add(time.Millisecond)) || !got[1].Since.Equal(noon) {
		t.Errorf("since is %v for the forgotten and %v for the remembered, want now and %v", got[0].Since, got[1].Since, noon)
	}
}

func TestEvictTreatsANamesakeAsAnotherPod(t *testing.T) {
	s := newServer()
	s.answer = refusal(needsTwo, 0)
	e, _ := s.evictor()
	e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})
	namesake := holder("a")
	namesake.UID = "uid-of-another"
	e.Evict(t.Context(), []holders.Pod{namesake}, drain.Policy{}, time.Time{})
	if len(s.evictions) != 2 {
		t.Errorf("%d requests, want one for each of the two pods named a", len(s.evictions))
	}
}

// sends is how often a request is sent that the server does not answer.
const sends = 6

func TestEvictSendsNothingAfterTheServerDidNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.answer = errors.New("connection refused")
		e, _ := s.evictor()
		got := e.Evict(t.Context(), []holders.Pod{holder("a"), holder("b"), holder("c")}, drain.Policy{}, time.Time{})
		if asked := s.asked(); !slices.Equal(asked, slices.Repeat([]string{"a"}, sends)) {
			t.Errorf("requests for the pods %v, want those for the first alone", asked)
		}
		for _, v := range got {
			if v.State != drain.Failed || !strings.Contains(v.Message, "connection refused") || v.RetryAt.IsZero() {
				t.Errorf("verdict on %s is %s, %q, again at %v; want the failure and a time", v.Pod, v.State, v.Message, v.RetryAt)
			}
		}
	})
}

func TestEvictReadsBudgetsOnceForANamespace(t *testing.T) {
	s := newServer(budget("api", 2, 2, 3))
	s.answer = refusal(needsTwo, 0)
	reads := 0
	s.PrependReactor("list", "poddisruptionbudgets", func(kubetesting.Action) (bool, runtime.Object, error) {
		reads++
		return false, nil, nil
	})
	e, _ := s.evictor()
	e.Evict(t.Context(), []holders.Pod{holder("a"), holder("b"), holder("c")}, drain.Policy{}, time.Time{})
	if reads != 1 {
		t.Errorf("budgets were read %d times, want once", reads)
	}
}

// pending is the successor of a pod that was evicted, for which no node has room.
func pending(name, why string) *corev1.Pod {
	p := listed(name)
	p.Status = corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
		Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: why,
	}}}
	return &p
}

// A budget that has one pod too few is no cause: that is what keeps the missing one from starting.
func TestEvictSaysWhatABlockedBudgetWaitsFor(t *testing.T) {
	starting, ending, other := pending("b", ""), pending("c", "no room"), pending("d", "no room")
	starting.Status.Conditions, starting.Spec.NodeName = nil, "gpu-7"
	ending.DeletionTimestamp, ending.Finalizers = &metav1.Time{Time: noon}, []string{"team/x"}
	other.Labels["app"] = "db"
	const needs = "PDB team/api: needs 2 healthy pods and has 2"
	full := "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) were unschedulable."
	for name, c := range map[string]struct {
		budget         *policyv1.PodDisruptionBudget
		pods           []*corev1.Pod
		awaits, prefix string
	}{
		"no room": {
			budget("api", 2, 2, 3),
			[]*corev1.Pod{starting, pending("e", full+" preemption: 0/2 nodes are available: none helps.")},
			"team/e",
			needs + "; one of its pods, team/e, is Pending: " + strings.TrimSuffix(full, ".") + "; this pod is not ready",
		},
		"starting":                   {budget("api", 2, 2, 3), []*corev1.Pod{starting, ending, other}, "team/b", needs + "; one of its pods, team/b, has not started on node gpu-7; "},
		"endless words":              {budget("api", 2, 2, 3), []*corev1.Pod{pending("e", strings.Repeat("ü", 10_000))}, "team/e", needs + "; one of its pods, team/e, is Pending: " + strings.Repeat("ü", 200) + "…; "},
		"none of its pods":           {budget("api", 2, 2, 3), []*corev1.Pod{ending, other}, "", needs + "; this"},
		"a budget that lets none go": {budget("api", 2, 1, 2), []*corev1.Pod{pending("e", full)}, "", "PDB team/api: needs 2 healthy pods and has 1 of 2: it allows"},
		"a budget that lacks no pod": {budget("api", 2, 2, 2), []*corev1.Pod{pending("e", full)}, "", "PDB team/api: needs 2 healthy pods and has 2 of 2: it allows"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(c.budget)
			s.answer = refusal(needsTwo, 0)
			for _, p := range c.pods {
				if err := s.Tracker().Add(p.DeepCopy()); err != nil {
					t.Fatal(err)
				}
			}
			e, _ := s.evictor()
			got := e.Evict(t.Context(), []holders.Pod{holder("a"), holder("z")}, drain.Policy{}, time.Time{})[0]
			reads := slices.DeleteFunc(s.Actions(), func(a kubetesting.Action) bool { return !a.Matches("list", "pods") })
			if len(reads) > 1 {
				t.Errorf("pods were listed %d times for one budget", len(reads))
			}
			if got.Awaits != c.awaits || !strings.HasPrefix(got.Message, c.prefix) {
				t.Errorf("it awaits %q: %s\nwant %q: %s", got.Awaits, got.Message, c.awaits, c.prefix)
			}
		})
	}
}

// In the name of its node the agent sees the pods of that node alone. It does not ask each time what it may not see.
func TestEvictDoesWithoutTheRightToSeeSuccessors(t *testing.T) {
	s := newServer(budget("api", 2, 2, 3))
	s.answer = refusal(needsTwo, 0)
	reads := 0
	s.PrependReactor("list", "pods", func(kubetesting.Action) (bool, runtime.Object, error) {
		reads++
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", errors.New("no"))
	})
	e, clock := s.evictor()
	for range 5 {
		got := e.Evict(t.Context(), []holders.Pod{holder("a"), holder("b")}, drain.Policy{}, time.Time{})[0]
		if got.State != drain.Blocked || got.Awaits != "" || !strings.HasPrefix(got.Message, "PDB team/api: needs 2 healthy pods and has 2") {
			t.Errorf("verdict is %s: %s", got.State, got.Message)
		}
		clock.SetTime(got.RetryAt)
	}
	if reads != 1 {
		t.Errorf("pods were listed %d times, want once", reads)
	}
}

func TestEvictBlockedByABudgetThatItMayNotReadStillNamesIt(t *testing.T) {
	s := newServer()
	s.answer = refusal(needsTwo, 0)
	s.PrependReactor("list", "poddisruptionbudgets", func(kubetesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: "policy", Resource: "poddisruptionbudgets"}, "", errors.New("no"))
	})
	e, _ := s.evictor()
	got := e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0]
	if got.State != drain.Blocked || got.PDB != "team/api" || !strings.Contains(got.Message, needsTwo) {
		t.Errorf("verdict is %s, PDB %q, %q; want Blocked by team/api in the server's words", got.State, got.PDB, got.Message)
	}
}

func TestDryRunAsksEachTimeAndDelaysNoEviction(t *testing.T) {
	s := newServer(budget("api", 2, 2, 3))
	s.answer = refusal(needsTwo, 0)
	e, clock := s.evictor()
	pods := []holders.Pod{holder("a")}
	e.DryRun(t.Context(), pods, drain.Policy{})
	clock.SetTime(noon.Add(time.Millisecond))
	if got := e.DryRun(t.Context(), pods, drain.Policy{})[0]; got.State != drain.Blocked || !got.Since.Equal(noon) {
		t.Errorf("second dry run is %s since %v, want Blocked since %v", got.State, got.Since, noon)
	}
	s.answer = nil
	if got := e.DryRun(t.Context(), pods, drain.Policy{})[0].State; got != drain.Requested {
		t.Errorf("dry run with room in the budget is %s, want Requested", got)
	}
	if got := e.Evict(t.Context(), pods, drain.Policy{}, time.Time{})[0].State; got != drain.Requested || len(s.evictions) != 4 {
		t.Errorf("eviction is %s after %d requests, want Requested after 4", got, len(s.evictions))
	}
}

func TestEvictLogsEachDecisionOnce(t *testing.T) {
	s := newServer(budget("api", 2, 2, 3))
	s.answer = refusal(needsTwo, 0)
	core, logs := observer.New(zap.InfoLevel)
	clock := clocktesting.NewFakePassiveClock(noon)
	e := drain.NewEvictor(clientset.Of(s), clock, zap.New(core))
	for range 3 {
		clock.SetTime(e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0].RetryAt)
	}
	s.answer = nil
	for range 2 {
		clock.SetTime(e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0].RetryAt)
	}
	var got []string
	for _, entry := range logs.TakeAll() {
		got = append(got, entry.Message)
	}
	if diff := cmp.Diff([]string{"eviction refused", "eviction requested"}, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

// Over HTTP, client-go by itself repeats what was answered with Retry-After, and sleeps in between.
func TestEvictReturnsAtOnceWhenTheServerSaysRetryAfter(t *testing.T) {
	requests := 0
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			http.NotFound(w, r)
			return
		}
		requests++
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusTooManyRequests)
		answer := refusal(needsTwo, 1).ErrStatus
		answer.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Errorf("answering: %v", err)
		}
	}))
	defer api.Close()
	client, err := kube.New(&rest.Config{Host: api.URL})
	if err != nil {
		t.Fatal(err)
	}
	e := drain.NewEvictor(client, clocktesting.NewFakePassiveClock(noon), zap.NewNop())
	got := e.Evict(t.Context(), []holders.Pod{holder("a")}, drain.Policy{}, time.Time{})[0]
	if requests != 1 || got.State != drain.Blocked || got.PDB != "team/api" {
		t.Errorf("%d requests and %s by %q, want one and Blocked by team/api", requests, got.State, got.PDB)
	}
}
