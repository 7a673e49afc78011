// Package fencing takes the node out of service for a change and releases it: journal, cordon, taint, and the checks and preparations before them.
// Package drain/fence makes the patches; this one decides when, and sends them. It measures how long changes take, so that the agent can estimate the
// next ones, and makes way for an upgrade of the driver.
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

// Fencing fences one node, and releases it. Each end of the agent's cordon:
//   - Release: the change is done or undone, or what was left without a journal is restored;
//   - Park, through LeaveJournal: until the node's reboot;
//   - UpgradeWatch.ReleaseNode: while the driver is upgraded; in a change through LeaveJournal, without a journal by itself;
//   - a user or another tool: decide.Goal.Revised cancels the change, or decide.Planned reports a breach, and the plan fences the node again.
//
// Resume removes the taint and keeps the cordon. drain/fence keeps it at each end if a user has requested that.
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

// WriteJournal writes the journal without a fence: for a change that disrupts no pod, to add to a present journal, or for leftovers without one.
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
		f := f.Fence.Keeps(j.Kept, cordonReason(j))
		if in.Step().CordonOnly {
			return f.Cordon(node, text, spentAnnotations(*j)...)
		}
		return f.Raise(node, text, spentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.Fenced(in.Want.Name, len(in.Steps), decide.ForeignText(in.Seen, in.Want, in.Steps)))
	return nil
}

// closing confirms the slot of a change that is about to keep pods away, and returns its journal. The deadlines begin now.
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
	keep(j, in.Seen)
	return j, nil
}

// Close closes the step's devices to claims while their holders leave, once the agent knows that these may leave. The node stays schedulable, and
// claims get its other GPUs, until Raise replaces this. The journal names the devices before the first rule exists.
func (f *Fencing) Close(ctx context.Context, in act.Input) error {
	if err := f.Rules.Try(ctx, in.Seen.Node.UID); err != nil {
		return err
	}
	if f.Rules.Unusable() { // the next plan has the fence of the node, as after Close
		return nil
	}
	j, err := f.closing(ctx, in)
	if err != nil {
		return err
	}
	j.Closed = in.Step().Devices
	if _, err := f.Journal.Write(ctx, in.Seen.Writing(in.Want, plan.Close), *j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Keeps(j.Kept, cordonReason(j)).Record(node, text, spentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.ClosedDevices(j.Closed, in.Want.Name, len(in.Steps)))
	return f.Rules.Close(ctx, in.Seen.Node.UID, j.Closed)
}

// spentAnnotations returns the annotations that the journal replaces: the agent removes them in the same write.
func spentAnnotations(j journal.Journal) []string {
	if !j.Forced {
		return nil
	}
	return []string{config.AnnotationForce}
}

// Resume removes the taint and leaves the cordon. If a user's cordon from before the change has since been lifted, it first notes that in the
// journal: the end of the change then leaves no cordon. It also notes a new startup taint before it removes that taint. Without a journal the agent
// has set only the taint.
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
	// A user who has cancelled the change by an uncordon does not want a new cordon, unless pods would get GPUs that are not ready yet.
	if undo := in.Seen.Journal.Undo; undo != nil && undo.Cancelled && len(in.Seen.Capacity.Missing) == 0 {
		return f.liftStartup(ctx, in.Seen, f.by(in.Seen.Journal).Uncover)
	}
	return f.liftStartup(ctx, in.Seen, f.by(in.Seen.Journal).Open)
}

// liftStartup writes the node without its startup taints, and notes their removal.
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

// by returns the fence with the annotations and taints that it may remove, by the journal.
func (f *Fencing) by(j *journal.Journal) fence.Fence {
	return f.Fence.Keeps(j.Kept, cordonReason(j)).Registered(j.StartupKeys())
}

// Release releases the node. If the change was undone on a node that had just been registered, its startup taints come back.
func (f *Fencing) Release(ctx context.Context, in act.Input) error {
	f.Timing.NoteVerified(f.Clock.Now())
	uncordon := in.Seen.Journal.Cordoned && !in.Seen.ForeignCordon()
	if foreign := in.Seen.ToolsThatCordon(); uncordon && len(foreign) > 0 {
		return &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Blockers: foreign,
			Message: "the GPUs are as desired; the agent uncordons the node when other tools are done with it: " + strings.Join(foreign, "; "),
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

// learnForGood copies the journal's and this process's knowledge into the host's record before the agent releases the node. After a restart the agent
// must neither retry a failed change nor restore the former state.
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

// Park releases the node until its reboot. The journal stays: if a user withdraws the request, the agent changes the pending modes back. Operands and
// units already run again; if a user stops one before the reboot, it stays stopped.
func (f *Fencing) Park(ctx context.Context, in act.Input) error {
	j := *in.Seen.Journal
	j.Paused, j.Stopped, j.Parked = nil, nil, true
	if err := f.LeaveJournal(ctx, in.Seen, in.Seen.Writing(in.Want, plan.Park), j); err != nil {
		return err
	}
	f.Events.Node(f.Node, events.ReleasedUntilReboot(in.Want.Name))
	return nil
}

// LeaveJournal releases the node, and leaves the journal with the rest that the agent must restore.
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
