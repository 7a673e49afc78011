package nvml_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// The tables below are written by hand from NVIDIA's MIG user guide and, for the H200, from what one answered.

// sevenSlices is a GPU of the A100's shape. The names are 1g, 1g+me, 1g with double memory, 2g, 3g, 4g, 7g.
func sevenSlices(model string, engines func(slices int, media, whole bool) nvml.Engines, names ...string) nvml.GPU {
	at := func(size int, starts ...int) []nvml.Span {
		var out []nvml.Span
		for _, s := range starts {
			out = append(out, nvml.Span{Start: s, Size: size})
		}
		return out
	}
	g := nvml.GPU{UUID: "GPU-1", Model: model, Capable: true, Enabled: true, Pending: true}
	add := func(name string, slices, most int, media bool, places []nvml.Span) {
		g.Profiles = append(g.Profiles, nvml.Profile{
			Name: name, Slices: slices, Max: most, Placements: places,
			Engines: engines(slices, media, slices == 7), Compute: computeOf(slices),
		})
	}
	add(names[0], 1, 7, false, at(1, 0, 1, 2, 3, 4, 5, 6))
	add(names[1], 1, 1, true, at(1, 0, 1, 2, 3, 4, 5, 6))
	add(names[2], 1, 4, false, at(2, 0, 2, 4, 6))
	add(names[3], 2, 3, false, at(2, 0, 2, 4))
	add(names[4], 3, 2, false, at(4, 0, 4))
	add(names[5], 4, 1, false, at(4, 0))
	add(names[6], 7, 1, false, at(8, 0))
	return g
}

func computeOf(slices int) []nvml.ComputeProfile {
	var out []nvml.ComputeProfile
	for _, n := range []int{1, 2, 3, 4, 6, 7, 8, 16} {
		if n <= slices && (n != 3 || slices != 4) {
			places := computePlaces(slices, n)
			out = append(out, nvml.ComputeProfile{Name: fmt.Sprintf("%dc", n), Slices: n, Max: len(places), Placements: places})
		}
	}
	return out
}

// computePlaces are as "nvidia-smi mig -lcipp" prints them: at multiples of the size, rounded up to a power of two.
func computePlaces(slices, n int) []nvml.Span {
	step := 1
	for step < n {
		step *= 2
	}
	var out []nvml.Span
	for s := 0; s+n <= slices; s += step {
		out = append(out, nvml.Span{Start: s, Size: n})
	}
	return out
}

func hopperEngines(slices int, media, whole bool) nvml.Engines {
	e := nvml.Engines{Copy: slices, Decoder: slices, JPEG: slices}
	if whole {
		e.Copy++
	}
	if media || whole {
		e.OFA = 1
	}
	return e
}

func ampereEngines(slices int, media, whole bool) nvml.Engines {
	e := nvml.Engines{Copy: slices, Decoder: slices / 2}
	if whole {
		e.Decoder = 5
	}
	if media {
		e.Decoder = 1
	}
	if media || whole {
		e.JPEG, e.OFA = 1, 1
	}
	return e
}

func a100() nvml.GPU {
	return sevenSlices("NVIDIA A100-SXM4-80GB", ampereEngines,
		"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
}

func h100() nvml.GPU {
	return sevenSlices("NVIDIA H100 80GB HBM3", hopperEngines,
		"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
}

func h200() nvml.GPU {
	return sevenSlices("NVIDIA H200", hopperEngines,
		"1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")
}

func a30() nvml.GPU {
	spans := func(size int, starts ...int) []nvml.Span {
		var out []nvml.Span
		for _, s := range starts {
			out = append(out, nvml.Span{Start: s, Size: size})
		}
		return out
	}
	return nvml.GPU{UUID: "GPU-1", Model: "NVIDIA A30", Capable: true, Enabled: true, Pending: true, Profiles: []nvml.Profile{
		{Name: "1g.6gb", Slices: 1, Max: 4, Placements: spans(1, 0, 1, 2, 3), Engines: nvml.Engines{Copy: 1}, Compute: computeOf(1)},
		{
			Name: "1g.6gb+me", Slices: 1, Max: 1, Placements: spans(1, 0, 1, 2, 3),
			Engines: nvml.Engines{Copy: 1, Decoder: 1, JPEG: 1, OFA: 1}, Compute: computeOf(1),
		},
		{Name: "2g.12gb", Slices: 2, Max: 2, Placements: spans(2, 0, 2), Engines: nvml.Engines{Copy: 2, Decoder: 2}, Compute: computeOf(2)},
		{
			Name: "2g.12gb+me", Slices: 2, Max: 1, Placements: spans(2, 0, 2),
			Engines: nvml.Engines{Copy: 2, Decoder: 2, JPEG: 1, OFA: 1}, Compute: computeOf(2),
		},
		{
			Name: "4g.24gb", Slices: 4, Max: 1, Placements: spans(4, 0),
			Engines: nvml.Engines{Copy: 4, Decoder: 4, JPEG: 1, OFA: 1}, Compute: computeOf(4),
		},
	}}
}

// sixteen is a GPU larger than any there is, with profiles that hinder one another as much as they can.
func sixteen() nvml.GPU {
	g := nvml.GPU{UUID: "GPU-1", Model: "sixteen", Capable: true, Enabled: true, Pending: true}
	for _, p := range []struct {
		name               string
		slices, size, step int
	}{
		{"1g.6gb", 1, 1, 1},
		{"1g.6gb+me", 1, 1, 1},
		{"1g.6gb-me", 1, 1, 1},
		{"1g.6gb+gfx", 1, 1, 1},
		{"1g.12gb", 1, 2, 1},
		{"2g.12gb", 2, 2, 1},
		{"3g.24gb", 3, 4, 2},
		{"4g.24gb", 4, 4, 4},
		{"8g.48gb", 8, 8, 8},
		{"16g.96gb", 16, 16, 16},
	} {
		prof := nvml.Profile{Name: p.name, Slices: p.slices, Max: 16 / p.size, Compute: computeOf(p.slices)}
		for s := 0; s+p.size <= 16; s += p.step {
			prof.Placements = append(prof.Placements, nvml.Span{Start: s, Size: p.size})
		}
		g.Profiles = append(g.Profiles, prof)
	}
	return g
}

// stand puts instances on a GPU. A name that ends in "!" is busy, one that ends in "?" is half made. Of a divided instance parts may
// be: "3g.40gb(1c!+1c)@0"; and "3g.40gb(1c:2)@0" says where a part stands, which is else the lowest place that is free.
func stand(g nvml.GPU, placed ...string) nvml.GPU {
	g.Instances = nil
	for _, s := range placed {
		g.Instances = append(g.Instances, parseInstance(g, s))
	}
	return g
}

func parseInstance(g nvml.GPU, s string) nvml.Instance {
	all, half := strings.HasSuffix(s, "!"), strings.HasSuffix(s, "?")
	s = strings.TrimRight(s, "!?")
	var starts []int
	var busy []bool
	if before, rest, divided := strings.Cut(s, "("); divided {
		inside, behind, _ := strings.Cut(rest, ")")
		var names []string
		for part := range strings.SplitSeq(inside, "+") {
			busy = append(busy, strings.HasSuffix(part, "!"))
			name, at, _ := strings.Cut(strings.TrimSuffix(part, "!"), ":")
			start := -1
			if at != "" {
				start = int(at[0] - '0')
			}
			names, starts = append(names, name), append(starts, start)
		}
		s = before + "(" + strings.Join(names, "+") + ")" + behind
	}
	p := parsePlaced(g, s)
	if half {
		return nvml.Instance{Placed: p}
	}
	i := instance(g, p, starts...)
	if all {
		hold(&i)
	}
	for n, b := range busy {
		if b {
			hold(&i, n)
		}
	}
	return i
}

// hold puts a process on devices of the instance, or on what it does not say.
func hold(i *nvml.Instance, devices ...int) {
	p := nvml.Process{PID: 4711 + len(i.Processes), UsedMiB: 512}
	i.Processes = append(i.Processes, p)
	for _, n := range devices {
		i.Devices[n].Processes = append(i.Devices[n].Processes, p)
	}
}

// instance is one that stands, with its parts at the given places. For -1, and for want of a place, they stand as low as they can, the
// largest first.
func instance(g nvml.GPU, p nvml.Placed, starts ...int) nvml.Instance {
	i := nvml.Instance{Placed: p}
	profile, _ := g.Profile(p.Profile)
	names := []string{fmt.Sprintf("%dc", profile.Slices)}
	if p.Compute != "" {
		names = strings.Split(p.Compute, "+")
	}
	parts := make([]nvml.Part, len(names))
	for n := range slices.Backward(names) {
		parts[n].Name = names[n]
		for _, c := range profile.Compute {
			for _, at := range c.Placements {
				taken := slices.ContainsFunc(parts, func(o nvml.Part) bool { return o.Overlaps(at) })
				if c.Name != names[n] || parts[n].Size > 0 || n < len(starts) && starts[n] >= 0 && starts[n] != at.Start || taken {
					continue
				}
				parts[n].Span = at
			}
		}
		if parts[n].Size == 0 {
			panic(fmt.Sprintf("%v: there is no room for %s", p, names[n]))
		}
	}
	for n, name := range p.Devices() {
		i.Devices = append(i.Devices, nvml.Device{UUID: fmt.Sprintf("MIG-%v-%d", p, n), Profile: name, Part: parts[n]})
	}
	return i
}

// parsePlaced finds the place of the GPU that prints as s.
func parsePlaced(g nvml.GPU, s string) nvml.Placed {
	for _, p := range everyPlace(g) {
		if p.String() == s {
			return p
		}
	}
	panic(fmt.Sprintf("%s is no place on %s", s, g.Model))
}

// everyPlace lists all instances that can stand, undivided and with some divisions.
func everyPlace(g nvml.GPU) []nvml.Placed {
	var out []nvml.Placed
	for _, p := range g.Profiles {
		layouts := []string{""}
		if p.Slices >= 2 {
			layouts = append(layouts, "1c", "1c+1c")
		}
		if p.Slices >= 3 {
			layouts = append(layouts, "2c", "1c+2c", "1c+1c+1c")
		}
		if p.Slices >= 4 {
			layouts = append(layouts, "1c+1c+2c", "2c+2c")
		}
		for _, at := range p.Placements {
			for _, l := range layouts {
				out = append(out, nvml.Placed{Profile: p.Name, Span: at, Compute: l})
			}
		}
	}
	return out
}

// anywhere are random places for the parts of an instance, or none where they would be in each other's way.
func anywhere(r *rand.Rand, g nvml.GPU, p nvml.Placed) []int {
	profile, _ := g.Profile(p.Profile)
	var starts []int
	var taken []nvml.Span
	for name := range strings.SplitSeq(p.Compute, "+") {
		at := slices.IndexFunc(profile.Compute, func(c nvml.ComputeProfile) bool { return c.Name == name })
		if at < 0 {
			return nil
		}
		places := profile.Compute[at].Placements
		place := places[r.IntN(len(places))]
		if slices.ContainsFunc(taken, place.Overlaps) {
			return nil
		}
		starts, taken = append(starts, place.Start), append(taken, place)
	}
	return starts
}

// crowd puts random instances on a GPU, some of their parts busy, some half made.
func crowd(r *rand.Rand, g nvml.GPU) nvml.GPU {
	places := everyPlace(g)
	g.Instances = nil
	for range 12 {
		p := places[r.IntN(len(places))]
		free := true
		for _, i := range g.Instances {
			free = free && !i.Overlaps(p.Span)
		}
		if !free || r.IntN(4) == 0 {
			continue
		}
		i := instance(g, p, anywhere(r, g, p)...)
		switch r.IntN(8) {
		case 0:
			hold(&i)
		case 1, 2, 3:
			for n := range i.Devices {
				switch r.IntN(4) {
				case 0:
					hold(&i, n)
				case 1:
					i.Devices[n].Held = true
				}
			}
		case 4:
			i.Devices, i.Compute = nil, ""
		}
		g.Instances = append(g.Instances, i)
	}
	return g
}
