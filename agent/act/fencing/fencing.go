// Package fencing takes the node out of service for a change and gives it back: journal, cordon, taint, and what is checked and prepared before
// the first of them. Package drain/fence makes the patches; this one decides when, and sends them. It measures how long changes take, so that the agent can
// estimate the next ones, and makes way for an upgrade of the driver.
package fencing

import (
	"context"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Fencing fences one node, and gives it back.
type Fencing struct {
	act.Env

	Journal   *journal.Writer
	Record    *journal.Keeper
	Slot      *fleet.Slot
	Evictions *evict.Evictions
	Processes *observe.Processes
	Handover  *plugin.Handover
	Timing    *Timing
	Rules     *Rules
	Retries   *decide.Retries

	returns returns
}

// WriteJournal writes the journal without a fence: for a change that disrupts no pod, to add to a present journal, or for what
// an agent has left without one.
func (f *Fencing) WriteJournal(ctx context.Context, in act.Input) error {
	if startsDisruption(in) {
		if err := f.Slot.Confirm(ctx, in); err != nil {
			return err
		}
	}
	f.forgetFormerTarget(in)
	j, err := f.journalWith(in)
	if err != nil {
		return err
	}
	if err := f.Journal.Amend(ctx, in.Seen.Writing(in.Want, in.Steps[0].Kind), *j, spentAnnotations(*j)...); err != nil {
		return err
	}
	if left := in.Seen.Leftovers.Orphan.String(); in.Seen.Journal == nil && left != "" {
		f.Events.Node(f.Node, events.FoundWithoutJournal(left))
	}
	return nil
}

// Raise fences the node, once the agent knows that the pods which must leave may do so. A node that cannot be drained stays
// schedulable.
func (f *Fencing) Raise(ctx context.Context, in act.Input) error {
	j, err := f.closing(ctx, in)
	if err != nil {
		return err
	}
	j.Cordoned, j.Closed, j.WasUnschedulable = true, nil, in.Seen.ForeignCordon()
	j.RecordStartup(in.Seen.Marks.Startup)
	if _, err := f.Journal.Write(ctx, in.Seen.Writing(in.Want, plan.Fence), *j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Keeps(j.Kept).Raise(node, text, spentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.Cordoned(in.Want.Name, len(in.Steps)))
	return nil
}

// closing confirms the slot of a change that is about to keep pods away, and returns its journal, whose deadlines count from then on.
func (f *Fencing) closing(ctx context.Context, in act.Input) (*journal.Journal, error) {
	if startsDisruption(in) {
		if err := f.Slot.Confirm(ctx, in); err != nil {
			return nil, err
		}
	}
	f.forgetFormerTarget(in)
	j, err := f.journalWith(in)
	if err != nil {
		return nil, err
	}
	if !j.KeepsPodsAway() {
		j.Started = f.Clock.Stamp()
	}
	keep(j, in.Seen.Node)
	return j, nil
}

// Close keeps claims from the devices of the step while the pods leave that hold them, once the agent knows that these may do so. The node stays
// schedulable, and its other GPUs are given to claims, until Raise takes the place of this. The journal names the devices before a rule is there.
func (f *Fencing) Close(ctx context.Context, in act.Input) error {
	if err := f.Rules.Try(ctx); err != nil {
		return err
	}
	if f.Rules.Unusable() { // the next plan has the fence of the node
		return nil
	}
	j, err := f.closing(ctx, in)
	if err != nil {
		return err
	}
	j.Closed = in.Step().Devices
	if _, err := f.Journal.Write(ctx, in.Seen.Writing(in.Want, plan.Close), *j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Keeps(j.Kept).Record(node, text, spentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.ClosedDevices(j.Closed, in.Want.Name, len(in.Steps)))
	return f.Rules.Close(ctx, j.Closed)
}

// spentAnnotations returns the annotations that the journal replaces: the agent removes them when it writes the journal.
func spentAnnotations(j journal.Journal) []string {
	if !j.Forced {
		return nil
	}
	return []string{config.AnnotationForce}
}

// Resume removes the taint and leaves the cordon. If a user had cordoned the node before the change and has uncordoned it
// since, Resume notes that in the journal, so that the end of the change leaves no cordon; and so it does with a startup taint that has come
// since, before it takes that away. Without a journal the taint is all that the agent has set.
func (f *Fencing) Resume(ctx context.Context, in act.Input) error {
	if in.Seen.Journal == nil {
		if err := f.tooSoon(in.Seen); err != nil {
			return err
		}
		return f.liftStartup(ctx, in.Seen, func(node *corev1.Node) ([]byte, error) { return f.Fence.Lift(node, false) })
	}
	j := *in.Seen.Journal
	uncordoned := j.WasUnschedulable && !in.Seen.Node.Spec.Unschedulable
	j.WasUnschedulable = j.WasUnschedulable && !uncordoned
	if j.RecordStartup(in.Seen.Marks.Startup) || uncordoned {
		if err := f.Journal.Amend(ctx, in.Seen.Writing(in.Want, plan.ResumeOperands), j); err != nil {
			return err
		}
		return outcome.ErrPlanAgain
	}
	// A user who has cancelled the change by an uncordon wants no cordon in its place, unless pods would meet GPUs that are
	// not there yet.
	if undo := in.Seen.Journal.Undo; undo != nil && undo.Cancelled && len(in.Seen.Capacity.Missing) == 0 {
		return f.liftStartup(ctx, in.Seen, f.by(in.Seen.Journal).Uncover)
	}
	return f.liftStartup(ctx, in.Seen, f.by(in.Seen.Journal).Open)
}

// liftStartup writes the node without its startup taints, and notes that they were taken away.
func (f *Fencing) liftStartup(ctx context.Context, seen *state.Observed, write func(*corev1.Node) ([]byte, error)) error {
	err := f.Nodes.Patch(ctx, seen.Node, write)
	if err == nil {
		f.tookStartup(seen)
	}
	return err
}

// Startup returns the startup taints of the node: by the settings, and by the journal of a change that began with others.
func (f *Fencing) Startup(node *corev1.Node, j *journal.Journal) []corev1.Taint {
	return f.Fence.Registered(j.StartupKeys()).Startup(node)
}

// by returns the fence with what the journal says that it has set and may take away.
func (f *Fencing) by(j *journal.Journal) fence.Fence {
	return f.Fence.Keeps(j.Kept).Registered(j.StartupKeys())
}

// Release gives the node back. A node that has just been registered gets its startup taints back if the change was undone.
func (f *Fencing) Release(ctx context.Context, in act.Input) error {
	f.Timing.NoteVerified(f.Clock.Now())
	uncordon := in.Seen.Journal.Cordoned && !in.Seen.ForeignCordon()
	if foreign := in.Seen.ToolsThatCordon(); uncordon && len(foreign) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Blockers: foreign,
			Message: "the GPUs are as they should be; the node is uncordoned when other tools are done with it: " + strings.Join(foreign, "; "),
			Since:   in.Seen.Since(config.ReasonOtherMaintenance, f.Clock.Stamp()),
		}
	}
	if in.Seen.Journal.Plugin != nil {
		f.Handover.Tidy(ctx, in.Seen)
	}
	f.learnForGood(ctx, in)
	f.Record.Release(ctx, f.Clock.Now())
	fence := f.by(in.Seen.Journal)
	unready := len(in.Seen.Journal.Startup()) > 0 && in.Want.Undo && in.Want.Name != ""
	err := f.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) ([]byte, error) {
		if unready {
			return fence.LiftUnready(node, uncordon, in.Seen.Journal.Startup()...)
		}
		return fence.Lift(node, uncordon)
	})
	switch {
	case err != nil:
		return err
	case unready: // the agent itself has put them back
		f.returns = returns{}
	default:
		f.tookStartup(in.Seen)
	}
	f.Record.NoteJournalGone(ctx, f.Clock.Now())
	f.Slot.End(ctx, in.Seen, in.Want)
	f.Timing.Forget(f.Clock.Now())
	f.Events.Node(f.Node, events.Released(f.Clock.Since(in.Seen.Journal.Started), offer.Of(in.Seen).Text(in.Want)))
	return nil
}

// learnForGood writes into the host's record what only the journal and this process know, before the agent gives the node back: after a
// restart it must not try a failed change again, nor restore what was before.
func (f *Fencing) learnForGood(ctx context.Context, in act.Input) {
	learnt := in.Seen.Record.Learnt
	failed := in.Seen.Journal.Undo
	if failed != nil && !failed.Later && in.Want.Undo && (learnt.Failed == nil || learnt.Failed.Fingerprint != failed.Fingerprint) {
		learnt.Failed = failed
	}
	learnt.NoReset = in.Seen.Refusal()
	if !in.Want.Undo {
		learnt.Verified, learnt.Took = in.Want.Fingerprint, f.Timing.With(learnt.Took, in.Seen.Journal.Started)
	}
	f.Journal.Learn(ctx, learnt)
}

// Park gives the node back until it is rebooted. The journal stays: if a user withdraws the request, the agent takes the pending modes back.
// Operands and units run again by now; if a user stops one before the reboot, the agent leaves it stopped.
func (f *Fencing) Park(ctx context.Context, in act.Input) error {
	j := *in.Seen.Journal
	j.Paused, j.Stopped, j.Parked = nil, nil, true
	if err := f.LeaveJournal(ctx, in.Seen, in.Seen.Writing(in.Want, plan.Park), j); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.ReleasedUntilReboot(in.Want.Name))
	return nil
}

// LeaveJournal gives the node back, and leaves the journal with what the agent must restore still.
func (f *Fencing) LeaveJournal(ctx context.Context, seen *state.Observed, w journal.Write, j journal.Journal) error {
	uncordon := j.Cordoned && !seen.ForeignCordon()
	lifted := f.by(&j)
	j.Cordoned, j.Closed, j.Kept = false, nil, nil
	if _, err := f.Journal.Write(ctx, w, j, func(node *corev1.Node, text string) ([]byte, error) {
		return lifted.Park(node, text, uncordon, j.Startup()...) // a node that has just been registered keeps its startup taints until then
	}); err != nil {
		return err
	}
	f.Slot.Leave(ctx, seen) // neither a success nor a failure: that shows later
	return nil
}
