package nvml

import (
	"fmt"
	"slices"
	"strings"
)

// division is the cheapest way to divide an instance that stands, and stays, otherwise than it is.
type division struct {
	destroy, create []Part // in order of place
	worth           int    // of the devices that stay
}

// divide finds the cheapest way to divide an existing instance as compute says, in the form of Placed.Compute. It is false if parts are missing and
// their possible places are unknown. The GPU instance must then be recreated, unless it has no part yet.
//
// It solves for the compute slices of one instance what Solve solves for the memory slices of a GPU.
func divide(g GPU, i Instance, compute string) (division, bool) {
	if i.Compute == compute && !i.HalfMade() {
		return division{worth: i.worth(i.Devices)}, true
	}
	profile, ok := g.Profile(i.Profile)
	if !ok || slices.ContainsFunc(i.Devices, func(d Device) bool { return d.Part.Size == 0 }) {
		return division{}, false
	}
	kinds, slots := i.kinds(profile, compute)
	target, worth, ok := place(slots, kinds, func(p Placed) int {
		at := slices.IndexFunc(i.Devices, func(d Device) bool { return d.Part == p.part() })
		if at < 0 {
			return 0
		}
		return i.worth(i.Devices[at : at+1])
	})
	if !ok {
		return division{}, false
	}
	out := division{worth: worth}
	for _, d := range i.Devices {
		if !slices.ContainsFunc(target, func(p Placed) bool { return d.Part == p.part() }) {
			out.destroy = append(out.destroy, d.Part)
		}
	}
	for _, p := range target {
		if !slices.ContainsFunc(i.Devices, func(d Device) bool { return d.Part == p.part() }) {
			out.create = append(out.create, p.part())
		}
	}
	slices.SortFunc(out.destroy, ComparePart)
	return out, true
}

// worth gives the worth of keeping these of the instance's devices.
func (i Instance) worth(devices []Device) int {
	worth := 0
	for _, d := range devices {
		worth += worthDevice
		if d.Held || len(i.ProcessesOn(d)) > 0 {
			worth += worthBusy
		}
	}
	return worth
}

// kinds are the parts that an instance shall have, with the places that each can have: those that its profile says, and those where
// such parts stand. With them comes the number of compute slices that the places are on.
func (i Instance) kinds(p Profile, compute string) (kinds []kind, slots int) {
	for _, name := range partNames(p, compute) {
		if at := slices.IndexFunc(kinds, func(k kind) bool { return k.profile.Name == name }); at >= 0 {
			kinds[at].count++
			continue
		}
		offer := Profile{Name: name}
		if at := slices.IndexFunc(p.Compute, func(c ComputeProfile) bool { return c.Name == name }); at >= 0 {
			offer.Slices, offer.Placements = p.Compute[at].Slices, slices.Clone(p.Compute[at].Placements)
		}
		for _, d := range i.Devices {
			if d.Part.Name == name && !slices.Contains(offer.Placements, d.Part.Span) {
				offer.Placements = append(offer.Placements, d.Part.Span)
			}
		}
		for _, at := range offer.Placements {
			slots = max(slots, at.End())
		}
		kinds = append(kinds, kind{profile: offer, count: 1})
	}
	return kinds, slots
}

// partNames are the names of the parts of an instance, as Placed.Compute writes them.
func partNames(p Profile, compute string) []string {
	if compute == "" {
		return []string{fmt.Sprintf("%dc", p.Slices)}
	}
	return strings.Split(compute, "+")
}

// part is an instance of compute slices, which is what divide has placed.
func (p Placed) part() Part { return Part{Name: p.Profile, Span: p.Span} }
