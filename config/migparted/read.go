package migparted

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/nvml"
)

// read reads a document, and lists its mistakes, each with its place.
func read(doc []byte) (map[string]catalog.MIGConfig, []error) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(doc, &fields) != nil {
		return nil, []error{&check.InvalidError{Field: "file", Want: `must be a mapping with "version" and "mig-configs"`}}
	}
	var errs []error
	if written := string(fields["version"]); written != `"`+version+`"` {
		errs = check.AddMistake(errs, &check.InvalidError{Field: "version", Value: written, Want: "must be " + version + ", the only version"})
	}
	unknown, misplaced := readUnknown(fields)
	for _, err := range unknown {
		errs = check.AddMistake(errs, err)
	}
	foreign := len(unknown) > 0
	if misplaced && string(fields["mig-configs"]) == "null" { // what belongs there has been named
		return nil, errs
	}
	if _, there := fields["mig-configs"]; !there && (foreign || len(errs) == 0) { // a file of another kind, or the version alone, which mig-parted takes
		return nil, errs
	}
	var written map[string]json.RawMessage
	if json.Unmarshal(fields["mig-configs"], &written) != nil || len(written) == 0 {
		return nil, check.AddMistake(errs, &check.InvalidError{Field: "mig-configs", Want: "must be a mapping of at least one name to a list of rules"})
	}
	configs := map[string]catalog.MIGConfig{}
	for _, name := range slices.Sorted(maps.Keys(written)) {
		rules, wrong := readConfig(name, written[name])
		configs[name] = rules
		for _, err := range wrong {
			errs = check.AddMistake(errs, err)
		}
	}
	return configs, errs
}

// readUnknown lists the fields that a file does not have at its top, and reports whether any of them belongs elsewhere in it.
func readUnknown(fields map[string]json.RawMessage) (errs []error, misplaced bool) {
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if field == "version" || field == "mig-configs" {
			continue
		}
		want := belongs(field, fields[field])
		misplaced = misplaced || want != ""
		errs = check.AddMistake(errs, &check.InvalidError{Field: field, Want: cmp.Or(want, "is no field of MIG configs: use version and mig-configs")})
	}
	return errs, misplaced
}

// ruleFields are the fields of a rule. The last two are in no other program's files.
var ruleFields = []string{"device-filter", "devices", "mig-enabled", "mig-devices"}

// IsFragment reports whether the fields of a document are of this format, though it lacks mig-configs, as where a part of a file was pasted.
func IsFragment(top map[string]any) bool {
	return hasAny(top, ruleFields[2:]) || slices.ContainsFunc(slices.Collect(maps.Values(top)), func(value any) bool { return isConfig(value, ruleFields[2:]) })
}

// isConfig reports whether a value is a list of rules, by fields that the first one has.
func isConfig(value any, by []string) bool {
	rules, _ := value.([]any)
	if len(rules) == 0 {
		return false
	}
	rule, _ := rules[0].(map[string]any)
	return hasAny(rule, by)
}

func hasAny(in map[string]any, fields []string) bool {
	return slices.ContainsFunc(fields, func(field string) bool { _, has := in[field]; return has })
}

// belongs says where a field of another level of the format belongs; empty for a field of no level. Files lose a level where lines are pasted or indented by
// hand, and what is left often reads as a request to empty GPUs.
func belongs(field string, raw json.RawMessage) string {
	var value any
	switch {
	case json.Unmarshal(raw, &value) == nil && isConfig(value, ruleFields):
		return "is a MIG config: it belongs below mig-configs"
	case slices.Contains(ruleFields, field):
		return "belongs into a rule of a MIG config, below mig-configs"
	case isDevice(field):
		return "is a MIG device: it belongs below mig-devices of a rule"
	default:
		return ""
	}
}

// misplacedIn lists the fields at the top that belong below another. In a text without indentation the same field is there several times, which is no YAML.
func misplacedIn(text []byte) []error {
	var fields map[string]json.RawMessage
	if document.Into(text, &fields) != nil {
		return nil
	}
	var errs []error
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if want := belongs(field, fields[field]); want != "" {
			errs = check.AddMistake(errs, &check.InvalidError{Field: field, Want: want})
		}
	}
	return errs
}

// isDevice reports whether a field has the name of a MIG device.
func isDevice(field string) bool {
	_, err := catalog.DeviceName(field)
	return err == nil
}

// readConfig reads the rules of a config, and lists the mistakes of its name and of them.
func readConfig(name string, raw json.RawMessage) (catalog.MIGConfig, []error) {
	var errs []error
	if err := checkName(name); err != nil {
		errs = check.AddMistake(errs, err)
	}
	var written []json.RawMessage
	if err := json.Unmarshal(raw, &written); err != nil || len(written) == 0 {
		return nil, check.AddMistake(errs, &check.InvalidError{Config: name, Want: `must be a list of at least one rule with "devices" and "mig-enabled"`})
	}
	var rules catalog.MIGConfig
	for i, one := range written {
		rule, wrong := readRule(one)
		for _, w := range wrong {
			w.Config, w.Rule = name, i+1
			errs = check.AddMistake(errs, w)
		}
		rules = append(rules, rule)
	}
	return rules, errs
}

func checkName(name string) error {
	wrong := &check.InvalidError{Field: "mig-configs", Value: strconv.Quote(name)}
	if name == "" {
		wrong.Want = "is empty: a label cannot request it"
		return wrong
	}
	if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
		wrong.Want = "cannot be the value of a label, so no node could request it: write letters, digits, '-', '_' and '.'," +
			" at most 63, beginning and ending with a letter or digit (NVIDIA writes '.' for the '+' of a profile)"
		return wrong
	}
	return nil
}

// readRule reads a rule, and lists its mistakes.
func readRule(raw json.RawMessage) (catalog.MIGRule, []*check.InvalidError) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return catalog.MIGRule{}, []*check.InvalidError{{Value: string(raw), Want: `must be a mapping with "devices" and "mig-enabled"`}}
	}
	var rule catalog.MIGRule
	var wrong []*check.InvalidError
	misplaced := false
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		misplaced = misplaced || isDevice(field)
		readField(&rule, field, fields[field], func(value, want string) {
			wrong = append(wrong, &check.InvalidError{Field: field, Value: value, Want: want})
		})
	}
	for _, required := range []string{"devices", "mig-enabled"} {
		if _, ok := fields[required]; !ok {
			wrong = append(wrong, &check.InvalidError{Field: required, Want: "is missing"})
		}
	}
	if conflict := conflictOf(fields); conflict != nil && !misplaced { // with {} the GPUs would have no instances
		wrong = append(wrong, conflict)
	}
	if !rule.MIG {
		rule.Devices = nil
	}
	return rule, wrong
}

// readField reads the value of a field, and refuses one that is wrong regardless of other fields.
func readField(rule *catalog.MIGRule, field string, raw json.RawMessage, refuse func(value, want string)) {
	switch field {
	case "device-filter":
		rule.DeviceFilter = readFilter(raw, refuse)
	case "devices":
		rule.All, rule.Indices = readPositions(raw, refuse)
	case "mig-enabled":
		if json.Unmarshal(raw, &rule.MIG) != nil {
			refuse(string(raw), "must be true or false")
		}
	case "mig-devices":
		rule.Devices = readDevices(raw, refuse)
	case "version", "mig-configs":
		refuse("", "belongs to the top of the file, not into a rule")
	default:
		if isDevice(field) {
			refuse("", "is a MIG device: it belongs below mig-devices")
			return
		}
		refuse("", "is no field of a rule: use "+strings.Join(ruleFields[:3], ", ")+" and "+ruleFields[3])
	}
}

func readFilter(raw json.RawMessage, refuse func(value, want string)) []string {
	var one string
	var several []string
	if json.Unmarshal(raw, &one) == nil {
		if one != "" {
			several = []string{one}
		}
	} else if json.Unmarshal(raw, &several) != nil {
		refuse(string(raw), `must be a device id in quotes, "0x233010DE", or a list of them`)
		return nil
	}
	for _, f := range several {
		if _, err := catalog.ParseDeviceFilter(f); err != nil {
			refuse(strconv.Quote(f), err.Error())
		}
	}
	return several
}

func readPositions(raw json.RawMessage, refuse func(value, want string)) (all bool, indices []int) {
	if string(raw) == `"all"` {
		return true, nil
	}
	var several []json.RawMessage
	switch {
	case json.Unmarshal(raw, &several) != nil || string(raw) == "null":
		refuse(string(raw), `must be "all" or a list of positions in PCI order, [0, 1]`)
	case len(several) == 0:
		refuse("[]", "names no GPU: write \"all\" or a list of positions, [0, 1]")
	}
	for _, one := range several {
		i, err := strconv.Atoi(string(one))
		switch {
		case err != nil:
			refuse(string(one), "must be a position in PCI order, a whole number without quotes")
		case i < 0:
			refuse(string(one), "is negative: the first GPU in PCI order is 0")
		}
		indices = append(indices, i)
	}
	return false, indices
}

// readDevices counts devices by their normal names; a file may spell one device in two ways.
func readDevices(raw json.RawMessage, refuse func(value, want string)) map[string]int {
	var written map[string]json.RawMessage
	if json.Unmarshal(raw, &written) != nil {
		refuse(string(raw), `must be a mapping of names to whole numbers, {"1g.10gb": 7}`)
		return nil
	}
	counts, mistaken, counted := map[string]int{}, false, len(written) == 0
	bad := func(value, want string) { mistaken = true; refuse(value, want) }
	for _, name := range slices.Sorted(maps.Keys(written)) {
		n, want := countOf(written[name])
		counted = counted || n != 0
		if want != "" {
			value := string(written[name])
			if want == tooMany { // package document turns a number that is too large into text
				value = unquoted(written[name])
			}
			bad(fmt.Sprintf("%q: %s", name, value), want)
		}
		canonical, err := catalog.DeviceName(name)
		switch {
		case err != nil:
			bad(strconv.Quote(name), err.Error())
		case n > nvml.MaxDevices-counts[canonical]:
			bad(fmt.Sprintf("%q: %d", name, n), tooMany)
		case n > 0:
			counts[canonical] += n
		}
	}
	if !counted && !mistaken {
		refuse(string(raw), "counts nothing: for MIG mode without instances write {}")
	}
	return counts
}

var tooMany = fmt.Sprintf("is more than any GPU holds: give at most %d", nvml.MaxDevices)

// countOf reads a number of devices. If it refuses the number, want is the predicate of the message.
func countOf(raw json.RawMessage) (n int, want string) {
	text := unquoted(raw)
	n, err := strconv.Atoi(text)
	switch {
	case err != nil && text != "" && strings.Trim(text, "0123456789") == "", err == nil && n > nvml.MaxDevices && text != string(raw):
		return 0, tooMany
	case err != nil:
		return 0, "must be a whole number"
	case text != string(raw):
		return 0, "must be a whole number without quotes"
	case n < 0:
		return 0, "is negative"
	}
	return n, ""
}

// unquoted returns a value as the user wrote it, without a text's quotes.
func unquoted(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) != nil || string(raw) == "null" {
		return string(raw)
	}
	return text
}

// conflictOf finds fields that are each allowed alone, but not together; nil if there are none.
func conflictOf(fields map[string]json.RawMessage) *check.InvalidError {
	devices, given := fields["mig-devices"]
	var counts map[string]json.RawMessage
	counted := json.Unmarshal(devices, &counts) == nil && len(counts) > 0
	switch enabled := string(fields["mig-enabled"]); {
	case enabled == "true" && (!given || string(devices) == "null"):
		return &check.InvalidError{
			Field: "mig-devices",
			Want:  "is missing: for MIG mode without instances write {}",
		}
	case enabled == "false" && counted:
		return &check.InvalidError{Field: "mig-devices", Value: string(devices), Want: "needs mig-enabled: true"}
	default:
		return nil
	}
}
