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

// returns counts how often the agent has removed the startup taints of a node. Kubelet sets them once, when it registers the node. A controller may
// set them again at each event of the node.
type returns struct {
	outcome.Repeats

	node types.UID
}

// pauses are between the agent's removals of startup taints.
var pauses = outcome.Pauses{First: 5 * time.Second, Longest: 5 * time.Minute}

// Forget drops what the agent remembers by the clock.
func (f *Fencing) Forget(time.Time) { f.returns = returns{} }

// tookStartup notes that the agent has removed startup taints from the node.
func (f *Fencing) tookStartup(seen *state.Observed) {
	if len(seen.Marks.Startup) == 0 {
		return
	}
	if f.returns.node != seen.Node.UID {
		f.returns = returns{node: seen.Node.UID}
	}
	f.returns.Repeats = f.returns.Again(f.Clock.Now(), pauses)
	if f.returns.Times > 1 {
		f.Events.Node(f.Node, events.StartupTaintsReturn(names(seen.Marks.Startup), f.returns.Times, putBackBy(seen.Node), advice))
	}
}

// ReturnedUntil is until when the agent leaves startup taints on the node that something has put back after their removal; zero if it removes them
// now.
func (f *Fencing) ReturnedUntil(node *corev1.Node, j *journal.Journal) time.Time {
	if f.returns.node != node.UID || len(f.Startup(node, j)) == 0 {
		return time.Time{}
	}
	return f.returns.Until(f.Clock.Now(), pauses)
}

// Returned says that something puts startup taints back, and what a user can do; empty if nothing does.
func (f *Fencing) Returned(seen *state.Observed) string {
	if f.returns.Times < 2 || seen.Node == nil {
		return ""
	}
	until := f.ReturnedUntil(seen.Node, seen.Journal)
	if until.IsZero() {
		return ""
	}
	return fmt.Sprintf("; %s is back after the agent has removed it %d times: %s; %s; next removal at %s",
		names(seen.Marks.Startup), f.returns.Times, putBackBy(seen.Node), advice, outcome.Moment(until))
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
		Message: fmt.Sprintf("the GPUs are as desired; %s, which something has put back after the agent removed it, keeps pods away until %s",
			names(seen.Marks.Startup), outcome.Moment(until)),
	}
}

func names(taints []corev1.Taint) string {
	return "the startup taint " + sanitize.Listed(state.TaintKeys(taints))
}

// putBackBy names the program that last wrote the node's taints, by managedFields.
func putBackBy(node *corev1.Node) string {
	if others := nodewrite.Others(fence.Tainters(node)); others != "" {
		return others + " puts it back: by managedFields it wrote the node's taints last"
	}
	return "something puts it back"
}
