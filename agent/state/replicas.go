package state

import (
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml"
)

// Replicas returns the devices of a pod as kubelet names them.
func Replicas(given map[string][]string) []plan.Replica {
	var out []plan.Replica
	for _, resource := range slices.Sorted(maps.Keys(given)) {
		if !nvml.GPUResource(resource) {
			continue
		}
		for _, id := range given[resource] {
			out = append(out, plan.Replica{Resource: resource, ID: id})
		}
	}
	return out
}
