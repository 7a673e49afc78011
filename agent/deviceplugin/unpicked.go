package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// unpickedFor is how long it is not looked again which configs of the device plugin there are, on a node that is asked for nothing: that
// costs the API server a read.
const unpickedFor = 5 * time.Minute

// unpicked is what was found at the last look for configs of the device plugin that nothing asks for.
type unpicked struct {
	at      time.Time
	plugins string // UIDs of the device plugin's pods that were here then: one that comes may have configs
	text    string
}

// Unpicked says which configs of the device plugin there are of which this node gets none, and how it is given one; empty if there
// are none, or if it has one. Who has written a config and sees no replicas has named it nowhere.
func (dp *Plugin) Unpicked(ctx context.Context, seen *state.Observed) string {
	now := dp.Clock.Now()
	plugins := uids(seen.DevicePlugin.Pods)
	if dp.unpicked.at.IsZero() || dp.unpicked.plugins != plugins || now.Sub(dp.unpicked.at) >= unpickedFor || now.Before(dp.unpicked.at) {
		dp.unpicked = unpicked{at: now, plugins: plugins, text: dp.lookForConfigs(ctx, seen)}
	}
	return dp.unpicked.text
}

func (dp *Plugin) lookForConfigs(ctx context.Context, seen *state.Observed) string {
	dp.Observe(ctx, seen)
	p := seen.Plugin
	if p.Method == "" {
		return ""
	}
	ref, byDefault := dp.Settings.DevicePlugin.ConfigMap, "devicePlugin.defaultConfig of the settings"
	namespace, name := ref.Namespace, ref.Name
	var files map[string]string
	if m := p.Manager; m != nil {
		if p.Text != "" || m.Fallback != "" || m.ReadErr != nil || m.PicksKeyWithoutLabel() {
			return ""
		}
		namespace, name, byDefault = m.Namespace, m.ConfigMap, "devicePlugin.config.default of the GPU Operator's ClusterPolicy"
		files = m.Files
	} else {
		var err error
		if files, err = dp.configMap(ctx, namespace, name); err != nil {
			return ""
		}
	}
	keys := state.KeysOf(files)
	if len(keys) == 0 {
		return ""
	}
	return fmt.Sprintf("ConfigMap %s/%s has configs of the device plugin, and none of them is picked for this node: set label %s to a key of it (%s), or set %s",
		namespace, name, config.LabelDevicePluginConfig, legible.Listed(keys), byDefault)
}

// uids are those of the pods, in one text.
func uids(pods []corev1.Pod) string {
	all := make([]string, len(pods))
	for i := range pods {
		all[i] = string(pods[i].UID)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}
