// Package metrics has a text for each metric of the agent: what it is, for Prometheus and for users.
package metrics

import (
	"strings"

	"github.com/gpuslice/gpuslice/config/check"
)

// Text says what one metric is.
type Text struct {
	Name   string
	Is     string   // "1 if all is as the labels ask"
	Labels []string // in the order of their values
}

// Group is metrics of one kind.
type Group struct {
	Title string
	Texts []Text
}

// All are the metrics in groups, in the order of config/metrics.go.
func All() []Group { return groups }

// Find is the text of the metric of that name.
func Find(name string) (Text, bool) {
	for _, g := range groups {
		for _, t := range g.Texts {
			if strings.EqualFold(t.Name, name) {
				return t, true
			}
		}
	}
	return Text{}, false
}

// Close are the metrics that a name may have been meant as, the nearest first.
func Close(name string) []string { return check.Closest(name, Names()) }

// Names are those of all metrics.
func Names() []string {
	var out []string
	for _, g := range groups {
		for _, t := range g.Texts {
			out = append(out, t.Name)
		}
	}
	return out
}
