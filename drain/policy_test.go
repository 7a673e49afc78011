package drain_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/clientset"
)

var fenceTaint = corev1.Taint{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}

func choice(field string) drain.Choice {
	return drain.Choice{Refuse: true, Field: field, Flag: "--" + strings.TrimPrefix(field, "drain.")}
}

func selecting(t *testing.T, text string) labels.Selector {
	t.Helper()
	s, err := labels.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// of is the pod "team/<name>" of a controller, with another change.
func of(name, kind string, change ...func(*holders.Pod)) holders.Pod {
	p := holder(name)
	p.Controller = kind + "/c"
	p.Daemon = kind == "DaemonSet"
	for _, c := range change {
		c(&p)
	}
	return p
}

func isCritical(p *holders.Pod)   { p.Critical = true }
func hasEmptyDir(p *holders.Pod)  { p.EmptyDirs = []string{"scratch", "tmp"} }
func isUnmanaged(p *holders.Pod)  { p.Controller = "" }
func isLeaving(p *holders.Pod)    { p.Terminating = true }
func toleratesAll(p *holders.Pod) { p.Tolerations = []corev1.Toleration{{Operator: "Exists"}} }

func TestThePolicyRefusesBeforeAnyRequest(t *testing.T) {
	api, db := selecting(t, "app=api"), selecting(t, "app=db")
	rule := func(action drain.Action, selector labels.Selector, namespaces ...string) drain.Rule {
		return drain.Rule{Field: "drain.rules[0]", Action: action, Selector: selector, Namespaces: namespaces}
	}
	second := func(r drain.Rule) drain.Rule { r.Field = "drain.rules[1]"; return r }
	both := drain.Policy{Unmanaged: choice("drain.unmanagedPods"), EmptyDir: choice("drain.emptyDir")}
	with := func(p drain.Policy, rules ...drain.Rule) drain.Policy { p.Rules = rules; return p }
	const byRule = "drain.rules[0] forbids its eviction: delete it yourself, or change the rule"
	const bare = "no controller would recreate it (drain.unmanagedPods: refuse)"
	const lost = "its files on emptyDir scratch, tmp would be lost (drain.emptyDir: refuse)"

	for name, c := range map[string]struct {
		pod     holders.Pod
		policy  drain.Policy
		by      string
		message string // empty if Evict evicts the pod
	}{
		"nothing is refused without a policy": {of("a", "ReplicaSet", isUnmanaged, hasEmptyDir), drain.Policy{}, "", ""},
		"a pod that no controller brings back": {
			of("a", "", isUnmanaged), both, "drain.unmanagedPods", bare,
		},
		"a pod that no controller brings back, with files on the node": {
			of("a", "", isUnmanaged, hasEmptyDir), both, "drain.unmanagedPods",
			bare + ", and " + lost,
		},
		"a pod with files on the node":   {of("a", "StatefulSet", hasEmptyDir), both, "drain.emptyDir", lost},
		"a pod that loses nothing":       {of("a", "ReplicaSet"), both, "", ""},
		"a rule that refuses":            {of("a", "ReplicaSet"), with(both, rule(drain.Refuse, api)), "drain.rules[0]", byRule},
		"a rule of the pod's namespace":  {of("a", "ReplicaSet"), with(both, rule(drain.Refuse, api, "x", "team")), "drain.rules[0]", byRule},
		"a rule of other namespaces":     {of("a", "ReplicaSet"), with(both, rule(drain.Refuse, api, "x", "y")), "", ""},
		"a rule of other pods":           {of("a", "ReplicaSet"), with(both, rule(drain.Refuse, db)), "", ""},
		"a rule that asks":               {of("a", "StatefulSet", hasEmptyDir), with(both, rule(drain.Ask, api)), "drain.emptyDir", lost},
		"a rule counts over the choices": {of("a", "", isUnmanaged, hasEmptyDir), with(both, rule(drain.Evict, api)), "", ""},
		"the first rule that fits counts": {
			of("a", "ReplicaSet"), with(both, rule(drain.Evict, api), second(rule(drain.Refuse, api))), "", "",
		},
		"a rule that does not fit leaves it to the next": {
			of("a", "ReplicaSet"), with(both, second(rule(drain.Evict, db)), rule(drain.Refuse, api)), "drain.rules[0]", byRule,
		},
		"a DaemonSet that would bring it back": {
			of("a", "DaemonSet", toleratesAll),
			drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}, Rules: []drain.Rule{rule(drain.Evict, db)}},
			"",
			"DaemonSet c tolerates the taint gpuslice.io/repartitioning and would recreate it at once: remove that toleration, " +
				"or, if a label of the node deploys it, add the label to the operands",
		},
		"a DaemonSet that would bring it back, and that a rule names": {
			of("a", "DaemonSet", toleratesAll), drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}, Rules: []drain.Rule{rule(drain.Evict, api)}}, "", "",
		},
		"a tenant's DaemonSet that tolerates all":   {of("a", "DaemonSet", toleratesAll), drain.Policy{Fence: fenceTaint, Daemons: []string{"kube-system"}}, "", ""},
		"a DaemonSet that may bring it back":        {of("a", "DaemonSet", toleratesAll), drain.Policy{}, "", ""},
		"a DaemonSet that tolerates something else": {of("a", "DaemonSet", tolerating("other", "Exists", "", "")), drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}}, "", ""},
		"a DaemonSet that tolerates another effect": {of("a", "DaemonSet", tolerating(fenceTaint.Key, "Exists", "", "NoExecute")), drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}}, "", ""},
		"a DaemonSet that tolerates another value":  {of("a", "DaemonSet", tolerating(fenceTaint.Key, "", "x", "")), drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}}, "", ""},
		"others that tolerate the fence":            {of("a", "ReplicaSet", toleratesAll), drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}}, "", ""},
		"a DaemonSet that tolerates exactly the key": {
			of("a", "DaemonSet", tolerating(fenceTaint.Key, "", "", "NoSchedule")),
			drain.Policy{Fence: fenceTaint, Daemons: []string{"team"}},
			"",
			"DaemonSet c tolerates the taint gpuslice.io/repartitioning and would recreate it at once: remove that toleration, " +
				"or, if a label of the node deploys it, add the label to the operands",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, ask := range []func(*drain.Evictor) []drain.Verdict{
				func(e *drain.Evictor) []drain.Verdict { return e.DryRun(t.Context(), []holders.Pod{c.pod}, c.policy) },
				func(e *drain.Evictor) []drain.Verdict {
					return e.Evict(t.Context(), []holders.Pod{c.pod}, c.policy, noon)
				},
			} {
				s := newServer()
				e, _ := s.evictor()
				got := ask(e)[0]
				if c.message == "" {
					if got.State != drain.Requested || got.By != "" || len(s.evictions) != 1 {
						t.Errorf("verdict is %s by %q, %q, after %d requests; want it asked for", got.State, got.By, got.Message, len(s.evictions))
					}
					continue
				}
				want := drain.Verdict{Pod: c.pod, State: drain.Refused, By: c.by, Message: c.message, Since: noon}
				for _, may := range []drain.Choice{both.Unmanaged, both.EmptyDir} {
					if strings.Contains(c.message, may.Field+": refuse") {
						want.Allow = append(want.Allow, may)
					}
				}
				if diff := cmp.Diff(want, got, exported); diff != "" || len(s.evictions) > 0 {
					t.Errorf("%d requests, want none; verdict (-want +got):\n%s", len(s.evictions), diff)
				}
			}
		})
	}
}

func tolerating(key string, operator corev1.TolerationOperator, value string, effect corev1.TaintEffect) func(*holders.Pod) {
	return func(p *holders.Pod) {
		p.Tolerations = []corev1.Toleration{{Key: key, Operator: operator, Value: value, Effect: effect}}
	}
}

// step is one call of Evict at a time after noon, when the fence was raised, and what comes of it.
type step struct {
	after    time.Duration
	want     []string // state and message of each pod
	asked    []string // pods of the evictions
	deadline time.Duration
	overdue  bool
}

// walk calls Evict step by step with the same pods. At each step another Evictor, which remembers nothing, must have the same
// deadlines: it is what a restarted agent has.
func walk(t *testing.T, s *server, pods []holders.Pod, policy drain.Policy, steps []step) {
	t.Helper()
	e, clock := s.evictor()
	for _, step := range steps {
		clock.SetTime(noon.Add(step.after))
		s.evictions = nil
		got := e.Evict(t.Context(), pods, policy, noon)
		if diff := cmp.Diff(step.want, outcome(got)); diff != "" {
			t.Errorf("after %s (-want +got):\n%s", step.after, diff)
		}
		if diff := cmp.Diff(step.asked, s.asked()); diff != "" {
			t.Errorf("after %s: asked for (-want +got):\n%s", step.after, diff)
		}
		restarted, restartedClock := newServer().evictor()
		restartedClock.SetTime(noon.Add(step.after))
		for _, v := range append(got, restarted.Evict(t.Context(), pods, policy, noon)...) {
			if want := noon.Add(step.deadline); !v.Deadline.Equal(want) || v.Overdue != step.overdue {
				t.Errorf("after %s: deadline of %s is %s, overdue %t; want %s, %t", step.after, v.Pod, v.Deadline, v.Overdue, want, step.overdue)
			}
		}
	}
}

func TestAPodMayFinishBeforeItIsEvicted(t *testing.T) {
	rule := drain.Rule{Field: "drain.rules[0]", Selector: selecting(t, "app=api"), Action: drain.Wait, For: 8 * time.Hour}
	policy := drain.Policy{Rules: []drain.Rule{rule}, Deadline: time.Hour, Unmanaged: choice("drain.unmanagedPods")}
	s := newServer()
	s.answer = refusal(needsTwo, 0) // a budget need not let a pod go that ends by itself, and is not asked before the fence
	pods := []holders.Pod{of("train", "", isUnmanaged)}

	e, _ := s.evictor()
	before := e.DryRun(t.Context(), pods, policy)
	want := []string{"Waiting may end by itself for 8h0m0s after the cordon (rule drain.rules[0])"}
	if diff := cmp.Diff(want, outcome(before)); diff != "" || len(s.evictions) > 0 || before[0].By != rule.Field {
		t.Errorf("dry run by %q after %d requests, want %s after none (-want +got):\n%s", before[0].By, len(s.evictions), rule.Field, diff)
	}

	finishing := []string{"Waiting finishes by itself until 2026-03-01T20:00Z (rule drain.rules[0]), or when its budget lets it go"}
	walk(t, s, pods, policy, []step{
		{after: 0, want: finishing, deadline: 9 * time.Hour},
		{after: 8*time.Hour - 1, want: finishing, deadline: 9 * time.Hour},
		{
			after: 8 * time.Hour, asked: []string{"train"}, deadline: 9 * time.Hour,
			want: []string{"Blocked PDB team/api: " + needsTwo + "; retried until 21:00Z"},
		},
		{
			after: 9 * time.Hour, deadline: 9 * time.Hour, overdue: true,
			want: []string{"Blocked PDB team/api: " + needsTwo + "; it had until 21:00Z"},
		},
	})
}

// Without a rule all ordinary pods may end by themselves, if the policy says so.
func TestPodsMayFinishBeforeTheyAreEvicted(t *testing.T) {
	web := drain.Rule{Field: "drain.rules[0]", Namespaces: []string{"web"}, Selector: labels.Everything(), Action: drain.Evict}
	train := drain.Rule{Field: "drain.rules[1]", Namespaces: []string{"train"}, Selector: labels.Everything(), Action: drain.Wait, For: time.Hour}
	policy := drain.Policy{
		Rules: []drain.Rule{web, train}, EndFor: 8 * time.Hour, EndField: "drain.mode", Deadline: time.Hour, Unmanaged: choice("drain.unmanagedPods"),
		Daemons: []string{"team"},
	}
	in := func(namespace string) func(*holders.Pod) { return func(p *holders.Pod) { p.Namespace = namespace } }
	any1, any2, dns, monitor := of("a", "Job"), of("b", "ReplicaSet", hasEmptyDir), of("dns", "ReplicaSet", isCritical), of("monitor", "DaemonSet")

	t.Run("one by one, until it is time", func(t *testing.T) {
		s := newServer()
		const finishing = "Waiting finishes by itself until 2026-03-01T20:00Z (drain.mode)"
		const forOrdinary = "Queued a critical pod: it leaves after the ordinary ones"
		walk(t, s, []holders.Pod{any1, any2}, policy, []step{
			{after: 0, want: []string{finishing, finishing}, deadline: 9 * time.Hour},
			{after: time.Hour, want: []string{finishing, finishing}, deadline: 9 * time.Hour},
		})
		walk(t, s, []holders.Pod{any2, dns}, policy, []step{ // a has ended
			{after: 8*time.Hour - 1, want: []string{finishing, forOrdinary}, deadline: 9 * time.Hour},
			{after: 8 * time.Hour, want: []string{"Requested", forOrdinary}, asked: []string{"b"}, deadline: 9 * time.Hour},
		})
		walk(t, s, []holders.Pod{dns}, policy, []step{ // when the others have ended, Evict does not wait for the rest of the time
			{after: time.Hour, want: []string{"Requested"}, asked: []string{"dns"}, deadline: 9 * time.Hour},
		})
		walk(t, s, []holders.Pod{monitor}, policy, []step{{after: time.Hour, want: []string{"Requested"}, asked: []string{"monitor"}, deadline: 9 * time.Hour}})
	})
	t.Run("but not those that a rule or a choice is for", func(t *testing.T) {
		got := newServerEvictor().Evict(t.Context(), []holders.Pod{of("a", "Job", in("web")), of("b", "Job", in("train")), of("c", "", isUnmanaged)}, policy, noon)
		want := []string{
			"Requested",
			"Waiting finishes by itself until 2026-03-01T13:00Z (rule drain.rules[1])",
			"Refused no controller would recreate it (drain.unmanagedPods: refuse)",
		}
		if diff := cmp.Diff(want, outcome(got)); diff != "" {
			t.Errorf("verdicts (-want +got):\n%s", diff)
		}
	})
	t.Run("and a dry run asks about none of them", func(t *testing.T) {
		s := newServer()
		e, _ := s.evictor()
		got := e.DryRun(t.Context(), []holders.Pod{any1, any2}, policy)
		const mayEnd = "Waiting may end by itself for 8h0m0s after the cordon (drain.mode)"
		if diff := cmp.Diff([]string{mayEnd, mayEnd}, outcome(got)); diff != "" || len(s.evictions) > 0 || got[0].By != "drain.mode" {
			t.Errorf("by %q after %d requests (-want +got):\n%s", got[0].By, len(s.evictions), diff)
		}
	})
}

func TestPodsLeaveOneTierAfterTheOther(t *testing.T) {
	s := newServer()
	e, clock := s.evictor()
	web, job, dns, monitor := of("web", "ReplicaSet"), of("job", "Job"), of("dns", "ReplicaSet", isCritical), of("monitor", "DaemonSet", isCritical)
	const forOrdinary = "Queued a critical pod: it leaves after the ordinary ones"
	const forAll = "Queued of a DaemonSet: it leaves after all others"

	for _, step := range []struct {
		name   string
		pods   []holders.Pod
		answer error
		want   []string
		asked  []string
	}{
		{
			"ordinary pods go first",
			[]holders.Pod{monitor, dns, web, job},
			nil,
			[]string{forAll, forOrdinary, "Requested", "Requested"},
			[]string{"web", "job"},
		},
		{
			"one that terminates holds the others back",
			[]holders.Pod{monitor, dns, of("web", "ReplicaSet", isLeaving)},
			nil,
			[]string{forAll, forOrdinary, "Terminating terminating"},
			nil,
		},
		{
			"one that may not go does too",
			[]holders.Pod{monitor, dns, web},
			refusal(needsTwo, 0),
			[]string{forAll, forOrdinary, "Blocked PDB team/api: " + needsTwo},
			[]string{"web"},
		},
		{"then the critical ones", []holders.Pod{monitor, dns}, nil, []string{forAll, "Requested"}, []string{"dns"}},
		{"and those of DaemonSets last", []holders.Pod{monitor}, nil, []string{"Requested"}, []string{"monitor"}},
	} {
		clock.SetTime(clock.Now().Add(time.Minute))
		s.answer = step.answer
		if diff := cmp.Diff(step.want, outcome(e.Evict(t.Context(), step.pods, drain.Policy{Daemons: []string{"team"}}, noon))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step.name, diff)
		}
		if diff := cmp.Diff(step.asked, s.asked()); diff != "" {
			t.Errorf("%s: asked for (-want +got):\n%s", step.name, diff)
		}
	}

	s.answer = apierrors.NewNotFound(podResource, "web")
	clock.SetTime(clock.Now().Add(time.Minute))
	if diff := cmp.Diff([]string{"Gone", "Gone"}, outcome(e.Evict(t.Context(), []holders.Pod{web, dns}, drain.Policy{Daemons: []string{"team"}}, noon))); diff != "" {
		t.Errorf("when the ordinary pod turns out to be gone (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"Requested", "Requested"}, outcome(newServerEvictor().DryRun(t.Context(), []holders.Pod{dns, web}, drain.Policy{Daemons: []string{"team"}}))); diff != "" {
		t.Errorf("a dry run asks about all at once (-want +got):\n%s", diff)
	}
}

func newServerEvictor() *drain.Evictor {
	e, _ := newServer().evictor()
	return e
}

// A rule that waits holds back pods of later tiers as well, and these still have their time after it.
func TestTheTurnOfLaterTiersComesAfterTheLongestWait(t *testing.T) {
	rule := drain.Rule{Field: "drain.rules[0]", Selector: selecting(t, "app=train"), Action: drain.Wait, For: 8 * time.Hour}
	policy := drain.Policy{Rules: []drain.Rule{rule}, Deadline: time.Hour, Daemons: []string{"team"}}
	e := newServerEvictor()
	for _, c := range []struct {
		pod  holders.Pod
		want time.Duration
	}{
		{of("web", "ReplicaSet"), time.Hour},
		{of("dns", "ReplicaSet", isCritical), 9 * time.Hour},
		{of("monitor", "DaemonSet"), 9 * time.Hour},
	} {
		if got := e.Evict(t.Context(), []holders.Pod{c.pod}, policy, noon)[0].Deadline; !got.Equal(noon.Add(c.want)) {
			t.Errorf("deadline of %s is %s, want %s after %s", c.pod, got, c.want, noon)
		}
	}
}

func TestAPodThatIsOverdueIsAskedAboutAndNotSentAway(t *testing.T) {
	policy := drain.Policy{Deadline: time.Hour}
	pods := []holders.Pod{of("a", "ReplicaSet")}

	t.Run("while a budget holds it", func(t *testing.T) {
		s := newServer(budget("api", 2, 2, 3))
		s.answer = refusal(needsTwo, 0)
		pods := []holders.Pod{of("a", "ReplicaSet", func(p *holders.Pod) { p.Ready = true })}
		walk(t, s, pods, policy, []step{
			{
				after: time.Minute, asked: []string{"a"}, deadline: time.Hour,
				want: []string{"Blocked PDB team/api: needs 2 healthy pods and has 2; retried until 13:00Z"},
			},
			{
				after: time.Hour, deadline: time.Hour, overdue: true,
				want: []string{"Blocked PDB team/api: needs 2 healthy pods and has 2; it had until 13:00Z"},
			},
		})
	})
	t.Run("when it may go too late", func(t *testing.T) {
		walk(t, newServer(), pods, policy, []step{
			{after: time.Hour, deadline: time.Hour, overdue: true, want: []string{"Failed still there, though it may be evicted now; it had until 13:00Z"}},
		})
	})
	t.Run("while it terminates", func(t *testing.T) {
		walk(t, newServer(), []holders.Pod{of("a", "ReplicaSet", isLeaving)}, policy, []step{
			{after: time.Hour - 1, deadline: time.Hour, want: []string{"Terminating terminating"}},
			{after: time.Hour, deadline: time.Hour, overdue: true, want: []string{"Terminating terminating"}},
		})
	})
	t.Run("but not without a fence, or a deadline", func(t *testing.T) {
		e, clock := newServer().evictor()
		clock.SetTime(noon.Add(1000 * time.Hour))
		for _, v := range []drain.Verdict{
			e.Evict(t.Context(), pods, policy, time.Time{})[0],
			newServerEvictor().Evict(t.Context(), pods, drain.Policy{Delete: true}, noon)[0],
		} {
			if v.State != drain.Requested || v.Overdue || !v.Deadline.IsZero() {
				t.Errorf("verdict is %s, overdue %t, deadline %s; want Requested without one", v.State, v.Overdue, v.Deadline)
			}
		}
	})
	t.Run("the day after", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			s.answer = errors.New("connection refused")
			walk(t, s, pods, drain.Policy{Deadline: 24 * time.Hour}, []step{{
				after: 0, asked: slices.Repeat([]string{"a"}, sends), deadline: 24 * time.Hour,
				want: []string{"Failed asking the API server: connection refused; retried until 2026-03-02T12:00Z"},
			}})
		})
	})
}

func TestAPodIsDeletedAfterItsDeadlineIfThePolicySaysSo(t *testing.T) {
	policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: 30 * time.Second}
	grace := func(d time.Duration) func(*holders.Pod) {
		return func(p *holders.Pod) { p.Grace = d; p.Ready = true }
	}
	const why = "deleted with a grace of 30s, since it was still there at 13:00Z: PDB team/api: needs 2 healthy pods and has 2"
	last := time.Hour + 90*time.Second

	t.Run("with its own grace, when its eviction is refused still", func(t *testing.T) {
		s := newServer(budget("api", 2, 2, 3))
		s.answer = refusal(needsTwo, 0)
		walk(t, s, []holders.Pod{of("a", "ReplicaSet", grace(30*time.Second))}, policy, []step{
			{
				after: time.Hour - 1, asked: []string{"a"}, deadline: time.Hour,
				want: []string{"Blocked PDB team/api: needs 2 healthy pods and has 2; retried until 13:00Z, then deleted"},
			},
			{after: time.Hour, asked: []string{"a"}, deadline: last, want: []string{"Deleted " + why}},
			{after: time.Hour + time.Millisecond, deadline: last, want: []string{"Deleted " + why}}, // the list may be older
		})
		if diff := cmp.Diff([]deletion{{"a", 30 * time.Second, "uid-a"}}, s.removed); diff != "" {
			t.Errorf("deletions (-want +got):\n%s", diff)
		}
	})

	t.Run("not when its eviction is accepted at last", func(t *testing.T) {
		s := newServer()
		walk(t, s, []holders.Pod{of("a", "ReplicaSet", grace(30*time.Second))}, policy, []step{
			{after: time.Hour, asked: []string{"a"}, deadline: last, want: []string{"Requested"}},
		})
		if len(s.removed) > 0 {
			t.Errorf("deletions are %v, want none", s.removed)
		}
	})

	t.Run("with a grace within bounds", func(t *testing.T) {
		for own, want := range map[time.Duration]time.Duration{
			0: time.Second, time.Second: time.Second, 10 * time.Second: 10 * time.Second, time.Hour: 30 * time.Second,
		} {
			s := newServer()
			s.answer = refusal(needsTwo, 0)
			e, clock := s.evictor()
			clock.SetTime(noon.Add(time.Hour))
			e.Evict(t.Context(), []holders.Pod{of("a", "ReplicaSet", grace(own))}, policy, noon)
			if diff := cmp.Diff([]deletion{{"a", want, "uid-a"}}, s.removed); diff != "" {
				t.Errorf("deletion of a pod with grace %s (-want +got):\n%s", own, diff)
			}
		}
	})

	t.Run("at once when its own grace is too long for an eviction", func(t *testing.T) {
		s := newServer()
		walk(t, s, []holders.Pod{of("a", "ReplicaSet", grace(time.Hour))}, policy, []step{{
			after: time.Hour, deadline: last,
			want: []string{"Deleted deleted with a grace of 30s, since it was still there at 13:00Z: its own grace is longer"},
		}})
	})

	t.Run("not when it terminates, is refused, static or unknown", func(t *testing.T) {
		rule := drain.Rule{Field: "drain.rules[0]", Selector: selecting(t, "app=spare"), Action: drain.Refuse}
		policy := policy
		policy.Rules, policy.Fence, policy.Daemons = []drain.Rule{rule}, fenceTaint, []string{"team"}
		s := newServer()
		s.answer = refusal(needsTwo, 0)
		e, clock := s.evictor()
		clock.SetTime(noon.Add(time.Hour))
		e.Evict(t.Context(), []holders.Pod{
			of("leaving", "ReplicaSet", isLeaving),
			of("spared", "ReplicaSet", func(p *holders.Pod) { p.Labels = map[string]string{"app": "spare"} }),
			of("static", "", func(p *holders.Pod) { p.Mirror = true }),
			of("nameless", "ReplicaSet", func(p *holders.Pod) { p.UID = "" }),
			of("unlisted", "", func(p *holders.Pod) { p.Unlisted = true }),
			of("returning", "DaemonSet", toleratesAll),
		}, policy, noon)
		if len(s.removed) > 0 || len(s.evictions) > 0 {
			t.Errorf("deletions are %v and evictions %v, want none", s.removed, s.evictions)
		}
	})

	t.Run("not while the API server does not answer", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			s := newServer()
			s.answer = errors.New("connection refused")
			walk(t, s, []holders.Pod{of("a", "ReplicaSet")}, policy, []step{{
				after: time.Hour, asked: slices.Repeat([]string{"a"}, sends), deadline: last,
				want: []string{"Failed asking the API server: connection refused; deletion retried until 13:01Z"},
			}})
			if len(s.removed) > 0 {
				t.Errorf("deletions are %v, want none", s.removed)
			}
		})
	})

	t.Run("not in a dry run", func(t *testing.T) {
		s := newServer()
		s.answer = refusal(needsTwo, 0)
		e, clock := s.evictor()
		clock.SetTime(noon.Add(100 * time.Hour))
		e.DryRun(t.Context(), []holders.Pod{of("a", "ReplicaSet", grace(time.Hour))}, policy)
		if asked := s.asked(); len(s.removed) > 0 || len(asked) > 0 {
			t.Errorf("deletions are %v and evictions %v, want none", s.removed, asked)
		}
	})

	t.Run("again if that failed, after a pause, until it is overdue", func(t *testing.T) {
		s := newServer(budget("api", 2, 2, 3))
		s.answer = refusal(needsTwo, 0)
		s.removal = apierrors.NewForbidden(podResource, "a", errors.New("a webhook says no"))
		const blocked = "PDB team/api: needs 2 healthy pods and has 2"
		failed := "Failed " + blocked + `; deleting it: pods "a" is forbidden: a webhook says no; deletion retried until 13:01Z`
		walk(t, s, []holders.Pod{of("a", "ReplicaSet", grace(30*time.Second))}, policy, []step{
			{after: time.Hour, asked: []string{"a"}, deadline: last, want: []string{failed}},
			{after: time.Hour + time.Millisecond, deadline: last, want: []string{failed}},
			{after: time.Hour + time.Minute, asked: []string{"a"}, deadline: last, want: []string{failed}},
			{after: last, deadline: last, overdue: true, want: []string{"Blocked " + blocked + "; it had until 13:01Z"}},
		})
		if len(s.removed) != 2 {
			t.Errorf("deletions are %v, want 2", s.removed)
		}
	})
}

func TestADeletionSaysWhatBecameOfIt(t *testing.T) {
	namesake := listed("a")
	namesake.UID = "uid-of-another"
	conflict := apierrors.NewConflict(podResource, "a", errors.New("the UID in the precondition does not match"))
	for name, c := range map[string]struct {
		objects []runtime.Object
		answer  error
		want    string
	}{
		"404":                       {nil, apierrors.NewNotFound(podResource, "a"), "Gone"},
		"409 of a namesake":         {[]runtime.Object{&namesake}, conflict, "Gone another pod has its name now"},
		"409 while no one is there": {nil, conflict, "Gone"},
		"no answer":                 {nil, errors.New("connection refused"), "Failed asking the API server: connection refused; deletion retried until 13:01Z"},
	} {
		s := newServer(c.objects...)
		s.answer, s.removal = refusal(needsTwo, 0), c.answer
		e, clock := s.evictor()
		clock.SetTime(noon.Add(time.Hour))
		policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: 30 * time.Second}
		if diff := cmp.Diff([]string{c.want}, outcome(e.Evict(t.Context(), []holders.Pod{of("a", "ReplicaSet")}, policy, noon))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// Each tier is deleted when the one before is gone, so a later one has more time.
func TestEachTierHasTimeToBeDeleted(t *testing.T) {
	policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: 30 * time.Second, Daemons: []string{"team"}}
	for _, c := range []struct {
		pod holders.Pod
		end time.Duration
	}{
		{of("web", "ReplicaSet"), 90 * time.Second},
		{of("dns", "ReplicaSet", isCritical), 3 * time.Minute},
		{of("monitor", "DaemonSet"), 270 * time.Second},
	} {
		e, clock := newServer().evictor()
		for _, at := range []struct {
			time    time.Time
			overdue bool
		}{{noon.Add(time.Hour), false}, {noon.Add(time.Hour + c.end - 1), false}, {noon.Add(time.Hour + c.end), true}} {
			clock.SetTime(at.time)
			c.pod.Terminating = true
			got := e.Evict(t.Context(), []holders.Pod{c.pod}, policy, noon)[0]
			if want := noon.Add(time.Hour + c.end); !got.Deadline.Equal(want) || got.Overdue != at.overdue {
				t.Errorf("%s at %s: deadline %s, overdue %t; want %s, %t", c.pod, at.time, got.Deadline, got.Overdue, want, at.overdue)
			}
		}
	}
}

func TestATerminatingPodSaysWhatKeepsIt(t *testing.T) {
	const silent = "node gpu-1 is not Ready since 11:40Z"
	end := func(d time.Duration, change ...func(*holders.Pod)) holders.Pod {
		p := of("a", "ReplicaSet", change...)
		p.Terminating, p.GraceEnds = true, noon.Add(d)
		return p
	}
	runs := func(names ...string) func(*holders.Pod) { return func(p *holders.Pod) { p.Running = names } }
	claims := func(p *holders.Pod) { p.Claims = []string{"data-0", "cache"} }
	final := func(p *holders.Pod) { p.Finalizers = []string{"example.io/wait", "batch.kubernetes.io/job-tracking"} }
	gpus := func(p *holders.Pod) { p.DeviceClaims = []string{"gpu-a", "gpu-b"} }
	const driverAway = "; its containers have ended, but kubelet cannot release its resource claims (gpu-a, gpu-b): " +
		"their DRA driver gpu.nvidia.com does not run on this node: no pod of it is on the node"

	for name, c := range map[string]struct {
		pod    holders.Pod
		silent string
		want   string
	}{
		"its volumes are being unmounted behind the taint": {
			end(-2*time.Minute, claims, func(p *holders.Pod) { p.Name = "tainted" }), "",
			"terminating, its grace ended at 11:58:00Z; its containers have ended, and kubelet is still unmounting its volumes (claims data-0, cache), see kubelet's log; " +
				"a CSI driver whose pod has gone from this node has to tolerate the taint example.io/fence",
		},
		"no time is known":       {end(0, func(p *holders.Pod) { p.Running = []string{"main"} }), "", "terminating, its grace ended at 12:00:00Z"},
		"it has some grace left": {end(30*time.Second, runs("main"), final), "", "terminating, its grace ends at 12:00:30Z"},
		"its grace ends tomorrow": {
			end(14*time.Hour, runs("main")), "", "terminating, its grace ends at 2026-03-02T02:00:00Z",
		},
		"kubelet is killing it": {end(-9*time.Second, runs("main")), "", "terminating, its grace ended at 11:59:51Z"},
		"a container runs on": {
			end(-2*time.Minute, runs("main")), "",
			"terminating, its grace ended at 11:58:00Z; container main still runs: the container runtime or the kernel does not end it, see kubelet's log",
		},
		"containers run on, and a finalizer waits for them": {
			end(-2*time.Minute, runs("main", "sidecar"), final), "",
			"terminating, its grace ended at 11:58:00Z; containers main, sidecar still run: the container runtime or the kernel does not end them, see kubelet's log; " +
				"finalizers example.io/wait, batch.kubernetes.io/job-tracking keep it until the programs that set them remove them",
		},
		"only finalizers are left": {
			end(-2*time.Minute, final, claims), "",
			"terminating, its grace ended at 11:58:00Z; finalizers example.io/wait, batch.kubernetes.io/job-tracking keep it until the programs that set them remove them",
		},
		"its volumes are being unmounted": {
			end(-2*time.Minute, claims), "",
			"terminating, its grace ended at 11:58:00Z; its containers have ended, and kubelet is still unmounting its volumes (claims data-0, cache), see kubelet's log",
		},
		"nothing is left of it": {
			end(-2 * time.Minute), "",
			"terminating, its grace ended at 11:58:00Z; its containers have ended, and kubelet is still cleaning up, see kubelet's log",
		},
		"kubelet is silent within its grace": {end(30*time.Second, runs("main")), silent, "terminating, its grace ends at 12:00:30Z; kubelet cannot end it: " + silent},
		"kubelet is silent after it":         {end(-2*time.Minute, runs("main"), final), silent, "terminating, its grace ended at 11:58:00Z; kubelet cannot end it: " + silent},
		"the driver of its claims is away": {
			end(-2*time.Minute, gpus, claims), "", "terminating, its grace ended at 11:58:00Z" + driverAway,
		},
		"the driver of its claims is away, and a finalizer waits": {
			end(-2*time.Minute, gpus, final), "", "terminating, its grace ended at 11:58:00Z" + driverAway +
				"; finalizers example.io/wait, batch.kubernetes.io/job-tracking keep it until the programs that set them remove them",
		},
		"the driver of its claims is away, and a container runs on": {
			end(-2*time.Minute, gpus, runs("main")), "",
			"terminating, its grace ended at 11:58:00Z; container main still runs: the container runtime or the kernel does not end it, see kubelet's log",
		},
		"a day ago": {
			end(-24*time.Hour, claims), "",
			"terminating, its grace ended at 2026-02-28T12:00:00Z; its containers have ended, and kubelet is still unmounting its volumes (claims data-0, cache), see kubelet's log",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer()
			e, _ := s.evictor()
			policy := drain.Policy{KubeletSilent: c.silent, ClaimDriverAway: "no pod of it is on the node"}
			if c.pod.Name == "tainted" {
				policy.Keeps = "example.io/fence"
			}
			for _, got := range [][]drain.Verdict{
				e.Evict(t.Context(), []holders.Pod{c.pod}, policy, noon.Add(-time.Hour)),
				e.DryRun(t.Context(), []holders.Pod{c.pod}, policy),
			} {
				if diff := cmp.Diff([]string{"Terminating " + c.want}, outcome(got)); diff != "" || len(s.evictions) > 0 {
					t.Errorf("%d requests, want none (-want +got):\n%s", len(s.evictions), diff)
				}
			}
		})
	}
}

func TestDeletionsAndWaitsAreLoggedOnce(t *testing.T) {
	rule := drain.Rule{Field: "drain.rules[0]", Selector: selecting(t, "app=api"), Action: drain.Wait, For: time.Hour}
	policy := drain.Policy{Rules: []drain.Rule{rule}, Deadline: time.Hour, Delete: true, DeleteGrace: 30 * time.Second}
	s := newServer()
	s.answer = refusal(needsTwo, 0)
	core, logs := observer.New(zap.InfoLevel)
	clock := clocktesting.NewFakePassiveClock(noon)
	e := drain.NewEvictor(clientset.Of(s), clock, zap.New(core))
	for _, after := range []time.Duration{0, time.Minute, time.Hour, 90 * time.Minute, 2 * time.Hour, 2*time.Hour + time.Millisecond} {
		clock.SetTime(noon.Add(after))
		e.Evict(t.Context(), []holders.Pod{of("a", "ReplicaSet")}, policy, noon)
	}
	var got []string
	for _, entry := range logs.TakeAll() {
		got = append(got, entry.Message)
	}
	if diff := cmp.Diff([]string{"pod may stay for a time", "eviction refused", "pod deleted"}, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}
