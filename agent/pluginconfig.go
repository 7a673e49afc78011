package agent

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
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/pluginfile"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// PluginConfigs reads and writes config files of NVIDIA's device plugin.
type PluginConfigs struct {
	Parse func(text []byte) (config.PluginConfig, error)
	// Render writes a file with this sharing and MIG strategy, and all else as in the base, which may be empty. An empty strategy leaves
	// that as it is too.
	Render func(base []byte, s config.Sharing, strategy config.MIGStrategy) ([]byte, error)
}

// pluginConfig is the config of the node's device plugin, and the way by which it is given another one.
type pluginConfig struct {
	method   config.Handover // empty if none is known
	noMethod string          // why none is
	text     string          // of the config file; by label, the label's value
	exists   bool            // there is such a file, or label
	current  *config.PluginConfig
	parseErr error // why now is not known

	written      time.Time            // when the file was
	notifiedPods map[types.UID]string // readers that were told to read the file since they started, and a hash of what it said then
	readers      []corev1.Pod         // pods that read the file
	manager      *configManager       // of a plugin that gets its config by label
}

// configManager is NVIDIA's sidecar of the device plugin, which brings it the config that a label of the node names.
type configManager struct {
	pod       corev1.Pod
	label     string            // of the node
	namespace string            // of the ConfigMap
	configMap string            // whose keys the label names
	dir       string            // where the sidecar sees them
	fallback  string            // the key for nodes without the label
	fallbacks []string          // what it takes without either, in this order: named, single, empty
	files     map[string]string // the ConfigMap's; nil if it cannot be read
	readErr   error             // why it cannot
}

// What the sidecar is told by, as the plugin's chart and the GPU Operator deploy it.
const (
	envNodeLabel    = "NODE_LABEL"
	envConfigDir    = "CONFIG_FILE_SRCDIR"
	envDefault      = "DEFAULT_CONFIG"
	envFallbacks    = "FALLBACK_STRATEGIES"
	managerCommand  = "config-manager"
	fallbackNamed   = "named"
	fallbackSingle  = "single"
	fallbackEmpty   = "empty"
	fallbackNameKey = "default"
)

// observePlugin looks what config the device plugin runs by. It changes nothing, and what it cannot find out is no error: nobody may ask
// for another config.
func (a *Agent) observePlugin(ctx context.Context, seen *observed) {
	p := &seen.plugin
	p.method, p.manager, p.noMethod = a.wayOf(seen)
	switch p.method {
	case config.HandoverFile, config.HandoverRestart:
		a.readPluginFile(ctx, p)
		p.readers = slices.DeleteFunc(slices.Clone(seen.pods), func(pod corev1.Pod) bool { return ended(&pod) || !a.readsFile(&pod) || !runsReader(seen, &pod) })
	case config.HandoverLabel, config.HandoverConfigMap:
		a.readManaged(ctx, seen)
	case "", config.HandoverAuto: // which wayOf leaves to nobody
		p.parseErr = errors.New(p.noMethod)
	}
}

// wayOf is how the plugin gets its config: as the settings say, or by what its pod is given. While it is away in the middle of a change
// the journal knows.
func (a *Agent) wayOf(seen *observed) (way config.Handover, manager *configManager, why string) {
	if seen.devicePlugin.rivals != "" {
		return "", nil, seen.devicePlugin.rivals
	}
	var reads bool
	for i := range seen.devicePlugin.pods {
		reads = reads || a.readsFile(&seen.devicePlugin.pods[i])
		if m := managerOf(seen.devicePlugin.pods[i]); m != nil {
			manager = m
		}
	}
	way = a.settings.DevicePlugin.Handover
	owed := seen.journal != nil && seen.journal.Plugin != nil
	switch {
	case owed:
		way = seen.journal.Plugin.Way
		if manager == nil {
			manager = formerManager(seen.journal.Plugin)
		}
	case way != config.HandoverAuto:
	case manager != nil:
		way = config.HandoverConfigMap
	case reads:
		way = config.HandoverFile
	case len(seen.devicePlugin.pods) == 0:
		return "", nil, "no device plugin runs on this node that could be given a config"
	default:
		pod := seen.devicePlugin.pods[0]
		return "", nil, fmt.Sprintf("pod %s/%s is given no config that could be changed: it has no config manager, and mounts no directory %s of the host; "+
			"see devicePlugin.handover of the settings", pod.Namespace, pod.Name, filepath.Dir(a.settings.DevicePlugin.ConfigFile))
	}
	if why := unusable(way, manager); why != "" {
		return "", nil, why
	}
	return way, manager, ""
}

// unusable says why the plugin cannot be given a config by its config manager; empty if it can, or if that is not the way.
func unusable(way config.Handover, manager *configManager) string {
	switch {
	case manager != nil && manager.label != config.LabelDevicePluginConfig:
		return fmt.Sprintf("the config manager of the device plugin goes by label %s, and the agent sets no other than %s: set NODE_LABEL of its DaemonSet to that",
			legible.Cut(manager.label, 100), config.LabelDevicePluginConfig)
	case manager == nil && (way == config.HandoverLabel || way == config.HandoverConfigMap):
		return "the settings say that the device plugin gets its config by a label, but its pod on this node has no config manager"
	default:
		return ""
	}
}

// readsFile reports whether the pod sees the directory of the plugin's config file.
func (a *Agent) readsFile(pod *corev1.Pod) bool {
	dir := filepath.Dir(a.settings.DevicePlugin.ConfigFile)
	return slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && filepath.Clean(v.HostPath.Path) == dir
	})
}

// runsReader reports whether the pod runs a program that reads the file. Others see it too: the agent above all.
func runsReader(seen *observed, pod *corev1.Pod) bool {
	is := func(p corev1.Pod) bool { return p.UID == pod.UID }
	return slices.ContainsFunc(seen.devicePlugin.pods, is) || slices.ContainsFunc(seen.devicePlugin.mpsDaemons, is) ||
		slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
			return slices.ContainsFunc(readers, func(name string) bool {
				return strings.Contains(c.Name, name) ||
					slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(word string) bool { return path.Base(word) == name })
			})
		})
}

// managerOf finds the config manager of a plugin's pod.
func managerOf(pod corev1.Pod) *configManager {
	for _, c := range pod.Spec.Containers {
		env := map[string]string{}
		for _, e := range c.Env {
			env[e.Name] = e.Value
		}
		dir := env[envConfigDir]
		if dir == "" || env[envNodeLabel] == "" && !strings.Contains(c.Name, managerCommand) {
			continue
		}
		m := &configManager{
			pod: pod, namespace: pod.Namespace, dir: dir, fallback: env[envDefault],
			label: cmp.Or(env[envNodeLabel], config.LabelDevicePluginConfig),
		}
		if s := env[envFallbacks]; s != "" {
			m.fallbacks = strings.Split(s, ",")
		}
		for _, mount := range c.VolumeMounts {
			for _, v := range pod.Spec.Volumes {
				if v.Name == mount.Name && v.ConfigMap != nil && filepath.Clean(mount.MountPath) == filepath.Clean(dir) {
					m.configMap = v.ConfigMap.Name
				}
			}
		}
		if m.configMap != "" {
			return m
		}
	}
	return nil
}

// plugin is the way to the device plugin's config, and what is known of its readers.
type plugin struct {
	configs  PluginConfigs
	file     *pluginfile.File
	notified map[types.UID]string // pods that were told to read the file, and a hash of what it said then
	unpicked unpicked             // configs that nothing asks for
}

func (p *plugin) forget(time.Time) { p.unpicked = unpicked{} }

// readPluginFile reads the config file of the host. One that is not there is how a plugin runs that shares nothing. By one that is behind a
// mount which does not answer nothing is decided.
func (a *Agent) readPluginFile(ctx context.Context, p *pluginConfig) {
	call, cancel := context.WithTimeout(ctx, hostTimeout)
	defer cancel()
	found, err := a.plugin.file.Read(call)
	if p.notifiedPods = found.Told; p.notifiedPods == nil {
		p.notifiedPods = map[types.UID]string{}
	}
	maps.Copy(p.notifiedPods, a.plugin.notified)
	switch {
	case aside.Hangs(err):
		p.parseErr = &outcome.UnseenError{Err: fmt.Errorf("the device plugin's config: %w", err)}
		return
	case err != nil:
		p.parseErr = fmt.Errorf("the device plugin's config: %w", err)
		return
	case !found.Exists:
		p.current = &config.PluginConfig{Sharing: config.Sharing{Strategy: config.SharingNone}}
		return
	}
	p.text, p.exists, p.written = found.Text, true, found.Written
	parsed, err := a.plugin.configs.Parse([]byte(found.Text))
	if err != nil {
		p.parseErr = fmt.Errorf("reading the device plugin's config %s: %w", a.settings.DevicePlugin.ConfigFile, err)
		return
	}
	p.current = &parsed
}

// writing is one writing of the file: who has read the same text before may have read another one since.
func (p pluginConfig) writing() string { return hash(p.text + p.written.UTC().String()) }

// noteTold keeps who was told, of those who are still there: in this process, and beside the file for the next one. Where there is no room
// for that, who was told is told again.
func (a *Agent) noteTold(ctx context.Context, p pluginConfig) {
	kept := map[types.UID]string{}
	for _, pod := range p.readers {
		if what, ok := p.notifiedPods[pod.UID]; ok {
			kept[pod.UID] = what
		}
	}
	a.plugin.notified = kept
	if err := a.plugin.file.Tell(ctx, kept); err != nil {
		a.log.Warn("noting who was told to read the device plugin's config: a restarted agent tells them again", zap.Error(err))
	}
}

// readManaged reads the config that the plugin's config manager takes by the node's label.
func (a *Agent) readManaged(ctx context.Context, seen *observed) {
	p, m := &seen.plugin, seen.plugin.manager
	p.text, p.exists = seen.node.Labels[m.label], seen.node.Labels[m.label] != ""
	m.files, m.readErr = a.configFiles(ctx, m.namespace, m.configMap)
	if m.readErr != nil {
		p.parseErr = m.readErr
		return
	}
	text, err := m.config(p.text)
	if err != nil {
		p.parseErr = err
		return
	}
	parsed, err := a.plugin.configs.Parse([]byte(text))
	if err != nil {
		p.parseErr = fmt.Errorf("reading %s: %w", m.keyed(p.text), err)
		return
	}
	p.current = &parsed
}

// config is the text that the manager gives to the plugin of a node whose label has the value.
func (m *configManager) config(value string) (string, error) {
	key := cmp.Or(value, m.fallback)
	if key != "" {
		text, ok := m.files[key]
		if !ok {
			return "", noSuchKey(m.namespace, m.configMap, m.files)
		}
		return text, nil
	}
	for _, s := range m.fallbacks {
		switch text, named := m.files[fallbackNameKey]; {
		case s == fallbackNamed && named:
			return text, nil
		case s == fallbackSingle && len(m.files) == 1:
			for _, text := range m.files {
				return text, nil
			}
		case s == fallbackEmpty:
			return "", nil
		}
	}
	return "", fmt.Errorf("label %s names no key of ConfigMap %s/%s, and the config manager has no default", m.label, m.namespace, m.configMap)
}

// keysOf are the keys that a label can name, sorted.
func keysOf(files map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(files)), func(key string) bool {
		return strings.HasPrefix(key, config.OwnPluginKey) || len(validation.IsValidLabelValue(key)) > 0
	})
}

// noSuchKey is the error where a label names a key that is not there.
func noSuchKey(namespace, configMap string, files map[string]string) error {
	return fmt.Errorf("ConfigMap %s/%s has no such key; it has %s", namespace, configMap, cmp.Or(listed(keysOf(files)), "none that a label can name"))
}

func (m *configManager) keyed(key string) string {
	return fmt.Sprintf("ConfigMap %s/%s, key %s", m.namespace, m.configMap, key)
}

// configFiles reads all keys of a ConfigMap.
func (a *Agent) configFiles(ctx context.Context, namespace, name string) (map[string]string, error) {
	api, cancel := context.WithTimeout(ctx, a.settings.Timeouts.APICall)
	defer cancel()
	object, err := a.readConfigMap(api, namespace, name)
	switch {
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("reading ConfigMap %s/%s: %w; grant the agent a role there", namespace, name, err)
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, name, err)
	case err != nil:
		return nil, &outcome.UnseenError{Err: fmt.Errorf("reading ConfigMap %s/%s: %w", namespace, name, err)}
	}
	if object.Data == nil {
		return map[string]string{}, nil
	}
	return object.Data, nil
}
