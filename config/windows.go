package config

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/config/window"
)

// Bounds of the length of a window.
const (
	minWindow = time.Minute        // a shorter one is most likely a slip: "30s" for "30m"
	maxWindow = 7 * 24 * time.Hour // a longer one overlaps itself a week later
)

type windowInputs struct {
	Days      oneOrMore `json:"days"`
	Start     scalar    `json:"start"`
	Duration  scalar    `json:"duration"`
	TimeZone  scalar    `json:"timeZone"`
	NotBefore scalar    `json:"notBefore"`
	NotAfter  scalar    `json:"notAfter"`
}

type freezeInputs struct {
	From   scalar `json:"from"`
	To     scalar `json:"to"`
	Reason scalar `json:"reason"`
}

// windows checks a list of windows, if there is one. It refuses an empty list, which could be read as never and as always.
func (c *checks) windows(field string, raw json.RawMessage) []window.Window {
	if absent(raw) {
		return nil
	}
	var entries []json.RawMessage
	if json.Unmarshal(raw, &entries) != nil || len(entries) == 0 {
		c.add(&InvalidError{Field: field, Want: "must be a list of at least one window: leave it out where there is none, or write a freeze for never"})
	}
	var out []window.Window
	for i, entry := range entries {
		out = append(out, c.window(fmt.Sprintf("%s[%d]", field, i), entry))
	}
	return out
}

func (c *checks) window(at string, raw json.RawMessage) window.Window {
	var in windowInputs
	if absent(raw) {
		raw = json.RawMessage("{}") // the checks then name the missing fields
	}
	if !c.mapping(at, raw, &in) {
		return window.Window{}
	}
	w := window.Window{Zone: c.timeZone(at+".timeZone", in.TimeZone), Days: c.weekdays(at+".days", in.Days)}
	w.NotBefore = ifWritten(at+".notBefore", in.NotBefore, c.instant)
	w.NotAfter = ifWritten(at+".notAfter", in.NotAfter, c.instant)
	c.refuseEndBeforeStart(at+".notAfter", in.NotAfter, "notBefore", w.NotBefore, w.NotAfter)
	if in.Days != nil {
		w.Start = c.timeOfDay(at+".start", in.Start)
		w.Duration = c.duration(at+".duration", in.Duration, minWindow, maxWindow)
		return w
	}
	if in.NotBefore == "" || in.NotAfter == "" {
		c.add(&InvalidError{Field: at, Want: `must have "days", "start" and "duration", or "notBefore" and "notAfter" to be open once`})
	}
	for _, only := range []struct {
		field string
		value scalar
	}{{"start", in.Start}, {"duration", in.Duration}} {
		if only.value != "" {
			c.refuse(at+"."+only.field, string(only.value), `goes with "days": without them a window is open once, from notBefore to notAfter`)
		}
	}
	return w
}

// freezes checks a list of freezes, which may have none.
func (c *checks) freezes(field string, raw json.RawMessage) []window.Freeze {
	if absent(raw) {
		return nil
	}
	var entries []json.RawMessage
	if json.Unmarshal(raw, &entries) != nil {
		c.add(&InvalidError{Field: field, Want: `must be a list of freezes with "from" and "to"`})
	}
	var out []window.Freeze
	for i, entry := range entries {
		at := fmt.Sprintf("%s[%d]", field, i)
		var in freezeInputs
		if absent(entry) {
			entry = json.RawMessage("{}")
		}
		if !c.mapping(at, entry, &in) {
			continue
		}
		f := window.Freeze{From: c.instant(at+".from", in.From), To: c.instant(at+".to", in.To), Reason: string(in.Reason)}
		c.refuseEndBeforeStart(at+".to", in.To, "from", f.From, f.To)
		out = append(out, f)
	}
	return out
}

// refuseEndBeforeStart refuses an end that is not after its start.
func (c *checks) refuseEndBeforeStart(field string, value scalar, start string, from, to time.Time) {
	if !from.IsZero() && !to.IsZero() && !from.Before(to) {
		c.refuse(field, string(value), fmt.Sprintf("must be after %s, which is %s", start, from.Format(time.RFC3339)))
	}
}

// weekdays checks names of days, in English, in full or by their first three letters.
func (c *checks) weekdays(field string, in oneOrMore) []time.Weekday {
	if in != nil && len(in) == 0 {
		c.add(&InvalidError{Field: field, Value: "[]", Want: "has no day, so that the window would never open: write at least one, like Fri"})
	}
	var out []time.Weekday
	for i, text := range in {
		at := fmt.Sprintf("%s[%d]", field, i)
		day, ok := weekday(string(text))
		switch {
		case !ok:
			c.refuse(at, string(text), "must be a day of the week: Mon, Tue, Wed, Thu, Fri, Sat or Sun")
		case slices.Contains(out, day):
			c.refuse(at, string(text), "is there twice")
		default:
			out = append(out, day)
		}
	}
	return out
}

func weekday(text string) (time.Weekday, bool) {
	for day := time.Sunday; day <= time.Saturday; day++ {
		if name := day.String(); strings.EqualFold(text, name) || strings.EqualFold(text, name[:3]) {
			return day, true
		}
	}
	return 0, false
}

// timeOfDay checks a time as clocks show it.
func (c *checks) timeOfDay(field string, value scalar) time.Duration {
	want := `must be a time of day in quotes, from "00:00" to "23:59"`
	clock, err := time.Parse("15:04", string(value))
	switch minutes, number := strconv.Atoi(string(value)); {
	case err == nil && len(value) == len("15:04"):
		return time.Duration(clock.Hour())*time.Hour + time.Duration(clock.Minute())*time.Minute
	case value == "24:00":
		want += `: midnight is the start of the next day, "00:00"`
	case number == nil && minutes >= 0 && minutes < 24*60:
		want += fmt.Sprintf(": without them YAML 1.1 reads %02d:%02d as the number %d", minutes/60, minutes%60, minutes)
	}
	c.refuse(field, string(value), want)
	return 0
}

// instant checks a date with its time and zone.
func (c *checks) instant(field string, value scalar) time.Time {
	t, err := time.Parse(time.RFC3339, string(value))
	switch {
	case value == "":
		c.add(&InvalidError{Field: field, Want: `is missing: write a date with its time and zone, like "2026-12-20T22:00:00Z"`})
	case err != nil:
		c.refuse(field, string(value), `must be a date with its time and zone, like "2026-12-20T22:00:00Z" or "2026-12-20T23:00:00+01:00"`)
	}
	return t.UTC()
}

// timeZone checks the name of a zone. One that is missing is UTC: the agent's own would be another on each node.
func (c *checks) timeZone(field string, value scalar) *time.Location {
	name := string(value)
	if name == "" {
		return time.UTC
	}
	zone, err := time.LoadLocation(name)
	switch {
	case strings.EqualFold(name, "local") || strings.EqualFold(name, "localtime"):
		c.refuse(field, name, `would be another on each node: name the zone, like "Europe/Berlin"`)
	case strings.HasPrefix(name, "right/"):
		c.refuse(field, name, "counts leap seconds, which clocks do not: write it without right/")
	case err != nil:
		want := "is no zone of the IANA time zone database"
		if meant := closestZones(name); len(meant) > 0 {
			c.refuse(field, name, want+": did you mean "+strings.Join(meant, " or ")+"?")
		} else {
			c.refuse(field, name, want+`: write one like "Europe/Berlin", or leave it out for UTC`)
		}
	default:
		return zone
	}
	return time.UTC
}

// closestZones lists zones whose names are spelt like name: only the nearest, since names of one region are alike.
// A city alone stands for the zone of its name; other names without a region, like PST, are like too many.
func closestZones(name string) []string {
	name = strings.ReplaceAll(name, " ", "_")
	if strings.Contains(name, "/") {
		near := Closest(name, window.Zones())
		return near[:min(1, len(near))]
	}
	var meant []string
	for _, zone := range window.Zones() {
		city := zone[strings.LastIndex(zone, "/")+1:]
		if len(meant) < maxSuggestions && strings.EqualFold(city, name) {
			meant = append(meant, zone)
		}
	}
	return meant
}
