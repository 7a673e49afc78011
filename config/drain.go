package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Drain says how the agent evicts pods.
type Drain struct {
	Mode          DrainMode     // for pods that no rule fits
	GradualFor    time.Duration // of DrainGradual: how long pods may take to end by themselves
	AfterDeadline AfterDeadline
	DeleteGrace   time.Duration     // longest grace that a deletion after the deadline leaves a pod; never 0
	UnmanagedPods DrainAction       // DrainEvict or DrainRefuse: pods that no controller brings back
	EmptyDir      DrainAction       // DrainEvict or DrainRefuse: pods whose files on an emptyDir would be lost
	OnUncordon    OnUncordon        // the agent's reaction when a user or another tool lifts its cordon during a change
	Rules         []DrainRule       // the first that fits a pod counts
	Clients       []labels.Selector // pods that hold no GPU but keep NVIDIA's library open
}

// DrainMode says when the agent evicts pods.
type DrainMode string

// The modes.
const (
	// DrainAtOnce evicts them as soon as the node is fenced.
	DrainAtOnce DrainMode = "atOnce"
	// DrainGradual lets them end by themselves behind the fence for a time, and then evicts the others.
	DrainGradual DrainMode = "gradual"
)

// AfterDeadline says what the agent does about pods that are still there at their deadline.
type AfterDeadline string

// The values of AfterDeadline.
const (
	// AfterDeadlineUndo gives the change up, and the node back as it was.
	AfterDeadlineUndo AfterDeadline = "undo"
	// AfterDeadlineDelete deletes the pods, which no disruption budget prevents.
	AfterDeadlineDelete AfterDeadline = "delete"
)

// DrainAction says what the agent does about a pod that has to leave.
type DrainAction string

// The actions.
const (
	// DrainEvict evicts it through the Eviction API.
	DrainEvict DrainAction = "evict"
	// DrainWait lets it end by itself, for a time.
	DrainWait DrainAction = "wait"
	// DrainRefuse leaves it alone: the agent does not begin a change for which it would have to leave.
	DrainRefuse DrainAction = "refuse"
)

// OnUncordon says what the agent does when a user or another tool lifts its cordon during a change.
type OnUncordon string

// The values of OnUncordon.
const (
	// UncordonCancel gives the change up.
	UncordonCancel OnUncordon = "cancel"
	// UncordonRefence cordons the node again: the uncordon was a mistake.
	UncordonRefence OnUncordon = "refence"
)

// DrainRule says what the agent does about certain pods.
type DrainRule struct {
	Namespaces []string        // none for all
	Selector   labels.Selector // labels.Everything() where none is written
	Action     DrainAction
	For        time.Duration // of DrainWait: how long a pod may take to end by itself
}

// DrainOverrides are a profile's values in place of those of the settings. A zero value leaves that of the settings.
type DrainOverrides struct {
	Mode          DrainMode
	GradualFor    time.Duration
	Deadline      time.Duration // in place of Timeouts.Drain
	AfterDeadline AfterDeadline
	DeleteGrace   time.Duration
	UnmanagedPods DrainAction
	EmptyDir      DrainAction
	OnUncordon    OnUncordon
	Rules         []DrainRule // before those of the settings, so that they count first
}

// With gives the settings of a node that has a profile with these overrides, which may be nil.
func (s Settings) With(o *DrainOverrides) Settings {
	if o == nil {
		return s
	}
	s.Drain.Mode = cmp.Or(o.Mode, s.Drain.Mode)
	s.Drain.GradualFor = cmp.Or(o.GradualFor, s.Drain.GradualFor)
	s.Timeouts.Drain = cmp.Or(o.Deadline, s.Timeouts.Drain)
	s.Drain.AfterDeadline = cmp.Or(o.AfterDeadline, s.Drain.AfterDeadline)
	s.Drain.DeleteGrace = cmp.Or(o.DeleteGrace, s.Drain.DeleteGrace)
	s.Drain.UnmanagedPods = cmp.Or(o.UnmanagedPods, s.Drain.UnmanagedPods)
	s.Drain.EmptyDir = cmp.Or(o.EmptyDir, s.Drain.EmptyDir)
	s.Drain.OnUncordon = cmp.Or(o.OnUncordon, s.Drain.OnUncordon)
	s.Drain.Rules = slices.Concat(o.Rules, s.Drain.Rules)
	return s
}

// Fields of the settings and of a profile, within drain, that an Allowance names.
const (
	FieldUnmanagedPods = "unmanagedPods"
	FieldEmptyDir      = "emptyDir"
)

// Flags of kubectl gpuslice apply that allow for one change what these fields refuse.
const (
	FlagForceUnmanaged     = "force-unmanaged"
	FlagDeleteEmptyDirData = "delete-emptydir-data"
)

// Allowance is the value of AnnotationAllowEviction that lets the change for which a label of the node asks evict the pods that these fields
// are about.
func Allowance(label, name string, fields ...string) string {
	return strings.Join(append([]string{label + "=" + name}, fields...), " ")
}

// maxAllowance is the longest Allowance: the longest label and value, and the fields.
const maxAllowance = 256

// ParseAllowance returns what an Allowance is about, as "gpuslice.io/profile=research", and what it allows, which may be nothing. It is not ok
// if the text is none, or says more than one.
func ParseAllowance(text string) (asked string, allowed DrainOverrides, ok bool) {
	words := strings.Fields(text)
	if len(text) > maxAllowance || len(words) == 0 {
		return "", allowed, false
	}
	for _, field := range words[1:] {
		switch field {
		case FieldUnmanagedPods:
			allowed.UnmanagedPods = DrainEvict
		case FieldEmptyDir:
			allowed.EmptyDir = DrainEvict
		default:
			return "", DrainOverrides{}, false
		}
	}
	return words[0], allowed, true
}

// Allows reports whether the overrides allow anything that the settings may refuse.
func (o *DrainOverrides) Allows() bool {
	return o.UnmanagedPods == DrainEvict || o.EmptyDir == DrainEvict
}

// Allowing returns the overrides for a change that is asked for by these labels, after what text allows: an Allowance, or anything. A text about
// another label or value allows nothing.
func (o *DrainOverrides) Allowing(text string, labels map[string]string) *DrainOverrides {
	asked, allowed, ok := ParseAllowance(text)
	label, name, _ := strings.Cut(asked, "=")
	if !ok || name == "" || labels[label] != name || !allowed.Allows() {
		return o
	}
	if o != nil {
		merged := *o
		merged.UnmanagedPods = cmp.Or(allowed.UnmanagedPods, o.UnmanagedPods)
		merged.EmptyDir = cmp.Or(allowed.EmptyDir, o.EmptyDir)
		allowed = merged
	}
	return &allowed
}

// Recover says after which other tools the agent restores a node.
type Recover struct {
	Adopt []string // names of the tools: AdoptMIGManager
}

// AdoptMIGManager restores the labels that NVIDIA's k8s-mig-manager leaves behind when it dies in the middle.
const AdoptMIGManager = "mig-manager"

// The defaults of draining, and what bounds them.
const (
	// DefaultGradualFor: long enough for a working day in a notebook, or a night's training, to come to its end.
	DefaultGradualFor = 8 * time.Hour
	minWait           = time.Minute         // a shorter wait is most likely a slip
	maxWait           = 30 * 24 * time.Hour // longer than any job runs that saves checkpoints

	// DefaultDeleteGrace is Kubernetes' own grace for pods that name none.
	DefaultDeleteGrace = 30 * time.Second

	// DefaultUnit: systemd itself gives a service 90 s to stop before it kills it.
	DefaultUnit = 2 * time.Minute

	// minDeleteGrace: a deletion with grace 0 takes the pod out of the API server at once, while it still runs.
	minDeleteGrace = time.Second
)

// defaultOperands are NVIDIA's operands that keep the library or the driver open, clients before their servers.
func defaultOperands() []string {
	return []string{
		LabelOperandPrefix + "dcgm-exporter",
		LabelOperandPrefix + "dcgm",
		LabelOperandPrefix + "client", // for pods of others, that want to be paused with the operands
		LabelOperandPrefix + "gpu-feature-discovery",
		LabelOperandPrefix + "device-plugin",
	}
}

// defaultUnits are services that NVIDIA ships with DGX systems and data centre drivers, clients before their servers.
func defaultUnits() []string {
	return []string{
		"nvsm.service", "nvsm-mqtt.service", "nvsm-core.service", "nvsm-api-gateway.service", "nvsm-notifier.service",
		"nv_peer_mem.service", "dcgm-exporter.service", "nvidia-dcgm.service", "dcgm.service", "nvidia-persistenced.service",
	}
}

// unitTypes are the units that can be stopped and started again. A slice or a scope would take along all that runs in it.
var unitTypes = []string{".service", ".socket", ".path", ".timer"}

// vitalUnits are units without which the node, its pods or the agent would end. Names are without the type.
var vitalUnits = []string{
	"kubelet", "k3s", "k3s-agent", "rke2-agent", "rke2-server", "k0sworker", "k0scontroller", // each is or holds the kubelet
	"containerd", "crio", "docker", "cri-docker",
	"dbus", "dbus-broker",
}

func (c *checks) drain(field string, in drainInputs) Drain {
	return Drain{
		Mode:          c.drainMode(field+".mode", in.Mode),
		GradualFor:    c.gradualFor(field+".gradualFor", in.GradualFor),
		AfterDeadline: c.afterDeadline(field+".afterDeadline", in.AfterDeadline),
		DeleteGrace:   c.deleteGrace(field+".deleteGrace", in.DeleteGrace),
		UnmanagedPods: c.evictOrRefuse(field+".unmanagedPods", in.UnmanagedPods),
		EmptyDir:      c.evictOrRefuse(field+".emptyDir", in.EmptyDir),
		OnUncordon:    c.onUncordon(field+".onUncordon", in.OnUncordon),
		Rules:         c.drainRules(field+".rules", in.Rules),
		Clients:       c.selectors(field+".clients", in.Clients, "the clients"),
	}
}

// drainOverrides checks those of a profile. A field that is not written leaves the value of the settings.
func (c *checks) drainOverrides(raw json.RawMessage) *DrainOverrides {
	const field = "drain"
	var in drainOverrideInputs
	if absent(raw) || !c.mapping(field, raw, &in) {
		return nil
	}
	return &DrainOverrides{
		Mode:          ifWritten(field+".mode", in.Mode, c.drainMode),
		GradualFor:    ifWritten(field+".gradualFor", in.GradualFor, c.gradualFor),
		Deadline:      ifWritten(field+".deadline", in.Deadline, c.drainDeadline),
		AfterDeadline: ifWritten(field+".afterDeadline", in.AfterDeadline, c.afterDeadline),
		DeleteGrace:   ifWritten(field+".deleteGrace", in.DeleteGrace, c.deleteGrace),
		UnmanagedPods: ifWritten(field+".unmanagedPods", in.UnmanagedPods, c.evictOrRefuse),
		EmptyDir:      ifWritten(field+".emptyDir", in.EmptyDir, c.evictOrRefuse),
		OnUncordon:    ifWritten(field+".onUncordon", in.OnUncordon, c.onUncordon),
		Rules:         c.drainRules(field+".rules", in.Rules),
	}
}

// ifWritten checks a value that the file may leave out.
func ifWritten[T any](field string, value scalar, check func(string, scalar) T) T {
	if value == "" {
		var none T
		return none
	}
	return check(field, value)
}

func (c *checks) drainMode(field string, value scalar) DrainMode {
	return DrainMode(c.oneOf(field, value, string(DrainAtOnce), string(DrainGradual)))
}

func (c *checks) gradualFor(field string, value scalar) time.Duration {
	return c.duration(field, value, minWait, maxWait)
}

func (c *checks) afterDeadline(field string, value scalar) AfterDeadline {
	return AfterDeadline(c.oneOf(field, value, string(AfterDeadlineUndo), string(AfterDeadlineDelete)))
}

func (c *checks) deleteGrace(field string, value scalar) time.Duration {
	return c.duration(field, value, minDeleteGrace, time.Hour)
}

func (c *checks) evictOrRefuse(field string, value scalar) DrainAction {
	return DrainAction(c.oneOf(field, value, string(DrainEvict), string(DrainRefuse)))
}

func (c *checks) onUncordon(field string, value scalar) OnUncordon {
	return OnUncordon(c.oneOf(field, value, string(UncordonCancel), string(UncordonRefence)))
}

func (c *checks) drainDeadline(field string, value scalar) time.Duration {
	return c.duration(field, value, time.Minute, 7*24*time.Hour)
}

func (c *checks) drainRules(field string, in []drainRuleInputs) []DrainRule {
	var out []DrainRule
	for i, rule := range in {
		out = append(out, c.drainRule(fmt.Sprintf("%s[%d]", field, i), rule))
	}
	return out
}

func (c *checks) drainRule(at string, in drainRuleInputs) DrainRule {
	rule := DrainRule{
		Namespaces: c.elements(at+".namespaces", in.Namespaces, validation.IsDNS1123Label),
		Selector:   labels.Everything(),
		Action:     DrainAction(c.oneOf(at+".action", in.Action, string(DrainEvict), string(DrainWait), string(DrainRefuse))),
	}
	if in.Selector != "" {
		rule.Selector = c.selector(at+".selector", in.Selector, "the pods that it is about")
	} else if len(in.Namespaces) == 0 {
		c.add(&InvalidError{Field: at, Want: `fits every pod: write "namespaces", "selector" or both`})
	}
	switch {
	case rule.Action == DrainWait && in.For == "":
		c.add(&InvalidError{Field: at + ".for", Want: `must say how long is waited, like "8h"`})
	case rule.Action == DrainWait:
		rule.For = c.duration(at+".for", in.For, minWait, maxWait)
	case rule.Action != "" && in.For != "":
		c.refuse(at+".for", string(in.For), fmt.Sprintf("goes with action wait, not with %s", rule.Action))
	}
	return rule
}

func (c *checks) operands(field string, in list) []string {
	return c.elements(field, in, func(key string) []string {
		name, ok := strings.CutPrefix(key, LabelOperandPrefix)
		switch {
		case !ok || name == "":
			return []string{"must begin with " + LabelOperandPrefix + ", as the labels do by which NVIDIA's GPU operator deploys its operands"}
		case name == "driver":
			return []string{"is the driver, without which no GPU can be changed"}
		}
		return validation.IsQualifiedName(key)
	})
}

func (c *checks) units(field string, in list) []string {
	return c.elements(field, in, func(unit string) []string {
		kind := path.Ext(unit)
		name := strings.TrimSuffix(unit, kind)
		switch {
		case !slices.Contains(unitTypes, kind):
			return []string{"must be the name of a systemd unit with its type, which is " + strings.Join(unitTypes, " or ")}
		case name == "" || len(unit) > 255 || strings.HasPrefix(name, "@") || strings.Trim(name, unitCharacters) != "":
			return []string{"is not a name that systemd allows"}
		case strings.HasSuffix(name, "@"):
			return []string{`is a template: name its instances, like "` + name + `0` + kind + `"`}
		case slices.Contains(vitalUnits, name) || strings.HasPrefix(name, "systemd-"):
			return []string{"is never stopped: the node and its pods live by it"}
		}
		return nil
	})
}

// unitCharacters are those that systemd.unit(5) allows in a name.
const unitCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789:-_.\\@"

func (c *checks) adopt(field string, in list) []string {
	return c.elements(field, in, func(name string) []string {
		if name != AdoptMIGManager {
			return []string{"must be " + AdoptMIGManager}
		}
		return nil
	})
}

// elements checks the elements of a list one by one, and refuses one that is there twice. A list without elements is nil.
func (c *checks) elements(field string, in list, problems func(string) []string) []string {
	var out []string
	for i, element := range in {
		at := fmt.Sprintf("%s[%d]", field, i)
		c.refuseEach(at, string(element), problems(string(element)))
		if slices.Contains(out, string(element)) {
			c.refuse(at, string(element), "is there twice")
		}
		out = append(out, string(element))
	}
	return out
}
