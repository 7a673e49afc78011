// Package migparted reads and writes the file format of NVIDIA's mig-parted, version v1, in which users keep their MIG
// configs. It is the only package that knows the format, and it needs cgo, as NVIDIA's does.
//
// It knows no hardware: a profile that is well written may still be one that no GPU has.
package migparted

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"

	spec "github.com/NVIDIA/mig-parted/api/spec/v1"
	"github.com/NVIDIA/mig-parted/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/nvml"
)

// upstream serialises calls into mig-parted, which fills package variables without a lock when it checks a profile's
// name (v0.14.4, pkg/types/nvdev.go). It loads no library for it.
var upstream sync.Mutex

// Parse reads a file of MIG configs. It refuses files that mig-parted refuses, and values that mig-parted silently ignores: a
// filter that can match nothing, a negative index, a name that no label can have, a field that is there twice.
//
// The error joins one *config.InvalidError for each mistake, in the order of names and rules. A file with a mistake gives
// no configs: with half a catalog a label would mean something else than the file's author reads there.
func Parse(text []byte) (map[string]config.MIGConfig, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return nil, fmt.Errorf("reading MIG configs as YAML: %w", err)
	}
	if string(doc) == "null" {
		return nil, fmt.Errorf("reading MIG configs: the file is empty, and needs at least %q and %q", "version: v1", "mig-configs")
	}
	file, err := decode(doc)
	if err != nil {
		return nil, err
	}

	configs := map[string]config.MIGConfig{}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(file.MigConfigs)) {
		if err := checkName(name); err != nil {
			errs = config.AddMistake(errs, err)
		}
		var rules config.MIGConfig
		for i, written := range file.MigConfigs[name] {
			rule, wrong := ruleOf(written)
			for _, w := range wrong {
				w.Config, w.Rule = name, i+1
				errs = config.AddMistake(errs, w)
			}
			rules = append(rules, rule)
		}
		configs[name] = rules
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return configs, nil
}

// Render writes configs as a file that mig-parted reads, and that Parse reads back as the same configs. A rule that
// selects GPUs in a way that the format does not know, by UUID, PCI address or model, is an error.
func Render(configs map[string]config.MIGConfig) ([]byte, error) {
	file := spec.Spec{Version: spec.Version, MigConfigs: map[string]spec.MigConfigSpecSlice{}}
	for name, rules := range configs {
		var written spec.MigConfigSpecSlice
		for i, r := range rules {
			if len(r.UUIDs)+len(r.PCI)+len(r.Models) > 0 {
				return nil, fmt.Errorf("writing MIG config %s: rule %d selects by UUID, PCI address or model, which mig-parted cannot", name, i+1)
			}
			w := spec.MigConfigSpec{MigEnabled: r.MIG, MigDevices: types.MigConfig{}, Devices: r.Indices}
			maps.Copy(w.MigDevices, r.Devices)
			if r.All {
				w.Devices = "all"
			}
			if len(r.DeviceFilter) > 0 {
				w.DeviceFilter = r.DeviceFilter
			}
			written = append(written, w)
		}
		file.MigConfigs[name] = written
	}
	text, err := yaml.Marshal(file)
	if err != nil {
		return nil, fmt.Errorf("writing MIG configs: %w", err)
	}
	return text, nil
}

// decode leaves the decision to mig-parted. Mig-parted's message names one mistake without its place, so the error has those that locate
// finds instead, if it finds any.
func decode(doc []byte) (spec.Spec, error) {
	upstream.Lock()
	defer upstream.Unlock()

	var file spec.Spec
	refused := json.Unmarshal(doc, &file)
	if refused == nil {
		return file, nil
	}
	if errs := locate(doc); len(errs) > 0 {
		return spec.Spec{}, errors.Join(errs...)
	}
	return spec.Spec{}, fmt.Errorf("reading MIG configs: %w", refused)
}

var tooMany = fmt.Sprintf("is more than any GPU holds: give at most %d", nvml.MaxDevices)

func checkName(name string) error {
	wrong := &config.InvalidError{Field: "mig-configs", Value: strconv.Quote(name)}
	if name == "" {
		wrong.Want = "is empty: a label cannot ask for it"
		return wrong
	}
	if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
		wrong.Want = "cannot be the value of a label, so no node could ask for it: write letters, digits, '-', '_' and '.'," +
			" at most 63, beginning and ending with a letter or digit (NVIDIA writes '.' for the '+' of a profile)"
		return wrong
	}
	return nil
}

// ruleOf turns a rule that mig-parted accepts into a config.MIGRule, and lists its mistakes.
func ruleOf(written spec.MigConfigSpec) (config.MIGRule, []*config.InvalidError) {
	rule := config.MIGRule{MIG: written.MigEnabled, All: written.MatchesAllDevices()}
	var wrong []*config.InvalidError
	refuse := func(field, value, want string) {
		wrong = append(wrong, &config.InvalidError{Field: field, Value: value, Want: want})
	}

	switch filter := written.DeviceFilter.(type) {
	case string:
		if filter != "" {
			rule.DeviceFilter = []string{filter}
		}
	case []string:
		rule.DeviceFilter = filter
	}
	for _, f := range rule.DeviceFilter {
		if _, err := config.ParseDeviceFilter(f); err != nil {
			refuse("device-filter", strconv.Quote(f), err.Error())
		}
	}

	if indices, ok := written.Devices.([]int); ok {
		rule.Indices = indices
		if len(indices) == 0 {
			refuse("devices", "[]", noPosition)
		}
		for _, i := range indices {
			if i < 0 {
				refuse("devices", strconv.Itoa(i), negativePosition)
			}
		}
	}

	if written.MigEnabled {
		rule.Devices = countsOf(written.MigDevices, refuse)
	}
	return rule, wrong
}

// countsOf counts devices by the one form of their names; a file may spell one device in two ways.
func countsOf(written types.MigConfig, refuse func(field, value, want string)) map[string]int {
	counts := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(written)) {
		canonical, err := config.DeviceName(name)
		n := written[name]
		switch {
		case err != nil:
			refuse("mig-devices", strconv.Quote(name), err.Error())
		case n > nvml.MaxDevices-counts[canonical]:
			refuse("mig-devices", fmt.Sprintf("%q: %d", name, n), tooMany)
		case n > 0:
			counts[canonical] += n
		}
	}
	return counts
}
