package window

import (
	"slices"
	"time"
)

// horizon bounds the search after the last date of the schedule. From there on weeks differ only by clock changes, which fall on other dates each
// year: an opening that is not within three years never is.
const horizon = 3 * 366 * day

// tick is the resolution of time: the instant before an interval's start is a tick earlier.
const tick = time.Nanosecond

// Always reports whether the schedule is open at any time.
func (s Schedule) Always() bool { return len(s.Windows) == 0 && len(s.Freezes) == 0 }

// Contains reports whether the schedule is open at an instant.
func (s Schedule) Contains(t time.Time) bool { return s.open(wall(t)) }

// At returns the opening that contains an instant.
func (s Schedule) At(t time.Time) (Opening, bool) {
	t = wall(t)
	if !s.open(t) {
		return Opening{}, false
	}
	o := Opening{Zone: s.zone(t)}
	if start, ok := s.last(t); ok {
		o.Start, o.Zone = start, s.zone(start)
	}
	if end, ok := s.next(t); ok {
		o.End = end
	}
	return o, true
}

// Next returns the first opening that starts after an instant and is at least so long.
func (s Schedule) Next(t time.Time, least time.Duration) (Opening, bool) {
	t = wall(t)
	limit := s.lastDate(t).Add(horizon)
	for weeks := s.weeksAfter(t, limit); t.Before(limit); {
		o, ok := s.startingAfter(t)
		if !ok || o.Lasts(least) {
			return o, ok
		}
		t = o.End
		if end, ok := weeks.skippable(t); ok {
			// Every further opening that ends within these weeks is as long as an earlier one. One that continues after them may be longer.
			t = end.Add(-tick)
			if o, ok := s.At(t); ok {
				if o.Lasts(least) {
					return o, true
				}
				t = o.End
			}
		}
		if !t.Before(weeks.end) {
			weeks = s.weeksAfter(t, limit)
		}
	}
	return Opening{}, false
}

// startingAfter returns the first opening that starts after an instant.
func (s Schedule) startingAfter(t time.Time) (Opening, bool) {
	start, ok := s.next(t)
	if ok && !s.open(start) {
		start, ok = s.next(start)
	}
	if !ok {
		return Opening{}, false
	}
	o := Opening{Start: start, Zone: s.zone(start)}
	if end, ok := s.next(start); ok {
		o.End = end
	}
	return o, true
}

// Prev returns the last opening that ended at or before an instant.
func (s Schedule) Prev(t time.Time) (Opening, bool) {
	t = wall(t)
	if s.open(t) {
		start, ok := s.last(t)
		if !ok {
			return Opening{}, false
		}
		t = start.Add(-tick)
	}
	end, ok := s.last(t)
	if !ok {
		return Opening{}, false
	}
	return s.At(end.Add(-tick))
}

// wall drops the monotonic clock reading that time.Now adds: windows follow the wall clock, also when an administrator sets it.
func wall(t time.Time) time.Time { return t.Round(0).UTC() }

func (s Schedule) open(t time.Time) bool {
	_, frozen := s.freeze(t)
	return !frozen && s.covered(t)
}

// covered reports whether a window contains an instant, freezes aside.
func (s Schedule) covered(t time.Time) bool {
	return len(s.Windows) == 0 || slices.ContainsFunc(s.Windows, func(w Window) bool { return w.contains(t) })
}

// freeze finds a freeze that contains an instant.
func (s Schedule) freeze(t time.Time) (Freeze, bool) {
	i := slices.IndexFunc(s.Freezes, func(f Freeze) bool { return !t.Before(f.From) && t.Before(f.To) })
	if i < 0 {
		return Freeze{}, false
	}
	return s.Freezes[i], true
}

// zone returns the zone of the first window that contains an instant.
func (s Schedule) zone(t time.Time) *time.Location {
	for _, w := range s.Windows {
		if w.contains(t) {
			return w.zone()
		}
	}
	return time.UTC
}

// next returns the first instant after t when the schedule opens or closes.
func (s Schedule) next(t time.Time) (time.Time, bool) {
	if s.open(t) {
		end, ends := s.coveredUntil(t)
		for _, f := range s.Freezes {
			if f.From.After(t) && f.From.Before(f.To) && (!ends || f.From.Before(end)) {
				end, ends = wall(f.From), true
			}
		}
		return end, ends
	}
	for {
		if f, frozen := s.freeze(t); frozen {
			t = wall(f.To)
		} else {
			start, ok := s.windowAfter(t)
			if !ok {
				return time.Time{}, false
			}
			t = start
		}
		if s.open(t) {
			return t, true
		}
	}
}

// last returns the last instant at or before t when the schedule opened or closed.
func (s Schedule) last(t time.Time) (time.Time, bool) {
	if s.open(t) {
		start, starts := s.coveredSince(t)
		for _, f := range s.Freezes {
			if !f.To.After(t) && f.From.Before(f.To) && (!starts || f.To.After(start)) {
				start, starts = wall(f.To), true
			}
		}
		return start, starts
	}
	for {
		if f, frozen := s.freeze(t); frozen {
			t = wall(f.From).Add(-tick)
		} else {
			end, ok := s.windowBefore(t)
			if !ok {
				return time.Time{}, false
			}
			t = end.Add(-tick)
		}
		if s.open(t) {
			return t.Add(tick), true
		}
	}
}

// windowAfter returns the next opening of a window after an instant outside of all windows.
func (s Schedule) windowAfter(t time.Time) (first time.Time, found bool) {
	for _, w := range s.Windows {
		if i, ok := w.after(t); ok && (!found || i.start.Before(first)) {
			first, found = i.start, true
		}
	}
	return first, found
}

// windowBefore returns the last closing of a window before an instant outside of all windows.
func (s Schedule) windowBefore(t time.Time) (last time.Time, found bool) {
	for _, w := range s.Windows {
		if i, ok := w.upTo(t); ok && (!found || i.end.After(last)) {
			last, found = i.end, true
		}
	}
	return last, found
}

// coveredUntil returns the end of the windows around t that overlap or touch.
func (s Schedule) coveredUntil(t time.Time) (end time.Time, ends bool) {
	if len(s.Windows) == 0 {
		return time.Time{}, false
	}
	limit := s.lastDate(t).Add(horizon)
	for weeks := s.weeksAfter(t, limit); t.Before(limit); {
		until := t
		for _, w := range s.Windows {
			i, ok := w.upTo(t)
			if !ok || !i.contains(t) {
				continue
			}
			if i.end.IsZero() {
				return time.Time{}, false
			}
			if i.end.After(until) {
				until = i.end
			}
		}
		if until.Equal(t) {
			return t, true
		}
		t = until
		if end, ok := weeks.skippable(t); ok {
			t = end.Add(-tick)
		}
		if !t.Before(weeks.end) {
			weeks = s.weeksAfter(t, limit)
		}
	}
	return time.Time{}, false
}

// coveredSince returns the start of the windows around t that overlap or touch.
func (s Schedule) coveredSince(t time.Time) (start time.Time, starts bool) {
	if len(s.Windows) == 0 {
		return time.Time{}, false
	}
	limit := s.firstDate(t).Add(-horizon)
	for weeks := s.weeksBefore(t, limit); t.After(limit); {
		since := t.Add(tick)
		for _, w := range s.Windows {
			i, ok := w.upTo(t)
			if !ok || !i.contains(t) {
				continue
			}
			if i.start.IsZero() {
				return time.Time{}, false
			}
			if i.start.Before(since) {
				since = i.start
			}
		}
		if since.After(t) {
			return since, true
		}
		t = since.Add(-tick)
		if start, ok := weeks.skippableBefore(t); ok {
			t = start
		}
		if t.Before(weeks.start) {
			weeks = s.weeksBefore(t, limit)
		}
	}
	return time.Time{}, false
}
