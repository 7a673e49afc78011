package migrate

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// machine is a node as its labels describe it.
type machine struct {
	gpus    []nvml.GPU // of one model, with the profiles that files name and the model has; one GPU if the labels do not say how many
	counted bool       // the labels say how many GPUs
	shape   shape
	cut     bool // the labels say what the GPUs can be cut into
}

// machineOf has the profiles among the names of MIG devices that its GPUs have.
func machineOf(labels map[string]string, devices []string) machine {
	f := features.Of(labels)
	m := machine{counted: f.Count > 0, shape: shapeOf(f)}
	m.cut = f.Incapable || m.shape.compute > 0
	for i := range max(1, f.Count) {
		m.gpus = append(m.gpus, nvml.GPU{
			Index: i, UUID: nvml.UUID(strconv.Itoa(i)), Model: f.Model, Capable: !f.Incapable, Profiles: m.shape.profiles(devices),
		})
	}
	return m
}

// made is the config of that name that the agent makes for the machine.
func (m machine) made(name string) (catalog.MIGConfig, bool) {
	rules, ok := catalog.Generate(m.gpus)[name]
	return rules, ok
}

// rules are those of a config that may be about the machine. It leaves out those with a device filter that name a MIG device which the
// machine's model does not have: the filter is about other models. A filter goes by PCI device ids, which no label has.
func (m machine) rules(of catalog.MIGConfig) catalog.MIGConfig {
	return slices.DeleteFunc(slices.Clone(of), func(r catalog.MIGRule) bool {
		return len(r.DeviceFilter) > 0 && m.shape.compute > 0 && !m.has(r.Devices)
	})
}

func (m machine) has(devices map[string]int) bool { return len(m.lacks(devices)) == 0 }

// lacks are the devices that the machine's model does not have, sorted; none if its labels do not say.
func (m machine) lacks(devices map[string]int) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		if _, _, ok := m.shape.profile(name); !ok && m.shape.compute > 0 {
			out = append(out, name)
		}
	}
	return out
}

// lacksOf are the devices that rules ask for and the machine's model does not have.
func (m machine) lacksOf(rules catalog.MIGConfig) []string {
	var out []string
	for _, r := range rules {
		out = append(out, m.lacks(r.Devices)...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// asks is what rules ask of each GPU. The error is the agent's own when it refuses them.
func (m machine) asks(name string, rules catalog.MIGConfig) (map[nvml.UUID]nvml.Request, error) {
	return catalog.Merge(nil, map[string]catalog.MIGConfig{name: rules}).Requests(name, m.gpus)
}

// namesNone reports whether all rules name GPUs, and none that the machine has.
func (m machine) namesNone(rules catalog.MIGConfig) bool {
	return !slices.ContainsFunc(rules, func(r catalog.MIGRule) bool {
		return r.All || slices.ContainsFunc(r.Indices, func(i int) bool { return i < len(m.gpus) })
	})
}

// shape is how a model can be cut: into so many slices for computing and of memory, the latter of so many GiB. The zero value is not known.
type shape struct {
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

func shapeOf(f features.GPUs) shape {
	memory := float64(f.MemoryMiB) / 1024
	if found := memoryInName.FindStringSubmatch(f.Model); memory == 0 && found != nil {
		memory = number(found[1])
	}
	switch {
	case memory == 0 || f.Virtual || f.Incapable:
		return shape{}
	case ofSeven.MatchString(f.Model):
		return shape{compute: 7, memory: 8, slice: memory / 8}
	case ofFour.MatchString(f.Model):
		return shape{compute: 4, memory: 4, slice: memory / 4}
	default:
		return shape{}
	}
}

// instances has, by how many compute slices an instance has, how many of memory it may have.
func (s shape) instances() map[int][]int {
	if s.compute == 4 {
		return map[int][]int{1: {1}, 2: {2}, 4: {4}}
	}
	return map[int][]int{1: {1, 2}, 2: {2}, 3: {4}, 4: {4}, 7: {8}}
}

var deviceName = regexp.MustCompile(`^(?:[1-9]c\.)?([1-9])g\.([0-9]{1,4})gb([+-][a-z.]+)?$`)

// profile is the profile of a MIG device on an empty GPU, with its number of memory slices. NVIDIA rounds the memory in the name, by less than
// a twentieth.
func (s shape) profile(device string) (p nvml.Profile, memory int, ok bool) {
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
func (s shape) off(device string) float64 {
	named := number(deviceName.FindStringSubmatch(device)[2])
	return math.Abs(named - math.Round(named/s.slice)*s.slice)
}

// profiles are the profiles of the GPU's devices. For each size that none of them has, it adds one with an invented name: a config that the agent
// generates of several sizes needs them all.
func (s shape) profiles(devices []string) []nvml.Profile {
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
		p, memory, ok := s.profile(device)
		if !ok || strings.Contains(device, "c.") {
			continue
		}
		at := size{p.Slices, memory, deviceName.FindStringSubmatch(device)[3]}
		if other, there := nearest[at]; !there || s.off(device) < s.off(other) {
			nearest[at] = device
		}
	}
	for _, device := range nearest {
		p, _, _ := s.profile(device)
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
