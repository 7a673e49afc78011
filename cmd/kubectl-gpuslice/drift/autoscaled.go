package drift

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// checkAutoscaled refuses a name that nothing has: with it, what it is meant for would be reported as a mistake.
func (c *comparison) checkAutoscaled() error {
	for _, name := range c.known.Autoscaled {
		if !slices.ContainsFunc(c.flavors, func(f kinds.ResourceFlavor) bool { return f.Name == name }) &&
			!slices.ContainsFunc(c.profiles, func(p kinds.HardwareProfile) bool { return p.Name == name }) {
			return fmt.Errorf("flag --autoscaled is %q: the cluster has no ResourceFlavor or HardwareProfile of that name", sanitize.Cut(name, sanitize.Longest))
		}
	}
	return nil
}

func (c *comparison) isAutoscaled(name string) bool { return slices.Contains(c.known.Autoscaled, name) }

// comes reports whether an autoscaler makes nodes with a resource for a HardwareProfile that selects nodes by the labels. A flavor may be named in
// its place, if queues promise the resource by it.
func (c *comparison) comes(profile string, with map[string]string, resource string) bool {
	if nodes, _, _ := c.offered(with); len(with) > 0 && nodes > 0 {
		return false // nodes are there, and offer something else
	}
	if c.isAutoscaled(profile) {
		return true
	}
	if coming := c.coming[corev1.ResourceName(resource)]; coming.IsZero() {
		return false
	}
	selector := labels.SelectorFromSet(with)
	return slices.ContainsFunc(c.flavors, func(f kinds.ResourceFlavor) bool {
		return c.isAutoscaled(f.Name) && selector.Matches(labels.Set(f.Spec.NodeLabels))
	})
}
