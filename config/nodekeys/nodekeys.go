// Package nodekeys has the labels and taints that the agent sets on its node for a profile, and distinguishes them from those of users and other
// programs.
package nodekeys

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/config"
)

// Keys are labels and taints of a node.
type Keys struct {
	Labels map[string]string `json:"labels,omitempty"`
	Taints []corev1.Taint    `json:"taints,omitempty"`
}

// And adds those of the others' keys that k lacks.
func (k Keys) And(others Keys) Keys {
	out := Keys{Labels: maps.Clone(k.Labels), Taints: slices.Clone(k.Taints)}
	for key, value := range others.Labels {
		if out.Labels == nil {
			out.Labels = map[string]string{}
		}
		if _, is := out.Labels[key]; !is {
			out.Labels[key] = value
		}
	}
	for _, t := range others.Taints {
		if taintAt(out.Taints, t) < 0 {
			out.Taints = append(out.Taints, t)
		}
	}
	return out
}

func taintAt(taints []corev1.Taint, t corev1.Taint) int {
	return slices.IndexFunc(taints, func(u corev1.Taint) bool { return u.MatchTaint(&t) })
}

// Foreign names a label or taint of the profile that a user or another program has set to another value.
func Foreign(node *corev1.Node, ours, want Keys) string {
	for _, key := range slices.Sorted(maps.Keys(want.Labels)) {
		value, there := node.Labels[key]
		if _, is := ours.Labels[key]; there && !is && value != want.Labels[key] {
			return fmt.Sprintf("label %s is %q on the node, and %q in the profile", key, value, want.Labels[key])
		}
	}
	for _, t := range want.Taints {
		i := taintAt(node.Spec.Taints, t)
		if i >= 0 && taintAt(ours.Taints, t) < 0 && node.Spec.Taints[i].Value != t.Value {
			return fmt.Sprintf("taint %s has the value %q on the node, and %q in the profile", t.Key+":"+string(t.Effect), node.Spec.Taints[i].Value, t.Value)
		}
	}
	return ""
}

// Settled returns the node's labels and taints with those of the profile, and a note of the keys that the agent sets. A key that the node already had
// with the profile's value is not in the note, and stays when the profile is removed.
func Settled(node *corev1.Node, ours, want Keys) (labels map[string]*string, taints []corev1.Taint, note Keys) {
	labels, note.Labels = settledLabels(node, ours, want)
	taints, note.Taints = settledTaints(node, ours, want)
	return labels, taints, note
}

func settledLabels(node *corev1.Node, ours, want Keys) (labels map[string]*string, note map[string]string) {
	labels, note = map[string]*string{}, map[string]string{}
	for key := range ours.Labels {
		if _, stays := want.Labels[key]; !stays && node.Labels[key] == ours.Labels[key] {
			labels[key] = nil
		}
	}
	for key, value := range want.Labels {
		_, is := ours.Labels[key]
		if there, exists := node.Labels[key]; !exists || there != value {
			labels[key], is = &value, true
		}
		if is {
			note[key] = value
		}
	}
	return labels, note
}

func settledTaints(node *corev1.Node, ours, want Keys) (taints, note []corev1.Taint) {
	for _, t := range node.Spec.Taints {
		if i := taintAt(ours.Taints, t); i < 0 || taintAt(want.Taints, t) >= 0 || ours.Taints[i].Value != t.Value {
			taints = append(taints, t)
		}
	}
	for _, t := range want.Taints {
		i, is := taintAt(taints, t), taintAt(ours.Taints, t) >= 0
		switch {
		case i < 0:
			taints, is = append(taints, t), true
		case taints[i].Value != t.Value:
			taints[i].Value, is = t.Value, true
		}
		if is {
			note = append(note, t)
		}
	}
	return taints, note
}

// Unpublished reports whether the node still lacks the profile's labels and taints, or still has a former profile's.
func Unpublished(node *corev1.Node, ours, want Keys) bool {
	labels, taints, note := Settled(node, ours, want)
	text, err := note.encode()
	return err == nil && (len(labels) > 0 || !slices.EqualFunc(taints, node.Spec.Taints, sameTaint) || text != node.Annotations[config.AnnotationPublished])
}

func sameTaint(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }

// Patch returns the guarded update that writes the profile's labels and taints, and the agent's keys after it.
func Patch(node *corev1.Node, ours, want Keys) (body []byte, note Keys, err error) {
	if foreign := Foreign(node, ours, want); foreign != "" { // another program has set it since the agent observed the node
		return nil, note, apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errors.New(foreign))
	}
	labels, taints, note := Settled(node, ours, want)
	text, err := note.encode()
	if err != nil {
		return nil, note, err
	}
	annotation := &text
	if text == "" {
		annotation = nil
	}
	patch := map[string]any{"metadata": map[string]any{
		"uid": node.UID, "resourceVersion": node.ResourceVersion, "labels": labels,
		"annotations": map[string]*string{config.AnnotationPublished: annotation},
	}}
	if !slices.EqualFunc(taints, node.Spec.Taints, sameTaint) {
		patch["spec"] = map[string]any{"taints": taints}
	}
	body, err = json.Marshal(patch)
	return body, note, err
}

// Empty reports whether there are none.
func (k Keys) Empty() bool { return len(k.Labels)+len(k.Taints) == 0 }

func (k Keys) encode() (string, error) {
	if k.Empty() {
		return "", nil
	}
	b, err := json.Marshal(k)
	if err != nil {
		return "", fmt.Errorf("encoding the labels and taints of the profile: %w", err)
	}
	return string(b), nil
}

// String lists the keys for messages.
func (k Keys) String() string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(k.Labels)) {
		parts = append(parts, "label "+key+"="+k.Labels[key])
	}
	for _, t := range k.Taints {
		parts = append(parts, "taint "+t.ToString())
	}
	return strings.Join(parts, ", ")
}
