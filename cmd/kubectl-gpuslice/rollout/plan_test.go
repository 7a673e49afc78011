package rollout

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestAPlanIsForWhatTheLabelsAsk(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-1g.10gb" })
		w.Start("plan", "gpu-1")
		if asked := w.Node("gpu-1").Annotations[config.AnnotationPreview]; asked != "nvidia.com/mig.config=all-1g.10gb" {
			t.Errorf("asked %q", asked)
		}
		w.Answers("gpu-1", api.Answer{})
		w.Is("\ngpu-1: nothing to do\nMIG config all-1g.10gb: 0 of 1 node would change; nothing was labelled\n", 0)
		w.Start("plan", "gpu-2", "--profile", "research")
		w.Answers("gpu-2", api.Answer{Refused: "there is no research", Reason: config.ReasonUnknownConfig})
		if said, code := w.Ended(); code != cli.ExitHeldUp || !strings.Contains(said, "gpu-2: would be refused: UnknownConfig: there is no research") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if said, code := w.Run("plan", "gpu-2"); code != 1 || !strings.Contains(said, "the labels of gpu-2 request nothing") {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}

// An agent of one group that keeps silent, or would not begin, hides no other group, and the exit code is that of the worst.
func TestAPlanIsSaidOfEachConfigThatTheLabelsAsk(t *testing.T) {
	inWorld(t, func(w *world) {
		steps := []string{"fence"}
		for i, name := range []string{"gpu-1", "gpu-2", "gpu-3"} {
			w.Edit(name, func(n *corev1.Node) {
				n.Labels[config.LabelMIGConfig] = []string{"all-1g.10gb", "all-2g.20gb", "all-3g.40gb"}[i]
			})
		}
		for _, row := range []struct {
			answers []*api.Answer
			code    int
		}{
			{[]*api.Answer{nil, {Steps: steps, Unsure: "GPU 0"}, {Steps: steps}}, 1},
			{[]*api.Answer{{Steps: steps, Unsure: "GPU 0"}, nil, {Steps: steps, HeldUp: "audit"}}, 1},
			{[]*api.Answer{{Steps: steps, Unsure: "GPU 0"}, {Steps: steps, HeldUp: "audit"}, {Steps: steps, Unsure: "GPU 0"}}, cli.ExitHeldUp},
			{[]*api.Answer{{}, {Steps: steps, Unsure: "GPU 0"}, {Steps: steps}}, cli.ExitUnknown},
		} {
			w.Start("plan", "-l", config.LabelMIGConfig)
			for i, name := range []string{"gpu-1", "gpu-2", "gpu-3"} {
				if row.answers[i] != nil {
					w.Answers(name, *row.answers[i])
				} else {
					<-time.After(planTime)
				}
			}
			said, code := w.Ended()
			if code != row.code || !strings.Contains(said, "gpu-1: ") || !strings.Contains(said, "gpu-2: ") || !strings.Contains(said, "gpu-3: ") {
				t.Errorf("exit code %d, want %d:\n%s", code, row.code, said)
			}
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.GPU("gpu-3"))
}

// A reader of nodes sees what a config would make of the GPUs that the agent has reported, and that no more is known.
func TestAPlanWithoutTheRightToAskIsDrawnFromTheLastReport(t *testing.T) {
	h100 := api.Model{Name: "NVIDIA H100 80GB HBM3", GPUs: []int{0}, Profiles: []api.Profile{
		{Name: "1g.10gb", Slices: 1, Size: 1, At: []int{0, 1, 2, 3, 4, 5, 6}, Max: 7},
		{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0, 4}, Max: 2},
		{Name: "7g.80gb", Slices: 7, Size: 8, At: []int{0}, Max: 1},
	}}
	inWorld(t, func(w *world) {
		s := agenttest.Done()
		s.Desired, s.Models, s.Held = "", []api.Model{h100}, []api.Held{}
		s.GPUs = []api.StatusGPU{{
			Index: 0, UUID: "GPU-1", MIG: true, Slices: 8, Geometry: "1g.10gb@0", Instances: []api.StatusInstance{{Is: "1g.10gb@0", At: 0, Size: 1, ID: 7}},
		}}
		w.Edit("gpu-1", func(n *corev1.Node) { agenttest.Says(n, s, "as asked") })
		w.Client.PrependReactor("patch", "nodes", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
		const why = "gpu-1: not known: asking its agent needs the verb patch on nodes, which you lack\n"
		w.Start("plan", "gpu-1", "--mig-config", "all-3g.40gb")
		w.Is("\n"+why+`  GPU 0 NVIDIA H100 80GB HBM3
  before │1g.10gb│   ·       ·       ·       ·       ·       ·       ·   │
  after  │ 3g.40gb                       │ 3g.40gb                       │
  offers then: nvidia.com/mig-3g.40gb 2
  note: the MIG strategy of the device plugin is taken to be mixed
  note: drawn from what its agent last reported
MIG config all-3g.40gb: 0 of 1 node would change, of 1 it is not known; nothing was labelled
error: MIG config all-3g.40gb is not answered by 1 node
`, 1)
		w.Start("plan", "gpu-1", "--mig-config", "mine") // the agent alone reads the ConfigMaps
		w.Is("\n"+why+`MIG config mine: 0 of 1 node would change, of 1 it is not known; nothing was labelled
error: MIG config mine is not answered by 1 node
`, 1)
	}, agenttest.GPU("gpu-1"))
}
