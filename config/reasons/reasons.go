// Package reasons has a text for each reason that a node, an Event or a metric shows: when it is given, and what people can do.
package reasons

import (
	"strings"

	"github.com/gpuslice/gpuslice/config"
)

// Text explains one reason.
type Text struct {
	Reason config.Reason `json:"reason"`
	Given  string        `json:"given"`  // when: "while the agent cordons and taints the node"
	YouCan string        `json:"youCan"` // what people can do, as an imperative
}

// Group is reasons of one kind.
type Group struct {
	Title string
	Texts []Text
}

// All are the reasons in groups, in the order of config/keys.go.
func All() []Group { return groups }

// Find is the text of the reason of that name, in whatever case it is written.
func Find(name string) (Text, bool) {
	for _, g := range groups {
		for _, t := range g.Texts {
			if strings.EqualFold(string(t.Reason), name) {
				return t, true
			}
		}
	}
	return Text{}, false
}

// Close are the reasons that a name may have been meant as, the nearest first.
func Close(name string) []string { return config.Closest(name, Names()) }

// Names are those of all reasons.
func Names() []string {
	var out []string
	for _, g := range groups {
		for _, t := range g.Texts {
			out = append(out, string(t.Reason))
		}
	}
	return out
}
