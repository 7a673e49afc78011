package rollout

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

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
