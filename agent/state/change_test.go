package state_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestAChangeHasTouchedAGPUThatIsNotAsBefore(t *testing.T) {
	t.Parallel()
	before := nvml.GPU{UUID: "GPU-a"}
	touched := nvml.GPU{UUID: "GPU-a", Enabled: true}
	change := &journal.Journal{}
	change.RecordLayout(before)
	for name, c := range map[string]struct {
		journal *journal.Journal
		gpu     nvml.GPU
		want    bool
	}{
		"no change is under way": {nil, touched, false},
		"no GPU is touched yet":  {change, before, false},
		"a GPU is touched":       {change, touched, true},
	} {
		seen := state.Observed{Journal: c.journal, GPUs: []nvml.GPU{c.gpu}}
		if got := seen.HardwareOrPluginTouched(); got != c.want {
			t.Errorf("%s: touched: %t, want %t", name, got, c.want)
		}
	}
}
