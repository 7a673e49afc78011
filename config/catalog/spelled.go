package catalog

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/nvml"
)

// A name spells a MIG config out by its groups of GPUs: "gpu0.1_off-gpu3_3g.40gb_4x1g.10gb". A group is "gpu" with indices, then "_off" for MIG off, or the
// instances of each of its GPUs with their counts. A "+" of a profile is "." in the name, as in generated names: no label can have a "+".
const (
	spelledGroup   = "gpu"
	spelledBetween = "-" + spelledGroup
	spelledOff     = "off"
)

var (
	// spelledStart is the beginning of a name that can only be meant to spell a config out.
	spelledStart = regexp.MustCompile(`^gpu[0-9][0-9.]*(?:_|-gpu)`)
	spelledCount = regexp.MustCompile(`^([0-9]*)x(.*)$`)
	// spelledPlus is a profile with an attribute, where a label has "." for "+".
	spelledPlus = regexp.MustCompile(`^((?:[0-9]c\.)?[0-9]g\.[0-9]+gb)\.(.+)$`)

	errNotSpelledGPU   = fmt.Errorf("is no index of a GPU: write a whole number from 0 to %d, without zeros before it", check.MaxCount)
	errNotSpelledCount = fmt.Errorf("begins with no number of instances: write a whole number from 1 to %d, without zeros before it, and x", nvml.MaxDevices)
)

// IsSpelled reports whether the name can only be meant to spell a MIG config out, whether it is right or not.
func IsSpelled(name string) bool { return spelledStart.MatchString(name) }

// Spelled reads a name that IsSpelled: each group is a rule, and GPUs that it does not name stay unchanged. It does not know the hardware. The error joins one
// *check.InvalidError for each mistake, with the group and what is wrong in it.
func Spelled(name string) (MIGConfig, error) {
	var cfg MIGConfig
	var wrong check.Mistakes
	named := map[int]bool{}
	for group := range strings.SplitSeq(strings.TrimPrefix(name, spelledGroup), spelledBetween) {
		all, devices, found := strings.Cut(group, "_")
		at := spelledGroup + all
		rule := MIGRule{}
		for index := range strings.SplitSeq(all, ".") {
			n, err := spelledNumber(index, 0, check.MaxCount)
			switch {
			case err != nil:
				wrong.Refuse(at, index, errNotSpelledGPU.Error())
			case named[n]:
				wrong.Refuse(at, index, "is a GPU that the name has twice")
			}
			named[n], rule.Indices = true, append(rule.Indices, n)
		}
		switch {
		case !found:
			wrong.Add(&check.InvalidError{Field: at, Want: "has no instances: write them behind it, as in " + at + "_3g.40gb_4x1g.10gb, or " + at + "_off"})
		case devices != spelledOff:
			rule.MIG, rule.Devices = true, spelledDevices(&wrong, at, devices)
		}
		cfg = append(cfg, rule)
	}
	for _, err := range wrong {
		if invalid, ok := errors.AsType[*check.InvalidError](err); ok {
			invalid.Config = name
		}
	}
	if len(wrong) > 0 {
		return nil, errors.Join(wrong...)
	}
	return cfg, nil
}

// spelledDevices reads the instances of a group.
func spelledDevices(wrong *check.Mistakes, at, text string) map[string]int {
	devices := map[string]int{}
	for part := range strings.SplitSeq(text, "_") {
		count, name := 1, part
		var err error
		if m := spelledCount.FindStringSubmatch(part); m != nil {
			name = m[2]
			if count, err = spelledNumber(m[1], 1, nvml.MaxDevices); err != nil {
				wrong.Refuse(at, part, errNotSpelledCount.Error())
				continue
			}
		}
		device, err := DeviceName(spelledPlus.ReplaceAllString(name, "$1+$2"))
		switch {
		case name == spelledOff:
			wrong.Refuse(at, part, "is MIG off, and stands alone: a GPU is either off or has instances")
		case err != nil:
			wrong.Refuse(at, part, err.Error())
		case devices[device] > 0:
			wrong.Refuse(at, part, "is there twice: write it once, with its count before it, as in 2x"+name)
		default:
			devices[device] = count
		}
	}
	return devices
}

// spelledNumber reads a number in its one form.
func spelledNumber(text string, least, most int) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most || strconv.Itoa(n) != text {
		return 0, strconv.ErrSyntax
	}
	return n, nil
}

// Spell returns the name that spells out these requests, by the indices of their GPUs. GPUs with the same request are in one group, and groups are in the order
// of their first GPU, so that requests have one name. It is false if there is none: it would be too long for the value of a label, or a GPU is to have MIG on
// without an instance.
func Spell(requests map[int]nvml.Request) (name string, ok bool) {
	var order []string
	groups := map[string][]string{} // indices, by what their GPUs are to be
	for _, index := range slices.Sorted(maps.Keys(requests)) {
		text := spelledText(requests[index])
		if len(groups[text]) == 0 {
			order = append(order, text)
		}
		groups[text] = append(groups[text], strconv.Itoa(index))
	}
	for i, text := range order {
		order[i] = spelledGroup + strings.Join(groups[text], ".") + "_" + text
	}
	name = strings.Join(order, "-")
	return name, len(validation.IsValidLabelValue(name)) == 0 && spells(name, requests)
}

// spelledText writes the instances of a request, the largest first.
func spelledText(w nvml.Request) string {
	if !w.MIG {
		return spelledOff
	}
	var parts []string
	for _, device := range slices.SortedFunc(maps.Keys(w.Devices), compareDevices) {
		text := strings.ReplaceAll(device, "+", ".")
		switch n := w.Devices[device]; {
		case n == 0:
		case n == 1:
			parts = append(parts, text)
		default:
			parts = append(parts, fmt.Sprintf("%dx%s", n, text))
		}
	}
	return strings.Join(parts, "_")
}

// compareDevices orders names of MIG devices from the most compute slices to the fewest, and those with more memory first.
func compareDevices(a, b string) int {
	return cmp.Or(slices.Compare(sizeOf(b), sizeOf(a)), cmp.Compare(a, b))
}

// sizeOf returns the slices and the memory in a device's name; nothing of another name.
func sizeOf(device string) []int {
	m := deviceForm.FindStringSubmatch(device)
	if m == nil {
		return nil
	}
	memory, _ := strconv.Atoi(strings.Trim(m[3], "g.b")) // the form allows digits only
	return []int{int(m[2][0]), memory}
}

// spells reports whether the name asks for just these requests.
func spells(name string, requests map[int]nvml.Request) bool {
	cfg, err := Spelled(name)
	if err != nil {
		return false
	}
	left := len(requests)
	for _, rule := range cfg {
		for _, index := range rule.Indices {
			w, is := requests[index]
			devices := maps.Clone(w.Devices)
			maps.DeleteFunc(devices, func(_ string, n int) bool { return n == 0 })
			if !is || w.MIG != rule.MIG || rule.MIG && !maps.Equal(devices, rule.Devices) {
				return false
			}
			left--
		}
	}
	return left == 0
}

// spelledRequests returns the requests of the config that the name spells out, as Catalog.Requests does.
func spelledRequests(name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Request, error) {
	cfg, err := Spelled(name)
	if err != nil {
		return nil, err
	}
	return (&requestBuilder{config: name, spelled: true, gpus: gpus}).build(cfg)
}

// refuseUnknownProfiles refuses what a spelled name requests of a GPU that offers no such profile.
func (b *requestBuilder) refuseUnknownProfiles(g nvml.GPU, devices map[string]int) {
	if !b.spelled || g.Lost || len(g.Profiles) == 0 {
		return
	}
	for _, device := range slices.Sorted(maps.Keys(devices)) {
		if _, of, divided := strings.Cut(device, "c."); !offers(g, device) && !(divided && offers(g, of)) {
			var names []string
			for _, p := range g.Profiles {
				names = append(names, p.Name)
			}
			b.refuse(0, &check.InvalidError{
				Field: nameOf(g), Value: device, Want: fmt.Sprintf("is no profile of it: a %s offers %s", g.Model, strings.Join(names, ", ")),
			})
		}
	}
}

func offers(g nvml.GPU, profile string) bool {
	_, is := g.Profile(profile)
	return is
}
