package schema

import (
	"encoding/json"

	"github.com/invopop/jsonschema"
)

// The forms of values that have one.
type (
	// LabelValue is the value of a label or taint.
	LabelValue string
	// NodeKey is the key of a label or taint, outside of the domains of NVIDIA, Kubernetes and gpuslice.
	NodeKey string
	// NodeLabels are labels by their keys.
	NodeLabels map[string]string
	// Instances are counts by the name of the MIG device.
	Instances map[string]int
	// Resource is the name of a resource of the device plugin.
	Resource string
	// UUID is the UUID of a GPU.
	UUID string
	// PCI is a PCI address.
	PCI string
	// Position is a position in PCI order.
	Position int
	// Text is text.
	Text string
	// DeviceFilter is a PCI device id over a vendor id, and behind a colon those of the subsystem.
	DeviceFilter string
	// DNSLabel is the name of a namespace or container.
	DNSLabel string
	// OneOrMore is one value, or a list of them.
	OneOrMore[T formed] struct{}
)

// formed is a value that has a form.
type formed interface{ JSONSchema() *jsonschema.Schema }

// Parts of patterns.
const (
	labelName   = `([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)`
	domain      = `[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*`
	foreignKeys = `^([^/]*\.)?(nvidia\.com|gpuslice\.io|kubernetes\.io|k8s\.io)/`
)

func pattern(form string) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^" + form + "$"}
}

// JSONSchema is the form of a label's value.
func (LabelValue) JSONSchema() *jsonschema.Schema { return pattern(labelName + "?") }

// JSONSchema is the form of a key that is one's own.
func (NodeKey) JSONSchema() *jsonschema.Schema {
	s := pattern("(" + domain + "/)?" + labelName)
	s.Not = &jsonschema.Schema{Pattern: foreignKeys}
	return s
}

// JSONSchema is the form of labels.
func (NodeLabels) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{
		Type: "object", PropertyNames: NodeKey("").JSONSchema(), AdditionalProperties: LabelValue("").JSONSchema(), MaxProperties: number(100),
	}
}

// JSONSchema is the form of counts of MIG devices.
func (Instances) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{
		Type:                 "object",
		PropertyNames:        pattern(`([1-9]c\.)?[1-9]g\.[1-9][0-9]*gb([+-][a-zA-Z][a-zA-Z0-9.,]*)?`),
		AdditionalProperties: &jsonschema.Schema{Type: "integer", Minimum: "1", Maximum: "1000"},
	}
}

// JSONSchema is the form of the plugin's resources.
func (Resource) JSONSchema() *jsonschema.Schema {
	s := pattern(`(nvidia\.com/)?(gpu|mig-[1-9]g\.[1-9][0-9]*gb([.-][a-z]([a-z0-9.-]*[a-z0-9])?)?)`)
	s.MaxLength = number(63)
	return s
}

// JSONSchema is the form of a GPU's UUID.
func (UUID) JSONSchema() *jsonschema.Schema {
	return pattern(`GPU-[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}`)
}

// JSONSchema is the form of an address.
func (PCI) JSONSchema() *jsonschema.Schema {
	return pattern(`([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]`)
}

// JSONSchema is the form of a position.
func (Position) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "1000"}
}

// JSONSchema is the form of text that is not empty.
func (Text) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", MinLength: number(1)}
}

// JSONSchema is the form of a device filter. Without quotes YAML reads one as a number.
func (DeviceFilter) JSONSchema() *jsonschema.Schema {
	number := &jsonschema.Schema{Type: "integer", Minimum: "0", Maximum: "4294967295"}
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{pattern(`0[xX][0-9a-fA-F]{1,8}(:0[xX][0-9a-fA-F]{1,8})?`), number}}
}

// JSONSchema is the form of a DNS label.
func (DNSLabel) JSONSchema() *jsonschema.Schema {
	s := pattern(`[a-z0-9]([-a-z0-9]*[a-z0-9])?`)
	s.MaxLength = number(63)
	return s
}

// JSONSchema is one value or several.
func (OneOrMore[T]) JSONSchema() *jsonschema.Schema {
	var value T
	one := value.JSONSchema()
	several := &jsonschema.Schema{Type: "array", Items: one, MinItems: number(1), UniqueItems: true}
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{one, several}}
}

// properties is the schema of a mapping that has a field of that schema.
func properties(field string, of *jsonschema.Schema) *jsonschema.Schema {
	s := required(field)
	s.Type = "object" // what is no mapping has no wrong fields
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
