package gpusim

import (
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// Architectures, as nvmlDeviceGetArchitecture numbers them.
const (
	turing    = 6
	ampere    = 7
	ada       = 8
	hopper    = 9
	blackwell = 10
)

// Kinds of GPU instance profiles, as nvml.h numbers them: an index to ask by, not the profile's id.
const (
	kind1 = iota
	kind2
	kind3
	kind4
	kind7
	kind8
	kind6
	kind1Media
	kind2Media
	kind1DoubleMemory
	kind1Graphics
	kind2Graphics
	kind4Graphics
	kind1NoMedia
	kind2NoMedia
	kind1AllMedia
	kind2AllMedia
	knownKinds // what driver 580 knows: from here on it answers INVALID_ARGUMENT
)

// model is what is fixed about one kind of GPU.
type model struct {
	Name        string // what NVML calls it
	Arch        uint32
	Compute     [2]int // CUDA compute capability
	DeviceID    uint32 // PCI device id over vendor id
	SubsystemID uint32
	Brand       uint32
	Class       uint32 // PCI class
	Memory      uint64 // bytes, as nvmlDeviceGetMemoryInfo says
	CUDACores   int
	EventTypes  uint64

	Slices       int          // compute slices; 0 if it cannot be cut
	MemorySlices int          // units of the placement grid
	Engines      nvml.Engines // what all instances together can have
	Profiles     []profile
}

// profile is one kind of GPU instance of a model.
type profile struct {
	Kind     int    // index that nvmlDeviceGetGpuInstanceProfileInfo is asked by
	ID       int    // what it answers with, and what instances are created by
	Name     string // without the leading "MIG "
	Slices   int    // compute slices
	Count    int    // how many of it an empty GPU holds
	SMs      int
	MemoryMB int
	Engines  nvml.Engines
	Size     int   // memory slices
	Starts   []int // where one may stand
}

// resetsForMode reports whether a change of MIG mode needs a reset, and is kept over a reboot: Ampere.
func (m *model) resetsForMode() bool { return m.Arch == ampere }

func (m *model) profile(id int) *profile {
	for i := range m.Profiles {
		if m.Profiles[i].ID == id {
			return &m.Profiles[i]
		}
	}
	return nil
}

func (m *model) profileOfKind(kind int) *profile {
	for i := range m.Profiles {
		if m.Profiles[i].Kind == kind {
			return &m.Profiles[i]
		}
	}
	return nil
}

// slotCount is how many MIG devices the GPU can have at once.
func (m *model) slotCount() int { return m.Slices }

// Models are the names that a Spec may use.
func Models() []string { return slices.Sorted(maps.Keys(models)) }

// ModelsWithMIG are those that can be cut.
func ModelsWithMIG() []string {
	return slices.DeleteFunc(Models(), func(name string) bool { return models[name].Slices == 0 })
}

// Like returns the model with the most profiles of a real GPU, and of its generation where there are several, and whether it has all of them.
func Like(g nvml.GPU) (name string, all bool) {
	best := -1
	for _, candidate := range Models() {
		m := models[candidate]
		shared, generation := 0, 0
		for _, p := range m.Profiles {
			if _, has := g.Profile(p.Name); has {
				shared++
			}
		}
		if m.Compute[0] == g.ComputeCapability.Major {
			generation = 1
			if m.Compute[1] == g.ComputeCapability.Minor {
				generation = 2
			}
		}
		if score := 3*shared + generation; score > best {
			best, name, all = score, candidate, shared == len(g.Profiles) && generation > 0
		}
	}
	return name, all
}

var (
	singles = []int{0, 1, 2, 3, 4, 5, 6}
	doubles = []int{0, 2, 4, 6}
	pairs   = []int{0, 2, 4}
	halves  = []int{0, 4}
	whole   = []int{0}
)

// engines is written in the order of NVIDIA's tables.
func engines(ce, dec, enc, jpeg, ofa int) nvml.Engines {
	return nvml.Engines{Copy: ce, Decoder: dec, Encoder: enc, JPEG: jpeg, OFA: ofa}
}

// measuredEvents are the event types that a real H200 supports; the others are taken to be the same.
const measuredEvents = 0xff9f

// models, by the name used in a Spec. Profile ids and placements are the same on all 7-slice GPUs. They were measured
// on a real H200 with driver 580, and match `nvidia-smi mig -lgip` and `-lgipp` on A100 and H100.
var models = map[string]*model{
	// Profiles: MIG User Guide; SMs and memory: `nvidia-smi mig -lgip` (4.75, 9.62, 19.5 and 39.25 GiB).
	"A100-40GB": {
		Name: "NVIDIA A100-SXM4-40GB", Arch: ampere, Compute: [2]int{8, 0}, DeviceID: 0x20b010de, SubsystemID: 0x144e10de,
		Brand: 14, Class: 0x030200, Memory: 40960 << 20, CUDACores: 6912, EventTypes: measuredEvents,
		Slices: 7, MemorySlices: 8, Engines: engines(7, 5, 0, 1, 1),
		Profiles: []profile{
			{kind1, 19, "1g.5gb", 1, 7, 14, 4864, engines(1, 0, 0, 0, 0), 1, singles},
			{kind2, 14, "2g.10gb", 2, 3, 28, 9856, engines(2, 1, 0, 0, 0), 2, pairs},
			{kind3, 9, "3g.20gb", 3, 2, 42, 19968, engines(3, 2, 0, 0, 0), 4, halves},
			{kind4, 5, "4g.20gb", 4, 1, 56, 19968, engines(4, 2, 0, 0, 0), 4, whole},
			{kind7, 0, "7g.40gb", 7, 1, 98, 40192, engines(7, 5, 0, 1, 1), 8, whole},
			{kind1Media, 20, "1g.5gb+me", 1, 1, 14, 4864, engines(1, 1, 0, 1, 1), 1, singles},
			{kind1DoubleMemory, 15, "1g.10gb", 1, 4, 14, 9856, engines(1, 1, 0, 0, 0), 2, doubles},
		},
	},
	// Profiles: MIG User Guide; SMs and memory: `nvidia-smi mig -lgip` (9.5, 19.5, 39.25 and 78.75 GiB).
	"A100-80GB": {
		Name: "NVIDIA A100-SXM4-80GB", Arch: ampere, Compute: [2]int{8, 0}, DeviceID: 0x20b210de, SubsystemID: 0x147f10de,
		Brand: 14, Class: 0x030200, Memory: 81920 << 20, CUDACores: 6912, EventTypes: measuredEvents,
		Slices: 7, MemorySlices: 8, Engines: engines(7, 5, 0, 1, 1),
		Profiles: []profile{
			{kind1, 19, "1g.10gb", 1, 7, 14, 9728, engines(1, 0, 0, 0, 0), 1, singles},
			{kind2, 14, "2g.20gb", 2, 3, 28, 19968, engines(2, 1, 0, 0, 0), 2, pairs},
			{kind3, 9, "3g.40gb", 3, 2, 42, 40192, engines(3, 2, 0, 0, 0), 4, halves},
			{kind4, 5, "4g.40gb", 4, 1, 56, 40192, engines(4, 2, 0, 0, 0), 4, whole},
			{kind7, 0, "7g.80gb", 7, 1, 98, 80640, engines(7, 5, 0, 1, 1), 8, whole},
			{kind1Media, 20, "1g.10gb+me", 1, 1, 14, 9728, engines(1, 1, 0, 1, 1), 1, singles},
			{kind1DoubleMemory, 15, "1g.20gb", 1, 4, 14, 19968, engines(1, 1, 0, 0, 0), 2, doubles},
		},
	},
	// `nvidia-smi mig -lgip` and `-lgipp` of an A30: ids 14, 21, 5, 6, 0 on a grid of 4 (5.81, 11.69 and 23.44 GiB).
	"A30": {
		Name: "NVIDIA A30", Arch: ampere, Compute: [2]int{8, 0}, DeviceID: 0x20b710de, SubsystemID: 0x153210de,
		Brand: 14, Class: 0x030200, Memory: 24576 << 20, CUDACores: 3584, EventTypes: measuredEvents,
		Slices: 4, MemorySlices: 4, Engines: engines(4, 4, 0, 1, 1),
		Profiles: []profile{
			{kind1, 14, "1g.6gb", 1, 4, 14, 5952, engines(1, 1, 0, 0, 0), 1, []int{0, 1, 2, 3}},
			{kind2, 5, "2g.12gb", 2, 2, 28, 11968, engines(2, 2, 0, 0, 0), 2, []int{0, 2}},
			{kind4, 0, "4g.24gb", 4, 1, 56, 24000, engines(4, 4, 0, 1, 1), 4, whole},
			{kind1Media, 21, "1g.6gb+me", 1, 1, 14, 5952, engines(1, 1, 0, 1, 1), 1, []int{0, 1, 2, 3}},
			{kind2Media, 6, "2g.12gb+me", 2, 1, 28, 11968, engines(2, 2, 0, 1, 1), 2, []int{0, 2}},
		},
	},
	// `nvidia-smi mig -lgip` of an H100 80GB HBM3 (9.75, 19.62, 39.5 and 79.25 GiB).
	"H100-80GB": {
		Name: "NVIDIA H100 80GB HBM3", Arch: hopper, Compute: [2]int{9, 0}, DeviceID: 0x233010de, SubsystemID: 0x16c110de,
		Brand: 14, Class: 0x030200, Memory: 81559 << 20, CUDACores: 16896, EventTypes: measuredEvents,
		Slices: 7, MemorySlices: 8, Engines: engines(8, 7, 0, 7, 1),
		Profiles: []profile{
			{kind1, 19, "1g.10gb", 1, 7, 16, 9984, engines(1, 1, 0, 1, 0), 1, singles},
			{kind2, 14, "2g.20gb", 2, 3, 32, 20096, engines(2, 2, 0, 2, 0), 2, pairs},
			{kind3, 9, "3g.40gb", 3, 2, 60, 40448, engines(3, 3, 0, 3, 0), 4, halves},
			{kind4, 5, "4g.40gb", 4, 1, 64, 40448, engines(4, 4, 0, 4, 0), 4, whole},
			{kind7, 0, "7g.80gb", 7, 1, 132, 81152, engines(8, 7, 0, 7, 1), 8, whole},
			{kind1Media, 20, "1g.10gb+me", 1, 1, 16, 9984, engines(1, 1, 0, 1, 1), 1, singles},
			{kind1DoubleMemory, 15, "1g.20gb", 1, 4, 26, 20096, engines(1, 1, 0, 1, 0), 2, doubles},
		},
	},
	// Every number measured on a real one, driver 580.159.04.
	"H200": {
		Name: "NVIDIA H200", Arch: hopper, Compute: [2]int{9, 0}, DeviceID: 0x233510de, SubsystemID: 0x18bf10de,
		Brand: 14, Class: 0x030200, Memory: 150754820096, CUDACores: 16896, EventTypes: measuredEvents,
		Slices: 7, MemorySlices: 8, Engines: engines(8, 7, 0, 7, 1),
		Profiles: []profile{
			{kind1, 19, "1g.18gb", 1, 7, 16, 16384, engines(1, 1, 0, 1, 0), 1, singles},
			{kind2, 14, "2g.35gb", 2, 3, 32, 33280, engines(2, 2, 0, 2, 0), 2, pairs},
			{kind3, 9, "3g.71gb", 3, 2, 60, 71424, engines(3, 3, 0, 3, 0), 4, halves},
			{kind4, 5, "4g.71gb", 4, 1, 64, 71424, engines(4, 4, 0, 4, 0), 4, whole},
			{kind7, 0, "7g.141gb", 7, 1, 132, 143360, engines(8, 7, 0, 7, 1), 8, whole},
			{kind1Media, 20, "1g.18gb+me", 1, 1, 16, 16384, engines(1, 1, 0, 1, 1), 1, singles},
			{kind1DoubleMemory, 15, "1g.35gb", 1, 4, 26, 33280, engines(1, 1, 0, 1, 0), 2, doubles},
		},
	},
	// Names and counts: MIG User Guide. Ids and placements: as on all 7-slice GPUs. The profiles of one and two compute
	// slices: `nvidia-smi mig -lgip` as NVIDIA/mig-parted pull requests 166 and 187 print it (22, or by board and
	// driver 20.5, and 44.25 GiB). The guide has 3 copy engines and one decoder for 2g.45gb, which really has 4 and 2.
	// So the larger profiles here have one decoder and one JPEG engine a compute slice, as on an H200. These, and SMs
	// and memory of the larger profiles, are estimates.
	"B200": {
		Name: "NVIDIA B200", Arch: blackwell, Compute: [2]int{10, 0}, DeviceID: 0x290110de, SubsystemID: 0x199910de,
		Brand: 14, Class: 0x030200, Memory: 183359 << 20, CUDACores: 18944, EventTypes: measuredEvents,
		Slices: 7, MemorySlices: 8, Engines: engines(16, 7, 0, 7, 1),
		Profiles: []profile{
			{kind1, 19, "1g.23gb", 1, 7, 18, 22528, engines(2, 1, 0, 1, 0), 1, singles},
			{kind2, 14, "2g.45gb", 2, 3, 36, 45312, engines(4, 2, 0, 2, 0), 2, pairs},
			{kind3, 9, "3g.90gb", 3, 2, 70, 90112, engines(6, 3, 0, 3, 0), 4, halves},
			{kind4, 5, "4g.90gb", 4, 1, 72, 90112, engines(8, 4, 0, 4, 0), 4, whole},
			{kind7, 0, "7g.180gb", 7, 1, 148, 181248, engines(16, 7, 0, 7, 1), 8, whole},
			{kind1Media, 20, "1g.23gb+me", 1, 1, 18, 22528, engines(2, 1, 0, 1, 1), 1, singles},
			{kind1DoubleMemory, 15, "1g.45gb", 1, 4, 30, 45312, engines(2, 1, 0, 1, 0), 2, doubles},
		},
	},
	// `nvidia-smi mig -lgip` and `-lgipp` of a Server Edition: a grid of 12 (23.62, 47.38 and 95.12 GiB).
	"RTX-PRO-6000": {
		Name: "NVIDIA RTX PRO 6000 Blackwell Server Edition", Arch: blackwell, Compute: [2]int{12, 0},
		DeviceID: 0x2bb510de, SubsystemID: 0x204e10de,
		Brand: 14, Class: 0x030200, Memory: 97887 << 20, CUDACores: 24064, EventTypes: measuredEvents,
		Slices: 4, MemorySlices: 12, Engines: engines(4, 4, 4, 4, 1),
		Profiles: []profile{
			{kind1, 14, "1g.24gb", 1, 4, 46, 24192, engines(1, 1, 1, 1, 0), 3, []int{0, 3, 6, 9}},
			{kind2, 5, "2g.48gb", 2, 2, 94, 48512, engines(2, 2, 2, 2, 0), 6, []int{0, 6}},
			{kind4, 0, "4g.96gb", 4, 1, 188, 97408, engines(4, 4, 4, 4, 1), 12, whole},
			{kind1Media, 21, "1g.24gb+me", 1, 1, 46, 24192, engines(1, 1, 1, 1, 1), 3, []int{0, 3, 6, 9}},
			{kind1Graphics, 47, "1g.24gb+gfx", 1, 4, 46, 24192, engines(1, 1, 1, 1, 0), 3, []int{0, 3, 6, 9}},
			{kind2Graphics, 35, "2g.48gb+gfx", 2, 2, 94, 48512, engines(2, 2, 2, 2, 0), 6, []int{0, 6}},
			{kind4Graphics, 32, "4g.96gb+gfx", 4, 1, 188, 97408, engines(4, 4, 4, 4, 1), 12, whole},
			{kind1NoMedia, 67, "1g.24gb-me", 1, 4, 46, 24192, engines(1, 0, 0, 0, 0), 3, []int{0, 3, 6, 9}},
			{kind2NoMedia, 66, "2g.48gb-me", 2, 2, 94, 48512, engines(2, 0, 0, 0, 0), 6, []int{0, 6}},
			{kind1AllMedia, 65, "1g.24gb+me.all", 1, 1, 46, 24192, engines(1, 4, 4, 4, 1), 3, []int{0, 3, 6, 9}},
			{kind2AllMedia, 64, "2g.48gb+me.all", 2, 1, 94, 48512, engines(2, 4, 4, 4, 1), 6, []int{0, 6}},
		},
	},
	// GPUs that cannot be cut, for mixed nodes.
	"L4": {
		Name: "NVIDIA L4", Arch: ada, Compute: [2]int{8, 9}, DeviceID: 0x27b810de, SubsystemID: 0x16ee10de,
		Brand: 14, Class: 0x030200, Memory: 23034 << 20, CUDACores: 7424, EventTypes: measuredEvents,
	},
	"T4": {
		Name: "Tesla T4", Arch: turing, Compute: [2]int{7, 5}, DeviceID: 0x1eb810de, SubsystemID: 0x12a210de,
		Brand: 2, Class: 0x030200, Memory: 15360 << 20, CUDACores: 2560, EventTypes: measuredEvents,
	},
}
