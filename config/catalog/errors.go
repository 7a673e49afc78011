package catalog

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/config"
)

// UnknownConfigError means that a label names an unknown MIG config or profile.
type UnknownConfigError struct {
	Name  string   // the label's value
	Close []string // known names spelt like it, the nearest first
	Known []string // every name that the label may have, the administrator's own first

	// Profile says that the label is LabelProfile, which may name profiles and MIG configs.
	Profile bool
	// Profiles has the names of profiles spelt like it, the nearest first, if the label is LabelMIGConfig, which cannot name them.
	Profiles []string
}

// maxNames bounds lists in a message: users read a condition's message in a terminal, and the longest catalogs, of mixed nodes, have about 30
// configs.
const maxNames = 12

// Error lists the closest names, and the names that the label may have.
func (e *UnknownConfigError) Error() string {
	var b strings.Builder
	kind := "MIG config"
	if e.Profile {
		kind = "profile or MIG config"
	}
	fmt.Fprintf(&b, "no %s is named %q", kind, e.Name)
	meant := e.meant()
	if len(meant) > 0 {
		fmt.Fprintf(&b, ": did you mean %s?", strings.Join(meant, " or "))
	}
	if len(e.Known) == 0 {
		return b.String() + ", and none is known for this node"
	}
	if len(meant) > 0 {
		b.WriteString(" This node has ")
	} else {
		b.WriteString("; this node has ")
	}
	b.WriteString(joinFirst(e.Known, ", "))
	return b.String()
}

// meant lists the closest names, a profile together with its label.
func (e *UnknownConfigError) meant() []string {
	meant := slices.Clone(e.Close)
	for _, p := range e.Profiles {
		profile := "the profile " + p + " (label " + config.LabelProfile + ")"
		if p == e.Name {
			return []string{profile}
		}
		meant = append(meant, profile)
	}
	return meant
}

// joinFirst joins as many names as fit a message.
func joinFirst(names []string, separator string) string {
	first := slices.Clone(names[:min(len(names), maxNames)])
	if more := len(names) - len(first); more > 0 {
		first = append(first, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(first, separator)
}

// Reason is ReasonUnknownConfig.
func (*UnknownConfigError) Reason() config.Reason { return config.ReasonUnknownConfig }

// NoCapableGPUError means that a config or profile requests MIG, and none of the GPUs it selects can do MIG.
type NoCapableGPUError struct {
	Config  string   // name of the MIG config
	Profile string   // name of the profile, in place of Config
	Models  []string // models of the GPUs that it selects, sorted; none if the node has no GPU
}

// Error names the models of these GPUs.
func (e *NoCapableGPUError) Error() string {
	subject, other := fmt.Sprintf("config %q", e.Config), "a config with mig-enabled false"
	if e.Profile != "" {
		subject, other = fmt.Sprintf("profile %q", e.Profile), "a profile with enabled false"
	}
	if len(e.Models) == 0 {
		return subject + " names no GPU, since this node has none"
	}
	return fmt.Sprintf("%s requests MIG, but no GPU that it names can do MIG: %s; choose %s, or remove the label",
		subject, strings.Join(e.Models, ", "), other)
}

// Reason is ReasonNoCapableGPU.
func (*NoCapableGPUError) Reason() config.Reason { return config.ReasonNoCapableGPU }

// VirtualGPUError means that a config or profile would cut or uncut vGPUs, which only their host can do.
type VirtualGPUError struct {
	Config  string   // name of the MIG config
	Profile string   // name of the profile, in place of Config
	GPUs    []string // each by position, UUID and model
}

// Error names the GPUs, and sends the user to their host.
func (e *VirtualGPUError) Error() string {
	subject := fmt.Sprintf("config %q", e.Config)
	if e.Profile != "" {
		subject = fmt.Sprintf("profile %q", e.Profile)
	}
	return fmt.Sprintf("%s: a vGPU can only be cut on the host of its virtual machine: %s; "+
		"choose another vGPU profile for this virtual machine there, and remove the label", subject, joinFirst(e.GPUs, "; "))
}

// Reason is ReasonVirtualGPU.
func (*VirtualGPUError) Reason() config.Reason { return config.ReasonVirtualGPU }

// NoSelectedGPUError means that a profile selects no GPU of the node: it is for other nodes.
type NoSelectedGPUError struct {
	Profile   string   // its name
	Selectors []string // the selectors of each entry, without repetitions: "pci 0000:17:00.0 and model NVIDIA A100*"
	GPUs      []string // the GPUs of the node: "NVIDIA H100 80GB HBM3 (0000:18:00.0)"
}

// Error names the selectors and the GPUs of the node.
func (e *NoSelectedGPUError) Error() string {
	return fmt.Sprintf("profile %q selects no GPU of this node: it selects %s; this node has %s",
		e.Profile, joinFirst(e.Selectors, ", or "), joinFirst(e.GPUs, ", "))
}

// Reason is ReasonNoCapableGPU.
func (*NoSelectedGPUError) Reason() config.Reason { return config.ReasonNoCapableGPU }

// ReasonOf returns the reason of an error of the catalog.
func ReasonOf(err error) config.Reason {
	var reasoned interface{ Reason() config.Reason }
	if errors.As(err, &reasoned) {
		return reasoned.Reason()
	}
	return config.ReasonInvalidCatalog
}
