package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Gate says whether a change of one node may begin or go on.
type Gate struct {
	Settings config.Settings
	Wall     clock.PassiveClock // the host's: windows open by it
	Clock    *monotonic.Clock
}

// Allow returns why the agent may not perform the first step now: a *Waiting before the change has disturbed anything, later a *Failure that postpones
// the change.
func (g *Gate) Allow(seen *state.Observed, want state.Desired, steps []plan.Step) error {
	now := g.Wall.Now()
	v := judge(seen, want, steps, now)
	switch v.ruling {
	case unrestricted, undisturbing, windowOpen:
		return nil
	case held, older, contested, unreadable, windowClosed:
	}
	if v.begun {
		return v.postponed(seen, want)
	}
	if v.ruling == older {
		return g.olderThanAgent(seen, want, steps)
	}
	if v.ruling == contested {
		return g.changedByOthers(seen, want, steps, now)
	}
	return g.waiting(v, seen, want, now)
}

// Runs says when a change with these steps would begin. Free says that its pool has a slot for it, and that nothing else keeps it now.
func (g *Gate) Runs(seen *state.Observed, want state.Desired, steps []plan.Step, free bool) string {
	v := judge(seen, want, steps, g.Wall.Now())
	now, slot := "at once", ""
	if !free && plan.Has(steps, plan.AcquireSlot) && seen.Pool.MaxUnavailable != nil {
		now = fmt.Sprintf("when a slot is free (pool %s changes at most %s at a time)", seen.Pool.Name, seen.Pool.MaxUnavailable)
		slot = ", " + now
	}
	switch v.ruling {
	case unrestricted:
		if slot == "" {
			now += ": no window restricts it"
		}
		return now
	case undisturbing:
		return now + ": it disturbs no pod"
	case windowOpen:
		return fmt.Sprintf("%s: a window is open until %s, by %s", now, v.end(), scheduleOf(seen, want))
	case held:
		return fmt.Sprintf("only after %s is removed", hold(seen))
	case older:
		return fmt.Sprintf("only after you set %s again, which is older than the agent", strings.Join(seen.OlderLabels(want), " and "))
	case contested:
		return fmt.Sprintf("at %s, since something else keeps changing the GPUs", outcome.Moment(foreignUntil(seen, want, steps, g.Wall.Now())))
	case unreadable:
		return fmt.Sprintf("only after the maintenance file can be read: %v", seen.Pool.Err)
	case windowClosed:
		if v.begins.IsZero() {
			return "never: " + v.noWindow(seen, want)
		}
	}
	return fmt.Sprintf("at %s, by %s%s", outcome.Zoned(v.begins), scheduleOf(seen, want), slot)
}

// waiting words a verdict against a change that has not begun.
func (g *Gate) waiting(v verdict, seen *state.Observed, want state.Desired, now time.Time) *outcome.Waiting {
	w := &outcome.Waiting{After: g.Settings.Retry.Longest}
	switch {
	case v.ruling == held:
		w.Reason, w.After = config.ReasonHeld, outcome.EvictionRetry
		w.Message = fmt.Sprintf("changes nothing until %s is removed", hold(seen))
		w.Advice = fmt.Sprintf("to go on: kubectl annotate node %s %s-", seen.Node.Name, config.AnnotationHold)
	case v.ruling == unreadable:
		w.Reason = config.ReasonInvalidMaintenance
		w.Message = fmt.Sprintf("changes nothing until the file says when this node may be disturbed: %v", seen.Pool.Err)
		w.Advice = "fix the maintenance file, or delete its ConfigMap to have no windows"
	default:
		w.Reason = config.ReasonAwaitingWindow
		w.Advice = fmt.Sprintf("to begin at once: kubectl annotate node %s %s=%s", seen.Node.Name, config.AnnotationForce, want.Fingerprint)
		if v.begins.IsZero() {
			w.Advice, w.Message = "make a window longer in the maintenance file or the profile; "+w.Advice, v.noWindow(seen, want)
			break
		}
		w.Planned, w.After = v.begins, v.begins.Sub(now)
		w.Message = fmt.Sprintf("the change begins at %s by %s, and takes %s", outcome.Zoned(v.begins), scheduleOf(seen, want), v.takes.Total)
	}
	w.Since = seen.Since(w.Reason, g.Clock.Stamp())
	return w
}

// olderThanAgent words the wait with a change that would take something, for a request that no user has made of this agent.
func (g *Gate) olderThanAgent(seen *state.Observed, want state.Desired, steps []plan.Step) *outcome.Waiting {
	labels := seen.OlderLabels(want)
	var cut, undo []string
	for _, gpu := range seen.GPUs {
		if slices.ContainsFunc(steps, func(s plan.Step) bool { return s.Kind == plan.Destroy && s.GPU == gpu.UUID }) {
			cut = append(cut, fmt.Sprintf("GPU %d has %s", gpu.Index, gpu.Geometry()))
		}
	}
	for _, label := range labels {
		key, _, _ := strings.Cut(label, "=")
		undo = append(undo, key+"-")
	}
	w := &outcome.Waiting{
		Reason: config.ReasonOlderRequest, For: outcome.ForUser, After: g.Settings.Retry.Longest, Named: true,
		Since:  seen.Since(config.ReasonOlderRequest, g.Clock.Stamp()),
		Advice: fmt.Sprintf("to have it applied: %s, or remove the label and set it again", want.ApplyCommand(seen.Node.Name)),
		Else:   fmt.Sprintf("to keep the GPUs as they are: kubectl label node %s %s", seen.Node.Name, strings.Join(undo, " ")),
	}
	w.Message = fmt.Sprintf("label %s was there before the agent", strings.Join(labels, " and "))
	if len(cut) > 0 {
		w.Message += ", and would destroy instances: " + sanitize.Listed(cut)
	}
	for _, s := range steps {
		if s.Kind == plan.Evict {
			w.Message += ", and would " + s.String()
		}
	}
	return w
}

// postponed words a verdict against a change that has begun and has touched no GPU.
func (v verdict) postponed(seen *state.Observed, want state.Desired) *api.Failure {
	reason, why := config.ReasonWindowClosed, "the window is closed before a GPU was touched"
	switch {
	case v.ruling == held:
		reason = config.ReasonHeld
		why = fmt.Sprintf("%s is set, and the change had begun for another target, %s", hold(seen), seen.Journal.Target)
	case v.ruling == unreadable:
		reason, why = config.ReasonInvalidMaintenance, fmt.Sprintf("the maintenance file can no longer be read: %v", seen.Pool.Err)
	case v.within:
		why = fmt.Sprintf("the window closes at %s, and the rest of the change takes %s", v.end(), v.takes.AfterFirstTouch)
	case !v.opening.End.IsZero():
		why = fmt.Sprintf("the window closed at %s before a GPU was touched", v.end())
	}
	return seen.Postponed(want, reason, why)
}

// end words when the opening ends.
func (v verdict) end() string { return outcome.Zoned(v.opening.End.In(zone(v.opening))) }

// noWindow words why the change never begins.
func (v verdict) noWindow(seen *state.Observed, want state.Desired) string {
	return fmt.Sprintf("none of %s is as long as the change takes, %s", scheduleOf(seen, want), v.takes.AfterFirstTouch)
}
