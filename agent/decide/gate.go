package decide

import (
	"fmt"
	"time"

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
		return held(seen, want, g.Clock.Stamp())
	case forced(seen, want) || !needsWindow(seen, want, steps) || pastPointOfNoReturn(seen, want, steps):
		return nil
	case seen.Pool.Err != nil && seen.DisruptionStarted():
		return seen.Postponed(want, config.ReasonInvalidMaintenance, fmt.Sprintf("the maintenance file cannot be read any more: %v", seen.Pool.Err))
	case seen.Pool.Err != nil:
		return &outcome.Waiting{
			Reason: config.ReasonInvalidMaintenance, After: g.Settings.Retry.Longest, Since: seen.Since(config.ReasonInvalidMaintenance, g.Clock.Stamp()),
			Advice:  "mend the maintenance file, or take its ConfigMap away to have no windows",
			Message: fmt.Sprintf("changes nothing until it can be read when this node may be disturbed: %v", seen.Pool.Err),
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
	now, takes := g.Wall.Now(), estimate(seen)
	begins, ok := beginsAt(seen, want, now)
	if ok && !begins.After(now) {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonAwaitingWindow, After: g.Settings.Retry.Longest, Since: seen.Since(config.ReasonAwaitingWindow, g.Clock.Stamp()),
		Advice: fmt.Sprintf("to begin at once: kubectl annotate node %s %s=%s", seen.Node.Name, config.AnnotationForce, want.Fingerprint),
	}
	if !ok {
		wait.Advice = "make a window longer in the maintenance file or the profile; " + wait.Advice
		wait.Message = fmt.Sprintf("by %s no window comes that is as long as the change takes, %s", scheduleOf(seen, want), takes.AfterFirstTouch)
		return wait
	}
	wait.Planned, wait.After = begins, begins.Sub(now)
	wait.Message = fmt.Sprintf("the change begins at %s by %s, and takes %s", outcome.Zoned(begins), scheduleOf(seen, want), takes.Total)
	return wait
}

// Runs says when a change with these steps would begin.
func (g *Gate) Runs(seen *state.Observed, want state.Desired, steps []plan.Step) string {
	now := g.Wall.Now()
	begins, ok := beginsAt(seen, want, now)
	when := "at once, since no window has to be waited for"
	switch {
	case seen.HoldText() != "":
		return fmt.Sprintf("not before annotation %s is taken away, which says %q", config.AnnotationHold, seen.HoldText())
	case !needsWindow(seen, want, steps):
		return "at once, since no pod is disturbed"
	case seen.Pool.Err != nil:
		return fmt.Sprintf("not before the maintenance file can be read: %v", seen.Pool.Err)
	case !ok:
		return fmt.Sprintf("never: by %s no window comes that is as long as the change takes, %s", scheduleOf(seen, want), estimate(seen).AfterFirstTouch)
	case begins.After(now):
		when = fmt.Sprintf("at %s, by %s", outcome.Zoned(begins), scheduleOf(seen, want))
	default:
		if opening, open := Schedule(seen, want).At(now); open && !opening.End.IsZero() {
			when = fmt.Sprintf("at once: a window is open until %s, by %s", outcome.Zoned(opening.End.In(zone(opening))), scheduleOf(seen, want))
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
	now, takes := g.Wall.Now(), estimate(seen)
	schedule := Schedule(seen, want)
	opening, open := schedule.At(now)
	switch {
	case open && remaining(opening, now) >= takes.AfterFirstTouch:
		return nil
	case open:
		return seen.Postponed(want, config.ReasonWindowClosed, fmt.Sprintf("the window closes at %s, and the change takes %s from here on",
			outcome.Zoned(opening.End.In(zone(opening))), takes.AfterFirstTouch))
	}
	why := "the window is closed"
	if last, ok := schedule.Prev(now); ok {
		why = "the window closed at " + outcome.Zoned(last.End.In(zone(last)))
	}
	return seen.Postponed(want, config.ReasonWindowClosed, why+" before a GPU was touched")
}

// pastPointOfNoReturn reports whether the change has already touched a GPU or the plugin's config, no user has edited the target since, and
// the other steps evict no pod that came after the agent had given the node back.
func pastPointOfNoReturn(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	return seen.HardwareOrPluginTouched() && !seen.Other(want) && !seen.Edited(want) && (seen.DisruptionStarted() || !plan.Has(steps, plan.Evict))
}

// held returns what a hold means: a change that has not begun waits, and one that was begun for another target is undone.
func held(seen *state.Observed, want state.Desired, now time.Time) error {
	if seen.Journal != nil {
		return seen.Postponed(want, config.ReasonHeld, fmt.Sprintf("annotation %s says %q, and what was begun was for %s", config.AnnotationHold, seen.HoldText(), seen.Journal.Target))
	}
	return &outcome.Waiting{
		Reason: config.ReasonHeld, After: outcome.EvictionRetry, Since: seen.Since(config.ReasonHeld, now),
		Message: fmt.Sprintf("changes nothing until annotation %s is gone, which says %q", config.AnnotationHold, seen.HoldText()),
		Advice:  fmt.Sprintf("to go on: kubectl annotate node %s %s-", seen.Node.Name, config.AnnotationHold),
	}
}

// forced reports whether a user has said, by the annotation, that this change needs no window.
func forced(seen *state.Observed, want state.Desired) bool {
	return seen.Journal != nil && seen.Journal.Forced && !seen.Other(want) && !seen.Edited(want) || seen.Forces(want) && !want.Undo
}
