package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// SharingStrategy is how one device is given to several pods at once, in the words of NVIDIA's GPU feature discovery.
type SharingStrategy string

// The strategies of the device plugin.
const (
	SharingNone        SharingStrategy = "none"
	SharingTimeSlicing SharingStrategy = "time-slicing"
	SharingMPS         SharingStrategy = "mps"
)

// Sharing is how NVIDIA's device plugin multiplies what it offers. What is not shared by any resource has the strategy none,
// and nothing else set.
type Sharing struct {
	Strategy SharingStrategy
	// Replicas is how often each device of a resource is offered, at least 2, by the resource's name: "nvidia.com/gpu",
	// "nvidia.com/mig-1g.10gb". A resource that is not in it is offered as it is.
	Replicas map[string]int
	// Rename is the plugin's renameByDefault: shared resources are offered as "nvidia.com/gpu.shared".
	Rename bool
	// FailMultiple is the plugin's failRequestsGreaterThanOne: a container may have one replica of a resource.
	FailMultiple bool
}

// Offered is the name under which the plugin offers a resource, and how often each of its devices.
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

// Equal reports whether both offer the same in the same way.
func (s Sharing) Equal(t Sharing) bool {
	return s.Strategy == t.Strategy && s.Rename == t.Rename && s.FailMultiple == t.FailMultiple && maps.Equal(s.Replicas, t.Replicas)
}

// Resources are the names of those that are shared, sorted.
func (s Sharing) Resources() []string { return slices.Sorted(maps.Keys(s.Replicas)) }

// PluginConfig is one config file of NVIDIA's device plugin, as far as the agent goes by it.
type PluginConfig struct {
	Sharing     Sharing
	MIGStrategy MIGStrategy // flags.migStrategy; empty if the file does not say
	MPSRoot     string      // flags.mpsRoot; empty if the file does not say
}

// maxReplicas is more than anyone shares a GPU by, and little enough for kubelet: the plugin sends it the ids of all replicas
// of a resource in one message, which gRPC bounds at 4 MiB.
const maxReplicas = 1000

// ParseSharing checks what a config file of NVIDIA's device plugin has under "sharing", as JSON. The error joins one
// *InvalidError for each value that is not allowed, some of which the plugin takes and passes over.
func ParseSharing(text []byte) (Sharing, error) {
	var c checks
	s := c.sharing(text, true)
	if len(c) > 0 {
		return Sharing{}, errors.Join(c...)
	}
	return s, nil
}

// Profiles say it in the same words, but that they have one for no sharing at all, and take one replica for it.
func (c *checks) profileSharing(raw json.RawMessage) *Sharing {
	const field = "sharing"
	var in sharingInputs
	switch {
	case absent(raw):
		return nil
	case string(raw) == `"`+string(SharingNone)+`"`:
		return &Sharing{Strategy: SharingNone}
	case json.Unmarshal(raw, &in) != nil:
		c.add(&InvalidError{Field: field, Value: string(raw), Want: `must be none, or a mapping with "timeSlicing" or "mps"`})
		return nil
	}
	s := c.sharing(raw, false)
	if in.TimeSlicing == nil && in.MPS == nil {
		c.add(&InvalidError{Field: field, Want: "must have timeSlicing or mps; for GPUs that are not shared write none"})
	}
	return &s
}

type sharingInputs struct {
	TimeSlicing json.RawMessage `json:"timeSlicing"`
	MPS         json.RawMessage `json:"mps"`
}

type replicatedInputs struct {
	RenameByDefault            json.RawMessage `json:"renameByDefault"`
	FailRequestsGreaterThanOne json.RawMessage `json:"failRequestsGreaterThanOne"`
	Resources                  json.RawMessage `json:"resources"`
}

type sharedInputs struct {
	Name     json.RawMessage `json:"name"`
	Replicas json.RawMessage `json:"replicas"`
	Rename   json.RawMessage `json:"rename" ignored:"by the plugin"`
	Devices  json.RawMessage `json:"devices" ignored:"by the plugin"`
}

// sharing reads at most one strategy. What the plugin refuses is refused in its files, and taken for none in ours.
func (c *checks) sharing(raw json.RawMessage, plugins bool) Sharing {
	const field = "sharing"
	none := Sharing{Strategy: SharingNone}
	var in sharingInputs
	if !c.mapping(field, raw, &in) {
		return none
	}
	switch {
	case in.TimeSlicing != nil && in.MPS != nil:
		c.add(&InvalidError{
			Field: field, Want: "has both timeSlicing and mps, which exclude each other: NVIDIA's device plugin would take mps without a word",
		})
		c.replicated(field+".timeSlicing", in.TimeSlicing, SharingTimeSlicing, plugins)
		return c.replicated(field+".mps", in.MPS, SharingMPS, plugins)
	case in.MPS != nil:
		return c.replicated(field+".mps", in.MPS, SharingMPS, plugins)
	case in.TimeSlicing != nil:
		return c.replicated(field+".timeSlicing", in.TimeSlicing, SharingTimeSlicing, plugins)
	}
	return none
}

func (c *checks) replicated(field string, raw json.RawMessage, strategy SharingStrategy, plugins bool) Sharing {
	var in replicatedInputs
	if !c.mapping(field, raw, &in) {
		return Sharing{}
	}
	s := Sharing{
		Strategy: strategy, Replicas: map[string]int{},
		Rename: c.flag(field+".renameByDefault", in.RenameByDefault, false),
		// Under MPS the plugin assumes it from v0.20 on, and enforces it before.
		FailMultiple: c.flag(field+".failRequestsGreaterThanOne", in.FailRequestsGreaterThanOne, strategy == SharingMPS),
	}
	var entries []json.RawMessage
	if absent(in.Resources) || json.Unmarshal(in.Resources, &entries) != nil || len(entries) == 0 {
		c.add(&InvalidError{Field: field + ".resources", Want: `must be a list of at least one entry with "name" and "replicas"`})
	}
	for i, entry := range entries {
		c.shared(fmt.Sprintf("%s.resources[%d]", field, i), entry, &s, plugins)
	}
	maps.DeleteFunc(s.Replicas, func(_ string, n int) bool { return n < 2 })
	if len(s.Replicas) == 0 {
		return Sharing{Strategy: SharingNone}
	}
	return s
}

// shared checks one resource and adds it.
func (c *checks) shared(at string, raw json.RawMessage, s *Sharing, plugins bool) {
	var in sharedInputs
	if !c.mapping(at, raw, &in) {
		return
	}
	name := c.resourceName(at+".name", in.Name)
	replicas := c.replicas(at+".replicas", in.Replicas, s.Strategy, plugins)
	if in.Rename != nil && !(plugins && s.Rename && string(in.Rename) == strconv.Quote(name+nvml.SharedSuffix)) {
		c.refuse(at+".rename", text(in.Rename), "is passed over by NVIDIA's device plugin: renameByDefault offers each shared resource as <name>"+nvml.SharedSuffix)
	}
	if in.Devices != nil && !(plugins && string(in.Devices) == `"all"`) {
		c.refuse(at+".devices", text(in.Devices), "is passed over by NVIDIA's device plugin, which shares all devices of a resource: leave it out")
	}
	if name == "" {
		return
	}
	if _, twice := s.Replicas[name]; twice {
		c.refuse(at+".name", name, "is there twice")
	}
	if s.Strategy == SharingMPS && strings.HasPrefix(name, nvml.ResourceMIGPrefix) {
		c.refuse(at+".name", name, "is a MIG device, and NVIDIA's device plugin has no MPS on MIG: share it by timeSlicing")
	}
	s.Replicas[name] = replicas
}

func (c *checks) resourceName(field string, raw json.RawMessage) string {
	var written string
	if absent(raw) || json.Unmarshal(raw, &written) != nil {
		c.refuse(field, text(raw), "must be the name of a resource, like "+nvml.ResourceGPU)
		return ""
	}
	name, err := ResourceName(written)
	if err != nil {
		c.refuse(field, written, err.Error())
	}
	return name
}

func (c *checks) replicas(field string, raw json.RawMessage, strategy SharingStrategy, plugins bool) int {
	least := 1
	if plugins {
		least = 2
	}
	n, err := strconv.Atoi(text(raw))
	possible := err == nil && n >= least && n <= maxReplicas
	switch {
	case possible && raw[0] == '"':
		c.refuse(field, text(raw), "is text: write "+text(raw)+" without quotes")
	case err == nil && n == 1 && plugins:
		c.refuse(field, text(raw), "is refused by NVIDIA's device plugin: leave the resource out, and it is offered as it is")
	case err == nil && n > mostMPSClients && strategy == SharingMPS:
		c.refuse(field, text(raw), fmt.Sprintf("is more than the %d clients that an MPS control daemon serves", mostMPSClients))
	case !possible:
		c.refuse(field, text(raw), fmt.Sprintf("must be a whole number from %d to %d", least, maxReplicas))
	}
	return n
}

// flag checks a value that the plugin takes as true or false only where it has no quotes.
func (c *checks) flag(field string, raw json.RawMessage, otherwise bool) bool {
	switch {
	case absent(raw):
		return otherwise
	case string(raw) != "true" && string(raw) != "false":
		c.refuse(field, text(raw), "must be true or false, without quotes")
	}
	return string(raw) == "true"
}

// text is a value as it is written, without quotes.
func text(raw json.RawMessage) string {
	var s scalar
	if len(raw) == 0 || s.UnmarshalJSON(raw) != nil {
		return ""
	}
	return string(s)
}

// resourceDomain begins the names of all resources of the device plugin: nvml.ResourceGPU, and those of nvml.ResourceMIGPrefix. It passes over
// others.
const resourceDomain = "nvidia.com/"

// maxResourceName is the plugin's own limit, which is that of the name of a label.
const maxResourceName = 63

// migResource is how the plugin names a MIG device: as its profile, with "." for "+". It knows no compute instances.
var migResource = regexp.MustCompile(`^[1-9]g\.[1-9][0-9]*gb(?:[.-][a-z](?:[a-z0-9.-]*[a-z0-9])?)?$`)

// ResourceName is the full name of a resource of the device plugin, as it is written in a config: without "nvidia.com/"
// this is put before it, as the plugin does. The error says what is wrong, to be read behind the name.
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

var errNotResource = fmt.Errorf("is no resource that NVIDIA's device plugin offers: they are %s and, for each MIG profile, the like of %s1g.10gb", nvml.ResourceGPU, nvml.ResourceMIGPrefix)
