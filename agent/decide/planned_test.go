package decide_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
)

// The journal takes an edited target in its window, as it takes another: otherwise the change would be postponed in its middle when the window closes.
func TestAnEditedTargetIsPlannedAsAnother(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		want  state.Desired
		other bool
	}{
		"the same":            {state.Desired{Name: "seven", Fingerprint: "asked"}, false},
		"another":             {state.Desired{Name: "five", Fingerprint: "five"}, true},
		"edited":              {state.Desired{Name: "seven", Fingerprint: "edited"}, true},
		"the undo of the old": {state.Desired{Name: "seven", Fingerprint: "edited", Undo: true}, false},
	} {
		seen := &state.Observed{Node: &corev1.Node{}, Journal: &journal.Journal{Target: "seven", Fingerprint: "asked"}}
		if got := decide.Planned(seen, row.want, config.Default()).Journal.Other; got != row.other {
			t.Errorf("%s: the journal is of another target: %t, want %t", name, got, row.other)
		}
	}
}
