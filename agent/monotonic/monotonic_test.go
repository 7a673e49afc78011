package monotonic_test

import (
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/monotonic"
)

// hostClock is the clock of a host, as Go reads it: its time of day can be set, while the time that has elapsed goes on.
type hostClock struct {
	*clocktesting.FakeClock

	by   time.Duration           // by which a user has set the time of day
	read map[time.Time]time.Time // when each time of day was read, by the time that has elapsed
}

func (c *hostClock) Now() time.Time {
	now := c.FakeClock.Now().Add(c.by)
	c.read[now] = c.FakeClock.Now()
	return now
}

func (c *hostClock) Since(then time.Time) time.Duration { return c.FakeClock.Since(c.read[then]) }

// Promise 14: no deadline passes, and none is put off, because the host's time of day is set.
func TestTheTimeGoesOnWhereTheHostsClockIsSet(t *testing.T) {
	t.Parallel()
	began := time.Date(2026, 3, 1, 12, 0, 0, 7, time.FixedZone("", 3600))
	const elapsed = time.Hour + 300*time.Millisecond
	for name, row := range map[string]struct {
		by      time.Duration
		noticed time.Duration // what Step returns, and the clock goes by then
	}{
		"not set":                         {0, 0},
		"set on by a day":                 {24 * time.Hour, 24 * time.Hour},
		"set back by a day":               {-24 * time.Hour, -24 * time.Hour},
		"set on by what counts":           {monotonic.StepNoticed, monotonic.StepNoticed},
		"set back by what counts":         {-monotonic.StepNoticed, -monotonic.StepNoticed},
		"drawn on by what does not yet":   {monotonic.StepNoticed - 1, 0},
		"drawn back by what does not yet": {1 - monotonic.StepNoticed, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			host := &hostClock{FakeClock: clocktesting.NewFakeClock(began), read: map[time.Time]time.Time{}}
			c := monotonic.New(host)
			host.Step(elapsed)
			host.by = row.by
			if got, want := c.Now(), began.Add(elapsed); !got.Equal(want) {
				t.Errorf("it is %s, want %s", got, want)
			}
			if got := c.Since(began); got != elapsed {
				t.Errorf("%s have passed, want %s", got, elapsed)
			}
			if got, want := c.Stamp(), time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC); got != want { // an hour later, in UTC
				t.Errorf("the stamp is %s, want %s", got, want)
			}
			if got := c.Step(); got != row.noticed {
				t.Errorf("a step of %s, want %s", got, row.noticed)
			}
			if got, want := c.Now(), began.Add(elapsed+row.noticed); !got.Equal(want) {
				t.Errorf("after the step it is %s, want %s", got, want)
			}
			if got := c.Step(); got != 0 {
				t.Errorf("the same step is noticed twice: %s", got)
			}
		})
	}
}
