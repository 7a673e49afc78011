package schema

import (
	"github.com/invopop/jsonschema"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
)

// Profiles are what nodes can be asked to be by the label gpuslice.io/profile.
type Profiles struct {
	APIVersion string `json:"apiVersion" jsonschema:"required,enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"required,enum=Profiles"`
	// By name, which must be a label's value.
	Profiles map[string]Profile `json:"profiles"`
}

// JSONSchemaExtend says what a name is.
func (Profiles) JSONSchemaExtend(s *jsonschema.Schema) {
	name := pattern(labelName)
	name.Not = &jsonschema.Schema{Enum: []any{"true", "false"}} // how YAML reads yes, on, no and off
	if profiles, ok := s.Properties.Get("profiles"); ok {
		profiles.PropertyNames = name
	}
}

// Profile is what the nodes of a pool shall be. It has at least one of mig, sharing, migStrategy, labels and taints.
type Profile struct {
	// For people.
	Description string `json:"description"`
	// How GPUs are cut. Those that no entry selects are left as they are.
	MIG []MIGEntry `json:"mig" jsonschema:"minItems=1"`
	// How GPUs and MIG devices are given to several pods at once. Without it, it is left as it is.
	Sharing *Sharing `json:"sharing"`
	// The device plugin's MIG strategy: as what MIG devices are offered. Without it what fits, where sharing is said.
	MIGStrategy string `json:"migStrategy" jsonschema:"enum=none,enum=single,enum=mixed"`
	// Labels of the node, under keys of your own.
	Labels NodeLabels `json:"labels"`
	// Taints of the node, under keys of your own.
	Taints []Taint `json:"taints" jsonschema:"maxItems=100,uniqueItems=true"`
	// How pods are sent away, where it is otherwise than in the settings.
	Drain *config.DrainOverrides `json:"drain"`
	// When a change to it may begin, in place of the windows of the node's pool.
	Windows []maintenance.WindowFields `json:"windows" jsonschema:"minItems=1"`
}

// JSONSchemaExtend adds what is true of the fields together.
func (Profile) JSONSchemaExtend(s *jsonschema.Schema) {
	s.AnyOf = append(anyOf("mig", "sharing", "migStrategy"),
		properties("labels", &jsonschema.Schema{MinProperties: number(1)}), properties("taints", &jsonschema.Schema{MinItems: number(1)}))
	sharedByMPS := properties("sharing", properties("mps", properties("resources", contains(properties("replicas", minimum("2"))))))
	withMIG := properties("mig", contains(properties("enabled", &jsonschema.Schema{Const: true})))
	s.Not = &jsonschema.Schema{AllOf: []*jsonschema.Schema{sharedByMPS, withMIG}} // NVIDIA's device plugin has no MPS on MIG
}

// MIGEntry is how the GPUs that it selects are cut.
type MIGEntry struct {
	// Which GPUs it is about.
	GPUs Selector `json:"gpus" jsonschema:"required"`
	// MIG mode on.
	Enabled bool `json:"enabled" jsonschema:"required"`
	// How many MIG devices of each name, like 1g.10gb; {} for none.
	Instances Instances `json:"instances"`
}

// JSONSchemaExtend ties instances to MIG mode.
func (MIGEntry) JSONSchemaExtend(s *jsonschema.Schema) {
	s.If = properties("enabled", &jsonschema.Schema{Const: true})
	s.Then = required("instances")
	s.Else = not(required("instances"))
}

// Selector selects GPUs: all, or those that match everything that is there.
type Selector struct {
	// Every GPU of the node. It stands alone.
	All bool `json:"all"`
	// UUIDs of GPUs, in full, as nvidia-smi -L prints them.
	UUID *OneOrMore[UUID] `json:"uuid"`
	// PCI addresses.
	PCI *OneOrMore[PCI] `json:"pci"`
	// Positions in PCI order, from 0.
	Index *OneOrMore[Position] `json:"index"`
	// Models as nvidia-smi -L prints them, in which * stands for anything.
	Model *OneOrMore[Text] `json:"model"`
	// PCI device ids, as mig-parted writes them: 0x233010DE, or 0x233010DE:0x16C110DE with those of the subsystem.
	DeviceFilter *OneOrMore[DeviceFilter] `json:"deviceFilter"`
}

// JSONSchemaExtend lets all stand alone only.
func (Selector) JSONSchemaExtend(s *jsonschema.Schema) {
	if all, ok := s.Properties.Get("all"); ok {
		all.Const = true
	}
	s.MinProperties = number(1)
	s.If, s.Then = required("all"), &jsonschema.Schema{MaxProperties: number(1)}
}

// Sharing is none, or one strategy of NVIDIA's device plugin.
type Sharing struct {
	// GPUs or MIG devices are shared by turns. Their memory is not divided.
	TimeSlicing *TimeSlicing `json:"timeSlicing"`
	// GPUs are shared through NVIDIA's MPS control daemon. It shares no MIG devices.
	MPS *ByMPS `json:"mps"`
}

// JSONSchemaExtend adds the word none.
func (Sharing) JSONSchemaExtend(s *jsonschema.Schema) {
	strategy := &jsonschema.Schema{
		Type: "object", Properties: s.Properties, AdditionalProperties: jsonschema.FalseSchema, MinProperties: number(1), MaxProperties: number(1),
	}
	*s = jsonschema.Schema{Description: s.Description, OneOf: []*jsonschema.Schema{{Const: "none"}, strategy}}
}

// TimeSlicing is the strategy by turns.
type TimeSlicing struct {
	// Shared resources are offered as NAME.shared.
	RenameByDefault bool `json:"renameByDefault"`
	// A container may have one replica of a resource only.
	FailRequestsGreaterThanOne bool `json:"failRequestsGreaterThanOne"`
	// What is shared.
	Resources []TimeSliced `json:"resources" jsonschema:"required,minItems=1"`
}

// TimeSliced is a resource that is shared by turns.
type TimeSliced struct {
	// Of the device plugin: nvidia.com/gpu, or nvidia.com/mig-1g.10gb and its like.
	Name Resource `json:"name" jsonschema:"required"`
	// How often each of its devices is offered. 1 is not shared.
	Replicas int `json:"replicas" jsonschema:"required,minimum=1,maximum=60000"`
}

// ByMPS is the strategy of NVIDIA's Multi-Process Service.
type ByMPS struct {
	// Shared resources are offered as NAME.shared.
	RenameByDefault bool `json:"renameByDefault"`
	// A container may have one replica of a resource only. True unless it says otherwise, and before v0.20 of the plugin always.
	FailRequestsGreaterThanOne bool `json:"failRequestsGreaterThanOne"`
	// What is shared.
	Resources []Client `json:"resources" jsonschema:"required,minItems=1,maxItems=1"`
}

// Client is what clients of MPS have.
type Client struct {
	Name string `json:"name" jsonschema:"required,enum=nvidia.com/gpu,enum=gpu"`
	// How many clients each GPU has. 1 is not shared.
	Replicas int `json:"replicas" jsonschema:"required,minimum=1,maximum=48"`
}

// Taint is a taint of the node.
type Taint struct {
	Key   NodeKey    `json:"key" jsonschema:"required"`
	Value LabelValue `json:"value"`
	// NoExecute would delete pods whatever their disruption budgets say.
	Effect string `json:"effect" jsonschema:"required,enum=NoSchedule,enum=PreferNoSchedule"`
}
