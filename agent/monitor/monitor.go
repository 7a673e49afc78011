// Package monitor has the interfaces by which the agent's loop calls what watches the node besides the change. It says which pods have what of the
// node's GPUs, and whose the processes on it are.
package monitor

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Monitor watches something of the node besides the change, and reports it by conditions of its own, by Events and by metrics.
type Monitor interface {
	// Look takes what the pass has observed. The loop calls it in each pass that has observed all of the node.
	Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod)
	// LookAgain looks between two passes, and reports whether there is something to report.
	LookAgain(ctx context.Context) bool
	// Conditions returns the conditions that differ from those on the node, or, on beat, all. Complete means that the pass has observed all
	// of the node; silent says why the agent can say nothing about the GPUs, or is empty.
	Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition
	// Forget drops what was computed from earlier times of the clock.
	Forget(now time.Time)
	prometheus.Collector
}

// Watcher is a part that watches between the passes, too. It calls poke to wake the loop.
type Watcher interface {
	Watch(ctx context.Context, poke func())
}

// DriverWatcher is a part that watches the driver: each change that the agent makes to a GPU goes through it, and it wakes the loop by what
// it finds, in place of each event of the driver.
type DriverWatcher interface {
	Through(driver nvml.Driver) nvml.Driver
	// Recovered returns, for each GPU that is well, when it was last unhealthy; zero if it was not in this boot.
	Recovered() map[nvml.UUID]time.Time
	// Critical reports whether a GPU cannot be used or trusted. It is not known while the driver does not tell.
	Critical() (critical, known bool)
	// ToReset are the GPUs that the agent is to reset, since they are not well and the settings say so. It is not known before the driver has told.
	ToReset() (gpus map[nvml.UUID]bool, known bool)
	// NoteResetFailed notes that a GPU was to be reset, and that it was given up.
	NoteResetFailed(gpu nvml.UUID)
}

// UseWatcher is the part that knows which pod uses how much of which GPU or instance.
type UseWatcher interface {
	Uses() []api.Use
}

// BusyWatcher is a part that knows how busy pods keep what they have.
type BusyWatcher interface {
	// AddBusy adds that to the uses.
	AddBusy(uses []api.Use)
}

// Monitors are the parts of an agent.
type Monitors []Monitor

// Watch starts the watches of all parts that are Watchers, each in a goroutine.
func (all Monitors) Watch(ctx context.Context, beside func(ctx context.Context, watch func(ctx context.Context, poke func()))) {
	for _, p := range all {
		if w, watches := p.(Watcher); watches {
			beside(ctx, w.Watch)
		}
	}
}

// Look calls Part.Look of all parts.
func (all Monitors) Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	for _, p := range all {
		p.Look(ctx, node, gpus, pods, with)
	}
}

// LookAgain calls Part.LookAgain until one part has something to report, and returns whether one has.
func (all Monitors) LookAgain(ctx context.Context) bool {
	return slices.ContainsFunc(all, func(p Monitor) bool { return p.LookAgain(ctx) })
}

// Forget calls Part.Forget of all parts.
func (all Monitors) Forget(now time.Time) {
	for _, p := range all {
		p.Forget(now)
	}
}

// Recovered asks the part that watches the driver.
func (all Monitors) Recovered() map[nvml.UUID]time.Time {
	for _, p := range all {
		if w, watches := p.(DriverWatcher); watches {
			return w.Recovered()
		}
	}
	return nil
}

// Critical is that of the part that watches the driver; not known without one.
func (all Monitors) Critical() (critical, known bool) {
	for _, p := range all {
		if w, watches := p.(DriverWatcher); watches {
			return w.Critical()
		}
	}
	return false, false
}

// ToReset is that of the part that watches the driver.
func (all Monitors) ToReset() (gpus map[nvml.UUID]bool, known bool) {
	for _, p := range all {
		if w, watches := p.(DriverWatcher); watches {
			return w.ToReset()
		}
	}
	return nil, true
}

// NoteResetFailed tells it the part that watches the driver.
func (all Monitors) NoteResetFailed(gpu nvml.UUID) {
	for _, p := range all {
		if w, watches := p.(DriverWatcher); watches {
			w.NoteResetFailed(gpu)
		}
	}
}

// Uses asks the part that knows which pod uses how much, and the one that knows how busy pods are.
func (all Monitors) Uses() []api.Use {
	var uses []api.Use
	for _, p := range all {
		if w, watches := p.(UseWatcher); watches {
			uses = w.Uses()
		}
	}
	for _, p := range all {
		if w, watches := p.(BusyWatcher); watches {
			w.AddBusy(uses)
		}
	}
	return uses
}
