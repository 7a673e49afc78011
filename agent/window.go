package agent

import (
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/window"
)

// schedule is when the node may be disturbed for the wish.
func (s observed) schedule(want desired) window.Schedule {
	schedule := s.pool.Schedule
	if len(want.windows) > 0 {
		schedule.Windows = want.windows
	}
	return schedule
}

// mayBegin waits for a window that is long enough.
func (a *Agent) mayBegin(seen observed, want desired) error {
	now, takes := a.wall.Now(), seen.estimate()
	turn, ok := seen.turn(want, now)
	if ok && !turn.After(now) {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonAwaitingWindow, After: a.settings.Retry.Longest, Since: seen.since(config.ReasonAwaitingWindow, a.now()),
		Advice: fmt.Sprintf("to begin at once: kubectl annotate node %s %s=%s", seen.node.Name, config.AnnotationForce, want.fingerprint),
	}
	if !ok {
		wait.Message = fmt.Sprintf("by %s no window comes that is as long as the change takes, %s: make one longer in the maintenance file or the profile",
			seen.scheduleOf(want), takes.afterFirstTouch)
		return wait
	}
	wait.Planned, wait.After = turn, turn.Sub(now)
	wait.Message = fmt.Sprintf("by %s the change begins at %s; it takes %s", seen.scheduleOf(want), zoned(turn), takes.total)
	return wait
}

// runs says when a change with these steps would begin.
func (a *Agent) runs(seen observed, want desired, steps []plan.Step) string {
	now := a.wall.Now()
	turn, ok := seen.turn(want, now)
	when := "at once, since no window has to be waited for"
	switch {
	case seen.held() != "":
		return fmt.Sprintf("not before annotation %s is taken away, which says %q", config.AnnotationHold, seen.held())
	case !needsWindow(seen, want, steps):
		return "at once, since nobody is disturbed"
	case seen.pool.err != nil:
		return fmt.Sprintf("not before the maintenance file can be read: %v", seen.pool.err)
	case !ok:
		return fmt.Sprintf("never: by %s no window comes that is as long as the change takes, %s", seen.scheduleOf(want), seen.estimate().afterFirstTouch)
	case turn.After(now):
		when = fmt.Sprintf("at %s, by %s", zoned(turn), seen.scheduleOf(want))
	default:
		if opening, open := seen.schedule(want).At(now); open && !opening.End.IsZero() {
			when = fmt.Sprintf("at once: a window is open until %s, by %s", zoned(opening.End.In(zone(opening))), seen.scheduleOf(want))
		}
	}
	if seen.pooled() && seen.pool.MaxUnavailable != nil {
		when += fmt.Sprintf(", when it is the node's turn: pool %s can do without %s at once", seen.pool.Name, seen.pool.MaxUnavailable)
	}
	return when
}

// turn is when the change may begin: now, or at the node's own moment of the next window that is long enough. The time is in the zone
// of the window. There may be none.
func (s observed) turn(want desired, now time.Time) (time.Time, bool) {
	schedule, takes := s.schedule(want), s.estimate()
	if opening, open := schedule.At(now); open {
		at := latest(s.startFor(opening), now)
		if remaining(opening, at) >= takes.within(opening) {
			return at.In(zone(opening)), true
		}
	}
	opening, ok := schedule.Next(now, takes.afterFirstTouch)
	return s.startFor(opening).In(zone(opening)), ok
}

// startFor is when this node begins in the opening. Not all of a pool begin at its first second.
func (s observed) startFor(o window.Opening) time.Time {
	spread := s.pool.Jitter
	if !o.Start.IsZero() && !o.End.IsZero() {
		length := o.End.Sub(o.Start)
		spread = min(spread, length/jitterShare, length-s.estimate().within(o))
	}
	if o.Start.IsZero() || spread <= 0 {
		return o.Start
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(s.node.Name)) // a hash takes everything
	share := float64(h.Sum32()) / (1 << 32)
	return o.Start.Add(time.Duration(share * float64(spread)).Truncate(time.Second))
}

// jitterShare: no node waits for more than a tenth of its window.
const jitterShare = 10

// mayGoOn puts a change off whose window has closed, or closes before the change can be done. Pods that have left by then have left
// in vain; a GPU that is taken away when nobody expects it is worse.
func (a *Agent) mayGoOn(seen observed, want desired) error {
	now, takes := a.wall.Now(), seen.estimate()
	schedule := seen.schedule(want)
	opening, open := schedule.At(now)
	switch {
	case open && remaining(opening, now) >= takes.afterFirstTouch:
		return nil
	case open:
		return seen.putOff(want, config.ReasonWindowClosed, fmt.Sprintf("the window closes at %s, and the change takes %s from here on",
			zoned(opening.End.In(zone(opening))), takes.afterFirstTouch))
	}
	why := "the window is closed"
	if last, ok := schedule.Prev(now); ok {
		why = "the window closed at " + zoned(last.End.In(zone(last)))
	}
	return seen.putOff(want, config.ReasonWindowClosed, why+" before a GPU was touched")
}

// overrun is for how long the change has gone on beyond its window, since its GPUs were touched.
func (a *Agent) overrun(seen observed, want desired) time.Duration {
	j := seen.journal
	if j == nil || !j.Cordoned || j.Forced || j.Startup != nil || want.undo || seen.pool.err != nil || seen.restores(want) || !seen.touched() {
		return 0
	}
	now := a.wall.Now()
	schedule := seen.schedule(want)
	if schedule.Contains(now) {
		return 0
	}
	since := j.Started
	if last, ok := schedule.Prev(now); ok {
		since = latest(last.End, since)
	}
	return now.Sub(since)
}

// times are the moments of the change that is under way.
type times struct {
	touchedAt time.Time // when it first touched a GPU
	provenAt  time.Time // when it was first seen to be done
	overran   string    // operation of which people know that it goes on beyond its window
}

func (t *times) forget(time.Time) { t.touchedAt, t.provenAt = time.Time{}, time.Time{} }

// tellWindow notes how the node's windows are, and says what there is to say of them.
func (a *Agent) tellWindow(seen observed, want desired, planned time.Time) string {
	if !seen.complete {
		return ""
	}
	now, schedule := a.wall.Now(), seen.schedule(want)
	over := a.overrun(seen, want)
	w := metrics.Window{Known: true, Open: seen.pool.err == nil && schedule.Contains(now), Next: planned, Overrun: over}
	if next, ok := schedule.Next(now, 0); ok && planned.IsZero() && seen.pool.err == nil {
		w.Next = next.Start
	}
	a.metrics.Windowed(w)
	return a.tellOverrun(seen, want, over)
}

// tellOverrun says once for each change that it goes on beyond its window.
func (a *Agent) tellOverrun(seen observed, want desired, over time.Duration) string {
	if over <= 0 {
		return ""
	}
	const text = "the window has closed, and the change goes on, since a GPU was touched"
	if a.times.overran != seen.operation() {
		a.times.overran = seen.operation()
		a.log.Warn("window overrun", zap.Duration("by", over), zap.String("operation", a.times.overran))
		a.eventf(seen.node, corev1.EventTypeWarning, config.ReasonWindowOverrun, "%s: %s", want.name, text)
	}
	return "; " + string(config.ReasonWindowOverrun) + ": " + text
}

// scheduleOf says whose windows count.
func (s observed) scheduleOf(want desired) string {
	switch {
	case len(want.windows) > 0:
		return "the windows of profile " + want.name
	case s.pool.Name != "":
		return "the windows of pool " + s.pool.Name
	default:
		return "the windows of the maintenance file"
	}
}

// estimate is how long a change takes.
type estimate struct {
	total           time.Duration // from the fence on
	afterFirstTouch time.Duration // from the first touch of a GPU on
}

// within is the time that has to be left of the opening for a change to begin in it. It is at most half the window, so that one long drain in
// the past does not block every window.
func (e estimate) within(o window.Opening) time.Duration {
	if o.Start.IsZero() || o.End.IsZero() {
		return e.total
	}
	return min(e.total, max(e.afterFirstTouch, o.End.Sub(o.Start)/2))
}

// keptTimes is how many changes the estimate is made by.
const keptTimes = 5

// estimate is the longest of the last changes of this node, or what the maintenance file says.
func (s observed) estimate() estimate {
	if len(s.record.status.Took) == 0 {
		return estimate{total: s.pool.Estimate, afterFirstTouch: s.pool.Estimate}
	}
	var e estimate
	for _, t := range s.record.status.Took {
		e.total = max(e.total, time.Duration(t.Whole)*time.Second)
		e.afterFirstTouch = max(e.afterFirstTouch, time.Duration(t.Rest)*time.Second)
	}
	// A change that was turned to another target in the middle has touched a GPU before the time of its fence.
	e.total = max(e.total, e.afterFirstTouch)
	return e
}

// measured adds the change that ends now to those that the estimate is made by. How long one took that another process has begun to
// carry out is not known.
func (a *Agent) measured(seen observed) []api.Took {
	if a.times.touchedAt.IsZero() {
		return seen.record.status.Took
	}
	t := api.Took{Whole: seconds(a.times.provenAt.Sub(seen.journal.Started)), Rest: seconds(a.times.provenAt.Sub(a.times.touchedAt))}
	all := append(slices.Clone(seen.record.status.Took), t)
	return all[max(0, len(all)-keptTimes):]
}

func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }

// remaining is what is left of the opening from then on.
func remaining(o window.Opening, from time.Time) time.Duration {
	if o.End.IsZero() {
		return forever
	}
	return o.End.Sub(from)
}

const forever = 1<<63 - 1

func zone(o window.Opening) *time.Location {
	if o.Zone == nil {
		return time.UTC
	}
	return o.Zone
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// zoned writes a time as clocks show it where the window is, and in UTC.
func zoned(t time.Time) string {
	if _, offset := t.Zone(); offset == 0 {
		return t.UTC().Format("Mon 2006-01-02 15:04:05Z")
	}
	return t.Format("Mon 2006-01-02 15:04:05 MST (") + t.UTC().Format("Mon 15:04:05Z") + ")"
}
