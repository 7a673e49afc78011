package main

import (
	"testing"

	"github.com/gpuslice/gpuslice/config"
)

func TestNodesAreHeldAndReleased(t *testing.T) {
	inWorld(t, func(w *world) {
		w.start("hold", "-l", "pool=research", "--reason", "audit until Monday")
		w.is(`
gpu-1  held: audit until Monday
gpu-2  held: audit until Monday
`, 0)
		if why := w.node("gpu-1").Annotations[config.AnnotationHold]; why != "audit until Monday" {
			t.Errorf("the annotation is %q", why)
		}
		w.start("hold", "gpu-1", "--release")
		w.is(`
gpu-1  released
`, 0)
		w.start("hold", "-l", "pool=research", "--release")
		w.is(`
gpu-1  was released already
gpu-2  released
`, 0)
		for _, name := range []string{"gpu-1", "gpu-2"} {
			if why, held := w.node(name).Annotations[config.AnnotationHold]; held {
				t.Errorf("%s is still held: %s", name, why)
			}
		}
		w.start("hold", "gpu-1", "--release", "--reason", "none")
		if said, code := w.ended(); code != 1 {
			t.Errorf("exit code %d: %s", code, said)
		}
	}, gpu("gpu-1"), gpu("gpu-2"))
}
