// Package deviceplugin observes NVIDIA's device plugin on the node: its pods, its config and how it gets that, and its config file on this host. The
// file's folder may be full, or behind a mount that does not answer.
package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Readers are the programs that read the plugin's config file, and read it again on SIGHUP.
var Readers = []string{Command, "gpu-feature-discovery", "mps-control-daemon"}

// Retry is the pause between two observations without a watch: of the files that kubelet shows to a pod, and of MPS's control daemon getting ready.
const Retry = time.Second

// Plugin is the device plugin of one node.
type Plugin struct {
	Objects   *watch.Objects
	Sets      *holders.DaemonSets
	Processes holders.Processes
	Format    catalog.PluginFormat
	File      *File // its config on the host
	Settings  config.Settings
	Clock     *monotonic.Clock
	Log       *zap.Logger

	notified    map[types.UID]string // pods that got a SIGHUP, and a hash of the file at that time
	connectedAt time.Time            // when an observation last saw nothing wrong between kubelet and the plugin
	early       early                // a plugin that read of MPS too early
	ending      ending               // a plugin that fails with its new config
	unpicked    unpicked             // configs that no label or setting names

	own ownKey // the agent's own key that the label named last
}

// ownKey is a config that the agent has written, with its key.
type ownKey struct{ key, text string }

// Forget drops what depends on times that the clock gave.
func (dp *Plugin) Forget(time.Time) {
	dp.unpicked, dp.early, dp.ending, dp.connectedAt = unpicked{}, early{}, ending{}, time.Time{}
}

// Observe reads the device plugin's config. It changes nothing. If it cannot read the config, it returns no error: the labels may not request another
// config at all.
func (dp *Plugin) Observe(ctx context.Context, seen *state.Observed) {
	dp.readConfig(ctx, seen)
	dp.remember(&seen.Plugin)
	dp.observeEarly(ctx, seen)
}

// ObserveWithLabels reads the config that the device plugin would have under the labels of seen, for a preview. It reads nothing twice, and remembers
// nothing.
func (dp *Plugin) ObserveWithLabels(ctx context.Context, seen *state.Observed) {
	p := &seen.Plugin
	if !p.Read {
		dp.readConfig(ctx, seen)
		return
	}
	if m := p.Manager; (p.Method == config.HandoverLabel || p.Method == config.HandoverConfigMap) && seen.Node.Labels[m.Label] != p.Text {
		other := *m
		*p = state.PluginConfig{Read: true, Method: p.Method, Manager: &other, Named: p.Named}
		dp.parseManaged(seen)
	}
	dp.readNamed(ctx, seen)
}

func (dp *Plugin) readConfig(ctx context.Context, seen *state.Observed) {
	p := &seen.Plugin
	*p = state.PluginConfig{Read: true}
	p.Method, p.Manager, p.NoMethod = dp.method(seen)
	switch p.Method {
	case config.HandoverFile, config.HandoverRestart:
		dp.readFile(ctx, p)
		p.Readers = slices.DeleteFunc(slices.Clone(seen.Pods),
			func(pod corev1.Pod) bool { return state.Ended(&pod) || !dp.readsFile(&pod) || !runsReader(seen, &pod) })
	case config.HandoverLabel, config.HandoverConfigMap:
		m := p.Manager
		m.Files, m.ReadErr = dp.configMap(ctx, m.Namespace, m.ConfigMap)
		dp.parseManaged(seen)
	case "", config.HandoverAuto: // method never returns HandoverAuto
		p.ParseErr = errors.New(p.NoMethod)
	}
	dp.readNamed(ctx, seen)
}

// readNamed reads the configs that the settings name, if the node uses one. A label or the settings' default selects it, unless a config manager
// gives the plugin the label's config. The agent's own config uses one, too, if it keeps the default's other fields.
func (dp *Plugin) readNamed(ctx context.Context, seen *state.Observed) {
	p, byDefault := &seen.Plugin, dp.Settings.DevicePlugin.DefaultConfig
	_, key := state.Asked(seen.Node, byDefault)
	needs := key != ""
	if m := p.Manager; m != nil {
		needs = needs && seen.Node.Labels[config.LabelDevicePluginConfig] != key ||
			byDefault != "" && strings.HasPrefix(p.Text, config.OwnPluginKey) && m.NotedBase(p.Text) == ""
	}
	if !needs || p.Named != nil || p.Method == "" {
		return
	}
	ref := dp.Settings.DevicePlugin.ConfigMap
	p.Named = &state.PluginConfigs{}
	p.Named.Files, p.Named.Err = dp.configMap(ctx, ref.Namespace, ref.Name)
}

// method returns how the plugin gets its config: by the settings, or by the volumes and containers of its pod. While a change keeps the plugin away,
// the journal says it.
func (dp *Plugin) method(seen *state.Observed) (way config.Handover, manager *state.ConfigManager, why string) {
	if seen.DevicePlugin.Rivals != "" {
		return "", nil, seen.DevicePlugin.Rivals
	}
	var reads bool
	for i := range seen.DevicePlugin.Pods {
		reads = reads || dp.readsFile(&seen.DevicePlugin.Pods[i])
		if m := managerOf(seen.DevicePlugin.Pods[i]); m != nil {
			manager = m
		}
	}
	way = dp.Settings.DevicePlugin.Handover
	pending := seen.Journal != nil && seen.Journal.Plugin != nil
	switch {
	case pending:
		way = seen.Journal.Plugin.Way
		if manager == nil {
			manager = FormerManager(seen.Journal.Plugin, seen.Node.UID)
		}
	case way != config.HandoverAuto:
	case manager != nil:
		way = config.HandoverConfigMap
	case reads:
		way = config.HandoverFile
	case len(seen.DevicePlugin.Pods) == 0:
		return "", nil, "no device plugin runs on this node to take a config"
	default:
		pod := seen.DevicePlugin.Pods[0]
		return "", nil, fmt.Sprintf("see devicePlugin.handover in the settings: the agent cannot change the config of pod %s/%s, "+
			"which has no config manager and does not mount directory %s of the host", pod.Namespace, pod.Name, filepath.Dir(dp.Settings.DevicePlugin.ConfigFile))
	}
	if why := unusable(way, manager); why != "" {
		return "", nil, why
	}
	return way, manager, ""
}

// unusable says why the agent cannot use the plugin's config manager; empty if it can, or if it uses another method.
func unusable(way config.Handover, manager *state.ConfigManager) string {
	switch {
	case manager != nil && manager.Label != config.LabelDevicePluginConfig:
		return fmt.Sprintf("set NODE_LABEL of the config manager's DaemonSet to %[2]s, the only label that the agent sets: the config manager reads label %[1]s",
			sanitize.Cut(manager.Label, 100), config.LabelDevicePluginConfig)
	case manager == nil && (way == config.HandoverLabel || way == config.HandoverConfigMap):
		return "by the settings the device plugin gets its config by a label, but its pod on this node has no config manager"
	default:
		return ""
	}
}

// readsFile reports whether the pod sees the directory of the plugin's config file.
func (dp *Plugin) readsFile(pod *corev1.Pod) bool {
	dir := filepath.Dir(dp.Settings.DevicePlugin.ConfigFile)
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && filepath.Clean(v.HostPath.Path) == dir
	})
}

// runsReader reports whether the pod runs a program that reads the file. Other pods mount the directory, too, such as the agent's.
func runsReader(seen *state.Observed, pod *corev1.Pod) bool {
	is := func(p corev1.Pod) bool { return p.UID == pod.UID }
	return slices.ContainsFunc(seen.DevicePlugin.Pods, is) || slices.ContainsFunc(seen.DevicePlugin.MPSDaemons, is) ||
		slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
			return slices.ContainsFunc(Readers, func(name string) bool {
				return strings.Contains(c.Name, name) ||
					slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(word string) bool { return path.Base(word) == name })
			})
		})
}

// managerOf finds the config manager of a plugin's pod.
func managerOf(pod corev1.Pod) *state.ConfigManager {
	for _, c := range pod.Spec.Containers {
		env := map[string]string{}
		for _, e := range c.Env {
			env[e.Name] = e.Value
		}
		dir := env[state.EnvConfigDir]
		if dir == "" || env[state.EnvNodeLabel] == "" && !strings.Contains(c.Name, state.ManagerCommand) {
			continue
		}
		m := &state.ConfigManager{
			Pod: pod, Namespace: pod.Namespace, Dir: dir, Fallback: env[state.EnvDefault],
			Label: cmp.Or(env[state.EnvNodeLabel], config.LabelDevicePluginConfig),
		}
		if s := env[state.EnvFallbacks]; s != "" {
			m.Fallbacks = strings.Split(s, ",")
		}
		for _, mount := range c.VolumeMounts {
			for _, v := range pod.Spec.Volumes {
				if v.Name == mount.Name && v.ConfigMap != nil && filepath.Clean(mount.MountPath) == filepath.Clean(dir) {
					m.ConfigMap = v.ConfigMap.Name
				}
			}
		}
		if m.ConfigMap != "" {
			return m
		}
	}
	return nil
}

// readFile reads the config file of the host. A plugin without that file shares nothing. If the file is behind a mount that does not answer, its
// content is unknown.
func (dp *Plugin) readFile(ctx context.Context, p *state.PluginConfig) {
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	found, err := dp.File.Read(call)
	if p.NotifiedPods = found.Notified; p.NotifiedPods == nil {
		p.NotifiedPods = map[types.UID]string{}
	}
	maps.Copy(p.NotifiedPods, dp.notified)
	switch {
	case aside.Hangs(err):
		p.ParseErr = &outcome.UnseenError{Err: fmt.Errorf("the device plugin's config: %w", err)}
		return
	case err != nil:
		p.ParseErr = fmt.Errorf("the device plugin's config: %w", err)
		return
	case !found.Exists:
		p.Current = &catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingNone}}
		return
	}
	p.Text, p.Exists, p.Written = found.Text, true, found.Written
	dp.parse(p, found.Text, dp.Settings.DevicePlugin.ConfigFile)
}

// parse reads the plugin's config. Fields that the plugin ignores are no reason to refuse it, or any request that does not need them.
func (dp *Plugin) parse(p *state.PluginConfig, text, where string) {
	parsed, err := dp.Format.Parse([]byte(text))
	switch {
	case err == nil:
		p.Current = &parsed
	case check.PassedOver(err):
		p.Current, p.PassedOver = &parsed, fmt.Sprintf("%s: %s", where, sanitize.Message(err.Error(), longestPassed))
	default:
		p.ParseErr = fmt.Errorf("reading the device plugin's config %s: %w", where, err)
	}
}

// longestPassed leaves room for the rest of the condition.
const longestPassed = 300

// NoteNotified notes which of the present readers got a SIGHUP: in this process, and next to the file for the next one. If there is no room for that
// note, a restarted agent signals them again.
func (dp *Plugin) NoteNotified(ctx context.Context, p state.PluginConfig) {
	kept := map[types.UID]string{}
	for _, pod := range p.Readers {
		if what, ok := p.NotifiedPods[pod.UID]; ok {
			kept[pod.UID] = what
		}
	}
	dp.notified = kept
	if err := dp.File.NoteNotified(ctx, kept); err != nil {
		dp.Log.Warn("noting which pods were notified to read the device plugin's config: a restarted agent notifies them again", zap.Error(err))
	}
}

// parseManaged reads the config that the plugin's config manager picks for the node's label. If a program has replaced or removed the agent's own
// text, the agent uses what it read before: the plugin reads a key only once, and still runs with that.
func (dp *Plugin) parseManaged(seen *state.Observed) {
	p, m := &seen.Plugin, seen.Plugin.Manager
	m.Node = seen.Node.UID
	p.Text, p.Exists = seen.Node.Labels[m.Label], seen.Node.Labels[m.Label] != ""
	if m.ReadErr != nil {
		p.ParseErr = m.ReadErr
		return
	}
	if m.Owns(p.Text) && !m.Believes(p.Text) {
		m.Damaged, m.Files = true, maps.Clone(m.Files)
		if delete(m.Files, p.Text); dp.own.key == p.Text {
			m.Files[p.Text] = dp.own.text
		}
	}
	text, err := m.Config(p.Text)
	if err != nil {
		p.ParseErr = err
		return
	}
	dp.parse(p, text, m.KeyName(p.Text))
}

// remember keeps the text of the agent's own key, if the node's label names it.
func (dp *Plugin) remember(p *state.PluginConfig) {
	if m := p.Manager; m != nil && m.ReadErr == nil && !m.Damaged && m.Owns(p.Text) {
		dp.own = ownKey{key: p.Text, text: m.Files[p.Text]}
	}
}

// configMap reads all keys of a ConfigMap.
func (dp *Plugin) configMap(ctx context.Context, namespace, name string) (map[string]string, error) {
	api, cancel := context.WithTimeout(ctx, dp.Settings.Timeouts.APICall)
	defer cancel()
	object, err := dp.Objects.ConfigMap(api, namespace, name)
	switch {
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("reading ConfigMap %s/%s: %w; grant the agent a role there", namespace, name, err)
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, name, err)
	case err != nil:
		return nil, &outcome.UnseenError{Err: fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, name, err)}
	}
	files := map[string]string{} // the watch's cache keeps the object
	maps.Copy(files, object.Data)
	return files, nil
}

// FormerManager returns the plugin's config manager from the journal, while its pod is gone.
func FormerManager(f *journal.FormerPlugin, node types.UID) *state.ConfigManager {
	if f.Label == "" {
		return nil
	}
	return &state.ConfigManager{Node: node, Label: f.Label, Namespace: f.Namespace, ConfigMap: f.ConfigMap, Dir: f.Dir, Fallback: f.Fallback}
}
