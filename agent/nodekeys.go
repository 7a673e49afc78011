package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// nodeKeys are labels and taints of a node.
type nodeKeys struct {
	Labels map[string]string `json:"labels,omitempty"`
	Taints []corev1.Taint    `json:"taints,omitempty"`
}

// publishedOn are the keys that a profile has put on the node, as the annotation says: of an agent that kept no record of its host, as
// before an upgrade, or on a host that was installed anew. Others can write it, so only keys count that a profile of the catalog has.
func (a *Agent) publishedOn(seen *observed) nodeKeys {
	var noted, out nodeKeys
	if err := json.Unmarshal([]byte(seen.node.Annotations[config.AnnotationPublished]), &noted); err != nil {
		return nodeKeys{}
	}
	profiles, err := seen.catalogOfProfiles()
	if err != nil {
		return nodeKeys{}
	}
	for _, name := range slices.Sorted(maps.Keys(profiles)) {
		profile := profiles[name]
		for key, value := range profile.Labels {
			if noted.Labels[key] == value && value != "" {
				if out.Labels == nil {
					out.Labels = map[string]string{}
				}
				out.Labels[key] = value
			}
		}
		for _, t := range profile.Taints {
			if i := taintAt(noted.Taints, t); i >= 0 && noted.Taints[i].Value == t.Value && taintAt(out.Taints, t) < 0 {
				out.Taints = append(out.Taints, t)
			}
		}
	}
	return out
}

func taintAt(taints []corev1.Taint, t corev1.Taint) int {
	return slices.IndexFunc(taints, func(u corev1.Taint) bool { return u.MatchTaint(&t) })
}

// foreignKey names a label or taint that the profile sets and somebody else has set otherwise.
func foreignKey(node *corev1.Node, ours, want nodeKeys) string {
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
	for _, pod := range slices.Concat(seen.devicePlugin.pods, seen.devicePlugin.mpsDaemons) {
		for _, t := range taints {
			if t.Effect == corev1.TaintEffectNoSchedule && !holders.Tolerates(pod.Spec.Tolerations, t) {
				return fmt.Sprintf("pod %s/%s does not tolerate the taint %s, and would not come back: add the toleration to its DaemonSet",
					pod.Namespace, pod.Name, t.ToString())
			}
		}
	}
	return ""
}

// settled is the node's labels and taints with those of the profile, and the note of which of them are ours: what stood there before as
// the profile has it is not, and stays when the profile goes.
func settled(node *corev1.Node, ours, want nodeKeys) (labels map[string]*string, taints []corev1.Taint, note nodeKeys) {
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
func unpublished(node *corev1.Node, ours, want nodeKeys) bool {
	labels, taints, note := settled(node, ours, want)
	text, err := note.encode()
	return err == nil && (len(labels) > 0 || !slices.EqualFunc(taints, node.Spec.Taints, sameTaint) || text != node.Annotations[config.AnnotationPublished])
}

func sameTaint(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }

// publish writes the profile's labels and taints to the node. The host's record has those that will be ours before, and those that are
// after.
func (a *Agent) publish(ctx context.Context, seen observed, want nodeKeys) error {
	ours, during := seen.record.published, seen.record.published
	_, _, note := settled(seen.node, ours, want)
	during.Labels = maps.Clone(note.Labels)
	for key, value := range ours.Labels {
		if _, is := during.Labels[key]; !is {
			during.Labels[key] = value
		}
	}
	during.Taints = slices.Clone(note.Taints)
	for _, t := range ours.Taints {
		if taintAt(during.Taints, t) < 0 {
			during.Taints = append(during.Taints, t)
		}
	}
	r := a.record.now
	r.Learnt = learntOf(seen.record.status, during)
	if seen.gives {
		a.record.keep(ctx, r, a.clock.Now())
	} else if err := a.record.write(ctx, r, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	var body []byte
	err := a.patch(ctx, seen.node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = published(node, ours, want)
		return body, err
	})
	switch {
	case err == nil:
		a.learn(ctx, learntOf(seen.record.status, note))
	case refused(err): // what stands there now is of somebody else
		a.learn(ctx, learntOf(seen.record.status, ours))
	}
	return err
}

// published is the guarded update that writes them, and what of the node is ours then.
func published(node *corev1.Node, ours, want nodeKeys) (body []byte, note nodeKeys, err error) {
	if foreign := foreignKey(node, ours, want); foreign != "" { // set since the node was looked at
		return nil, note, apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errors.New(foreign))
	}
	labels, taints, note := settled(node, ours, want)
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
