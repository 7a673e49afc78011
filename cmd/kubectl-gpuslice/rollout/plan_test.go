package rollout

import (
	"strings"
	"testing"

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
