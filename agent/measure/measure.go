// Package measure takes the time of changes, by which the length of the next ones is estimated.
package measure

import (
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
)

// kept is how many changes the estimate is made by.
const kept = 5

// Change has the moments of the change that is under way. What another process saw of it is not known.
type Change struct {
	touchedAt time.Time // when it first touched a GPU
	provenAt  time.Time // when it was first seen to be done
}

// Forget drops both: the change is over, another begins, or the clock was set.
func (c *Change) Forget(time.Time) { *c = Change{} }

// Touches notes that a GPU is touched now, if none was before.
func (c *Change) Touches(now time.Time) {
	if c.touchedAt.IsZero() {
		c.touchedAt = now
	}
}

// IsProven notes that the change is done now, unless it was done before: what others keep the node for after that is no time that the change takes.
func (c *Change) IsProven(now time.Time) {
	if c.provenAt.IsZero() {
		c.provenAt = now
	}
}

// With adds the change, which started then and ends now, to those before it. How long one took that another process has begun to carry out is not
// known.
func (c *Change) With(before []api.Took, started time.Time) []api.Took {
	if c.touchedAt.IsZero() {
		return before
	}
	t := api.Took{Whole: seconds(c.provenAt.Sub(started)), Rest: seconds(c.provenAt.Sub(c.touchedAt))}
	all := append(slices.Clone(before), t)
	return all[max(0, len(all)-kept):]
}

// seconds rounds up.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
