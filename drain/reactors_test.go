package drain_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
)

const slinkyKey = "nodeset.slinky.slurm.net/"

// labelled gives a pod labels, next to its own.
func labelled(pairs ...string) func(*holders.Pod) {
	return func(p *holders.Pod) {
		p.Labels = labels.Merge(p.Labels, nil)
		for i := 0; i < len(pairs); i += 2 {
			p.Labels[pairs[i]] = pairs[i+1]
		}
	}
}

// isSlurm makes a pod one of a NodeSet of Slinky's operator, in these states of Slurm; a state after "-" is False.
func isSlurm(states ...string) func(*holders.Pod) {
	return func(p *holders.Pod) {
		labelled(slinkyKey+"pod-name", p.Name)(p)
		for _, state := range states {
			c := corev1.PodCondition{Type: corev1.PodConditionType("SlurmNodeState" + strings.TrimPrefix(state, "-")), Status: corev1.ConditionTrue}
			if strings.HasPrefix(state, "-") {
				c.Status = corev1.ConditionFalse
			}
			p.Conditions = append(p.Conditions, c)
		}
	}
}

func endsAt(text string) func(*holders.Pod) {
	return func(p *holders.Pod) { p.Annotations = map[string]string{slinkyKey + "pod-deadline": text} }
}

// denial is how the API server passes on that a webhook denies an eviction.
func denial(webhook, why string) error {
	err := apierrors.NewTooManyRequests(`admission webhook "`+webhook+`" denied the request: `+why, 0)
	return err
}

// asking is the policy of the settings' defaults, with the rules.
func asking(rules ...drain.Rule) drain.Policy {
	return drain.Policy{
		Rules: rules, Deadline: time.Hour, AskFor: 8 * time.Hour, AskField: "drain.gradualFor", DeleteGrace: 30 * time.Second,
		Unmanaged: choice("drain.unmanagedPods"), EmptyDir: choice("drain.emptyDir"),
	}
}

func rule(action drain.Action, wait time.Duration) drain.Rule {
	return drain.Rule{Field: "drain.rules[0]", Selector: labels.Everything(), Action: action, For: wait}
}

// What a budget or a webhook refuses before the cordon holds nothing up if a rule has the pod asked behind it, or its owner is known to react. The rules
// come first.
func TestWhatMayGoBehindTheCordonHoldsNothingUp(t *testing.T) {
	const kept = "PDB team/api: " + needsTwo
	const migrates, never = "Eviction triggered evacuation of VMI \"team/vm\"", "VMI vm is configured with an eviction strategy but is not live-migratable"
	vm, soperator := labelled("kubevirt.io", "virt-launcher"), labelled("slurm.nebius.ai/worker", "true")
	webhook := func(why string) error { return denial("virt-launcher-eviction-interceptor.kubevirt.io", why) }
	const denies = "webhook virt-launcher-eviction-interceptor.kubevirt.io denies its eviction: "
	for name, row := range map[string]struct {
		is     func(*holders.Pod)
		policy drain.Policy
		answer error
		want   string
	}{
		"any other pod":                     {labelled(), asking(), refusal(needsTwo, 0), "Blocked " + kept},
		"a rule":                            {labelled(), asking(rule(drain.Ask, 2*time.Hour)), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 2h (rule drain.rules[0]); " + kept},
		"a rule without a time":             {labelled(), asking(rule(drain.Ask, 0)), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 8h (rule drain.rules[0]); " + kept},
		"a rule, for a webhook":             {labelled(), asking(rule(drain.Ask, 0)), denial("a.example", "no"), "Waiting asked behind the cordon, up to 8h (rule drain.rules[0]); webhook a.example denies its eviction: no"},
		"a rule, for a pod without budget":  {labelled(), asking(rule(drain.Ask, 0)), nil, "Requested"},
		"a rule, for an answer of no cause": {labelled(), asking(rule(drain.Ask, 0)), apierrors.NewForbidden(podResource, "a", nil), `Failed pods "a" is forbidden: <nil>`},
		"Slinky":                            {isSlurm(), asking(), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 8h (drain.gradualFor): its Slurm job may run until then; " + kept},
		"Slinky, by the time limits": {
			func(p *holders.Pod) { isSlurm()(p); endsAt("2026-03-01T14:20:00Z")(p) }, asking(), refusal(needsTwo, 0),
			"Waiting asked behind the cordon, up to 2026-03-01T14:20Z (as its annotation says): its Slurm job may run until then; " + kept,
		},
		"Slinky, not protected": {isSlurm("Allocated", "-Drain"), asking(), nil, "Waiting asked behind the cordon, up to 8h (drain.gradualFor): its Slurm job may run until then; Slurm has a job on it"},
		"soperator":             {soperator, asking(), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 8h (drain.gradualFor): its Slurm job may run until then; " + kept},
		"KubeVirt that migrates": {
			vm, asking(), webhook(migrates),
			"Waiting asked behind the cordon, up to 8h (drain.gradualFor): its virtual machine may migrate until then; " + denies + migrates,
		},
		"KubeVirt of an older release":            {vm, asking(), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 8h (drain.gradualFor): its virtual machine may migrate until then; " + kept},
		"KubeVirt that cannot migrate":            {vm, asking(), webhook(never), "Blocked " + denies + never},
		"KubeVirt without a strategy":             {vm, asking(), nil, "Requested"},
		"a rule that evicts Slinky's":             {isSlurm("Allocated"), asking(rule(drain.Evict, 0)), nil, "Requested"},
		"a rule that waits for Slinky's":          {isSlurm(), asking(rule(drain.Wait, 8*time.Hour)), nil, "Waiting may end by itself for 8h0m0s after the cordon (rule drain.rules[0])"},
		"a rule that refuses Slinky's":            {isSlurm(), asking(rule(drain.Refuse, 0)), nil, "Refused drain.rules[0] forbids its eviction: delete it yourself, or change the rule"},
		"a rule that asks Slinky's for less":      {isSlurm(), asking(rule(drain.Ask, time.Hour)), refusal(needsTwo, 0), "Waiting asked behind the cordon, up to 1h (rule drain.rules[0]): its Slurm job may run until then; " + kept},
		"Slinky's that would lose files":          {func(p *holders.Pod) { isSlurm()(p); hasEmptyDir(p) }, asking(), nil, "Refused its files on emptyDir scratch, tmp would be lost (drain.emptyDir: refuse)"},
		"Slinky's that no controller brings back": {func(p *holders.Pod) { isSlurm()(p); isUnmanaged(p) }, asking(), nil, "Refused no controller would recreate it (drain.unmanagedPods: refuse)"},
		"an undo, which knows no program":         {isSlurm("Allocated"), drain.Policy{}, refusal(needsTwo, 0), "Blocked " + kept},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer()
			s.answer = row.answer
			e, _ := s.evictor()
			pods := []holders.Pod{of("a", "NodeSet", row.is)}
			got := e.DryRun(t.Context(), pods, row.policy)
			if diff := cmp.Diff([]string{row.want}, outcome(got)); diff != "" || len(s.asked()) > 0 {
				t.Errorf("before the cordon (-want +got):\n%s", diff)
			}
			said, is := row.policy.Asked(pods[0], noon)
			if asked := strings.HasPrefix(row.want, "Waiting asked"); asked && (!is || !strings.HasPrefix(row.want, "Waiting "+said)) {
				t.Errorf("a preview says %q", said)
			}
		})
	}
}

// Behind the cordon the real request is sent at once and again, nothing cuts the pod's work off before its deadline, and the deadline is the end.
func TestAPodIsAskedBehindTheCordonUntilItsDeadline(t *testing.T) {
	const kept = "; PDB team/api: " + needsTwo
	pods := []holders.Pod{of("a", "NodeSet", labelled())}
	deletes := asking(rule(drain.Ask, 2*time.Hour))
	deletes.Delete = true
	for name, policy := range map[string]drain.Policy{"undone": asking(rule(drain.Ask, 2*time.Hour)), "deleted": deletes} {
		t.Run(name, func(t *testing.T) {
			const asked = "Waiting it is asked to leave until 14:00Z (rule drain.rules[0])" + kept
			s := newServer()
			s.answer = refusal(needsTwo, 0)
			steps := []step{
				{after: 0, want: []string{asked}, asked: []string{"a"}, deadline: 2 * time.Hour},
				{after: time.Minute, want: []string{asked}, asked: []string{"a"}, deadline: 2 * time.Hour},
				{after: 2*time.Hour - 1, want: []string{asked}, asked: []string{"a"}, deadline: 2 * time.Hour},
			}
			if !policy.Delete {
				steps = append(steps, step{after: 2 * time.Hour, want: []string{"Blocked" + kept[1:] + "; it had until 14:00Z"}, deadline: 2 * time.Hour, overdue: true})
			}
			walk(t, s, pods, policy, steps)
			if len(s.removed) > 0 {
				t.Errorf("deleted before its deadline: %v", s.removed)
			}
			if !policy.Delete {
				return
			}
			e, clock := s.evictor()
			clock.SetTime(noon.Add(2 * time.Hour))
			if got := e.Evict(t.Context(), pods, policy, noon); got[0].State != drain.Deleted {
				t.Errorf("at its deadline: %v", outcome(got))
			}
		})
	}
	t.Run("and goes within 30 s after it may", func(t *testing.T) {
		s := newServer()
		for open := time.Second; open < 10*time.Minute; open += 7 * time.Second {
			e, clock := s.evictor()
			var left time.Time
			for at := noon; left.IsZero(); {
				clock.SetTime(at)
				if s.answer = refusal(needsTwo, 0); at.Sub(noon) >= open {
					s.answer = nil
				}
				got := e.Evict(t.Context(), pods, asking(rule(drain.Ask, 0)), noon)[0]
				if got.State == drain.Requested {
					left = at
				}
				at = got.RetryAt
			}
			if took := left.Sub(noon) - open; took > 30*time.Second {
				t.Fatalf("left %s after the budget opened", took)
			}
		}
	})
	t.Run("and at once when its labels change, by which a budget selects it", func(t *testing.T) {
		s := newServer()
		s.answer = refusal(needsTwo, 0)
		protected := of("a", "NodeSet", labelled(slinkyKey+"pod-protect", "true", slinkyKey+"pod-name", "a"))
		e, clock := s.evictor()
		for range 6 { // the pause has grown
			clock.SetTime(e.Evict(t.Context(), []holders.Pod{protected}, asking(), noon)[0].RetryAt)
		}
		e.Evict(t.Context(), []holders.Pod{protected}, asking(), noon)
		clock.SetTime(clock.Now().Add(time.Second))
		s.answer = nil
		if got := e.Evict(t.Context(), []holders.Pod{of("a", "NodeSet", isSlurm())}, asking(), noon); got[0].State != drain.Requested {
			t.Errorf("got %v", outcome(got))
		}
	})
}

// Slinky's operator shows the state of the Slurm node. A pod without protection leaves when Slurm has drained it, and not before.
func TestASlurmPodWithoutABudgetIsDrainedThroughSlurm(t *testing.T) {
	for name, row := range map[string]struct {
		states []string
		keeps  string
	}{
		"no state is known":              {nil, ""},
		"other conditions alone":         {[]string{"-Down"}, "Slurm has not drained it yet"},
		"a job on all of it":             {[]string{"Allocated", "Drain"}, "Slurm has a job on it"},
		"a job on a part of it":          {[]string{"Mixed", "Drain"}, "Slurm has a job on it"},
		"a job that ends":                {[]string{"Idle", "Completing", "Drain"}, "Slurm has a job on it"},
		"idle, and open to the next job": {[]string{"Idle", "-Drain"}, "Slurm has not drained it yet"},
		"being opened again":             {[]string{"Idle", "Drain", "Undrain"}, "Slurm has not drained it yet"},
		"drained":                        {[]string{"Idle", "Drain", "-Undrain", "-Allocated"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer()
			pods := []holders.Pod{of("a", "NodeSet", isSlurm(row.states...))}
			if row.keeps == "" {
				walk(t, s, pods, asking(), []step{{after: 0, want: []string{"Requested"}, asked: []string{"a"}, deadline: 8 * time.Hour}})
				return
			}
			stays := "Waiting its Slurm job may run until 20:00Z (drain.gradualFor); " + row.keeps
			walk(t, s, pods, asking(), []step{
				{after: 0, want: []string{stays}, deadline: 8 * time.Hour},
				{after: 8*time.Hour - 1, want: []string{stays}, deadline: 8 * time.Hour},
				{after: 8 * time.Hour, want: []string{"Failed " + row.keeps + "; it had until 20:00Z"}, deadline: 8 * time.Hour, overdue: true},
			})
		})
	}
}

// The deadline of a Slurm pod follows from the time limits of its jobs, with the usual time to leave after that. A tenant can write the annotation.
func TestASlurmPodHasUntilItsJobsEnd(t *testing.T) {
	for text, deadline := range map[string]time.Duration{
		"2026-03-01T14:20:00Z":      2*time.Hour + 20*time.Minute + time.Hour,
		"2026-03-01T09:00:00+02:00": time.Hour, // in the past
		"2036-03-01T14:20:00Z":      720 * time.Hour,
		"9999-12-31T23:59:59Z":      720 * time.Hour,
		"0000-01-01T00:00:00Z":      time.Hour,
		"":                          8 * time.Hour,
		"tomorrow":                  8 * time.Hour,
		"2026-03-01T14:20:00" + strings.Repeat("0", 1<<16): 8 * time.Hour,
	} {
		s := newServer()
		e, _ := s.evictor()
		pod := of("a", "NodeSet", func(p *holders.Pod) { isSlurm("Allocated")(p); endsAt(text)(p) })
		if got := e.Evict(t.Context(), []holders.Pod{pod}, asking(), noon)[0].Deadline.Sub(noon); got != deadline {
			t.Errorf("%.40q: deadline after %s, want %s", text, got, deadline)
		}
		if got := asking().Patience([]holders.Pod{pod}, noon); got != deadline {
			t.Errorf("%.40q: a preview says %s, want %s", text, got, deadline)
		}
	}
	t.Run("also when they have ended, and the annotation is gone", func(t *testing.T) {
		s := newServer()
		e, clock := s.evictor()
		policy := asking()
		long := of("a", "NodeSet", func(p *holders.Pod) { isSlurm("Allocated", "Drain")(p); endsAt("2026-03-02T12:00:00Z")(p) })
		critical := of("dns", "ReplicaSet", isCritical)
		policy.Granted = policy.Grant([]holders.Pod{long, critical}, noon)
		clock.SetTime(noon.Add(20 * time.Hour))
		got := e.Evict(t.Context(), []holders.Pod{of("a", "NodeSet", isSlurm("Idle", "Drain")), critical}, policy, noon)
		want := []string{"Requested", "Queued a critical pod: it leaves after the ordinary ones"}
		if diff := cmp.Diff(want, outcome(got)); diff != "" || got[0].Overdue || got[1].Overdue {
			t.Errorf("(-want +got):\n%s", diff)
		}
		got = e.Evict(t.Context(), []holders.Pod{critical}, policy, noon)
		if got[0].State != drain.Requested || got[0].Overdue {
			t.Errorf("when it has left: %v, overdue %t", outcome(got), got[0].Overdue)
		}
		if got := policy.Patience([]holders.Pod{critical}, noon); got != 26*time.Hour {
			t.Errorf("the critical pod may stay for %s after the fence, want 26h", got)
		}
		if got := e.Evict(t.Context(), []holders.Pod{of("b", "NodeSet", isSlurm("Allocated", "Drain"))}, policy, noon)[0]; !got.Overdue {
			t.Error("another pod that is asked gains the time of this one")
		}
	})
}

// A pod that may end by itself leaves when its budget lets it go: who opens a budget behind the cordon means that. One without such a budget stays.
func TestAPodThatMayEndByItselfLeavesWhenItsBudgetOpens(t *testing.T) {
	const finishing, kept = "Waiting finishes by itself until 2026-03-01T20:00Z (drain.mode)", ", or when its budget lets it go"
	gradual := asking()
	gradual.EndFor, gradual.EndField = 8*time.Hour, "drain.mode"
	for name, row := range map[string]struct {
		budget *drainBudget
		answer error
		first  string
		then   string
	}{
		"a budget that allowed none":           {&drainBudget{3, 3, 3}, refusal(needsTwo, 0), finishing + kept, "Requested"},
		"a budget that nobody may read":        {nil, refusal(needsTwo, 0), finishing + kept, "Requested"},
		"a budget that only lacked other pods": {&drainBudget{2, 2, 3}, refusal(needsTwo, 0), finishing, finishing},
		"a webhook":                            {nil, denial("a.example", "no"), finishing, finishing},
		"none":                                 {nil, nil, finishing, finishing},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			if b := row.budget; b != nil {
				objects = append(objects, budget("api", b.desired, b.healthy, b.expected))
			}
			s := newServer(objects...)
			s.answer = row.answer
			e, clock := s.evictor()
			pods := []holders.Pod{of("a", "Job")}
			first := e.Evict(t.Context(), pods, gradual, noon)
			if diff := cmp.Diff([]string{row.first}, outcome(first)); diff != "" || len(s.asked()) > 0 {
				t.Fatalf("while it is kept (-want +got):\n%s", diff)
			}
			s.answer = nil
			if clock.SetTime(first[0].RetryAt); clock.Now().Sub(noon) > 5*time.Minute {
				t.Fatalf("asked again after %s", clock.Now().Sub(noon))
			}
			if diff := cmp.Diff([]string{row.then}, outcome(e.Evict(t.Context(), pods, gradual, noon))); diff != "" {
				t.Errorf("when nothing keeps it any more (-want +got):\n%s", diff)
			}
		})
	}
}

// drainBudget is the state of a budget.
type drainBudget struct{ desired, healthy, expected int32 }

// Who denies is named, with a bounded text that a webhook may have from anybody.
func TestAWebhookThatDeniesIsNamedAndNoBusyServer(t *testing.T) {
	s := newServer()
	for name, row := range map[string]struct {
		answer error
		want   string
	}{
		"a 429":          {denial("drain.example", "no"), "Blocked webhook drain.example denies its eviction: no"},
		"a 403":          {apierrors.NewForbidden(podResource, "a", denial("drain.example", "not now")), "Blocked webhook drain.example denies its eviction: not now"},
		"without words":  {apierrors.NewTooManyRequests(`admission webhook "drain.example" denied the request`, 0), "Blocked webhook drain.example denies its eviction"},
		"with too many":  {denial("drain.example", "\x1b[2J"+strings.Repeat("x", 1<<16)), "Blocked webhook drain.example denies its eviction: \\x1b[2J" + strings.Repeat("x", 192) + "…"},
		"a busy server":  {apierrors.NewTooManyRequestsError("try later"), "Failed the API server is busy: Too many requests: try later"},
		"a broken quote": {apierrors.NewTooManyRequests(`admission webhook "drain.example`, 0), `Failed the API server is busy: admission webhook "drain.example`},
	} {
		s.answer = row.answer
		got := newEvictorOf(s).DryRun(t.Context(), []holders.Pod{of("a", "Job")}, asking())
		if diff := cmp.Diff([]string{row.want}, outcome(got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func newEvictorOf(s *server) *drain.Evictor { e, _ := s.evictor(); return e }
