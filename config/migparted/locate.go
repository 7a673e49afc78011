package migparted

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	spec "github.com/NVIDIA/mig-parted/api/spec/v1"
	"github.com/NVIDIA/mig-parted/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// locate finds the mistakes of a document that mig-parted has refused, each with its place. It decides nothing: if it finds no mistake, the
// caller gives mig-parted's own message.
func locate(doc []byte) []error {
	var file map[string]json.RawMessage
	if json.Unmarshal(doc, &file) != nil {
		return []error{&config.InvalidError{Field: "file", Want: `must be a mapping with "version" and "mig-configs"`}}
	}
	var errs []error
	if version := string(file["version"]); version != `"`+spec.Version+`"` {
		errs = config.AddMistake(errs, &config.InvalidError{Field: "version", Value: version, Want: "must be v1, the only one there is"})
	}
	foreign := false
	for _, field := range slices.Sorted(maps.Keys(file)) {
		if field != "version" && field != "mig-configs" {
			foreign = true
			errs = config.AddMistake(errs, &config.InvalidError{Field: field, Want: "is no field of MIG configs, which have version and mig-configs"})
		}
	}
	if _, there := file["mig-configs"]; foreign && !there { // a file of another kind
		return errs
	}
	var configs map[string]json.RawMessage
	if json.Unmarshal(file["mig-configs"], &configs) != nil || len(configs) == 0 {
		return config.AddMistake(errs, &config.InvalidError{Field: "mig-configs", Want: "must be a mapping of at least one name to a list of rules"})
	}
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		for _, err := range mistakesInConfig(name, configs[name]) {
			errs = config.AddMistake(errs, err)
		}
	}
	return errs
}

// mistakesInConfig lists the mistakes of a name and its rules.
func mistakesInConfig(name string, raw json.RawMessage) []error {
	var errs []error
	if err := checkName(name); err != nil {
		errs = config.AddMistake(errs, err)
	}
	var rules []json.RawMessage
	if err := json.Unmarshal(raw, &rules); err != nil || len(rules) == 0 {
		return config.AddMistake(errs, &config.InvalidError{Config: name, Want: `must be a list of at least one rule with "devices" and "mig-enabled"`})
	}
	for i, rule := range rules {
		for _, wrong := range mistakesInRule(rule) {
			wrong.Config, wrong.Rule = name, i+1
			errs = config.AddMistake(errs, wrong)
		}
	}
	return errs
}

// mistakesInRule lists the mistakes of a rule, whether mig-parted takes it or not.
func mistakesInRule(raw json.RawMessage) []*config.InvalidError {
	var rule spec.MigConfigSpec
	refused := json.Unmarshal(raw, &rule)
	if refused == nil {
		_, wrong := ruleOf(rule)
		return wrong
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return []*config.InvalidError{{Value: string(raw), Want: `must be a mapping with "devices" and "mig-enabled"`}}
	}

	var wrong []*config.InvalidError
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		mistakesInField(field, fields[field], func(value, want string) {
			wrong = append(wrong, &config.InvalidError{Field: field, Value: value, Want: want})
		})
	}
	for _, required := range []string{"devices", "mig-enabled"} {
		if _, ok := fields[required]; !ok {
			wrong = append(wrong, &config.InvalidError{Field: required, Want: "is missing"})
		}
	}
	if conflict := conflictOf(fields); conflict != nil {
		wrong = append(wrong, conflict)
	}
	if len(wrong) == 0 {
		wrong = append(wrong, &config.InvalidError{Field: "this rule", Want: refused.Error()})
	}
	return wrong
}

// mistakesInField refuses a value that is wrong whatever the other fields have.
func mistakesInField(field string, raw json.RawMessage, refuse func(value, want string)) {
	switch field {
	case "device-filter":
		mistakesInFilter(raw, refuse)
	case "devices":
		mistakesInPositions(raw, refuse)
	case "mig-enabled":
		if !decodesAs[bool](raw) {
			refuse(string(raw), "must be true or false")
		}
	case "mig-devices":
		mistakesInDevices(raw, refuse)
	default:
		refuse("", "is no field of a rule: they are device-filter, devices, mig-enabled and mig-devices")
	}
}

func mistakesInFilter(raw json.RawMessage, refuse func(value, want string)) {
	var one string
	var several []string
	if json.Unmarshal(raw, &one) == nil && one != "" {
		several = []string{one}
	} else if one == "" && !decodesAs[string](raw) && json.Unmarshal(raw, &several) != nil {
		refuse(string(raw), `must be a device id in quotes, "0x233010DE", or a list of them`)
		return
	}
	for _, f := range several {
		if _, err := config.ParseDeviceFilter(f); err != nil {
			refuse(strconv.Quote(f), err.Error())
		}
	}
}

func mistakesInPositions(raw json.RawMessage, refuse func(value, want string)) {
	var several []json.RawMessage
	switch {
	case string(raw) == `"all"`:
	case json.Unmarshal(raw, &several) != nil || string(raw) == "null":
		refuse(string(raw), `must be "all" or a list of positions in PCI order, [0, 1]`)
	case len(several) == 0:
		refuse("[]", noPosition)
	}
	for _, one := range several {
		if i, err := strconv.Atoi(string(one)); err != nil {
			refuse(string(one), "must be a position in PCI order, a whole number without quotes")
		} else if i < 0 {
			refuse(string(one), negativePosition)
		}
	}
}

// Messages of locate and of ruleOf.
const (
	noPosition       = `names no GPU: write "all" or a list of positions, [0, 1]`
	negativePosition = "is negative: the first GPU in PCI order is 0"
)

func mistakesInDevices(raw json.RawMessage, refuse func(value, want string)) {
	var written map[string]json.RawMessage
	if json.Unmarshal(raw, &written) != nil {
		refuse(string(raw), `must be a mapping of names to whole numbers, {"1g.10gb": 7}`)
		return
	}
	counts, counted := types.MigConfig{}, len(written) == 0
	for _, name := range slices.Sorted(maps.Keys(written)) {
		n, want := countOf(written[name])
		counts[name] = n
		if want != "" {
			value := string(written[name])
			if want == tooMany { // package document has made text of a number that is too large
				value = unquoted(written[name])
			}
			refuse(fmt.Sprintf("%q: %s", name, value), want)
		}
		counted = counted || n != 0 || want != ""
	}
	before := len(counts)
	countsOf(counts, func(_, value, want string) { refuse(value, want); before-- })
	if !counted && before == len(counts) {
		refuse(string(raw), "counts nothing: for MIG mode without instances write {}")
	}
}

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

// unquoted gives a value as the user wrote it, without the quotes of a text.
func unquoted(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) != nil || string(raw) == "null" {
		return string(raw)
	}
	return text
}

// conflictOf finds fields of which each is allowed alone, and not beside the other; nil if there are none.
func conflictOf(fields map[string]json.RawMessage) *config.InvalidError {
	devices, given := fields["mig-devices"]
	var counts map[string]json.RawMessage
	counted := json.Unmarshal(devices, &counts) == nil && len(counts) > 0
	switch enabled := string(fields["mig-enabled"]); {
	case enabled == "true" && (!given || string(devices) == "null"):
		return &config.InvalidError{
			Field: "mig-devices",
			Want:  "is missing, and needed where mig-enabled is true: for MIG mode without instances write {}",
		}
	case enabled == "false" && counted:
		return &config.InvalidError{Field: "mig-devices", Value: string(devices), Want: "cannot be had where mig-enabled is false"}
	default:
		return nil
	}
}

func decodesAs[T any](raw json.RawMessage) bool {
	var v T
	return json.Unmarshal(raw, &v) == nil
}
