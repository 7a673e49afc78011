package nvml

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// MaxDevices is the most MIG devices of one name in a request for a GPU. The largest GPU known holds 7, so that a request
// for more than this is a slip; and counts with a bound can be added and multiplied without overflow.
const MaxDevices = 1000

// wanted is one line of a request: so many MIG devices of one name.
type wanted struct {
	profile Profile
	compute ComputeProfile // zero for a device that is the whole instance
	count   int
}

// whole reports whether the device is the whole GPU instance.
func (w wanted) whole() bool { return w.compute.Name == "" }

func (w wanted) name() string {
	if w.whole() {
		return w.profile.Name
	}
	return w.compute.Name + "." + w.profile.Name
}

// readRequest resolves the names of a request to profiles of the GPU, largest first, each line once.
func readRequest(g GPU, devices map[string]int) ([]wanted, *Impossible) {
	var request []wanted
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		count := devices[name]
		if count < 0 {
			return nil, &Impossible{Reason: fmt.Sprintf("%s: %d is not a count; give 0 or more", name, count)}
		}
		if count == 0 {
			continue
		}
		w, refused := readDevice(g, name)
		if refused != nil {
			return nil, refused
		}
		at := slices.IndexFunc(request, func(o wanted) bool { return o.name() == w.name() })
		if at < 0 {
			request = append(request, w)
			at = len(request) - 1
		}
		if count > MaxDevices-request[at].count {
			return nil, &Impossible{Reason: fmt.Sprintf("%s: %d is more than any GPU holds; give at most %d", name, count, MaxDevices)}
		}
		request[at].count += count
	}
	slices.SortFunc(request, func(a, b wanted) int {
		return cmp.Or(compareProfiles(b.profile, a.profile), cmp.Compare(b.computeSlices(), a.computeSlices()))
	})
	return request, nil
}

// compareProfiles orders profiles from the smallest to the largest.
func compareProfiles(a, b Profile) int {
	return cmp.Or(cmp.Compare(memorySize(a), memorySize(b)), cmp.Compare(a.Slices, b.Slices), cmp.Compare(b.Name, a.Name))
}

// computeSlices gives the compute slices that one device of the line takes.
func (w wanted) computeSlices() int {
	if w.whole() {
		return w.profile.Slices
	}
	return w.compute.Slices
}

// readDevice resolves the name of one MIG device.
func readDevice(g GPU, name string) (wanted, *Impossible) {
	for _, p := range g.Profiles {
		if sameName(p.Name, name) {
			p.Max = g.Holds(p)
			return wanted{profile: p}, nil
		}
	}
	compute, rest, found := strings.Cut(name, ".")
	for _, p := range g.Profiles {
		if !found || !sameName(p.Name, rest) {
			continue
		}
		p.Max = g.Holds(p)
		for _, c := range p.Compute {
			switch {
			case c.Name != compute:
			case c.Slices == p.Slices:
				return wanted{profile: p}, nil
			default:
				return wanted{profile: p, compute: c}, nil
			}
		}
		return wanted{}, &Impossible{Reason: fmt.Sprintf("%s cannot be divided into %s: it offers %s",
			p.Name, compute, orNothing(computeNames(p)))}
	}
	if len(g.Profiles) == 0 {
		return wanted{}, &Impossible{Reason: fmt.Sprintf("%s cannot be cut into instances, so there is no %s", model(g), name)}
	}
	return wanted{}, &Impossible{Reason: fmt.Sprintf("unknown profile %s: %s offers %s", name, model(g),
		strings.Join(profileNames(g), ", "))}
}

func profileNames(g GPU) []string {
	sorted := slices.SortedFunc(slices.Values(g.Profiles), func(a, b Profile) int {
		return cmp.Or(cmp.Compare(a.Slices, b.Slices), cmp.Compare(memorySize(a), memorySize(b)), cmp.Compare(a.Name, b.Name))
	})
	var out []string
	for _, p := range sorted {
		out = append(out, p.Name)
	}
	return out
}

func computeNames(p Profile) []string {
	var out []string
	for _, c := range p.Compute {
		out = append(out, c.Name)
	}
	return out
}

func orNothing(names []string) string {
	if len(names) == 0 {
		return "nothing smaller"
	}
	return strings.Join(names, ", ")
}

func model(g GPU) string { return cmp.Or(g.Model, "this GPU") }
