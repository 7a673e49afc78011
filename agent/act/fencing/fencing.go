// Package fencing takes the node out of service for a change and gives it back: journal, cordon, taint, and what is checked and prepared before
// the first of them. It takes the time of changes, by which the agent estimates the next ones, and makes way for an upgrade of the driver.
package fencing

import (
	"context"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Fencing fences one node, and gives it back.
type Fencing struct {
	Nodes     nodewrite.Writer
	Fence     fence.Fence
	Journal   *journal.Writer
	Record    *journal.Keeper
	Slot      *fleet.Slot
	Evictions *evict.Evictions
	Processes *observe.Processes
	Handover  *plugin.Handover
	Timing    *Timing
	Retries   *decide.Retries
	Events    report.Events
	Clock     *monotonic.Clock

	returns returns
}

// WriteJournal writes the journal without a fence: for a change that disrupts no pod, to add to a present journal, or for what
// an agent has left without one.
func (f *Fencing) WriteJournal(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	if startsDisruption(seen, want, steps) {
		if err := f.Slot.Confirm(ctx, seen, want); err != nil {
			return err
		}
	}
	f.forgetFormerTarget(seen, want)
	j, err := f.journalWith(seen, want, steps)
	if err != nil {
		return err
	}
	if err := f.Journal.Amend(ctx, seen.Writing(want, steps[0].Kind), *j, seen.SpentAnnotations(*j)...); err != nil {
		return err
	}
	if left := seen.Leftovers.Orphan.String(); seen.Journal == nil && left != "" {
		f.Events.Nodef(seen.Node, corev1.EventTypeWarning, config.ReasonRecovering, "found without a journal, and to be given back: %s", left)
	}
	return nil
}

// Raise fences the node, once the agent knows that the pods which must leave may do so. A node that cannot be drained stays
// schedulable.
func (f *Fencing) Raise(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) error {
	if startsDisruption(seen, want, steps) {
		if err := f.Slot.Confirm(ctx, seen, want); err != nil {
			return err
		}
	}
	f.forgetFormerTarget(seen, want)
	j, err := f.journalWith(seen, want, steps)
	if err != nil {
		return err
	}
	if !j.Cordoned { // the deadlines count from the fence
		j.Started = f.Clock.Stamp()
	}
	j.Cordoned, j.WasUnschedulable = true, seen.ForeignCordon()
	j.RecordStartup(seen.Marks.Startup)
	keep(j, seen.Node)
	if _, err := f.Journal.Write(ctx, seen.Writing(want, plan.Fence), *j, func(node *corev1.Node, text string) ([]byte, error) {
		return f.Fence.Keeps(j.Kept).Raise(node, text, seen.SpentAnnotations(*j)...)
	}); err != nil {
		return err
	}
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonFencing, "cordoned for the change to %s: %s", want.Name, sanitize.Counted(len(steps), "step"))
	return nil
}

// Resume removes the taint and leaves the cordon. If a user had cordoned the node before the change and has uncordoned it
// since, Resume notes that in the journal, so that the end of the change leaves no cordon; and so it does with a startup taint that has come
// since, before it takes that away. Without a journal the taint is all that the agent has set.
func (f *Fencing) Resume(ctx context.Context, seen *state.Observed, want state.Desired) error {
	if seen.Journal == nil {
		if err := f.tooSoon(seen); err != nil {
			return err
		}
		return f.liftStartup(ctx, seen, func(node *corev1.Node) ([]byte, error) { return f.Fence.Lift(node, false) })
	}
	j := *seen.Journal
	uncordoned := j.WasUnschedulable && !seen.Node.Spec.Unschedulable
	j.WasUnschedulable = j.WasUnschedulable && !uncordoned
	if j.RecordStartup(seen.Marks.Startup) || uncordoned {
		return f.Journal.Amend(ctx, seen.Writing(want, plan.ResumeOperands), j)
	}
	// A user who has cancelled the change by an uncordon wants no cordon in its place, unless pods would meet GPUs that are
	// not there yet.
	if undo := seen.Journal.Undo; undo != nil && undo.Cancelled && len(seen.Capacity.Missing) == 0 {
		return f.liftStartup(ctx, seen, f.by(seen.Journal).Uncover)
	}
	return f.liftStartup(ctx, seen, f.by(seen.Journal).Open)
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

// Release gives the node back. A node that has just been registered gets its startup taints back if the change was undone. Learnt is what the
// end of the change has put into the host's record, and the status does not have yet; nil if Release has failed before that.
func (f *Fencing) Release(ctx context.Context, seen *state.Observed, want state.Desired) (learnt *api.Status, err error) {
	f.Timing.IsProven(f.Clock.Now())
	uncordon := seen.Journal.Cordoned && !seen.ForeignCordon()
	if foreign := seen.ToolsThatCordon(); uncordon && len(foreign) > 0 {
		return nil, &outcome.Waiting{
			Reason: config.ReasonOtherMaintenance, After: outcome.EvictionRetry, Blockers: foreign,
			Message: "the GPUs are as they should be; the node is uncordoned when other tools are done with it: " + strings.Join(foreign, "; "),
			Since:   seen.Since(config.ReasonOtherMaintenance, f.Clock.Stamp()),
		}
	}
	if seen.Journal.Plugin != nil {
		f.Handover.Tidy(ctx, seen)
	}
	learnt = f.learnForGood(ctx, seen, want)
	f.Record.Release(ctx, f.Clock.Now())
	fence := f.by(seen.Journal)
	unready := len(seen.Journal.Startup()) > 0 && want.Undo && want.Name != ""
	err = f.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) {
		if unready {
			return fence.LiftUnready(node, uncordon, seen.Journal.Startup()...)
		}
		return fence.Lift(node, uncordon)
	})
	switch {
	case err != nil:
		return learnt, err
	case unready: // the agent itself has put them back
		f.returns = returns{}
	default:
		f.tookStartup(seen)
	}
	f.Record.NoteJournalGone(ctx, f.Clock.Now())
	f.Slot.End(ctx, seen, want)
	f.Timing.Forget(f.Clock.Now())
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonReleased, "node given back after %s, %s",
		f.Clock.Since(seen.Journal.Started).Round(time.Second), capacity.Offered(seen.Kubelet.Offered).Summary(want.Plugin.SharingKnown()))
	return learnt, nil
}

// learnForGood writes into the host's record what only the journal and this process know, before the agent gives the node back: after a
// restart it must not try a failed change again, nor restore what was before.
func (f *Fencing) learnForGood(ctx context.Context, seen *state.Observed, want state.Desired) *api.Status {
	status := seen.Record.Status
	failed := seen.Journal.Undo
	if failed != nil && !failed.Later && want.Undo && (status.Failed == nil || status.Failed.Wish != failed.Wish) {
		status.Failed = failed
	}
	status.NoReset = seen.Refusal()
	if !want.Undo {
		status.Proven, status.Took = want.Fingerprint, f.Timing.With(seen.Record.Status.Took, seen.Journal.Started)
	}
	f.Journal.Learn(ctx, journal.LearntOf(status, seen.Record.Published))
	return &status
}

// Park gives the node back until it is rebooted. The journal stays: if a user withdraws the wish, the agent takes the pending modes back.
// Operands and units run again by now; if a user stops one before the reboot, the agent leaves it stopped.
func (f *Fencing) Park(ctx context.Context, seen *state.Observed, want state.Desired) error {
	j := *seen.Journal
	j.Paused, j.Stopped, j.Parked = nil, nil, true
	if err := f.LeaveJournal(ctx, seen, seen.Writing(want, plan.Park), j); err != nil {
		return err
	}
	f.Events.Nodef(seen.Node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "node given back until it is rebooted for %s", want.Name)
	return nil
}

// LeaveJournal gives the node back, and leaves the journal with what the agent owes still.
func (f *Fencing) LeaveJournal(ctx context.Context, seen *state.Observed, w journal.Write, j journal.Journal) error {
	uncordon := j.Cordoned && !seen.ForeignCordon()
	lifted := f.by(&j)
	j.Cordoned, j.Kept = false, nil
	if _, err := f.Journal.Write(ctx, w, j, func(node *corev1.Node, text string) ([]byte, error) {
		return lifted.Park(node, text, uncordon, j.Startup()...) // a node that has just been registered keeps its startup taints meanwhile
	}); err != nil {
		return err
	}
	f.Slot.Leave(ctx, seen) // neither a success nor a failure: that shows later
	return nil
}
