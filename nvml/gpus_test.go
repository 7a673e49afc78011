package nvml_test

import (
	"fmt"
	"math/rand/v2"

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
	for _, n := range []int{1, 2, 3, 4, 7} {
		if n <= slices && (n != 3 || slices != 4) {
			out = append(out, nvml.ComputeProfile{Name: fmt.Sprintf("%dc", n), Slices: n, Max: slices / n})
		}
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

// stand puts instances on a GPU. A name that ends in "!" is busy, one that ends in "?" is half made.
func stand(g nvml.GPU, placed ...string) nvml.GPU {
	g.Instances = nil
	for _, s := range placed {
		mark := s[len(s)-1]
		if mark == '!' || mark == '?' {
			s = s[:len(s)-1]
		}
		i := instance(parsePlaced(g, s))
		switch mark {
		case '!':
			i.Processes = []nvml.Process{{PID: 4711, UsedMiB: 512}}
		case '?':
			i.Devices = nil
		}
		g.Instances = append(g.Instances, i)
	}
	return g
}

func instance(p nvml.Placed) nvml.Instance {
	i := nvml.Instance{Placed: p}
	for n, name := range p.Devices() {
		i.Devices = append(i.Devices, nvml.Device{UUID: fmt.Sprintf("MIG-%v-%d", p, n), Profile: name})
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

// crowd puts random instances on a GPU, some busy, some half made.
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
		i := instance(p)
		switch r.IntN(6) {
		case 0, 1:
			i.Processes = []nvml.Process{{PID: 1}}
		case 2:
			i.Devices, i.Compute = nil, ""
		}
		g.Instances = append(g.Instances, i)
	}
	return g
}
