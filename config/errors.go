package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// InvalidError is one value that is not allowed, with its place and the allowed values.
type InvalidError struct {
	Config  string // name of the MIG config; empty outside of a catalog
	Profile string // name of the profile, in place of Config
	Rule    int    // number of the rule in the config, or of the entry in the profile, from 1; 0 for all of it
	Field   string // as it is written in the file: "devices", "timeouts.drain"
	Value   string // as it is written in the file; empty if there is none
	Want    string // the predicate of the message, which says what is allowed: "is not a GPU of this node: they are 0 to 7"

	PassedOver bool // by NVIDIA's device plugin, which runs by the rest of its config
}

// PassedOver reports whether NVIDIA's device plugin passes over all that an error of its config names: the plugin runs by what was read.
func PassedOver(err error) bool {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		all := several.Unwrap()
		return len(all) > 0 && !slices.ContainsFunc(all, func(err error) bool { return !PassedOver(err) })
	}
	invalid, ok := errors.AsType[*InvalidError](err)
	return ok && invalid.PassedOver
}

// maxMistakes bounds the mistakes that an error lists. A user who has mended a hundred checks the file again.
const maxMistakes = 100

// AddMistake adds a mistake of a file to those found so far. Beyond a hundred it only counts them, in the last error: "and 2900 more".
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

// moreMistakesError counts the mistakes that the error does not list.
type moreMistakesError int

func (n moreMistakesError) Error() string { return fmt.Sprintf("and %d more", int(n)) }

// The longest text of a file that a message quotes, and the longest Want, in bytes. Allowed names and values are shorter.
const (
	maxQuoted = 256
	maxWant   = 1024
)

// shorten cuts a text that is too long to be read in a message.
func shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// Error names the place, the value and what is allowed. It shortens long texts.
func (e *InvalidError) Error() string {
	var at []string
	if e.Config != "" {
		at = append(at, fmt.Sprintf("config %q", shorten(e.Config, maxQuoted)))
	}
	rule := "rule"
	if e.Profile != "" {
		at, rule = append(at, fmt.Sprintf("profile %q", shorten(e.Profile, maxQuoted))), "mig entry"
	}
	if e.Rule > 0 {
		at = append(at, fmt.Sprintf("%s %d", rule, e.Rule))
	}
	if e.Field != "" {
		at = append(at, shorten(e.Field, maxQuoted))
	}
	place := strings.Join(at, ", ")
	if e.Value == "" {
		return fmt.Sprintf("%s: %s", place, shorten(e.Want, maxWant))
	}
	return fmt.Sprintf("%s: %s %s", place, shorten(e.Value, maxQuoted), shorten(e.Want, maxWant))
}

// Reason is ReasonInvalidCatalog.
func (*InvalidError) Reason() Reason { return ReasonInvalidCatalog }

// UnknownConfigError means that no MIG config and no profile has the name that a label gives.
type UnknownConfigError struct {
	Name  string   // the label's value
	Close []string // known names that are spelt like it, the nearest first
	Known []string // every name that the label may have, the administrator's own first

	// Profile says that the label is LabelProfile, which may name profiles and MIG configs.
	Profile bool
	// Profiles are profiles whose names are spelt like it, the nearest first, if the label is LabelMIGConfig, which cannot name them.
	Profiles []string
}

// maxNames bounds lists in a message: a condition's message is read in a terminal's width, and the mixed nodes with the
// longest catalogs have about 30 configs.
const maxNames = 12

// Error names the closest names, and those that the label may have.
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

// meant lists the closest names, each profile with the label that can name it.
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

// joinFirst joins as many names as a message can hold.
func joinFirst(names []string, separator string) string {
	first := slices.Clone(names[:min(len(names), maxNames)])
	if more := len(names) - len(first); more > 0 {
		first = append(first, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(first, separator)
}

// Reason is ReasonUnknownConfig.
func (*UnknownConfigError) Reason() Reason { return ReasonUnknownConfig }

// NoCapableGPUError means that a config or profile asks for MIG, and that none of the GPUs it selects can do MIG.
type NoCapableGPUError struct {
	Config  string   // name of the MIG config
	Profile string   // name of the profile, in place of Config
	Models  []string // models of the GPUs that it selects, sorted; none if the node has no GPU
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

// VirtualGPUError means that a config or profile wants vGPUs cut or uncut, which only their host can do.
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
	return fmt.Sprintf("%s: a vGPU is cut on the host of its virtual machine and cannot be cut here: %s; "+
		"choose another vGPU profile for this virtual machine on its host, and remove the label", subject, joinFirst(e.GPUs, "; "))
}

// Reason is ReasonVirtualGPU.
func (*VirtualGPUError) Reason() Reason { return ReasonVirtualGPU }

// NoSelectedGPUError means that no entry of a profile selects a GPU of the node: the profile is for other nodes.
type NoSelectedGPUError struct {
	Profile   string   // its name
	Selectors []string // the selectors of each entry, without repetitions: "pci 0000:17:00.0 and model NVIDIA A100*"
	GPUs      []string // the GPUs of the node: "NVIDIA H100 80GB HBM3 (0000:18:00.0)"
}

// Error names the selectors and the GPUs of the node.
func (e *NoSelectedGPUError) Error() string {
	return fmt.Sprintf("profile %q selects no GPU of this node: it is about %s; this node has %s",
		e.Profile, joinFirst(e.Selectors, ", or "), joinFirst(e.GPUs, ", "))
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
