package config

import (
	"fmt"
	"slices"
	"strings"
)

// InvalidError is one value that cannot be used, with where it stands and what is allowed there.
type InvalidError struct {
	Config string // name of the MIG config; empty outside of a catalog
	Rule   int    // number of the rule in the config, from 1; 0 for the config as a whole
	Field  string // as it is written in the file: "devices", "timeouts.drain"
	Value  string // as it is written in the file; empty if there is none
	Want   string // what is allowed, or what to do: "is not a GPU of this node: they are 0 to 7"
}

// Error names the place, the value and what is allowed.
func (e *InvalidError) Error() string {
	var at []string
	if e.Config != "" {
		at = append(at, fmt.Sprintf("config %q", e.Config))
	}
	if e.Rule > 0 {
		at = append(at, fmt.Sprintf("rule %d", e.Rule))
	}
	if e.Field != "" {
		at = append(at, e.Field)
	}
	place := strings.Join(at, ", ")
	if e.Value == "" {
		return fmt.Sprintf("%s: %s", place, e.Want)
	}
	return fmt.Sprintf("%s: %s %s", place, e.Value, e.Want)
}

// Reason is ReasonInvalidCatalog.
func (*InvalidError) Reason() Reason { return ReasonInvalidCatalog }

// UnknownConfigError means that the catalog has no config of that name.
type UnknownConfigError struct {
	Name  string   // what was asked for
	Close []string // names that it may have been meant as, the nearest first
	Known []string // every name of the catalog, sorted
}

// namesShown bounds the list of names in a message: a condition's message is read in a terminal's width, and the mixed
// nodes with the longest catalogs have about 30 configs.
const namesShown = 12

// Error says what the name may have been meant as, and which names there are.
func (e *UnknownConfigError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "no MIG config is named %q", e.Name)
	if len(e.Close) > 0 {
		fmt.Fprintf(&b, ": did you mean %s?", strings.Join(e.Close, " or "))
	}
	if len(e.Known) == 0 {
		return b.String() + ", and none is known for this node"
	}
	shown := slices.Clone(e.Known[:min(len(e.Known), namesShown)])
	if more := len(e.Known) - len(shown); more > 0 {
		shown = append(shown, fmt.Sprintf("and %d more", more))
	}
	if len(e.Close) > 0 {
		b.WriteString(" This node has ")
	} else {
		b.WriteString("; this node has ")
	}
	b.WriteString(strings.Join(shown, ", "))
	return b.String()
}

// Reason is ReasonUnknownConfig.
func (*UnknownConfigError) Reason() Reason { return ReasonUnknownConfig }

// NoCapableGPUError means that a config asks for MIG on GPUs none of which can do it.
type NoCapableGPUError struct {
	Config string   // name of the MIG config
	Models []string // the GPUs that it names, by model, sorted; none if the node has no GPU
}

// Error names the models that are there instead.
func (e *NoCapableGPUError) Error() string {
	if len(e.Models) == 0 {
		return fmt.Sprintf("config %q names no GPU, since this node has none", e.Config)
	}
	return fmt.Sprintf("config %q asks for MIG, and no GPU that it names can do MIG: %s; choose a config with mig-enabled false,"+
		" or remove the label", e.Config, strings.Join(e.Models, ", "))
}

// Reason is ReasonNoCapableGPU.
func (*NoCapableGPUError) Reason() Reason { return ReasonNoCapableGPU }
