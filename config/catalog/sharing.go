package catalog

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/nvml"
)

// SharingStrategy says how several pods share one device, in the terms of NVIDIA's GPU feature discovery.
type SharingStrategy string

// The strategies of the device plugin.
const (
	SharingNone        SharingStrategy = "none"
	SharingTimeSlicing SharingStrategy = "time-slicing"
	SharingMPS         SharingStrategy = "mps"
)

// Sharing says how often NVIDIA's device plugin advertises each device. If no resource is shared, the strategy is none, and nothing else is set.
type Sharing struct {
	Strategy SharingStrategy
	// Replicas is how often the plugin advertises each device of a resource, at least 2, by the resource's name: "nvidia.com/gpu",
	// "nvidia.com/mig-1g.10gb". The plugin advertises each device of any other resource once.
	Replicas map[string]int
	// Rename is the plugin's renameByDefault: it advertises shared resources as "nvidia.com/gpu.shared".
	Rename bool
	// FailMultiple is the plugin's failRequestsGreaterThanOne: a container may have one replica of a resource.
	FailMultiple bool
}

// Offered returns the plugin's name for a resource, and how often the plugin advertises each device.
func (s Sharing) Offered(resource string) (name string, replicas int) {
	replicas, shared := s.Replicas[resource]
	switch {
	case !shared:
		return resource, 1
	case s.Rename:
		return resource + nvml.SharedSuffix, replicas
	default:
		return resource, replicas
	}
}

// Equal reports whether both share the same resources in the same way.
func (s Sharing) Equal(t Sharing) bool {
	return s.Strategy == t.Strategy && s.Rename == t.Rename && s.FailMultiple == t.FailMultiple && maps.Equal(s.Replicas, t.Replicas)
}

// Resources lists the names of the shared resources, sorted.
func (s Sharing) Resources() []string { return slices.Sorted(maps.Keys(s.Replicas)) }

// PluginConfig has the fields of one config file of NVIDIA's device plugin that the agent uses.
type PluginConfig struct {
	Sharing     Sharing
	MIGStrategy config.MIGStrategy // flags.migStrategy; empty if the file does not say
	MPSRoot     string             // flags.mpsRoot; empty if the file does not say
}

// PluginFormat reads and writes the text of a config of NVIDIA's device plugin.
type PluginFormat struct {
	Parse func(text []byte) (PluginConfig, error)
	// Render returns a config with this sharing and MIG strategy. Everything else is copied from base, which may be empty, and so is the strategy if
	// it is empty.
	Render func(base []byte, s Sharing, strategy config.MIGStrategy) ([]byte, error)
}

// maxReplicas is how many replicas of a resource kubelet can take from the plugin. The plugin sends all their ids in one message. gRPC's limit for it
// is 4 MiB, and a replica takes up to 68 bytes.
const (
	maxReplicas = 60_000
	tooManyIDs  = "kubelet takes the ids of all replicas of a resource in one message of 4 MiB, with room for 60000"
)

// ParseSharing checks the value of "sharing" in a config file of NVIDIA's device plugin, as JSON. The error joins one *InvalidError for each value
// that is not allowed. The plugin itself ignores some of these mistakes. If it ignores all of them (see PassedOver), the plugin runs by the returned
// sharing.
func ParseSharing(text []byte) (Sharing, error) {
	var c check.Mistakes
	s := readSharing(&c, text, true)
	err := errors.Join(c...)
	if err != nil && !check.PassedOver(err) {
		return Sharing{}, err
	}
	return s, err
}

// readProfileSharing checks the value of "sharing" in a profile. It has the plugin's format, or is the word none. One replica is allowed, and means
// none.
func readProfileSharing(c *check.Mistakes, raw json.RawMessage) *Sharing {
	const field = "sharing"
	var in SharingFields
	switch {
	case check.Absent(raw):
		return nil
	case string(raw) == `"`+string(SharingNone)+`"`:
		return &Sharing{Strategy: SharingNone}
	case json.Unmarshal(raw, &in) != nil:
		c.Add(&check.InvalidError{Field: field, Value: string(raw), Want: `must be none, or a mapping with "timeSlicing" or "mps"`})
		return nil
	}
	s := readSharing(c, raw, false)
	if in.TimeSlicing.RawMessage == nil && in.MPS.RawMessage == nil {
		c.Add(&check.InvalidError{Field: field, Want: "must have timeSlicing or mps; for GPUs that are not shared write none"})
	}
	return &s
}

// SharingFields is none, or one strategy of NVIDIA's device plugin.
type SharingFields struct {
	// Pods share GPUs or MIG devices by turns. Their memory is not divided.
	TimeSlicing check.Raw[ReplicatedResourcesFields] `json:"timeSlicing"`
	// Pods share GPUs through NVIDIA's MPS control daemon. It shares no MIG devices.
	MPS check.Raw[ReplicatedResourcesFields] `json:"mps"`
}

// ReplicatedResourcesFields says what a strategy shares, and how.
type ReplicatedResourcesFields struct {
	// Shared resources are named NAME.shared.
	RenameByDefault check.Raw[bool] `json:"renameByDefault"`
	// A container may have one replica of a resource only. With MPS the default is true, and before v0.20 of the plugin it is always true.
	FailRequestsGreaterThanOne check.Raw[bool] `json:"failRequestsGreaterThanOne"`
	// The shared resources.
	Resources check.Raw[[]ReplicatedResourceFields] `json:"resources" jsonschema:"required,minItems=1"`
}

// ReplicatedResourceFields is a resource that is shared.
type ReplicatedResourceFields struct {
	// A resource of the device plugin: nvidia.com/gpu, or one like nvidia.com/mig-1g.10gb.
	Name check.Raw[string] `json:"name" jsonschema:"required" form:"resource"`
	// How often the plugin advertises each of its devices. 1 is not shared.
	Replicas check.Raw[int] `json:"replicas" jsonschema:"required,minimum=1,maximum=60000"`

	Rename  check.Raw[string] `json:"rename" ignored:"by the plugin"`
	Devices check.Raw[string] `json:"devices" ignored:"by the plugin"`
}

// readSharing reads at most one strategy. ofPlugin marks the plugin's file, which must not have one replica.
func readSharing(c *check.Mistakes, raw json.RawMessage, ofPlugin bool) Sharing {
	const field = "sharing"
	none := Sharing{Strategy: SharingNone}
	var in SharingFields
	if !c.Read(field, raw, &in) {
		return none
	}
	switch {
	case in.TimeSlicing.RawMessage != nil && in.MPS.RawMessage != nil:
		c.Add(&check.InvalidError{
			Field: field, Want: "has both timeSlicing and mps: keep one; NVIDIA's device plugin would silently use mps", PassedOver: true,
		})
		readReplicated(c, field+".timeSlicing", in.TimeSlicing.RawMessage, SharingTimeSlicing, ofPlugin)
		return readReplicated(c, field+".mps", in.MPS.RawMessage, SharingMPS, ofPlugin)
	case in.MPS.RawMessage != nil:
		return readReplicated(c, field+".mps", in.MPS.RawMessage, SharingMPS, ofPlugin)
	case in.TimeSlicing.RawMessage != nil:
		return readReplicated(c, field+".timeSlicing", in.TimeSlicing.RawMessage, SharingTimeSlicing, ofPlugin)
	}
	return none
}

func readReplicated(c *check.Mistakes, field string, raw json.RawMessage, strategy SharingStrategy, ofPlugin bool) Sharing {
	var in ReplicatedResourcesFields
	if !c.Read(field, raw, &in) {
		return Sharing{}
	}
	s := Sharing{
		Strategy: strategy, Replicas: map[string]int{},
		Rename: readFlag(c, field+".renameByDefault", in.RenameByDefault.RawMessage, false),
		// Under MPS the plugin assumes it from v0.20 on, and enforces it before.
		FailMultiple: readFlag(c, field+".failRequestsGreaterThanOne", in.FailRequestsGreaterThanOne.RawMessage, strategy == SharingMPS),
	}
	var entries []json.RawMessage
	if check.Absent(in.Resources.RawMessage) || json.Unmarshal(in.Resources.RawMessage, &entries) != nil || len(entries) == 0 {
		c.Add(&check.InvalidError{Field: field + ".resources", Want: `must be a list of at least one entry with "name" and "replicas"`})
	}
	for i, entry := range entries {
		readShared(c, fmt.Sprintf("%s.resources[%d]", field, i), entry, &s, ofPlugin)
	}
	maps.DeleteFunc(s.Replicas, func(_ string, n int) bool { return n < 2 })
	if len(s.Replicas) == 0 {
		return Sharing{Strategy: SharingNone}
	}
	return s
}

// readShared checks one resource and adds it.
func readShared(c *check.Mistakes, at string, raw json.RawMessage, s *Sharing, ofPlugin bool) {
	var in ReplicatedResourceFields
	if !c.Read(at, raw, &in) {
		return
	}
	name := readResourceName(c, at+".name", in.Name.RawMessage)
	replicas := readReplicas(c, at+".replicas", in.Replicas.RawMessage, s.Strategy, ofPlugin)
	if in.Rename.RawMessage != nil && !(ofPlugin && s.Rename && string(in.Rename.RawMessage) == strconv.Quote(name+nvml.SharedSuffix)) {
		refusePassedOver(c, at+".rename", check.AsWritten(in.Rename.RawMessage),
			"is ignored by NVIDIA's device plugin: renameByDefault names each shared resource <name>"+nvml.SharedSuffix)
	}
	if in.Devices.RawMessage != nil && !(ofPlugin && string(in.Devices.RawMessage) == `"all"`) {
		refusePassedOver(c, at+".devices", check.AsWritten(in.Devices.RawMessage),
			"is ignored by NVIDIA's device plugin, which shares all devices of a resource: leave it out")
	}
	if name == "" {
		return
	}
	if _, twice := s.Replicas[name]; twice {
		c.Refuse(at+".name", name, "is there twice")
	}
	if s.Strategy == SharingMPS && strings.HasPrefix(name, nvml.ResourceMIGPrefix) {
		c.Refuse(at+".name", name, "is a MIG device, and NVIDIA's device plugin has no MPS on MIG: share it by timeSlicing")
	}
	s.Replicas[name] = replicas
}

func readResourceName(c *check.Mistakes, field string, raw json.RawMessage) string {
	var written string
	if check.Absent(raw) || json.Unmarshal(raw, &written) != nil {
		c.Refuse(field, check.AsWritten(raw), "must be the name of a resource, like "+nvml.ResourceGPU)
		return ""
	}
	name, err := ResourceName(written)
	switch {
	case errors.Is(err, errNotResource):
		refusePassedOver(c, field, written, err.Error())
	case err != nil:
		c.Refuse(field, written, err.Error())
	}
	return name
}

// refusePassedOver is Refuse for a mistake that NVIDIA's device plugin ignores.
func refusePassedOver(c *check.Mistakes, field, value, want string) {
	c.Add(&check.InvalidError{Field: field, Value: strconv.Quote(value), Want: want, PassedOver: true})
}

func readReplicas(c *check.Mistakes, field string, raw json.RawMessage, strategy SharingStrategy, ofPlugin bool) int {
	least := 1
	if ofPlugin {
		least = 2
	}
	n, err := strconv.Atoi(check.AsWritten(raw))
	possible := err == nil && n >= least && n <= maxReplicas
	switch {
	case possible && raw[0] == '"':
		c.Refuse(field, check.AsWritten(raw), "is text: write "+check.AsWritten(raw)+" without quotes")
	case err == nil && n == 1 && ofPlugin:
		c.Refuse(field, check.AsWritten(raw),
			"shares nothing, and NVIDIA's device plugin refuses it: write 2 or more, or remove the entry, and sharing with its last entry")
	case err == nil && n > maxMPSClients && strategy == SharingMPS:
		c.Refuse(field, check.AsWritten(raw), fmt.Sprintf("is more than the %d clients that an MPS control daemon serves", maxMPSClients))
	case err == nil && n > maxReplicas:
		c.Refuse(field, check.AsWritten(raw), fmt.Sprintf("must be a whole number from %d to %d: %s", least, maxReplicas, tooManyIDs))
	case !possible:
		c.Refuse(field, check.AsWritten(raw), fmt.Sprintf("must be a whole number from %d to %d", least, maxReplicas))
	}
	return n
}

// readFlag checks a value that the plugin takes as true or false only without quotes.
func readFlag(c *check.Mistakes, field string, raw json.RawMessage, otherwise bool) bool {
	switch {
	case check.Absent(raw):
		return otherwise
	case string(raw) != "true" && string(raw) != "false":
		c.Refuse(field, check.AsWritten(raw), "must be true or false, without quotes")
	}
	return string(raw) == "true"
}

// resourceDomain begins the names of all resources of the device plugin: nvml.ResourceGPU, and those of nvml.ResourceMIGPrefix. The plugin
// ignores others.
const resourceDomain = "nvidia.com/"

// maxResourceName is the plugin's limit, the same as for a label's name.
const maxResourceName = 63

// migResource is the form of the plugin's name of a MIG device: its profile, with "." for "+". The plugin does not know compute instances.
var migResource = regexp.MustCompile(`^[1-9]g\.[1-9][0-9]*gb(?:[.-][a-z](?:[a-z0-9.-]*[a-z0-9])?)?$`)

// ResourceName returns the full name of the device plugin's resource that a config names. It adds "nvidia.com/" if that is missing, as the plugin
// does. The error is the predicate of a message that begins with the name.
func ResourceName(written string) (string, error) {
	name := written
	if !strings.HasPrefix(name, resourceDomain) {
		name = resourceDomain + name
	}
	mig, isMIG := strings.CutPrefix(name, nvml.ResourceMIGPrefix)
	switch {
	case strings.Contains(written, "+"):
		return "", fmt.Errorf(`cannot have a "+": write %q`, strings.ReplaceAll(written, "+", "."))
	case len(name) > maxResourceName:
		return "", fmt.Errorf("is longer than the %d characters of a resource's name", maxResourceName)
	case name == nvml.ResourceGPU, isMIG && migResource.MatchString(mig):
		return name, nil
	default:
		return "", errNotResource
	}
}

var errNotResource = fmt.Errorf("is not a resource of NVIDIA's device plugin: use %s or, for a MIG profile, a name like %s1g.10gb",
	nvml.ResourceGPU, nvml.ResourceMIGPrefix)
