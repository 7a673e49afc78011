package window_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/window"
)

// FuzzSchedule makes schedules of several windows and freezes, and holds what they say of openings against what they say of
// each quarter of an hour.
func FuzzSchedule(f *testing.F) {
	for seed := range uint64(30) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 0))
		from := instant(t, "2026-03-01T00:00:00Z").Add(time.Duration(r.IntN(360)) * day)
		s := anySchedule(t, r, from)
		to := from.Add(25 * day)
		want := seen(s, from, to)
		got := openings(t, s, from, to)
		if n := len(want); n > 0 && want[n-1].End.IsZero() && len(got) == n {
			want[n-1].End = got[n-1].End // later than was looked
		}
		if diff := cmp.Diff(want, got, withoutZone); diff != "" {
			t.Errorf("openings of %+v from %s (-want +got):\n%s", s, from, diff)
		}
	})
}

// quarter divides whatever clocks are put forward or back by, and what zones are off UTC.
const quarter = 15 * time.Minute

// anySchedule has edges at whole quarters of an hour, and its dates in the 25 days from an instant.
func anySchedule(t *testing.T, r *rand.Rand, from time.Time) (s window.Schedule) {
	t.Helper()
	zones := []string{"Europe/Berlin", newYork, lordHowe, "UTC", "Africa/Cairo", "Asia/Kathmandu"}
	at := func() time.Time { return from.Add(time.Duration(r.IntN(25*96)) * quarter) }
	for range 1 + r.IntN(4) {
		w := window.Window{
			Start: time.Duration(r.IntN(96)) * quarter, Duration: time.Duration(1+r.IntN(150)) * quarter, Zone: located(t, zones[r.IntN(len(zones))]),
		}
		for _, d := range everyDay {
			if r.IntN(3) > 0 {
				w.Days = append(w.Days, d)
			}
		}
		if r.IntN(4) == 0 {
			w.NotBefore = at()
		}
		if r.IntN(4) == 0 {
			w.NotAfter = at()
		}
		s.Windows = append(s.Windows, w)
	}
	for range r.IntN(4) {
		s.Freezes = append(s.Freezes, window.Freeze{From: at(), To: at()})
	}
	return s
}

// seen are the openings that start within a time, as Contains says at each quarter of an hour.
func seen(s window.Schedule, from, to time.Time) (all []window.Opening) {
	for at, before := from.Add(quarter), s.Contains(from); at.Before(to); at = at.Add(quarter) {
		open := s.Contains(at)
		switch {
		case open && !before:
			all = append(all, window.Opening{Start: at})
		case before && !open && len(all) > 0:
			all[len(all)-1].End = at
		}
		before = open
	}
	return all
}

// The agent asks at each pass, several times.
func BenchmarkSchedule(b *testing.B) {
	zones := []string{"Europe/Berlin", newYork, lordHowe, "UTC"}
	many := func(duration time.Duration, days ...time.Weekday) (s window.Schedule) {
		for i := range 20 {
			s.Windows = append(s.Windows, weekly(b, zones[i%len(zones)], "22:00", duration+time.Duration(i)*time.Minute, days...))
		}
		return s
	}
	at := instant(b, "2026-06-05T12:00:00Z")
	for name, s := range map[string]window.Schedule{
		"one window":                {Windows: []window.Window{weekly(b, "Europe/Berlin", "22:00", 6*hour, time.Friday, time.Saturday)}},
		"20 windows":                many(6*hour, time.Friday, time.Saturday),
		"20 windows of a week each": many(7*day-hour, time.Friday),
		"20 that are always open":   many(25*hour, everyDay...),
	} {
		b.Run(name+"/Contains", func(b *testing.B) {
			for b.Loop() {
				s.Contains(at)
			}
		})
		b.Run(name+"/At", func(b *testing.B) {
			for b.Loop() {
				s.At(at)
			}
		})
		b.Run(name+"/Next", func(b *testing.B) {
			for b.Loop() {
				s.Next(at, hour)
			}
		})
		b.Run(name+"/Next that never comes", func(b *testing.B) {
			for b.Loop() {
				s.Next(at, 100*day)
			}
		})
		b.Run(name+"/Prev", func(b *testing.B) {
			for b.Loop() {
				s.Prev(at)
			}
		})
		b.Run(name+"/Edge", func(b *testing.B) {
			for b.Loop() {
				s.Edge(at)
			}
		})
	}
}
