// Package monitor has the interfaces of the agent's monitors, which watch the node next to the loop's changes. Device and OwnerFinder find
// which pods have the node's GPUs, and which pods the processes on them belong to.
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

// Monitor watches one aspect of the node, whether or not a change is under way. It reports by its own conditions, in the status, by Events and
// by metrics.
type Monitor interface {
	// Watch watches until ctx ends, for a monitor that observes by itself. It calls poke to wake the loop.
	Watch(ctx context.Context, poke func())
	// Observe records what the pass has observed. The loop calls it in each pass that has observed all of the node.
	Observe(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod)
	// Poll observes between two passes, and reports whether there is something to report.
	Poll(ctx context.Context) bool
	// Conditions returns the conditions that differ from those on the node, or, on beat, all. Complete means that the pass has observed all
	// of the node; silent says why the agent can say nothing about the GPUs, or is empty.
	Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition
	// Report adds to the status.
	Report(status *api.Status)
	// Forget drops what was computed from earlier times of the clock.
	Forget(now time.Time)
	prometheus.Collector
}

// Monitors are the monitors of an agent.
type Monitors []Monitor

// Observe calls Observe of all monitors.
func (all Monitors) Observe(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	for _, m := range all {
		m.Observe(ctx, node, gpus, pods, with)
	}
}

// Poll calls Poll until one monitor has something to report, and returns whether one has.
func (all Monitors) Poll(ctx context.Context) bool {
	return slices.ContainsFunc(all, func(m Monitor) bool { return m.Poll(ctx) })
}

// Forget calls Forget of all monitors.
func (all Monitors) Forget(now time.Time) {
	for _, m := range all {
		m.Forget(now)
	}
}

// Health is the monitor of the GPUs' health, as far as the loop uses it.
type Health interface {
	// Recovered returns, for each GPU that is well, when it was last unhealthy; zero if it was not in this boot.
	Recovered() map[nvml.UUID]time.Time
	// Critical returns the GPUs that cannot be used or trusted; the empty UUID stands for GPUs without one. They are unknown while the driver
	// does not answer.
	Critical() (gpus map[nvml.UUID]bool, known bool)
	// ToReset returns the GPUs that the agent is to reset, since they are not well and the settings say so. They are unknown until the driver
	// has answered.
	ToReset() (gpus map[nvml.UUID]bool, known bool)
	// NoteResetFailed notes that the agent has given up the reset of a GPU.
	NoteResetFailed(gpu nvml.UUID)
	// RefuseResets notes why the agent resets no GPU of this node until a user has acted; empty if it may.
	RefuseResets(why string)
	// Causes returns a finding for each GPU that cannot be used or trusted, the worst first; none while that is not known.
	Causes() []api.Finding
	// NotClosed notes of each GPU that the agent should close to claims, and cannot, why.
	NotClosed(why map[nvml.UUID]string)
}

// NoHealth is the Health of an agent that does not watch it.
type NoHealth struct{}

// Recovered implements Health.
func (NoHealth) Recovered() map[nvml.UUID]time.Time { return nil }

// Critical implements Health.
func (NoHealth) Critical() (gpus map[nvml.UUID]bool, known bool) { return nil, false }

// ToReset implements Health.
func (NoHealth) ToReset() (gpus map[nvml.UUID]bool, known bool) { return nil, true }

// NoteResetFailed implements Health.
func (NoHealth) NoteResetFailed(nvml.UUID) {}

// RefuseResets implements Health.
func (NoHealth) RefuseResets(string) {}

// Causes implements Health.
func (NoHealth) Causes() []api.Finding { return nil }

// NotClosed implements Health.
func (NoHealth) NotClosed(map[nvml.UUID]string) {}
