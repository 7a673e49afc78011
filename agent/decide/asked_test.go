package decide_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/config"
)

// The labels decide in an order, and which of them counts decides what becomes of a former profile's labels and taints (promise 13): they go when any
// other label names a config, and stay when no label does.
func TestTheLabelThatCountsAndWhatBecomesOfAFormerProfilesKeys(t *testing.T) {
	t.Parallel()
	const own = config.OwnPluginKey + "four"
	for name, row := range map[string]struct {
		profile, mig, plugin, byDefault string

		label, want, key string
		keysGo           bool
	}{
		"no label":                           {},
		"a profile":                          {profile: "four", label: config.LabelProfile, want: "four"},
		"a profile beside all others":        {profile: "four", mig: "all-1g.10gb", plugin: "shared", label: config.LabelProfile, want: "four"},
		"a MIG config":                       {mig: "all-1g.10gb", label: config.LabelMIGConfig, want: "all-1g.10gb", keysGo: true},
		"a plugin config":                    {plugin: "shared", label: config.LabelDevicePluginConfig, want: "shared", key: "shared", keysGo: true},
		"both":                               {mig: "all-1g.10gb", plugin: "shared", label: config.LabelMIGConfig, want: "all-1g.10gb" + api.DesiredSeparator + "shared", key: "shared", keysGo: true},
		"a plugin config that an agent set":  {plugin: own},
		"that, and the settings' default":    {plugin: own, byDefault: "usual", label: config.LabelDevicePluginConfig, want: "usual", key: "usual", keysGo: true},
		"the settings' default alone":        {byDefault: "usual", label: config.LabelDevicePluginConfig, want: "usual", key: "usual", keysGo: true},
		"a plugin config before the default": {plugin: "shared", byDefault: "usual", label: config.LabelDevicePluginConfig, want: "shared", key: "shared", keysGo: true},
	} {
		t.Run(name, func(t *testing.T) {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{
				config.LabelProfile: row.profile, config.LabelMIGConfig: row.mig, config.LabelDevicePluginConfig: row.plugin,
			}}}
			r := decide.Resolver{Settings: config.Default()}
			r.Settings.DevicePlugin.DefaultConfig = row.byDefault
			want, key := r.Asked(node)
			if row.label == "" {
				row.label = config.LabelMIGConfig
			}
			if want.Label != row.label || want.Name != row.want || key != row.key {
				t.Errorf("label %s, config %q, plugin's config %q; want %s, %q, %q", want.Label, want.Name, key, row.label, row.want, row.key)
			}
			if goes := want.Keys != nil && want.Keys.Empty(); goes != row.keysGo {
				t.Errorf("a former profile's labels and taints go: %t, want %t", goes, row.keysGo)
			}
		})
	}
}
