package rollout

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// Who labels a node reads what becomes of it, in the words of plan: nothing is said that has not been judged.
func TestALabelledNodeHasTheVerdictOfItsPlan(t *testing.T) {
	steps, pods := []string{"fence: journal, cordon, taint"}, []string{"team/a", "team/b"}
	for name, row := range map[string]struct {
		answer   api.Answer
		plan     string
		labelled string
		planned  int // exit code of plan
		code     int // of apply
	}{
		"at once":   {api.Answer{Steps: steps}, "begins at once", "begins at once", 0, 0},
		"a slot":    {api.Answer{Steps: steps, Runs: "when a slot is free"}, "begins when a slot is free", "begins when a slot is free", 0, 0},
		"no change": {api.Answer{Notes: []string{"a note"}}, "nothing to do\n  note: a note\n", "nothing to do\n      a note\n", 0, 0},
		"a sick GPU, and a pod that is asked": {
			api.Answer{Steps: steps, Notes: []string{"GPU 0 has GPULost"}, Asked: []string{"team/a: asked behind the cordon"}},
			"begins at once\n", "begins at once\n      team/a: asked behind the cordon\n      GPU 0 has GPULost\n", 0, 0,
		},
		"a hold": {
			api.Answer{Steps: steps, Runs: "only after it", HeldUp: "to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; it is held", Reason: config.ReasonHeld},
			"would be held up: Held: to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; it is held", "held up: Held: to go on: kubectl annotate node gpu-1 gpuslice.io/hold-; it is held", cli.ExitHeldUp, 0,
		},
		"a name that the node does not have": {
			api.Answer{Refused: "there is no research", Reason: config.ReasonUnknownConfig},
			"would be refused: UnknownConfig: there is no research", "refused: UnknownConfig: there is no research", cli.ExitHeldUp, 1,
		},
		"a budget that stays in the way": {
			api.Answer{Steps: steps, Pods: pods, Patience: api.Duration(time.Hour)},
			"would give up after 1h: budget team/x lets 1 of 2 pods go, and then no more", "would give up after 1h: budget team/x lets 1 of 2 pods go, and then no more", cli.ExitHeldUp, 0,
		},
		"pods that are not named": {
			api.Answer{Steps: steps, Pods: []string{"team/a"}, MorePods: 1, Patience: api.Duration(time.Hour)},
			"begins at once; whether it ends is not known: nothing is known of 1 pod more", "begins at once; whether it ends is not known: nothing is known of 1 pod more", cli.ExitUnknown, 0,
		},
		"silence": {api.Answer{For: agenttest.KeepsSilent}, "not known: its agent has not answered within 30s", "not known: its agent has not answered within 5s", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				keepsOne(w)
				w.Names["gpu-1"] = row.answer
				w.Start("plan", "-l", "pool=research", "--profile", "research")
				if row.answer.For != agenttest.KeepsSilent {
					w.Answers("gpu-1", row.answer)
				}
				w.Answers("gpu-2", api.Answer{Steps: steps, Runs: "at the end"})
				if said, code := w.Ended(); !strings.HasPrefix(said, "gpu-1: "+row.plan) || code != row.planned {
					t.Errorf("plan ends with %d, want %d and %q:\n%s", code, row.planned, row.plan, said)
				}
				w.Names["gpu-2"] = api.Answer{Steps: steps, Runs: "at the end"}
				said, code := w.Run(apply()...)
				if !strings.HasPrefix(said, "gpu-1  labelled gpuslice.io/profile=research: "+row.labelled) || code != row.code {
					t.Errorf("apply ends with %d, want %d and %q:\n%s", code, row.code, row.labelled, said)
				}
				if strings.Count(said, "gpu-1  ") != 1 || !strings.Contains(said, "gpu-2  labelled gpuslice.io/profile=research: begins at the end\n") {
					t.Errorf("not one line for each node:\n%s", said)
				}
				if refused := "error: profile research refused by 1 node; to take the label back:\n  kubectl gpuslice apply gpu-1 --none\n"; strings.Contains(said, refused) != (row.code == 1) {
					t.Errorf("want %q:\n%s", refused, said)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
			inWorld(t, func(w *world) {
				keepsOne(w)
				w.Names["gpu-1"] = row.answer
				w.Names["gpu-2"] = api.Answer{Steps: steps}
				w.Start(apply("--wait")...)
				if <-time.After(foreseeTime + time.Second); !strings.Contains(w.Said.String(), "  labelled gpuslice.io/profile=research: "+row.labelled) {
					t.Errorf("with --wait it says\n%s", w.Said)
				}
				w.Stop()
				w.Ended()
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}

// keepsOne has the pods a and b on gpu-1, and a budget that keeps one of them, which fits on no other node.
func keepsOne(w *world) {
	w.T.Helper()
	w.RunsOn("gpu-1", "a", "app", "x")
	w.RunsOn("gpu-1", "b", "app", "x")
	if _, err := w.Client.PolicyV1().PodDisruptionBudgets("team").Create(w.T.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "x"},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: 1, CurrentHealthy: 2, DesiredHealthy: 1},
	}, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// A node that has the label already is not asked: its report says how far it is.
func TestANodeWithTheLabelIsAsItsReportSays(t *testing.T) {
	for want, row := range map[string]struct {
		status  api.Status
		message string
		code    int
	}{
		"held up: Held: to go on: remove it":     {agenttest.Research(api.PhaseWaiting, config.ReasonHeld, 9), "to go on: remove it", 0},
		"Draining: Evicting: waiting for team/a": {agenttest.Research(api.PhaseDraining, config.ReasonEvicting, 9), "waiting for team/a", 0},
		"Converged: as asked":                    {agenttest.Done(), "as asked", 0},
		"UnknownConfig: there is no research":    {agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0), "there is no research", 1},
		"waiting for its agent to see the label": {api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested}, "no config is asked for", 0},
	} {
		inWorld(t, func(w *world) {
			w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelProfile] = "research" })
			w.Says("gpu-1", row.status, row.message)
			said, code := w.Run(apply()...)
			if line, _, _ := strings.Cut(said, "\n"); line != "gpu-1  has label gpuslice.io/profile=research already: "+want || code != row.code {
				t.Errorf("want %q, exit code %d, got %d:\n%s", want, row.code, code, said)
			}
			if got := w.Asked(); got["patch nodes"] != 0 {
				t.Errorf("it writes: %v", got)
			}
		}, agenttest.GPU("gpu-1"))
	}
}

// A node that takes no pods after the change is named, as by status and plan.
func TestANodeThatSomeoneElseHasCordonedIsNamed(t *testing.T) {
	cordoned := func() *corev1.Node { // by the test's client, as which the API server has unknown
		n := agenttest.GPUNode("gpu-1")
		n.Spec.Unschedulable = true
		return n
	}
	inWorld(t, func(w *world) {
		w.Start(apply("--wait")...)
		w.Says("gpu-1", agenttest.Done(), "research: as asked")
		said, code := w.Ended()
		if want := "  gpu-1  Converged, cordoned by unknown 0s  research: as asked\n"; !strings.Contains(said, want) || code != 0 {
			t.Errorf("exit code %d, want %q:\n%s", code, want, said)
		}
	}, cordoned)
}

// A name with a slip of the pen is labelled nowhere: the agents, who know the catalog, are asked first.
func TestWhatAllAgentsWouldRefuseIsNotLabelled(t *testing.T) {
	unknown := api.Answer{Refused: `no profile or MIG config is named "research": did you mean researcher?`, Reason: config.ReasonUnknownConfig}
	for name, c := range map[string]struct {
		names    map[string]api.Answer
		want     string
		labelled bool
	}{
		"by any of them": {map[string]api.Answer{"gpu-1": unknown, "gpu-2": unknown, "gpu-3": unknown}, `
gpu-1, gpu-2, gpu-3: would be refused: UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
error: profile research would be refused by 3 nodes, and nothing was labelled
`, false},
		"since the catalog is broken": {map[string]api.Answer{
			"gpu-1": {For: agenttest.KeepsSilent}, "gpu-2": {Refused: "line 3: a tab", Reason: config.ReasonInvalidCatalog}, "gpu-3": {For: agenttest.KeepsSilent},
		}, `
gpu-2: would be refused: InvalidCatalog: line 3: a tab
error: profile research would be refused by 1 node, and nothing was labelled
`, false},
		"as GPUs of another model do":  {map[string]api.Answer{"gpu-2": unknown}, "\ngpu-1, gpu-3  labelled", true},
		"as another of the same model": {map[string]api.Answer{"gpu-1": unknown, "gpu-2": unknown}, "\ngpu-1, gpu-2  labelled", true},
		"but for what may pass":        {map[string]api.Answer{"gpu-1": {Refused: "the API server is away"}, "gpu-2": {HeldUp: "held", Reason: config.ReasonHeld}}, "\ngpu-1  labelled gpuslice.io/profile=research: not known: the API server is away\n", true},
		"as far as agents answer": {map[string]api.Answer{"gpu-1": {For: agenttest.KeepsSilent}, "gpu-2": {For: agenttest.KeepsSilent}}, `
gpu-1, gpu-2  labelled gpuslice.io/profile=research: not known: its agent has not answered within 5s
gpu-3  labelled gpuslice.io/profile=research: begins at once
`, true},
	} {
		t.Run(name, func(t *testing.T) {
			l4 := func() *corev1.Node {
				n := agenttest.GPUNode("gpu-2")
				n.Labels[features.LabelProduct] = "NVIDIA-L4"
				return n
			}
			inWorld(t, func(w *world) {
				w.Names = c.names
				said, code := w.Run(apply()...)
				switch {
				case c.labelled && !strings.HasPrefix(said, c.want[1:]), !c.labelled && (said != c.want[1:] || code != 1):
					t.Errorf("exit code %d: %s", code, said)
				case !c.labelled:
					w.Untouched("gpu-1", "gpu-2", "gpu-3")
				}
			}, agenttest.GPU("gpu-1"), l4, agenttest.GPU("gpu-3"))
		})
	}
	t.Run("as the user may not", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Client.PrependReactor("patch", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "gpu-1", nil)
			})
			if said, code := w.Run(apply()...); code != 1 || !strings.Contains(said, "is forbidden") || !strings.HasSuffix(said, "; nothing was labelled\n") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, agenttest.GPU("gpu-1"))
	})
	t.Run("where the user may not watch", func(t *testing.T) {
		inWorld(t, func(w *world) {
			w.Client.PrependWatchReactor("nodes", func(k8stesting.Action) (bool, watch.Interface, error) {
				return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
			})
			w.Names = map[string]api.Answer{"gpu-1": {For: agenttest.KeepsSilent}} // an answer may come before the watch is refused
			said, code := w.Run(apply()...)
			if code != 0 || !strings.HasPrefix(said, "gpu-1  labelled gpuslice.io/profile=research: not known: cannot ask the agents: watching nodes: nodes is forbidden") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, agenttest.GPU("gpu-1"))
	})
}

// Each agent is asked once, and the answers of all are one line if they are the same.
func TestFiftyAgentsAreAskedAtATimeAndAnswerInOneLine(t *testing.T) {
	nodes, names := agenttest.Fifty()
	inWorld(t, func(w *world) {
		w.Client.ClearActions()
		said, code := w.Run(apply()...)
		if want := strings.Join(names, ", ") + "  labelled gpuslice.io/profile=research: begins at once\n"; !strings.HasPrefix(said, want) || code != 0 {
			t.Errorf("exit code %d, want %s:\n%s", code, want, said)
		}
		if got := w.Asked(); got["patch nodes"] != 3*50 || got["list pods"] != 0 || got["list nodes"] > 3 {
			t.Errorf("%v", got)
		}
	}, nodes...)
}
