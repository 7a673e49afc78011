// Package part is what the agent's loop knows of those that watch something of the node besides the change: what it has them do, and when.
package part

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

// Part watches something of the node besides the change, and tells of it by conditions of its own, by Events and by metrics.
type Part interface {
	// Look takes a look, in each pass that has seen all of the node.
	Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod)
	// LookAgain takes a look between two passes, and reports whether there is something to tell.
	LookAgain(ctx context.Context) bool
	// Conditions are those that differ from what the node shows, or, on beat, all. Complete means that all of the node was seen; silent is
	// why nothing can be said of the GPUs, or empty.
	Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition
	// Forget drops what depends on times that the clock gave.
	Forget(now time.Time)
	prometheus.Collector
}

// Watcher is a part that watches between the passes, too. Poke wakes the loop.
type Watcher interface {
	Watch(ctx context.Context, poke func())
}

// DriverWatcher is a part that watches the driver: each change that the agent makes to a GPU goes through it, and it wakes the loop by what
// it finds, in place of each event of the driver.
type DriverWatcher interface {
	Through(driver nvml.Driver) nvml.Driver
	// Recovered says, of each GPU with which nothing is wrong any more, when something last was.
	Recovered() map[nvml.UUID]time.Time
}

// UseWatcher is the part that knows which pod uses how much of which GPU or instance.
type UseWatcher interface {
	Uses() []api.Use
}

// All are the parts of an agent.
type All []Part

// Watch has those watch between the passes that do, each beside the others.
func (all All) Watch(ctx context.Context, beside func(ctx context.Context, watch func(ctx context.Context, poke func()))) {
	for _, p := range all {
		if w, watches := p.(Watcher); watches {
			beside(ctx, w.Watch)
		}
	}
}

// Look is Part.Look of all.
func (all All) Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	for _, p := range all {
		p.Look(ctx, node, gpus, pods, with)
	}
}

// LookAgain has them look until one has something to tell, and reports whether one has.
func (all All) LookAgain(ctx context.Context) bool {
	return slices.ContainsFunc(all, func(p Part) bool { return p.LookAgain(ctx) })
}

// Forget is Part.Forget of all.
func (all All) Forget(now time.Time) {
	for _, p := range all {
		p.Forget(now)
	}
}

// Recovered is that of the part that watches the driver.
func (all All) Recovered() map[nvml.UUID]time.Time {
	for _, p := range all {
		if w, watches := p.(DriverWatcher); watches {
			return w.Recovered()
		}
	}
	return nil
}

// Uses are those of the part that knows them.
func (all All) Uses() []api.Use {
	for _, p := range all {
		if w, watches := p.(UseWatcher); watches {
			return w.Uses()
		}
	}
	return nil
}
