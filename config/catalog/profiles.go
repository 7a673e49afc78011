package catalog

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/nvml"
)

// The kind of a file of profiles.
const (
	ProfilesAPIVersion = "gpuslice.io/v1alpha1"
	ProfilesKind       = "Profiles"
)

// Profile is one named request of the file of profiles, checked as far as possible without a node. It has at least one of MIG, Sharing, MIGStrategy,
// Labels and Taints.
type Profile struct {
	Description string                 // for users; may be empty
	MIG         MIGConfig              // no two rules may select the same GPU of a node; none changes no GPU
	Sharing     *Sharing               // nil changes nothing; SharingNone ends sharing
	MIGStrategy config.MIGStrategy     // of the device plugin's config; if empty, one that fits Sharing, or without Sharing the present one
	Labels      map[string]string      // of the node
	Taints      []corev1.Taint         // of the node, none twice with the same effect; without NoExecute
	Drain       *config.DrainOverrides // nil for the settings'
	Windows     []window.Window        // when a change to this profile may begin; if empty, those of the node's pool
}

// ParseProfiles reads a file of profiles, by name. It refuses unknown fields.
//
// The error joins one *InvalidError for each value that is not allowed, in the order of names and entries. A file with a mistake has no profiles:
// with half a catalog a label would not mean what the file's author reads there.
func ParseProfiles(text []byte) (map[string]Profile, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return nil, fmt.Errorf("reading profiles as YAML: %w", err)
	}
	if string(doc) == "null" {
		return nil, fmt.Errorf("reading profiles: the file is empty, and needs at least %q, %q and %q",
			"apiVersion: "+ProfilesAPIVersion, "kind: "+ProfilesKind, "profiles")
	}
	var c check.Mistakes
	var file ProfilesFields
	c.Read("file", doc, &file)
	var written map[string]json.RawMessage
	c.Read("profiles", file.Profiles.RawMessage, &written)

	profiles := map[string]Profile{}
	for _, name := range slices.Sorted(maps.Keys(written)) {
		refuseNoLabelValue(&c, "profiles", name)
		profile, wrong := profileOf(written[name])
		addOfProfile(&c, name, wrong)
		profiles[name] = profile
	}
	if len(c) > 0 {
		return nil, errors.Join(c...)
	}
	return profiles, nil
}

// These types read a file of profiles, and its JSON schema is generated from them. The functions below check the raw fields, so that they find other
// mistakes next to a value of the wrong form.

// ProfilesFields are the profiles that the label gpuslice.io/profile can request.
type ProfilesFields struct {
	APIVersion string `json:"apiVersion" jsonschema:"required,enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"required,enum=Profiles"`
	// By name, which must be valid as a label's value.
	Profiles check.Raw[map[string]ProfileFields] `json:"profiles"`
}

// ProfileFields configures the nodes of a pool. It has at least one of mig, sharing, migStrategy, labels and taints.
type ProfileFields struct {
	// For users.
	Description check.Raw[string] `json:"description"`
	// How GPUs are cut. A GPU that no entry selects stays unchanged.
	MIG check.Raw[[]MIGEntryFields] `json:"mig" jsonschema:"minItems=1"`
	// How several pods share GPUs and MIG devices. Without it sharing stays unchanged.
	Sharing check.Raw[SharingFields] `json:"sharing"`
	// The device plugin's MIG strategy: the resources that it advertises MIG devices as. Without it one that fits, if sharing is set.
	MIGStrategy config.MIGStrategy `json:"migStrategy" jsonschema:"enum=none,enum=single,enum=mixed"`
	// Labels of the node, under keys of your own.
	Labels check.Raw[map[string]string] `json:"labels" form:"nodeLabels"`
	// Taints of the node, under keys of your own.
	Taints check.Raw[[]TaintFields] `json:"taints" jsonschema:"maxItems=100,uniqueItems=true"`
	// How pods leave, where it differs from the settings.
	Drain *config.DrainOverrides `json:"drain"`
	// When a change to this profile may begin, in place of the windows of the node's pool.
	Windows []maintenance.WindowFields `json:"windows" jsonschema:"minItems=1" list:"must be a list of at least one window: leave it out where there is none, or write a freeze for never"`
}

// MIGEntryFields says how the GPUs that it selects are cut.
type MIGEntryFields struct {
	// The GPUs that it selects.
	GPUs check.Raw[SelectorFields] `json:"gpus" jsonschema:"required"`
	// MIG mode on.
	Enabled string `json:"enabled" jsonschema:"required,enum=true,enum=false" form:"boolean"`
	// Number of MIG devices by name, like 1g.10gb; {} for none.
	Instances check.Raw[map[string]int] `json:"instances" form:"instances"`
}

// SelectorFields selects GPUs: all, or those that match all its fields.
type SelectorFields struct {
	// Every GPU of the node. It stands alone.
	All check.Scalar `json:"all" form:"onlyTrue"`
	// UUIDs of GPUs, in full, as nvidia-smi -L prints them.
	UUID check.OneOrMore `json:"uuid" form:"uuid" alone:"a UUID" empty:"selects no GPU"`
	// PCI addresses.
	PCI check.OneOrMore `json:"pci" form:"pci" alone:"an address" empty:"selects no GPU"`
	// Positions in PCI order, from 0.
	Index check.OneOrMore `json:"index" form:"position" alone:"a position" empty:"selects no GPU"`
	// Models as nvidia-smi -L prints them; * stands for anything.
	Model check.OneOrMore `json:"model" form:"text" alone:"a model" empty:"selects no GPU"`
	// PCI device ids, as mig-parted writes them: 0x233010DE, or 0x233010DE:0x16C110DE with those of the subsystem.
	DeviceFilter check.OneOrMore `json:"deviceFilter" form:"deviceFilter" alone:"an id" empty:"selects no GPU"`
}

// profileOf checks one profile.
func profileOf(raw json.RawMessage) (Profile, check.Mistakes) {
	var c check.Mistakes
	var in ProfileFields
	if !c.Read("", check.OrEmpty(raw), &in) {
		return Profile{}, c
	}
	var p Profile
	if said := in.Description.RawMessage; !check.Absent(said) && json.Unmarshal(said, &p.Description) != nil {
		c.Refuse("description", string(said), "must be text")
	}
	noStrategy := in.MIGStrategy == "" && !c.Refused("migStrategy")
	if check.Absent(in.MIG.RawMessage) && check.Absent(in.Sharing.RawMessage) && noStrategy && check.Empty(in.Labels.RawMessage) &&
		check.Empty(in.Taints.RawMessage) {
		c.Add(&check.InvalidError{Want: "requests nothing: it must have at least one of mig, sharing, migStrategy, labels and taints"})
	}
	p.MIG = readMIGRules(&c, in.MIG.RawMessage)
	p.Sharing = readProfileSharing(&c, in.Sharing.RawMessage)
	p.Labels = readNodeLabels(&c, in.Labels.RawMessage)
	p.Taints = readNodeTaints(&c, in.Taints.RawMessage)
	p.Drain, p.Windows, p.MIGStrategy = in.Drain, maintenance.WindowsOf(in.Windows), in.MIGStrategy
	mps := p.Sharing != nil && p.Sharing.Strategy == SharingMPS
	if mps {
		refuseMIG(&c, p.MIG)
	}
	refuseStrategy(&c, p.MIGStrategy, p.MIG, mps)
	return p, c
}

// readMIGRules checks the entries of a profile's MIG part, if it has one.
func readMIGRules(c *check.Mistakes, raw json.RawMessage) MIGConfig {
	if check.Absent(raw) {
		return nil
	}
	var entries []json.RawMessage
	if json.Unmarshal(raw, &entries) != nil || len(entries) == 0 {
		c.Add(&check.InvalidError{Field: "mig", Want: `must be a list of at least one entry with "gpus" and "enabled"`})
	}
	var rules MIGConfig
	for i, entry := range entries {
		rule, wrong := migRuleOf(entry)
		addOfEntry(c, i+1, wrong)
		rules = append(rules, rule)
	}
	return rules
}

// refuseMIG refuses MIG together with MPS: the device plugin shares no MIG device by MPS, and exits if it finds one.
func refuseMIG(c *check.Mistakes, rules MIGConfig) {
	for i, rule := range rules {
		if rule.MIG {
			c.Add(&check.InvalidError{
				Rule: i + 1, Field: "enabled", Value: `"true"`, Want: "does not go with mps: NVIDIA's device plugin has no MPS on MIG; share by timeSlicing",
			})
		}
	}
}

// refuseStrategy refuses a MIG strategy if the device plugin under it would not advertise, on any node, the instances that the entries cut.
func refuseStrategy(c *check.Mistakes, strategy config.MIGStrategy, rules MIGConfig, mps bool) {
	const field = "migStrategy"
	if strategy == config.MIGStrategyMixed && mps {
		c.Refuse(field, string(strategy), "does not go with mps: NVIDIA's device plugin exits on both; write none, or leave it out")
	}
	for i, rule := range rules {
		at := fmt.Sprintf("does not go with mig entry %d: ", i+1)
		switch {
		case strategy == config.MIGStrategyNone && rule.MIG:
			c.Refuse(field, string(strategy), at+"GPUs in MIG mode would be advertised as whole ones that nothing can run on; write single or mixed, or leave it out")
		case strategy == config.MIGStrategySingle && len(rule.Devices) > 1:
			c.Refuse(field, string(strategy), at+"NVIDIA's device plugin exits on instances of several sizes; write mixed, or leave it out")
		}
	}
}

// migRuleOf checks one entry of a profile's MIG part.
func migRuleOf(raw json.RawMessage) (MIGRule, check.Mistakes) {
	var c check.Mistakes
	var in MIGEntryFields
	if !c.Read("", check.OrEmpty(raw), &in) {
		return MIGRule{}, c
	}
	misplaced := false // devices of this entry, which without them would seem to have MIG mode without instances
	for _, err := range c {
		if wrong, ok := errors.AsType[*check.InvalidError](err); ok {
			if _, notDevice := DeviceName(wrong.Field); notDevice == nil {
				wrong.Want, misplaced = "is a MIG device: it belongs below instances", true
			}
		}
	}
	var gpus SelectorFields
	var rule MIGRule
	if check.Absent(in.GPUs.RawMessage) {
		c.Add(&check.InvalidError{Field: "gpus", Want: "is missing: " + selectorForms})
	} else if c.Read("gpus", in.GPUs.RawMessage, &gpus) {
		readGPUSelectors(&c, gpus, &rule)
	}
	rule.MIG = in.Enabled == "true"
	switch {
	case in.Enabled == "false" && !check.Absent(in.Instances.RawMessage):
		c.Add(&check.InvalidError{Field: "instances", Want: "needs enabled: true"})
	case in.Enabled == "true" && check.Absent(in.Instances.RawMessage) && misplaced:
	case in.Enabled == "true" && check.Absent(in.Instances.RawMessage):
		c.Add(&check.InvalidError{
			Field: "instances", Want: "is missing: for MIG mode without instances write {}",
		})
	case in.Enabled == "true":
		rule.Devices = readInstances(&c, in.Instances.RawMessage)
	}
	return rule, c
}

const selectorForms = "write all: true, or at least one of uuid, pci, index, model and deviceFilter"

// readGPUSelectors fills in the rule's selectors of GPUs.
func readGPUSelectors(c *check.Mistakes, in SelectorFields, rule *MIGRule) {
	rule.UUIDs = readEach(c, "gpus.uuid", in.UUID, gpuUUID)
	rule.PCI = readEach(c, "gpus.pci", in.PCI, pciAddress)
	rule.Indices = readEach(c, "gpus.index", in.Index, position)
	rule.Models = readEach(c, "gpus.model", in.Model, modelPattern)
	rule.DeviceFilter = readEach(c, "gpus.deviceFilter", in.DeviceFilter, deviceFilter)

	rule.All = in.UUID == nil && in.PCI == nil && in.Index == nil
	selects := !rule.All || in.Model != nil || in.DeviceFilter != nil
	switch {
	case in.All == "" && !selects:
		c.Add(&check.InvalidError{Field: "gpus", Want: "selects no GPU: " + selectorForms})
	case in.All != "" && in.All != "true":
		c.Refuse("gpus.all", string(in.All), "must be true, or left out")
	case in.All == "true" && selects:
		c.Refuse("gpus.all", string(in.All), "must stand alone: leave it out where others select")
	}
}

// readInstances checks counts by name of the MIG device. It adds up two spellings of one device.
func readInstances(c *check.Mistakes, raw json.RawMessage) map[string]int {
	var in map[string]check.Scalar
	if !c.Read("instances", raw, &in) {
		return nil
	}
	devices := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(in)) {
		device, err := DeviceName(name)
		if err != nil {
			c.Refuse("instances", name, err.Error())
			continue
		}
		n, err := check.Number(string(in[name]), "a whole number", 1, check.MaxCount)
		if err != nil {
			c.Refuse("instances."+name, string(in[name]), err.Error())
		}
		devices[device] += n
	}
	return devices
}

// readEach reads the values of a selector, each in its one form, and refuses one that is there twice.
func readEach[T comparable](c *check.Mistakes, field string, in check.OneOrMore, read func(string) (T, error)) []T {
	if in != nil && len(in) == 0 {
		c.Add(&check.InvalidError{Field: field, Value: "[]", Want: "selects no GPU: give at least one, or leave it out"})
	}
	var out []T
	for i, text := range in {
		at := field
		if len(in) > 1 {
			at = fmt.Sprintf("%s[%d]", field, i)
		}
		value, err := read(string(text))
		switch {
		case err != nil:
			c.Refuse(at, string(text), err.Error())
		case slices.Contains(out, value):
			c.Refuse(at, string(text), "is there twice")
		default:
			out = append(out, value)
		}
	}
	return out
}

var (
	uuidForm = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
	pciForm  = regexp.MustCompile(`^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([01][0-9a-f])\.([0-7])$`)

	errNotUUID     = errors.New(`must be the whole UUID of a GPU, as nvidia-smi -L prints it: "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76"`)
	errMIGUUID     = errors.New("is a MIG device, which changes may delete: write its GPU's UUID")
	errNotPCI      = errors.New(`must be a PCI address: "0000:17:00.0", "00000000:17:00.0" or "17:00.0"`)
	errNotPosition = fmt.Errorf("must be a position in PCI order, a whole number from 0 to %d", check.MaxCount)
	errNotPattern  = errors.New(`must be a model as nvidia-smi -L prints it; * stands for anything: "NVIDIA A100*"`)
)

func gpuUUID(text string) (nvml.UUID, error) {
	id, isGPU := strings.CutPrefix(text, "GPU-")
	id = strings.ToLower(id)
	switch {
	case strings.HasPrefix(text, "MIG-"):
		return "", errMIGUUID
	case !isGPU || !uuidForm.MatchString(id):
		return "", errNotUUID
	}
	return nvml.UUID("GPU-" + id), nil
}

// pciAddress returns an address in the form of nvml.GPU, which is the kernel's. NVIDIA's tools write the domain in eight digits, and users often
// leave it out.
func pciAddress(text string) (string, error) {
	m := pciForm.FindStringSubmatch(strings.ToLower(text))
	if m == nil {
		return "", errNotPCI
	}
	domain, err := strconv.ParseUint("0"+m[1], 16, 32)
	if err != nil {
		return "", errNotPCI
	}
	return fmt.Sprintf("%04x:%s:%s.%s", domain, m[2], m[3], m[4]), nil
}

func position(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > check.MaxCount {
		return 0, errNotPosition
	}
	return n, nil
}

func modelPattern(text string) (string, error) {
	if _, err := path.Match(text, ""); err != nil || text == "" {
		return "", errNotPattern
	}
	return text, nil
}

func deviceFilter(text string) (string, error) {
	f, err := ParseDeviceFilter(text)
	if err != nil {
		return "", err
	}
	return f.String(), nil
}

// refuseNoLabelValue refuses a name that no node could request.
func refuseNoLabelValue(c *check.Mistakes, field, name string) {
	if problems := validation.IsValidLabelValue(name); name == "" || len(problems) > 0 {
		c.Refuse(field, name, "cannot be the value of a label, so no node could request it: write letters, digits, '-', '_'"+
			" and '.', at most 63, beginning and ending with a letter or digit")
	}
}

// addOfProfile adds the mistakes of a profile.
func addOfProfile(c *check.Mistakes, profile string, wrong check.Mistakes) {
	for _, err := range wrong {
		if invalid, ok := errors.AsType[*check.InvalidError](err); ok {
			invalid.Profile = profile
		}
		c.Add(err)
	}
}

// addOfEntry adds the mistakes of an entry of a profile.
func addOfEntry(c *check.Mistakes, number int, wrong check.Mistakes) {
	for _, err := range wrong {
		if invalid, ok := errors.AsType[*check.InvalidError](err); ok {
			invalid.Rule = number
		}
		c.Add(err)
	}
}
