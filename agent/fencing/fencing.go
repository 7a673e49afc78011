// Package fencing takes the node out of service for a change and gives it back: journal, cordon, taint, and what is asked before the first of them.
package fencing

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/budget"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/draining"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/ledger"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/measure"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/processes"
	"github.com/gpuslice/gpuslice/agent/slot"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Fencing does so for one node.
type Fencing struct {
	Nodes        nodewrite.Writer
	Fence        fence.Fence
	Ledger       *ledger.Ledger
	Record       *hostrecord.Keeper
	Turn         *slot.Turn
	Draining     *draining.Draining
	Processes    *processes.Finder
	DevicePlugin *deviceplugin.Plugin
	Change       *measure.Change
	Budget       *budget.Budget
	Events       events.Recorder
	Clock        *steady.Clock
}

// WriteJournal writes the journal without a fence: for a change that disrupts nobody, to add to a journal that stands, or for what
// an agent has left without one.
func (f *Fencing) WriteJournal(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	if !want.Undo && !seen.DisruptionStarted() && plan.Disrupts(steps) {
		if err := f.Preflight(ctx, seen, want, steps); err != nil {
			return err
		}
		if err := f.Turn.Confirm(ctx, seen, want); err != nil {
			return err
		}
	}
	if err := f.DevicePlugin.Prepare(ctx, seen, want, steps); err != nil {
		return err
	}
	j, err := f.journal(seen, want, steps)
	if err != nil {
		return err
	}
	if err := f.Ledger.Amend(ctx, seen, ledger.For(want, steps[0].Kind), *j, seen.SpentAnnotations(*j)...); err != nil {
		return err
	}
	if left := seen.Leftovers.Orphan.String(); seen.Journal == nil && left != "" {
		f.Events.Nodef(seen.Node, corev1.EventTypeWarning, config.ReasonRecovering, "found without a journal, and to be given back: %s", left)
	}
	return nil
}

// Raise fences the node, once it is known that the pods that must leave may do so. A node that cannot be drained stays
// schedulable.
func (f *Fencing) Raise(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	if !want.Undo && !seen.DisruptionStarted() {
		if err := f.Preflight(ctx, seen, want, steps); err != nil {
			return err
		}
		if err := f.Turn.Confirm(ctx, seen, want); err != nil {
			return err
		}
	}
	j, err := f.journal(seen, want, steps)
	if err != nil {
		return err
	}
	if !j.Cordoned { // the deadlines count from the fence
		j.Started = f.Clock.Stamp()
	}
	j.Cordoned, j.WasUnschedulable = true, seen.ForeignCordon()
	if seen.Marks.Startup != nil {
		j.Startup = &journal.Startup{Value: seen.Marks.Startup.Value, Effect: string(seen.Marks.Startup.Effect)}
	}
	if _, err := f.Ledger.Write(ctx, seen, ledger.For(want, plan.Fence), *j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Raise(node, text, seen.SpentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonFencing, "cordoned for the change to %s: %s", want.Name, legible.Counted(len(steps), "step"))
	return nil
}

// Resume takes the taint away and leaves the cordon. An administrator who had cordoned the node before us and has
// uncordoned it since wants it back: the journal is told, so that the end leaves no cordon. Without a journal nothing is
// owed, and the taint is all that is ours.
func (f *Fencing) Resume(ctx context.Context, seen state.Observed, want state.Desired) error {
	if seen.Journal == nil {
		return f.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return f.Fence.Lift(node, false) })
	}
	if seen.Journal.WasUnschedulable && !seen.Node.Spec.Unschedulable {
		j := *seen.Journal
		j.WasUnschedulable = false
		return f.Ledger.Amend(ctx, seen, ledger.For(want, plan.ResumeOperands), j)
	}
	// Who has uncordoned the node to call the change off wants no cordon in its place, unless pods would meet GPUs that are
	// not there yet.
	if undo := seen.Journal.Undo; undo != nil && undo.Cancelled && len(seen.Capacity.Missing) == 0 {
		return f.Nodes.Patch(ctx, seen.Node, f.Fence.Uncover)
	}
	return f.Nodes.Patch(ctx, seen.Node, f.Fence.Open)
}

// Release gives the node back. A node that has just been registered and is not ready goes on keeping pods away. Learnt is what the end of
// the change has put into the host's record, which the status does not have yet; nil if it has not come to that.
func (f *Fencing) Release(ctx context.Context, seen state.Observed, want state.Desired) (learnt *api.Status, err error) {
	f.Change.IsProven(f.Clock.Now())
	uncordon := seen.Journal.Cordoned && !seen.ForeignCordon()
	if foreign := seen.ToolsThatCordon(); uncordon && len(foreign) > 0 {
		return nil, &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Blockers: foreign,
			Message: "the GPUs are as they should be; the node is uncordoned when other tools are done with it: " + strings.Join(foreign, "; "),
			Since:   seen.Since(config.ReasonOtherMaintenance, f.Clock.Stamp()),
		}
	}
	if seen.Journal.Plugin != nil {
		f.DevicePlugin.Tidy(ctx, seen)
	}
	learnt = f.learnForGood(ctx, seen, want)
	f.Record.Release(ctx, f.Clock.Now())
	err = f.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) {
		if startup := seen.Journal.Startup; startup != nil && want.Undo && want.Name != "" {
			return f.Fence.LiftUnready(node, uncordon, startup.Taint())
		}
		return f.Fence.Lift(node, uncordon)
	})
	if err != nil {
		return learnt, err
	}
	f.Record.NoteJournalGone(ctx, f.Clock.Now())
	f.Turn.End(ctx, seen, want)
	f.Change.Forget(f.Clock.Now())
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonReleased, "node given back after %s, %s",
		f.Clock.Since(seen.Journal.Started).Round(time.Second), capacity.Offered(seen.Kubelet.Offered).Summary(want.Plugin.SharingKnown()))
	return learnt, nil
}

// learnForGood keeps in the host's record what only the journal and this process know, before the node is given back: a restarted agent must
// not try again what has failed, nor restore what was before.
func (f *Fencing) learnForGood(ctx context.Context, seen state.Observed, want state.Desired) *api.Status {
	status := seen.Record.Status
	failed := seen.Journal.Undo
	if failed != nil && !failed.Later && want.Undo && (status.Failed == nil || status.Failed.Wish != failed.Wish) {
		status.Failed = failed
	}
	status.NoReset = seen.Refusal()
	if !want.Undo {
		status.Proven, status.Took = want.Fingerprint, f.Change.With(seen.Record.Status.Took, seen.Journal.Started)
	}
	f.Ledger.Learn(ctx, hostrecord.LearntOf(status, seen.Record.Published))
	return &status
}

// NoteForced has the journal of the change that is under way say that it needs no window, as people have said since it was begun. Their
// word is good for one change: it goes when the journal has it.
func (f *Fencing) NoteForced(ctx context.Context, seen *state.Observed, want state.Desired) error {
	if seen.Journal == nil || seen.Other(want) || want.Undo || !seen.Forces(want) || seen.Journal.Forced && !seen.Edited(want) {
		return nil
	}
	j := *seen.Journal
	j.Forced = true
	node, err := f.Ledger.Write(ctx, *seen, ledger.For(want, plan.Record), j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Record(node, text, config.AnnotationForce)
	})
	if err != nil {
		return fmt.Errorf("noting that the change needs no window, as annotation %s says: %w", config.AnnotationForce, err)
	}
	seen.Node, seen.Journal = node, &j
	return nil
}

// Park gives the node back until it is rebooted. The journal stays: the modes that are pending are taken back if the wish goes. Operands
// and units are back by now, and whoever stops one until the reboot means it.
func (f *Fencing) Park(ctx context.Context, seen state.Observed, want state.Desired) error {
	j := *seen.Journal
	uncordon := j.Cordoned && !seen.ForeignCordon()
	j.Cordoned, j.Paused, j.Stopped, j.Parked = false, nil, nil, true
	var startup []corev1.Taint // no pods are wanted on what a fresh node is until then
	if j.Startup != nil {
		startup = append(startup, j.Startup.Taint())
	}
	if _, err := f.Ledger.Write(ctx, seen, ledger.For(want, plan.Park), j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Park(node, text, uncordon, startup...)
	}); err != nil {
		return err
	}
	f.Turn.Leave(ctx, seen) // whether it succeeds shows after the reboot
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "node given back until it is rebooted for %s", want.Name)
	return nil
}
