package window_test

import (
	"go/build"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/window"
)

// weekly is a window that opens at a time of day, "22:00".
func weekly(t testing.TB, zone, start string, duration time.Duration, days ...time.Weekday) window.Window {
	t.Helper()
	clock, err := time.Parse("15:04", start)
	if err != nil {
		t.Fatal(err)
	}
	return window.Window{
		Days: days, Start: time.Duration(clock.Hour())*time.Hour + time.Duration(clock.Minute())*time.Minute, Duration: duration, Zone: located(t, zone),
	}
}

func located(t testing.TB, zone string) *time.Location {
	t.Helper()
	location, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	return location
}

func instant(t testing.TB, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.Fatal(err)
	}
	return at.UTC()
}

var everyDay = []time.Weekday{
	time.Sunday, time.Monday, time.Tuesday, time.Wednesday, time.Thursday, time.Friday, time.Saturday,
}

const (
	newYork  = "America/New_York"
	lordHowe = "Australia/Lord_Howe"
	hour     = time.Hour
	day      = 24 * hour
)

// TestOpenings has a row for each of the cases that windows go wrong in, under its number, and says all openings that begin
// within a time.
func TestOpenings(t *testing.T) {
	w := func(zone, start string, duration time.Duration, days ...time.Weekday) window.Window {
		return weekly(t, zone, start, duration, days...)
	}
	from := func(at, to string, in window.Window) window.Window {
		if at != "" {
			in.NotBefore = instant(t, at)
		}
		if to != "" {
			in.NotAfter = instant(t, to)
		}
		return in
	}
	freeze := func(from, to string) window.Freeze {
		return window.Freeze{From: instant(t, from), To: instant(t, to)}
	}
	type windows = []window.Window
	for _, test := range []struct {
		name     string
		windows  windows
		freezes  []window.Freeze
		from, to string
		want     []string // start and end, by turns
	}{
		{
			"1 a start that clocks skip is when they are put forward",
			windows{w(newYork, "02:30", hour, everyDay...)},
			nil,
			"2026-03-07T00:00:00Z", "2026-03-10T00:00:00Z",
			[]string{
				"2026-03-07T07:30:00Z", "2026-03-07T08:30:00Z",
				"2026-03-08T07:00:00Z", "2026-03-08T08:00:00Z",
				"2026-03-09T06:30:00Z", "2026-03-09T07:30:00Z",
			},
		},
		{
			"1 a start at the very instant of the gap",
			windows{w(newYork, "02:00", hour, time.Sunday)},
			nil,
			"2026-03-02T00:00:00Z", "2026-03-15T00:00:00Z",
			[]string{"2026-03-08T07:00:00Z", "2026-03-08T08:00:00Z"},
		},
		{
			"2 an end that clocks skip",
			windows{w(newYork, "01:00", 90*time.Minute, time.Sunday)},
			nil,
			"2026-03-02T00:00:00Z", "2026-03-15T00:00:00Z",
			[]string{"2026-03-08T06:00:00Z", "2026-03-08T07:30:00Z"},
		},
		{
			"2 a window over a gap is as long as any",
			windows{w(newYork, "22:00", 6*hour, time.Saturday)},
			nil,
			"2026-03-02T00:00:00Z", "2026-03-15T00:00:00Z",
			[]string{"2026-03-08T03:00:00Z", "2026-03-08T09:00:00Z"},
		},
		{
			"3 a start that clocks show twice is once, at the first",
			windows{w(newYork, "01:30", 10*time.Minute, time.Sunday)},
			nil,
			"2026-10-26T00:00:00Z", "2026-11-08T00:00:00Z",
			[]string{"2026-11-01T05:30:00Z", "2026-11-01T05:40:00Z"},
		},
		{
			"4 an end that clocks show twice",
			windows{w(newYork, "00:30", hour, time.Sunday)},
			nil,
			"2026-10-26T00:00:00Z", "2026-11-08T00:00:00Z",
			[]string{"2026-11-01T04:30:00Z", "2026-11-01T05:30:00Z"},
		},
		{
			"4 a window over both is as long as any",
			windows{w(newYork, "22:00", 6*hour, time.Saturday)},
			nil,
			"2026-10-26T00:00:00Z", "2026-11-07T00:00:00Z",
			[]string{"2026-11-01T02:00:00Z", "2026-11-01T08:00:00Z"},
		},
		{
			"5 a window belongs to the day that it starts on",
			windows{w("Europe/Berlin", "22:00", 6*hour, time.Friday)},
			nil,
			"2026-06-01T00:00:00Z", "2026-06-08T00:00:00Z",
			[]string{"2026-06-05T20:00:00Z", "2026-06-06T02:00:00Z"},
		},
		{
			"6 from Sunday to Monday",
			windows{w("UTC", "23:00", 2*hour, time.Sunday)},
			nil,
			"2026-06-01T02:00:00Z", "2026-06-08T12:00:00Z",
			[]string{"2026-06-07T23:00:00Z", "2026-06-08T01:00:00Z"},
		},
		{
			"7 a gap at midnight",
			windows{w("Africa/Cairo", "00:00", hour, everyDay...)},
			nil,
			"2026-04-22T12:00:00Z", "2026-04-25T12:00:00Z",
			[]string{
				"2026-04-22T22:00:00Z", "2026-04-22T23:00:00Z",
				"2026-04-23T22:00:00Z", "2026-04-23T23:00:00Z", // clocks go from Thursday 23:59 to Friday 01:00
				"2026-04-24T21:00:00Z", "2026-04-24T22:00:00Z",
			},
		},
		{
			"7 a gap from before midnight",
			windows{w("America/Nuuk", "23:30", hour, time.Saturday)},
			nil,
			"2024-03-30T12:00:00Z", "2024-04-05T00:00:00Z",
			[]string{"2024-03-31T01:00:00Z", "2024-03-31T02:00:00Z"}, // clocks go from Saturday 22:59 to Sunday 00:00
		},
		{
			"8 half an hour is skipped",
			windows{w(lordHowe, "02:15", hour, time.Sunday)},
			nil,
			"2026-09-28T00:00:00Z", "2026-10-10T00:00:00Z",
			[]string{"2026-10-03T15:30:00Z", "2026-10-03T16:30:00Z"},
		},
		{
			"8 half an hour is shown twice",
			windows{w(lordHowe, "01:45", hour, time.Sunday)},
			nil,
			"2026-03-30T00:00:00Z", "2026-04-10T00:00:00Z",
			[]string{"2026-04-04T14:45:00Z", "2026-04-04T15:45:00Z"},
		},
		{
			"9 zones without summer time, and a quarter of an hour off",
			windows{w("Asia/Kathmandu", "22:00", hour, time.Friday)},
			nil,
			"2026-06-01T00:00:00Z", "2026-06-08T00:00:00Z",
			[]string{"2026-06-05T16:15:00Z", "2026-06-05T17:15:00Z"},
		},
		{
			"9 both sides of the date line",
			windows{w("Pacific/Apia", "00:00", hour, time.Monday), w("Pacific/Pago_Pago", "23:00", hour, time.Monday)},
			nil,
			"2026-05-31T00:00:00Z", "2026-06-04T00:00:00Z",
			[]string{"2026-05-31T11:00:00Z", "2026-05-31T12:00:00Z", "2026-06-02T10:00:00Z", "2026-06-02T11:00:00Z"},
		},
		{
			"9 a day that Samoa never had begins and ends with the next",
			windows{w("Pacific/Apia", "22:00", hour, time.Friday), w("Pacific/Apia", "03:00", hour, time.Saturday)},
			nil,
			"2011-12-28T00:00:00Z", "2012-01-02T00:00:00Z",
			[]string{"2011-12-30T10:00:00Z", "2011-12-30T11:00:00Z", "2011-12-30T13:00:00Z", "2011-12-30T14:00:00Z"},
		},
		{
			"10 windows that overlap or touch are one",
			windows{
				w("UTC", "22:00", 3*hour, time.Friday), w("UTC", "00:30", hour, time.Saturday), w("UTC", "01:30", hour, time.Saturday), w("UTC", "02:31", hour, time.Saturday),
			},
			nil,
			"2026-06-01T00:00:00Z", "2026-06-08T00:00:00Z",
			[]string{"2026-06-05T22:00:00Z", "2026-06-06T02:30:00Z", "2026-06-06T02:31:00Z", "2026-06-06T03:31:00Z"},
		},
		{
			"10 a week from any day is always", windows{w("UTC", "10:00", 7*day, time.Wednesday)}, nil, "2026-06-01T00:00:00Z", "2026-12-01T00:00:00Z", nil,
		},
		{
			"10 a day of 24 hours on every day leaves one hour of the year",
			windows{w(newYork, "00:00", day, everyDay...)},
			nil,
			"2026-01-01T00:00:00Z", "2028-01-01T00:00:00Z",
			[]string{"2026-11-02T05:00:00Z", "2027-11-08T04:00:00Z", "2027-11-08T05:00:00Z", "2028-11-06T04:00:00Z"},
		},
		{
			"11 no time at all",
			windows{w("UTC", "10:00", 0, everyDay...), w("UTC", "10:00", -hour, everyDay...), from("2026-02-01T00:00:00Z", "2026-01-01T00:00:00Z", window.Window{})},
			nil, "2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z", nil,
		},
		{
			"12 a freeze within a window, and at its edges",
			windows{w("UTC", "10:00", 4*hour, everyDay...)},
			[]window.Freeze{
				freeze("2026-06-01T11:00:00Z", "2026-06-01T12:00:00Z"), freeze("2026-06-01T14:00:00Z", "2026-06-02T10:00:00Z"),
				freeze("2026-06-03T08:00:00Z", "2026-06-03T11:00:00Z"), freeze("2026-06-03T11:00:00Z", "2026-06-03T12:00:00Z"),
				freeze("2026-06-04T13:00:00+00:00", "2026-06-06T13:00:00+02:00"),
			},
			"2026-06-01T00:00:00Z", "2026-06-07T00:00:00Z",
			[]string{
				"2026-06-01T10:00:00Z", "2026-06-01T11:00:00Z", "2026-06-01T12:00:00Z", "2026-06-01T14:00:00Z",
				"2026-06-02T10:00:00Z", "2026-06-02T14:00:00Z", "2026-06-03T12:00:00Z", "2026-06-03T14:00:00Z",
				"2026-06-04T10:00:00Z", "2026-06-04T13:00:00Z", "2026-06-06T11:00:00Z", "2026-06-06T14:00:00Z",
			},
		},
		{
			"12 freezes without windows", nil,
			[]window.Freeze{freeze("2026-12-20T00:00:00Z", "2027-01-07T00:00:00Z"), freeze("2026-06-01T00:00:00Z", "2026-06-02T00:00:00Z")},
			"2026-01-01T00:00:00Z", "2028-01-01T00:00:00Z",
			[]string{"2026-06-02T00:00:00Z", "2026-12-20T00:00:00Z", "2027-01-07T00:00:00Z", ""},
		},
		{
			"15 a window of a minute is found in a year",
			windows{from("2027-01-01T00:00:00Z", "", w("UTC", "03:00", time.Minute, time.Monday))},
			nil,
			"2026-01-01T00:00:00Z", "2027-01-10T00:00:00Z",
			[]string{"2027-01-04T03:00:00Z", "2027-01-04T03:01:00Z"},
		},
		{
			"16 the 29th of February",
			windows{w("UTC", "23:30", hour, everyDay...)},
			nil, "2028-02-28T12:00:00Z", "2028-03-01T23:00:00Z",
			[]string{"2028-02-28T23:30:00Z", "2028-02-29T00:30:00Z", "2028-02-29T23:30:00Z", "2028-03-01T00:30:00Z"},
		},
		{
			"16 the end of a year with 366 days",
			windows{w(newYork, "23:00", 2*hour, everyDay...)},
			nil, "2040-12-30T12:00:00Z", "2041-01-02T00:00:00Z",
			[]string{"2040-12-31T04:00:00Z", "2040-12-31T06:00:00Z", "2041-01-01T04:00:00Z", "2041-01-01T06:00:00Z"},
		},
		{
			"bounds begin and end a window",
			windows{from("2026-06-01T11:00:00Z", "2026-06-02T11:30:00Z", w("UTC", "10:00", 2*hour, everyDay...))},
			nil,
			"2026-01-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-06-01T11:00:00Z", "2026-06-01T12:00:00Z", "2026-06-02T10:00:00Z", "2026-06-02T11:30:00Z"},
		},
		{
			"a window that would begin when it ends for good",
			windows{from("", "2026-06-03T10:00:00Z", w("UTC", "10:00", 2*hour, everyDay...))},
			nil,
			"2026-06-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-06-01T10:00:00Z", "2026-06-01T12:00:00Z", "2026-06-02T10:00:00Z", "2026-06-02T12:00:00Z"},
		},
		{
			"each day without a gap, for months",
			windows{from("2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z", w("UTC", "00:00", day, everyDay...))},
			nil,
			"2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z"},
		},
		{
			"a date, and another long before it",
			windows{from("2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z", w("UTC", "00:00", day, everyDay...))},
			[]window.Freeze{freeze("2020-01-01T00:00:00Z", "2020-02-01T00:00:00Z")},
			"2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z"},
		},
		{
			"a date, and another long after it",
			windows{from("2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z", w("UTC", "00:00", day, everyDay...))},
			[]window.Freeze{freeze("2030-01-01T00:00:00Z", "2030-02-01T00:00:00Z")},
			"2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z"},
		},
		{
			"a date before clocks are changed",
			windows{from("2026-01-15T00:00:00Z", "2026-03-01T00:00:00Z", w(newYork, "02:30", 25*hour, everyDay...))},
			nil,
			"2025-01-01T00:00:00Z", "2027-01-01T00:00:00Z",
			[]string{"2026-01-15T00:00:00Z", "2026-03-01T00:00:00Z"},
		},
		{
			"clocks are changed, and a window that knows no clock comes first",
			windows{from("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z", window.Window{}), w(newYork, "00:00", day, everyDay...)},
			nil,
			"2026-01-01T00:00:00Z", "2028-01-01T00:00:00Z",
			[]string{"2026-11-02T05:00:00Z", "2027-11-08T04:00:00Z", "2027-11-08T05:00:00Z", "2028-11-06T04:00:00Z"},
		},
		{
			"once, in ten years",
			windows{from("2036-06-01T11:00:00Z", "2036-06-02T11:30:00Z", window.Window{})},
			nil,
			"2026-01-01T00:00:00Z", "2037-01-01T00:00:00Z",
			[]string{"2036-06-01T11:00:00Z", "2036-06-02T11:30:00Z"},
		},
		{
			"from a day on, for ever",
			windows{from("2026-06-01T11:00:00Z", "", window.Window{})},
			nil,
			"2026-01-01T00:00:00Z", "2037-01-01T00:00:00Z",
			[]string{"2026-06-01T11:00:00Z", ""},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := window.Schedule{Windows: test.windows, Freezes: test.freezes}
			got := openings(t, s, instant(t, test.from), instant(t, test.to))
			var want []window.Opening
			for pair := range slices.Chunk(test.want, 2) {
				o := window.Opening{Start: instant(t, pair[0])}
				if pair[1] != "" {
					o.End = instant(t, pair[1])
				}
				want = append(want, o)
			}
			if diff := cmp.Diff(want, got, withoutZone); diff != "" {
				t.Errorf("openings (-want +got):\n%s", diff)
			}
		})
	}
}

var withoutZone = cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Zone" }, cmp.Ignore())

// openings lists those that start after an instant and before another, and checks that all that a schedule says agrees.
func openings(t *testing.T, s window.Schedule, from, to time.Time) (all []window.Opening) {
	t.Helper()
	for at := from; ; {
		o, ok := s.Next(at, 0)
		if !ok || !o.Start.Before(to) {
			break
		}
		agrees(t, s, o)
		all = append(all, o)
		if o.End.IsZero() {
			break
		}
		at = o.End
	}
	if n := len(all); n > 0 && !all[n-1].End.IsZero() && !all[n-1].End.After(to) {
		if prev, ok := s.Prev(to); !ok || !same(prev, all[n-1]) {
			t.Errorf("before %s was %v, %v; want %v", to, prev, ok, all[n-1])
		}
	}
	return all
}

// agrees checks at the edges of an opening that everything says the same.
func agrees(t *testing.T, s window.Schedule, o window.Opening) {
	t.Helper()
	last := o.Start.Add(1000 * day)
	if !o.End.IsZero() {
		last = o.End.Add(-time.Nanosecond)
		if prev, ok := s.Prev(o.End); !ok || !same(prev, o) {
			t.Errorf("before %s was %v, %v; want %v", o.End, prev, ok, o)
		}
		if s.Contains(o.End) {
			t.Errorf("open at %s, the end of %v", o.End, o)
		}
	}
	before := o.Start.Add(-time.Nanosecond)
	if s.Contains(before) {
		t.Errorf("open at %s, before %v", before, o)
	}
	if edge, ok := s.Edge(before); !ok || !edge.Equal(o.Start) {
		t.Errorf("next edge after %s is %s, %v; want %s", before, edge, ok, o.Start)
	}
	within(t, s, o, last)
}

// within checks that everything says the same at the start of an opening, and at its last instant.
func within(t *testing.T, s window.Schedule, o window.Opening, last time.Time) {
	t.Helper()
	earlier, had := s.Prev(o.Start.Add(-time.Nanosecond))
	for _, at := range []time.Time{o.Start, last} {
		if prev, ok := s.Prev(at); ok != had || !same(prev, earlier) {
			t.Errorf("before %s, within %v, was %v, %v; want %v, %v", at, o, prev, ok, earlier, had)
		}
		if got, ok := s.At(at); !ok || !same(got, o) || !s.Contains(at) {
			t.Errorf("at %s is %v, %v; want %v", at, got, ok, o)
		}
		if edge, ok := s.Edge(at); ok == o.End.IsZero() || !edge.Equal(o.End) {
			t.Errorf("next edge after %s is %s, %v; want %s", at, edge, ok, o.End)
		}
	}
}

func same(a, b window.Opening) bool {
	return a.Start.Equal(b.Start) && a.End.Equal(b.End) && a.Zone == b.Zone
}

func TestAnOpeningNamesTheZoneThatItBeginsIn(t *testing.T) {
	s := window.Schedule{
		Windows: []window.Window{weekly(t, "Europe/Berlin", "22:00", 2*hour, time.Friday), weekly(t, newYork, "18:00", 2*hour, time.Friday)},
		Freezes: []window.Freeze{{From: instant(t, "2026-06-12T20:00:00Z"), To: instant(t, "2026-06-12T22:30:00Z")}},
	}
	for at, want := range map[string]string{
		"2026-06-05T23:00:00Z": "Europe/Berlin", // from 20:00Z to 24:00Z, as New York takes over at 22:00Z
		"2026-06-12T23:00:00Z": newYork,         // from 22:30Z, when the freeze ends
	} {
		if o, ok := s.At(instant(t, at)); !ok || o.Zone.String() != want {
			t.Errorf("at %s: %v, %v; want the zone %s", at, o, ok, want)
		}
	}
	for name, s := range map[string]window.Schedule{"always": {}, "without a zone": {Windows: []window.Window{{}}}} {
		if o, ok := s.At(instant(t, "2026-06-05T23:00:00Z")); !ok || o != (window.Opening{Zone: time.UTC}) {
			t.Errorf("%s: %v, %v", name, o, ok)
		}
	}
}

func TestWhatIsAlwaysOpenHasNoEdges(t *testing.T) {
	at := instant(t, "2026-06-05T23:00:00Z")
	for name, test := range map[string]struct {
		windows []window.Window
		always  bool
	}{
		"no windows":             {nil, true},
		"every day for 25 hours": {[]window.Window{weekly(t, newYork, "02:30", 25*hour, everyDay...)}, false},
		"a week, every week":     {[]window.Window{weekly(t, "UTC", "12:00", 7*day, time.Tuesday)}, false},
		"two halves of the day":  {[]window.Window{weekly(t, "Asia/Tokyo", "00:00", 12*hour, everyDay...), weekly(t, "Asia/Tokyo", "12:00", 12*hour, everyDay...)}, false},
		"a window without end":   {[]window.Window{{}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := window.Schedule{Windows: test.windows}
			o, open := s.At(at)
			_, next := s.Next(at, 0)
			_, prev := s.Prev(at)
			_, edge := s.Edge(at)
			if !open || !o.Start.IsZero() || !o.End.IsZero() || next || prev || edge || s.Always() != test.always {
				t.Errorf("at %v, %v; next %v, previous %v, edge %v, always %v", o, open, next, prev, edge, s.Always())
			}
		})
	}
}

func TestNextIsLongEnough(t *testing.T) {
	// Between two dates on which one of the two zones changes its clocks and the other does not, the windows touch.
	s := window.Schedule{
		Windows: []window.Window{weekly(t, "Europe/Berlin", "22:00", 2*hour, time.Friday), weekly(t, newYork, "19:00", 2*hour, time.Friday)},
		Freezes: []window.Freeze{{From: instant(t, "2026-03-13T00:00:00Z"), To: instant(t, "2026-03-15T00:00:00Z")}},
	}
	for _, test := range []struct {
		after string
		least time.Duration
		want  []string
	}{
		{"2026-01-01T00:00:00Z", 2 * hour, []string{"2026-01-02T21:00:00Z", "2026-01-02T23:00:00Z"}},
		{"2026-01-02T21:00:00Z", 2 * hour, []string{"2026-01-03T00:00:00Z", "2026-01-03T02:00:00Z"}}, // that which starts then does not start after
		{"2026-01-02T20:59:59.999999999Z", 2 * hour, []string{"2026-01-02T21:00:00Z", "2026-01-02T23:00:00Z"}},
		{"2026-01-01T00:00:00Z", 4 * hour, []string{"2026-03-20T21:00:00Z", "2026-03-21T01:00:00Z"}},
		{"2026-01-01T00:00:00Z", 4*hour + 1, nil},
	} {
		o, ok := s.Next(instant(t, test.after), test.least)
		var got []string
		if ok {
			got = []string{o.Start.Format(time.RFC3339Nano), o.End.Format(time.RFC3339Nano)}
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("after %s for %s (-want +got):\n%s", test.after, test.least, diff)
		}
	}
}

// A reading of the monotonic clock goes on where the wall clock is set.
func TestOnlyTheWallClockCounts(t *testing.T) {
	now := time.Now()
	s := window.Schedule{Windows: []window.Window{{NotBefore: now.Add(-hour), NotAfter: now.Add(hour)}}}
	o, ok := s.At(now)
	if !ok || o.Start != now.Round(0).UTC().Add(-hour) || o.End != now.Round(0).UTC().Add(hour) {
		t.Errorf("at %s is %v, %v", now, o, ok)
	}
}

// The image has no zones, and no test runs without those of the machine or of the toolchain.
func TestZonesAreBuiltIn(t *testing.T) {
	p, err := build.ImportDir(".", 0)
	if err != nil || !slices.Contains(p.Imports, "time/tzdata") {
		t.Errorf("imports are %v, error %v; want time/tzdata among them", p.Imports, err)
	}
}
