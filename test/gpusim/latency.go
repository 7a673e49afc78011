package gpusim

import (
	"maps"
	"slices"
	"time"
)

// Latency profiles, for Spec.Latency: how long calls take on one kind of machine.
const (
	LatencyA100       = "a100"        // an A100
	LatencyHopperFast = "hopper-fast" // a Hopper GPU, as fast as it may be
	LatencyHopperSlow = "hopper-slow" // a Hopper GPU, as slow as it may be
	LatencyDense      = "dense"       // a large machine with many MIG devices, on which each handle of one takes long
	LatencyCautious   = "cautious"    // one slow figure for each call, on any GPU, with few MIG devices
)

// Basis is where a Figure comes from.
type Basis string

// The bases of figures.
const (
	Measured  Basis = "measured"  // by this project, on the hardware that the source names
	Published Basis = "published" // by others: in a log, an issue, a thesis, or a comment of source code
	Assumed   Basis = "assumed"   // there is no figure for this hardware; the source says what it follows
)

// Figure is how long calls take in some latency profiles.
type Figure struct {
	Calls    []string // names of functions
	Profiles []string
	Takes    time.Duration
	Basis    Basis
	Source   string // of the figure, for people
}

var figures = []Figure{
	{
		[]string{SetMigMode},
		[]string{LatencyA100},
		4500 * time.Millisecond, Published,
		"4 to 5 s for each of eight A100-SXM4-80GB, one after the other: NVIDIA/gpu-operator#351",
	},
	{
		[]string{SetMigMode},
		[]string{LatencyHopperFast},
		10 * time.Millisecond, Assumed,
		"no figure for on; off takes 1 ms on an H100 PCIe: pull request 1018 of NVIDIA's DRA driver",
	},
	{
		[]string{SetMigMode},
		[]string{LatencyHopperSlow, LatencyDense, LatencyCautious},
		4 * time.Second, Assumed,
		"that of an A100; no figure for a later GPU",
	},
	{
		[]string{CreateGpuInstance, CreateGpuInstanceWithPlacement},
		[]string{LatencyA100},
		14 * time.Millisecond, Published,
		"seven with their compute instances in 132 ms, the median of 300 runs of nvidia-smi: spcl/gpuless-thesis; the split is assumed",
	},
	{
		[]string{CreateGpuInstance, CreateGpuInstanceWithPlacement},
		[]string{LatencyHopperFast},
		14 * time.Millisecond, Assumed,
		"that of an A100",
	},
	{
		[]string{CreateComputeInstance, CreateComputeInstanceWithPlacement},
		[]string{LatencyA100},
		5 * time.Millisecond, Published,
		"as for the GPU instance",
	},
	{
		[]string{CreateComputeInstance, CreateComputeInstanceWithPlacement},
		[]string{LatencyHopperFast},
		5 * time.Millisecond, Assumed,
		"that of an A100",
	},
	{
		[]string{CreateGpuInstance, CreateGpuInstanceWithPlacement, CreateComputeInstance, CreateComputeInstanceWithPlacement},
		[]string{LatencyHopperSlow, LatencyDense, LatencyCautious},
		100 * time.Millisecond, Assumed,
		"both together take 130 to 160 ms on an A30: a comment of artecs-group/FAR_MIG_scheduler",
	},
	{
		[]string{GpuInstanceDestroy},
		[]string{LatencyA100},
		18 * time.Millisecond, Published,
		"seven with their compute instances in 164 ms, as above; the split is assumed",
	},
	{
		[]string{GpuInstanceDestroy},
		[]string{LatencyHopperFast},
		18 * time.Millisecond, Assumed,
		"that of an A100",
	},
	{
		[]string{GpuInstanceDestroy},
		[]string{LatencyHopperSlow, LatencyDense, LatencyCautious},
		time.Second, Published,
		"the order of 1 s on large machines under load: a comment in nvlib.go of NVIDIA's DRA driver",
	},
	{
		[]string{ComputeInstanceDestroy},
		[]string{LatencyA100},
		6 * time.Millisecond, Published,
		"as for the GPU instance",
	},
	{
		[]string{ComputeInstanceDestroy},
		[]string{LatencyHopperFast},
		6 * time.Millisecond, Assumed,
		"that of an A100",
	},
	{
		[]string{ComputeInstanceDestroy},
		[]string{LatencyHopperSlow, LatencyDense, LatencyCautious},
		100 * time.Millisecond, Assumed,
		"both together take 100 to 110 ms on an A30: a comment of artecs-group/FAR_MIG_scheduler",
	},
	{
		[]string{Reset},
		[]string{LatencyA100},
		8 * time.Second, Published,
		"a reset that was refused, of an A100-40GB PCIe: NVIDIA/gpu-operator#2376",
	},
	{
		[]string{Reset},
		[]string{LatencyHopperFast, LatencyHopperSlow, LatencyDense, LatencyCautious},
		5 * time.Second, Assumed,
		"no figure for a reset that was done",
	},
	{
		[]string{Init},
		[]string{LatencyHopperFast},
		10 * time.Millisecond, Published,
		"an H100 PCIe: pull request 1018 of NVIDIA's DRA driver",
	},
	{
		[]string{Init},
		[]string{LatencyHopperSlow, LatencyCautious},
		40 * time.Millisecond, Measured,
		"an H200 in persistence mode, 45 ms with a full read",
	},
	{
		[]string{Init},
		[]string{LatencyA100, LatencyDense},
		40 * time.Millisecond, Assumed,
		"that of an H200; without persistence mode 1 to 2 s on an A100: NVIDIA/gpu-operator#1606",
	},
	{
		[]string{GetMigMode},
		[]string{LatencyHopperFast, LatencyHopperSlow, LatencyCautious},
		290 * time.Microsecond, Measured,
		"an H200",
	},
	{
		[]string{GetMigMode},
		[]string{LatencyA100, LatencyDense},
		290 * time.Microsecond, Assumed,
		"that of an H200",
	},
	{
		[]string{GetMigDeviceHandleByIndex},
		[]string{LatencyDense},
		93 * time.Millisecond, Published,
		"5.23 s in the kernel for one nvidia-smi over 56 MIG devices of eight B200s: NVIDIA/gpu-operator#2155; that they are the handles' is assumed",
	},
	{
		[]string{ComputeInstanceGetInfo, WalkMIGDevice},
		[]string{LatencyDense},
		93 * time.Millisecond, Assumed,
		"they take a MIG device's handle, too; lists of instances take none, and no time",
	},
}

// Figures are those of all latency profiles. A call without a figure takes no time.
func Figures() []Figure { return slices.Clone(figures) }

// Latencies are the names of the latency profiles, sorted.
func Latencies() []string {
	names := map[string]bool{}
	for _, f := range figures {
		for _, p := range f.Profiles {
			names[p] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// latencies is how long each call takes in a latency profile.
func latencies(profile string) map[string]time.Duration {
	out := map[string]time.Duration{}
	for _, f := range figures {
		if slices.Contains(f.Profiles, profile) {
			for _, call := range f.Calls {
				out[call] = f.Takes
			}
		}
	}
	return out
}
