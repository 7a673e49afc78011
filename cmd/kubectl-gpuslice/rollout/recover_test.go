package rollout

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestANodeIsRecoveredByItsAgent(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Annotations[config.AnnotationJournal] = "{}"
			n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning}}
		})
		w.Start("recover", "gpu-1")
		w.Diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictGivesBack, Text: "the agent gives the node back"}})
		if !w.Runs() {
			t.Fatalf("it has ended: %s", w.Said)
		}
		w.Edit("gpu-1", func(n *corev1.Node) {
			delete(n.Annotations, config.AnnotationJournal)
			n.Spec.Taints = nil
		})
		w.Diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictFree, Text: "free now"}})
		if said, code := w.Ended(); code != 0 || !strings.HasSuffix(said, "\nfree now\n") || !strings.Contains(said, "The agent gives the node back") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.Untouched("gpu-1")
	}, agenttest.GPU("gpu-1"))
}

// The plugin does not know the agent's settings: the agent's diagnosis says which taints are startup taints.
func TestANodeIsNotGivenBackWhileItHasAStartupTaintOfTheSettings(t *testing.T) {
	inWorld(t, func(w *world) {
		const key = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"
		w.Edit("gpu-1", func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "team"}, {Key: key}} })
		w.Start("recover", "gpu-1")
		w.Diagnoses("gpu-1", api.Diagnosis{
			Taints: []api.TaintSeen{{Key: key, Startup: true}}, Outcome: api.Outcome{Verdict: api.VerdictGivesBack, Text: "the agent gives the node back"},
		})
		w.Edit("gpu-1", func(n *corev1.Node) {
			metav1.SetMetaDataAnnotation(&n.ObjectMeta, "example.com/note", "it has changed")
		})
		if !w.Runs() {
			t.Fatalf("it has ended: %s", w.Said)
		}
		w.Edit("gpu-1", func(n *corev1.Node) { n.Spec.Taints = n.Spec.Taints[:1] })
		w.Diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: api.VerdictFree, Text: "free now"}})
		if said, code := w.Ended(); code != 0 || !strings.HasSuffix(said, "\nfree now\n") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"))
}

func TestRecoverSaysWhetherTheUserHasToAct(t *testing.T) {
	for verdict, want := range map[api.Verdict]int{api.VerdictFree: 0, api.VerdictNotOurs: 3, api.VerdictWaitsForYou: 1, api.VerdictUnknown: 1} {
		inWorld(t, func(w *world) {
			w.Start("recover", "gpu-1")
			w.Diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: verdict, Text: "so it is"}})
			if said, code := w.Ended(); code != want || !strings.Contains(said, "o it is") {
				t.Errorf("%s: exit code %d: %s", verdict, code, said)
			}
			w.Start("recover", "gpu-1", "--dry-run", "-o", "json")
			w.Diagnoses("gpu-1", api.Diagnosis{Outcome: api.Outcome{Verdict: verdict, Text: "so it is"}})
			if said, code := w.Ended(); code != 0 || !strings.Contains(said, `"verdict": "`+string(verdict)+`"`) {
				t.Errorf("%s: exit code %d: %s", verdict, code, said)
			}
		}, agenttest.GPU("gpu-1"))
	}
	inWorld(t, func(w *world) {
		w.Start("recover", "gpu-1")
		if said, code := w.Ended(); code != 1 || !strings.Contains(said, "has not answered within 30s") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.Untouched("gpu-1")
	}, agenttest.GPU("gpu-1"))
}

// A reader of nodes sees what the node shows.
func TestRecoverShowsTheLastReportToThoseWhoMayNotAsk(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}, {Key: "soft", Effect: corev1.TaintEffectPreferNoSchedule}}
			s := agenttest.Done()
			s.Phase, s.Reason, s.Blockers = api.PhaseDraining, config.ReasonEvictionBlocked, []string{"team/a: PDB team/a"}
			agenttest.Says(n, s, "1 pod left")
		})
		w.Client.PrependReactor("patch", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		w.Start("recover", "gpu-1", "--dry-run")
		w.Is(`
gpu-1, as its agent last reported at 2000-01-01T00:00:00Z: EvictionBlocked: 1 pod left
  in the way: team/a: PDB team/a
  cordoned by unknown 0s
  taint gpuslice.io/repartitioning:NoSchedule
error: asking the agent needs the verb patch on nodes, which you lack
`, 1)
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Spec.Unschedulable, n.Spec.Taints = false, nil
			agenttest.Concludes(n, agenttest.Research("", config.ReasonDriverNotLoaded, 0), "there is no driver")
		})
		w.Start("recover", "gpu-1", "--dry-run")
		w.Is(`
gpu-1, as its agent last reported at 2000-01-01T00:00:00Z: DriverNotLoaded: there is no driver
error: asking the agent needs the verb patch on nodes, which you lack
`, 1)
		w.Edit("gpu-1", func(n *corev1.Node) { n.Status.Conditions = nil })
		w.Start("recover", "gpu-1", "--dry-run")
		w.Is(`
gpu-1 has no condition of its agent
error: asking the agent needs the verb patch on nodes, which you lack
`, 1)
	}, agenttest.GPU("gpu-1"))
}
