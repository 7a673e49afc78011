package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// unpickedFor is the time between two searches for configs of the device plugin on a node without a request: each search is a request to the API
// server.
const unpickedFor = 5 * time.Minute

// unpicked is the result of the last search: configs of the device plugin that no label or setting names.
type unpicked struct {
	at      time.Time
	plugins string // UIDs of the device plugin's pods at that search: a new one may have configs
	text    string
}

// ObserveUnpicked notes the existing configs of the device plugin, and how this node gets one; nothing if there are none, or if the node has one. It
// helps a user who has written a config and sees no replicas, since no label or setting names it.
func (dp *Plugin) ObserveUnpicked(ctx context.Context, seen *state.Observed) {
	now := dp.Clock.Now()
	plugins := uids(seen.DevicePlugin.Pods)
	if dp.unpicked.at.IsZero() || dp.unpicked.plugins != plugins || now.Sub(dp.unpicked.at) >= unpickedFor || now.Before(dp.unpicked.at) {
		dp.unpicked = unpicked{at: now, plugins: plugins, text: dp.lookForConfigs(ctx, seen)}
	}
	seen.DevicePlugin.Unpicked = dp.unpicked.text
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
	return fmt.Sprintf("ConfigMap %s/%s has configs of the device plugin, but this node uses none: set label %s to one of its keys (%s), or set %s",
		namespace, name, config.LabelDevicePluginConfig, sanitize.Listed(keys), byDefault)
}

// uids returns the UIDs of the pods, in one text.
func uids(pods []corev1.Pod) string {
	all := make([]string, len(pods))
	for i := range pods {
		all[i] = string(pods[i].UID)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}
