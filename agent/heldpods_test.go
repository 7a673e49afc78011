package agent_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// Each write of a node goes to all that watch nodes, so that pods of a few seconds must not write it as often as they come and go. What they have is in the
// status all the same, within seconds, though nothing else wakes the agent.
func TestPodsThatComeAndGoAreInTheStatusWithinSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		w.spend(time.Minute)
		if got := w.status().Held; got == nil || len(got) > 0 {
			t.Errorf("the device plugin has nothing: %v", got)
		}
		writes := 0
		w.patched(func(patch string) error {
			if strings.Contains(patch, config.AnnotationStatus) {
				writes++
			}
			return nil
		})
		gpu := w.snapshot()[1]
		last := ""
		const jobs = 28 // the last one comes three seconds after a write
		for i := range jobs {
			if last != "" {
				w.endPod(last)
			}
			last = fmt.Sprintf("job-%d", i)
			w.pod(last, gpu.Instances[i%7].Devices[0].UUID)
			<-time.After(min(time.Second, w.agent.Pass(t.Context())))
		}
		if writes < 5 || writes > 7 {
			t.Errorf("%d writes of the status in %d s", writes, jobs)
		}
		w.awaitHeld(api.Held{Pod: types.UID(last), On: []string{fmt.Sprintf("1/%d", gpu.Instances[(jobs-1)%7].Start)}})
		if pause := w.agent.Pass(t.Context()); pause < time.Minute {
			t.Errorf("with nothing to write the agent rests for %s only", pause)
		}
		w.endPod(last)
		w.agent.Pass(t.Context())
		w.label("no-such-config") // other news take the pods with them at once
		w.agent.Pass(t.Context())
		if s := w.status(); s.Reason != config.ReasonUnknownConfig || len(s.Held) > 0 {
			t.Errorf("the status says %s, and has %v", s.Reason, s.Held)
		}
	})
}

// awaitHeld runs the agent until the status has the one pod, and fails the test if that takes more than five seconds.
func (w *world) awaitHeld(want api.Held) {
	w.t.Helper()
	is := func() bool {
		return slices.EqualFunc(w.status().Held, []api.Held{want}, func(a, b api.Held) bool { return a.Pod == b.Pod && slices.Equal(a.On, b.On) })
	}
	began := time.Now()
	for pause := w.agent.Pass(w.t.Context()); !is() && time.Since(began) < time.Minute; pause = w.agent.Pass(w.t.Context()) {
		<-time.After(pause)
	}
	if took := time.Since(began); took > 5*time.Second || !is() {
		w.t.Errorf("after %s the status has %v, want %v", took, w.status().Held, want)
	}
}
