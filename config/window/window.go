// Package window says when changes may disturb a node: weekly windows in any time zone, one-off windows, and freezes.
//
// It reads no clock: callers pass the time. Times of day are local: a window that opens at 22:00 does so in summer and in winter. Lengths are elapsed
// time: six hours are never five. Every interval contains its start and not its end.
package window

import (
	"time"
	_ "time/tzdata" // the image has no zones, and without them time.LoadLocation would refuse all but UTC
)

// Window is one entry of a schedule. It is open for Duration from each Start on Days, within NotBefore and NotAfter if these are set. Without Days it
// is open once, from NotBefore to NotAfter.
//
// It opens at the first instant when clocks in Zone show Start, or a later time, on a day of Days. If clocks are set forward past Start, it opens at
// that instant, even if they then show the next day. If they show Start twice, it opens at the first.
//
// The tags are those of package config, which reads windows from files.
type Window struct {
	// The days when it opens.
	Days []time.Weekday `json:"days" alone:"a day" empty:"has no day, so that the window would never open: write at least one, like Fri"`
	// When it opens, as clocks in the time zone show it. In quotes: some read 22:00 as a number.
	Start time.Duration `json:"start" form:"timeOfDay"`
	// How long it is open, up to a week.
	Duration time.Duration `json:"duration" within:"1m,168h"` // elapsed time; a shorter one is most likely a slip, "30s" for "30m"; a longer one overlaps itself
	// A name of the IANA time zone database, like Europe/Berlin. UTC if left out.
	Zone *time.Location `json:"timeZone"` // nil for UTC
	// It is not open before.
	NotBefore time.Time `json:"notBefore"` // zero for no bound; an opening cut at it starts there
	// It is not open from then on.
	NotAfter time.Time `json:"notAfter"`
}

// Freeze is a time when no window is open.
type Freeze struct {
	From time.Time `json:"from" jsonschema:"required" missing:"is missing: write a date with its time and zone, like \"2026-12-20T22:00:00Z\""`
	To   time.Time `json:"to" jsonschema:"required" missing:"is missing: write a date with its time and zone, like \"2026-12-20T22:00:00Z\""`
	// For users.
	Reason string `json:"reason"`
}

// Schedule says when changes of a node may begin. The zero Schedule is always open.
type Schedule struct {
	Windows []Window // none is always
	Freezes []Freeze
}

// Opening is a time when a Schedule is open without a break. Windows that overlap or touch are one, and freezes are cut out of it.
type Opening struct {
	Start, End time.Time      // in UTC; the zero time for no beginning, or no end
	Zone       *time.Location // of the window that it begins with
}

// Lasts reports whether the opening is at least so long.
func (o Opening) Lasts(least time.Duration) bool {
	return o.Start.IsZero() || o.End.IsZero() || o.End.Sub(o.Start) >= least
}
