// Package journal keeps what the agent must restore. The agent writes a journal before it changes anything, and removes it in the same write as its last
// change. It writes first into a file of the host that only root can write, then into the node's annotation, for users to read.
//
// Other programs and users can write and delete the node object. So the agent continues from the host's record, and believes the annotation only if the
// record says that this host's agent wrote it. The record also has what the agent has learnt here.
package journal

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	strictjson "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// journalVersion is the version of the journal's format. Every version has the field version. A newer agent may have to restore things that this one does
// not know, so Parse refuses a journal of another version.
const journalVersion = 1

// Journal is what the agent must restore on the node: an annotation that it writes before it changes anything, and removes in the same write as its last
// change. Of the change's progress it holds only the facts that the agent cannot observe: whether the change was given up, whether the node was released
// until a reboot, and the boots that the agent has requested a reboot in. The agent observes the rest.
//
// It has only types of this project, so that no library's update can make an old journal unreadable.
type Journal struct {
	Version          int                `json:"version"`
	Summary          string             `json:"summary"`               // all of it for users, in kubectl describe node; the agent never reads it
	Operation        string             `json:"operation"`             // identifies this change in the logs of all agents that work on it
	Target           string             `json:"target"`                // the config that the label requested when the change began
	Fingerprint      string             `json:"fingerprint,omitempty"` // the fingerprint of that config, from when the change last began
	BootID           string             `json:"bootID"`                // the node's boot when it began
	Started          time.Time          `json:"started"`               // when it began
	Cordoned         bool               `json:"cordoned"`              // the change has fenced the node
	Closed           []string           `json:"closed,omitempty"`      // devices that claims are kept from until the change fences the node
	WasUnschedulable bool               `json:"wasUnschedulable"`      // the node was cordoned before the change
	Verified         bool               `json:"verified"`              // kubelet had the devices of the GPUs when it began
	Previous         []GPULayout        `json:"previous"`              // the former layout of the GPUs that it changes
	Strategy         config.MIGStrategy `json:"strategy,omitempty"`    // MIG strategy in the device plugin's environment or arguments
	Operands         []string           `json:"operands"`              // UIDs of the pods of the device plugin or DRA driver from before the change
	ByClaims         bool               `json:"byClaims,omitempty"`    // NVIDIA's DRA driver allocated the GPUs when it began
	ModesOnly        bool               `json:"modesOnly,omitempty"`   // that driver makes the instances itself, and the agent changes MIG modes alone
	Kept             []string           `json:"kept,omitempty"`        // other tools' annotations that it sets while the fence is up
	Startups         []StartupTaint     `json:"startups,omitempty"`    // the taints that kubelet had registered the node with
	Paused           map[string]string  `json:"paused,omitempty"`      // labels of operands that it changes, with their former values
	Stopped          []string           `json:"stopped,omitempty"`     // units of the host that it stops, in that order; they were running
	Persistent       []nvml.UUID        `json:"persistent,omitempty"`  // GPUs that a lost journal had in persistence mode
	Plugin           *FormerPlugin      `json:"plugin,omitempty"`      // the device plugin's config, if it changes that
	NoReset          *NoReset           `json:"noReset,omitempty"`     // which GPUs the driver has refused to reset
	Reboots          []string           `json:"reboots,omitempty"`     // boots in which the agent has requested a reboot
	RebootAsked      time.Time          `json:"rebootAsked,omitzero"`  // when it last requested one
	Parked           bool               `json:"parked,omitempty"`      // the node is released until it is rebooted
	Forced           bool               `json:"forced,omitempty"`      // a user has said that it needs no window
	Undo             *api.Failure       `json:"undo,omitempty"`        // the change has failed: back to Previous
}

// KeepsPodsAway reports whether the change keeps pods away: from the node, or from some of its devices.
func (j *Journal) KeepsPodsAway() bool { return j.Cordoned || len(j.Closed) > 0 }

// Disturbs reports whether the change keeps pods away, or operands of the GPU Operator.
func (j *Journal) Disturbs() bool { return j.KeepsPodsAway() || len(j.Paused) > 0 }

// GPULayout is the MIG mode and the instances of one GPU.
type GPULayout struct {
	GPU        nvml.UUID        `json:"gpu"`
	Index      int              `json:"index"` // of the GPU at that time
	MIG        bool             `json:"mig"`
	Persistent bool             `json:"persistent,omitempty"` // it was in persistence mode
	Foreign    bool             `json:"foreign,omitempty"`    // the label does not name it, but the agent's reboot or reset removes its instances
	Instances  []InstanceRecord `json:"instances,omitempty"`
}

// StartupTaint is a taint that a node is registered with.
type StartupTaint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

func (s StartupTaint) taint() corev1.Taint {
	return corev1.Taint{Key: s.Key, Value: s.Value, Effect: corev1.TaintEffect(s.Effect)}
}

// Startup returns the taints that kubelet had registered the node with. The node gets them back if the change fails. The journal may be nil.
func (j *Journal) Startup() []corev1.Taint {
	if j == nil {
		return nil
	}
	var out []corev1.Taint
	for _, s := range j.Startups {
		out = append(out, s.taint())
	}
	return out
}

// StartupKeys returns their keys: those that the settings named when the change began, which need not be those of now.
func (j *Journal) StartupKeys() []string {
	var out []string
	for _, t := range j.Startup() {
		out = append(out, t.Key)
	}
	return out
}

// RecordStartup adds the node's present startup taints to those in the journal, which the agent may have removed from the node. It reports whether the
// journal has changed.
func (j *Journal) RecordStartup(seen []corev1.Taint) bool {
	before := j.Startup()
	all := slices.DeleteFunc(slices.Clone(before), func(t corev1.Taint) bool {
		return slices.ContainsFunc(seen, func(s corev1.Taint) bool { return s.MatchTaint(&t) })
	})
	all = append(all, seen...)
	j.Startups = nil
	for _, t := range all {
		j.Startups = append(j.Startups, StartupTaint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}
	return len(all) != len(before) || slices.ContainsFunc(before, func(b corev1.Taint) bool {
		return !slices.ContainsFunc(all, func(t corev1.Taint) bool { return t.MatchTaint(&b) && t.Value == b.Value })
	})
}

// InstanceRecord is one instance of a GPULayout.
type InstanceRecord struct {
	Profile string `json:"profile"`
	Start   int    `json:"start"`
	Size    int    `json:"size"`
	Compute string `json:"compute,omitempty"`
}

// RecordLayout adds the GPU's layout, unless the journal has it already. It leaves out half-made instances: they need no restoring.
func (j *Journal) RecordLayout(gpu nvml.GPU) {
	for i := range j.Previous {
		if j.Previous[i].GPU == gpu.UUID { // an administrator may have turned persistence mode on since; only the agent turns it off
			j.Previous[i].Persistent = j.Previous[i].Persistent || gpu.Persistent
			return
		}
	}
	j.Previous = append(j.Previous, LayoutOf(gpu))
}

// LayoutOf returns the layout of the GPU, without half-made instances.
func LayoutOf(gpu nvml.GPU) GPULayout {
	l := GPULayout{GPU: gpu.UUID, Index: gpu.Index, MIG: gpu.Enabled, Persistent: gpu.Persistent}
	for _, i := range gpu.Instances {
		if !i.HalfMade() {
			l.Instances = append(l.Instances, InstanceRecord{i.Profile, i.Start, i.Size, i.Compute})
		}
	}
	return l
}

// Cut returns the GPUs that have their former layout in the journal.
func (j *Journal) Cut() map[nvml.UUID]bool {
	out := map[nvml.UUID]bool{}
	for _, c := range j.Previous {
		out[c.GPU] = true
	}
	return out
}

// Matches reports whether the GPU has this layout. Half-made instances do not count.
func (l GPULayout) Matches(gpu nvml.GPU) bool {
	return gpu.Enabled == l.MIG && slices.Equal(sortedPieces(LayoutOf(gpu).Instances), sortedPieces(l.named(gpu)))
}

// FitsOn reports whether the GPU has no instance beside those of this layout. It may lack some of them.
func (l GPULayout) FitsOn(gpu nvml.GPU) bool { return covers(l.named(gpu), LayoutOf(gpu).Instances) }

// named returns the instances of the layout, by the names that the driver now has for their profiles.
func (l GPULayout) named(gpu nvml.GPU) []InstanceRecord {
	out := slices.Clone(l.Instances)
	for i, p := range out {
		out[i].Profile = gpu.Named(nvml.Placed{Profile: p.Profile, Span: nvml.Span{Start: p.Start, Size: p.Size}}).Profile
	}
	return out
}

func sortedPieces(pieces []InstanceRecord) []InstanceRecord {
	return slices.SortedFunc(slices.Values(pieces), func(a, b InstanceRecord) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Profile, b.Profile), cmp.Compare(a.Compute, b.Compute))
	})
}

// PersistentGPUs returns the GPUs that were in persistence mode.
func (j *Journal) PersistentGPUs() map[nvml.UUID]bool {
	out := map[nvml.UUID]bool{}
	for _, c := range j.Previous {
		out[c.GPU] = c.Persistent
	}
	for _, gpu := range j.Persistent {
		out[gpu] = true
	}
	return out
}

// Targets returns the former layouts as targets of the planner. It leaves out GPUs that have been lost since: the others must not wait for them.
func (j *Journal) Targets(gpus []nvml.GPU) plan.Targets {
	want := plan.Targets{}
	for _, c := range j.Previous {
		want[c.GPU] = c.Target()
	}
	for _, gpu := range gpus {
		if gpu.Lost {
			delete(want, gpu.UUID)
		}
	}
	return want
}

// Target returns the layout as a target of the planner.
func (l GPULayout) Target() plan.Target {
	target := plan.Target{Request: nvml.Request{MIG: l.MIG}, Undo: true}
	for _, p := range l.Instances {
		target.Exact = append(target.Exact,
			nvml.Placed{Profile: p.Profile, Span: nvml.Span{Start: p.Start, Size: p.Size}, Compute: p.Compute})
	}
	return target
}

// RanBefore reports whether the device plugin's pod ran before the change.
func (j *Journal) RanBefore(uid string) bool {
	for _, o := range j.Operands {
		if o == uid {
			return true
		}
	}
	return false
}

// Encode returns the text of the annotation. The error says why Parse would refuse it.
func (j *Journal) Encode() (string, error) {
	out := *j
	out.Version, out.Summary = journalVersion, j.Describe()
	b, err := json.Marshal(&out)
	if err != nil {
		return "", fmt.Errorf("encoding the journal: %w", err)
	}
	// No agent could read such a journal again, and the node would wait for a user: so the agent does not begin the change.
	if _, err := Parse(string(b)); err != nil {
		return "", fmt.Errorf("the journal of this change could not be read again: %w", err)
	}
	return string(b), nil
}

// Describe says what the agent must restore on the node, and since when.
func (j *Journal) Describe() string {
	text := "remains of an earlier change"
	if j.Target != "" {
		text = "change to " + j.Target
	}
	if j.Undo != nil {
		text += ", given up: " + string(j.Undo.Reason)
	}
	var restores []string
	switch {
	case j.Cordoned && j.WasUnschedulable:
		restores = append(restores, "the taint "+config.TaintRepartitioning+" (it was cordoned before)")
	case j.Cordoned:
		restores = append(restores, "cordon, and taint "+config.TaintRepartitioning+" if it is there")
	}
	if len(j.Closed) > 0 {
		restores = append(restores, "claims of the devices "+strings.Join(j.Closed, ", "))
	}
	if len(j.Kept) > 0 {
		restores = append(restores, "removal of the annotations "+strings.Join(j.Kept, ", "))
	}
	for _, label := range slices.Sorted(maps.Keys(j.Paused)) {
		restores = append(restores, fmt.Sprintf("label %s=%s", label, j.Paused[label]))
	}
	if len(j.Stopped) > 0 {
		restores = append(restores, "start of "+strings.Join(j.Stopped, ", "))
	}
	if n := len(j.Persistent); n > 0 {
		restores = append(restores, "persistence mode of "+sanitize.Counted(n, "GPU"))
	}
	if n := len(j.Previous); n > 0 {
		restores = append(restores, fmt.Sprintf("geometry of %s if it fails", sanitize.Counted(n, "GPU")))
	}
	if j.ChangesPlugin() {
		restores = append(restores, "the device plugin's config if it fails")
	}
	return fmt.Sprintf("%s since %s; to restore: %s", text, j.Started.UTC().Format(time.RFC3339), cmp.Or(strings.Join(restores, "; "), "nothing"))
}

// ChangesPlugin reports whether the change gives the device plugin another config.
func (j *Journal) ChangesPlugin() bool { return j.Plugin != nil && !j.Plugin.Stays }

// PausedLabels returns the labels that have their former value in the journal.
func (j *Journal) PausedLabels() map[string]bool {
	out := map[string]bool{}
	for label := range j.Paused {
		out[label] = true
	}
	return out
}

// StoppedUnits returns the units that the agent has to start again.
func (j *Journal) StoppedUnits() map[string]bool {
	out := map[string]bool{}
	for _, name := range j.Stopped {
		out[name] = true
	}
	return out
}

// Bounds of a journal. No node has as many GPUs, operands or units.
const (
	longestError = 1000      // bytes
	maxJournal   = 256 << 10 // bytes, which all annotations of a node together may take
	maxEntries   = 256
	maxSlices    = 64
)

// Parse reads the annotation, and refuses unknown fields. It returns nil for an empty annotation. Even a journal that Parse reads may be another program's:
// the host's record says whether this agent wrote it.
func Parse(annotation string) (*Journal, error) {
	if annotation == "" {
		return nil, nil
	}
	if len(annotation) > maxJournal {
		return nil, fmt.Errorf("reading the journal: it is longer than %d bytes", maxJournal)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := strictjson.UnmarshalCaseSensitivePreserveInts([]byte(annotation), &head); err != nil {
		return nil, fmt.Errorf("reading the journal: %s", sanitize.Cut(err.Error(), longestError))
	}
	if head.Version != journalVersion {
		return nil, fmt.Errorf("reading the journal: it is of version %d, and this agent knows %d", head.Version, journalVersion)
	}
	var j Journal
	strict, err := strictjson.UnmarshalStrict([]byte(annotation), &j)
	if err := errors.Join(append(strict, err)...); err != nil {
		return nil, fmt.Errorf("reading the journal: %s", sanitize.Cut(err.Error(), longestError))
	}
	if err := j.check(); err != nil {
		return nil, fmt.Errorf("reading the journal: %w", err)
	}
	return &j, nil
}

// check refuses a journal that no agent writes.
func (j *Journal) check() error {
	if max(len(j.Previous), len(j.Operands), len(j.Paused), len(j.Stopped), len(j.Reboots), len(j.Persistent), len(j.Kept), len(j.Startups),
		len(j.Closed)) > maxEntries {
		return fmt.Errorf("it has more than %d entries of a kind", maxEntries)
	}
	for label := range j.Paused {
		if !strings.HasPrefix(label, config.LabelOperandPrefix) {
			return fmt.Errorf("label %q is not an operand's: it does not begin with %s", sanitize.Cut(label, 100), config.LabelOperandPrefix)
		}
	}
	for _, key := range j.Kept {
		if !slices.Contains(config.FenceAnnotations(), key) {
			return fmt.Errorf("annotation %q is not one that the fence sets", sanitize.Cut(key, 100))
		}
	}
	for _, device := range j.Closed {
		if len(validation.IsDNS1123Label(device)) > 0 {
			return fmt.Errorf("device %q, closed to claims, is not the name of a device", sanitize.Cut(device, 100))
		}
	}
	if err := checkCuts(j.Previous); err != nil {
		return err
	}
	for _, t := range j.Startup() {
		if err := checkStartup(t); err != nil {
			return err
		}
	}
	return j.Plugin.check()
}

// checkStartup refuses a taint that no node is registered with: the agent would remove it from the node, or add it.
func checkStartup(t corev1.Taint) error {
	if t.Key != config.TaintNotReady && len(config.MayBeStartupTaint(t.Key)) > 0 {
		return fmt.Errorf("taint %q is not a startup taint", sanitize.Cut(t.Key, 100))
	}
	if len(validation.IsValidLabelValue(t.Value)) > 0 {
		return fmt.Errorf("a taint cannot have the value %q", sanitize.Cut(t.Value, 100))
	}
	if !slices.Contains([]corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute}, t.Effect) {
		return fmt.Errorf("a taint cannot have the effect %q", sanitize.Cut(string(t.Effect), 100))
	}
	return nil
}

func checkCuts(cuts []GPULayout) error {
	named := map[nvml.UUID]bool{}
	for _, c := range cuts {
		if c.GPU == "" || named[c.GPU] || len(c.Instances) > maxSlices {
			return fmt.Errorf("it cuts GPU %q twice, or into %d instances", sanitize.Cut(string(c.GPU), 100), len(c.Instances))
		}
		named[c.GPU] = true
		for _, p := range c.Instances {
			if p.Profile == "" || p.Start < 0 || p.Size < 1 || p.Start > maxSlices-p.Size {
				return fmt.Errorf("GPU %q has no instance %q of %d slices at %d", sanitize.Cut(string(c.GPU), 100), sanitize.Cut(p.Profile, 100), p.Size, p.Start)
			}
		}
	}
	return nil
}

// LayoutsBefore lists the former layouts of the GPUs, by their present index. If the driver shows no GPU, it lists them by their former index.
func (j *Journal) LayoutsBefore(gpus []nvml.GPU) []api.StatusGPU {
	var out []api.StatusGPU
	for _, c := range j.Previous {
		s := api.StatusGPU{Index: c.Index, UUID: c.GPU, MIG: c.MIG}
		if i := slices.IndexFunc(gpus, func(gpu nvml.GPU) bool { return gpu.UUID == c.GPU }); i >= 0 {
			s.Index = gpus[i].Index
		} else if len(gpus) > 0 {
			s.Index = -1
		}
		if exact := c.Target().Exact; len(exact) > 0 {
			s.Geometry = exact.String()
		}
		out = append(out, s)
	}
	return out
}

// FormerPlugin is the config that the device plugin had before a change, and how it got it.
type FormerPlugin struct {
	Way       config.Handover `json:"way"`
	Text      string          `json:"text"`                // of the file; by label, the label's value, empty for no label
	Absent    bool            `json:"absent,omitempty"`    // there was no file
	Body      string          `json:"body,omitempty"`      // text of the key that the label named, if an agent wrote it: another node's agent may remove it
	MPS       bool            `json:"mps,omitempty"`       // it shared GPUs by MPS
	Label     string          `json:"label,omitempty"`     // of the node
	Namespace string          `json:"namespace,omitempty"` // of the ConfigMap
	ConfigMap string          `json:"configMap,omitempty"` // the label names one of its keys
	Dir       string          `json:"dir,omitempty"`       // directory in which the config manager sees the keys as files
	Fallback  string          `json:"fallback,omitempty"`  // the key for nodes without the label
	Stays     bool            `json:"stays,omitempty"`     // the change keeps this config: the journal holds it while the plugin's pod is away
}

// check refuses a former config that no agent writes. Above all, its label must be the one that NVIDIA's config manager reads.
func (f *FormerPlugin) check() error {
	switch {
	case f == nil:
		return nil
	case !slices.Contains([]config.Handover{config.HandoverFile, config.HandoverRestart, config.HandoverLabel, config.HandoverConfigMap}, f.Way):
		return fmt.Errorf("the agent gives the device plugin no config by %q", sanitize.Cut(string(f.Way), 100))
	case f.Label != "" && f.Label != config.LabelDevicePluginConfig:
		return fmt.Errorf("the config manager does not read label %q", sanitize.Cut(f.Label, 100))
	case f.Body != "" && !strings.HasPrefix(f.Text, config.OwnPluginKey):
		return fmt.Errorf("key %q of a ConfigMap is not ours to write: it does not begin with %s", sanitize.Cut(f.Text, 100), config.OwnPluginKey)
	default:
		return nil
	}
}

// covers reports whether a list has all entries of the other one.
func covers[T comparable](list, other []T) bool {
	return !slices.ContainsFunc(other, func(e T) bool { return !slices.Contains(list, e) })
}

// namesMore reports whether one of its lists has a name that the other journal does not have.
func (j *Journal) namesMore(than *Journal) bool {
	return !covers(than.Operands, j.Operands) || !covers(than.Stopped, j.Stopped) || !covers(than.Closed, j.Closed) || !covers(than.Kept, j.Kept)
}

// TakesMore reports whether the journal has something to restore that the other one does not have. The other may be nil.
func (j *Journal) TakesMore(than *Journal) bool {
	if than == nil || j.Target != than.Target || j.Cordoned && !than.Cordoned || j.ChangesPlugin() && !than.ChangesPlugin() ||
		len(j.Reboots) > len(than.Reboots) || j.namesMore(than) {
		return true
	}
	former := than.PausedLabels()
	if slices.ContainsFunc(slices.Collect(maps.Keys(j.Paused)), func(label string) bool { return !former[label] }) {
		return true
	}
	startup := than.Startup()
	if slices.ContainsFunc(j.Startup(), func(t corev1.Taint) bool {
		return !slices.ContainsFunc(startup, func(s corev1.Taint) bool { return s.MatchTaint(&t) })
	}) {
		return true
	}
	cuts, persistent := than.Cut(), than.PersistentGPUs()
	return slices.ContainsFunc(j.Previous, func(c GPULayout) bool { return !cuts[c.GPU] || c.Persistent && !persistent[c.GPU] })
}
