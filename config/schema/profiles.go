package schema

import "github.com/invopop/jsonschema"

// profileNames adds the form of a profile's name.
func profileNames(s *jsonschema.Schema) {
	name := pattern(labelName)
	name.Not = &jsonschema.Schema{Enum: []any{"true", "false"}} // how YAML reads yes, on, no and off
	if profiles, ok := s.Properties.Get("profiles"); ok {
		profiles.PropertyNames = name
	}
}

// profile adds what must hold between its fields.
func profile(s *jsonschema.Schema) {
	s.AnyOf = append(anyOf("mig", "sharing", "migStrategy"),
		properties("labels", &jsonschema.Schema{MinProperties: number(1)}), properties("taints", &jsonschema.Schema{MinItems: number(1)}))
	sharedByMPS := properties("sharing", properties("mps", properties("resources", contains(properties("replicas", minimum("2"))))))
	withMIG := properties("mig", contains(properties("enabled", &jsonschema.Schema{Const: true})))
	s.Not = &jsonschema.Schema{AllOf: []*jsonschema.Schema{sharedByMPS, withMIG}} // NVIDIA's device plugin has no MPS on MIG
}

// migEntry ties instances to MIG mode.
func migEntry(s *jsonschema.Schema) {
	s.If = properties("enabled", &jsonschema.Schema{Const: true})
	s.Then = required("instances")
	s.Else = not(required("instances"))
}

// selector allows all only alone.
func selector(s *jsonschema.Schema) {
	s.MinProperties = number(1)
	s.If, s.Then = required("all"), &jsonschema.Schema{MaxProperties: number(1)}
}

// sharing is the word none, or one strategy. MPS shares whole GPUs, and bounds its clients.
func sharing(s *jsonschema.Schema) {
	if mps, ok := s.Properties.Get("mps"); ok {
		client := []*jsonschema.Schema{
			properties("name", &jsonschema.Schema{Enum: []any{"nvidia.com/gpu", "gpu"}}), properties("replicas", &jsonschema.Schema{Maximum: "48"}),
		}
		mps.AllOf = []*jsonschema.Schema{properties("resources", &jsonschema.Schema{MaxItems: number(1), Items: &jsonschema.Schema{AllOf: client}})}
	}
	strategy := &jsonschema.Schema{
		Type: "object", Properties: s.Properties, AdditionalProperties: jsonschema.FalseSchema, MinProperties: number(1), MaxProperties: number(1),
	}
	*s = jsonschema.Schema{Description: s.Description, OneOf: []*jsonschema.Schema{{Const: "none"}, strategy}}
}
