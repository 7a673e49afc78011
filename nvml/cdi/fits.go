package cdi

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuslice/gpuslice/nvml"
)

// How a spec is compared with the GPUs, by reading alone:
//
//   - By the names of its devices. UUIDs identify the devices, and nvidia-ctk writes them by default. Names by
//     index say only how many MIG devices each GPU has.
//   - By the device files of capabilities that it hands out, /dev/nvidia-caps/nvidia-cap*. A container gets these of an
//     instance, whatever its name: two for each MIG device, numbered by GPU, GPU instance and compute instance. The
//     kernel lists those of the existing instances.
//
// So it also finds a "0:0" that means another instance than before. A fingerprint of the geometry, as an annotation in the
// spec, would say the same, but annotations need CDI 0.6.0: they would lock out runtimes that read the file today.

// fits reports whether a spec describes the GPUs.
func (s *Specs) fits(spec *specs.Spec, gpus []nvml.GPU) (bool, error) {
	if !slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Capable }) {
		return true, nil // no change of GPUs changes it
	}
	now, err := readKernel()
	if err != nil {
		return false, err
	}
	want := map[int]bool{}
	for minor := range now.nodes {
		want[minor] = true
	}
	if spec.Kind == kindManagement {
		nodes, err := s.nodes()
		if err != nil {
			return false, err
		}
		maps.Copy(want, nodes)
		return maps.Equal(capabilities(spec), want), nil
	}
	lost := slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Lost })
	if !named(spec, gpus, lost) {
		return false, nil
	}
	if lost || now.devices != migDevices(gpus) {
		return true, nil // the kernel's list is of another moment, or this process cannot see it: only names can be compared
	}
	return maps.Equal(capabilities(spec), want), nil
}

func migDevices(gpus []nvml.GPU) int {
	n := 0
	for _, g := range gpus {
		n += len(uuids(g)) - whole(g)
	}
	return n
}

// whole is 1 for a GPU that containers get as a whole, 0 for one that is cut.
func whole(g nvml.GPU) int {
	if g.Lost || g.Enabled {
		return 0
	}
	return 1
}

// uuids are the devices of a GPU that containers can get.
func uuids(g nvml.GPU) []string {
	if g.Lost {
		return nil
	}
	if !g.Enabled {
		return []string{string(g.UUID)}
	}
	var out []string
	for _, i := range g.Instances {
		for _, d := range i.Devices {
			out = append(out, d.UUID)
		}
	}
	return out
}

// strategy is one of nvidia-ctk's ways to name devices.
type strategy struct {
	name     string // as nvidia-ctk's --device-name-strategy takes it
	gpu, mig string // what precedes the index
	pattern  *regexp.Regexp
}

var strategies = []strategy{
	{name: nvcdi.DeviceNameStrategyIndex, pattern: regexp.MustCompile(`^(\d+)(:\d+)?$`)},
	{name: nvcdi.DeviceNameStrategyTypeIndex, gpu: "gpu", mig: "mig", pattern: regexp.MustCompile(`^(?:gpu(\d+)|mig(\d+):\d+)$`)},
	{name: nvcdi.DeviceNameStrategyUUID, pattern: regexp.MustCompile(`^(GPU|MIG)-.+$`)},
}

// strategiesOf returns how a spec names its devices. One that names none gets nvidia-ctk's default.
func strategiesOf(spec *specs.Spec) []strategy {
	var out []strategy
	for _, s := range strategies {
		if slices.ContainsFunc(spec.Devices, func(d specs.Device) bool { return s.pattern.MatchString(d.Name) }) {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		return []strategy{strategies[0], strategies[2]}
	}
	return out
}

// named reports whether a spec names the devices of the GPUs, and no others; it may name others if some GPU is lost.
func named(spec *specs.Spec, gpus []nvml.GPU, lost bool) bool {
	want := map[string]bool{}
	for _, s := range strategiesOf(spec) {
		for _, g := range gpus {
			s.expect(g, want)
		}
	}
	have := map[string]bool{}
	seen := map[string]int{}
	for _, d := range spec.Devices {
		if d.Name != "all" && d.Name != "none" {
			have[ordinal(d.Name, seen)] = true
		}
	}
	for name := range want {
		if !have[name] {
			return false
		}
	}
	return lost || len(have) == len(want)
}

// expect adds the names of a GPU's devices.
func (s strategy) expect(g nvml.GPU, names map[string]bool) {
	devices := uuids(g)
	for n, uuid := range devices {
		switch {
		case s.name == nvcdi.DeviceNameStrategyUUID:
			names[uuid] = true
		case whole(g) == 1:
			names[fmt.Sprintf("%s%d", s.gpu, g.Index)] = true
		default:
			names[fmt.Sprintf("%s%d:%d", s.mig, g.Index, n)] = true
		}
	}
}

var migIndex = regexp.MustCompile(`^((?:mig)?\d+):\d+$`)

// ordinal numbers the MIG devices of a GPU without gaps: the driver may leave some between their indices, and only their
// number can be compared.
func ordinal(name string, seen map[string]int) string {
	m := migIndex.FindStringSubmatch(name)
	if m == nil {
		return name
	}
	n := seen[m[1]]
	seen[m[1]]++
	return fmt.Sprintf("%s:%d", m[1], n)
}

var capabilityNode = regexp.MustCompile(`/nvidia-caps/nvidia-cap(\d+)$`)

// capabilities are the minor numbers of the capabilities that a spec hands out.
func capabilities(spec *specs.Spec) map[int]bool {
	out := map[int]bool{}
	for _, d := range spec.Devices {
		for _, n := range d.ContainerEdits.DeviceNodes {
			if m := capabilityNode.FindStringSubmatch(n.Path); m != nil {
				if minor, err := strconv.Atoi(m[1]); err == nil {
					out[minor] = true
				}
			}
		}
	}
	return out
}
