package manifest

import (
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/migparted"
)

// Format is the kind of text that the agent, the device plugin or the cluster reads. A text of another kind has none.
type Format string

// The formats.
const (
	Profiles     Format = "profiles"
	Maintenance  Format = "maintenance"
	Settings     Format = "settings"
	MIGConfigs   Format = "MIG configs"
	PluginConfig Format = "a device plugin config"
	// Object is the format of an object of package kinds, which distribute slices.
	Object Format = "an object"
)

// formats are tried in this order. A text is of a format if it has any field that only that format has, so that one with mistakes
// is recognised too.
var formats = []struct {
	format Format
	is     func(top map[string]any) bool
	only   func(top map[string]any) bool // reports of a text that may be of the format whether it is, where texts of other programs are among them
}{
	{Profiles, func(top map[string]any) bool {
		return top["kind"] == catalog.ProfilesKind || top["kind"] != config.SettingsKind && Has(top, "profiles")
	}, func(top map[string]any) bool {
		return isOurs(top) || top["apiVersion"] == nil && top["kind"] == catalog.ProfilesKind && isMapping(top, "profiles")
	}},
	{Maintenance, func(top map[string]any) bool {
		return top["kind"] == maintenance.Kind || top["kind"] != config.SettingsKind && Has(top, "windows", "freezes", "pools")
	}, func(top map[string]any) bool {
		return isOurs(top) || top["apiVersion"] == nil && top["kind"] == maintenance.Kind && Has(top, "windows", "freezes", "pools")
	}},
	{Settings, func(top map[string]any) bool { return top["kind"] == config.SettingsKind || isOurs(top) }, isOurs},
	{MIGConfigs, IsMIGConfigs, func(map[string]any) bool { return true }},
	{PluginConfig, isPluginConfig, IsOnlyPluginConfig},
}

// IsMIGConfigs reports whether a document is a file of MIG configs, or a part of one.
func IsMIGConfigs(top map[string]any) bool {
	return Has(top, "mig-configs", "mig_configs", "migConfigs") || migparted.IsFragment(top)
}

// isPluginConfig recognises such a config by its fields. Other files of NVIDIA have a version too, and pods have resources.
func isPluginConfig(top map[string]any) bool {
	switch {
	case Has(top, "apiVersion", "kind", "systemd-services", "hooks", "mig_configs", "migConfigs"):
		return false
	case Has(top, "sharing", "flags", "imex"):
		return true
	default:
		resources, _ := top["resources"].(map[string]any)
		return Has(top, "version") && !Has(resources, "limits", "requests")
	}
}

// IsOnlyPluginConfig reports whether most fields of a config are the plugin's and have its forms. Dashboards, lists of packages and files of
// containers have a version too, but another, or much beside it; and sharing that names a strategy is in no other program's files.
func IsOnlyPluginConfig(top map[string]any) bool {
	if sharing, _ := top["sharing"].(map[string]any); isMapping(sharing, "timeSlicing") || isMapping(sharing, "mps") {
		return true
	}
	theirs := 0
	for name, value := range top {
		_, mapping := value.(map[string]any)
		switch plugins := Has(map[string]any{name: nil}, "flags", "resources", "sharing", "imex"); {
		case plugins && value != nil && !mapping:
			return false
		case plugins || strings.EqualFold(name, "version"):
			theirs++
		}
	}
	return top["version"] == "v1" && 2*theirs > len(top)
}

// isMapping reports whether a field is there, and is a mapping.
func isMapping(top map[string]any, field string) bool {
	_, ok := top[field].(map[string]any)
	return ok
}

// isOurs reports whether a document says that it is in a format of gpuslice.
func isOurs(top map[string]any) bool {
	version, _ := top["apiVersion"].(string)
	return strings.HasPrefix(version, "gpuslice.io/")
}

// Has reports whether one of the fields is there, in upper or lower case.
func Has(top map[string]any, fields ...string) bool {
	for name := range top {
		if slices.ContainsFunc(fields, func(f string) bool { return strings.EqualFold(f, name) }) {
			return true
		}
	}
	return false
}
