package agent

import (
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// mayBegin waits for a window that is long enough.
func (a *Agent) mayBegin(seen state.Observed, want state.Desired) error {
	now, takes := a.wall.Now(), seen.Estimate()
	turn, ok := seen.Turn(want, now)
	if ok && !turn.After(now) {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonAwaitingWindow, After: a.settings.Retry.Longest, Since: seen.Since(config.ReasonAwaitingWindow, a.now()),
		Advice: fmt.Sprintf("to begin at once: kubectl annotate node %s %s=%s", seen.Node.Name, config.AnnotationForce, want.Fingerprint),
	}
	if !ok {
		wait.Message = fmt.Sprintf("by %s no window comes that is as long as the change takes, %s: make one longer in the maintenance file or the profile",
			seen.ScheduleOf(want), takes.AfterFirstTouch)
		return wait
	}
	wait.Planned, wait.After = turn, turn.Sub(now)
	wait.Message = fmt.Sprintf("by %s the change begins at %s; it takes %s", seen.ScheduleOf(want), zoned(turn), takes.Total)
	return wait
}

// runs says when a change with these steps would begin.
func (a *Agent) runs(seen state.Observed, want state.Desired, steps []plan.Step) string {
	now := a.wall.Now()
	turn, ok := seen.Turn(want, now)
	when := "at once, since no window has to be waited for"
	switch {
	case seen.Held() != "":
		return fmt.Sprintf("not before annotation %s is taken away, which says %q", config.AnnotationHold, seen.Held())
	case !needsWindow(seen, want, steps):
		return "at once, since nobody is disturbed"
	case seen.Pool.Err != nil:
		return fmt.Sprintf("not before the maintenance file can be read: %v", seen.Pool.Err)
	case !ok:
		return fmt.Sprintf("never: by %s no window comes that is as long as the change takes, %s", seen.ScheduleOf(want), seen.Estimate().AfterFirstTouch)
	case turn.After(now):
		when = fmt.Sprintf("at %s, by %s", zoned(turn), seen.ScheduleOf(want))
	default:
		if opening, open := seen.Schedule(want).At(now); open && !opening.End.IsZero() {
			when = fmt.Sprintf("at once: a window is open until %s, by %s", zoned(opening.End.In(state.Zone(opening))), seen.ScheduleOf(want))
		}
	}
	if seen.Pooled() && seen.Pool.MaxUnavailable != nil {
		when += fmt.Sprintf(", when it is the node's turn: pool %s can do without %s at once", seen.Pool.Name, seen.Pool.MaxUnavailable)
	}
	return when
}

// mayGoOn puts a change off whose window has closed, or closes before the change can be done. Pods that have left by then have left
// in vain; a GPU that is taken away when nobody expects it is worse.
func (a *Agent) mayGoOn(seen state.Observed, want state.Desired) error {
	now, takes := a.wall.Now(), seen.Estimate()
	schedule := seen.Schedule(want)
	opening, open := schedule.At(now)
	switch {
	case open && state.Remaining(opening, now) >= takes.AfterFirstTouch:
		return nil
	case open:
		return seen.PutOff(want, config.ReasonWindowClosed, fmt.Sprintf("the window closes at %s, and the change takes %s from here on",
			zoned(opening.End.In(state.Zone(opening))), takes.AfterFirstTouch))
	}
	why := "the window is closed"
	if last, ok := schedule.Prev(now); ok {
		why = "the window closed at " + zoned(last.End.In(state.Zone(last)))
	}
	return seen.PutOff(want, config.ReasonWindowClosed, why+" before a GPU was touched")
}

// overrun is for how long the change has gone on beyond its window, since its GPUs were touched.
func (a *Agent) overrun(seen state.Observed, want state.Desired) time.Duration {
	j := seen.Journal
	if j == nil || !j.Cordoned || j.Forced || j.Startup != nil || want.Undo || seen.Pool.Err != nil || seen.Restores(want) || !seen.Touched() {
		return 0
	}
	now := a.wall.Now()
	schedule := seen.Schedule(want)
	if schedule.Contains(now) {
		return 0
	}
	since := j.Started
	if last, ok := schedule.Prev(now); ok {
		since = state.Latest(last.End, since)
	}
	return now.Sub(since)
}

// times are the moments of the change that is under way.
type times struct {
	touchedAt time.Time // when it first touched a GPU
	provenAt  time.Time // when it was first seen to be done
	overran   string    // operation of which people know that it goes on beyond its window
}

// Forget implements forgetter.
func (t *times) Forget(time.Time) { t.touchedAt, t.provenAt = time.Time{}, time.Time{} }

// tellWindow notes how the node's windows are, and says what there is to say of them.
func (a *Agent) tellWindow(seen state.Observed, want state.Desired, planned time.Time) string {
	if !seen.Complete {
		return ""
	}
	now, schedule := a.wall.Now(), seen.Schedule(want)
	over := a.overrun(seen, want)
	w := metrics.Window{Known: true, Open: seen.Pool.Err == nil && schedule.Contains(now), Next: planned, Overrun: over}
	if next, ok := schedule.Next(now, 0); ok && planned.IsZero() && seen.Pool.Err == nil {
		w.Next = next.Start
	}
	a.metrics.Windowed(w)
	return a.tellOverrun(seen, want, over)
}

// tellOverrun says once for each change that it goes on beyond its window.
func (a *Agent) tellOverrun(seen state.Observed, want state.Desired, over time.Duration) string {
	if over <= 0 {
		return ""
	}
	const text = "the window has closed, and the change goes on, since a GPU was touched"
	if a.times.overran != seen.Operation() {
		a.times.overran = seen.Operation()
		a.log.Warn("window overrun", zap.Duration("by", over), zap.String("operation", a.times.overran))
		a.eventf(seen.Node, corev1.EventTypeWarning, config.ReasonWindowOverrun, "%s: %s", want.Name, text)
	}
	return "; " + string(config.ReasonWindowOverrun) + ": " + text
}

// keptTimes is how many changes the estimate is made by.
const keptTimes = 5

// measured adds the change that ends now to those that the estimate is made by. How long one took that another process has begun to
// carry out is not known.
func (a *Agent) measured(seen state.Observed) []api.Took {
	if a.times.touchedAt.IsZero() {
		return seen.Record.Status.Took
	}
	t := api.Took{Whole: seconds(a.times.provenAt.Sub(seen.Journal.Started)), Rest: seconds(a.times.provenAt.Sub(a.times.touchedAt))}
	all := append(slices.Clone(seen.Record.Status.Took), t)
	return all[max(0, len(all)-keptTimes):]
}

func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }

// zoned writes a time as clocks show it where the window is, and in UTC.
func zoned(t time.Time) string {
	if _, offset := t.Zone(); offset == 0 {
		return t.UTC().Format("Mon 2006-01-02 15:04:05Z")
	}
	return t.Format("Mon 2006-01-02 15:04:05 MST (") + t.UTC().Format("Mon 15:04:05Z") + ")"
}
