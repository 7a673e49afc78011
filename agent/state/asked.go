package state

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Asked returns the label that counts and the config that it names: a profile alone, or a MIG config and a config of the device plugin. If no label names a
// config of the device plugin, byDefault does, from the settings.
func Asked(node *corev1.Node, byDefault string) (want Desired, pluginKey string) {
	if name := node.Labels[config.LabelProfile]; name != "" {
		return overriding(node, Desired{Label: config.LabelProfile, Name: name}), ""
	}
	pluginKey = node.Labels[config.LabelDevicePluginConfig]
	if strings.HasPrefix(pluginKey, config.OwnPluginKey) { // set by an agent, for a profile or the settings' default
		pluginKey = ""
	}
	pluginKey = cmp.Or(pluginKey, byDefault)
	want = Desired{Label: config.LabelMIGConfig, Name: node.Labels[config.LabelMIGConfig]}
	switch {
	case pluginKey == "":
	case want.Name == "":
		want.Label, want.Name = config.LabelDevicePluginConfig, pluginKey
	default:
		want.Name += api.DesiredSeparator + pluginKey
	}
	if want.Name != "" {
		want.Keys = &nodekeys.Keys{} // the keys of a profile are removed when the label of another config counts
	}
	return want, pluginKey
}

// overriding adds the labels that do not count while a profile is set. The label of MIG configs may request the same as the profile. Until that is known, its
// request counts as unanswered.
func overriding(node *corev1.Node, want Desired) Desired {
	for _, label := range []string{config.LabelMIGConfig, config.LabelDevicePluginConfig} {
		if name := node.Labels[label]; name != "" && !strings.HasPrefix(name, config.OwnPluginKey) {
			want.Overridden = append(want.Overridden, label+"="+name)
			want.Unanswered = want.Unanswered || label == config.LabelMIGConfig
		}
	}
	return want
}

// Asking returns the labels and annotations by which users ask for something. It cuts values that are longer than any valid one.
func Asking(node *corev1.Node) map[string]string {
	out := map[string]string{}
	for _, label := range config.RequestLabels() {
		if value := node.Labels[label]; value != "" && !strings.HasPrefix(value, config.OwnPluginKey) {
			out[label] = sanitize.Cut(value, longestAsking)
		}
	}
	for _, annotation := range []string{config.AnnotationForce, config.AnnotationAllowEviction} {
		if value := node.Annotations[annotation]; value != "" {
			out[annotation] = sanitize.Cut(value, longestAsking)
		}
	}
	return out
}

// longestAsking is longer than a label's value, and than an Allowance that fits one.
const longestAsking = 128 // characters

// Older reports whether the node had the value of this label or annotation before the first agent came.
func (s *Observed) Older(key string) bool {
	found, was := s.Record.Learnt.Found[key]
	return was && Asking(s.Node)[key] == found
}

// Annotation returns the value of a user's annotation; empty if it was there before the first agent came: it was meant for something else.
func (s *Observed) Annotation(key string) string {
	if s.Older(key) {
		return ""
	}
	return s.Node.Annotations[key]
}

// OlderLabels returns the labels of the desired state, as key=value, that the node had before the first agent came. There are none if a user has since set an
// annotation for this change.
func (s *Observed) OlderLabels(want Desired) []string {
	if s.AskedAgain(want) {
		return nil
	}
	var out []string
	for _, label := range labelsOf(want) {
		if s.Older(label) {
			out = append(out, label+"="+s.Node.Labels[label])
		}
	}
	return out
}

// AskedAgain reports whether an annotation asks for the change to the desired state, and a user has set it since the first agent came.
func (s *Observed) AskedAgain(want Desired) bool {
	asked, _, _ := config.ParseAllowance(s.Annotation(config.AnnotationAllowEviction))
	return s.Forces(want) || slices.ContainsFunc(labelsOf(want), func(label string) bool { return asked == label+"="+s.Node.Labels[label] })
}

// labelsOf returns the labels that may request the desired state.
func labelsOf(want Desired) []string {
	switch want.Label {
	case "":
		return nil
	case config.LabelMIGConfig:
		return []string{want.Label, config.LabelDevicePluginConfig}
	default:
		return []string{want.Label}
	}
}

// StillFound returns the labels and annotations that the node had before the first agent came, without those that users have since set or asked for again.
func (s *Observed) StillFound(want Desired) map[string]string {
	out := maps.Clone(s.Record.Learnt.Found)
	again := s.AskedAgain(want)
	maps.DeleteFunc(out, func(key, _ string) bool { return !s.Older(key) || again && slices.Contains(labelsOf(want), key) })
	return out
}
