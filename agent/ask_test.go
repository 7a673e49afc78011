package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// answersFor has the API server answer each eviction of the pod with an error of the function; nil for letting it go.
func (w *world) answersFor(name string, answer func(dryRun bool) error) {
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		e, is := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
		if !is || e.Name != name {
			return false, nil, nil
		}
		err := answer(e.DeleteOptions != nil && len(e.DeleteOptions.DryRun) > 0)
		return err != nil, nil, err
	})
}

// allowsNone is the API server's answer for a budget that lets no pod go.
func allowsNone() error {
	refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 0)
	refused.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget jobs needs 1 healthy pods and has 1 currently"}}
	return refused
}

// ofSlinky makes the pod one of a NodeSet of Slinky's slurm-operator, in these states of Slurm.
func ofSlinky(states ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels = map[string]string{"nodeset.slinky.slurm.net/pod-name": p.Name}
		p.Status.Conditions = nil
		for _, state := range states {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodConditionType("SlurmNodeState" + state), Status: corev1.ConditionTrue})
		}
	}
}

// editPod changes a pod as its controller does.
func (w *world) editPod(name string, change func(*corev1.Pod)) {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	change(p)
	if err := w.client.Tracker().Update(podResource, p, p.Namespace); err != nil {
		w.t.Fatal(err)
	}
}

// A budget that opens only behind the cordon holds no change up, and the change goes on when it opens.
func TestAChangeGoesOnWhenABudgetOpensBehindTheCordon(t *testing.T) {
	t.Parallel()
	rule := func(action config.DrainAction, wait time.Duration) []config.DrainRule {
		return []config.DrainRule{{Selector: labels.Everything(), Action: action, For: wait}}
	}
	for name, row := range map[string]struct {
		settings func(*config.Drain)
		pod      func(*corev1.Pod)
		says     string
	}{
		"a pod of Slinky's slurm-operator": {func(*config.Drain) {}, ofSlinky(), "team/slurmd-0: its Slurm job may run until 2000-01-01T08:00Z (drain.gradualFor); PDB team/jobs"},
		"a rule that asks":                 {func(d *config.Drain) { d.Rules = rule(config.DrainAsk, 2*time.Hour) }, func(*corev1.Pod) {}, "team/slurmd-0: it is asked to leave until 2000-01-01T02:00Z (rule drain.rules[0])"},
		"a rule that waits":                {func(d *config.Drain) { d.Rules = rule(config.DrainWait, 8*time.Hour) }, func(*corev1.Pod) {}, "finishes by itself until"},
		"gradual":                          {func(d *config.Drain) { d.Mode = config.DrainGradual }, func(*corev1.Pod) {}, "finishes by itself until"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.settings(&w.settings.Drain)
				w.restart()
				w.turn()
				w.pod("slurmd-0", w.gpus.UUIDs()[0], row.pod)
				var fenced time.Time
				w.answersFor("slurmd-0", func(bool) error {
					if fenced.IsZero() || time.Since(fenced) < 5*time.Minute {
						return allowsNone()
					}
					return nil
				})
				foreseen, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-balanced")
				asks := strings.Contains(row.says, "until 2000-01-01T0")
				if err != nil || foreseen.HeldUp != "" || (len(foreseen.Asked) == 1 && strings.Contains(foreseen.Asked[0], "asked behind the cordon, up to")) != asks {
					t.Errorf("a preview says %q, held up %q, error %v", foreseen.Asked, foreseen.HeldUp, err)
				}
				w.label("all-balanced")
				w.untilCordoned()
				fenced = time.Now()
				w.spend(4 * time.Minute)
				if c := w.condition(); c.Reason != string(config.ReasonEvicting) || !strings.Contains(c.Message, strings.ReplaceAll(row.says, "2000-01-01T", "")) {
					t.Errorf("until then the node says %s: %s", c.Reason, c.Message)
				}
				w.passes("the eviction", func() bool { return !w.runs("slurmd-0") })
				if took := time.Since(fenced); took < 5*time.Minute || took > 5*time.Minute+30*time.Second {
					t.Errorf("it left %s after the cordon, and the budget opened after 5m", took)
				}
				w.reach("all-balanced")
			})
		})
	}
}

// Whoever writes the label of a program that reacts gains the time until the deadline, and no second cordon. Nothing is deleted before.
func TestAPodThatIsAskedInVainHasUntilItsDeadline(t *testing.T) {
	t.Parallel()
	for name, deletes := range map[string]bool{"the change is undone": false, "the pod is deleted": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.settings.Drain.GradualFor = time.Hour
				if deletes {
					w.settings.Drain.AfterDeadline = config.AfterDeadlineDelete
				}
				w.restart()
				w.turn()
				w.pod("slurmd-0", w.gpus.UUIDs()[0], ofSlinky())
				w.answersFor("slurmd-0", func(bool) error { return allowsNone() })
				cordons := w.recordCordons()
				w.label("all-balanced")
				w.untilCordoned()
				fenced := time.Now()
				w.spend(time.Hour - time.Minute)
				if !w.runs("slurmd-0") || !w.node().Spec.Unschedulable {
					t.Fatalf("before its deadline the pod runs: %t, and the node is cordoned: %t", w.runs("slurmd-0"), w.node().Spec.Unschedulable)
				}
				if deletes {
					w.reach("all-balanced")
					return
				}
				w.settle(config.ReasonEvictionBlocked)
				if took := time.Since(fenced); took < time.Hour || took > time.Hour+10*time.Minute || !w.runs("slurmd-0") {
					t.Errorf("given up %s after the cordon, want 1h; the pod runs: %t", took, w.runs("slurmd-0"))
				}
				w.expectGivenBack()
				w.spend(time.Hour)
				if len(*cordons) != 1 {
					t.Errorf("%d cordons", len(*cordons))
				}
			})
		})
	}
}

// A controller that moves its pod because its eviction was requested is asked, by a request that is no dry run.
func TestAPodIsMovedBecauseItWasAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.pod("vm", w.gpus.UUIDs()[0], func(p *corev1.Pod) { p.Labels = map[string]string{"kubevirt.io": "virt-launcher"} })
		var asked time.Time
		w.answersFor("vm", func(dryRun bool) error {
			if !dryRun && asked.IsZero() {
				asked = time.Now()
			}
			return apierrors.NewTooManyRequests(`admission webhook "virt-launcher-eviction-interceptor.kubevirt.io" denied the request: Eviction triggered evacuation of VMI "team/vm"`, 0)
		})
		w.label("all-balanced")
		w.untilCordoned()
		fenced := time.Now()
		w.passes("the request", func() bool { return !asked.IsZero() })
		if took := asked.Sub(fenced); took > 30*time.Second {
			t.Errorf("asked %s after the cordon", took)
		}
		w.spend(2 * time.Minute)
		if c := w.condition(); c.Reason != string(config.ReasonEvicting) || !strings.Contains(c.Message, "team/vm: its virtual machine may migrate until ") {
			t.Errorf("until then the node says %s: %s", c.Reason, c.Message)
		}
		w.endPod("vm")
		w.reach("all-balanced")
	})
}

// Where no program is known to react, the condition names the rule that asks, and the webhook that denies.
func TestABlockedChangeSaysThatPodsMayBeAskedBehindTheCordon(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.pod("kafka-0", w.gpus.UUIDs()[0])
		w.answersFor("kafka-0", func(bool) error {
			return apierrors.NewTooManyRequests(`admission webhook "drain-cleaner.strimzi.io" denied the request: the operator will roll it`, 0)
		})
		w.label("all-balanced")
		c := w.untilReason(config.ReasonEvictionBlocked)
		for _, says := range []string{"webhook drain-cleaner.strimzi.io denies its eviction: the operator will roll it", "to request it behind the cordon, write a drain rule with action ask"} {
			if !strings.Contains(c.Message, says) {
				t.Errorf("it does not say %q: %s", says, c.Message)
			}
		}
	})
}

// No budget keeps this pod. Slurm drains it, and only then the agent evicts it.
func TestAJobOfSlurmIsNotCutOffWithoutABudgetEither(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.pod("slurmd-0", w.gpus.UUIDs()[0], ofSlinky("Allocated"))
		w.label("all-balanced")
		w.untilCordoned()
		for _, state := range []string{"Allocated", "Mixed", "Completing"} {
			w.editPod("slurmd-0", ofSlinky(state, "Drain"))
			if w.spend(10 * time.Minute); !w.runs("slurmd-0") {
				t.Fatalf("evicted while Slurm says %s", state)
			}
		}
		if message := w.condition().Message; !strings.Contains(message, "team/slurmd-0: its Slurm job may run until 08:00Z (drain.gradualFor); Slurm has a job on it") {
			t.Errorf("until then the node says %s", message)
		}
		drained := time.Now()
		w.editPod("slurmd-0", ofSlinky("Idle", "Drain"))
		w.passes("the eviction", func() bool { return !w.runs("slurmd-0") })
		if took := time.Since(drained); took > 30*time.Second {
			t.Errorf("it left %s after Slurm had drained it", took)
		}
		w.reach("all-balanced")
	})
}

// Where devices are closed to claims while pods leave, a pod that goes only from a cordoned node has the node fenced.
func TestAPodThatIsAskedHasTheNodeFencedWhereDevicesWouldBeClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.editPod("leaves", ofSlinky())
		cordons := w.recordCordons()
		w.answersFor("leaves", func(bool) error {
			if len(*cordons) == 0 {
				return allowsNone()
			}
			return nil
		})
		w.label("seven")
		w.untilCordoned()
		if closed := w.closedDevices(); len(closed) > 0 {
			t.Errorf("closed are %v", closed)
		}
		w.expectNothingLeft("seven")
	})
}

// How long pods may stay does not depend on what they still show, nor on when the agent was last killed.
func TestPodsKeepTheirTimeWhenTheirWorkHasEnded(t *testing.T) {
	t.Parallel()
	const deadline = "nodeset.slinky.slurm.net/pod-deadline"
	critical := func(p *corev1.Pod) {
		p.Spec.PriorityClassName, p.Spec.Priority = "system-node-critical", new(int32(2000001000))
	}
	for name, row := range map[string]func(w *world){
		"while it ends": func(w *world) {
			w.editPod("slurmd-0", func(p *corev1.Pod) { delete(p.Annotations, deadline); ofSlinky("Idle", "Drain")(p) })
			w.passes("termination", func() bool { return w.isTerminating("slurmd-0") })
			w.restart()
		},
		"before its eviction": func(w *world) {
			w.editPod("slurmd-0", func(p *corev1.Pod) { delete(p.Annotations, deadline); ofSlinky("Completing", "Drain")(p) })
			w.restart()
			if w.spend(time.Minute); !w.runs("slurmd-0") {
				w.t.Error("its job was cut off")
			}
			w.editPod("slurmd-0", ofSlinky("Idle", "Drain"))
		},
		"with a critical pod after it": func(w *world) { w.endPod("slurmd-0"); w.restart() },
		"with a kubelet that is silent while the critical pod ends": func(w *world) {
			w.endPod("slurmd-0")
			w.passes("termination", func() bool { return w.isTerminating("dns") })
			w.kubeletSilent = true
			w.spend(30 * time.Second)
			w.kubeletSilent = false
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.settings.Drain.GradualFor, w.settings.Timeouts.Drain, w.grace = 10*time.Minute, 10*time.Minute, 3*time.Minute
				w.restart()
				w.turn()
				ends := time.Now().Add(40 * time.Minute)
				w.pod("slurmd-0", w.gpus.UUIDs()[0], ofSlinky("Allocated", "Drain"), func(p *corev1.Pod) {
					metav1.SetMetaDataAnnotation(&p.ObjectMeta, deadline, ends.UTC().Format(time.RFC3339))
				})
				w.pod("dns", w.gpus.UUIDs()[1], critical)
				w.label("all-balanced")
				w.untilCordoned()
				w.spend(35 * time.Minute)
				if !w.runs("slurmd-0") || !w.runs("dns") || !w.hasJournal() {
					t.Fatalf("35m after the cordon: %s", w.condition().Message)
				}
				row(w)
				w.reach("all-balanced")
				if w.disk.record(t).Learnt.Granted != nil {
					t.Error("the record keeps the times of a change that has ended")
				}
			})
		})
	}
}
