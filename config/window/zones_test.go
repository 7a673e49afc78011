package window_test

import (
	"archive/zip"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sort"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/config/window"
)

var update = flag.Bool("update", false, "renew the list of zones by those of the toolchain")

// zones are all that the toolchain knows.
func zones(t *testing.T) []string {
	t.Helper()
	path := filepath.Join(runtime.GOROOT(), "lib", "time", "zoneinfo.zip") //nolint:staticcheck // a test runs where it was built
	archive, err := zip.OpenReader(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := archive.Close(); err != nil {
			t.Error(err)
		}
	}()
	var names []string
	for _, f := range archive.File {
		if !strings.HasSuffix(f.Name, "/") {
			names = append(names, f.Name)
		}
	}
	if len(names) < 500 {
		t.Fatalf("%d zones in %s, want those of the world", len(names), path)
	}
	return names
}

// Names that are not in the list are no mistake: a toolchain may be newer. To renew it, run this with -update.
func TestZonesAreThoseOfTheToolchain(t *testing.T) {
	all := slices.DeleteFunc(zones(t), func(name string) bool { return name == "Factory" }) // which stands for none
	slices.Sort(all)
	if *update {
		if err := os.WriteFile("zones.txt", []byte(strings.Join(all, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(window.Zones()); n < 500 || !slices.IsSorted(window.Zones()) {
		t.Errorf("%d zones are listed, sorted %v; want those of the world", n, slices.IsSorted(window.Zones()))
	}
	for _, name := range window.Zones() {
		if !slices.Contains(all, name) {
			t.Errorf("%s is listed, and the toolchain has no such zone", name)
		}
	}
}

// years are eleven in which clocks did what they seldom do: Samoa had no 30th of December 2011, Cairo took summer time up
// again in 2023, Nuuk changed its zone and then its clocks in 2023 and 2024; and some after the last change that is written
// in the zones' files, with a year of 366 days at either end.
var years = []struct{ first, last int }{{2011, 2013}, {2023, 2026}, {2036, 2040}}

// TestEveryZone holds the schedule against the definition, in all zones of the world. What it compares with knows nothing of
// time.Date and of the bounds of zones: it looks at what clocks show, by the minute and second where they change.
//
// It takes one window for some years of each zone, others in each run. GPUSLICE_ALL_ZONES=1 takes many, for all years.
func TestEveryZone(t *testing.T) {
	seed, rounds, every := uint64(time.Now().UnixNano()), 1, false
	if text := os.Getenv("GPUSLICE_ZONES_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	if os.Getenv("GPUSLICE_ALL_ZONES") != "" {
		rounds, every = 20, true
	}
	t.Logf("to see this again: GPUSLICE_ZONES_SEED=%d", seed)
	all := zones(t)
	changes := 0
	for i, name := range all {
		zone := located(t, name)
		r := rand.New(rand.NewPCG(seed, uint64(i)))
		spans := years
		if !every {
			at := r.IntN(len(years))
			spans = years[at : at+1]
		}
		for _, span := range spans {
			w := observed(zone, span.first, span.last)
			changes += len(w.changes)
			for range rounds {
				w.check(t, r)
			}
		}
		if t.Failed() {
			return // one zone is enough to read
		}
	}
	if changes < 300 {
		t.Errorf("clocks changed %d times in %d zones: they were not looked at", changes, len(all))
	}
}

// world is how clocks in a zone go for some years.
type world struct {
	zone     *time.Location
	from, to time.Time
	changes  []time.Time // instants at which they are put forward or back
}

// observed looks for the changes of a zone's clocks. No two are within half a day.
func observed(zone *time.Location, first, last int) world {
	w := world{
		zone: zone, from: time.Date(first, 1, 1, 0, 0, 0, 0, time.UTC), to: time.Date(last+1, 1, 1, 0, 0, 0, 0, time.UTC),
	}
	const step = 12 * hour
	for t := w.from.Add(-40 * day); t.Before(w.to.Add(40 * day)); t = t.Add(step) {
		before := offset(t, zone)
		if offset(t.Add(step), zone) == before {
			continue
		}
		seconds := sort.Search(int(step/time.Second), func(i int) bool { return offset(t.Add(time.Duration(i)*time.Second), zone) != before })
		w.changes = append(w.changes, t.Add(time.Duration(seconds)*time.Second))
	}
	return w
}

func offset(t time.Time, zone *time.Location) time.Duration {
	_, seconds := t.In(zone).Zone()
	return time.Duration(seconds) * time.Second
}

// shows is what clocks show, as if that were in UTC.
func (w world) shows(t time.Time) time.Time {
	local := t.In(w.zone)
	return time.Date(local.Year(), local.Month(), local.Day(), local.Hour(), local.Minute(), local.Second(), local.Nanosecond(), time.UTC)
}

// start is the first instant at which clocks show that, or later.
func (w world) start(shown time.Time) time.Time {
	if !w.changesWithin(shown.Add(-40*hour), shown.Add(40*hour)) {
		return shown.Add(-offset(shown, w.zone))
	}
	t := shown.Add(-30 * hour)
	for w.shows(t).Before(shown) {
		step := hour // in which clocks only go forward, if they are not changed
		if w.changesWithin(t, t.Add(step)) || !w.shows(t.Add(step)).Before(shown) {
			step = time.Minute
		}
		if w.changesWithin(t, t.Add(step)) || step == time.Minute && !w.shows(t.Add(step)).Before(shown) {
			step = time.Second
		}
		t = t.Add(step)
	}
	return t
}

func (w world) changesWithin(from, to time.Time) bool {
	return slices.ContainsFunc(w.changes, func(change time.Time) bool { return !change.Before(from) && !change.After(to) })
}

// openings are those of a window, merged, found day by day. The first and the last may be cut short.
func (w world) openings(in window.Window) (all []window.Opening) {
	first := w.from.Add(-20 * day)
	for date := first; date.Before(w.to.Add(20 * day)); date = date.Add(day) {
		if !slices.Contains(in.Days, date.Weekday()) {
			continue
		}
		start := w.start(date.Add(in.Start))
		end := start.Add(in.Duration)
		if n := len(all); n > 0 && !start.After(all[n-1].End) {
			all[n-1].End = end
			continue
		}
		all = append(all, window.Opening{Start: start, End: end, Zone: w.zone})
	}
	return all
}

// check compares one window with the definition: around the changes of clocks, and at any other time.
func (w world) check(t *testing.T, r *rand.Rand) {
	t.Helper()
	in := w.window(r)
	s := window.Schedule{Windows: []window.Window{in}}
	want := w.openings(in)
	var at []time.Time
	for _, change := range w.changes {
		for range 2 {
			at = append(at, change, change.Add(-1), change.Add(time.Duration(r.Int64N(int64(4*day)))-2*day))
		}
	}
	for range 20 {
		at = append(at, w.from.Add(time.Duration(r.Int64N(int64(w.to.Sub(w.from))))))
	}
	for _, instant := range at {
		i := sort.Search(len(want), func(i int) bool { return want[i].End.After(instant) })
		if i == 0 || i == len(want)-1 || i == len(want) {
			continue // cut short, or always open
		}
		for _, near := range []time.Time{
			instant, want[i].Start, want[i].Start.Add(-1), want[i].End, want[i].End.Add(-1), want[i-1].End, want[i-1].End.Add(-1),
		} {
			if problem := differs(s, want, near); problem != "" {
				t.Fatalf("%v, %s for %s on %v, at %s: %s", w.zone, in.Start, in.Duration, in.Days, near.Format(time.RFC3339Nano), problem)
			}
		}
	}
}

// differs says what of a schedule is otherwise at an instant than these openings, all there are around it.
func differs(s window.Schedule, openings []window.Opening, t time.Time) string {
	i := sort.Search(len(openings), func(i int) bool { return openings[i].End.After(t) })
	if i <= 1 || i >= len(openings)-2 {
		return "" // its neighbours were cut short
	}
	open := !openings[i].Start.After(t)
	next, edge := openings[i], openings[i].Start
	if open {
		next, edge = openings[i+1], openings[i].End
	}
	if got, ok := s.At(t); s.Contains(t) != open || ok != open || open && !same(got, openings[i]) {
		return fmt.Sprintf("open is %v, the opening %v, %v; want %v, %v", s.Contains(t), got, ok, open, openings[i])
	}
	if got, ok := s.Next(t, 0); !ok || !same(got, next) {
		return fmt.Sprintf("the next is %v, %v; want %v", got, ok, next)
	}
	if got, ok := s.Edge(t); !ok || !got.Equal(edge) {
		return fmt.Sprintf("the next edge is %s, %v; want %s", got, ok, edge)
	}
	if got, ok := s.Prev(t); !ok || !same(got, openings[i-1]) {
		return fmt.Sprintf("the last is %v, %v; want %v", got, ok, openings[i-1])
	}
	return ""
}

// window is any, though more often one that begins when clocks are changed.
func (w world) window(r *rand.Rand) window.Window {
	in := window.Window{Zone: w.zone, Start: time.Duration(r.IntN(24*60)) * time.Minute}
	durations := []time.Duration{time.Minute, 30 * time.Minute, hour, 6 * hour, 23 * hour, 24 * hour, 25 * hour, 3 * day, 7 * day}
	in.Duration = durations[r.IntN(len(durations))]
	for _, d := range everyDay {
		if r.IntN(3) > 0 {
			in.Days = append(in.Days, d)
		}
	}
	if len(w.changes) > 0 && r.IntN(4) > 0 {
		shown := w.shows(w.changes[r.IntN(len(w.changes))].Add(-time.Duration(r.IntN(3)) * 30 * time.Minute))
		in.Start = shown.Sub(shown.Truncate(day)).Truncate(time.Minute)
		if !slices.Contains(in.Days, shown.Weekday()) {
			in.Days = append(in.Days, shown.Weekday())
		}
	}
	if len(in.Days) == 0 {
		in.Days = []time.Weekday{time.Monday}
	}
	return in
}
