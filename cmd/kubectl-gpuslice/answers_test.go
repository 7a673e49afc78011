package main

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// cut says how the GPU of a node is cut.
func cut(n *corev1.Node) {
	s := done()
	s.Desired, s.GPUs = "", []api.StatusGPU{balanced(0)}
	says(n, s, "as asked")
}

// diagnoses is an agent's answer.
func (w *world) diagnoses(name string, d api.Diagnosis) {
	w.t.Helper()
	d.Node, d.At = name, time.Now()
	w.answers(name, api.Answer{Diagnosis: &d})
}

func TestANodeThatIsNamedIsDrawnWithItsPods(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", cut)
		w.start("status", "gpu-1")
		w.diagnoses("gpu-1", api.Diagnosis{
			GPUs: api.GPUsSeen{Now: []api.StatusGPU{balanced(0)}},
			Pods: []api.PodSeen{{Namespace: "team", Name: "notebook", Devices: []string{"GPU 0 2g.20gb@2"}}},
		})
		w.is(`
NODE    ASKED FOR   PHASE   REASON      SINCE   CAPACITY   BLOCKERS
gpu-1               Idle    Converged   0s

gpu-1
GPU 0 GPU-5d1c7f00-1111-2222-3333-444455556666 MIG
  │1g.10gb │1g.10gb │ 2g.20gb         │ 3g.40gb                           │
  │ #9     │ #10    │ #5              │ #2                                │
  #9   1g.10gb@0  free
  #10  1g.10gb@1  free
  #5   2g.20gb@2  team/notebook
  #2   3g.40gb@4  free
`, 0)
		w.untouched("gpu-1")
	}, gpu("gpu-1"))
}

func TestWithoutTheRightToAskTheAgentTheDrawingSaysSo(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", cut)
		w.runsOn("gpu-1", "notebook")
		w.client.PrependReactor("patch", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "gpu-1", nil)
		})
		for _, args := range [][]string{{"status", "gpu-1"}, {"status", "gpu-1", "--ask=false"}} {
			said, code := w.run(args...)
			if code != 0 || !strings.Contains(said, "who uses which instance is not known: ") || !strings.Contains(said, "  #5   2g.20gb@2  ?\n") ||
				!strings.Contains(said, "here ask for GPUs: team/notebook (nvidia.com/mig-1g.10gb 1)") {
				t.Errorf("%q: exit code %d: %s", args, code, said)
			}
		}
	}, gpu("gpu-1"))
}

// runsOn makes a pod on the node that asks for an instance.
func (w *world) runsOn(node, name string, labels ...string) *corev1.Pod {
	w.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, Labels: meta("", labels...).Labels, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "team", Controller: new(true)},
		}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("1")}},
		}}},
	}
	if _, err := w.client.CoreV1().Pods("team").Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	return p
}

func TestAWatchShowsWhatChanges(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start("status", "--watch", "gpu-1", "gpu-2")
		w.says("gpu-1", research(api.PhaseDraining, config.ReasonEvicting, 9), "not asked for any more, as its agent has yet to see")
		w.says("gpu-1", api.Status{Phase: api.PhaseDraining, Reason: config.ReasonEvicting, Left: 9}, "on its way")
		w.says("gpu-3", done(), "not meant")
		w.says("gpu-1", api.Status{Phase: api.PhaseDraining, Reason: config.ReasonEvicting, Left: 8}, "on its way")
		w.remove("gpu-2")
		w.stop()
		w.is(`
00:00:00Z  gpu-1    Idle  NotRequested    
00:00:00Z  gpu-2    Idle  NotRequested    
00:00:01Z  gpu-1    Draining  NotSeenYet    
00:00:02Z  gpu-1    Draining  Evicting    
00:00:04Z  gpu-2  was deleted
`, 0)
	}, gpu("gpu-1"), gpu("gpu-2"), gpu("gpu-3"))
}

func TestANodeIsRecoveredByItsAgent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", func(n *corev1.Node) {
			n.Annotations[config.AnnotationJournal] = "{}"
			n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning}}
		})
		w.start("recover", "gpu-1")
		w.diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictGivesBack, Text: "the agent gives the node back"}})
		if !w.runs() {
			t.Fatalf("it has ended: %s", w.said)
		}
		w.edit("gpu-1", func(n *corev1.Node) {
			delete(n.Annotations, config.AnnotationJournal)
			n.Spec.Taints = nil
		})
		w.diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictFree, Text: "free now"}})
		if said, code := w.ended(); code != 0 || !strings.HasSuffix(said, "\nfree now\n") || !strings.Contains(said, "The agent gives the node back") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.untouched("gpu-1")
	}, gpu("gpu-1"))
}

// The plugin does not know the agent's settings: the agent's diagnosis says which taints are startup taints.
func TestANodeIsNotGivenBackWhileItHasAStartupTaintOfTheSettings(t *testing.T) {
	inWorld(t, func(w *world) {
		const key = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"
		w.edit("gpu-1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "team"}, {Key: key}} })
		w.start("recover", "gpu-1")
		w.diagnoses("gpu-1", api.Diagnosis{
			Taints: []api.TaintSeen{{Key: key, Startup: true}}, Outcome: api.Outcome{Verdict: api.VerdictGivesBack, Text: "the agent gives the node back"},
		})
		w.edit("gpu-1", func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, "example.com/note", "it has changed")
		})
		if !w.runs() {
			t.Fatalf("it has ended: %s", w.said)
		}
		w.edit("gpu-1", func(n *corev1.Node) { n.Spec.Taints = n.Spec.Taints[:1] })
		w.diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictFree, Text: "free now"}})
		if said, code := w.ended(); code != 0 || !strings.HasSuffix(said, "\nfree now\n") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"))
}

func TestRecoverSaysWhetherTheUserHasToAct(t *testing.T) {
	for verdict, want := range map[api.Verdict]int{api.VerdictFree: 0, api.VerdictNotOurs: 3, api.VerdictWaitsForYou: 1, api.VerdictUnknown: 1} {
		inWorld(t, func(w *world) {
			w.start("recover", "gpu-1")
			w.diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: verdict, Text: "so it is"}})
			if said, code := w.ended(); code != want || !strings.Contains(said, "o it is") {
				t.Errorf("%s: exit code %d: %s", verdict, code, said)
			}
			w.start("recover", "gpu-1", "--dry-run", "-o", "json")
			w.diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: verdict, Text: "so it is"}})
			if said, code := w.ended(); code != 0 || !strings.Contains(said, `"verdict": "`+string(verdict)+`"`) {
				t.Errorf("%s: exit code %d: %s", verdict, code, said)
			}
		}, gpu("gpu-1"))
	}
	inWorld(t, func(w *world) {
		w.start("recover", "gpu-1")
		if said, code := w.ended(); code != 1 || !strings.Contains(said, "has not answered within 30s") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.untouched("gpu-1")
	}, gpu("gpu-1"))
}

func TestTopShowsWhatTheAgentsSay(t *testing.T) {
	inWorld(t, func(w *world) {
		busy, over := 0.0, 1e300
		w.start("top", "--sort-by", "busy")
		w.answers("gpu-1", api.Answer{Uses: []api.Use{
			{Namespace: "team", Pod: "trainer", GPU: 1, Pods: 1, MemoryMiB: 70000, TotalMiB: 80000, Busy: &over, Since: time.Now().Add(-time.Hour)},
			{Namespace: "team", Pod: "unknown", GPU: 0, Instance: "1g.10gb@2", Pods: 1, MemoryMiB: 10, TotalMiB: 9728, Unknown: "not reported"},
			{Namespace: "team", Pod: "notebook", GPU: 0, Instance: "1g.10gb@3", Pods: 1, MemoryMiB: 5, TotalMiB: 9728, Busy: &busy},
		}})
		w.answers("gpu-2", api.Answer{Refused: "it must be something else"})
		w.is(`
POD             NODE    GPU           MEMORY                BUSY   FOR
team/notebook   gpu-1   0 1g.10gb@3   5/9728 MiB 0%         0%
team/trainer    gpu-1   1             70000/80000 MiB 88%   100%   60m
team/unknown    gpu-1   0 1g.10gb@2   10/9728 MiB 0%        ?
busy ?: not reported (gpu-1)
gpu-2: the agent does not say: it must be something else
`, 0)
		w.untouched("gpu-1", "gpu-2")
		w.start("top", "gpu-2")
		w.answers("gpu-2", api.Answer{})
		w.is("no pod has a GPU\n", 0)
		began := time.Now()
		w.start("top", "gpu-1")
		if said, code := w.ended(); code != 1 || !strings.Contains(said, "gpu-1: the agent has not answered within 5s\nerror: no agent has answered, of 1 node\n") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if took := time.Since(began); took != viewTime {
			t.Errorf("it took %s", took)
		}
		w.untouched("gpu-1")
		w.start("top", "gpu-1", "--sort-by", "name")
		w.is("\nerror: flag --sort-by is \"name\": it must be memory or busy\n", 1)
	}, gpu("gpu-1"), gpu("gpu-2"), bare("cpu-1"))
}

func TestAPlanIsForWhatTheLabelsAsk(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-1g.10gb" })
		w.start("plan", "gpu-1")
		if asked := w.node("gpu-1").Annotations[config.AnnotationPreview]; asked != "nvidia.com/mig.config=all-1g.10gb" {
			t.Errorf("asked %q", asked)
		}
		w.answers("gpu-1", api.Answer{})
		w.is("\ngpu-1: nothing to do\nMIG config all-1g.10gb: 0 of 1 node would change; nothing was labelled\n", 0)
		w.start("plan", "gpu-2", "--profile", "research")
		w.answers("gpu-2", api.Answer{Refused: "there is no research"})
		if said, code := w.ended(); code != exitHeldUp || !strings.Contains(said, "gpu-2: would be refused: there is no research") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if said, code := w.run("plan", "gpu-2"); code != 1 || !strings.Contains(said, "nothing is asked of gpu-2") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"), gpu("gpu-2"))
}

func TestANameThatANodeDoesNotHaveIsSaidAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		began := time.Now()
		w.start(apply()...)
		stalled := research(api.PhaseStalled, config.ReasonUnknownConfig, 0)
		w.says("gpu-1", stalled, "no profile is named research; did you mean researcher?")
		w.says("gpu-2", research(api.PhaseDraining, config.ReasonFencing, 9), "on its way")
		if said, code := w.ended(); code != 1 || !strings.Contains(said, "gpu-1  UnknownConfig: no profile is named research; did you mean researcher?\n") ||
			!strings.Contains(said, "error: profile research refused by 1 node; to take the label back:\n  kubectl gpuslice apply gpu-1 --none\n") ||
			strings.Contains(said, "gpu-2  Fencing") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if took := time.Since(began); took > refusalTime {
			t.Errorf("it took %s", took)
		}
	}, gpu("gpu-1"), gpu("gpu-2"))
}

func TestWhatIsCompleted(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", func(n *corev1.Node) {
			n.Labels[config.LabelProfile] = "research"
			says(n, done(), "as asked")
		})
		w.edit("gpu-2", func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-1g.10gb" })
		for _, c := range []struct {
			args string
			want []string
			not  string
		}{
			{"status ", []string{"gpu-1\tresearch Converged", "gpu-2\tall-1g.10gb NotRequested"}, "cpu-1"},
			{"recover gpu-1 ", []string{"gpu-2"}, "gpu-1\t"},
			{"apply gpu-1 --profile ", []string{"research\n", "all-balanced\n", "all-1g.10gb\n"}, "gpu-2"},
			{"apply gpu-1 --mig-config ", []string{"all-disabled\n", "all-1g.10gb\n"}, "research"},
			{"status -o ", []string{"wide\n", "json\n", "yaml\n"}, "gpu-1"},
			{"explain ", []string{"Held\twhile"}, "gpu-1"},
		} {
			said, code := w.run(append([]string{"__complete"}, strings.Split(c.args, " ")...)...)
			for _, want := range c.want {
				if !strings.Contains(said, want) {
					t.Errorf("%s: %q is not offered: %s", c.args, want, said)
				}
			}
			if code != 0 || strings.Contains(said, c.not) {
				t.Errorf("%s: exit code %d, or %s is offered: %s", c.args, code, c.not, said)
			}
		}
	}, gpu("gpu-1"), gpu("gpu-2"), bare("cpu-1"))
}
