package window

import (
	"slices"
	"time"
)

// interval is one time when a window is open. A zero start or end means that it has none.
type interval struct{ start, end time.Time }

func (i interval) contains(t time.Time) bool {
	return !t.Before(i.start) && (i.end.IsZero() || t.Before(i.end))
}

func (w Window) zone() *time.Location {
	if w.Zone == nil {
		return time.UTC
	}
	return w.Zone
}

func (w Window) contains(t time.Time) bool {
	i, ok := w.upTo(t)
	return ok && i.contains(t)
}

// upTo returns the last interval of the window that starts at or before t.
func (w Window) upTo(t time.Time) (interval, bool) {
	bounds := w.bounds()
	switch {
	case bounds.end.IsZero():
	case !bounds.start.Before(bounds.end):
		return interval{}, false
	case !t.Before(bounds.end):
		t = bounds.end.Add(-tick)
	}
	switch {
	case t.Before(bounds.start):
		return interval{}, false
	case len(w.Days) == 0:
		return bounds, true
	}
	start, ok := w.startUpTo(t)
	if !ok {
		return interval{}, false
	}
	i := w.from(start)
	return i, i.start.Before(i.end)
}

// after returns the first interval of the window that starts after t.
func (w Window) after(t time.Time) (interval, bool) {
	bounds := w.bounds()
	if t.Before(bounds.start) {
		// A weekly opening that began before NotBefore starts at NotBefore.
		if i, ok := w.upTo(bounds.start); ok && i.contains(bounds.start) {
			return i, true
		}
		t = bounds.start
	}
	if len(w.Days) == 0 {
		return interval{}, false
	}
	start, ok := w.startAfter(t)
	if !ok {
		return interval{}, false
	}
	i := w.from(start)
	return i, i.start.Before(i.end)
}

// bounds are NotBefore and NotAfter.
func (w Window) bounds() interval {
	b := interval{start: w.NotBefore, end: w.NotAfter}
	if !b.start.IsZero() {
		b.start = wall(b.start)
	}
	if !b.end.IsZero() {
		b.end = wall(b.end)
	}
	return b
}

// from returns the interval of a start, within the bounds.
func (w Window) from(start time.Time) interval {
	i, bounds := interval{start: start, end: start.Add(w.Duration)}, w.bounds()
	if i.start.Before(bounds.start) {
		i.start = bounds.start
	}
	if !bounds.end.IsZero() && i.end.After(bounds.end) {
		i.end = bounds.end
	}
	return i
}

// maxDays bounds the dates of the starts next to an instant: a week, since a window opens weekly, and two days more. Clocks may skip the time of a
// start, and after a time that they show twice they may show an earlier date.
const maxDays = 7 + 2

// startUpTo returns the last start of a weekly window at or before t.
func (w Window) startUpTo(t time.Time) (time.Time, bool) {
	c, midnight := clock{zone: w.zone()}, midnight(t, w.zone())
	c.load(midnight.Add(-maxDays*day - maxOffset)) // usually one offset serves for all dates
	for d := 2; d >= -maxDays; d-- {
		date := midnight.Add(time.Duration(d) * day)
		if !slices.Contains(w.Days, date.Weekday()) {
			continue
		}
		if start := c.first(date.Add(w.Start)); !start.After(t) {
			return start, true
		}
	}
	return time.Time{}, false
}

// startAfter returns the first start of a weekly window after t.
func (w Window) startAfter(t time.Time) (time.Time, bool) {
	c, midnight := clock{zone: w.zone()}, midnight(t, w.zone())
	for d := -2; d <= maxDays; d++ {
		date := midnight.Add(time.Duration(d) * day)
		if !slices.Contains(w.Days, date.Weekday()) {
			continue
		}
		if start := c.first(date.Add(w.Start)); start.After(t) {
			return start, true
		}
	}
	return time.Time{}, false
}

// midnight returns the date that clocks in the zone show, at midnight. Like all dates and times of day here it is in UTC, as if there were no zones.
func midnight(t time.Time, zone *time.Location) time.Time {
	year, month, day := t.In(zone).Date()
	return time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
}

// clock finds the instants when clocks in a zone show a date and time of day.
type clock struct {
	zone *time.Location

	// The zone's offset from UTC between these two instants, as load found it; without an end if to is zero.
	from, to time.Time
	offset   time.Duration
}

// maxOffset is more than clocks were ever ahead of UTC: 16 hours, before there were zones.
const maxOffset = day

// first returns the first instant when clocks show a date and time of day, or a later one. time.Date does not. Around a clock change it uses the
// offset before or after it, and not always the same.
func (c *clock) first(shown time.Time) time.Time {
	for t := shown.Add(-maxOffset); ; t = c.to {
		c.load(t)
		start := shown.Add(-c.offset)
		if start.Before(t) {
			start = t // clocks were set forward past it
		}
		if c.to.IsZero() || start.Before(c.to) {
			return start
		}
	}
}

// load looks up the zone's offset at t.
func (c *clock) load(t time.Time) {
	if !c.from.IsZero() && !t.Before(c.from) && (c.to.IsZero() || t.Before(c.to)) {
		return
	}
	local := t.In(c.zone)
	_, seconds := local.Zone()
	c.from, c.offset = t, time.Duration(seconds)*time.Second
	c.to, _ = changeAfter(local)
}

// changeAfter returns the next instant when the offset of t's zone may change.
func changeAfter(t time.Time) (time.Time, bool) {
	_, end := t.ZoneBounds()
	if end.IsZero() {
		return time.Time{}, false
	}
	if !end.After(t) {
		// After the last rule's last change ZoneBounds returns the 365th day of the year, also in a leap year.
		end = time.Date(t.UTC().Year()+1, time.January, 1, 0, 0, 0, 0, time.UTC)
	}
	return end.UTC(), true
}

// changeUpTo returns the last instant at or before t when the offset of its zone may have changed.
func changeUpTo(t time.Time) (time.Time, bool) {
	start, _ := t.ZoneBounds()
	if start.IsZero() {
		return time.Time{}, false
	}
	// If the rule for future years begins in the middle of a year, ZoneBounds returns the start of that year, and the offset may have changed since.
	for {
		next, ok := changeAfter(start)
		if !ok || next.After(t) {
			return start.UTC(), true
		}
		start = next.In(t.Location())
	}
}
