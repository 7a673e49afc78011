package deviceplugin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
)

// checks collects the mistakes of a file.
type checks []error

func (c *checks) add(err error) { *c = check.AddMistake(*c, err) }

func (c *checks) refuse(field string, value json.RawMessage, want string) {
	c.add(&check.InvalidError{Field: field, Value: string(value), Want: want})
}

// rule checks the value of one field. A field without a value counts as missing.
type rule func(c *checks, field string, value json.RawMessage)

// file checks a file except for its sharing: package catalog checks that, since profiles have it too.
func (c *checks) file(doc json.RawMessage) {
	mapping(map[string]rule{
		"version":   (*checks).version,
		"flags":     mapping(flags()),
		"resources": (*checks).resources,
		"sharing":   func(*checks, string, json.RawMessage) {},
		"imex":      mapping(map[string]rule{"channelIDs": (*checks).channels, "required": (*checks).boolean}),
	})(c, "", doc)
}

// flags has the checks of the file's fields for the plugin's command line.
func flags() map[string]rule {
	return map[string]rule{
		"migStrategy": oneOf(string(config.MIGStrategyNone), string(config.MIGStrategySingle), string(config.MIGStrategyMixed)),

		"failOnInitError":         (*checks).boolean,
		"mpsRoot":                 (*checks).text,
		"nvidiaDriverRoot":        (*checks).text,
		"nvidiaDevRoot":           (*checks).text,
		"gdrcopyEnabled":          (*checks).boolean,
		"gdsEnabled":              (*checks).boolean,
		"mofedEnabled":            (*checks).boolean,
		"useNodeFeatureAPI":       (*checks).boolean,
		"deviceDiscoveryStrategy": oneOf("auto", "nvml", "tegra"),
		"plugin": mapping(map[string]rule{
			"passDeviceSpecs":               (*checks).boolean,
			"deviceListStrategy":            (*checks).listStrategies,
			"deviceIDStrategy":              oneOf("uuid", "index"),
			"cdiAnnotationPrefix":           (*checks).text,
			"nvidiaCTKPath":                 (*checks).text,
			"containerDriverRoot":           (*checks).text,
			"sharedDevicesAllocationPolicy": oneOf("distributed", "packed"), // from v0.20.0 on
		}),
		"gfd": mapping(map[string]rule{
			"oneshot":         (*checks).boolean,
			"noTimestamp":     (*checks).boolean,
			"sleepInterval":   (*checks).interval,
			"outputFile":      (*checks).text,
			"machineTypeFile": (*checks).text,
		}),
	}
}

// mapping checks a mapping that may have these fields, in the order of their names.
func mapping(fields map[string]rule) rule {
	known := strings.Join(slices.Sorted(maps.Keys(fields)), ", ")
	return func(c *checks, field string, value json.RawMessage) {
		within := "file"
		if field != "" {
			within, field = field, field+"."
		}
		written := fieldsOf(value)
		if written == nil && string(value) != "null" {
			c.refuse(within, value, "must be a mapping of "+known)
		}
		for _, name := range slices.Sorted(maps.Keys(written)) {
			read, ok := fields[name]
			switch {
			case !ok:
				inOtherCase := slices.ContainsFunc(slices.Collect(maps.Keys(fields)), func(other string) bool { return strings.EqualFold(other, name) }) // the plugin obeys it
				c.add(&check.InvalidError{Field: field + name, Want: "is unknown here: " + cmp.Or(place(name), "use "+known), PassedOver: !inOtherCase})
			case string(written[name]) != "null":
				read(c, field+name, written[name])
			}
		}
	}
}

// place says where a misplaced field belongs, for example after lost indentation; empty for an unknown field.
func place(name string) string {
	const strategies = "sharing.timeSlicing or sharing.mps"
	below := map[string]string{
		"timeSlicing": "sharing", "mps": "sharing", "renameByDefault": strategies, "failRequestsGreaterThanOne": strategies,
		"replicas": "an entry of the resources of " + strategies,
	}[name]
	if _, flag := flags()[name]; flag {
		below = "flags"
	}
	if below == "" {
		return ""
	}
	return "it belongs below " + below
}

func oneOf(allowed ...string) rule {
	return func(c *checks, field string, value json.RawMessage) {
		if !slices.Contains(allowed, textOf(value)) {
			c.refuse(field, value, "must be "+strings.Join(allowed, " or "))
		}
	}
}

func (c *checks) version(field string, value json.RawMessage) {
	if said := textOf(value); said != version && string(value) != `""` {
		c.refuse(field, value, "must be "+version+", the only version")
	}
}

func (c *checks) boolean(field string, value json.RawMessage) {
	if string(value) != "true" && string(value) != "false" {
		c.refuse(field, value, "must be true or false, without quotes")
	}
}

func (c *checks) text(field string, value json.RawMessage) {
	var s string
	if json.Unmarshal(value, &s) != nil {
		c.refuse(field, value, "must be text")
	}
}

// listStrategies checks a strategy, or a list of them.
func (c *checks) listStrategies(field string, value json.RawMessage) {
	one := oneOf("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
	var several []json.RawMessage
	if json.Unmarshal(value, &several) != nil {
		one(c, field, value)
	}
	for i, s := range several {
		one(c, fmt.Sprintf("%s[%d]", field, i), s)
	}
}

// interval checks a duration, or a number of nanoseconds.
func (c *checks) interval(field string, value json.RawMessage) {
	_, notNumber := strconv.ParseFloat(string(value), 64)
	_, notDuration := time.ParseDuration(textOf(value))
	if notNumber != nil && notDuration != nil && textOf(value) != "infinite" {
		c.refuse(field, value, `must be a duration with its unit, like "60s", or infinite`)
	}
}

func (c *checks) channels(field string, value json.RawMessage) {
	var ids []int
	if json.Unmarshal(value, &ids) != nil || len(ids) > 1 || len(ids) == 1 && ids[0] != 0 {
		c.refuse(field, value, "must be [] or [0]")
	}
}

// resources refuses the field that would rename the plugin's resources: the plugin ignores it.
func (c *checks) resources(field string, value json.RawMessage) {
	c.add(&check.InvalidError{
		Field: field, PassedOver: true,
		Want: "is ignored by the device plugin, which renames no resource: write what it shares below sharing.timeSlicing or sharing.mps",
	})
}

// fieldsOf returns the fields of a mapping; nil if the value is no mapping.
func fieldsOf(value json.RawMessage) map[string]json.RawMessage {
	var fields map[string]json.RawMessage
	if json.Unmarshal(value, &fields) != nil {
		return nil
	}
	return fields
}

// textOf returns the text of a value; empty if the value is no text.
func textOf(value json.RawMessage) string {
	var s string
	if json.Unmarshal(value, &s) != nil {
		return ""
	}
	return s
}
