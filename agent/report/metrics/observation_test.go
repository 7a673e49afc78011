package metrics

import (
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// A figure of 0 would say that pods can get none.
func TestWhatSlicesOfferIsCountedOnlyWhereItIsKnown(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		owner api.Owner
		err   error
		want  int
	}{
		"they are read":                  {owner: api.OwnerDRAStatic, want: 1},
		"there are none yet":             {owner: api.OwnerDRAStarting, want: 1},
		"they cannot be read":            {owner: api.OwnerDRAStarting, err: errors.New("forbidden")},
		"the driver cuts GPUs by itself": {owner: api.OwnerDRADynamic},
	} {
		m := New(clock.RealClock{})
		seen := &state.Observed{Complete: true, GPUs: []nvml.GPU{{UUID: "GPU-a"}}, Owner: state.Owner{Kind: row.owner}, DRA: state.DRA{Err: row.err}}
		m.Observed(seen, state.Desired{})
		if got, err := testutil.GatherAndCount(m.Gatherer(), string(config.MetricCapacityKubelet)); err != nil || got != row.want {
			t.Errorf("%s: %d counts, want %d: %v", name, got, row.want, err)
		}
	}
}
