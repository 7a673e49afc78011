package maintenance

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/window"
)

// The kind of a maintenance file.
const (
	APIVersion = "gpuslice.io/v1alpha1"
	Kind       = "Maintenance"
)

// The defaults of a maintenance file.
const (
	// DefaultEstimate: a change that evicts pods, resets GPUs and waits for the device plugin takes minutes.
	DefaultEstimate = 15 * time.Minute
	// DefaultJitter spreads the requests of hundreds of nodes to the API server, and is a small part of a window of hours.
	DefaultJitter = 5 * time.Minute
	// DefaultPauseAfter: one node may be broken, and two by chance; if three in a row fail, the fault is in the change.
	DefaultPauseAfter = 3
	// DefaultMaxUnavailable is a percentage: a mistaken change, requested of all nodes at once, takes out at most so many of them.
	DefaultMaxUnavailable = 10
)

// Without applies if there is no maintenance file.
func Without() Maintenance {
	return Maintenance{Others: Pool{MaxUnavailable: &Limit{Percent: DefaultMaxUnavailable}}}
}

// Maintenance says when changes may begin, and on how many nodes at once.
type Maintenance struct {
	Others Pool   // for nodes that no pool selects; without a name and a selector. Its limit counts the nodes of the same request
	Pools  []Pool // a node is in the first one that selects it

	// Asked returns the label of a node that counts, and the name that it requests; nil if labels are unknown. If Others has a limit, nodes outside
	// of pools with the same request form a pool.
	Asked func(node *corev1.Node) (label, name string)
}

// Pool is the maintenance of certain nodes.
type Pool struct {
	Name     string
	Selector labels.Selector
	Schedule window.Schedule
	Estimate time.Duration // assumed length of a change on a node that has measured none yet
	Jitter   time.Duration // each node has its own start, at most this long after an opening

	MaxUnavailable *Limit // nil for no limit
	ForEvictions   bool   // the limit is only for changes that evict pods
	PauseAfter     int    // failures in a row after which the pool begins no further change; 0 for never
}

// Limit is a number of nodes, or a percentage of the pool's nodes.
type Limit struct {
	Nodes   int
	Percent int // in place of Nodes, from 1 to 100; 0 for Nodes
}

// Of returns the limit of a pool with so many nodes. A percentage is rounded down, but allows one node.
func (l Limit) Of(nodes int) int {
	if l.Percent == 0 {
		return l.Nodes
	}
	return max(1, nodes*l.Percent/100)
}

// String returns the limit for messages.
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

// For returns the pool of a node.
func (m Maintenance) For(node *corev1.Node) Pool {
	for _, p := range m.Pools {
		if p.Selector.Matches(labels.Set(node.Labels)) {
			return p
		}
	}
	return m.alike(node)
}

// Named gives the pool with the name, in which a change began. Selector is that of a pool of nodes with the same request, whose name only their labels give.
func (m Maintenance) Named(name, selector string) Pool {
	for _, p := range m.Pools {
		if p.Name == name {
			return p
		}
	}
	p := m.Others
	p.Name, p.ForEvictions = name, true
	if s, err := labels.Parse(selector); err == nil && selector != "" {
		p.Selector = s
	}
	return p
}

// alike returns the pool of the nodes with the same request as this one. Its name has a dot, which no written name has.
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
	if len(validation.IsDNS1123Subdomain(config.LeasePrefix+p.Name)) > 0 { // a label's value may have other characters, too
		hash := sha256.Sum256([]byte(name))
		p.Name = kind + "." + hex.EncodeToString(hash[:6])
	}
	if node.Labels[label] == name {
		p.Selector = labels.SelectorFromSet(labels.Set{label: name})
	}
	return p
}

// Parse reads a maintenance file. It refuses unknown fields.
//
// The error joins one *InvalidError for each value that is not allowed. A file with a mistake has no windows at all: without the mistaken part the
// rest could allow changes at a time that its author forbids.
func Parse(text []byte) (Maintenance, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return Maintenance{}, fmt.Errorf("reading maintenance as YAML: %w", err)
	}
	if string(doc) == "null" {
		return Maintenance{}, fmt.Errorf("reading maintenance: the file is empty, and needs at least %q and %q",
			"apiVersion: "+APIVersion, "kind: "+Kind)
	}
	var c check.Mistakes
	file := MaintenanceFields{Estimate: DefaultEstimate, Jitter: DefaultJitter}
	c.Read("file", doc, &file)
	if len(c) > 0 {
		return Maintenance{}, errors.Join(c...)
	}
	return file.maintenance(), nil
}

// MaintenanceFields says when changes may disturb nodes, and how many of them at once.
type MaintenanceFields struct {
	APIVersion string `json:"apiVersion" jsonschema:"required,enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"required,enum=Maintenance"`
	// For nodes outside of pools, and for pools without own windows. Without any, changes may begin at any time.
	Windows []WindowFields `json:"windows" jsonschema:"minItems=1" list:"must be a list of at least one window: leave it out where there is none, or write a freeze for never"`
	// No change begins in them. They count for all pools.
	Freezes []FreezeFields `json:"freezes" list:"must be a list of freezes with \"from\" and \"to\""`
	// How long a change takes on a node that has made none yet.
	Estimate time.Duration `json:"estimate" within:"1s,24h"`
	// How long after an opening nodes begin at the latest, each at its own moment.
	Jitter time.Duration `json:"jitter" within:"0s,24h"`
	// How many nodes outside of pools, with the same request, may be unavailable at once for changes that evict pods; 10% if left out.
	MaxUnavailable *FieldLimit `json:"maxUnavailable" form:"limit"`
	// The first pool that selects a node counts.
	Pools []PoolFields `json:"pools" list:"must be a list of pools with \"name\" and \"selector\""`
}

// Check refuses two pools of one name.
func (m *MaintenanceFields) Check(c *check.Mistakes, _ string, _ check.Written) {
	there := map[string]bool{}
	for i, p := range m.Pools {
		if p.Name != "" && there[p.Name] {
			c.Refuse(fmt.Sprintf("pools[%d].name", i), p.Name, "is there twice")
		}
		there[p.Name] = true
	}
}

func (m *MaintenanceFields) maintenance() Maintenance {
	out := Maintenance{Others: Without().Others}
	out.Others.Schedule = window.Schedule{Windows: WindowsOf(m.Windows), Freezes: freezesOf(m.Freezes)}
	out.Others.Estimate, out.Others.Jitter = m.Estimate, m.Jitter
	if m.MaxUnavailable != nil {
		out.Others.MaxUnavailable = m.MaxUnavailable.limit
	}
	for _, p := range m.Pools {
		out.Pools = append(out.Pools, p.pool(out.Others))
	}
	return out
}

// PoolFields is the maintenance of certain nodes.
type PoolFields struct {
	// A part of the name of a Lease.
	Name string `json:"name" jsonschema:"required" form:"dnsLabel" missing:"is missing: name the pool, like research"`
	// A label selector of nodes.
	Selector labels.Selector `json:"selector" jsonschema:"required" missing:"is missing or empty: write a label selector, like \"pool=research\", or \"nvidia.com/gpu.present\" for all nodes with GPUs"`
	// How many of its nodes may be unavailable at once. Without it there is no limit.
	MaxUnavailable *FieldLimit `json:"maxUnavailable" form:"limit"`
	// The pool pauses after so many failed changes in a row; 0 for never.
	PauseAfter *int `json:"pauseAfter" called:"a number of failures, or 0 for never," within:"0,1000"`
	// In place of the windows of all nodes.
	Windows []WindowFields `json:"windows" jsonschema:"minItems=1" list:"must be a list of at least one window: leave it out where there is none, or write a freeze for never"`
	// In addition to the freezes of all nodes.
	Freezes []FreezeFields `json:"freezes" list:"must be a list of freezes with \"from\" and \"to\""`
	// How long a change takes on a node that has made none yet.
	Estimate time.Duration `json:"estimate" within:"1s,24h"`
	// How long after an opening nodes begin at the latest, each at its own moment.
	Jitter *time.Duration `json:"jitter" within:"0s,24h"`
}

// pool returns the pool. A missing field has the value of others.
func (p *PoolFields) pool(others Pool) Pool {
	out := others
	out.Name, out.Selector, out.PauseAfter, out.MaxUnavailable = p.Name, p.Selector, DefaultPauseAfter, nil
	if p.Windows != nil {
		out.Schedule.Windows = WindowsOf(p.Windows)
	}
	out.Schedule.Freezes = slices.Concat(others.Schedule.Freezes, freezesOf(p.Freezes))
	out.Estimate = cmp.Or(p.Estimate, out.Estimate)
	if p.Jitter != nil {
		out.Jitter = *p.Jitter
	}
	if p.MaxUnavailable != nil {
		out.MaxUnavailable = p.MaxUnavailable.limit
	}
	if p.PauseAfter != nil {
		out.PauseAfter = *p.PauseAfter
	}
	return out
}

// FieldLimit is a limit in a file: a number of nodes, a percentage, or none.
type FieldLimit struct{ limit *Limit }

// ReadText reads one.
func (f *FieldLimit) ReadText(text string) error {
	number, percentage := strings.CutSuffix(text, "%")
	n, err := strconv.Atoi(number)
	switch {
	case text == "none":
	case err == nil && percentage && n >= 1 && n <= 100:
		f.limit = &Limit{Percent: n}
	case err == nil && !percentage && n >= 0:
		f.limit = &Limit{Nodes: n}
	default:
		return errNotLimit
	}
	return nil
}

var errNotLimit = errors.New(`must be a number of nodes, 0 for none at all, a percentage from "1%" to "100%", or none for no limit`)
