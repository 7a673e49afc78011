package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// MIGConfig is one named wish for a node: rules in order; where several match a GPU the last one wins (as mig-parted does).
type MIGConfig []MIGRule

// MIGRule says how the GPUs that it names shall be cut.
type MIGRule struct {
	DeviceFilter []string       // PCI device ids over vendor ids, "0x233010DE"; empty for any
	All          bool           // every GPU that passes the filter
	Indices      []int          // otherwise those at these positions in PCI order, if they pass the filter
	MIG          bool           // MIG mode on
	Devices      map[string]int // count by name of the MIG device; empty with MIG on is a GPU without instances
}

// DeviceID reads one entry of a device filter. The device id comes first, then the vendor's: 0x2330 and 0x10DE.
func DeviceID(filter string) (uint32, error) {
	id, err := strconv.ParseUint(filter, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("reading device id %q: %w", filter, errNotDeviceID)
	}
	return uint32(id), nil
}

var errNotDeviceID = errors.New(`not of the form "0x233010DE", the PCI device id followed by the vendor id`)

// FilterOf is the device filter entry that matches the GPU and all of its kind.
func FilterOf(g nvml.GPU) string { return fmt.Sprintf("0x%X", g.DeviceID) }

// Catalog is the MIG configs that a node can be asked for, by name.
type Catalog struct {
	// Custom says where the configs that people wrote come from, for messages: "ConfigMap gpu-operator/custom".
	Custom string

	configs map[string]MIGConfig
	custom  map[string]bool
}

// Merge makes the catalog of a node. Where both have a config of the same name, the custom one wins.
func Merge(generated, custom map[string]MIGConfig) Catalog {
	c := Catalog{Custom: "ConfigMap", configs: map[string]MIGConfig{}, custom: map[string]bool{}}
	maps.Copy(c.configs, generated)
	maps.Copy(c.configs, custom)
	for name := range custom {
		c.custom[name] = true
	}
	return c
}

// Names lists the configs, sorted.
func (c Catalog) Names() []string { return slices.Sorted(maps.Keys(c.configs)) }

// Config finds a config by its name.
func (c Catalog) Config(name string) (MIGConfig, bool) {
	cfg, ok := c.configs[name]
	return cfg, ok
}

// Source says where the config of that name comes from: the node's own hardware, or what Custom says.
func (c Catalog) Source(name string) string {
	if c.custom[name] {
		return c.Custom
	}
	return "hardware"
}

// Wishes is what the config of that name asks of each of the node's GPUs. GPUs that no rule names are not in the
// result: they are to be left as they are. A GPU that cannot do MIG may be in it with MIG off, which it already is.
//
// An unknown name is an *UnknownConfigError; a config that asks for MIG where no GPU can do it is a
// *NoCapableGPUError; one that cannot be meant for this node is one or several *InvalidError.
// Whether a GPU has room for the instances is not looked at here.
func (c Catalog) Wishes(name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Wish, error) {
	cfg, ok := c.configs[name]
	if !ok {
		known := c.Names()
		return nil, &UnknownConfigError{Name: name, Close: closest(name, known), Known: known}
	}

	wishes := map[nvml.UUID]nvml.Wish{}
	var incapable []nvml.GPU
	var errs []error
	for i, rule := range cfg {
		named, err := rule.named(gpus)
		if err != nil {
			err.Config, err.Rule = name, i+1
			errs = append(errs, err)
			continue
		}
		for _, g := range named {
			switch {
			case g.Capable || g.Lost || !rule.MIG: // what a lost GPU could do is not known; that it is lost, the planner tells
				wishes[g.UUID] = nvml.Wish{MIG: rule.MIG, Devices: maps.Clone(rule.Devices)}
			case rule.All:
				incapable = append(incapable, g)
			default:
				errs = append(errs, &InvalidError{
					Config: name, Rule: i + 1, Field: "devices", Value: strconv.Itoa(g.Index),
					Want: fmt.Sprintf("is a %s, which cannot do MIG: leave it out, or set mig-enabled to false for it", g.Model),
				})
			}
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if len(incapable) > 0 && !asksForMIG(wishes) {
		return nil, &NoCapableGPUError{Config: name, Models: models(incapable)}
	}
	if len(wishes) == 0 {
		return nil, namesNothing(name, cfg, gpus)
	}
	return wishes, nil
}

// named lists the GPUs that the rule is about. A filter that lets none pass is normal, since configs are written for
// fleets, and then the indices are about another node too.
func (r MIGRule) named(gpus []nvml.GPU) ([]nvml.GPU, *InvalidError) {
	passing, wrong := r.passing(gpus)
	if wrong != nil || r.All || len(passing) == 0 {
		return passing, wrong
	}
	for _, i := range r.Indices {
		if !slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Index == i }) {
			return nil, &InvalidError{Field: "devices", Value: strconv.Itoa(i), Want: "is not a GPU of this node, which has " + indices(gpus)}
		}
	}
	return slices.DeleteFunc(passing, func(g nvml.GPU) bool { return !slices.Contains(r.Indices, g.Index) }), nil
}

// passing lists the GPUs that pass the rule's filter.
func (r MIGRule) passing(gpus []nvml.GPU) ([]nvml.GPU, *InvalidError) {
	if len(r.DeviceFilter) == 0 {
		return slices.Clone(gpus), nil
	}
	var ids []uint32
	for _, f := range r.DeviceFilter {
		id, err := DeviceID(f)
		if err != nil {
			return nil, &InvalidError{Field: "device-filter", Value: strconv.Quote(f), Want: "is " + errNotDeviceID.Error()}
		}
		ids = append(ids, id)
	}
	return slices.DeleteFunc(slices.Clone(gpus), func(g nvml.GPU) bool { return !slices.Contains(ids, g.DeviceID) }), nil
}

func asksForMIG(wishes map[nvml.UUID]nvml.Wish) bool {
	for _, w := range wishes {
		if w.MIG {
			return true
		}
	}
	return false
}

// namesNothing explains why no rule of the config is about any GPU of the node: it is for other kinds of GPU, or its
// filters let through only GPUs at other positions.
func namesNothing(name string, cfg MIGConfig, gpus []nvml.GPU) error {
	if len(gpus) == 0 {
		return &NoCapableGPUError{Config: name}
	}
	var have, filters, positions []string
	for _, g := range gpus {
		have = append(have, fmt.Sprintf("%s (%s)", FilterOf(g), g.Model))
	}
	slices.Sort(have)
	here := "this node, which has " + strings.Join(slices.Compact(have), ", ")
	for _, r := range cfg {
		filters = append(filters, r.DeviceFilter...)
		for _, i := range r.Indices {
			positions = append(positions, strconv.Itoa(i))
		}
	}
	anyHere := func(r MIGRule) bool { passing, _ := r.passing(gpus); return len(passing) > 0 }
	if slices.ContainsFunc(cfg, anyHere) {
		return &InvalidError{
			Config: name, Field: "devices", Value: strings.Join(positions, ", "),
			Want: "passes the filter of no rule on " + here,
		}
	}
	return &InvalidError{
		Config: name, Field: "device-filter", Value: strings.Join(filters, ", "), Want: "is about no GPU of " + here,
	}
}

func models(gpus []nvml.GPU) []string {
	var out []string
	for _, g := range gpus {
		out = append(out, g.Model)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func indices(gpus []nvml.GPU) string {
	switch len(gpus) {
	case 0:
		return "none"
	case 1:
		return strconv.Itoa(gpus[0].Index)
	}
	all := make([]int, len(gpus))
	for i, g := range gpus {
		all[i] = g.Index
	}
	return fmt.Sprintf("%d to %d", slices.Min(all), slices.Max(all))
}
