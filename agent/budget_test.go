package agent_test

import (
	"testing"
	"testing/synctest"

	"github.com/gpuslice/gpuslice/config"
)

// The agent repeats a change that succeeds each time as long as another program undoes it, if that leaves time in between.
func TestRepairsOverTimeAreNotStepsWithoutEffect(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		for range 2 * w.settings.Retry.NoEffect {
			gpu := w.snapshot()[1]
			if err := w.gpus.Driver().Destroy(t.Context(), gpu.UUID, gpu.Instances[6].Placed); err != nil {
				t.Fatal(err)
			}
			w.passes("seven instances", func() bool { return len(w.snapshot()[1].Instances) == 7 })
			w.settle(config.ReasonConverged)
			w.givenBack()
		}
	})
}
