package schema

import (
	"encoding/json"

	"github.com/invopop/jsonschema"
)

// Parts of patterns.
const (
	labelName   = `([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)`
	domain      = `[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*`
	foreignKeys = `^([^/]*\.)?(nvidia\.com|gpuslice\.io|kubernetes\.io|k8s\.io)/`
)

func pattern(form string) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^" + form + "$"}
}

// text is text that is not empty.
func text() *jsonschema.Schema { return &jsonschema.Schema{Type: "string", MinLength: number(1)} }

// labelValue is the value of a label or taint.
func labelValue() *jsonschema.Schema { return pattern(labelName + "?") }

// nodeKey is the key of a label or taint, outside of the domains of NVIDIA, Kubernetes and gpuslice.
func nodeKey() *jsonschema.Schema {
	s := pattern("(" + domain + "/)?" + labelName)
	s.Not = &jsonschema.Schema{Pattern: foreignKeys}
	return s
}

// nodeLabels are labels by their keys.
func nodeLabels() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "object", PropertyNames: nodeKey(), AdditionalProperties: labelValue(), MaxProperties: number(100)}
}

// taintEffect is what a taint of a profile may do.
func taintEffect() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Enum: []any{"NoSchedule", "PreferNoSchedule"}}
}

// instances are counts by the name of the MIG device.
func instances() *jsonschema.Schema {
	return &jsonschema.Schema{
		Type:                 "object",
		PropertyNames:        pattern(`([1-9]c\.)?[1-9]g\.[1-9][0-9]*gb([+-][a-zA-Z][a-zA-Z0-9.,]*)?`),
		AdditionalProperties: &jsonschema.Schema{Type: "integer", Minimum: "1", Maximum: "1000"},
	}
}

// resource is the name of a resource of the device plugin.
func resource() *jsonschema.Schema {
	s := pattern(`(nvidia\.com/)?(gpu|mig-[1-9]g\.[1-9][0-9]*gb([.-][a-z]([a-z0-9.-]*[a-z0-9])?)?)`)
	s.MaxLength = number(63)
	return s
}

// deviceFilter is a PCI device id followed by a vendor id, and after a colon the subsystem's. Without quotes YAML reads one as a number.
func deviceFilter() *jsonschema.Schema {
	number := &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "4294967295"}
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{pattern(`0[xX][0-9a-fA-F]{1,8}(:0[xX][0-9a-fA-F]{1,8})?`), number}}
}

// dnsLabel is the name of a namespace or container.
func dnsLabel() *jsonschema.Schema {
	s := pattern(`[a-z0-9]([-a-z0-9]*[a-z0-9])?`)
	s.MaxLength = number(63)
	return s
}

// properties is the schema of a mapping that has a field of that schema.
func properties(field string, of *jsonschema.Schema) *jsonschema.Schema {
	s := required(field)
	s.Type = "object" // a value that is no mapping has no wrong fields
	s.Properties = jsonschema.NewProperties()
	s.Properties.Set(field, of)
	return s
}

func required(field string) *jsonschema.Schema { return &jsonschema.Schema{Required: []string{field}} }

func not(s *jsonschema.Schema) *jsonschema.Schema { return &jsonschema.Schema{Not: s} }

func contains(s *jsonschema.Schema) *jsonschema.Schema { return &jsonschema.Schema{Contains: s} }

func minimum(n json.Number) *jsonschema.Schema { return &jsonschema.Schema{Minimum: n} }

func anyOf(fields ...string) (all []*jsonschema.Schema) {
	for _, f := range fields {
		all = append(all, required(f))
	}
	return all
}

func number(n uint64) *uint64 { return &n }
