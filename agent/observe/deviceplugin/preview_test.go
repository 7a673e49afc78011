package deviceplugin_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// A preview sees the config that the config manager would choose by the label, by what the pass has read: without a client, a read would panic.
func TestAPreviewReadsNoConfigAgain(t *testing.T) {
	t.Parallel()
	dp := &deviceplugin.Plugin{Settings: config.Default(), Format: catalog.PluginFormat{Parse: func(text []byte) (catalog.PluginConfig, error) {
		return catalog.PluginConfig{MIGStrategy: config.MIGStrategy(text)}, nil
	}}}
	manager := &state.ConfigManager{
		Node: "uid", Label: config.LabelDevicePluginConfig, Namespace: "gpu-operator", ConfigMap: "configs", Fallback: "any",
		Files: map[string]string{"any": "mixed", "other": "single"},
	}
	for name, row := range map[string]struct {
		label, text string
		want        config.MIGStrategy
		wrong       bool
	}{
		"no label":                {"", "", config.MIGStrategyMixed, false},
		"another key":             {"other", "other", config.MIGStrategySingle, false},
		"a key that is not there": {"none", "none", "", true},
	} {
		seen := &state.Observed{
			Node:   &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: "uid", Labels: map[string]string{config.LabelDevicePluginConfig: row.label}}},
			Plugin: state.PluginConfig{Read: true, Method: config.HandoverConfigMap, Text: "any", Exists: true, Early: true, Manager: manager},
		}
		dp.ObserveWithLabels(t.Context(), seen)
		p := seen.Plugin
		if p.Text != row.text || (p.ParseErr != nil) != row.wrong || !row.wrong && p.Current.MIGStrategy != row.want || p.Early {
			t.Errorf("%s: the plugin would read %q: %+v, error %v", name, p.Text, p.Current, p.ParseErr)
		}
		if p.Manager == manager {
			t.Errorf("%s: the preview has written into the observation of the pass", name)
		}
	}
}
