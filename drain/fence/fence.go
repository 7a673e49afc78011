// Package fence keeps ordinary pods off a node while its GPUs change, by a cordon and a taint. It finds who has cordoned a node, which other tools
// maintain it, and the labels that pause NVIDIA's operands.
//
// It reads objects and makes patches, and never sends one. Its callers give it keys and taints.
package fence

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/managed"
)

// Fence keeps ordinary pods off a node while its GPUs change: a taint and a cordon, together with the journal of what the agent must restore. Its
// methods change nothing. They return patches for the API server, of types.MergePatchType.
//
// Every patch is guarded by the node's UID and resourceVersion: the server refuses it with a conflict (409) if the node has changed since the agent
// read it. A merge patch replaces the whole list of taints: an unguarded one would restore a taint that another program has just removed, and lose
// one that it has added. And a journal of the former state is only true of the node it was read from.
type Fence struct {
	Taint           corev1.Taint // keeps pods off; no other tool uses its key
	StartupKeys     []string     // keys of the taints of freshly registered nodes, removed once the nodes are ready
	JournalKey      string       // annotation that holds the journal
	KeepCordonedKey string       // a user's annotation to keep the node cordoned; any value counts
	ReasonKey       string       // one of Kept: the annotation that says why the node is cordoned
	ReasonPrefix    string       // begins each reason of ours
	Kept            []string     // other tools' annotations that are on the node while the fence is up

	reason string // the value of ReasonKey, without its prefix
}

// letBe is the value that makes autoscalers spare a node.
const letBe = "true"

// Keeps returns the fence with other tools' annotations: those that make autoscalers spare the node are "true", and ReasonKey has the reason. Raise
// sets those that the node does not have, and Lift and Park remove those that still have a value of ours.
func (f Fence) Keeps(annotations []string, reason string) Fence {
	f.Kept, f.reason = annotations, reason
	return f
}

// value is what Raise gives an annotation of Kept.
func (f Fence) value(key string) string {
	if key == f.ReasonKey {
		return f.ReasonPrefix + f.reason
	}
	return letBe
}

// isOurs reports whether the value of an annotation of Kept is one that this or an earlier Raise has set.
func (f Fence) isOurs(key, value string) bool {
	if key == f.ReasonKey {
		return strings.HasPrefix(value, f.ReasonPrefix)
	}
	return value == letBe
}

// Registered returns the fence with further keys of startup taints.
func (f Fence) Registered(keys []string) Fence {
	f.StartupKeys = append(slices.Clone(f.StartupKeys), keys...)
	return f
}

// KeptBy returns the annotations with a value of ours that a manager has set.
func (f Fence) KeptBy(node *corev1.Node, manager string, annotations []string) []string {
	return slices.DeleteFunc(slices.Clone(annotations), func(key string) bool {
		value, there := node.Annotations[key]
		return !there || !f.isOurs(key, value) || !slices.ContainsFunc(node.ManagedFields, func(m metav1.ManagedFieldsEntry) bool {
			return m.Manager == manager && managed.OwnsField(m, "f:metadata", "f:annotations", "f:"+key)
		})
	})
}

// Raise writes the journal, the cordon and the taint in one patch, so that a crash never leaves a cordon without a journal. Raising a fence that is
// up already is not an error. The journal must not be empty. The same patch removes spent annotations: the journal has the users' requests that they
// stood for.
func (f Fence) Raise(node *corev1.Node, journal string, spent ...string) ([]byte, error) {
	p, err := f.recording(node, journal, spent)
	if err != nil {
		return nil, fmt.Errorf("fencing node %s: %w", node.Name, err)
	}
	p.cordon(node)
	p.taints(node, f.tainted(node))
	return p.bytes()
}

// Cordon is Raise that sets no taint, and leaves one that is there.
func (f Fence) Cordon(node *corev1.Node, journal string, spent ...string) ([]byte, error) {
	p, err := f.recording(node, journal, spent)
	if err != nil {
		return nil, fmt.Errorf("fencing node %s: %w", node.Name, err)
	}
	p.cordon(node)
	return p.bytes()
}

// Record writes the journal without a fence: for a change that evicts no pod yet, or to amend a journal. It must not be empty.
func (f Fence) Record(node *corev1.Node, journal string, spent ...string) ([]byte, error) {
	p, err := f.recording(node, journal, spent)
	if err != nil {
		return nil, fmt.Errorf("recording the journal on node %s: %w", node.Name, err)
	}
	return p.bytes()
}

// Open removes the taint and leaves the cordon and the journal. Daemons such as the device plugin can then start again. The DaemonSet controller
// places no pod on a node with a NoSchedule taint that the pod does not tolerate, but its pods always tolerate the taint of a cordon. Ordinary pods
// still stay away: the same patch restores the cordon if a user or tool has lifted it, since without the taint it is all that is left of the fence.
func (f Fence) Open(node *corev1.Node) ([]byte, error) {
	p, err := f.guarded(node)
	if err != nil {
		return nil, fmt.Errorf("opening the fence of node %s: %w", node.Name, err)
	}
	p.cordon(node)
	p.taints(node, f.taintsWithoutFence(node))
	return p.bytes()
}

// Uncover is Open that does not change the cordon, even if a user or tool has lifted it.
func (f Fence) Uncover(node *corev1.Node) ([]byte, error) {
	p, err := f.guarded(node)
	if err != nil {
		return nil, fmt.Errorf("uncovering node %s: %w", node.Name, err)
	}
	p.taints(node, f.taintsWithoutFence(node))
	return p.bytes()
}

// Lift removes the taints, including all startup taints, and the journal. It also removes the cordon if uncordon is set and no user has asked to keep
// it. It does so in one patch: a journal that outlives its cordon, or the reverse, would look like unfinished work. The caller decides whether the
// cordon is the agent's to lift.
func (f Fence) Lift(node *corev1.Node, uncordon bool) ([]byte, error) {
	return f.lift(node, "", uncordon, f.taintsWithoutFence(node))
}

// LiftUnready is Lift for a freshly registered node that could not be made ready: it restores the startup taints that Open has removed, so that pods
// stay away.
func (f Fence) LiftUnready(node *corev1.Node, uncordon bool, startup ...corev1.Taint) ([]byte, error) {
	return f.lift(node, "", uncordon, f.registeredWith(node, startup))
}

// Park is LiftUnready that keeps a journal: the node takes pods again, as far as its startup taints allow, and a restore is still pending.
func (f Fence) Park(node *corev1.Node, journal string, uncordon bool, startup ...corev1.Taint) ([]byte, error) {
	if journal == "" {
		return nil, fmt.Errorf("parking the change of node %s: the journal is empty: no agent would know what to restore", node.Name)
	}
	return f.lift(node, journal, uncordon, f.registeredWith(node, startup))
}

func (f Fence) lift(node *corev1.Node, journal string, uncordon bool, taints []corev1.Taint) ([]byte, error) {
	p, err := f.guarded(node)
	if err != nil {
		return nil, fmt.Errorf("lifting the fence of node %s: %w", node.Name, err)
	}
	p.Metadata.Annotations = map[string]*string{}
	if journal != "" {
		p.Metadata.Annotations[f.JournalKey] = &journal
	} else if _, standing := node.Annotations[f.JournalKey]; standing {
		p.Metadata.Annotations[f.JournalKey] = nil
	}
	for _, key := range f.Kept {
		if value, there := node.Annotations[key]; there && f.isOurs(key, value) {
			p.Metadata.Annotations[key] = nil
		}
	}
	if _, keep := node.Annotations[f.KeepCordonedKey]; uncordon && !keep && node.Spec.Unschedulable {
		p.spec()["unschedulable"] = false
	}
	p.taints(node, taints)
	return p.bytes()
}

// IsRaised reports whether the fence's taint is on the node.
func (f Fence) IsRaised(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&f.Taint) })
}

// Startup returns the startup taints of a freshly registered node, whatever their values and effects; none of any other node.
func (f Fence) Startup(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return !f.isStartup(t) })
}

func (f Fence) isStartup(t corev1.Taint) bool { return slices.Contains(f.StartupKeys, t.Key) }

// tainted returns the node's taints with the fence's own. It keeps a fence's taint that is there already, with its time. It replaces one with our key
// and another value or effect, which another version may have left.
func (f Fence) tainted(node *corev1.Node) []corev1.Taint {
	ours := f.Taint
	for _, t := range node.Spec.Taints {
		if t.MatchTaint(&f.Taint) && t.Value == f.Taint.Value {
			ours = t
		}
	}
	return append(f.untainted(node), ours)
}

func (f Fence) untainted(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t corev1.Taint) bool { return t.Key == f.Taint.Key })
}

// taintsWithoutFence returns the node's taints without the fence's and without startup taints.
func (f Fence) taintsWithoutFence(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(f.untainted(node), f.isStartup)
}

// registeredWith returns the node's taints without the fence's and with these startup taints. Others that are there stay too: they were added after
// these were noted.
func (f Fence) registeredWith(node *corev1.Node, startup []corev1.Taint) []corev1.Taint {
	others := slices.DeleteFunc(f.untainted(node), func(t corev1.Taint) bool {
		return slices.ContainsFunc(startup, func(s corev1.Taint) bool { return s.MatchTaint(&t) })
	})
	return append(others, startup...)
}

func (f Fence) recording(node *corev1.Node, journal string, spent []string) (*patch, error) {
	if journal == "" {
		return nil, errors.New("the journal is empty: no agent would know what to restore")
	}
	p, err := f.guarded(node)
	if err != nil {
		return nil, err
	}
	p.Metadata.Annotations = map[string]*string{f.JournalKey: &journal}
	for _, key := range spent {
		p.Metadata.Annotations[key] = nil
	}
	for _, key := range f.Kept {
		if _, there := node.Annotations[key]; !there {
			p.Metadata.Annotations[key] = ptr.To(f.value(key))
		}
	}
	return p, nil
}

func (f Fence) guarded(node *corev1.Node) (*patch, error) {
	if f.JournalKey == "" || f.Taint.Key == "" || f.Taint.Effect == "" {
		return nil, fmt.Errorf("the fence needs a journal key, a taint key and an effect, and has %q, %q and %q",
			f.JournalKey, f.Taint.Key, f.Taint.Effect)
	}
	return guardedPatch(node)
}

// patch is a JSON merge patch of a node (RFC 7386): an absent field does not change, and null removes a field.
type patch struct {
	Metadata struct {
		UID             string             `json:"uid"`
		ResourceVersion string             `json:"resourceVersion"`
		Annotations     map[string]*string `json:"annotations,omitempty"`
		Labels          map[string]string  `json:"labels,omitempty"`
	} `json:"metadata"`
	Spec map[string]any `json:"spec,omitempty"`
}

// guardedPatch is a patch that the API server refuses if the node has changed, or another node has its name.
func guardedPatch(node *corev1.Node) (*patch, error) {
	if node.UID == "" || node.ResourceVersion == "" {
		return nil, fmt.Errorf("the node was not read from the API server: its uid is %q and its resourceVersion %q",
			node.UID, node.ResourceVersion)
	}
	p := &patch{}
	p.Metadata.UID = string(node.UID)
	p.Metadata.ResourceVersion = node.ResourceVersion
	return p, nil
}

func (p *patch) spec() map[string]any {
	if p.Spec == nil {
		p.Spec = map[string]any{}
	}
	return p.Spec
}

// cordon does not touch an existing cordon, so that it keeps its owner in managedFields.
func (p *patch) cordon(node *corev1.Node) {
	if !node.Spec.Unschedulable {
		p.spec()["unschedulable"] = true
	}
}

func (p *patch) taints(node *corev1.Node, want []corev1.Taint) {
	switch {
	case slices.EqualFunc(node.Spec.Taints, want, identicalTaint):
	case len(want) == 0:
		p.spec()["taints"] = nil
	default:
		p.spec()["taints"] = want
	}
}

func identicalTaint(a, b corev1.Taint) bool {
	return a.MatchTaint(&b) && a.Value == b.Value && a.TimeAdded.Equal(b.TimeAdded)
}

func (p *patch) bytes() ([]byte, error) {
	out, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("encoding the patch: %w", err)
	}
	return out, nil
}

// Tainters returns the managers that own the node's taints in managedFields: the one that wrote them last, or several that wrote the same.
func Tainters(node *corev1.Node) []string {
	return owners(node, "f:spec", "f:taints")
}

// Labelers returns the managers that own a label of the node in managedFields.
func Labelers(node *corev1.Node, label string) []string {
	return owners(node, "f:metadata", "f:labels", "f:"+label)
}

// Annotators returns the managers that own an annotation of the node in managedFields, and the time of their last write, of it or of another field.
// The time is zero if no manager is known.
func Annotators(node *corev1.Node, annotation string) (managers []string, at time.Time) {
	path := []string{"f:metadata", "f:annotations", "f:" + annotation}
	for _, m := range node.ManagedFields {
		if m.Time != nil && managed.OwnsField(m, path...) && m.Time.Time.After(at) {
			at = m.Time.Time
		}
	}
	return owners(node, path...), at
}

func owners(node *corev1.Node, path ...string) (managers []string) {
	for _, m := range node.ManagedFields {
		if managed.OwnsField(m, path...) && !slices.Contains(managers, m.Manager) {
			managers = append(managers, m.Manager)
		}
	}
	return managers
}

// controllerManager is the manager that adds and removes the taint of a cordon.
const controllerManager = "kube-controller-manager"

// atOnce is the longest time from an uncordon until the control plane removes the taint. It takes less than a second, but managedFields have whole
// seconds only, and a controller may need a moment between two writes.
const atOnce = 2 * time.Second

// Uncordoner returns when the cordon of a node was lifted, and which managers lifted it. Who is mostly not known.
//
// When is the time when the control plane removed the cordon's taint, within a second or so. It is zero while the taint is still there, if the node
// has no taint left, or if another manager has written its taints since. So callers ask as soon as they see the node without its cordon.
//
// The result who names the managers, other than ours, that own spec.unschedulable since that time, as one does that applied false on the server's side. Every
// other uncordon leaves no trace: spec.unschedulable=false is the same as no such field, so no manager owns it, and the entry of the manager that had cordoned
// keeps its time. What else a manager wrote then says nothing: a label is often set in the same second.
func Uncordoner(node *corev1.Node, ours string) (who string, when time.Time) {
	if node.Spec.Unschedulable || managed.CordonTaint(node) != nil {
		return "", time.Time{}
	}
	for _, m := range node.ManagedFields {
		if m.Manager == controllerManager && m.Time != nil && managed.OwnsField(m, "f:spec", "f:taints") {
			when = m.Time.Time
		}
	}
	if when.IsZero() {
		return "", time.Time{}
	}
	return strings.Join(ownersSince(node, when, ours), ", "), when
}

// ownersSince are the managers, other than ours and the control plane, that own spec.unschedulable by a write at that time.
func ownersSince(node *corev1.Node, when time.Time, ours string) (managers []string) {
	for _, m := range node.ManagedFields {
		other := m.Manager != ours && m.Manager != controllerManager && m.Subresource == "" && managed.OwnsField(m, "f:spec", "f:unschedulable")
		if other && m.Time != nil && m.Time.Time.Sub(when).Abs() <= atOnce && !slices.Contains(managers, m.Manager) {
			managers = append(managers, m.Manager)
		}
	}
	return managers
}
