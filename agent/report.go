package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/units"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor/remedy"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// conclude reports what the pass has observed and done, and returns how long the loop may sleep.
func (a *Agent) conclude(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step, err error) time.Duration {
	a.reporters.liveness.At(reporting)
	var first plan.Step // zero if observing the node has failed
	if len(steps) > 0 {
		first = steps[0]
	}
	a.reporters.metrics.Stepped(steps, err)
	if !seen.Complete {
		a.actors.verifier.Pause() // the deadline for capacity does not run while the agent cannot see it
	} else {
		a.forget(first, err == nil && len(steps) == 0)
	}
	var d outcome.Decision
	if err != nil {
		d = a.deciders.retries.Decide(seen, want, first, err).Bounded(func(text string) string { return byIndex(seen.GPUs, text) })
	}
	a.driverReplaced = errors.Is(err, nvml.ErrReplaced)
	switch {
	case seen.Node == nil:
		a.env.Log.Warn("observing the node", zap.Error(err))
		return d.After
	case d.NoReset && seen.Journal != nil:
		return a.actors.rebooter.NoteNoReset(ctx, act.Input{Seen: seen, Want: want}, first.GPU, err)
	case d.Failure != nil && seen.Journal != nil && !want.Undo:
		a.actors.resets.NoteFailed(steps, d.Failure)
		return a.giveUp(ctx, seen, want, d.Failure)
	case d.Failure != nil: // the roll-back fails, too
		d = outcome.Decision{Reason: d.Failure.Reason, Message: d.Failure.Message, After: a.env.Settings.Retry.Longest, Stalled: true}
	}
	a.actors.units.ReportDropped(seen)
	a.reporters.reporter.ReportWindows(seen, want, d.Planned)
	a.reporters.reporter.ReportIgnored(seen, want)
	r := report.Of(seen, want, steps, err, d)
	r.Message = sanitize.Message(r.Message+a.notes(seen, want, first), sanitize.Longest)
	r.Blockers, r.Drain, r.Planned, r.Left = d.Blockers, report.DrainOf(seen, want, steps), d.Planned, stepsLeft(steps, err)
	r.Until, r.Then = d.Until, d.Then
	a.count(seen, want, r)
	a.actors.verifier.RemoveStaleResources(ctx, seen, err == nil && len(steps) == 0)
	if err := a.reporters.reporter.Report(ctx, seen, want, r, err == nil && len(steps) > 0); err != nil {
		a.env.Log.Warn("reporting", zap.Error(err))
		return a.env.Settings.Retry.First
	}
	return a.sleep(seen, steps, d, err)
}

// byIndex returns the text with the observed GPUs named by nvidia-smi's index instead of their UUID.
func byIndex(gpus []nvml.GPU, text string) string {
	for _, gpu := range gpus {
		if gpu.UUID != "" {
			name, uuid := fmt.Sprintf("GPU %d", gpu.Index), string(gpu.UUID)
			text = strings.ReplaceAll(strings.ReplaceAll(text, name+" ("+uuid+")", name), uuid, name)
		}
	}
	return text
}

// notes returns what the message says after the outcome of the pass. Making them has no other effect: everything besides the message is reported earlier.
func (a *Agent) notes(seen *state.Observed, want state.Desired, first plan.Step) string {
	return strings.Join([]string{
		withdrawn(seen, first),
		a.actors.units.Dropped(seen),
		a.actors.units.Down(),
		a.actors.fencing.Returned(seen),
		unnoticedReboots(seen),
		a.reporters.reporter.Overrun(seen, want),
		a.reporters.reporter.Ignored(seen, want),
	}, "")
}

// withdrawn adds to a message the pods that hold devices which kubelet allocates to others, unless the message names them already.
func withdrawn(seen *state.Observed, first plan.Step) string {
	if len(seen.Capacity.Withdrawn) == 0 || first.Traits().PartOfVerify {
		return ""
	}
	return "; " + sanitize.Listed(offer.WithdrawnTexts(seen))
}

// unnoticedReboots says, for the end of a message, why the agent would not notice a reboot; empty if it would.
func unnoticedReboots(seen *state.Observed) string {
	if seen.Boot.Err == nil {
		return ""
	}
	return "; the agent would not notice a reboot of this host: " + seen.Boot.Err.Error()
}

// count sets the metrics to what the report says.
func (a *Agent) count(seen *state.Observed, want state.Desired, r report.Report) {
	a.reporters.metrics.Observed(seen, want)
	a.reporters.metrics.Reported(metrics.Report{
		Phase: r.Phase, Ready: r.Ready == corev1.ConditionTrue, Reason: r.Reason, Converged: r.Converged, Blocked: r.Phase != api.PhaseIdle && !r.GoesOn,
		Failed: r.Retries,
	})
}

// stepsLeft returns how many steps are still to be done after the pass.
func stepsLeft(steps []plan.Step, err error) int {
	if err == nil && len(steps) > 0 {
		return len(steps) - 1
	}
	return len(steps)
}

// forget drops what the agent remembers of steps that are over.
func (a *Agent) forget(first plan.Step, converged bool) {
	if !first.Traits().PartOfVerify {
		a.actors.verifier.End()
	}
	a.deciders.retries.Head(first)
	if !first.Traits().AsksBudgets {
		a.observers.wakes.BlockedBy(nil)
	}
	if converged {
		a.deciders.retries.Converged()
	}
}

// activity is what the agent does besides the steps. It shows a user where the agent hangs.
type activity string

const reporting activity = "Report"

// String implements fmt.Stringer.
func (d activity) String() string { return string(d) }

// sleep returns the time until the next pass: none after a step, otherwise the decision's, at most until the heartbeat is due.
func (a *Agent) sleep(seen *state.Observed, steps []plan.Step, d outcome.Decision, err error) time.Duration {
	if err == nil && len(steps) > 0 {
		return 0
	}
	due := a.env.Settings.NodeHeartbeat
	if c := report.PartitionReady(seen.Node); c != nil {
		if age := a.env.Clock.Since(c.LastHeartbeatTime.Time); age < due {
			due -= max(0, age) // a heartbeat of the future was written before the clock was set back
		}
	}
	if a.actors.units.Awaits() {
		due = min(due, units.Retry)
	}
	if a.actors.taint.Pending() {
		due = min(due, remedy.Retry)
	}
	for _, again := range []time.Duration{
		a.actors.rules.RetryIn(), a.observers.claims.ReadsIn(), seen.Leftovers.AdoptsIn, a.actors.handover.MendsIn(), a.reporters.reporter.LagsFor(),
	} {
		if again > 0 {
			due = min(due, again)
		}
	}
	if request, asked := seen.Node.Annotations[config.AnnotationPreview]; asked && asksForPlan(request) {
		due = min(due, renewal)
	}
	if seen.Pool.Slot.Held {
		due = min(due, fleet.RenewAfter)
	}
	if err == nil {
		return due
	}
	return a.actors.verifier.Rest(min(d.After, due))
}

// giveUp writes the failure into the journal: from now on the agent rolls the change back.
func (a *Agent) giveUp(ctx context.Context, seen *state.Observed, want state.Desired, failure *api.Failure) time.Duration {
	j := *seen.Journal
	j.Undo, j.Parked = failure, false
	if err := a.actors.journal.Amend(ctx, seen.Writing(want, plan.Record), j); err != nil {
		a.env.Log.Warn("recording the failure", zap.Error(err))
		return a.env.Settings.Retry.First
	}
	a.actors.slot.CountFailure(ctx, seen, failure)
	a.actors.verifier.Pause()
	a.deciders.retries.BeginUndo()
	a.env.Log.Warn("change given up", zap.String("target", want.Name), zap.String("reason", string(failure.Reason)), zap.String("message", failure.Message))
	a.env.Events.Node(a.env.Node, events.GivenUp(want.Name, failure.Reason, failure.Message))
	return 0
}
