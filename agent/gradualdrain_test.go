package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// endPod lets a pod come to its end by itself.
func (w *world) endPod(name string) {
	w.t.Helper()
	if err := w.client.Tracker().Delete(podResource, "team", name); err != nil {
		w.t.Fatal(err)
	}
}

// isTerminating reports whether the agent has evicted the pod.
func (w *world) isTerminating(name string) bool {
	w.t.Helper()
	p, err := w.client.CoreV1().Pods("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p.DeletionTimestamp != nil
}

// Pods may end by themselves behind the fence, one by one, and those that have not are evicted.
func TestAGradualChangeLetsPodsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := gradual(t, time.Hour)
		fenced := time.Now()
		w.spend(10 * time.Minute)
		w.endPod("a")
		w.spend(20 * time.Minute)
		w.endPod("b")
		w.spend(time.Hour - time.Minute - time.Since(fenced))
		if message := w.condition().Message; w.isTerminating("c") || w.isTerminating("d") || !strings.Contains(message, "finishes by itself until 2000-01-01T01:00Z (drain.mode)") {
			t.Fatalf("c has to leave %t, d has to leave %t, and the node says %s", w.isTerminating("c"), w.isTerminating("d"), message)
		}
		w.passes("the eviction", func() bool { return !w.runs("c") || w.isTerminating("c") })
		if took := time.Since(fenced); took < time.Hour || took > time.Hour+time.Minute {
			t.Errorf("evicted %s after the fence, want 1h", took)
		}
		w.reach("all-balanced")
	})
}

// When all pods have ended, the agent does not wait for the rest of the time.
func TestAGradualChangeGoesOnWhenAllPodsHaveEnded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := gradual(t, config.DefaultGradualFor)
		fenced := time.Now()
		w.spend(time.Hour)
		for _, name := range []string{"a", "b", "c", "d"} {
			w.endPod(name)
		}
		w.reach("all-balanced")
		if took := time.Since(fenced); took > 2*time.Hour {
			t.Errorf("done %s after the fence, want an hour and what the GPUs take", took)
		}
	})
}

// A pod that may not be evicted either has its usual time from then on.
func TestAGradualChangeEndsAtTheDeadlineThatFollows(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := gradual(t, time.Hour)
		fenced := time.Now()
		w.budgetKeepsPod("d")
		w.settle(config.ReasonEvictionBlocked)
		if took := time.Since(fenced); took < 2*time.Hour || took > 2*time.Hour+10*time.Minute {
			t.Errorf("given back %s after the fence, want 2h", took)
		}
		if w.runs("c") || !w.runs("d") {
			t.Errorf("c runs %t, d runs %t; want d only", w.runs("c"), w.runs("d"))
		}
		w.expectGivenBack()
	})
}

// gradual returns a fenced node of two GPUs. Two pods have one each, and may end by themselves for the time gradualFor.
func gradual(t *testing.T, gradualFor time.Duration) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.settings.Drain.Mode, w.settings.Drain.GradualFor = config.DrainGradual, gradualFor
	w.restart()
	gpus := w.devices()["nvidia.com/gpu"]
	for name, gpu := range map[string]string{"a": gpus[0], "b": gpus[0], "c": gpus[1], "d": gpus[1]} {
		w.pod(name, gpu)
	}
	w.label("all-balanced")
	w.untilCordoned()
	return w
}

// Within hours kubelet may be restarted more than once.
func TestAGradualChangeSurvivesThatKubeletIsAwayNowAndThen(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := gradual(t, config.DefaultGradualFor)
		for range 2 {
			w.spend(30 * time.Minute)
			w.kubeletSilent = true
			w.spend(10 * time.Minute)
			w.kubeletSilent = false
		}
		for _, name := range []string{"a", "b", "c", "d"} {
			if w.isTerminating(name) {
				t.Errorf("%s has to leave", name)
			}
			w.endPod(name)
		}
		w.reach("all-balanced")
	})
}
