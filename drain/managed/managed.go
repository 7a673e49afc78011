// Package managed reads from a node who has cordoned it, why it takes no pods, and who owns which of its fields.
package managed

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Cordoner returns who cordoned the node and since when it is cordoned; ok is false if it is not cordoned.
//
// The result who is the manager that owns spec.unschedulable in the node's managedFields, by default the first part of its user agent. A program that
// cordons a cordoned node again does not become its owner. Kubectl calls itself "kubectl" when it cordons, uncordons and drains, "kubectl-patch" when
// it patches; so "kubectl" is a person or a script, and may be either command. It is empty if the node was read through a cache that drops
// managedFields. Since is the time of the taint that the control plane puts on a cordoned node. Until the taint is there, it is the time of the
// manager's last change. It is zero if neither is known.
func Cordoner(node *corev1.Node) (who string, since time.Time, ok bool) {
	if !node.Spec.Unschedulable {
		return "", time.Time{}, false
	}
	var managers []string
	for _, m := range node.ManagedFields {
		if !OwnsField(m, "f:spec", "f:unschedulable") {
			continue
		}
		managers = append(managers, m.Manager)
		if m.Time != nil && (since.IsZero() || m.Time.Time.Before(since)) {
			since = m.Time.Time
		}
	}
	if t := CordonTaint(node); t != nil && t.TimeAdded != nil {
		since = t.TimeAdded.Time
	}
	return strings.Join(managers, ", "), since, true
}

// CordonTaint is the taint that the control plane puts on a cordoned node, or nil. The control plane removes it within a second of the uncordon. If
// the taint stays, the controller manager does not work, and pods stay away.
func CordonTaint(node *corev1.Node) *corev1.Taint {
	for i, t := range node.Spec.Taints {
		if t.Key == corev1.TaintNodeUnschedulable {
			return &node.Spec.Taints[i]
		}
	}
	return nil
}

// Changing is why a node is unavailable that an agent changes.
const Changing = "being changed by gpuslice"

// Unavailable returns why the node takes no pods, or "" if it does. Nodes that take none count against the limit of their pool. The caller knows whether an
// agent changes the node, and which taints are startup taints.
func Unavailable(node *corev1.Node, changing bool, startup func(corev1.Taint) bool) string {
	switch {
	case node.DeletionTimestamp != nil:
		return "being deleted"
	case changing:
		return Changing
	}
	if i := slices.IndexFunc(node.Spec.Taints, startup); i >= 0 {
		return "not yet made ready, it has the taint " + node.Spec.Taints[i].Key
	}
	if who, _, cordoned := Cordoner(node); cordoned {
		if who == "" {
			return "cordoned"
		}
		return "cordoned by " + who
	}
	for _, c := range node.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		if c.Status == corev1.ConditionTrue {
			return ""
		}
		return "not Ready since " + c.LastTransitionTime.UTC().Format(time.RFC3339)
	}
	return "not Ready, kubelet has not reported yet"
}

// OwnsField reports whether the entry's manager owns the field, which is named as in managedFields.
func OwnsField(m metav1.ManagedFieldsEntry, path ...string) bool {
	if m.FieldsV1 == nil {
		return false
	}
	fields := m.FieldsV1.GetRawBytes()
	for _, name := range path {
		var below map[string]json.RawMessage
		// An entry in another form than FieldsV1 names no owner.
		if err := json.Unmarshal(fields, &below); err != nil {
			return false
		}
		var ok bool
		if fields, ok = below[name]; !ok {
			return false
		}
	}
	return true
}
