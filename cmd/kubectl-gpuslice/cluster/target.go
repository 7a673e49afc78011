package cluster

import (
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// Target is the label that the command sets, and the config that it names.
type Target struct{ Label, Name string }

// String returns the request as kubectl label takes it.
func (t Target) String() string { return t.Label + "=" + t.Name }

// Kind names the request in messages.
func (t Target) Kind() string {
	switch t.Label {
	case config.LabelProfile:
		return "profile " + t.Name
	case config.LabelDevicePluginConfig:
		return "device plugin config " + t.Name
	default:
		return "MIG config " + t.Name
	}
}

// TargetOf returns the first label of the node that asks for a config. Of two labels that count together its agent adds the other.
func TargetOf(n *corev1.Node) (Target, bool) {
	if all := TargetsOf(n); len(all) > 0 {
		return all[0], true
	}
	return Target{}, false
}

// TargetsOf returns the labels of the node that ask for a config, first the one that wins.
func TargetsOf(n *corev1.Node) (out []Target) {
	for _, label := range config.RequestLabels() {
		name := n.Labels[label]
		if name == "" || label == config.LabelDevicePluginConfig && strings.HasPrefix(name, config.OwnPluginKey) { // which an agent has set
			continue
		}
		out = append(out, Target{label, name})
	}
	return out
}

// Requested returns what the node's labels request. After a profile, which alone counts, it names the labels that do not count.
func Requested(n *corev1.Node) string {
	profile := n.Labels[config.LabelProfile]
	var names []string
	for _, w := range TargetsOf(n) {
		if w.Label != config.LabelProfile {
			names = append(names, w.Name)
		}
	}
	all := strings.Join(names, api.DesiredSeparator)
	switch {
	case profile == "":
		return all
	case all == "":
		return profile
	default:
		return profile + " (not " + all + ")"
	}
}
