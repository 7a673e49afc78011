package main

import (
	"cmp"
	"fmt"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// scenario is a state of a node's GPUs and a requested change. It is a row of the table.
type scenario struct {
	name  string
	gpus  []gpusim.GPUSpec
	start []map[string]int // how each GPU is cut at first, as counts of profiles; nil is not at all
	users map[string]int   // pods that hold an instance each, or processes where there are no pods, by its profile
	rules string           // of the config, as mig-parted's file has them, in flow style

	// replicas is how often each GPU shall be offered in the end, by time-slicing; 0 where the scenario is about MIG.
	replicas int

	// config is the name that the node requests. Each node requests another one: nodes that request the same share a pool, and few nodes of a pool change at a
	// time.
	config string

	// latency is the latency profile of the simulated GPUs; empty for the cautious one.
	latency string

	dra bool // NVIDIA's DRA driver offers the GPUs, in place of the device plugin
}

// sharing reports whether the scenario changes what the device plugin offers, and not the GPUs.
func (s scenario) sharing() bool { return s.replicas > 0 }

// scenarios are all rows, in the order of the table. Where mig-parted's format allows several rules for the same
// layout, these are the rules that NVIDIA's tools do best with.
var scenarios = []scenario{
	{
		name:  "no-op: eight H100s are as asked",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
		start: repeat(8, map[string]int{"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}),
		users: map[string]int{"3g.40gb": 8},
		rules: `[{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}]`,
	},
	{
		name:  "one H100 of eight: its three idle slices become one, its 4g stays in use",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
		start: append(repeat(1, map[string]int{"4g.40gb": 1, "1g.10gb": 3}), repeat(7, map[string]int{"3g.40gb": 2})...),
		users: map[string]int{"4g.40gb": 1, "3g.40gb": 14},
		rules: `[{devices: [0], mig-enabled: true, mig-devices: {4g.40gb: 1, 3g.40gb: 1}},
		         {devices: [1, 2, 3, 4, 5, 6, 7], mig-enabled: true, mig-devices: {3g.40gb: 2}}]`,
	},
	{
		name:  "one H100 of eight: what a pod uses has to be cut up",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
		start: append(repeat(1, map[string]int{"4g.40gb": 1, "1g.10gb": 3}), repeat(7, map[string]int{"3g.40gb": 2})...),
		users: map[string]int{"4g.40gb": 1, "3g.40gb": 14},
		rules: `[{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}},
		         {devices: [1, 2, 3, 4, 5, 6, 7], mig-enabled: true, mig-devices: {3g.40gb: 2}}]`,
	},
	{
		name:  "eight H100s in 56 slices, all in use: one GPU becomes two halves",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
		start: repeat(8, map[string]int{"1g.10gb": 7}),
		users: map[string]int{"1g.10gb": 56},
		rules: `[{devices: [3], mig-enabled: true, mig-devices: {3g.40gb: 2}},
		         {devices: [0, 1, 2, 4, 5, 6, 7], mig-enabled: true, mig-devices: {1g.10gb: 7}}]`,
	},
	{
		name:  "eight H100s: MIG off to all-1g",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8}},
		start: repeat(8, nil),
		rules: `[{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}]`,
	},
	{
		name:  "two A30s and two H100s: all-1g to all-balanced",
		gpus:  []gpusim.GPUSpec{{Model: "A30", Count: 2, MIG: true}, {Model: "H100-80GB", Count: 2, MIG: true}},
		start: append(repeat(2, map[string]int{"1g.6gb": 4}), repeat(2, map[string]int{"1g.10gb": 7})...),
		rules: `[{device-filter: "0x20B710DE", devices: all, mig-enabled: true, mig-devices: {1g.6gb: 2, 2g.12gb: 1}},
		         {device-filter: "0x233010DE", devices: all, mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}]`,
	},
	{
		name:  "one A100 of eight: MIG off to all-1g, the others in use",
		gpus:  []gpusim.GPUSpec{{Model: "A100-80GB"}, {Model: "A100-80GB", Count: 7, MIG: true}},
		start: append(repeat(1, nil), repeat(7, map[string]int{"3g.40gb": 2})...),
		users: map[string]int{"3g.40gb": 14},
		rules: `[{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}}]`,
	},
	{
		name: "the same, in persistence mode",
		gpus: []gpusim.GPUSpec{
			{Model: "A100-80GB", Persistence: true}, {Model: "A100-80GB", Count: 7, MIG: true, Persistence: true},
		},
		start: append(repeat(1, nil), repeat(7, map[string]int{"3g.40gb": 2})...),
		users: map[string]int{"3g.40gb": 14},
		rules: `[{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}}]`,
	},
	{
		name:     "eight H100s: each shared by four, by time-slicing",
		gpus:     []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8}},
		start:    repeat(8, nil),
		replicas: 4,
	},
	{
		name:  "cut under DRA: one H100 of eight, whose idle slices become seven",
		gpus:  []gpusim.GPUSpec{{Model: "H100-80GB", Count: 8, MIG: true}},
		start: append(repeat(1, map[string]int{"4g.40gb": 1, "1g.10gb": 3}), repeat(7, map[string]int{"3g.40gb": 2})...),
		users: map[string]int{"3g.40gb": 14},
		rules: `[{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}},
		         {devices: [1, 2, 3, 4, 5, 6, 7], mig-enabled: true, mig-devices: {3g.40gb: 2}}]`,
		dra: true,
	},
}

// profiled are the rows of the table by latency profile: two changes, on GPUs that nothing uses, as NVIDIA's tools ask for.
var profiled = []scenario{
	recut(gpusim.LatencyA100, "A100-80GB", "1g.10gb", "3g.40gb"),
	recut(gpusim.LatencyHopperFast, "H100-80GB", "1g.10gb", "3g.40gb"),
	recut(gpusim.LatencyHopperSlow, "H100-80GB", "1g.10gb", "3g.40gb"),
	recut(gpusim.LatencyDense, "B200", "1g.23gb", "3g.90gb"),
	firstCut(gpusim.LatencyA100, "A100-80GB", "1g.10gb"),
	firstCut(gpusim.LatencyHopperFast, "H100-80GB", "1g.10gb"),
	firstCut(gpusim.LatencyHopperSlow, "H100-80GB", "1g.10gb"),
}

// recut is one GPU of eight that becomes two halves.
func recut(latency, model, slice, half string) scenario {
	return scenario{
		name:    fmt.Sprintf("%s: eight simulated %ss in 56 slices, one becomes two halves", latency, model),
		gpus:    []gpusim.GPUSpec{{Model: model, Count: 8, MIG: true}},
		start:   repeat(8, map[string]int{slice: 7}),
		latency: latency,
		rules: fmt.Sprintf(`[{devices: [3], mig-enabled: true, mig-devices: {%s: 2}},
		         {devices: [0, 1, 2, 4, 5, 6, 7], mig-enabled: true, mig-devices: {%s: 7}}]`, half, slice),
	}
}

// firstCut is eight whole GPUs that become slices.
func firstCut(latency, model, slice string) scenario {
	return scenario{
		name:    fmt.Sprintf("%s: eight simulated %ss, MIG off to 56 slices", latency, model),
		gpus:    []gpusim.GPUSpec{{Model: model, Count: 8}},
		start:   repeat(8, nil),
		latency: latency,
		rules:   fmt.Sprintf(`[{devices: all, mig-enabled: true, mig-devices: {%s: 7}}]`, slice),
	}
}

func repeat(n int, devices map[string]int) []map[string]int {
	out := make([]map[string]int, n)
	for i := range out {
		out[i] = devices
	}
	return out
}

// file is the scenario's config as NVIDIA's tools and our agent read it.
func (s scenario) file() []byte {
	return fmt.Appendf(nil, "version: v1\nmig-configs:\n  %s: %s\n", cmp.Or(s.config, "requested"), s.rules)
}

// spec is the scenario's GPUs. Their calls take as long as on hardware.
func (s scenario) spec() gpusim.Spec {
	return gpusim.Spec{GPUs: s.gpus, Latency: cmp.Or(s.latency, gpusim.LatencyCautious)}
}

// capacity is what a node with these GPUs advertises while they are not shared.
func (s scenario) capacity(gpus []nvml.GPU) map[string]int {
	if s.dra {
		return devices(gpus)
	}
	return capacity(gpus)
}

// offers is what a node with these GPUs has to offer in the end.
func (s scenario) offers(gpus []nvml.GPU) map[string]int {
	out := s.capacity(gpus)
	if s.sharing() {
		for resource := range out {
			out[resource] *= s.replicas
		}
	}
	return out
}

// want is how the GPUs shall be cut in the end. GPUs that the config does not name keep their current cut.
func (s scenario) want(before []nvml.GPU) ([]cut, error) {
	if s.sharing() {
		return cuts(before), nil
	}
	configs, err := migparted.Parse(s.file())
	if err != nil {
		return nil, fmt.Errorf("reading the config of scenario %q: %w", s.name, err)
	}
	requests, err := catalog.Merge(nil, configs).Requests(cmp.Or(s.config, "requested"), before)
	if err != nil {
		return nil, fmt.Errorf("reading the config of scenario %q: %w", s.name, err)
	}
	out := cuts(before)
	for i, gpu := range before {
		if w, named := requests[gpu.UUID]; named {
			out[i] = cut{MIG: w.MIG, Devices: w.Devices}
		}
	}
	return out, nil
}
