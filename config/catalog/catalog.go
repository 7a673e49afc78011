package catalog

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/nvml"
)

// MIGConfig is one named request for a node. In a file of mig-parted's format several rules may match the same GPU, and the last one wins, as in
// mig-parted; in a profile they may not.
type MIGConfig []MIGRule

// MIGRule says how the GPUs that it selects are cut. A GPU must be in each of its lists; an empty list selects any GPU. The last three fields exist
// in profiles only.
type MIGRule struct {
	DeviceFilter []string       // of the forms of ParseDeviceFilter; empty for any
	All          bool           // every GPU of the filters; otherwise those that Indices, UUIDs and PCI name
	Indices      []int          // positions in PCI order
	MIG          bool           // MIG mode on
	Devices      map[string]int // count by name of the MIG device; empty with MIG on is a GPU without instances

	Models []string    // patterns of model names, "NVIDIA A100*", as path.Match has them; a filter like DeviceFilter
	UUIDs  []nvml.UUID // in full
	PCI    []string    // bus addresses in the form of nvml.GPU: "0000:17:00.0"
}

// DeviceFilter is one entry of a device filter, as in mig-parted from v0.15 on: GPUs of one kind, or only one maker's boards among them.
type DeviceFilter struct {
	DeviceID    uint32 // PCI device id over vendor id: 0x2330 and 0x10DE
	Subsystem   bool   // SubsystemID counts too
	SubsystemID uint32 // PCI subsystem device id over subsystem vendor id
}

// ParseDeviceFilter reads "0x233010DE" or "0x233010DE:0x16C110DE". The error is a predicate that follows the filter.
func ParseDeviceFilter(text string) (DeviceFilter, error) {
	device, subsystem, both := strings.Cut(text, ":")
	if both && device == "" {
		return DeviceFilter{}, errNoDeviceID
	}
	id, err := strconv.ParseUint(device, 0, 32)
	if err != nil {
		return DeviceFilter{}, errNotDeviceFilter
	}
	f := DeviceFilter{DeviceID: uint32(id), Subsystem: both}
	if both {
		if id, err = strconv.ParseUint(subsystem, 0, 32); err != nil {
			return DeviceFilter{}, errNotDeviceFilter
		}
		f.SubsystemID = uint32(id)
	}
	return f, nil
}

// String is the entry in its one form.
func (f DeviceFilter) String() string {
	if f.Subsystem {
		return fmt.Sprintf("0x%X:0x%X", f.DeviceID, f.SubsystemID)
	}
	return fmt.Sprintf("0x%X", f.DeviceID)
}

func (f DeviceFilter) passes(g nvml.GPU) bool {
	return f.DeviceID == g.DeviceID && (!f.Subsystem || f.SubsystemID == g.SubsystemID)
}

var (
	errNotDeviceFilter = errors.New(`is not of the form "0x233010DE", the PCI device id followed by the vendor id,` +
		` or "0x233010DE:0x16C110DE" with those of the subsystem`)
	errNoDeviceID = errors.New("begins with a colon, so that mig-parted matches no GPU: write the device id before it," +
		` "0x233010DE:0x16C110DE"`)
)

// FilterOf is the device filter entry that matches the GPU and all of its kind.
func FilterOf(g nvml.GPU) string { return DeviceFilter{DeviceID: g.DeviceID}.String() }

// Catalog has the MIG configs and profiles that a label can name, besides the configs that a name spells out: see Spelled. Both labels can name a MIG config. Only LabelProfile can name a profile, so that a
// profile never changes the meaning of LabelMIGConfig.
type Catalog struct {
	configs  map[string]MIGConfig
	profiles map[string]Profile
}

// Merge makes the catalog of a node. A custom config replaces a generated one of the same name.
func Merge(generated, custom map[string]MIGConfig) Catalog {
	c := Catalog{configs: map[string]MIGConfig{}}
	maps.Copy(c.configs, generated)
	maps.Copy(c.configs, custom)
	return c
}

// WithProfiles returns the catalog with these profiles in place of its own.
func (c Catalog) WithProfiles(profiles map[string]Profile) Catalog {
	c.profiles = maps.Clone(profiles)
	return c
}

// Names lists the MIG configs that LabelMIGConfig may name, sorted.
func (c Catalog) Names() []string { return slices.Sorted(maps.Keys(c.configs)) }

// ProfileNames lists the names that LabelProfile may have, sorted: those of the profiles and of the MIG configs.
func (c Catalog) ProfileNames() []string {
	names := slices.AppendSeq(c.Names(), maps.Keys(c.profiles))
	slices.Sort(names)
	return slices.Compact(names)
}

// Config finds a MIG config by its name, also one that the name spells out.
func (c Catalog) Config(name string) (MIGConfig, bool) {
	cfg, ok := c.configs[name]
	if ok || !IsSpelled(name) {
		return cfg, ok
	}
	cfg, err := Spelled(name)
	return cfg, err == nil
}

// Profile finds a profile by its name.
func (c Catalog) Profile(name string) (Profile, bool) {
	p, ok := c.profiles[name]
	return p, ok
}

// Requests returns the named MIG config's request for each of the node's GPUs. A GPU that no rule selects has no entry, and stays unchanged. A GPU
// that cannot do MIG may have an entry with MIG off, which changes nothing.
//
// An unknown name is an *UnknownConfigError. A config that requests MIG where no GPU can do it is a *NoCapableGPUError, or a *VirtualGPUError for
// vGPUs. One that cannot be meant for this node is one or several *InvalidError. Requests does not check whether a GPU has room for the instances.
func (c Catalog) Requests(name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Request, error) {
	cfg, ok := c.configs[name]
	if !ok && IsSpelled(name) {
		return spelledRequests(name, gpus)
	}
	switch generated := strings.HasPrefix(name, GeneratedPrefix); {
	case !ok && generated && allVirtualGPUs(gpus):
		return nil, (&requestBuilder{config: name}).virtualGPU(gpus)
	case !ok && generated && noneCapable(gpus):
		return nil, &NoCapableGPUError{Config: name, Models: models(gpus)}
	}
	if !ok {
		known := c.ownFirst(c.Names())
		return nil, &UnknownConfigError{
			Name: name, Close: check.Closest(name, known), Known: known,
			Profiles: check.Closest(name, slices.Sorted(maps.Keys(c.profiles))),
		}
	}
	return (&requestBuilder{config: name, gpus: gpus}).build(cfg)
}

// ProfileRequests returns the requests of the profile of that name, or else of the MIG config, with the rules and errors of Requests.
//
// A profile that selects no GPU of this node is a *NoSelectedGPUError. The nodes of a pool share it, so that one entry may select none if another
// does. Two entries for one GPU are an *InvalidError. A profile without entries changes no GPU.
func (c Catalog) ProfileRequests(name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Request, error) {
	if p, ok := c.profiles[name]; ok {
		if len(p.MIG) == 0 {
			return nil, nil
		}
		return (&requestBuilder{profile: name, gpus: gpus}).build(p.MIG)
	}
	if _, ok := c.configs[name]; ok || IsSpelled(name) {
		return c.Requests(name, gpus)
	}
	known := c.ownFirst(c.ProfileNames())
	return nil, &UnknownConfigError{Profile: true, Name: name, Close: check.Closest(name, known), Known: known}
}

// ownFirst puts the administrator's names before generated ones, since a message has room for a few names only.
func (c Catalog) ownFirst(names []string) []string {
	generated := func(name string) bool {
		_, isProfile := c.profiles[name]
		return !isProfile && strings.HasPrefix(name, GeneratedPrefix)
	}
	own := slices.DeleteFunc(slices.Clone(names), generated)
	return append(own, slices.DeleteFunc(names, func(name string) bool { return !generated(name) })...)
}

// requestBuilder turns a config or a profile into requests for one node's GPUs.
type requestBuilder struct {
	config, profile string // the name; one of the two is empty
	spelled         bool   // the name of the config spells it out
	gpus            []nvml.GPU

	requests  map[nvml.UUID]nvml.Request
	rules     map[nvml.UUID]int // the number of the rule that each request comes from
	incapable []nvml.GPU        // GPUs without MIG that a rule for all GPUs would cut
	virtual   []nvml.GPU        // vGPUs that a rule for all GPUs would cut or uncut; only their host can
	errs      []error
}

func (b *requestBuilder) build(cfg MIGConfig) (map[nvml.UUID]nvml.Request, error) {
	b.requests, b.rules = map[nvml.UUID]nvml.Request{}, map[nvml.UUID]int{}
	for i, rule := range cfg {
		b.addRule(i+1, rule)
	}
	if len(b.errs) > 0 {
		return nil, errors.Join(b.errs...)
	}
	if len(b.virtual) > 0 && !asksForMIG(b.requests) {
		return nil, b.virtualGPU(b.virtual)
	}
	if len(b.incapable) > 0 && !asksForMIG(b.requests) {
		return nil, &NoCapableGPUError{Config: b.config, Profile: b.profile, Models: models(b.incapable)}
	}
	if len(b.requests) == 0 {
		return nil, b.explainNoMatch(cfg)
	}
	return b.requests, nil
}

// addRule adds the requests of one rule.
func (b *requestBuilder) addRule(number int, rule MIGRule) {
	named, wrong := b.selected(rule)
	if wrong != nil {
		b.refuse(number, wrong)
		return
	}
	for _, g := range named {
		if b.refuseCutOfVirtualGPU(g, rule) {
			continue
		}
		// A lost GPU does not say whether it can do MIG. The planner reports the loss.
		incapable := rule.MIG && !g.Capable && !g.Lost
		earlier, taken := b.rules[g.UUID]
		switch {
		case incapable && rule.All:
			b.incapable = append(b.incapable, g)
		case incapable && b.profile != "":
			b.refuse(number, &check.InvalidError{
				Field: "gpus", Value: nameOf(g),
				Want: fmt.Sprintf("is a %s, which cannot do MIG: leave it out, or set enabled to false for it", g.Model),
			})
		case incapable:
			b.refuse(number, &check.InvalidError{
				Field: fieldDevices, Value: strconv.Itoa(g.Index),
				Want: fmt.Sprintf("is a %s, which cannot do MIG: leave it out, or %s for it", g.Model, b.turnOff()),
			})
		case taken && !g.Lost && b.profile != "":
			b.refuse(number, &check.InvalidError{
				Field: "gpus", Value: nameOf(g),
				Want: fmt.Sprintf("is already in mig entry %d: a GPU may be in one entry of a profile only", earlier),
			})
		default:
			b.refuseUnknownProfiles(g, rule.Devices)
			b.requests[g.UUID] = nvml.Request{MIG: rule.MIG, Devices: maps.Clone(rule.Devices)}
			b.rules[g.UUID] = number
		}
	}
}

// turnOff is how the config requests MIG off.
func (b *requestBuilder) turnOff() string {
	if b.spelled {
		return "write _off"
	}
	return "set mig-enabled to false"
}

// selected lists the GPUs that the rule selects. A profile and a spelled name may not name a position that the node does not have.
func (b *requestBuilder) selected(rule MIGRule) ([]nvml.GPU, *check.InvalidError) {
	if missing := rule.missingPositions(b.gpus); (b.profile != "" || b.spelled) && len(missing) > 0 {
		return nil, &check.InvalidError{Field: fieldDevices, Value: strconv.Itoa(missing[0]), Want: "is not a GPU of this node, which has " + indices(b.gpus)}
	}
	return rule.selected(b.gpus)
}

// refuseCutOfVirtualGPU reports whether the rule would cut or uncut a vGPU. It refuses a rule that names the vGPU; a rule for all GPUs is refused
// later if nothing else is left to do.
func (b *requestBuilder) refuseCutOfVirtualGPU(g nvml.GPU, rule MIGRule) bool {
	if g.Lost || g.Virtualization != nvml.VirtualGPU || rule.MIG == g.Enabled && !rule.MIG {
		return false
	}
	if rule.All {
		b.virtual = append(b.virtual, g)
	} else {
		b.errs = check.AddMistake(b.errs, b.virtualGPU([]nvml.GPU{g}))
	}
	return true
}

func (b *requestBuilder) virtualGPU(gpus []nvml.GPU) error {
	e := &VirtualGPUError{Config: b.config, Profile: b.profile}
	for _, g := range gpus {
		e.GPUs = append(e.GPUs, fmt.Sprintf("%s, %s", nameOf(g), g.Model))
	}
	return e
}

func (b *requestBuilder) refuse(number int, wrong *check.InvalidError) {
	wrong.Config, wrong.Profile, wrong.Rule = b.config, b.profile, number
	if b.spelled {
		wrong.Rule = 0 // its groups have no numbers
	}
	if field, ok := profileFields[wrong.Field]; ok && b.profile != "" {
		wrong.Field = field
	}
	b.errs = check.AddMistake(b.errs, wrong)
}

// The fields of a rule in mig-parted's format that may not fit a node.
const (
	fieldDevices = "devices"
	fieldFilter  = "device-filter"
)

// profileFields are the names of those fields in a profile.
var profileFields = map[string]string{fieldDevices: "gpus.index", fieldFilter: "gpus.deviceFilter"}

// selected lists the GPUs that the rule selects. Users write configs for fleets: it is normal that no GPU of this node passes a filter, or has the
// rule's UUID, address or position.
func (r MIGRule) selected(gpus []nvml.GPU) ([]nvml.GPU, *check.InvalidError) {
	named, wrong := r.passingFilters(gpus)
	if wrong != nil || r.All {
		return named, wrong
	}
	if len(r.Indices)+len(r.UUIDs)+len(r.PCI) == 0 {
		return nil, nil
	}
	named = slices.DeleteFunc(named, func(g nvml.GPU) bool { return !emptyOrContains(r.UUIDs, g.UUID) || !emptyOrContains(r.PCI, g.PCI) })
	return slices.DeleteFunc(named, func(g nvml.GPU) bool { return !emptyOrContains(r.Indices, g.Index) }), nil
}

// missingPositions lists the positions of the rule where the node has no GPU. It lists none if the rule's filters, UUIDs and addresses select no GPU
// of this node: the rule is then for other nodes.
func (r MIGRule) missingPositions(gpus []nvml.GPU) []int {
	passing, wrong := r.passingFilters(gpus)
	selected := func(g nvml.GPU) bool { return emptyOrContains(r.UUIDs, g.UUID) && emptyOrContains(r.PCI, g.PCI) }
	if wrong != nil || !slices.ContainsFunc(passing, selected) {
		return nil
	}
	var out []int
	for _, i := range r.Indices {
		if !slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Index == i }) {
			out = append(out, i)
		}
	}
	return out
}

// MissingPositions lists the positions that a MIG config names where the node has no GPU, in ascending order. NVIDIA's mig-parted ignores them, so
// that one file serves nodes of four GPUs and of eight.
func (c Catalog) MissingPositions(name string, gpus []nvml.GPU) []int {
	var out []int
	for _, rule := range c.configs[name] {
		out = append(out, rule.missingPositions(gpus)...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// emptyOrContains reports whether the list is empty or has the value.
func emptyOrContains[T comparable](list []T, value T) bool {
	return len(list) == 0 || slices.Contains(list, value)
}

// passingFilters lists the GPUs that pass the rule's filters.
func (r MIGRule) passingFilters(gpus []nvml.GPU) ([]nvml.GPU, *check.InvalidError) {
	var filters []DeviceFilter
	for _, text := range r.DeviceFilter {
		f, err := ParseDeviceFilter(text)
		if err != nil {
			return nil, &check.InvalidError{Field: fieldFilter, Value: strconv.Quote(text), Want: err.Error()}
		}
		filters = append(filters, f)
	}
	return slices.DeleteFunc(slices.Clone(gpus), func(g nvml.GPU) bool {
		filtered := len(filters) > 0 && !slices.ContainsFunc(filters, func(f DeviceFilter) bool { return f.passes(g) })
		return filtered || !r.isModel(g.Model)
	}), nil
}

// isModel reports whether the name fits one of the patterns. Without patterns every name does.
func (r MIGRule) isModel(name string) bool {
	return len(r.Models) == 0 || slices.ContainsFunc(r.Models, func(pattern string) bool {
		fits, err := path.Match(pattern, name)
		return err == nil && fits
	})
}

// allVirtualGPUs reports whether every GPU of the node is a vGPU. No generated config would cut one.
func allVirtualGPUs(gpus []nvml.GPU) bool {
	return len(gpus) > 0 && !slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Virtualization != nvml.VirtualGPU })
}

func asksForMIG(requests map[nvml.UUID]nvml.Request) bool {
	for _, w := range requests {
		if w.MIG {
			return true
		}
	}
	return false
}

// explainNoMatch explains why no rule selects a GPU of the node: the rules are for other kinds of GPU, or their filters pass only GPUs at other
// positions.
func (b *requestBuilder) explainNoMatch(cfg MIGConfig) error {
	if len(b.gpus) == 0 {
		return &NoCapableGPUError{Config: b.config, Profile: b.profile}
	}
	if b.profile != "" {
		return b.explainNoSelection(cfg)
	}
	var have, filters, positions []string
	for _, g := range b.gpus {
		have = append(have, fmt.Sprintf("%s (%s)", FilterOf(g), g.Model))
	}
	slices.Sort(have)
	here := "this node, which has " + strings.Join(slices.Compact(have), ", ")
	for _, rule := range cfg {
		filters = append(filters, rule.DeviceFilter...)
		for _, i := range rule.Indices {
			positions = append(positions, strconv.Itoa(i))
		}
	}
	anyHere := func(rule MIGRule) bool { passing, _ := rule.passingFilters(b.gpus); return len(passing) > 0 }
	switch {
	case len(filters) == 0:
		return &check.InvalidError{
			Config: b.config, Field: fieldDevices, Value: strings.Join(positions, ", "),
			Want: "is no position of this node, which has " + indices(b.gpus),
		}
	case slices.ContainsFunc(cfg, anyHere):
		return &check.InvalidError{
			Config: b.config, Field: fieldDevices, Value: strings.Join(positions, ", "),
			Want: "fails the rules' filters on " + here,
		}
	}
	return &check.InvalidError{
		Config: b.config, Field: fieldFilter, Value: strings.Join(filters, ", "), Want: "fits no GPU of " + here,
	}
}

// explainNoSelection explains why no entry of a profile selects a GPU of the node.
func (b *requestBuilder) explainNoSelection(cfg MIGConfig) error {
	wrong := &NoSelectedGPUError{Profile: b.profile}
	by := map[string]bool{}
	for _, rule := range cfg {
		var parts []string
		for _, s := range rule.selectors() {
			by[s.field] = true
			parts = append(parts, s.field+" "+joinFirst(s.values, ", "))
		}
		if entry := strings.Join(parts, " and "); !slices.Contains(wrong.Selectors, entry) {
			wrong.Selectors = append(wrong.Selectors, entry)
		}
	}
	for _, g := range b.gpus {
		if seen := describeGPU(g, by); !slices.Contains(wrong.GPUs, seen) {
			wrong.GPUs = append(wrong.GPUs, seen)
		}
	}
	return wrong
}

// describeGPU writes a GPU's model and the properties that the given selectors compare. GPUs that are equal in these get the same text.
func describeGPU(g nvml.GPU, by map[string]bool) string {
	if g.Lost {
		return fmt.Sprintf("GPU %d (lost)", g.Index)
	}
	var also []string
	if by["deviceFilter"] {
		also = append(also, FilterOf(g))
	}
	if by["uuid"] {
		also = append(also, string(g.UUID))
	}
	if by["pci"] {
		also = append(also, g.PCI)
	}
	if by["index"] {
		also = append(also, "index "+strconv.Itoa(g.Index))
	}
	if len(also) == 0 {
		return g.Model
	}
	return fmt.Sprintf("%s (%s)", g.Model, strings.Join(also, ", "))
}

// selector is one field of the rule that selects GPUs, by the name that it has in a profile.
type selector struct {
	field  string
	values []string
}

// selectors lists those that the rule has; none if it is for all GPUs.
func (r MIGRule) selectors() []selector {
	var uuids, positions []string
	for _, u := range r.UUIDs {
		uuids = append(uuids, string(u))
	}
	for _, i := range r.Indices {
		positions = append(positions, strconv.Itoa(i))
	}
	return slices.DeleteFunc([]selector{
		{"uuid", uuids}, {"pci", r.PCI}, {"index", positions}, {"model", r.Models}, {"deviceFilter", r.DeviceFilter},
	}, func(s selector) bool { return len(s.values) == 0 })
}

// nameOf is a GPU by its position.
func nameOf(g nvml.GPU) string { return fmt.Sprintf("GPU %d", g.Index) }

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

// noneCapable reports whether the node has GPUs, and none that could do MIG.
func noneCapable(gpus []nvml.GPU) bool {
	return len(gpus) > 0 && !slices.ContainsFunc(gpus, func(g nvml.GPU) bool { return g.Capable || g.Lost })
}
