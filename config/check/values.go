package check

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/window"
)

// read sets a value from a text. If the text is not allowed, it returns predicates of messages.
func read(text string, v reflect.Value, tag reflect.StructTag) (problems []string) {
	var err error
	switch into := v.Addr().Interface().(type) {
	case readable:
		err = into.ReadText(text)
	case *time.Duration:
		if tag.Get("form") == "timeOfDay" {
			*into, err = readTimeOfDay(text)
		} else {
			*into, err = readDuration(text, tag.Get("within"))
		}
	case *time.Time:
		*into, err = readInstant(text)
	case *time.Weekday:
		*into, err = readWeekday(text)
	case **time.Location:
		*into, err = readZone(text)
	case *labels.Selector:
		*into, err = readSelector(text, tag)
	case *int:
		least, most := bounds(tag.Get("within"), strconv.Atoi)
		*into, err = Number(text, cmp.Or(tag.Get("called"), "a whole number"), least, most)
	default:
		return readString(text, v, tag)
	}
	if err != nil {
		return []string{err.Error()}
	}
	return nil
}

func readString(text string, v reflect.Value, tag reflect.StructTag) (problems []string) {
	former := v.String()
	v.SetString(text)
	allowed := keywords(tag, "enum")
	if w, ok := v.Interface().(words); ok && len(allowed) == 0 {
		allowed = w.Values()
	}
	switch form := tag.Get("form"); {
	case len(allowed) > 0 && !slices.Contains(allowed, text):
		return []string{"must be " + strings.Join(allowed, " or ")}
	case form == "path" && (!filepath.IsAbs(text) || filepath.Clean(text) != text):
		return []string{"must be the absolute path of a file, like " + strconv.Quote(former)}
	case Forms[form] != nil:
		return Forms[form](text)
	}
	return nil
}

// Forms check texts, by the names in the tag form. A form that is missing here is for the JSON schema only.
var Forms = map[string]func(string) (problems []string){"dnsLabel": validation.IsDNS1123Label}

// keywords lists the values of a keyword in the tag jsonschema.
func keywords(tag reflect.StructTag, keyword string) (values []string) {
	for k := range strings.SplitSeq(tag.Get("jsonschema"), ",") {
		if value, ok := strings.CutPrefix(k, keyword+"="); ok {
			values = append(values, value)
		}
	}
	return values
}

// Number reads a whole number within bounds. called is its name in messages.
func Number(text, called string, least, most int) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("must be %s from %d to %d", called, least, most)
	}
	return n, nil
}

func readDuration(text, within string) (time.Duration, error) {
	least, most := bounds(within, time.ParseDuration)
	d, err := time.ParseDuration(text)
	switch {
	case err != nil:
		return 0, errors.New(`must be a duration with its unit, like "90s" or "1h30m"`)
	case d < least || d > most:
		return 0, fmt.Errorf("must be from %s to %s", WithoutZeroParts(least), WithoutZeroParts(most))
	}
	return d, nil
}

// bounds reads a tag with the least and the greatest allowed value.
func bounds[T any](tag string, read func(string) (T, error)) (least, most T) {
	from, to, _ := strings.Cut(tag, ",")
	least, wrong := read(from)
	most, err := read(to)
	if err := errors.Join(wrong, err); err != nil {
		panic(fmt.Sprintf("bounds %q: %v", tag, err)) // every test that reads the file finds it
	}
	return least, most
}

// MaxCount is more tries, devices or positions than any node has.
const MaxCount = 1000

// WithoutZeroParts writes a duration as "10m", not "10m0s".
func WithoutZeroParts(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// readSelector reads a label selector that does not match everything. It is for the pods that the tag names, or else for nodes.
func readSelector(text string, tag reflect.StructTag) (labels.Selector, error) {
	selector, err := labels.Parse(text)
	whose := tag.Get("whose")
	switch {
	case err != nil && whose != "":
		return nil, fmt.Errorf(`must be a label selector, like "app=nvidia-device-plugin-daemonset": %w`, err)
	case err != nil:
		_, forms, _ := strings.Cut(tag.Get("missing"), ": ")
		return nil, fmt.Errorf("is invalid: %s: %w", forms, err)
	case selector.Empty() && whose != "":
		return nil, errors.New("matches every pod: name the labels of " + whose)
	case selector.Empty():
		return nil, errors.New(tag.Get("missing"))
	}
	return selector, nil
}

// readWeekday reads the name of a day, in English, in full or by its first three letters.
func readWeekday(text string) (time.Weekday, error) {
	for day := time.Sunday; day <= time.Saturday; day++ {
		if name := day.String(); strings.EqualFold(text, name) || strings.EqualFold(text, name[:3]) {
			return day, nil
		}
	}
	return 0, errors.New("must be a day of the week: Mon, Tue, Wed, Thu, Fri, Sat or Sun")
}

// readTimeOfDay reads a time as clocks show it.
func readTimeOfDay(text string) (time.Duration, error) {
	want := `must be a time of day in quotes, from "00:00" to "23:59"`
	clock, err := time.Parse("15:04", text)
	switch minutes, number := strconv.Atoi(text); {
	case err == nil && len(text) == len("15:04"):
		return time.Duration(clock.Hour())*time.Hour + time.Duration(clock.Minute())*time.Minute, nil
	case text == "24:00":
		want += `: midnight is the start of the next day, "00:00"`
	case number == nil && minutes >= 0 && minutes < 24*60:
		want += fmt.Sprintf(": without them YAML 1.1 reads %02d:%02d as the number %d", minutes/60, minutes%60, minutes)
	}
	return 0, errors.New(want)
}

// readInstant reads a date with its time and zone.
func readInstant(text string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return t, errors.New(`must be a date with its time and zone, like "2026-12-20T22:00:00Z" or "2026-12-20T23:00:00+01:00"`)
	}
	return t.UTC(), nil
}

// readZone reads the name of a zone.
func readZone(name string) (*time.Location, error) {
	zone, err := time.LoadLocation(name)
	switch {
	case strings.EqualFold(name, "local") || strings.EqualFold(name, "localtime"):
		return nil, errors.New(`would differ on each node: name the zone, like "Europe/Berlin"`)
	case strings.HasPrefix(name, "right/"):
		return nil, errors.New("counts leap seconds, which clocks do not: write it without right/")
	case err != nil:
		const want = "is not in the IANA time zone database"
		if meant := closestZones(name); len(meant) > 0 {
			return nil, errors.New(want + ": did you mean " + strings.Join(meant, " or ") + "?")
		}
		return nil, errors.New(want + `: write one like "Europe/Berlin", or leave it out for UTC`)
	}
	return zone, nil
}

// closestZones lists the zones spelt most like name: only the nearest, since names of one region are alike. A city alone stands for the zone of its
// name; other names without a region, like PST, are like too many.
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
