package window

import "time"

const (
	day  = 24 * time.Hour
	week = 7 * day
)

// weeks is a time in which each week is like the one before: no clock of a window's zone changes in it, and no date that is
// written falls into it, but at its start. What a week of it has shown need not be looked for in the rest.
type weeks struct {
	start, end time.Time
	settled    time.Duration // how long after the start the change of clocks there still makes a difference
	from       time.Time     // where looking began
}

// passedOver reports whether a whole week has been looked at on the way to t, and gives the end of the weeks, up to which
// nothing else comes.
func (w weeks) passedOver(t time.Time) (time.Time, bool) {
	return w.end, !t.Before(w.from.Add(w.settled+week)) && t.Before(w.end)
}

// passedOverBackwards is passedOver for who looks into the past. It gives the first instant from which on each week is
// like the next.
func (w weeks) passedOverBackwards(t time.Time) (time.Time, bool) {
	first := w.start.Add(w.settled)
	return first, !t.After(w.from.Add(-week)) && t.After(first)
}

// weeksAfter are those from t on. They end at the limit at the latest.
func (s Schedule) weeksAfter(t, limit time.Time) weeks {
	end := limit
	for _, date := range s.dates() {
		if date.After(t) && date.Before(end) {
			end = date
		}
	}
	for _, w := range s.Windows {
		if len(w.Days) == 0 {
			continue
		}
		if change, ok := changeAfter(t.In(w.zone())); ok && change.Before(end) {
			end = change
		}
	}
	return weeks{start: t, end: end, settled: s.settled(), from: t}
}

// weeksBefore are those up to t. They start at the limit at the earliest.
func (s Schedule) weeksBefore(t, limit time.Time) weeks {
	start := limit
	for _, date := range s.dates() {
		if !date.After(t) && date.After(start) {
			start = date
		}
	}
	for _, w := range s.Windows {
		if len(w.Days) == 0 {
			continue
		}
		if change, ok := changeUpTo(t.In(w.zone())); ok && change.After(start) {
			start = change
		}
	}
	return weeks{start: start, end: t, settled: s.settled(), from: t}
}

// settled is the longest window, and the longest that clocks were ever put back, twice over.
func (s Schedule) settled() time.Duration {
	longest := 2 * day
	for _, w := range s.Windows {
		longest = max(longest, 2*day+w.Duration)
	}
	return longest
}

// dates are all that are written.
func (s Schedule) dates() []time.Time {
	var all []time.Time
	for _, w := range s.Windows {
		for _, bound := range []time.Time{w.NotBefore, w.NotAfter} {
			if !bound.IsZero() {
				all = append(all, bound)
			}
		}
	}
	for _, f := range s.Freezes {
		all = append(all, f.From, f.To)
	}
	return all
}

// lastDate is t, or the last date that is written if that is later.
func (s Schedule) lastDate(t time.Time) time.Time {
	for _, date := range s.dates() {
		if date.After(t) {
			t = date
		}
	}
	return t
}

// firstDate is t, or the first date that is written if that is earlier.
func (s Schedule) firstDate(t time.Time) time.Time {
	for _, date := range s.dates() {
		if date.Before(t) {
			t = date
		}
	}
	return t
}
