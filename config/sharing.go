package config

import (
	"maps"
	"slices"
)

// SharingStrategy is how one device is given to several pods at once, in the words of NVIDIA's GPU feature discovery.
type SharingStrategy string

// The strategies of the device plugin.
const (
	SharingNone        SharingStrategy = "none"
	SharingTimeSlicing SharingStrategy = "time-slicing"
	SharingMPS         SharingStrategy = "mps"
)

// sharedSuffix is what the device plugin adds to the name of a resource under renameByDefault.
const sharedSuffix = ".shared"

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
		return resource + sharedSuffix, replicas
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
