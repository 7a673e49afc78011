package window

import (
	"slices"
	"time"
)

// interval is one time at which a window is open. A zero start or end is none.
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

// upTo is the last interval of the window that starts at or before t.
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

// after is the first interval of the window that starts after t.
func (w Window) after(t time.Time) (interval, bool) {
	bounds := w.bounds()
	if t.Before(bounds.start) {
		// The window may be open already where it is first allowed to be.
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

// from is the interval of a start, within the bounds.
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

// A start is on its own date as clocks show it, or on the next where they skip it; and after a time that clocks show twice they
// may show the date before that of the last start. So dates are tried from a week and two days before to as many after.
const reach = 7 + 2

// startUpTo is the last start of a weekly window at or before t.
func (w Window) startUpTo(t time.Time) (time.Time, bool) {
	c, midnight := clock{zone: w.zone()}, midnight(t, w.zone())
	c.look(midnight.Add(-reach*day - westmost)) // which most often is all there is to look up
	for d := 2; d >= -reach; d-- {
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

// startAfter is the first start of a weekly window after t.
func (w Window) startAfter(t time.Time) (time.Time, bool) {
	c, midnight := clock{zone: w.zone()}, midnight(t, w.zone())
	for d := -2; d <= reach; d++ {
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

// midnight is the date that clocks show, with no time of day. Like all dates and times of day here it is in UTC, as if there
// were no zones.
func midnight(t time.Time, zone *time.Location) time.Time {
	year, month, day := t.In(zone).Date()
	return time.Date(year, month, day, 0, 0, 0, 0, time.UTC)
}

// clock finds out when clocks in a zone show what.
type clock struct {
	zone *time.Location

	// What was looked up last: the offset from UTC in that time, which has no end if that is zero.
	from, to time.Time
	offset   time.Duration
}

// westmost is more than clocks were ever ahead of UTC, 16 hours before there were zones.
const westmost = day

// first is the first instant at which clocks show a date and time of day, or a later one. time.Date does not say that: where
// clocks are put forward or back it gives an instant by the offset before or after, and not always by the same.
func (c *clock) first(shown time.Time) time.Time {
	for t := shown.Add(-westmost); ; t = c.to {
		c.look(t)
		start := shown.Add(-c.offset)
		if start.Before(t) {
			start = t // clocks were put forward past it
		}
		if c.to.IsZero() || start.Before(c.to) {
			return start
		}
	}
}

// look makes sure that what was looked up is about t.
func (c *clock) look(t time.Time) {
	if !c.from.IsZero() && !t.Before(c.from) && (c.to.IsZero() || t.Before(c.to)) {
		return
	}
	local := t.In(c.zone)
	_, seconds := local.Zone()
	c.from, c.offset = t, time.Duration(seconds)*time.Second
	c.to, _ = changeAfter(local)
}

// changeAfter is the next instant at which the offset of the zone of t may change.
func changeAfter(t time.Time) (time.Time, bool) {
	_, end := t.ZoneBounds()
	if end.IsZero() {
		return time.Time{}, false
	}
	if !end.After(t) {
		// After the last rule's last change, ZoneBounds gives the 365th day of the year, also in a year that has one more.
		end = time.Date(t.UTC().Year()+1, time.January, 1, 0, 0, 0, 0, time.UTC)
	}
	return end.UTC(), true
}

// changeUpTo is the last instant at or before t at which the offset of its zone may have changed.
func changeUpTo(t time.Time) (time.Time, bool) {
	start, _ := t.ZoneBounds()
	if start.IsZero() {
		return time.Time{}, false
	}
	// Where the rule for the years to come begins to count in the middle of one, ZoneBounds gives the start of that year, and
	// there may have been changes since.
	for {
		next, ok := changeAfter(start)
		if !ok || next.After(t) {
			return start.UTC(), true
		}
		start = next.In(t.Location())
	}
}
