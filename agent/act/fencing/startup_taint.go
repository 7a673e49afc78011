package fencing

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// returns is how often the agent has taken the startup taints of a node away. Kubelet sets them once, when it registers the node; a controller that
// sets them again at each event of the node would otherwise have the agent answer each of its writes by one of its own.
type returns struct {
	node  types.UID
	times int       // each of them less than forgotten after the one before
	last  time.Time // when the last of them was
}

const (
	// firstPause is the least time between the first two times that the agent takes startup taints away. It doubles with each further time.
	firstPause = 5 * time.Second
	// longestPause bounds it.
	longestPause = 5 * time.Minute
	// forgotten is the time after which a startup taint counts as the first one again.
	forgotten = 6 * longestPause
)

// Forget drops what the agent remembers by the clock.
func (f *Fencing) Forget(time.Time) { f.returns = returns{} }

// tookStartup notes that startup taints were taken from the node.
func (f *Fencing) tookStartup(seen *state.Observed) {
	if len(seen.Marks.Startup) == 0 {
		return
	}
	now := f.Clock.Now()
	if f.returns.node != seen.Node.UID || now.Sub(f.returns.last) > forgotten {
		f.returns = returns{node: seen.Node.UID}
	}
	f.returns.times++
	f.returns.last = now
	if f.returns.times > 1 {
		f.Events.Node(f.Node, events.StartupTaintsReturn(names(seen.Marks.Startup), f.returns.times, putBackBy(seen.Node), advice))
	}
}

// ReturnedUntil is until when the agent leaves startup taints on the node that something has put back after the agent had taken them away; zero
// if it takes them away now.
func (f *Fencing) ReturnedUntil(node *corev1.Node, j *journal.Journal) time.Time {
	if f.returns.times == 0 || f.returns.node != node.UID || len(f.Startup(node, j)) == 0 {
		return time.Time{}
	}
	until := f.returns.last.Add(min(firstPause<<min(f.returns.times-1, 10), longestPause))
	if !f.Clock.Now().Before(until) {
		return time.Time{}
	}
	return until
}

// Returned says that something puts startup taints back, and what a user can do; empty if nothing does.
func (f *Fencing) Returned(seen *state.Observed) string {
	if f.returns.times < 2 || seen.Node == nil {
		return ""
	}
	until := f.ReturnedUntil(seen.Node, seen.Journal)
	if until.IsZero() {
		return ""
	}
	return fmt.Sprintf("; %s is back, which the agent has taken away %d times: %s; %s; it is taken away again at %s",
		names(seen.Marks.Startup), f.returns.times, putBackBy(seen.Node), advice, outcome.Moment(until))
}

const advice = "have kubelet alone set it, when it registers the node: a MachineSet must not have it in spec.taints (deploy/AUTOSCALERS.md)"

// tooSoon waits with startup taints that were put back.
func (f *Fencing) tooSoon(seen *state.Observed) error {
	until := f.ReturnedUntil(seen.Node, seen.Journal)
	if until.IsZero() {
		return nil
	}
	return &outcome.Waiting{
		Reason: config.ReasonStepHadNoEffect, After: until.Sub(f.Clock.Now()),
		Message: fmt.Sprintf("the GPUs are as they should be, and %s, which the agent has taken away and something has put back, keeps pods away until %s",
			names(seen.Marks.Startup), outcome.Moment(until)),
	}
}

func names(taints []corev1.Taint) string {
	return "the startup taint " + sanitize.Listed(state.TaintKeys(taints))
}

// putBackBy names the program that has written the node's taints last, by managedFields.
func putBackBy(node *corev1.Node) string {
	if others := nodewrite.Others(fence.Tainters(node)); others != "" {
		return others + " puts it back, as the last that wrote the node's taints by managedFields"
	}
	return "something puts it back"
}
