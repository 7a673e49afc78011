// Package schema makes JSON schemas of the agent's files, settings, profiles and maintenance, for editors and for checks before a file reaches a
// cluster.
//
// A schema finds less than the agent's own check, which also knows which values fit together. kubectl gpuslice validate runs that check anywhere. A
// schema refuses every unknown field and every value of the wrong form.
package schema

//go:generate go run ./cmd/schema .. ../../deploy/schema

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	"github.com/invopop/jsonschema"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/maintenance"
)

// The names of the schemas.
const (
	ProfilesFile    = "profiles.schema.json"
	SettingsFile    = "settings.schema.json"
	MaintenanceFile = "maintenance.schema.json"
)

// packagePath is the import path of this package. The path of source is relative to it.
const packagePath = "github.com/gpuslice/gpuslice/config/schema"

// Files returns the schemas by the names of their files. Descriptions of fields are the comments of package config, with its source in that
// directory. Their forms are its types and tags.
func Files(source string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, format := range map[string]any{ProfilesFile: catalog.ProfilesFields{}, SettingsFile: config.SettingsFields{}, MaintenanceFile: maintenance.MaintenanceFields{}} {
		r := jsonschema.Reflector{Namer: nameOf, Mapper: formOf, RequiredFromJSONSchemaTags: true}
		if err := r.AddGoComments(packagePath, source); err != nil {
			return nil, fmt.Errorf("reading comments of the formats' source: %w", err)
		}
		s := r.Reflect(format)
		s.ID = "" // a schema is used from where it lies
		refineAll(maps.Clone(s.Definitions), reflect.TypeOf(format))
		text, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			return nil, fmt.Errorf("writing %s: %w", name, err)
		}
		files[name] = append(text, '\n')
	}
	return files, nil
}

// nameOf is a type's name in its schema: Settings for SettingsFields.
func nameOf(t reflect.Type) string {
	if t == reflect.TypeFor[labels.Selector]() {
		return "LabelSelector" // profiles have a Selector of GPUs
	}
	return strings.TrimSuffix(t.Name(), "Fields")
}

// formOf is the form of a type that is read from one text; nil for other types.
func formOf(t reflect.Type) *jsonschema.Schema {
	if words, ok := reflect.Zero(t).Interface().(interface{ Values() []string }); ok {
		s := &jsonschema.Schema{Type: "string"}
		for _, word := range words.Values() {
			s.Enum = append(s.Enum, word)
		}
		return s
	}
	switch t {
	case reflect.TypeFor[time.Duration]():
		return pattern(`([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+`)
	case reflect.TypeFor[time.Time]():
		return pattern(`[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})`)
	case reflect.TypeFor[time.Weekday]():
		return pattern(`([Mm]on(day)?|[Tt]ue(sday)?|[Ww]ed(nesday)?|[Tt]hu(rsday)?|[Ff]ri(day)?|[Ss]at(urday)?|[Ss]un(day)?)`)
	case reflect.TypeFor[time.Location]():
		return text()
	case reflect.TypeFor[labels.Selector]():
		return &jsonschema.Schema{Type: "string"}
	case reflect.TypeFor[maintenance.FieldLimit]():
		number := &jsonschema.Schema{Type: "integer", Minimum: "0"}
		return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{number, pattern(`(([1-9][0-9]?|100)%|none)`)}}
	}
	return nil
}

// refineAll adds the tags of package config to the definitions of a struct and of the structs in it. It drops finished ones.
func refineAll(definitions jsonschema.Definitions, t reflect.Type) {
	if raw, ok := reflect.Zero(t).Interface().(interface{ JSONSchemaAlias() any }); ok {
		t = reflect.TypeOf(raw.JSONSchemaAlias())
	}
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
		t = t.Elem()
	}
	def := definitions[nameOf(t)]
	if t.Kind() != reflect.Struct || def == nil || def.Properties == nil {
		return
	}
	delete(definitions, nameOf(t))
	def.Description = strings.Replace(def.Description, t.Name(), nameOf(t), 1)
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Tag.Get("ignored") != "" {
			def.Properties.Delete(name)
		} else if property, ok := def.Properties.Get(name); ok {
			refine(property, f)
			refineAll(definitions, f.Type)
		}
	}
	if between := relations[nameOf(t)]; between != nil {
		between(def)
	}
}

// refine adds the tags of a field.
func refine(property *jsonschema.Schema, f reflect.StructField) {
	value := property
	if property.Items != nil {
		value = property.Items
		property.UniqueItems = property.UniqueItems || value.Ref == ""
		if f.Tag.Get("empty") != "" {
			property.MinItems = number(1)
		}
	}
	if words, ok := reflect.Zero(f.Type).Interface().(interface{ Values() []string }); ok {
		if all := len(words.Values()); len(value.Enum) > all {
			value.Enum = value.Enum[all:] // the tag allows some of them
		}
	}
	if form := forms[f.Tag.Get("form")]; form != nil {
		s := form()
		s.Description = value.Description
		*value = *s
	}
	if least, most, ok := strings.Cut(f.Tag.Get("within"), ","); ok && value.Type == "integer" {
		value.Minimum, value.Maximum = json.Number(least), json.Number(most)
	}
	if f.Tag.Get("missing") != "" && value.Pattern == "" {
		value.MinLength = number(1)
	}
	if f.Tag.Get("alone") != "" {
		several := *property
		several.Description = ""
		*property = jsonschema.Schema{Description: property.Description, AnyOf: []*jsonschema.Schema{value, &several}}
	}
}

// forms are the forms of texts, by the tag form.
var forms = map[string]func() *jsonschema.Schema{
	"dnsLabel":     dnsLabel,
	"path":         func() *jsonschema.Schema { return pattern(`/.*[^/]`) },
	"key":          func() *jsonschema.Schema { return pattern(`[-._a-zA-Z0-9]*`) },
	"timeOfDay":    func() *jsonschema.Schema { return pattern(`([01][0-9]|2[0-3]):[0-5][0-9]`) },
	"unit":         func() *jsonschema.Schema { return pattern(`[-A-Za-z0-9:_.\\@]+\.(service|socket|path|timer)`) },
	"operand":      operand,
	"startupTaint": startupTaint,
	"boolean":      func() *jsonschema.Schema { return &jsonschema.Schema{Type: "boolean"} },
	"onlyTrue":     func() *jsonschema.Schema { return &jsonschema.Schema{Type: "boolean", Const: true} },
	"text":         text,
	"uuid": func() *jsonschema.Schema {
		return pattern(`GPU-[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}`)
	},
	"pci":          func() *jsonschema.Schema { return pattern(`([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]`) },
	"position":     func() *jsonschema.Schema { return &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "1000"} },
	"deviceFilter": deviceFilter,
	"labelValue":   labelValue,
	"nodeKey":      nodeKey,
	"nodeLabels":   nodeLabels,
	"taintEffect":  taintEffect,
	"instances":    instances,
	"resource":     resource,
}

// operand is the form of an operand's label.
func operand() *jsonschema.Schema {
	s := pattern(`nvidia\.com/gpu\.deploy\.[-A-Za-z0-9_.]*[A-Za-z0-9]`)
	s.Not = &jsonschema.Schema{Const: "nvidia.com/gpu.deploy.driver"}
	return s
}

// startupTaint is the form of the key of a startup taint, which may be one of cluster-autoscaler's; empty for none.
func startupTaint() *jsonschema.Schema {
	autoscalers := pattern(`startup-taint\.cluster-autoscaler\.kubernetes\.io/` + labelName)
	return &jsonschema.Schema{Type: "string", AnyOf: []*jsonschema.Schema{nodeKey(), autoscalers, {Const: ""}}}
}

// relations hold between the fields of a mapping.
var relations = map[string]func(s *jsonschema.Schema){
	"Profiles": profileNames,
	"Profile":  profile,
	"MIGEntry": migEntry,
	"Selector": selector,
	"Sharing":  sharing,
	// Start and duration need days, and a window that is open once needs both bounds.
	"Window": func(s *jsonschema.Schema) {
		s.If = required("days")
		s.Then = &jsonschema.Schema{Required: []string{"start", "duration"}}
		s.Else = &jsonschema.Schema{Required: []string{"notBefore", "notAfter"}, Not: &jsonschema.Schema{AnyOf: anyOf("start", "duration")}}
	},
	// "for" needs wait.
	"DrainRule": func(s *jsonschema.Schema) {
		s.AnyOf = anyOf("namespaces", "selector")
		s.If = properties("action", &jsonschema.Schema{Const: "wait"})
		s.Then = required("for")
		s.Else = not(required("for"))
	},
}
