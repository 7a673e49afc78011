package config

import (
	"cmp"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/check"
)

// Drain says how pods leave.
type Drain struct {
	Eviction
	// Closed to new pods while pods leave: node, or devices: those of NVIDIA's DRA driver that go. The node is then closed after that.
	Fence DrainFence `json:"fence"`
	// Label selectors of pods that keep NVIDIA's library open without holding a GPU.
	Clients []labels.Selector `json:"clients" whose:"the clients"`
}

// Eviction has the settings that a profile may override. A zero value in a profile keeps the settings' value.
type Eviction struct {
	// When the agent evicts pods that no rule fits: atOnce, or gradual: after gradualFor, until when they may end by themselves.
	Mode DrainMode `json:"mode"`
	// How long they may, with gradual; and how long pods may take to leave that are asked behind the cordon, if no rule says it.
	GradualFor time.Duration `json:"gradualFor" within:"1m,720h"` // a shorter wait is most likely a slip; no job runs longer that saves checkpoints
	// If pods are still there at the deadline: undo the change, or delete them.
	AfterDeadline AfterDeadline `json:"afterDeadline"`
	// The longest grace period of a deleted pod.
	DeleteGrace time.Duration `json:"deleteGrace" within:"1s,1h"` // with grace 0 the API server would forget a pod at once that still runs
	// Pods that no controller recreates.
	UnmanagedPods DrainAction `json:"unmanagedPods" jsonschema:"enum=evict,enum=refuse"`
	// Pods that have files on disk in an emptyDir.
	EmptyDir DrainAction `json:"emptyDir" jsonschema:"enum=evict,enum=refuse"`
	// What happens when a user or another tool lifts the agent's cordon.
	OnUncordon OnUncordon `json:"onUncordon"`
	// Rules for certain pods; the first that fits counts. A profile's rules come before the settings' rules.
	Rules []DrainRule `json:"rules"`
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

// Values lists the modes.
func (DrainMode) Values() []string { return check.Words(DrainAtOnce, DrainGradual) }

// AfterDeadline says what the agent does about pods that are still there at their deadline.
type AfterDeadline string

// The values of AfterDeadline.
const (
	// AfterDeadlineUndo gives up the change, and restores the node.
	AfterDeadlineUndo AfterDeadline = "undo"
	// AfterDeadlineDelete deletes the pods, which no disruption budget prevents.
	AfterDeadlineDelete AfterDeadline = "delete"
)

// Values lists them.
func (AfterDeadline) Values() []string { return check.Words(AfterDeadlineUndo, AfterDeadlineDelete) }

// DrainAction says what the agent does about a pod that has to leave.
type DrainAction string

// The actions.
const (
	// DrainEvict evicts it through the Eviction API.
	DrainEvict DrainAction = "evict"
	// DrainWait lets it end by itself, for a time.
	DrainWait DrainAction = "wait"
	// DrainAsk requests its eviction behind the cordon, again and again up to a deadline, whatever refuses it before.
	DrainAsk DrainAction = "ask"
	// DrainRefuse keeps it: the agent begins no change that needs it to leave.
	DrainRefuse DrainAction = "refuse"
)

// Values lists the actions.
func (DrainAction) Values() []string {
	return check.Words(DrainEvict, DrainWait, DrainAsk, DrainRefuse)
}

// DrainFence says what the agent closes to new pods while pods leave.
type DrainFence string

// The values of DrainFence.
const (
	DrainFenceNode    DrainFence = "node"
	DrainFenceDevices DrainFence = "devices"
)

// Values lists the values.
func (DrainFence) Values() []string { return check.Words(DrainFenceNode, DrainFenceDevices) }

// OnUncordon says what the agent does when a user or another tool lifts its cordon during a change.
type OnUncordon string

// The values of OnUncordon.
const (
	// UncordonCancel gives the change up.
	UncordonCancel OnUncordon = "cancel"
	// UncordonRefence cordons the node again, as the uncordon was a mistake.
	UncordonRefence OnUncordon = "refence"
)

// Values lists them.
func (OnUncordon) Values() []string { return check.Words(UncordonCancel, UncordonRefence) }

// DrainRule says what the agent does with the pods of some namespaces, of a label selector, or both.
type DrainRule struct {
	// None for all.
	Namespaces []string        `json:"namespaces" form:"dnsLabel"`
	Selector   labels.Selector `json:"selector" whose:"the pods that it is about"`
	// evict: like any other pod; wait: they may end by themselves for a time; ask: a budget or webhook that keeps them does not hold the change up, and
	// the agent requests their eviction behind the cordon until they go; refuse: no change begins that needs them to leave.
	Action DrainAction `json:"action" jsonschema:"required"`
	// How long wait waits, and how long after the cordon pods may take that are asked; for ask gradualFor without it.
	For time.Duration `json:"for" within:"1m,720h"`
}

// Check checks what a rule needs. One without a selector has labels.Everything().
func (r *DrainRule) Check(c *check.Mistakes, at string, in check.Written) {
	if r.Selector == nil {
		r.Selector = labels.Everything()
		if in.Text("selector") == "" && len(r.Namespaces) == 0 {
			c.Add(&check.InvalidError{Field: at, Want: `fits every pod: write "namespaces", "selector" or both`})
		}
	}
	switch text := in.Text("for"); {
	case r.Action == DrainWait && text == "":
		c.Add(&check.InvalidError{Field: at + ".for", Want: `must say how long to wait, like "8h"`})
	case r.Action != DrainWait && r.Action != DrainAsk && r.Action != "" && text != "":
		c.Refuse(at+".for", text, fmt.Sprintf("needs action wait or ask, not %s", r.Action))
	}
}

// DrainOverrides are a profile's drain settings, in place of the general ones.
type DrainOverrides struct {
	// How long pods have to leave, in place of timeouts.drain.
	Deadline time.Duration `json:"deadline" within:"1m,168h"`
	Eviction
}

// With returns the settings of a node with a profile of these overrides, which may be nil.
func (s Settings) With(o *DrainOverrides) Settings {
	if o == nil {
		return s
	}
	rules := slices.Concat(o.Rules, s.Drain.Rules)
	of, over := reflect.ValueOf(&s.Drain.Eviction).Elem(), reflect.ValueOf(o.Eviction)
	for i := range over.NumField() {
		if !over.Field(i).IsZero() {
			of.Field(i).Set(over.Field(i))
		}
	}
	s.Drain.Rules = rules
	s.Timeouts.Drain = cmp.Or(o.Deadline, s.Timeouts.Drain)
	return s
}

// Fields of the settings and of a profile, within drain, that an Allowance names.
const (
	FieldUnmanagedPods = "unmanagedPods"
	FieldEmptyDir      = "emptyDir"
)

// AskedAgain in an Allowance allows nothing. It says that a user requests what a label has requested since before the first agent came.
const AskedAgain = "again"

// Flags of kubectl gpuslice apply. They allow for one change what these fields refuse.
const (
	FlagForceUnmanaged     = "force-unmanaged"
	FlagDeleteEmptyDirData = "delete-emptydir-data"
)

// Allowance returns a value for AnnotationAllowEviction: the change that this label requests may evict the pods that these fields are about.
func Allowance(label, name string, fields ...string) string {
	return strings.Join(append([]string{label + "=" + name}, fields...), " ")
}

// maxAllowance is the longest Allowance: the longest label and value, and the fields.
const maxAllowance = 256

// ParseAllowance returns an Allowance's request, "gpuslice.io/profile=research", and what it allows, which may be nothing. Any other text is not ok.
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
		case AskedAgain:
		default:
			return "", DrainOverrides{}, false
		}
	}
	return words[0], allowed, true
}

// Allows reports whether the overrides allow anything that the settings may refuse.
func (d *DrainOverrides) Allows() bool {
	return d.UnmanagedPods == DrainEvict || d.EmptyDir == DrainEvict
}

// Allowing returns the overrides for the change that these labels request, with what text allows. text is an Allowance, or anything else; one for
// another label or value allows nothing.
func (d *DrainOverrides) Allowing(text string, labels map[string]string) *DrainOverrides {
	asked, allowed, ok := ParseAllowance(text)
	label, name, _ := strings.Cut(asked, "=")
	if !ok || name == "" || labels[label] != name || !allowed.Allows() {
		return d
	}
	if d != nil {
		merged := *d
		merged.UnmanagedPods = cmp.Or(allowed.UnmanagedPods, d.UnmanagedPods)
		merged.EmptyDir = cmp.Or(allowed.EmptyDir, d.EmptyDir)
		allowed = merged
	}
	return &allowed
}

// Recover says which other tools' remains the agent restores.
type Recover struct {
	// Names of these tools.
	Adopt []string `json:"adopt" jsonschema:"enum=mig-manager"`
}

// AdoptMIGManager restores the labels that NVIDIA's k8s-mig-manager leaves behind when it dies during a change.
const AdoptMIGManager = "mig-manager"

// The defaults of draining.
const (
	// DefaultGradualFor: long enough for a working day in a notebook, or a night's training, to end.
	DefaultGradualFor = 8 * time.Hour
	// DefaultDeleteGrace is Kubernetes' own grace for pods that name none.
	DefaultDeleteGrace = 30 * time.Second
	// DefaultUnit: systemd itself gives a service 90 s to stop before it kills it.
	DefaultUnit = 2 * time.Minute
)

// defaultOperands are NVIDIA's operands that keep the library or the driver open, clients before their servers.
func defaultOperands() []string {
	return []string{
		LabelOperandPrefix + "dcgm-exporter",
		LabelOperandPrefix + "dcgm-exporter-dra", // those of a GPUCluster, which have claims to all GPUs of the node
		LabelOperandPrefix + "dcgm",
		LabelOperandPrefix + "dcgm-dra",
		LabelOperandPrefix + "dra-validator",
		LabelOperandPrefix + "client", // for other pods that are paused with the operands
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

// unitTypes are the types of units that can be stopped and started again. Stopping a slice or a scope would stop all that runs in it.
var unitTypes = []string{".service", ".socket", ".path", ".timer"}

// vitalUnits are units that the node, its pods or the agent need to run. Names are without the type.
var vitalUnits = []string{
	"kubelet", "k3s", "k3s-agent", "rke2-agent", "rke2-server", "k0sworker", "k0scontroller", // each is or holds the kubelet
	"containerd", "crio", "docker", "cri-docker",
	"dbus", "dbus-broker",
}

func init() {
	check.Forms["operand"], check.Forms["unit"], check.Forms["startupTaint"] = operandProblems, unitProblems, startupTaintProblems
}

func operandProblems(key string) []string {
	name, ok := strings.CutPrefix(key, LabelOperandPrefix)
	switch {
	case !ok || name == "":
		return []string{"must begin with " + LabelOperandPrefix + ", like the labels of the operands of NVIDIA's GPU operator"}
	case name == "driver":
		return []string{"is the driver, which every change of a GPU needs"}
	}
	return validation.IsQualifiedName(key)
}

func unitProblems(unit string) []string {
	kind := path.Ext(unit)
	name := strings.TrimSuffix(unit, kind)
	switch {
	case !slices.Contains(unitTypes, kind):
		return []string{"must be the name of a systemd unit with its type: " + strings.Join(unitTypes, " or ")}
	case name == "" || len(unit) > 255 || strings.HasPrefix(name, "@") || strings.Trim(name, unitCharacters) != "":
		return []string{"is not a name that systemd allows"}
	case strings.HasSuffix(name, "@"):
		return []string{`is a template: name its instances, like "` + name + `0` + kind + `"`}
	case slices.Contains(vitalUnits, name) || strings.HasPrefix(name, "systemd-"):
		return []string{"is never stopped: the node and its pods need it"}
	}
	return nil
}

// unitCharacters are the characters that systemd.unit(5) allows in a name.
const unitCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789:-_.\\@"
