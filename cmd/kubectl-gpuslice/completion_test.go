package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestWhatIsCompleted(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Edit("gpu-1", func(n *corev1.Node) {
			n.Labels[config.LabelProfile] = "research"
			agenttest.Says(n, agenttest.Done(), "as asked")
		})
		w.Edit("gpu-2", func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-1g.10gb" })
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
			said, code := w.Run(append([]string{"__complete"}, strings.Split(c.args, " ")...)...)
			for _, want := range c.want {
				if !strings.Contains(said, want) {
					t.Errorf("%s: %q is not offered: %s", c.args, want, said)
				}
			}
			if code != 0 || strings.Contains(said, c.not) {
				t.Errorf("%s: exit code %d, or %s is offered: %s", c.args, code, c.not, said)
			}
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.Bare("cpu-1"))
}
