package agent

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

// nodeKeys are labels and taints of a node.
type nodeKeys struct {
	Labels map[string]string `json:"labels,omitempty"`
	Taints []corev1.Taint    `json:"taints,omitempty"`
}

// publishedOn are the keys that a profile has put on the node, as we have noted there. An unreadable note is as good as none: what is on the
// node is then others'.
func publishedOn(node *corev1.Node) nodeKeys {
	var k nodeKeys
	if err := json.Unmarshal([]byte(node.Annotations[config.AnnotationPublished]), &k); err != nil {
		return nodeKeys{}
	}
	return k
}

func taintAt(taints []corev1.Taint, t corev1.Taint) int {
	return slices.IndexFunc(taints, func(u corev1.Taint) bool { return u.MatchTaint(&t) })
}

// foreignKey names a label or taint that the profile sets and somebody else has set otherwise.
func foreignKey(node *corev1.Node, want nodeKeys) string {
	ours := publishedOn(node)
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

// unbearable names a taint that would keep the device plugin away when it is started the next time.
func unbearable(seen observed, taints []corev1.Taint) string {
	for _, pod := range slices.Concat(seen.operands, seen.daemons) {
		for _, t := range taints {
			bears := slices.ContainsFunc(pod.Spec.Tolerations, func(by corev1.Toleration) bool {
				exists := by.Operator == corev1.TolerationOpExists
				return (by.Key == t.Key && (exists || by.Value == t.Value) || by.Key == "" && exists) && (by.Effect == "" || by.Effect == t.Effect)
			})
			if t.Effect == corev1.TaintEffectNoSchedule && !bears {
				return fmt.Sprintf("pod %s/%s does not tolerate the taint %s, and would not come back: add the toleration to its DaemonSet",
					pod.Namespace, pod.Name, t.ToString())
			}
		}
	}
	return ""
}

// settled is the node's labels and taints with those of the profile, and the note of which of them are ours: what stood there before as
// the profile has it is not, and stays when the profile goes.
func settled(node *corev1.Node, want nodeKeys) (labels map[string]*string, taints []corev1.Taint, note nodeKeys) {
	ours := publishedOn(node)
	labels, note.Labels = settledLabels(node, ours, want)
	taints, note.Taints = settledTaints(node, ours, want)
	return labels, taints, note
}

func settledLabels(node *corev1.Node, ours, want nodeKeys) (labels map[string]*string, note map[string]string) {
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

func settledTaints(node *corev1.Node, ours, want nodeKeys) (taints, note []corev1.Taint) {
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

// unpublished reports whether the profile's labels and taints are not yet on the node, or a former one's still are.
func unpublished(node *corev1.Node, want nodeKeys) bool {
	labels, taints, note := settled(node, want)
	text, err := note.encode()
	return err == nil && (len(labels) > 0 || !slices.EqualFunc(taints, node.Spec.Taints, sameTaint) || text != node.Annotations[config.AnnotationPublished])
}

func sameTaint(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }

// publish writes them in one guarded update.
func publish(node *corev1.Node, want nodeKeys) ([]byte, error) {
	if foreign := foreignKey(node, want); foreign != "" { // set since the node was looked at
		return nil, apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errors.New(foreign))
	}
	labels, taints, note := settled(node, want)
	text, err := note.encode()
	if err != nil {
		return nil, err
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
	return json.Marshal(patch)
}

func (k nodeKeys) encode() (string, error) {
	if len(k.Labels)+len(k.Taints) == 0 {
		return "", nil
	}
	b, err := json.Marshal(k)
	if err != nil {
		return "", fmt.Errorf("encoding the labels and taints of the profile: %w", err)
	}
	return string(b), nil
}

// String lists them for people.
func (k nodeKeys) String() string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(k.Labels)) {
		parts = append(parts, "label "+key+"="+k.Labels[key])
	}
	for _, t := range k.Taints {
		parts = append(parts, "taint "+t.ToString())
	}
	return strings.Join(parts, ", ")
}
