package rollout

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// Who labels a node that may not begin reads why, and what to do.
func TestANodeThatIsHeldUpIsSaidAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start(apply()...)
		w.Says("gpu-1", agenttest.Research(api.PhaseWaiting, config.ReasonHeld, 0), "changes nothing until annotation gpuslice.io/hold is removed; to go on: kubectl annotate node gpu-1 gpuslice.io/hold-")
		w.Says("gpu-2", agenttest.Research(api.PhaseDraining, config.ReasonFencing, 9), "on its way")
		w.Is(`
gpu-1  labelled gpuslice.io/profile=research
gpu-2  labelled gpuslice.io/profile=research
gpu-1  held up: Held: changes nothing until annotation gpuslice.io/hold is removed; to go on: kubectl annotate node gpu-1 gpuslice.io/hold-
to see what the agents do:
  kubectl gpuslice apply -l pool=research --profile research --wait
`, 0)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

func TestANameThatANodeDoesNotHaveIsSaidAtOnce(t *testing.T) {
	inWorld(t, func(w *world) {
		began := time.Now()
		w.Start(apply()...)
		stalled := agenttest.Research(api.PhaseStalled, config.ReasonUnknownConfig, 0)
		w.Says("gpu-1", stalled, "no profile is named research; did you mean researcher?")
		w.Says("gpu-2", agenttest.Research(api.PhaseDraining, config.ReasonFencing, 9), "on its way")
		if said, code := w.Ended(); code != 1 || !strings.Contains(said, "gpu-1  UnknownConfig: no profile is named research; did you mean researcher?\n") ||
			!strings.Contains(said, "error: profile research refused by 1 node; to take the label back:\n  kubectl gpuslice apply gpu-1 --none\n") ||
			strings.Contains(said, "gpu-2  Fencing") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if took := time.Since(began); took > refusalTime {
			t.Errorf("it took %s", took)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
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
gpu-1  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
gpu-2  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
gpu-3  UnknownConfig: no profile or MIG config is named "research": did you mean researcher?
error: profile research would be refused by 3 nodes, and nothing was labelled
`, false},
		"since the catalog is broken": {map[string]api.Answer{
			"gpu-1": {For: agenttest.KeepsSilent}, "gpu-2": {Refused: "line 3: a tab", Reason: config.ReasonInvalidCatalog}, "gpu-3": {For: agenttest.KeepsSilent},
		}, `
gpu-2  InvalidCatalog: line 3: a tab
error: profile research would be refused by 1 node, and nothing was labelled
`, false},
		"as GPUs of another model do":  {map[string]api.Answer{"gpu-2": unknown}, "\ngpu-1  labelled", true},
		"as another of the same model": {map[string]api.Answer{"gpu-1": unknown, "gpu-2": unknown}, "\ngpu-1  labelled", true},
		"but for what may pass":        {map[string]api.Answer{"gpu-1": {Refused: "the API server is away"}, "gpu-2": {HeldUp: "held", Reason: config.ReasonHeld}}, "\ngpu-1  labelled", true},
		"as far as agents answer": {map[string]api.Answer{"gpu-1": {For: agenttest.KeepsSilent}, "gpu-2": {For: agenttest.KeepsSilent}}, `
no agent has said within 5s whether it would refuse profile research; it is labelled nevertheless
gpu-1  labelled`, true},
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
			if said, code := w.Run(apply()...); code != 1 || !strings.Contains(said, "is forbidden") || !strings.HasSuffix(said, "; nothing was labelled\n") || strings.Contains(said, "nevertheless") {
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
			if code != 0 || !strings.Contains(said, "no agent has said whether it would refuse profile research: watching nodes: nodes is forbidden") || !strings.Contains(said, "gpu-1  labelled") {
				t.Errorf("exit code %d: %s", code, said)
			}
		}, agenttest.GPU("gpu-1"))
	})
}

// Where the nodes have the same GPUs, one agent answers for all whether it would refuse.
func TestOneAgentIsAskedWhetherFiftyWouldRefuse(t *testing.T) {
	nodes, _ := agenttest.Fifty()
	nodes = append(nodes, func() *corev1.Node {
		n := agenttest.GPUNode("gpu-50")
		n.Labels[features.LabelProduct] = "NVIDIA-L4"
		return n
	})
	inWorld(t, func(w *world) {
		w.Client.ClearActions()
		w.Start(apply("--wait")...)
		if got := w.Asked(); got["patch nodes"] != 51+2*2 {
			t.Errorf("%v", got)
		}
		w.Stop()
		w.Ended()
	}, nodes...)
}
