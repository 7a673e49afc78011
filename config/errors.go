package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// InvalidError is one value that cannot be used, with where it stands and what is allowed there.
type InvalidError struct {
	Config  string // name of the MIG config; empty outside of a catalog
	Profile string // name of the profile of our own catalog, in place of Config
	Rule    int    // number of the rule in the config, or of the entry in the profile, from 1; 0 for all of it
	Field   string // as it is written in the file: "devices", "timeouts.drain"
	Value   string // as it is written in the file; empty if there is none
	Want    string // what is allowed, or what to do: "is not a GPU of this node: they are 0 to 7"
}

// maxMistakes is how many mistakes of a file are told. A person who has mended a hundred checks the file again.
const maxMistakes = 100

// AddMistake adds what is wrong about a file to what was found so far. Of more than a hundred mistakes only the number is
// kept, as the last error: "and 2900 more".
func AddMistake(found []error, err error) []error {
	further := moreMistakesError(1)
	if more, ok := err.(moreMistakesError); ok { //nolint:errorlint // it is never wrapped
		further = more
	}
	if len(found) == 0 {
		return []error{err}
	}
	last := len(found) - 1
	if more, ok := found[last].(moreMistakesError); ok { //nolint:errorlint // it is never wrapped
		found[last] = more + further
		return found
	}
	if len(found) >= maxMistakes {
		err = further
	}
	return append(found, err)
}

// moreMistakesError stands for those that are not told.
type moreMistakesError int

func (n moreMistakesError) Error() string { return fmt.Sprintf("and %d more", int(n)) }

// The longest that is quoted of what is written in a file, and that is said about it, in bytes. Names and values that are
// right are shorter.
const (
	maxQuoted = 256
	maxSaid   = 1024
)

// cut shortens a text that is too long to be read in a message.
func cut(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// Error names the place, the value and what is allowed. What is long is cut.
func (e *InvalidError) Error() string {
	var at []string
	if e.Config != "" {
		at = append(at, fmt.Sprintf("config %q", cut(e.Config, maxQuoted)))
	}
	rule := "rule"
	if e.Profile != "" {
		at, rule = append(at, fmt.Sprintf("profile %q", cut(e.Profile, maxQuoted))), "mig entry"
	}
	if e.Rule > 0 {
		at = append(at, fmt.Sprintf("%s %d", rule, e.Rule))
	}
	if e.Field != "" {
		at = append(at, cut(e.Field, maxQuoted))
	}
	place := strings.Join(at, ", ")
	if e.Value == "" {
		return fmt.Sprintf("%s: %s", place, cut(e.Want, maxSaid))
	}
	return fmt.Sprintf("%s: %s %s", place, cut(e.Value, maxQuoted), cut(e.Want, maxSaid))
}

// Reason is ReasonInvalidCatalog.
func (*InvalidError) Reason() Reason { return ReasonInvalidCatalog }

// UnknownConfigError means that nothing has the name that a label asks for.
type UnknownConfigError struct {
	Name  string   // what was asked for
	Close []string // names that it may have been meant as, the nearest first
	Known []string // every name that the label may have, sorted

	// Profile is set where LabelProfile asked, whose names are those of the profiles and of the MIG configs.
	Profile bool
	// Profiles are those that may have been meant where LabelMIGConfig asked, which cannot ask for them; nearest first.
	Profiles []string
}

// namesShown bounds lists in a message: a condition's message is read in a terminal's width, and the mixed nodes with the
// longest catalogs have about 30 configs.
const namesShown = 12

// Error says what the name may have been meant as, and which names there are.
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
	b.WriteString(shown(e.Known, ", "))
	return b.String()
}

// meant lists what the name may have been meant as, the profiles with the label that asks for them.
func (e *UnknownConfigError) meant() []string {
	meant := slices.Clone(e.Close)
	for _, p := range e.Profiles {
		profile := "the profile " + p + ", which the label " + LabelProfile + " asks for"
		if p == e.Name {
			return []string{profile}
		}
		meant = append(meant, profile)
	}
	return meant
}

// shown joins as many names as a message can hold.
func shown(names []string, separator string) string {
	first := slices.Clone(names[:min(len(names), namesShown)])
	if more := len(names) - len(first); more > 0 {
		first = append(first, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(first, separator)
}

// Reason is ReasonUnknownConfig.
func (*UnknownConfigError) Reason() Reason { return ReasonUnknownConfig }

// NoCapableGPUError means that a config or profile asks for MIG on GPUs none of which can do it.
type NoCapableGPUError struct {
	Config  string   // name of the MIG config
	Profile string   // name of the profile, in place of Config
	Models  []string // the GPUs that it names, by model, sorted; none if the node has no GPU
}

// Error names the models that are there instead.
func (e *NoCapableGPUError) Error() string {
	subject, other := fmt.Sprintf("config %q", e.Config), "a config with mig-enabled false"
	if e.Profile != "" {
		subject, other = fmt.Sprintf("profile %q", e.Profile), "a profile with enabled false"
	}
	if len(e.Models) == 0 {
		return subject + " names no GPU, since this node has none"
	}
	return fmt.Sprintf("%s asks for MIG, and no GPU that it names can do MIG: %s; choose %s, or remove the label",
		subject, strings.Join(e.Models, ", "), other)
}

// Reason is ReasonNoCapableGPU.
func (*NoCapableGPUError) Reason() Reason { return ReasonNoCapableGPU }

// VirtualGPUError means that a config or profile asks vGPUs for what only their host can do: to be cut, or uncut.
type VirtualGPUError struct {
	Config  string   // name of the MIG config
	Profile string   // name of the profile, in place of Config
	GPUs    []string // each by position, UUID and model
}

// Error names the GPUs, and says who can do it.
func (e *VirtualGPUError) Error() string {
	subject := fmt.Sprintf("config %q", e.Config)
	if e.Profile != "" {
		subject = fmt.Sprintf("profile %q", e.Profile)
	}
	return fmt.Sprintf("%s: a vGPU is cut on the host of its virtual machine and cannot be cut here: %s; "+
		"choose another vGPU profile for this virtual machine on its host, and remove the label", subject, shown(e.GPUs, "; "))
}

// Reason is ReasonVirtualGPU.
func (*VirtualGPUError) Reason() Reason { return ReasonVirtualGPU }

// NoSelectedGPUError means that no entry of a profile selects a GPU of the node: the profile is for other nodes.
type NoSelectedGPUError struct {
	Profile   string   // its name
	Selectors []string // what each entry selects by, without repetitions: "pci 0000:17:00.0 and model NVIDIA A100*"
	GPUs      []string // what the node has instead: "NVIDIA H100 80GB HBM3 (0000:18:00.0)"
}

// Error says what was looked for, and what the node has.
func (e *NoSelectedGPUError) Error() string {
	return fmt.Sprintf("profile %q selects no GPU of this node: it is about %s; this node has %s",
		e.Profile, shown(e.Selectors, ", or "), shown(e.GPUs, ", "))
}

// Reason is ReasonNoCapableGPU.
func (*NoSelectedGPUError) Reason() Reason { return ReasonNoCapableGPU }

// ReasonOf is the reason that an error of the catalog carries.
func ReasonOf(err error) Reason {
	var reasoned interface{ Reason() Reason }
	if errors.As(err, &reasoned) {
		return reasoned.Reason()
	}
	return ReasonInvalidCatalog
}
