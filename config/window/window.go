// Package window says when a node may be disturbed: weekly windows in any time zone, one-off windows, and freezes.
//
// It reads no clock: callers pass the time. Times of day are those that clocks in the zone show, so
// that a window that opens at 22:00 does so in summer and in winter; lengths are elapsed time, so that one of six hours is
// never five. Every interval contains its start and not its end.
package window

import (
	"time"
	_ "time/tzdata" // the image has no zones, and without them time.LoadLocation would refuse all but UTC
)

// Window is one entry of a schedule. It is open for Duration from each Start on Days, within
// NotBefore and NotAfter where these are set. Without Days it is open from NotBefore to NotAfter, once.
//
// It opens at the first instant at which clocks in Zone show Start, or a later time, on a day of Days: where clocks are put
// forward past Start, at the instant at which they are, even if they then show the next day; where they show Start twice,
// at the first.
type Window struct {
	Days     []time.Weekday
	Start    time.Duration  // since midnight as clocks show it, less than 24 h
	Duration time.Duration  // elapsed time
	Zone     *time.Location // nil for UTC

	NotBefore, NotAfter time.Time // zero for no bound; an opening that is cut at NotBefore starts there
}

// Freeze is a time in which nothing is open.
type Freeze struct {
	From, To time.Time
	Reason   string // for users; may be empty
}

// Schedule says when changes of a node may begin. The zero Schedule is always open.
type Schedule struct {
	Windows []Window // none is always
	Freezes []Freeze
}

// Opening is a time in which a Schedule is open without a break: windows that overlap or touch are one, and freezes are cut
// out of it.
type Opening struct {
	Start, End time.Time      // in UTC; the zero time where it has no beginning, or no end
	Zone       *time.Location // of the window that it begins with
}

// Lasts reports whether the opening is at least so long.
func (o Opening) Lasts(least time.Duration) bool {
	return o.Start.IsZero() || o.End.IsZero() || o.End.Sub(o.Start) >= least
}
