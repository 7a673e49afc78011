package agent

import (
	"testing"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestAChangeGoesForwardWhenAGPUIsTouchedAndNotWhileItIsUndone(t *testing.T) {
	t.Parallel()
	before := nvml.GPU{UUID: "GPU-a"}
	touched := nvml.GPU{UUID: "GPU-a", Enabled: true}
	change := &journal.Journal{}
	change.RecordLayout(before)
	for name, c := range map[string]struct {
		journal *journal.Journal
		gpu     nvml.GPU
		undo    bool
		want    bool
	}{
		"no change is under way":     {nil, touched, false, false},
		"no GPU is touched yet":      {change, before, false, false},
		"a GPU is touched":           {change, touched, false, true},
		"the change is being undone": {change, touched, true, false},
	} {
		seen := state.Observed{Journal: c.journal, GPUs: []nvml.GPU{c.gpu}}
		if got := isForward(&seen, state.Desired{Undo: c.undo}); got != c.want {
			t.Errorf("%s: forward is %t, want %t", name, got, c.want)
		}
	}
}
