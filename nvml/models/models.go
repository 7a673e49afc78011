// Package models has the models of GPUs in NVIDIA's tables, for plans without a GPU at hand. An agent reads all of it from the hardware instead.
package models

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// model is what NVIDIA's tables say of a kind of GPU.
type model struct {
	short    string   // "H100-80GB"
	names    []string // as nvidia-smi -L prints it; the first is that of GPUs
	deviceID uint32   // PCI device id over vendor id
	compute  nvml.ComputeCapability
	memory   int // GiB
	profiles []profile
}

// profile is a kind of GPU instance. Its name is by its memory in GiB.
type profile struct {
	slices, memory int
	attribute      string // "+me"
	max, size      int    // instances on an empty GPU, memory slices of one
	starts         []int
	engines        nvml.Engines
}

var (
	ampere    = nvml.ComputeCapability{Major: 8}
	hopper    = nvml.ComputeCapability{Major: 9}
	blackwell = nvml.ComputeCapability{Major: 10}
)

// engines is written in the order of NVIDIA's tables.
func engines(ce, dec, enc, jpeg, ofa int) nvml.Engines {
	return nvml.Engines{Copy: ce, Decoder: dec, Encoder: enc, JPEG: jpeg, OFA: ofa}
}

// ofSeven are the profiles of a GPU with seven compute slices and eight of memory, by the memory of instances of 1, 2, 3 or 4, and 7 compute slices. Engines are
// those of these instances, then of 1 slice with media extensions, and with twice the memory (MIG User Guide).
func ofSeven(one, two, three, seven int, of [7]nvml.Engines) []profile {
	return []profile{
		{1, one, "", 7, 1, []int{0, 1, 2, 3, 4, 5, 6}, of[0]},
		{2, two, "", 3, 2, []int{0, 2, 4}, of[1]},
		{3, three, "", 2, 4, []int{0, 4}, of[2]},
		{4, three, "", 1, 4, []int{0}, of[3]},
		{7, seven, "", 1, 8, []int{0}, of[4]},
		{1, one, "+me", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}, of[5]},
		{1, two, "", 4, 2, []int{0, 2, 4, 6}, of[6]},
	}
}

var (
	a100 = [7]nvml.Engines{
		engines(1, 0, 0, 0, 0), engines(2, 1, 0, 0, 0), engines(3, 2, 0, 0, 0), engines(4, 2, 0, 0, 0), engines(7, 5, 0, 1, 1),
		engines(1, 1, 0, 1, 1), engines(1, 1, 0, 0, 0),
	}
	h100 = [7]nvml.Engines{
		engines(1, 1, 0, 1, 0), engines(2, 2, 0, 2, 0), engines(3, 3, 0, 3, 0), engines(4, 4, 0, 4, 0), engines(8, 7, 0, 7, 1),
		engines(1, 1, 0, 1, 1), engines(1, 1, 0, 1, 0),
	}
	b200 = [7]nvml.Engines{
		engines(2, 1, 0, 1, 0), engines(4, 2, 0, 2, 0), engines(6, 3, 0, 3, 0), engines(8, 4, 0, 4, 0), engines(16, 7, 0, 7, 1),
		engines(2, 1, 0, 1, 1), engines(2, 1, 0, 1, 0),
	}
)

// quarters are where instances of a fourth of an RTX PRO 6000 may stand: its grid has twelve memory slices.
var quarters = []int{0, 3, 6, 9}

// all are the models, with the device ids and the sizes of the configs that mig-parted v0.14.4 ships.
var all = []model{
	{"A30", []string{"NVIDIA A30"}, 0x20b710de, ampere, 24, []profile{
		{1, 6, "", 4, 1, []int{0, 1, 2, 3}, engines(1, 1, 0, 0, 0)},
		{2, 12, "", 2, 2, []int{0, 2}, engines(2, 2, 0, 0, 0)},
		{4, 24, "", 1, 4, []int{0}, engines(4, 4, 0, 1, 1)},
		{1, 6, "+me", 1, 1, []int{0, 1, 2, 3}, engines(1, 1, 0, 1, 1)},
		{2, 12, "+me", 1, 2, []int{0, 2}, engines(2, 2, 0, 1, 1)},
	}},
	{"A100-40GB", []string{"NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"}, 0x20b010de, ampere, 40, ofSeven(5, 10, 20, 40, a100)},
	{"A100-80GB", []string{"NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"}, 0x20b210de, ampere, 80, ofSeven(10, 20, 40, 80, a100)},
	{"A800-40GB", []string{"NVIDIA A800 40GB Active"}, 0x20f610de, ampere, 40, ofSeven(5, 10, 20, 40, a100)},
	{"A800-80GB", []string{"NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"}, 0x20f310de, ampere, 80, ofSeven(10, 20, 40, 80, a100)},
	{"H20", []string{"NVIDIA H20"}, 0x232910de, hopper, 96, ofSeven(12, 24, 48, 96, h100)},
	{"H100-80GB", []string{"NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"}, 0x233010de, hopper, 80, ofSeven(10, 20, 40, 80, h100)},
	{"H100-94GB", []string{"NVIDIA H100 NVL"}, 0x232110de, hopper, 94, ofSeven(12, 24, 47, 94, h100)},
	{"H800-80GB", []string{"NVIDIA H800"}, 0x232410de, hopper, 80, ofSeven(10, 20, 40, 80, h100)},
	{"H200", []string{"NVIDIA H200"}, 0x233510de, hopper, 141, ofSeven(18, 35, 71, 141, h100)},
	{"H200-NVL", []string{"NVIDIA H200 NVL"}, 0x233b10de, hopper, 141, ofSeven(18, 35, 71, 141, h100)},
	{"GH200-96GB", []string{"NVIDIA GH200 480GB"}, 0x234210de, hopper, 96, ofSeven(12, 24, 48, 96, h100)},
	{"GH200-144GB", []string{"NVIDIA GH200 144G HBM3e"}, 0x234810de, hopper, 144, ofSeven(18, 36, 72, 144, h100)},
	{"B200", []string{"NVIDIA B200"}, 0x290110de, blackwell, 180, ofSeven(23, 45, 90, 180, b200)},
	{"GB200", []string{"NVIDIA GB200"}, 0x294110de, blackwell, 186, ofSeven(23, 47, 93, 186, b200)},
	{"B300", []string{"NVIDIA B300"}, 0x318210de, nvml.ComputeCapability{Major: 10, Minor: 3}, 269, ofSeven(34, 67, 135, 269, b200)},
	{"GB300", []string{"NVIDIA GB300"}, 0x31c210de, nvml.ComputeCapability{Major: 10, Minor: 3}, 278, ofSeven(35, 70, 139, 278, b200)},
	{"RTX-PRO-6000", []string{"NVIDIA RTX PRO 6000 Blackwell Server Edition"}, 0x2bb510de, nvml.ComputeCapability{Major: 12}, 96, []profile{
		{1, 24, "", 4, 3, quarters, engines(1, 1, 1, 1, 0)},
		{2, 48, "", 2, 6, []int{0, 6}, engines(2, 2, 2, 2, 0)},
		{4, 96, "", 1, 12, []int{0}, engines(4, 4, 4, 4, 1)},
		{1, 24, "+me", 1, 3, quarters, engines(1, 1, 1, 1, 1)},
		{1, 24, "+gfx", 4, 3, quarters, engines(1, 1, 1, 1, 0)},
		{2, 48, "+gfx", 2, 6, []int{0, 6}, engines(2, 2, 2, 2, 0)},
		{4, 96, "+gfx", 1, 12, []int{0}, engines(4, 4, 4, 4, 1)},
		{1, 24, "-me", 4, 3, quarters, engines(1, 0, 0, 0, 0)},
		{2, 48, "-me", 2, 6, []int{0, 6}, engines(2, 0, 0, 0, 0)},
		{1, 24, "+me.all", 1, 3, quarters, engines(1, 4, 4, 4, 1)},
		{2, 48, "+me.all", 1, 6, []int{0, 6}, engines(2, 4, 4, 4, 1)},
	}},
}

// Names are the short names of the models.
func Names() (out []string) {
	for _, m := range all {
		out = append(out, m.short)
	}
	return out
}

// GPU returns an empty GPU of the model, with MIG mode off. It knows a model by its short name or by the one that nvidia-smi -L prints, in any case, with or
// without "NVIDIA", and with spaces or dashes.
func GPU(name string) (nvml.GPU, bool) {
	for _, m := range all {
		at := slices.IndexFunc(m.names, func(known string) bool { return plain(known) == plain(name) })
		if at >= 0 || plain(m.short) == plain(name) {
			g := m.gpu()
			g.Model = m.names[max(0, at)]
			return g, true
		}
	}
	return nvml.GPU{}, false
}

// Beginning are the short names that begin with the name, as GPU compares them.
func Beginning(name string) (out []string) {
	for _, short := range Names() {
		if strings.HasPrefix(plain(short), plain(name)) {
			out = append(out, short)
		}
	}
	return out
}

// plain is a name as it is compared.
func plain(name string) string {
	return strings.TrimPrefix(strings.NewReplacer(" ", "", "-", "", "_", "").Replace(strings.ToLower(name)), "nvidia")
}

func (m model) gpu() nvml.GPU {
	g := nvml.GPU{DeviceID: m.deviceID, ComputeCapability: m.compute, MemoryMiB: m.memory << 10, Capable: true}
	for _, p := range m.profiles {
		one := nvml.Profile{Name: fmt.Sprintf("%dg.%dgb%s", p.slices, p.memory, p.attribute), Slices: p.slices, MemoryMiB: p.memory << 10, Max: p.max, Engines: p.engines}
		for _, start := range p.starts {
			one.Placements = append(one.Placements, nvml.Span{Start: start, Size: p.size})
		}
		for _, n := range []int{1, 2, 3, 4, 7} {
			if n <= p.slices && (n != 3 || p.slices != 4) { // the driver makes no three slices of four
				one.Compute = append(one.Compute, nvml.ComputeProfile{Name: strconv.Itoa(n) + "c", Slices: n, Max: p.slices / n})
			}
		}
		g.Profiles = append(g.Profiles, one)
	}
	return g
}
