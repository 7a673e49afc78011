package config

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config/window"
)

// The kind of a maintenance file.
const (
	MaintenanceAPIVersion = "gpuslice.io/v1alpha1"
	MaintenanceKind       = "Maintenance"
)

// Maintenance is when nodes may be disturbed, and how many of them at once.
type Maintenance struct {
	Others Pool   // of nodes that no pool selects; without a name, a selector and a limit
	Pools  []Pool // the first that selects a node counts
}

// Pool is what holds for certain nodes.
type Pool struct {
	Name     string
	Selector labels.Selector
	Schedule window.Schedule
	Estimate time.Duration // how long a change takes on a node that knows of no earlier one
	Jitter   time.Duration // nodes begin this long after an opening at the latest, each at a moment of its own

	MaxUnavailable *Limit // nil for no limit
	PauseAfter     int    // failures in a row after which the pool begins no further change; 0 for never
}

// Limit is a number of nodes, or a percentage of those of the pool.
type Limit struct {
	Nodes   int
	Percent int // in place of Nodes, from 1 to 100; 0 for Nodes
}

// Of is the limit of a pool with so many nodes. A percentage is rounded down, but allows one node.
func (l Limit) Of(nodes int) int {
	if l.Percent == 0 {
		return l.Nodes
	}
	return max(1, nodes*l.Percent/100)
}

// For is the pool of a node.
func (m Maintenance) For(node *corev1.Node) Pool {
	for _, p := range m.Pools {
		if p.Selector.Matches(labels.Set(node.Labels)) {
			return p
		}
	}
	return m.Others
}
