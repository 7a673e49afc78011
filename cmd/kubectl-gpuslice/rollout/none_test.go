package rollout

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestNoneTakesBackWhatWasAskedFor(t *testing.T) {
	asked := func() *corev1.Node {
		n := agenttest.GPUNode("gpu-1")
		n.Labels[config.LabelProfile], n.Labels[config.LabelDevicePluginConfig] = "reserch", config.OwnPluginKey+"1"
		n.Annotations[config.AnnotationJournal] = "{}"
		return n
	}
	shared := func() *corev1.Node {
		n := agenttest.GPUNode("gpu-2")
		n.Labels[config.LabelMIGConfig], n.Labels[config.LabelDevicePluginConfig] = "all-1g.10gb", "slices"
		return n
	}
	inWorld(t, func(w *world) {
		w.Start("apply", "-l", "pool=research", "--none", "--dry-run")
		w.Is(`
gpu-1  would lose label gpuslice.io/profile=reserch; its agent undoes the change that is under way
gpu-2  would lose label nvidia.com/mig.config=all-1g.10gb
gpu-2  would lose label nvidia.com/device-plugin.config=slices; the device plugin takes its default config then
gpu-3  requests nothing
nothing was changed; without --dry-run, 2 of 3 nodes would lose labels, and no GPU would change
`, 0)
		if w.Node("gpu-1").Labels[config.LabelProfile] != "reserch" || w.Node("gpu-2").Labels[config.LabelMIGConfig] == "" {
			t.Error("a dry run takes labels away")
		}
		w.Start("apply", "-l", "pool=research", "--none")
		w.Is(`
gpu-1  lost label gpuslice.io/profile=reserch; its agent undoes the change that is under way
gpu-2  lost label nvidia.com/mig.config=all-1g.10gb
gpu-2  lost label nvidia.com/device-plugin.config=slices; the device plugin takes its default config then
gpu-3  requests nothing
`, 0)
		for node, label := range map[string]string{"gpu-1": config.LabelProfile, "gpu-2": config.LabelMIGConfig} {
			if value, there := w.Node(node).Labels[label]; there {
				t.Errorf("%s has label %s=%s", node, label, value)
			}
		}
		if value, there := w.Node("gpu-2").Labels[config.LabelDevicePluginConfig]; there {
			t.Errorf("gpu-2 has label %s", value)
		}
		if value := w.Node("gpu-1").Labels[config.LabelDevicePluginConfig]; value != config.OwnPluginKey+"1" {
			t.Errorf("the agent's own label is %q", value)
		}
	}, asked, shared, agenttest.GPU("gpu-3"))
	inWorld(t, func(w *world) {
		for _, more := range [][]string{{"--wait"}, {"--profile", "a"}} {
			if said, code := w.Run(append([]string{"apply", "gpu-1", "--none"}, more...)...); code != 1 || !strings.Contains(said, "none of the others can be") {
				t.Errorf("%q: exit code %d: %s", more, code, said)
			}
		}
	}, agenttest.GPU("gpu-1"))
}
