// Package monotonic is the clock for waits and deadlines.
package monotonic

import (
	"time"

	"k8s.io/utils/clock"
)

// StepNoticed is how far the host's clock may run apart from elapsed time before that counts as a step of it.
const StepNoticed = 2 * time.Second

// Clock is the clock for waits and deadlines. Its time is the time of day at which it was set, plus the elapsed time since. So a step of the
// host's clock in the middle of a change lets no deadline pass, and delays none. Only windows follow the time of day itself.
type Clock struct {
	clock.WithTicker // the host's
	set              time.Time
}

// New makes a Clock that starts with the host's time.
func New(host clock.WithTicker) *Clock { return &Clock{WithTicker: host, set: host.Now()} }

// Now returns the time without the steps since the clock was set.
func (c *Clock) Now() time.Time { return c.set.Round(0).Add(c.WithTicker.Since(c.set)) }

// Stamp returns Now as annotations hold it: in UTC, to the second.
func (c *Clock) Stamp() time.Time { return c.Now().UTC().Truncate(time.Second) }

// Since returns the time between then and Now.
func (c *Clock) Since(then time.Time) time.Duration { return c.Now().Sub(then) }

// Step sets the clock by the host's clock again, and returns the step that the host's clock has made since; 0 if it has made none.
func (c *Clock) Step() time.Duration {
	by := c.WithTicker.Now().Round(0).Sub(c.Now())
	if by.Abs() < StepNoticed {
		return 0
	}
	c.set = c.WithTicker.Now()
	return by
}
