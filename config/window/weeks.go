package window

import "time"

const (
	day  = 24 * time.Hour
	week = 7 * day
)

// weeks is a time when each week is like the one before. Except at its start, no clock of a window's zone changes in it, and it has no date of the
// schedule. A search that has seen one of its weeks may skip the rest.
type weeks struct {
	start, end time.Time
	overhang   time.Duration // how long after the start a clock change there still matters
	from       time.Time     // start of the search
}

// skippable reports whether the search has seen a whole week on the way to t, and returns the end, where it may continue.
func (w weeks) skippable(t time.Time) (time.Time, bool) {
	return w.end, !t.Before(w.from.Add(w.overhang+week)) && t.Before(w.end)
}

// skippableBefore is skippable for a search into the past. It returns the first instant after which each week is like the next.
func (w weeks) skippableBefore(t time.Time) (time.Time, bool) {
	first := w.start.Add(w.overhang)
	return first, !t.After(w.from.Add(-week)) && t.After(first)
}

// weeksAfter returns the weeks from t on. They end at the limit at the latest.
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
	return weeks{start: t, end: end, overhang: s.overhang(), from: t}
}

// weeksBefore returns the weeks up to t. They start at the limit at the earliest.
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
	return weeks{start: start, end: t, overhang: s.overhang(), from: t}
}

// overhang is the length of the longest window, plus twice the most that clocks were ever set back.
func (s Schedule) overhang() time.Duration {
	longest := 2 * day
	for _, w := range s.Windows {
		longest = max(longest, 2*day+w.Duration)
	}
	return longest
}

// dates lists all dates of the schedule.
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

// lastDate returns t, or the last date of the schedule if that is later.
func (s Schedule) lastDate(t time.Time) time.Time {
	for _, date := range s.dates() {
		if date.After(t) {
			t = date
		}
	}
	return t
}

// firstDate returns t, or the first date of the schedule if that is earlier.
func (s Schedule) firstDate(t time.Time) time.Time {
	for _, date := range s.dates() {
		if date.Before(t) {
			t = date
		}
	}
	return t
}
