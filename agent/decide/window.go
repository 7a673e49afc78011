package decide

import (
	"hash/fnv"
	"time"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config/window"
)

// Schedule returns when the agent may disturb the node for the desired change.
func Schedule(seen *state.Observed, want state.Desired) window.Schedule {
	schedule := seen.Pool.Schedule
	if len(want.Windows) > 0 {
		schedule.Windows = want.Windows
	}
	return schedule
}

// beginsAt returns when the change may begin, in the zone of the window: now, or at this node's moment in the next window that is long enough. It is zero
// if there is no such window.
func beginsAt(seen *state.Observed, want state.Desired, now time.Time) time.Time {
	schedule, takes := Schedule(seen, want), estimate(seen)
	if opening, open := schedule.At(now); open {
		at := Latest(startFor(seen, opening), now)
		if remaining(opening, at) >= takes.within(opening) {
			return at.In(zone(opening))
		}
	}
	opening, ok := schedule.Next(now, takes.AfterFirstTouch)
	if !ok {
		return time.Time{}
	}
	return startFor(seen, opening).In(zone(opening))
}

// startFor returns when this node begins in the opening: the nodes of a pool must not all begin at its first second. An opening without a start began long
// ago.
func startFor(seen *state.Observed, o window.Opening) time.Time {
	spread := seen.Pool.Jitter
	if !o.End.IsZero() {
		length := o.End.Sub(o.Start)
		spread = max(0, min(spread, length/jitterShare, length-estimate(seen).within(o)))
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(seen.Node.Name)) // a hash returns no error
	share := float64(h.Sum32()) / (1 << 32)
	return o.Start.Add(time.Duration(share * float64(spread)).Truncate(time.Second))
}

// jitterShare: no node waits for more than a tenth of its window.
const jitterShare = 10

// scheduleOf names the windows that count: the profile's, the pool's or the maintenance file's.
func scheduleOf(seen *state.Observed, want state.Desired) string {
	switch {
	case len(want.Windows) > 0:
		return "the windows of profile " + want.Name
	case seen.Pool.Name != "" && !seen.Pool.ForEvictions:
		return "the windows of pool " + seen.Pool.Name
	default:
		return "the windows of the maintenance file"
	}
}

// duration is how long a change will take.
type duration struct {
	Total           time.Duration // from the fence on
	AfterFirstTouch time.Duration // from the first touch of a GPU on
}

// within returns how much of the opening must be left for a change to begin in it: at most half the window, so that one long drain in the past does not
// block every window. An opening without a start is longer than any change.
func (e duration) within(o window.Opening) time.Duration {
	if o.End.IsZero() {
		return e.Total
	}
	return min(e.Total, max(e.AfterFirstTouch, o.End.Sub(o.Start)/2))
}

// Estimate returns how long a change of this node is taken to last, and whether that was measured.
func Estimate(seen *state.Observed) (total time.Duration, measured bool) {
	return estimate(seen).Total, len(seen.Record.Learnt.Took) > 0
}

// estimate returns the longest of this node's last changes; if there is none, the maintenance file's estimate.
func estimate(seen *state.Observed) duration {
	if len(seen.Record.Learnt.Took) == 0 {
		return duration{Total: seen.Pool.Estimate, AfterFirstTouch: seen.Pool.Estimate}
	}
	var e duration
	for _, t := range seen.Record.Learnt.Took {
		e.Total = max(e.Total, time.Duration(t.Whole)*time.Second)
		e.AfterFirstTouch = max(e.AfterFirstTouch, time.Duration(t.Rest)*time.Second)
	}
	// If a user has changed the target of a running change, it has touched a GPU before its last fence.
	e.Total = max(e.Total, e.AfterFirstTouch)
	return e
}

// remaining returns how long the opening lasts from then on.
func remaining(o window.Opening, from time.Time) time.Duration {
	if o.End.IsZero() {
		return forever
	}
	return o.End.Sub(from)
}

const forever = 1<<63 - 1

// zone returns the time zone of the opening.
func zone(o window.Opening) *time.Location {
	if o.Zone == nil {
		return time.UTC
	}
	return o.Zone
}

// Latest returns the later of the two times.
func Latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
