package agent_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// slow is a driver that takes its time for each look, as one does after a long idle time.
type slow struct {
	nvml.Driver
	by time.Duration
}

// Snapshot takes its time, unless ctx ends before.
func (s slow) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	select {
	case <-time.After(s.by):
		return s.Driver.Snapshot(ctx)
	case <-ctx.Done():
		return nil, nvml.ErrUnresponsive
	}
}

// Promise 3. The time that the driver takes is not the kubelet's.
func TestASlowDriverIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.through = func(d nvml.Driver) nvml.Driver { return slow{d, w.settings.Timeouts.APICall + time.Second} }
		w.administer(firstOnly)
		w.turn()
		w.pod("innocent", w.gpus.UUIDs()[1])
		w.converge("first-1g")
		if !w.runs("innocent") {
			t.Error("the pod on the other GPU was evicted")
		}
	})
}

// Promise 3. Kubelet may be restarted at any time.
func TestASilentKubeletIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.administer(firstOnly)
		w.turn()
		w.pod("innocent", w.gpus.UUIDs()[1])
		w.label("first-1g")
		w.passes("a journal", w.owed)
		w.deaf = true
		w.spend(20 * time.Second)
		if c := w.condition(); c.Reason != string(config.ReasonKubeletUnavailable) {
			t.Errorf("the node says %s: %s", c.Reason, c.Message)
		}
		w.deaf = false
		w.reach("first-1g")
		if !w.runs("innocent") {
			t.Error("the pod on the other GPU was evicted")
		}
	})
}
