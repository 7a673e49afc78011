package state

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// PluginConfig is the config of the node's device plugin, and how the agent gives it another one.
type PluginConfig struct {
	Read     bool            // the observation has read it; otherwise nothing else here is known
	Foretold bool            // the labels of a preview name another config than the node's own labels
	Method   config.Handover // empty if the agent knows none
	NoMethod string          // why it knows none
	Text     string          // of the config file; by label, the label's value
	Exists   bool            // there is such a file, or label
	Current  *catalog.PluginConfig
	ParseErr error // why Current is not known
	// PassedOver is what the plugin ignores in its config, and where; empty if there is nothing.
	PassedOver string

	Written      time.Time            // when the file was written
	NotifiedPods map[types.UID]string // readers that got a SIGHUP since they started, with the file's hash at that time
	Readers      []corev1.Pod         // pods that read the file
	Manager      *ConfigManager       // of a plugin that gets its config by label
	Early        bool                 // the plugin has read its MPS config before the control daemon was ready, and the daemon is ready now
	AwaitsMPS    bool                 // the plugin advertises nothing yet of what it shares by MPS, and may be early
	Named        *PluginConfigs       // those that the settings name; nil unless one of them may be needed
}

// PluginConfigs are the configs of the ConfigMap that the settings name, by their keys.
type PluginConfigs struct {
	Files map[string]string
	Err   error // why the agent cannot read it
}

// ConfigManager is NVIDIA's sidecar of the device plugin. It gives the plugin the config that a label of the node names.
type ConfigManager struct {
	Pod       corev1.Pod
	Label     string            // of the node
	Namespace string            // of the ConfigMap
	ConfigMap string            // its name; the label names one of its keys
	Dir       string            // directory in which the sidecar sees the keys as files
	Node      types.UID         // the node that the plugin runs on
	Damaged   bool              // the label names a key of this node's agent, and its text is no longer the one that the agent wrote
	Fallback  string            // the key for nodes without the label
	Fallbacks []string          // what it takes without label and Fallback, in this order: named, single, empty
	Files     map[string]string // the keys of the ConfigMap, with their texts; nil if the agent cannot read it
	ReadErr   error             // why it cannot
}

// The environment of the sidecar, as the plugin's chart and the GPU Operator deploy it.
const (
	EnvNodeLabel    = "NODE_LABEL"
	EnvConfigDir    = "CONFIG_FILE_SRCDIR"
	EnvDefault      = "DEFAULT_CONFIG"
	EnvFallbacks    = "FALLBACK_STRATEGIES"
	ManagerCommand  = "config-manager"
	fallbackNamed   = "named"
	fallbackSingle  = "single"
	fallbackEmpty   = "empty"
	fallbackNameKey = "default"
)

// Writing identifies one write of the file. The text alone does not: a pod that has read the same text before may have read another since.
func (p PluginConfig) Writing() string { return Hash(p.Text + p.Written.UTC().String()) }

// Config returns the text that the config manager gives to the plugin when the node's label has the value, if the agent accepts that text.
func (m *ConfigManager) Config(value string) (string, error) {
	key, err := m.keyFor(value)
	if err != nil || key == "" {
		return "", err
	}
	text, there := m.Files[key]
	switch {
	case !there:
		return "", NoSuchKey(m.Namespace, m.ConfigMap, m.Files)
	case m.Believes(key):
		return text, nil
	case m.Owns(key):
		return "", fmt.Errorf("%s does not have the text that this agent wrote: the agent ignores it", m.KeyName(key))
	default:
		return "", fmt.Errorf("%s is another agent's: the agent of this node ignores it", m.KeyName(key))
	}
}

// keyFor returns the key that the config manager takes when the node's label has the value; empty if it takes an empty config.
func (m *ConfigManager) keyFor(value string) (string, error) {
	if key := cmp.Or(value, m.Fallback); key != "" {
		return key, nil
	}
	for _, s := range m.Fallbacks {
		switch _, named := m.Files[fallbackNameKey]; {
		case s == fallbackNamed && named:
			return fallbackNameKey, nil
		case s == fallbackSingle && len(m.Files) == 1:
			for key := range m.Files {
				return key, nil
			}
		case s == fallbackEmpty:
			return "", nil
		}
	}
	return "", fmt.Errorf("label %s names no key of ConfigMap %s/%s, and the config manager has no default", m.Label, m.Namespace, m.ConfigMap)
}

// OwnKey returns the key for a config that this node's agent writes.
func (m *ConfigManager) OwnKey(text string) string {
	return config.OwnPluginKey + string(m.Node) + "-" + Hash(text)
}

// Owns reports whether the key is one that this node's agent, and no other, may write.
func (m *ConfigManager) Owns(key string) bool {
	return strings.HasPrefix(key, config.OwnPluginKey+string(m.Node)+"-")
}

// Believes reports whether the agent accepts the text under the key: a user's, or one that this node's agent wrote under that name. All agents may write to
// the ConfigMap. Unless a policy binds their keys to their nodes, each agent may write any agent's key.
func (m *ConfigManager) Believes(key string) bool {
	text, there := m.Files[key]
	return there && (!strings.HasPrefix(key, config.OwnPluginKey) || key == m.OwnKey(text))
}

// A note is the first line of an agent's config that copies everything but the sharing from a user's key.
const (
	baseNote       = "# Everything but the sharing is copied from key "
	formerBaseNote = "# All that is not asked of gpuslice is as in key " // of earlier agents: ConfigMaps live longer than agents, so it stays readable
)

// NotedBase returns the user's key that the agent's own config names in its note; empty if it names none, or the key no longer exists. The agent reads
// only this name from its own configs.
func (m *ConfigManager) NotedBase(own string) string {
	if !m.Believes(own) {
		return ""
	}
	note, _, _ := strings.Cut(m.Files[own], "\n")
	key := strings.TrimPrefix(strings.TrimPrefix(note, formerBaseNote), baseNote)
	if key != note && m.isUsers(key) {
		return key
	}
	return ""
}

// BaseFor returns the user's key that the config manager takes when the node's label has the value; empty if it takes none.
func (m *ConfigManager) BaseFor(value string) string {
	if key, err := m.keyFor(value); err == nil && m.isUsers(key) {
		return key
	}
	return ""
}

// isUsers reports whether the key exists, and is not an agent's.
func (m *ConfigManager) isUsers(key string) bool {
	_, there := m.Files[key]
	return there && !strings.HasPrefix(key, config.OwnPluginKey)
}

// Noted returns the agent's config with a note that names its base.
func Noted(base, text string) string {
	if base == "" {
		return text
	}
	return baseNote + base + "\n" + text
}

// KeysOf returns the keys that a label can name, sorted.
func KeysOf(files map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(files)), func(key string) bool {
		return strings.HasPrefix(key, config.OwnPluginKey) || len(validation.IsValidLabelValue(key)) > 0
	})
}

// NoSuchKey is the error if a label names a key that is not in the ConfigMap.
func NoSuchKey(namespace, configMap string, files map[string]string) error {
	return fmt.Errorf("ConfigMap %s/%s has no such key; it has %s", namespace, configMap, cmp.Or(sanitize.Listed(KeysOf(files)), "none that a label can name"))
}

// KeyName names a key of the ConfigMap in messages.
func (m *ConfigManager) KeyName(key string) string {
	return fmt.Sprintf("ConfigMap %s/%s, key %s", m.Namespace, m.ConfigMap, key)
}

// DesiredPlugin is the desired config of the device plugin.
type DesiredPlugin struct {
	Sharing      catalog.Sharing
	Known        bool               // Sharing is that of Text; the agent may be unable to parse a text from before the change
	Strategy     config.MIGStrategy // flags.migStrategy; empty if the config does not say
	Text         string             // of the file; by label, the label's value, empty for no label
	MatchText    bool               // the config must equal Text; otherwise an equivalent one is accepted
	AllowMissing bool               // no file at all is accepted, too
	KeyContent   string             // text of the key that the label names, if the agent writes that key
	AskedBy      string             // the label or setting that requests it
	UserManaged  bool               // a user has set the label, and the plugin's own config manager reads it
}

// SharingKnown returns the desired sharing of the GPUs; nil if it is not known, or the agent requests nothing of the plugin.
func (d *DesiredPlugin) SharingKnown() *catalog.Sharing {
	if d == nil || !d.Known {
		return nil
	}
	return &d.Sharing
}

// Matches reports whether the config has the desired sharing and MIG strategy.
func (d *DesiredPlugin) Matches(now *catalog.PluginConfig) bool {
	return now != nil && now.Sharing.Equal(d.Sharing) && OrNone(now.MIGStrategy) == OrNone(d.Strategy)
}

// OrNone returns the strategy that a plugin runs with if its config says s, which may be empty.
func OrNone(s config.MIGStrategy) config.MIGStrategy { return cmp.Or(s, config.MIGStrategyNone) }

// Hash returns a short hash of the text.
func Hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:6])
}

// pluginSet reports whether the plugin's config is the desired one.
func (s *Observed) pluginSet(want *DesiredPlugin) bool {
	p := s.Plugin
	switch {
	case want == nil || want.UserManaged:
		return true
	case p.Manager != nil:
		return p.Text == want.Text // whether an agent's key still has its text is not compared here: see ConfigManager.Believes
	case want.MatchText:
		return p.Exists && p.Text == want.Text || !p.Exists && want.AllowMissing
	default:
		return want.Matches(p.Current)
	}
}

// UnnotifiedReaders returns the readers that started before the file was written, and have got no SIGHUP since.
func (p PluginConfig) UnnotifiedReaders() []types.UID {
	var out []types.UID
	for _, pod := range p.Readers {
		if p.NotifiedPods[pod.UID] == p.Writing() {
			continue
		}
		for _, c := range pod.Status.ContainerStatuses {
			// Kubelet rounds StartedAt to whole seconds.
			if c.State.Running != nil && !c.State.Running.StartedAt.After(p.Written) {
				out = append(out, pod.UID)
				break
			}
		}
	}
	return out
}

// PlannedPlugin returns what the planner needs to know of the plugin's config.
func (s *Observed) PlannedPlugin(want *DesiredPlugin) plan.Plugin {
	p := s.Plugin
	out := plan.Plugin{
		Foretold: p.Foretold && want.UserManaged,
		Set:      s.pluginSet(want), Reloaded: len(p.UnnotifiedReaders()) == 0, NeedsReload: p.Manager == nil, Early: p.Early,
		Journaled: s.Journal != nil && s.Journal.ChangesPlugin(),
	}
	if p.Current != nil {
		out.Now = PlannedSharing(p.Current.Sharing, p.Current.MIGStrategy)
	}
	return out
}

// PlannedSharing returns the sharing as the planner needs it.
func PlannedSharing(s catalog.Sharing, strategy config.MIGStrategy) *plan.Sharing {
	return &plan.Sharing{MPS: s.Strategy == catalog.SharingMPS, Replicas: s.Replicas, Rename: s.Rename, MIG: string(strategy)}
}

// SharingText names the sharing in messages: "time-slicing of nvidia.com/gpu x 3".
func SharingText(s catalog.Sharing) string {
	if s.Strategy == catalog.SharingNone {
		return "nothing shared"
	}
	var parts []string
	for _, name := range s.Resources() {
		parts = append(parts, fmt.Sprintf("%s x %d", name, s.Replicas[name]))
	}
	text := fmt.Sprintf("%s of %s", s.Strategy, strings.Join(parts, ", "))
	if s.Rename {
		text += ", renamed"
	}
	return text
}

// ConfigText names the plugin's desired config in messages.
func (d *DesiredPlugin) ConfigText() string {
	switch {
	case d == nil:
		return ""
	case !d.Known:
		return "as it was"
	default:
		return SharingText(d.Sharing)
	}
}

// LabelMPSCapable is the node label that the DaemonSet of NVIDIA's MPS control daemon selects.
const (
	LabelMPSCapable = "nvidia.com/mps.capable"
	SetsMPSCapable  = "GPU feature discovery sets it by the device plugin's config"
)

// PicksKeyWithoutLabel reports whether the config manager takes one of the ConfigMap's keys for a node without the label.
func (m *ConfigManager) PicksKeyWithoutLabel() bool {
	_, named := m.Files[fallbackNameKey]
	return slices.Contains(m.Fallbacks, fallbackNamed) && named || slices.Contains(m.Fallbacks, fallbackSingle) && len(m.Files) == 1
}

// WithTargets returns the GPUs as they will be, with the fields that the device plugin reads.
func WithTargets(gpus []nvml.GPU, targets plan.Targets) []nvml.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		target, named := targets[out[i].UUID]
		if named && !(target.ModeOnly && (out[i].SwitchesAlone() || out[i].Enabled == target.MIG)) {
			out[i] = out[i].With(target.Request)
		}
	}
	return out
}

// PluginAskedBy returns the label or setting that requests the device plugin's config.
func (d Desired) PluginAskedBy() string {
	if d.Plugin != nil && d.Plugin.AskedBy != "" {
		return d.Plugin.AskedBy
	}
	return fmt.Sprintf("label %s=%s", d.Label, d.Name)
}
