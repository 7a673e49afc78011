// Package deviceplugin reads and writes the config files of NVIDIA's k8s-device-plugin, version v1. They say how pods share GPUs. It is the only
// package that knows the format.
//
// It does not know the hardware: the node may lack a resource that a file names correctly. Nor does it know the plugin's environment, which decides
// if the file does not.
package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
)

// version is the format's only version.
const version = "v1"

// Parse reads a config file of the device plugin. An empty one is legal, and shares nothing.
//
// It refuses files that the plugin refuses, since the plugin then exits and the node has no GPUs. It also refuses values that the plugin silently
// ignores: unknown fields, fields in another case, one strategy of two, lists of devices, own names, duplicate resources. The rules are those of
// k8s-device-plugin v0.19.3, with the one field that v0.20.0 adds.
//
// The error joins one *check.InvalidError for each mistake. If the plugin ignores all of them (see check.PassedOver), the plugin runs by the returned
// config.
func Parse(text []byte) (catalog.PluginConfig, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return catalog.PluginConfig{}, fmt.Errorf("reading a device plugin config as YAML: %w", err)
	}
	var c checks
	c.file(doc)
	top := fieldsOf(doc)
	flags := fieldsOf(top["flags"])
	read := catalog.PluginConfig{MIGStrategy: config.MIGStrategy(textOf(flags["migStrategy"])), MPSRoot: textOf(flags["mpsRoot"])}
	read.Sharing, err = catalog.ParseSharing(top["sharing"])
	if err != nil {
		c.add(err)
	}
	if read.Sharing.Strategy == catalog.SharingMPS && read.MIGStrategy == config.MIGStrategyMixed {
		c.refuse("flags.migStrategy", flags["migStrategy"], "does not go with mps: the device plugin exits on both")
	}
	wrong := errors.Join(c...)
	if wrong != nil && !check.PassedOver(wrong) {
		return catalog.PluginConfig{}, wrong
	}
	return read, wrong
}

// replicated is one strategy of a file. The plugin's own types would write an empty timeSlicing next to mps, and in a file that shares nothing, and
// the plugin would refuse that (v0.19.3, v0.20.0).
type replicated struct {
	RenameByDefault            bool     `json:"renameByDefault"`
	FailRequestsGreaterThanOne bool     `json:"failRequestsGreaterThanOne"`
	Resources                  []shared `json:"resources"`
}

type shared struct {
	Name     string `json:"name"`
	Replicas int    `json:"replicas"`
}

var strategies = map[catalog.SharingStrategy]string{
	catalog.SharingTimeSlicing: "timeSlicing",
	catalog.SharingMPS:         "mps",
}

// Render writes a config file with this sharing and MIG strategy; an empty strategy keeps base's. It copies all other fields of base, which may be
// empty, including those that the agent does not know.
func Render(base []byte, s catalog.Sharing, strategy config.MIGStrategy) ([]byte, error) {
	doc := map[string]any{}
	if err := document.Into(base, &doc); err != nil {
		return nil, fmt.Errorf("reading the device plugin config to change: %w", err)
	}
	if was, ok := doc["version"]; ok && was != nil && was != "" && was != version {
		return nil, fmt.Errorf("reading the device plugin config to change: its version is %v, and only %s is known", was, version)
	}
	if doc == nil {
		doc = map[string]any{}
	}
	doc["version"] = version
	// The plugin reads names in any case, and would join the values of two spellings.
	maps.DeleteFunc(doc, func(name string, _ any) bool { return strings.EqualFold(name, "sharing") })
	if s.Strategy != catalog.SharingNone {
		written, err := sharingOf(s)
		if err != nil {
			return nil, fmt.Errorf("writing a device plugin config: %w", err)
		}
		doc["sharing"] = written
	}
	if strategy != "" {
		if err := setStrategy(doc, strategy); err != nil {
			return nil, err
		}
	}
	text, err := yaml.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("writing a device plugin config: %w", err)
	}
	return text, nil
}

// setStrategy sets flags.migStrategy. The plugin reads both names in any case.
func setStrategy(doc map[string]any, strategy config.MIGStrategy) error {
	flags := map[string]any{}
	for name, value := range doc {
		if !strings.EqualFold(name, "flags") || value == nil {
			continue
		}
		under, ok := value.(map[string]any)
		if !ok {
			return fmt.Errorf("reading the device plugin config to change: its %s is not a mapping", name)
		}
		maps.Copy(flags, under)
	}
	maps.DeleteFunc(doc, func(name string, _ any) bool { return strings.EqualFold(name, "flags") })
	maps.DeleteFunc(flags, func(name string, _ any) bool { return strings.EqualFold(name, "migStrategy") })
	flags["migStrategy"] = string(strategy)
	doc["flags"] = flags
	return nil
}

// sharingOf returns the value of "sharing". It reads the value back, so that Render writes nothing that the plugin would refuse.
func sharingOf(s catalog.Sharing) (json.RawMessage, error) {
	strategy := replicated{RenameByDefault: s.Rename, FailRequestsGreaterThanOne: s.FailMultiple}
	for _, name := range s.Resources() {
		strategy.Resources = append(strategy.Resources, shared{Name: name, Replicas: s.Replicas[name]})
	}
	text, err := json.Marshal(map[string]replicated{strategies[s.Strategy]: strategy})
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what it was for
	}
	again, err := catalog.ParseSharing(text)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names field and value
	}
	if !again.Equal(s) {
		return nil, fmt.Errorf("sharing %+v would be read back as %+v", s, again)
	}
	return text, nil
}
