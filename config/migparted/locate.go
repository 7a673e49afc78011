package migparted

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"

	spec "github.com/NVIDIA/mig-parted/api/spec/v1"

	"github.com/gpuslice/gpuslice/config"
)

// locate finds again what mig-parted refused about a document, with the place of each mistake. It decides nothing: a
// document comes here only when it is refused already, and what is not found here keeps mig-parted's own message.
func locate(doc []byte) []error {
	var file map[string]json.RawMessage
	if json.Unmarshal(doc, &file) != nil {
		return []error{&config.InvalidError{Field: "file", Want: `must be a mapping with "version" and "mig-configs"`}}
	}
	if version := string(file["version"]); version != `"`+spec.Version+`"` {
		return []error{&config.InvalidError{Field: "version", Value: version, Want: "must be v1, the only one there is"}}
	}
	for _, field := range slices.Sorted(maps.Keys(file)) {
		if field != "version" && field != "mig-configs" {
			return []error{&config.InvalidError{Field: field, Want: "is no field of MIG configs, which have version and mig-configs"}}
		}
	}
	var configs map[string]json.RawMessage
	if json.Unmarshal(file["mig-configs"], &configs) != nil || len(configs) == 0 {
		return []error{&config.InvalidError{Field: "mig-configs", Want: "must be a mapping of at least one name to a list of rules"}}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		var rules []json.RawMessage
		if err := json.Unmarshal(configs[name], &rules); err != nil || len(rules) == 0 {
			errs = config.AddMistake(errs, &config.InvalidError{Config: name, Want: `must be a list of at least one rule with "devices" and "mig-enabled"`})
			continue
		}
		for i, rule := range rules {
			for _, wrong := range locateInRule(rule) {
				wrong.Config, wrong.Rule = name, i+1
				errs = config.AddMistake(errs, wrong)
			}
		}
	}
	return errs
}

// locateInRule says what is wrong about a rule that mig-parted refuses; nothing if it takes this one.
func locateInRule(raw json.RawMessage) []*config.InvalidError {
	var rule spec.MigConfigSpec
	refused := json.Unmarshal(raw, &rule)
	if refused == nil {
		return nil
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(raw, &fields) != nil {
		return []*config.InvalidError{{Value: string(raw), Want: `must be a mapping with "devices" and "mig-enabled"`}}
	}

	var wrong []*config.InvalidError
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		if problem := locateInField(field, fields[field]); problem != nil {
			wrong = append(wrong, problem)
		}
	}
	for _, required := range []string{"devices", "mig-enabled"} {
		if _, ok := fields[required]; !ok {
			wrong = append(wrong, &config.InvalidError{Field: required, Want: "is missing"})
		}
	}
	if len(wrong) == 0 {
		wrong = append(wrong, locateAmongFields(fields, refused))
	}
	return wrong
}

// locateInField says what is wrong about the value of one field, nil if nothing is, as far as it can be said without
// the others.
func locateInField(field string, raw json.RawMessage) *config.InvalidError {
	refuse := func(value, want string) *config.InvalidError {
		return &config.InvalidError{Field: field, Value: value, Want: want}
	}
	switch field {
	case "device-filter":
		if !decodes[string](raw) && !decodes[[]string](raw) {
			return refuse(string(raw), `must be a device id in quotes, "0x233010DE", or a list of them`)
		}
	case "devices":
		if string(raw) != `"all"` && (!decodes[[]int](raw) || string(raw) == "null") {
			return refuse(string(raw), `must be "all" or a list of positions in PCI order, [0, 1]`)
		}
	case "mig-enabled":
		if !decodes[bool](raw) {
			return refuse(string(raw), "must be true or false")
		}
	case "mig-devices":
		return locateInDevices(raw)
	default:
		return refuse("", "is no field of a rule: they are device-filter, devices, mig-enabled and mig-devices")
	}
	return nil
}

func locateInDevices(raw json.RawMessage) *config.InvalidError {
	const field = "mig-devices"
	var devices map[string]int
	if err := json.Unmarshal(raw, &devices); err != nil {
		return &config.InvalidError{Field: field, Value: string(raw), Want: `must be a mapping of names to whole numbers, {"1g.10gb": 7}`}
	}
	counted := false
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		if _, err := config.DeviceName(name); err != nil {
			return &config.InvalidError{Field: field, Value: strconv.Quote(name), Want: err.Error()}
		}
		if n := devices[name]; n < 0 {
			return &config.InvalidError{Field: field, Value: fmt.Sprintf("%q: %d", name, n), Want: "is negative"}
		}
		counted = counted || devices[name] > 0
	}
	if len(devices) > 0 && !counted {
		return &config.InvalidError{Field: field, Value: string(raw), Want: "counts nothing: for MIG mode without instances write {}"}
	}
	return nil
}

// locateAmongFields says what is wrong about fields that are right each by itself.
func locateAmongFields(fields map[string]json.RawMessage, refused error) *config.InvalidError {
	devices, given := fields["mig-devices"]
	enabled := string(fields["mig-enabled"]) == "true"
	switch {
	case enabled && (!given || string(devices) == "null"):
		return &config.InvalidError{
			Field: "mig-devices",
			Want:  "is missing, and needed where mig-enabled is true: for MIG mode without instances write {}",
		}
	case !enabled && given:
		return &config.InvalidError{Field: "mig-devices", Value: string(devices), Want: "cannot be had where mig-enabled is false"}
	default:
		return &config.InvalidError{Field: "this rule", Want: refused.Error()}
	}
}

func decodes[T any](raw json.RawMessage) bool {
	var v T
	return json.Unmarshal(raw, &v) == nil
}
