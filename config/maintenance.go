package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/window"
)

// The kind of a maintenance file.
const (
	MaintenanceAPIVersion = "gpuslice.io/v1alpha1"
	MaintenanceKind       = "Maintenance"
)

// The defaults of a maintenance file.
const (
	// DefaultEstimate: a change that resets GPUs, waits for the device plugin and has pods to send away takes minutes.
	DefaultEstimate = 15 * time.Minute
	// DefaultJitter spreads the requests of hundreds of nodes to the API server, and is a small part of a window of hours.
	DefaultJitter = 5 * time.Minute
	// DefaultPauseAfter: one node may be broken, and two by chance; if three in a row fail, the fault is in the change.
	DefaultPauseAfter = 3
	// DefaultMaxUnavailable is a percentage: a mistake in a change that is asked of all nodes at once takes at most so many of them away.
	DefaultMaxUnavailable = 10
)

// WithoutMaintenance is what holds without a maintenance file.
func WithoutMaintenance() Maintenance {
	return Maintenance{Others: Pool{MaxUnavailable: &Limit{Percent: DefaultMaxUnavailable}}}
}

// Maintenance says when changes may begin, and on how many nodes at once.
type Maintenance struct {
	Others Pool   // for nodes that no pool selects; without a name and a selector. Its limit is one of the nodes that are asked for the same
	Pools  []Pool // a node is in the first one that selects it

	// Asked returns the label of a node that counts, and what it asks for; nil if nothing is known of labels. Nodes of no pool that are asked for
	// the same are one, where Others has a limit.
	Asked func(node *corev1.Node) (label, name string)
}

// Pool says it for certain nodes.
type Pool struct {
	Name     string
	Selector labels.Selector
	Schedule window.Schedule
	Estimate time.Duration // assumed length of a change on a node that has measured none yet
	Jitter   time.Duration // each node begins at a moment of its own, at most this long after an opening

	MaxUnavailable *Limit // nil for no limit
	ForEvictions   bool   // the limit is for changes alone for which pods have to leave
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

// String returns the limit as the file has it.
func (l Limit) String() string {
	switch {
	case l.Percent > 0:
		return fmt.Sprintf("%d%% of its nodes", l.Percent)
	case l.Nodes == 1:
		return "1 node"
	default:
		return fmt.Sprintf("%d nodes", l.Nodes)
	}
}

// For gives the pool of a node.
func (m Maintenance) For(node *corev1.Node) Pool {
	for _, p := range m.Pools {
		if p.Selector.Matches(labels.Set(node.Labels)) {
			return p
		}
	}
	return m.alike(node)
}

// alike gives the pool of the nodes that are asked for the same as this one. Its name has a dot, which no written one has.
func (m Maintenance) alike(node *corev1.Node) Pool {
	p := m.Others
	if m.Asked == nil || p.MaxUnavailable == nil {
		return p
	}
	label, name := m.Asked(node)
	if name == "" {
		return p
	}
	_, kind, _ := strings.Cut(label, "/")
	kind = strings.TrimSuffix(kind, ".config")
	p.Name, p.ForEvictions = kind+"."+name, true
	if len(validation.IsDNS1123Subdomain(LeasePrefix+p.Name)) > 0 { // a label's value may have other characters, too
		hash := sha256.Sum256([]byte(name))
		p.Name = kind + "." + hex.EncodeToString(hash[:6])
	}
	if node.Labels[label] == name {
		p.Selector = labels.SelectorFromSet(labels.Set{label: name})
	}
	return p
}

// ParseMaintenance reads a maintenance file. Fields that do not exist are refused.
//
// The error joins one *InvalidError for each value that is not allowed. A file with a mistake gives no windows at all: without the mistaken
// part the rest could allow changes at a time that its author forbids.
func ParseMaintenance(text []byte) (Maintenance, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return Maintenance{}, fmt.Errorf("reading maintenance as YAML: %w", err)
	}
	if string(doc) == "null" {
		return Maintenance{}, fmt.Errorf("reading maintenance: the file is empty, and needs at least %q and %q",
			"apiVersion: "+MaintenanceAPIVersion, "kind: "+MaintenanceKind)
	}
	var c checks
	var in maintenanceInputs
	if c.mapping("file", doc, &in) {
		c.oneOf("apiVersion", in.APIVersion, MaintenanceAPIVersion)
		c.oneOf("kind", in.Kind, MaintenanceKind)
	}
	m := Maintenance{Others: Pool{
		Schedule: window.Schedule{Windows: c.windows("windows", in.Windows), Freezes: c.freezes("freezes", in.Freezes)},
		Estimate: DefaultEstimate, Jitter: DefaultJitter, MaxUnavailable: WithoutMaintenance().Others.MaxUnavailable,
	}}
	c.estimateAndJitter("", in.Estimate, in.Jitter, &m.Others)
	if in.MaxUnavailable != "" {
		m.Others.MaxUnavailable = c.limit("maxUnavailable", in.MaxUnavailable)
	}
	m.Pools = c.pools("pools", in.Pools, m.Others)
	if len(c) > 0 {
		return Maintenance{}, errors.Join(c...)
	}
	return m, nil
}

// maintenanceInputs is a maintenance file, not yet checked. Lists stay JSON, so that the checks still find the mistakes beside a value of
// the wrong form.
type maintenanceInputs struct {
	APIVersion scalar          `json:"apiVersion"`
	Kind       scalar          `json:"kind"`
	Windows    json.RawMessage `json:"windows"`
	Freezes    json.RawMessage `json:"freezes"`
	Estimate   scalar          `json:"estimate"`
	Jitter     scalar          `json:"jitter"`

	MaxUnavailable scalar          `json:"maxUnavailable"`
	Pools          json.RawMessage `json:"pools"`
}

type poolInputs struct {
	Name           scalar          `json:"name"`
	Selector       scalar          `json:"selector"`
	MaxUnavailable scalar          `json:"maxUnavailable"`
	PauseAfter     scalar          `json:"pauseAfter"`
	Windows        json.RawMessage `json:"windows"`
	Freezes        json.RawMessage `json:"freezes"`
	Estimate       scalar          `json:"estimate"`
	Jitter         scalar          `json:"jitter"`
}

// pools checks the pools that are written. A field that one leaves out is as in others.
func (c *checks) pools(field string, raw json.RawMessage, others Pool) []Pool {
	if absent(raw) {
		return nil
	}
	var entries []json.RawMessage
	if json.Unmarshal(raw, &entries) != nil {
		c.add(&InvalidError{Field: field, Want: `must be a list of pools with "name" and "selector"`})
	}
	var out []Pool
	for i, entry := range entries {
		at := fmt.Sprintf("%s[%d]", field, i)
		p := c.pool(at, entry, others)
		if p.Name != "" && slices.ContainsFunc(out, func(q Pool) bool { return q.Name == p.Name }) {
			c.refuse(at+".name", p.Name, "is there twice")
		}
		out = append(out, p)
	}
	return out
}

func (c *checks) pool(at string, raw json.RawMessage, others Pool) Pool {
	var in poolInputs
	if absent(raw) {
		raw = json.RawMessage("{}") // the checks then name the missing fields
	}
	if !c.mapping(at, raw, &in) {
		return Pool{}
	}
	p := others
	p.Name = string(in.Name)
	// It is a part of the name of a Lease, and users type it.
	if p.Name == "" {
		c.add(&InvalidError{Field: at + ".name", Want: "is missing: name the pool, like research"})
	} else {
		c.refuseEach(at+".name", p.Name, validation.IsDNS1123Label(p.Name))
	}
	p.Selector = c.nodeSelector(at+".selector", in.Selector)
	if windows := c.windows(at+".windows", in.Windows); windows != nil {
		p.Schedule.Windows = windows
	}
	p.Schedule.Freezes = slices.Concat(others.Schedule.Freezes, c.freezes(at+".freezes", in.Freezes))
	c.estimateAndJitter(at+".", in.Estimate, in.Jitter, &p)
	p.MaxUnavailable = ifWritten(at+".maxUnavailable", in.MaxUnavailable, c.limit)
	p.PauseAfter = DefaultPauseAfter
	if in.PauseAfter != "" {
		p.PauseAfter = c.pauseAfter(at+".pauseAfter", in.PauseAfter)
	}
	return p
}

// estimateAndJitter checks those two, if they are written.
func (c *checks) estimateAndJitter(within string, estimate, jitter scalar, p *Pool) {
	if estimate != "" {
		p.Estimate = c.duration(within+"estimate", estimate, time.Second, 24*time.Hour)
	}
	if jitter != "" {
		p.Jitter = c.duration(within+"jitter", jitter, 0, 24*time.Hour)
	}
}

func (c *checks) nodeSelector(field string, text scalar) labels.Selector {
	const forms = `write a label selector, like "pool=research", or "nvidia.com/gpu.present" for all nodes with GPUs`
	selector, err := labels.Parse(string(text))
	switch {
	case err != nil:
		c.refuse(field, string(text), fmt.Sprintf("is none: %s: %v", forms, err))
		return labels.Nothing()
	case selector.Empty():
		c.add(&InvalidError{Field: field, Want: "is missing or empty: " + forms})
	}
	return selector
}

// noLimit is the value of maxUnavailable for no limit.
const noLimit = "none"

func (c *checks) limit(field string, value scalar) *Limit {
	number, percentage := strings.CutSuffix(string(value), "%")
	n, err := strconv.Atoi(number)
	switch {
	case value == noLimit:
		return nil
	case err == nil && percentage && n >= 1 && n <= 100:
		return &Limit{Percent: n}
	case err == nil && !percentage && n >= 0:
		return &Limit{Nodes: n}
	}
	c.refuse(field, string(value), `must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`)
	return nil
}

func (c *checks) pauseAfter(field string, value scalar) int {
	n, err := strconv.Atoi(string(value))
	if err != nil || n < 0 || n > maxCount {
		c.refuse(field, string(value), fmt.Sprintf("must be a number of failures from 1 to %d, or 0 for never", maxCount))
	}
	return n
}
