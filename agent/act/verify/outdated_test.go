package verify_test

import (
	"errors"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/verify"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// world is a node of two GPUs, and who observes it each half minute.
type world struct {
	verifier *verify.Verifier
	clock    *clocktesting.FakeClock
	began    time.Time // when the device plugin did
}

func newWorld(strategy config.MIGStrategy) *world {
	clock := clocktesting.NewFakeClock(time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC))
	settings := config.Settings{}
	settings.MIGStrategy = strategy
	s := monotonic.New(clock)
	return &world{
		clock: clock, began: clock.Now(),
		verifier: &verify.Verifier{Env: act.Env{Settings: settings, Clock: s, Log: zap.NewNop()}, DevicePlugin: &deviceplugin.Plugin{Settings: settings}},
	}
}

// observe returns whether the device plugin is to be restarted, by an observation of a node where it withholds GPU-b, which the change has altered.
func (w *world) observe(change func(*state.Observed)) bool {
	amount := func(n int64) corev1.ResourceList {
		return corev1.ResourceList{nvml.ResourceGPU: *resource.NewQuantity(n, resource.DecimalSI)}
	}
	seen := state.Observed{
		Node:      &corev1.Node{Status: corev1.NodeStatus{Capacity: amount(2), Allocatable: amount(1)}},
		GPUs:      []nvml.GPU{{UUID: "GPU-a"}, {UUID: "GPU-b", Index: 1}},
		Recovered: map[nvml.UUID]time.Time{"GPU-a": {}, "GPU-b": {}},
		Kubelet:   state.Kubelet{Offered: capacity.Resources{nvml.ResourceGPU: {"GPU-a"}}},
		DevicePlugin: state.DevicePlugin{Pods: []corev1.Pod{{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{
			{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(w.began)}}},
		}}}}},
	}
	change(&seen)
	seen.Recovered, seen.Outdated = w.verifier.RestartBefore(seen.Recovered)
	w.verifier.Compare(&seen, state.Desired{})
	w.verifier.Follow(&seen, state.Desired{})
	return offer.HasOutdatedPod(&seen, seen.Capacity.Strategy)
}

func unchanged(*state.Observed) {}

// restart waits until the plugin is to be restarted, restarts it, and returns how long that took.
func (w *world) restart(t *testing.T) time.Duration {
	t.Helper()
	began := w.clock.Now()
	for !w.observe(unchanged) {
		if w.clock.Since(began) > 24*time.Hour {
			t.Fatal("the plugin is never restarted")
		}
		w.clock.Step(30 * time.Second)
	}
	w.clock.Step(time.Second)
	w.began = w.clock.Now()
	return w.clock.Since(began).Truncate(time.Minute)
}

// The driver was loaded again while the plugin was starting: it takes GPUs for unhealthy for ever with which nothing was wrong.
func TestAPluginThatTakesAWellGPUForUnhealthyIsRestartedEverMoreSeldom(t *testing.T) {
	t.Parallel()
	w := newWorld(config.MIGStrategyNone)
	for _, want := range []time.Duration{time.Minute, 10 * time.Minute, time.Hour, time.Hour} {
		if took := w.restart(t); took != want {
			t.Errorf("restarted after %s, want %s", took, want)
		}
	}
	w.clock.Step(time.Hour)
	w.observe(func(s *state.Observed) { s.Kubelet.Offered = capacity.Resources{nvml.ResourceGPU: {"GPU-a", "GPU-b"}} })
	if took := w.restart(t); took != time.Minute {
		t.Errorf("after an hour without doubt it is restarted after %s, want a minute", took)
	}
}

func TestAPluginIsNotRestartedForWhatIsNotItsFault(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*state.Observed){
		"the GPU is not well": func(s *state.Observed) { delete(s.Recovered, "GPU-b") },
		"it never listed it":  func(s *state.Observed) { s.Node.Status.Allocatable = s.Node.Status.Capacity },
		"a resource of others": func(s *state.Observed) {
			s.Node.Status.Capacity = corev1.ResourceList{"example.com/gpu": resource.MustParse("2")}
		},
		"a change is under way":            func(s *state.Observed) { s.Journal = &journal.Journal{} },
		"kubelet does not say what it has": func(s *state.Observed) { s.Kubelet.Err = errors.New("silent") },
		"it offers the GPU": func(s *state.Observed) {
			s.Kubelet.Offered = capacity.Resources{nvml.ResourceGPU: {"GPU-a", "GPU-b"}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(config.MIGStrategyNone)
			for range 240 {
				if w.observe(change) {
					t.Fatal("the plugin is to be restarted")
				}
				w.clock.Step(30 * time.Second)
			}
		})
	}
}

// A program may make errors as often as it likes that NVIDIA's device plugin takes for a fault of the GPU.
func TestErrorsOfAProgramRestartThePluginEverMoreSeldom(t *testing.T) {
	t.Parallel()
	w := newWorld(config.MIGStrategyNone)
	const every, calm = 12 * time.Second, 5 * time.Second
	restartsWithin := func(d time.Duration) (restarts int) {
		var trouble time.Time
		for began := w.clock.Now(); w.clock.Since(began) < d; w.clock.Step(time.Second) {
			if w.clock.Since(trouble) >= every {
				trouble = w.clock.Now()
			}
			due := w.observe(func(s *state.Observed) {
				s.Recovered["GPU-b"] = trouble
				if w.clock.Since(trouble) < calm {
					delete(s.Recovered, "GPU-b")
				}
				if w.began.After(trouble) { // it has seen none since it began
					s.Kubelet.Offered, s.Node.Status.Allocatable = capacity.Resources{nvml.ResourceGPU: {"GPU-a", "GPU-b"}}, s.Node.Status.Capacity
				}
			})
			if due {
				restarts++
				w.clock.Step(time.Second)
				w.began = w.clock.Now()
			}
		}
		return restarts
	}
	for _, c := range []struct {
		within time.Duration
		want   int
	}{
		{156 * time.Second, 2}, // at once, and a minute later
		{10 * time.Minute, 1},
		{58 * time.Minute, 0}, // an hour after the third
		{4 * time.Hour, 4},
	} {
		if got := restartsWithin(c.within); got != c.want {
			t.Errorf("within the next %s it is restarted %d times, want %d", c.within, got, c.want)
		}
	}
}

// What was seen by a clock that was set does not count.
func TestAClockThatWasSetRestartsNoPlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(config.MIGStrategyNone)
	for range 2 {
		w.observe(unchanged)
		w.clock.Step(40 * time.Second)
		w.verifier.Forget(w.clock.Now())
	}
	if w.observe(unchanged) {
		t.Error("the plugin is to be restarted")
	}
}
