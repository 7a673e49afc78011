package features

import (
	"fmt"
	"maps"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Shape is how a model can be cut: into so many slices for computing and of memory, the latter of so many GiB. The zero value is not known.
type Shape struct {
	compute, memory int
	slice           float64
}

// Models of GPUs with seven compute slices and eight of memory, and with four of each (NVIDIA's MIG User Guide).
var (
	ofSeven = regexp.MustCompile(`^(NVIDIA-)?(A100|A800|H100|H800|H200|GH200|B200|GB200)(-|$)`)
	ofFour  = regexp.MustCompile(`^(NVIDIA-)?(A30|RTX-PRO-6000)(-|$)`)

	// memoryInName finds the memory of a GPU in GiB in the names of models that have it there.
	memoryInName = regexp.MustCompile(`^(?:NVIDIA-)?[AH][18]00-(?:[A-Z0-9]+-)?([0-9]{2})GB(?:-|$)`)
)

// sizes are models that can be cut, as nvidia-smi -L prints them, by their memory in GiB (NVIDIA's MIG User Guide, and the names of devices in the
// configs that mig-parted v0.14.4 ships).
var sizes = []struct {
	model   string
	compute int
	memory  float64
}{
	{"NVIDIA A30", 4, 24},
	{"NVIDIA A100-SXM4-40GB", 7, 40},
	{"NVIDIA A100-PCIE-40GB", 7, 40},
	{"NVIDIA A100-SXM4-80GB", 7, 80},
	{"NVIDIA A100 80GB PCIe", 7, 80},
	{"NVIDIA H100 80GB HBM3", 7, 80},
	{"NVIDIA H100 PCIe", 7, 80},
	{"NVIDIA H100 NVL", 7, 94},
	{"NVIDIA H200", 7, 141},
	{"NVIDIA H200 NVL", 7, 141},
	{"NVIDIA GH200 480GB", 7, 96},
	{"NVIDIA GH200 144G HBM3e", 7, 144},
	{"NVIDIA B200", 7, 180},
	{"NVIDIA GB200", 7, 186},
	{"NVIDIA B300", 7, 269},
	{"NVIDIA GB300", 7, 278},
	{"NVIDIA RTX PRO 5000 Blackwell", 4, 48},
	{"NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, 96},
}

// memoryOf is the memory of a model in GiB, by its name with dashes for spaces; 0 if it is not known.
func memoryOf(model string) float64 {
	if found := memoryInName.FindStringSubmatch(model); found != nil {
		return number(found[1])
	}
	for _, s := range sizes {
		if dashed := strings.ReplaceAll(s.model, " ", "-"); model == dashed || model == strings.TrimPrefix(dashed, "NVIDIA-") {
			return s.memory
		}
	}
	return 0
}

// Shape is how the GPUs can be cut, by their model and memory. Without the memory it goes by the model's name alone.
func (g GPUs) Shape() Shape {
	memory := float64(g.MemoryMiB) / 1024
	if memory == 0 {
		memory = memoryOf(g.Model)
	}
	switch {
	case memory == 0 || g.Virtual || g.Incapable:
		return Shape{}
	case ofSeven.MatchString(g.Model):
		return shapeOf(7, memory)
	case ofFour.MatchString(g.Model):
		return shapeOf(4, memory)
	default:
		return Shape{}
	}
}

// shapeOf is the shape of GPUs with so many compute slices and so many GiB.
func shapeOf(compute int, memory float64) Shape {
	s := Shape{compute: compute, memory: compute}
	if compute == 7 {
		s.memory = 8
	}
	s.slice = memory / float64(s.memory)
	return s
}

// Known reports whether the shape is known.
func (s Shape) Known() bool { return s.compute > 0 }

// Lacks are the devices that GPUs of the shape do not have, sorted; none if it is not known.
func (s Shape) Lacks(devices map[string]int) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		if _, _, ok := s.Profile(name); !ok && s.Known() {
			out = append(out, name)
		}
	}
	return out
}

// Refuses says why an empty GPU of the shape does not hold the devices; empty if it may, or if the shape is not known. It does not place them: the GPU itself
// may refuse what is not refused here.
func (s Shape) Refuses(devices map[string]int) string {
	if !s.Known() {
		return ""
	}
	if lacks := s.Lacks(devices); len(lacks) > 0 {
		return "has no " + sanitize.Listed(lacks)
	}
	compute, memory, of := 0, 0, map[string]int{} // compute slices by GPU instance: several devices may share one
	for name, n := range devices {
		instance, parts := name, number(deviceName.FindStringSubmatch(name)[1])
		if before, after, shares := strings.Cut(name, "c."); shares {
			instance, parts = after, number(before)
		}
		of[instance] += n * int(parts)
	}
	for _, instance := range slices.Sorted(maps.Keys(of)) {
		p, m, _ := s.Profile(instance)
		n := (of[instance] + p.Slices - 1) / p.Slices
		if compute, memory = compute+n*p.Slices, memory+n*m; n > p.Max {
			return fmt.Sprintf("holds at most %d of %s", p.Max, instance)
		}
	}
	if compute > s.compute || memory > s.memory {
		return fmt.Sprintf("has not the slices for all of them: %d of %d for computing, %d of %d of memory", compute, s.compute, memory, s.memory)
	}
	return ""
}

// AllRefuse says why no model that is known holds the devices on one GPU; empty if one may. It asks only those whose names fit one of the patterns, as
// path.Match has them, where there are any patterns; if no known model's name fits, it cannot say.
func AllRefuse(devices map[string]int, patterns []string) string {
	lacks, reason := devices, "" // devices that no model has
	for _, size := range sizes {
		if len(patterns) > 0 && !slices.ContainsFunc(patterns, func(p string) bool { fits, err := path.Match(p, size.model); return err == nil && fits }) {
			continue
		}
		s := shapeOf(size.compute, size.memory)
		why := s.Refuses(devices)
		if why == "" {
			return ""
		}
		reason = why
		lacks = maps.Clone(lacks)
		maps.DeleteFunc(lacks, func(name string, _ int) bool { _, _, has := s.Profile(name); return has })
	}
	model := "no model"
	if len(patterns) > 0 {
		model = "no such model"
	}
	switch {
	case reason == "":
		return ""
	case len(lacks) > 0:
		return model + " has " + sanitize.Listed(slices.Sorted(maps.Keys(lacks)))
	default:
		return model + " holds all of them on one GPU"
	}
}

// instances has, by how many compute slices an instance has, how many of memory it may have.
func (s Shape) instances() map[int][]int {
	if s.compute == 4 {
		return map[int][]int{1: {1}, 2: {2}, 4: {4}}
	}
	return map[int][]int{1: {1, 2}, 2: {2}, 3: {4}, 4: {4}, 7: {8}}
}

var deviceName = regexp.MustCompile(`^(?:[1-9]c\.)?([1-9])g\.([0-9]{1,4})gb([+-][a-z.]+)?$`)

// Profile is the profile of a MIG device on an empty GPU, with its number of memory slices. NVIDIA rounds the memory in the name, by less than
// a twentieth.
func (s Shape) Profile(device string) (p nvml.Profile, memory int, ok bool) {
	m := deviceName.FindStringSubmatch(device)
	if m == nil || s.compute == 0 {
		return p, 0, false
	}
	compute, named := int(number(m[1])), number(m[2])
	memory = int(math.Round(named / s.slice))
	if !slices.Contains(s.instances()[compute], memory) || s.off(device) > named/20 {
		return p, 0, false
	}
	p = nvml.Profile{Name: device, Slices: compute, Max: min(s.compute/compute, s.memory/memory)}
	if strings.HasPrefix(m[3], "+me") { // a GPU has one of these engines
		p.Max = 1
	}
	return p, memory, true
}

// off is by how many GiB the memory in a device's name is beside so many whole slices.
func (s Shape) off(device string) float64 {
	named := number(deviceName.FindStringSubmatch(device)[2])
	return math.Abs(named - math.Round(named/s.slice)*s.slice)
}

// Profiles are the profiles of the GPU's devices. For each size that none of them has, it adds one with an invented name: a config that the agent
// generates of several sizes needs them all.
func (s Shape) Profiles(devices []string) []nvml.Profile {
	var out []nvml.Profile
	if s.compute == 0 {
		return nil
	}
	type size struct {
		compute, memory int
		attribute       string
	}
	nearest := map[size]string{} // of names that other models have too
	for _, device := range devices {
		p, memory, ok := s.Profile(device)
		if !ok || strings.Contains(device, "c.") {
			continue
		}
		at := size{p.Slices, memory, deviceName.FindStringSubmatch(device)[3]}
		if other, there := nearest[at]; !there || s.off(device) < s.off(other) {
			nearest[at] = device
		}
	}
	for _, device := range nearest {
		p, _, _ := s.Profile(device)
		out = append(out, p)
	}
	for compute, memories := range s.instances() {
		if _, named := nearest[size{compute, memories[0], ""}]; !named {
			out = append(out, nvml.Profile{Name: fmt.Sprintf("%dg", compute), Slices: compute, Max: s.compute / compute})
		}
	}
	return out
}

// number reads a text of few digits.
func number(digits string) float64 {
	n, _ := strconv.Atoi(digits) // its callers have matched digits
	return float64(n)
}
