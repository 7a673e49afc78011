package state

import (
	"cmp"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
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
