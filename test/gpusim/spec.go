package gpusim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Spec describes a node to be simulated.
type Spec struct {
	DriverVersion string    `json:"driverVersion,omitempty"` // "580.159.04" if empty
	CUDA          int       `json:"cuda,omitempty"`          // CUDA version times 1000; 13000 if 0
	Seed          int64     `json:"seed,omitempty"`          // UUIDs are derived from it
	GPUs          []GPUSpec `json:"gpus"`

	// Latency is one of Latencies: how long calls take. Empty is no time.
	Latency string `json:"latency,omitempty"`
	// Delays by function, over those of Latency, as Go writes durations: "1.5s".
	Delays map[string]string `json:"delays,omitempty"`
}

// GPUSpec describes one or more equal GPUs.
type GPUSpec struct {
	Model       string `json:"model"`                 // one of Models
	Count       int    `json:"count,omitempty"`       // 1 if 0
	MIG         bool   `json:"mig,omitempty"`         // MIG mode is on from the start
	Persistence bool   `json:"persistence,omitempty"` // in persistence mode from each start of the driver, as its daemon has it
	Passthrough bool   `json:"passthrough,omitempty"` // handed to a virtual machine: it cannot be reset from here
	Virtual     string `json:"virtual,omitempty"`     // "vgpu": the node is a virtual machine with a vGPU; "host-vgpu", "host-vsga": it is the host of some

	// Counts are what the library says of how many instances fit, by profile, where that is wrong, as on an A30.
	Counts map[string]int `json:"counts,omitempty"`
}

// virtualGPU is what a GPU is to a virtual machine that has a share of it, which the host has cut.
const virtualGPU = "vgpu"

// virtualizationModes are NVML's numbers for GPUSpec.Virtual.
var virtualizationModes = map[string]uint32{virtualGPU: 2, "host-vgpu": 3, "host-vsga": 4}

// maxGPUs is how many a node may have: NVIDIA's largest systems of one operating system image.
const maxGPUs = 16

// ParseSpec reads a Spec from YAML and checks it. Unknown keys are errors.
func ParseSpec(text []byte) (Spec, error) {
	var s Spec
	if err := yaml.UnmarshalStrict(text, &s); err != nil {
		return Spec{}, fmt.Errorf("reading node spec: %w", err)
	}
	if err := s.check(); err != nil {
		return Spec{}, fmt.Errorf("checking node spec: %w", err)
	}
	return s, nil
}

func (s Spec) check() error {
	if err := s.checkGPUs(); err != nil {
		return err
	}
	if s.DriverVersion != "" && !driverVersion.MatchString(s.DriverVersion) {
		return fmt.Errorf("driverVersion is %q: use one such as \"580.159.04\"", s.DriverVersion)
	}
	if s.Latency != "" && !slices.Contains(Latencies(), s.Latency) {
		return fmt.Errorf("latency is %q: use one of %s, or leave it out", s.Latency, strings.Join(Latencies(), ", "))
	}
	var errs []error
	for name, text := range s.Delays {
		errs = append(errs, checkFunction(name))
		if d, err := time.ParseDuration(text); err != nil || d < 0 {
			errs = append(errs, fmt.Errorf("delays.%s is %q: use a duration such as \"1.5s\"", name, text))
		}
	}
	return errors.Join(errs...)
}

func (s Spec) checkGPUs() error {
	n := 0
	for i, g := range s.GPUs {
		m, ok := models[g.Model]
		if !ok {
			return fmt.Errorf("gpus[%d].model %q is not known: use one of %s", i, g.Model, strings.Join(Models(), ", "))
		}
		if g.Count < 0 {
			return fmt.Errorf("gpus[%d].count is %d: use 1 or more", i, g.Count)
		}
		if g.MIG && m.Slices == 0 {
			return fmt.Errorf("gpus[%d].mig is true, but a %s has no MIG mode: leave it out", i, g.Model)
		}
		if err := g.checkVirtual(); err != nil {
			return fmt.Errorf("gpus[%d].%w", i, err)
		}
		n += max(1, g.Count)
	}
	if n < 1 || n > maxGPUs {
		return fmt.Errorf("gpus describes %d GPUs: describe 1 to %d", n, maxGPUs)
	}
	return nil
}

func (g GPUSpec) checkVirtual() error {
	_, known := virtualizationModes[g.Virtual]
	switch {
	case g.Virtual == "":
		return nil
	case !known:
		return fmt.Errorf("virtual is %q: use one of %s", g.Virtual, strings.Join(slices.Sorted(maps.Keys(virtualizationModes)), ", "))
	case g.Passthrough:
		return errors.New("virtual is set beside passthrough: use one of both")
	case g.Virtual == virtualGPU && g.MIG:
		return errors.New("mig is true, but a vGPU has no MIG mode: leave it out")
	}
	return nil
}

// delays are what the spec asks of each function, nil if nothing.
func (s Spec) delays() map[string]time.Duration {
	out := latencies(s.Latency)
	for name, text := range s.Delays {
		d, err := time.ParseDuration(text)
		if err == nil { // check has seen it
			out[name] = d
		}
	}
	if len(out) == 0 {
		return nil
	}
	return out
}
