package rollout

import (
	"math"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

const request = config.LabelProfile + "=research"

func TestADryRunPrintsWhatEachNodeWouldDo(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) { // left by one that was killed
			n.Annotations[config.AnnotationPreview] = request
			n.Annotations[config.AnnotationPlan] = `{"for":"` + request + `","refused":"long ago"}`
		})
		w.Start(apply("--dry-run", "-v")...)
		some := api.Answer{Steps: []string{"fence: journal, cordon, taint", "GPU 0: turn MIG on"}}
		w.Answers("gpu-1", some)
		w.Answers("gpu-2", api.Answer{Notes: []string{"the node is cordoned by kubectl; the agent does not lift that cordon"}})
		w.Answers("gpu-3", some)
		w.Answers("gpu-4", api.Answer{
			Steps: []string{"evict team/a"}, More: 40, Pods: []string{"team/a", "team/b"}, MorePods: 7, Reboot: true, Runs: "at once: a window is open",
			Lost: []string{"pod team/a, which no controller recreates", "the files of team/b on emptyDir scratch"}, MoreLost: 3,
		})
		w.Answers("gpu-5", api.Answer{
			Steps: []string{"evict team/a (claim team/a-gpu)"}, Pods: []string{"team/a"}, Notes: []string{"after it, no whole GPU is left"},
			Asked: []string{"team/a: asked behind the cordon, up to 8h (drain.gradualFor)"},
		})
		w.Is(`
gpu-1, gpu-3: begins at once
  no pod has to leave
  2 steps:
     1  fence: journal, cordon, taint
     2  GPU 0: turn MIG on
gpu-2: nothing to do
  note: the node is cordoned by kubectl; the agent does not lift that cordon
gpu-4: begins at once: a window is open
  9 pods have to leave: team/a, team/b and 7 more
  it takes a reboot of the node
  lost for good: pod team/a, which no controller recreates; the files of team/b on emptyDir scratch and 3 more
  41 steps:
     1  evict team/a
        and 40 more
gpu-5: begins at once
  1 pod has to leave: team/a
  team/a: asked behind the cordon, up to 8h (drain.gradualFor)
  note: after it, no whole GPU is left
  1 step:
     1  evict team/a (claim team/a-gpu)
gpu-4: whether 9 pods more would fit elsewhere is not known
gpu-5: whether 1 pod more would fit elsewhere is not known
profile research: 4 of 5 nodes would change; nothing was labelled
`, 0)
		w.Untouched("gpu-1", "gpu-2", "gpu-3", "gpu-4", "gpu-5")
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"), agenttest.GPU("gpu-4"), agenttest.GPU("gpu-5"))
}

func TestADryRunNamesNodesThatRefuseOrDoNotAnswer(t *testing.T) {
	inWorld(t, func(w *world) {
		began := time.Now()
		w.Start(apply("--dry-run")...)
		w.Answers("gpu-1", api.Answer{Refused: "there is no research", Reason: config.ReasonUnknownConfig})
		w.Remove("gpu-3")
		w.Edit("gpu-4", func(n *corev1.Node) { n.Annotations[config.AnnotationPreview] = "gpuslice.io/profile=other" })
		w.Is(`
gpu-1: would be refused: UnknownConfig: there is no research
gpu-2: not known: its agent has not answered within 30s
gpu-3: not known: the node was deleted
gpu-4: not known: another user has asked its agent something at the same time; ask again
to see whether an agent runs there: kubectl get pods -A -l app.kubernetes.io/name=gpuslice --field-selector spec.nodeName=gpu-2
profile research: 0 of 4 nodes would change, of 3 it is not known; nothing was labelled
error: profile research would be refused by 1 node, is not answered by 3 nodes
`, 1)
		if took := time.Since(began); took != planTime {
			t.Errorf("it took %s", took)
		}
		w.Untouched("gpu-1", "gpu-2") // the request of another user stays
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"), agenttest.GPU("gpu-4"))
}

// The command has to run as it is printed.
func TestADryRunShowsHowToFindTheAgentsOfSeveralNodes(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--dry-run")...)
		w.Is(`
gpu-1, gpu-2: not known: its agent has not answered within 30s
to see whether an agent runs there: kubectl get pods -A -l app.kubernetes.io/name=gpuslice -o wide
profile research: 0 of 2 nodes would change, of 2 it is not known; nothing was labelled
error: profile research is not answered by 2 nodes
`, 1)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

func TestAnInterruptedDryRunLeavesNoRequest(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply("--dry-run")...)
		w.Answers("gpu-1", api.Answer{})
		w.Stop()
		if said, code := w.Ended(); code != 130 || !strings.Contains(said, "interrupted; nothing was labelled") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.Untouched("gpu-1", "gpu-2")
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

// The exit code says whether all would go on at once: scripts go by it.
func TestADryRunEndsByTheVerdict(t *testing.T) {
	steps := []string{"fence: journal, cordon, taint"}
	held := api.Answer{Steps: steps, HeldUp: "budget team/x needs 2 healthy pods and has 2", Reason: config.ReasonEvictionBlocked, Runs: "at once"}
	for name, c := range map[string]struct {
		answers [2]api.Answer
		code    int
		want    []string
	}{
		"both at once": {[2]api.Answer{{Steps: steps}, {}}, 0, []string{"gpu-1: begins at once\n", "gpu-2: nothing to do\n"}},
		"one held up": {[2]api.Answer{held, {Steps: steps}}, cli.ExitHeldUp, []string{
			"gpu-1: would be held up: EvictionBlocked: budget team/x needs 2 healthy pods and has 2\n  no pod has to leave\n  1 step: -v lists them\n",
			"error: profile research would be held up on 1 node\n",
		}},
		"one without a look": {[2]api.Answer{{HeldUp: "driver not loaded", Reason: config.ReasonDriverNotLoaded}, {}}, cli.ExitHeldUp, []string{
			"gpu-1: would be held up: DriverNotLoaded: driver not loaded\ngpu-2:",
		}},
		"one refused, one held up": {[2]api.Answer{held, {Refused: "there is none", Reason: config.ReasonUnknownConfig}}, cli.ExitHeldUp, []string{
			"gpu-2: would be refused: UnknownConfig: there is none\n", "error: profile research would be refused by 1 node, would be held up on 1 node\n",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				w.Start(apply("--dry-run")...)
				w.Answers("gpu-1", c.answers[0])
				w.Answers("gpu-2", c.answers[1])
				said, code := w.Ended()
				for _, want := range c.want {
					if !strings.Contains(said, want) {
						t.Errorf("want %q:\n%s", want, said)
					}
				}
				if code != c.code {
					t.Errorf("exit code %d, want %d", code, c.code)
				}
			}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
		})
	}
}

// The verdict has to be the one that the same flags get without --dry-run, which adds to what is allowed already.
func TestADryRunAsksForWhatTheFlagsAllow(t *testing.T) {
	flags := []string{"--force-unmanaged", "--delete-emptydir-data"}
	for name, c := range map[string]struct {
		args    []string
		already string // what the node allows
		asks    string
	}{
		"apply":                        {apply(append(flags, "--dry-run")...), "", request + " unmanagedPods emptyDir"},
		"plan":                         {append([]string{"plan", "gpu-1", "--profile", "research"}, flags[0]), "", request + " unmanagedPods"},
		"plan for what is asked of it": {append([]string{"plan", "gpu-2"}, flags[1]), "", request + " emptyDir"},
		"the other flag, before":       {apply(flags[0], "--dry-run"), request + " emptyDir", request + " unmanagedPods emptyDir"},
		"a flag, before":               {apply("--dry-run"), request + " emptyDir", request + " emptyDir"},
		"a flag, for another config":   {apply(flags[0], "--dry-run"), config.LabelProfile + "=other emptyDir", request + " unmanagedPods"},
		"plan of both in turn":         {append([]string{"plan", "gpu-2"}, flags[1]), request + " unmanagedPods", request + " unmanagedPods emptyDir"},
	} {
		t.Run(name, func(t *testing.T) {
			node := c.args[1]
			if node == "-l" {
				node = "gpu-1"
			}
			n := agenttest.GPUNode(node)
			if c.already != "" {
				n.Annotations[config.AnnotationAllowEviction] = c.already
			}
			if node == "gpu-2" {
				n.Labels[config.LabelProfile] = "research"
			}
			inWorld(t, func(w *world) {
				w.Start(c.args...)
				if asked := w.Node(node).Annotations[config.AnnotationPreview]; asked != c.asks {
					t.Errorf("the agent is asked %q, want %q", asked, c.asks)
				}
				w.Answers(node, api.Answer{})
				w.Is(node+": nothing to do\nprofile research: 0 of 1 node would change; nothing was labelled\n", 0)
			}, func() *corev1.Node { return n })
		})
	}
}

// A pod that never leaves has the change given up after a time: that is the verdict, in place of the agent's, which sees one node alone.
func TestADryRunGivesUpWhereABudgetKeepsAPodForGood(t *testing.T) {
	inWorld(t, func(w *world) {
		keepsOne(w)
		for patience, want := range map[time.Duration]struct {
			verdict string
			code    int
		}{
			time.Hour: {"gpu-1: would give up after 1h: budget team/x lets 1 of 2 pods go, and then no more", cli.ExitHeldUp},
			0:         {"gpu-1: begins at once; at the deadline its agent deletes the pods that are still there: budget team/x lets 1 of 2 pods go", 0},
		} {
			w.Start("plan", "gpu-1", "--profile", "research")
			w.Answers("gpu-1", api.Answer{Steps: []string{"evict"}, Pods: []string{"team/a", "team/b"}, Patience: api.Duration(patience)})
			if said, code := w.Ended(); code != want.code || !strings.HasPrefix(said, want.verdict) || strings.Count(said, "budget team/x") != 1 {
				t.Errorf("with a patience of %s: exit code %d: %s", patience, code, said)
			}
		}
		w.Start("plan", "gpu-1", "--profile", "research")
		w.Answers("gpu-1", api.Answer{Steps: []string{"evict"}, MorePods: 2, Patience: api.Duration(time.Hour)}) // without room for their names
		const want = "gpu-1: begins at once; whether it ends is not known: nothing is known of 2 pods more\n"
		if said, code := w.Ended(); code != cli.ExitUnknown || !strings.HasPrefix(said, want) {
			t.Errorf("of pods without names: exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

// What the user may not read, or the agent has not named, is not known, and no promise is made of it.
func TestADryRunPromisesNoEndThatIsNotKnown(t *testing.T) {
	inWorld(t, func(w *world) {
		w.RunsOn("gpu-1", "a", "app", "x")
		w.Client.PrependReactor("list", "poddisruptionbudgets", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(policyv1.Resource("poddisruptionbudgets"), "", nil)
		})
		for runs, want := range map[string]string{
			"":                          "gpu-1: begins at once; whether it ends is not known: listing budgets: ",
			"at 02:00 by pool night":    "gpu-1: begins at 02:00 by pool night; whether it ends is not known: listing budgets: ",
			"at once: a window is open": "gpu-1: begins at once: a window is open; whether it ends is not known: listing budgets: ",
		} {
			w.Start("plan", "gpu-1", "--profile", "research")
			w.Answers("gpu-1", api.Answer{Steps: []string{"evict"}, Pods: []string{"team/a"}, Patience: api.Duration(time.Hour), Runs: runs})
			if said, code := w.Ended(); code != cli.ExitUnknown || !strings.HasPrefix(said, want) || !strings.Contains(said, "would begin, and perhaps not end, on 1 node") || strings.Count(said, "listing budgets") != 1 {
				t.Errorf("exit code %d: %s", code, said)
			}
		}
		w.Start("plan", "gpu-1", "gpu-2", "--profile", "research")
		w.Answers("gpu-1", api.Answer{Steps: []string{"evict"}, Pods: []string{"team/a"}, Patience: api.Duration(time.Hour)})
		w.Answers("gpu-2", api.Answer{Steps: []string{"create"}, Patience: api.Duration(time.Hour)})
		if said, code := w.Ended(); code != cli.ExitUnknown || !strings.Contains(said, "\ngpu-2: begins at once\n") {
			t.Errorf("of a node that no pod has to leave: exit code %d: %s", code, said)
		}
		w.Start("plan", "gpu-1", "--profile", "research")
		w.Answers("gpu-1", api.Answer{Steps: []string{"evict"}, Pods: []string{"team/a"}}) // the agent deletes it in the end
		const want = "gpu-1: begins at once; at the deadline its agent deletes the pods that are still there, and it is not known whether there are any: listing budgets: "
		if said, code := w.Ended(); code != 0 || !strings.HasPrefix(said, want) {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

func TestWhatOthersWroteIntoAnAnswerMovesNoCursor(t *testing.T) {
	const hostile = "\x1b[2J\x1b[1;1Hgpu-9   research   Idle\r\ngpu-8\u202e"
	inWorld(t, func(w *world) {
		w.Start(apply("--dry-run")...)
		w.Answers("gpu-1", api.Answer{
			Steps: []string{hostile}, Pods: []string{hostile}, Runs: hostile, Lost: []string{hostile}, Notes: []string{hostile}, Asked: []string{hostile},
			Unsure: hostile + "\ngpu-2: begins at once",
		})
		said, _ := w.Ended()
		if answer, _, _ := strings.Cut(said, "gpu-1: whether"); strings.ContainsAny(said, "\x1b\r\u202e") || strings.Count(answer, "\n") != 6 {
			t.Errorf("raw in the answer: %q", said)
		}
	}, agenttest.GPU("gpu-1"))
}

// Only the agent writes an answer whose counts fit its lists.
func TestCountsThatFitNoListAreNoPods(t *testing.T) {
	for _, row := range []struct {
		answer api.Answer
		want   string
	}{
		{api.Answer{Steps: []string{"evict"}, MorePods: 1}, "  1 pod has to leave\n  1 step: -v lists them\n"},
		{api.Answer{More: 2, MorePods: 5}, "  5 pods have to leave\n  2 steps: -v lists them\n"},
		{api.Answer{Steps: []string{"evict"}, More: math.MaxInt, MorePods: math.MaxInt}, "  1000000 pods have to leave\n  1000001 steps: -v lists them\n"},
		{api.Answer{Steps: []string{"evict"}, More: -1, Pods: []string{"team/a", "team/b"}, MorePods: -1}, "  2 pods have to leave: team/a, team/b\n  1 step: -v lists them\n"},
	} {
		inWorld(t, func(w *world) {
			w.Start(apply("--dry-run")...)
			w.Answers("gpu-1", row.answer)
			if said, _ := w.Ended(); !strings.HasPrefix(said, "gpu-1: begins at once\n") || !strings.Contains(said, row.want) || !strings.Contains(said, "1 of 1 node would change") {
				t.Errorf("want %q:\n%s", row.want, said)
			}
		}, agenttest.GPU("gpu-1"))
	}
}
