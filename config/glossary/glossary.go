// Package glossary explains the words of the agent: its reasons and its metrics, for kubectl gpuslice explain and for Prometheus.
package glossary

import (
	"strings"

	"github.com/gpuslice/gpuslice/config/check"
)

// Entry explains one reason or metric.
type Entry struct {
	Name   string
	Means  string   // when the agent gives a reason: "while the agent cordons and taints the node"; what a metric is: "1 if …"
	YouCan string   // of a reason: the user's possible reaction, as an imperative
	Labels []string // of a metric, in the order of their values
}

// Group is entries of one kind.
type Group struct {
	Title   string
	Entries []Entry
}

// Groups are reasons, or metrics.
type Groups []Group

// Reasons are in the order of config/keys.go.
func Reasons() Groups { return reasons }

// Metrics are in the order of config/metrics.go.
func Metrics() Groups { return metrics }

// Find gives the entry of that name, in upper or lower case.
func (g Groups) Find(name string) (Entry, bool) {
	for _, group := range g {
		for _, e := range group.Entries {
			if strings.EqualFold(e.Name, name) {
				return e, true
			}
		}
	}
	return Entry{}, false
}

// Closest lists the names that are spelt like name, the nearest first.
func (g Groups) Closest(name string) []string { return check.Closest(name, g.Names()) }

// Names lists the names of all entries.
func (g Groups) Names() []string {
	var out []string
	for _, group := range g {
		for _, e := range group.Entries {
			out = append(out, e.Name)
		}
	}
	return out
}
