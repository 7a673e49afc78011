package decide

import (
	"fmt"

	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// Gate says whether a change of one node may begin or go on.
type Gate struct {
	Settings config.Settings
	Wall     clock.PassiveClock // the host's, by which windows open
	Clock    *monotonic.Clock
}

// Allow returns why the agent may not perform the first step now: a *Waiting before it has disturbed anything, and a *Failure that postpones
// the change after that. It always allows steps that disturb no pod, roll-backs, and changes past the point of no return.
func (g *Gate) Allow(seen *state.Observed, want state.Desired, steps []plan.Step) error {
	switch {
	case want.Undo:
		return nil
	case seen.HoldText() != "" && seen.StartsChange(want, steps):
		return seen.HoldDecision(want, g.Clock.Stamp())
	case seen.Forced(want) || !needsWindow(seen, want, steps) || seen.PastPointOfNoReturn(want, steps):
		return nil
	case seen.Pool.Err != nil && seen.DisruptionStarted():
		return seen.Postponed(want, config.ReasonInvalidMaintenance, fmt.Sprintf("the maintenance file cannot be read any more: %v", seen.Pool.Err))
	case seen.Pool.Err != nil:
		return &outcome.Waiting{
			Reason: config.ReasonInvalidMaintenance, After: g.Settings.Retry.Longest, Since: seen.Since(config.ReasonInvalidMaintenance, g.Clock.Stamp()),
			Message: fmt.Sprintf("nothing is begun before it is known when this node may be disturbed: %v", seen.Pool.Err),
			Advice:  "mend the file, or take the ConfigMap away to have no windows",
		}
	case seen.DisruptionStarted():
		return g.mayGoOn(seen, want)
	default:
		return g.mayBegin(seen, want)
	}
}

// needsWindow reports whether the steps disturb any pod: one that runs, or one that would get a GPU meanwhile. A node with its startup taint
// runs no workload, and a GPU that has lost its instances by a reboot serves none.
func needsWindow(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	// As long as kubelet does not answer, any pod may hold a GPU, and preflight waits.
	fresh := len(seen.Marks.Startup) > 0 && (seen.Kubelet.Err != nil || !plan.Has(steps, plan.Evict)) || len(seen.Journal.Startup()) > 0
	if fresh || seen.Restores(want) && !plan.Has(steps, plan.Evict) && !plan.Has(steps, plan.Heal) {
		return false
	}
	return plan.Disrupts(steps) || plan.Has(steps, plan.Fence)
}

// mayBegin waits for a window that is long enough.
func (g *Gate) mayBegin(seen *state.Observed, want state.Desired) error {
	now, takes := g.Wall.Now(), seen.Estimate()
	begins, ok := seen.BeginsAt(want, now)
	if ok && !begins.After(now) {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonAwaitingWindow, After: g.Settings.Retry.Longest, Since: seen.Since(config.ReasonAwaitingWindow, g.Clock.Stamp()),
		Advice: fmt.Sprintf("to begin at once: kubectl annotate node %s %s=%s", seen.Node.Name, config.AnnotationForce, want.Fingerprint),
	}
	if !ok {
		wait.Message = fmt.Sprintf("by %s no window comes that is as long as the change takes, %s: make one longer in the maintenance file or the profile",
			seen.ScheduleOf(want), takes.AfterFirstTouch)
		return wait
	}
	wait.Planned, wait.After = begins, begins.Sub(now)
	wait.Message = fmt.Sprintf("by %s the change begins at %s; it takes %s", seen.ScheduleOf(want), outcome.Zoned(begins), takes.Total)
	return wait
}

// Runs says when a change with these steps would begin.
func (g *Gate) Runs(seen *state.Observed, want state.Desired, steps []plan.Step) string {
	now := g.Wall.Now()
	begins, ok := seen.BeginsAt(want, now)
	when := "at once, since no window has to be waited for"
	switch {
	case seen.HoldText() != "":
		return fmt.Sprintf("not before annotation %s is taken away, which says %q", config.AnnotationHold, seen.HoldText())
	case !needsWindow(seen, want, steps):
		return "at once, since no pod is disturbed"
	case seen.Pool.Err != nil:
		return fmt.Sprintf("not before the maintenance file can be read: %v", seen.Pool.Err)
	case !ok:
		return fmt.Sprintf("never: by %s no window comes that is as long as the change takes, %s", seen.ScheduleOf(want), seen.Estimate().AfterFirstTouch)
	case begins.After(now):
		when = fmt.Sprintf("at %s, by %s", outcome.Zoned(begins), seen.ScheduleOf(want))
	default:
		if opening, open := seen.Schedule(want).At(now); open && !opening.End.IsZero() {
			when = fmt.Sprintf("at once: a window is open until %s, by %s", outcome.Zoned(opening.End.In(state.Zone(opening))), seen.ScheduleOf(want))
		}
	}
	if seen.InLimitedPool() && seen.Pool.MaxUnavailable != nil && (!seen.Pool.ForEvictions || plan.Has(steps, plan.Evict)) {
		when += fmt.Sprintf(", when it is the node's turn: pool %s can do without %s at once", seen.Pool.Name, seen.Pool.MaxUnavailable)
	}
	return when
}

// mayGoOn postpones a change if its window has closed, or closes before the change can be done. The agent has evicted some pods in vain
// then; but to take a GPU away outside of the window is worse.
func (g *Gate) mayGoOn(seen *state.Observed, want state.Desired) error {
	now, takes := g.Wall.Now(), seen.Estimate()
	schedule := seen.Schedule(want)
	opening, open := schedule.At(now)
	switch {
	case open && state.Remaining(opening, now) >= takes.AfterFirstTouch:
		return nil
	case open:
		return seen.Postponed(want, config.ReasonWindowClosed, fmt.Sprintf("the window closes at %s, and the change takes %s from here on",
			outcome.Zoned(opening.End.In(state.Zone(opening))), takes.AfterFirstTouch))
	}
	why := "the window is closed"
	if last, ok := schedule.Prev(now); ok {
		why = "the window closed at " + outcome.Zoned(last.End.In(state.Zone(last)))
	}
	return seen.Postponed(want, config.ReasonWindowClosed, why+" before a GPU was touched")
}
