// Package reasons has a text for each reason that a node, an Event or a metric shows: when the agent gives it, and how a user can react.
package reasons

import (
	"strings"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
)

// Text explains one reason.
type Text struct {
	Reason config.Reason `json:"reason"`
	Given  string        `json:"given"`  // when the agent gives it: "while the agent cordons and taints the node"
	YouCan string        `json:"youCan"` // the user's possible reaction, as an imperative
}

// Group is reasons of one kind.
type Group struct {
	Title string
	Texts []Text
}

// All are the reasons in groups, in the order of config/keys.go.
func All() []Group { return groups }

// Find gives the text of the reason of that name, in upper or lower case.
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

// Close lists the reasons that are spelt like name, the nearest first.
func Close(name string) []string { return check.Closest(name, Names()) }

// Names lists the names of all reasons.
func Names() []string {
	var out []string
	for _, g := range groups {
		for _, t := range g.Texts {
			out = append(out, string(t.Reason))
		}
	}
	return out
}
