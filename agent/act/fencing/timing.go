package fencing

import (
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/state/journal"
)

// mostTook is how many changes count for the estimate.
const mostTook = 5

// Timing has the moments of the change that is under way, as far as this process has seen it.
type Timing struct {
	touchedAt time.Time // when it first touched a GPU
	provenAt  time.Time // when the agent first saw that it is done
}

// Forget drops both: the change is over, another begins, or the clock was set.
func (c *Timing) Forget(time.Time) { *c = Timing{} }

// NoteTouched notes that the change touches its first GPU now. Later calls do nothing.
func (c *Timing) NoteTouched(now time.Time) {
	if c.touchedAt.IsZero() {
		c.touchedAt = now
	}
}

// NoteProven notes that the change is done now. Later calls do nothing: the time for which other tools keep the node after that does not count.
func (c *Timing) NoteProven(now time.Time) {
	if c.provenAt.IsZero() {
		c.provenAt = now
	}
}

// With adds the change, which started then and ends now, to those before it. It leaves out a change if another process has touched
// its GPUs first: how long that took is not known.
func (c *Timing) With(before []journal.Took, started time.Time) []journal.Took {
	if c.touchedAt.IsZero() {
		return before
	}
	t := journal.Took{Whole: seconds(c.provenAt.Sub(started)), Rest: seconds(c.provenAt.Sub(c.touchedAt))}
	all := append(slices.Clone(before), t)
	return all[max(0, len(all)-mostTook):]
}

// seconds rounds up.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
