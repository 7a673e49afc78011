package rollout

import (
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestNodesAreHeldAndReleased(t *testing.T) {
	inWorld(t, func(w *world) {
		w.Start("hold", "-l", "pool=research", "--reason", "audit until Monday")
		w.Is(`
gpu-1  held: audit until Monday
gpu-2  held: audit until Monday
`, 0)
		if why := w.Node("gpu-1").Annotations[config.AnnotationHold]; why != "audit until Monday" {
			t.Errorf("the annotation is %q", why)
		}
		w.Start("hold", "gpu-1", "--release")
		w.Is(`
gpu-1  released
`, 0)
		w.Start("hold", "-l", "pool=research", "--release")
		w.Is(`
gpu-1  was released already
gpu-2  released
`, 0)
		for _, name := range []string{"gpu-1", "gpu-2"} {
			if why, held := w.Node(name).Annotations[config.AnnotationHold]; held {
				t.Errorf("%s is still held: %s", name, why)
			}
		}
		long := strings.Repeat("x", 400)
		w.Start("hold", "gpu-1", "--reason", long)
		w.Is("\ngpu-1  held: "+strings.Repeat("x", 63)+"…\n", 0)
		if why := w.Node("gpu-1").Annotations[config.AnnotationHold]; why != long {
			t.Errorf("the annotation is %q", why)
		}
		w.Start("hold", "gpu-1", "--release", "--reason", "none")
		if said, code := w.Ended(); code != 1 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"))
}
