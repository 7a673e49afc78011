package schema

import "github.com/invopop/jsonschema"

// Maintenance is when nodes may be disturbed, and how many of them at once.
type Maintenance struct {
	APIVersion string `json:"apiVersion" jsonschema:"enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"enum=Maintenance"`
	// For nodes of no pool, and for pools without windows of their own. Without any it is always.
	Windows []Window `json:"windows,omitempty" jsonschema:"minItems=1"`
	// Nothing is begun in them. They count for all pools.
	Freezes []Freeze `json:"freezes,omitempty"`
	// How long a change takes on a node that knows of no earlier one.
	Estimate Duration `json:"estimate,omitempty"`
	// Nodes begin up to so long after an opening, each at a moment of its own.
	Jitter Duration `json:"jitter,omitempty"`
	// How many of the nodes of no pool that are asked for the same may be away at once, by changes for which pods have to leave; 10% if left out.
	MaxUnavailable *Limit `json:"maxUnavailable,omitempty"`
	// The first whose selector fits a node counts.
	Pools []Pool `json:"pools,omitempty"`
}

// Pool is what holds for certain nodes.
type Pool struct {
	Name DNSLabel `json:"name"`
	// A label selector of nodes.
	Selector Text `json:"selector"`
	// How many of its nodes may be disturbed at once. Without it there is no limit.
	MaxUnavailable *Limit `json:"maxUnavailable,omitempty"`
	// How many changes may fail in a row until the pool begins none any more; 0 for never.
	PauseAfter *int `json:"pauseAfter,omitempty" jsonschema:"minimum=0,maximum=1000"`
	// In place of those of all nodes.
	Windows []Window `json:"windows,omitempty" jsonschema:"minItems=1"`
	// Beside those of all nodes.
	Freezes []Freeze `json:"freezes,omitempty"`
	// How long a change takes on a node that knows of no earlier one.
	Estimate Duration `json:"estimate,omitempty"`
	// Nodes begin up to so long after an opening, each at a moment of its own.
	Jitter Duration `json:"jitter,omitempty"`
}

// Window is when nodes may be disturbed: every week, with days, or once.
type Window struct {
	// The days on which it opens.
	Days *OneOrMore[Weekday] `json:"days,omitempty"`
	// When it opens, as clocks in the time zone show it. In quotes: some read 22:00 as a number.
	Start TimeOfDay `json:"start,omitempty"`
	// How long it is open, up to a week.
	Duration Duration `json:"duration,omitempty"`
	// A name of the IANA time zone database, like Europe/Berlin. UTC if left out.
	TimeZone Text `json:"timeZone,omitempty"`
	// Nothing is open before.
	NotBefore Instant `json:"notBefore,omitempty"`
	// Nothing is open from then on.
	NotAfter Instant `json:"notAfter,omitempty"`
}

// JSONSchemaExtend ties start and duration to days, and what is open once to its bounds.
func (Window) JSONSchemaExtend(s *jsonschema.Schema) {
	s.If = required("days")
	s.Then = &jsonschema.Schema{Required: []string{"start", "duration"}}
	s.Else = &jsonschema.Schema{Required: []string{"notBefore", "notAfter"}, Not: &jsonschema.Schema{AnyOf: anyOf("start", "duration")}}
}

// Freeze is a time in which nothing is open.
type Freeze struct {
	From Instant `json:"from"`
	To   Instant `json:"to"`
	// For people.
	Reason string `json:"reason,omitempty"`
}
