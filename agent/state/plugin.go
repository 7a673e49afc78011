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

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// PluginConfig is the config of the node's device plugin, and the method by which the agent gives it another one.
type PluginConfig struct {
	Read     bool            // the observation has read it; nothing else here is known without
	Method   config.Handover // empty if the agent knows none
	NoMethod string          // why it knows none
	Text     string          // of the config file; by label, the label's value
	Exists   bool            // there is such a file, or label
	Current  *catalog.PluginConfig
	ParseErr error // why Current is not known
	// PassedOver is what the plugin passes over in the config that it runs by, with where that is; empty if there is nothing.
	PassedOver string

	Written      time.Time            // when the file was written
	NotifiedPods map[types.UID]string // readers that got a SIGHUP since they started, and a hash of the file then
	Readers      []corev1.Pod         // pods that read the file
	Manager      *ConfigManager       // of a plugin that gets its config by label
	Early        bool                 // the plugin has read of MPS before the control daemon was ready, which it is now
	AwaitsMPS    bool                 // the plugin offers nothing yet of what it shares by MPS, and may be early
	Named        *PluginConfigs       // those that the settings name; nil unless a config of them may be needed
}

// PluginConfigs are the configs of the ConfigMap that the settings name, by their keys.
type PluginConfigs struct {
	Files map[string]string
	Err   error // why the agent cannot read it
}

// ConfigManager is NVIDIA's sidecar of the device plugin, which gives the plugin the config that a label of the node names.
type ConfigManager struct {
	Pod       corev1.Pod
	Label     string            // of the node
	Namespace string            // of the ConfigMap
	ConfigMap string            // its name; the label names one of its keys
	Dir       string            // directory in which the sidecar sees the keys as files
	Node      types.UID         // the node that the plugin runs on
	Damaged   bool              // the label names a key of this node's agent, and the text that it has written is there no more
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

// Config returns the text that the config manager gives to the plugin of a node whose label has the value, if the agent goes by it.
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
		return "", fmt.Errorf("%s has another text than this agent has written: the agent does not go by it", m.KeyName(key))
	default:
		return "", fmt.Errorf("%s is not of this node's agent, which does not go by it", m.KeyName(key))
	}
}

// keyFor returns the key that the config manager takes for a node whose label has the value; empty if it takes an empty config.
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

// Believes reports whether the agent goes by the text under the key: people's, or what this node's agent has written under that name. All
// agents have the right to write to the ConfigMap, and where no policy binds their keys to their nodes, each of them may write any of the agents' keys.
func (m *ConfigManager) Believes(key string) bool {
	text, there := m.Files[key]
	return there && (!strings.HasPrefix(key, config.OwnPluginKey) || key == m.OwnKey(text))
}

// baseNote is the first line of an agent's config whose fields other than the sharing are those of a key of people.
const baseNote = "# All that is not asked of gpuslice is as in key "

// NotedBase returns the key of people that the agent's config under the key names as its base; empty if it names none that is there. That name is
// all that the agent takes over from a config of its own.
func (m *ConfigManager) NotedBase(own string) string {
	if !m.Believes(own) {
		return ""
	}
	note, _, _ := strings.Cut(m.Files[own], "\n")
	if key, noted := strings.CutPrefix(note, baseNote); noted && m.ofPeople(key) {
		return key
	}
	return ""
}

// BaseFor returns the key of people that the config manager takes for a node whose label has the value; empty if it takes none.
func (m *ConfigManager) BaseFor(value string) string {
	if key, err := m.keyFor(value); err == nil && m.ofPeople(key) {
		return key
	}
	return ""
}

// ofPeople reports whether there is such a key, which no agent has written.
func (m *ConfigManager) ofPeople(key string) bool {
	_, there := m.Files[key]
	return there && !strings.HasPrefix(key, config.OwnPluginKey)
}

// Noted returns the agent's config with the note of its base.
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

// DesiredPlugin is what shall become of the device plugin's config.
type DesiredPlugin struct {
	Sharing      catalog.Sharing
	Known        bool               // Text says Sharing; the agent may not be able to parse a text from before the change
	Strategy     config.MIGStrategy // flags.migStrategy; empty if the config does not say
	Text         string             // of the file; by label, the label's value, empty for no label
	MatchText    bool               // the config must equal text; otherwise an equivalent one is accepted
	AllowMissing bool               // no file at all will do as well
	KeyContent   string             // text of the key that the label names, if the agent writes that key
	AskedBy      string             // the label or setting that asks for it
	UserManaged  bool               // a user has set the label, and the plugin's own config manager reads it
}

// SharingKnown returns how the plugin shall share GPUs; nil if that is not known, or the agent wants nothing of the plugin.
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

// OrNone returns the strategy by which a plugin runs if its config says s, which may be empty.
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
		return p.Text == want.Text // what has become of the text under a key of the agent's is no change: see ConfigManager.Believes
	case want.MatchText:
		return p.Exists && p.Text == want.Text || !p.Exists && want.AllowMissing
	default:
		return want.Matches(p.Current)
	}
}

// UnnotifiedReaders returns the readers of the file that run since before it was written, and got no SIGHUP since.
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
		Set: s.pluginSet(want), Reloaded: len(p.UnnotifiedReaders()) == 0, NeedsReload: p.Manager == nil, Early: p.Early,
		Journaled: s.Journal != nil && s.Journal.ChangesPlugin(),
	}
	if p.Current != nil {
		out.Now = PlannedSharing(p.Current.Sharing, p.Current.MIGStrategy)
	}
	return out
}

// MIGStrategy returns how the plugin presents MIG devices under the desired config: as the settings say, unless that is auto, else by its environment or
// arguments, else by the config, else by the node's label.
func (s *Observed) MIGStrategy(set config.MIGStrategy, want *DesiredPlugin) config.MIGStrategy {
	if s.Owner.ByClaims() {
		return config.MIGStrategyMixed // NVIDIA's DRA driver offers each device by its profile
	}
	if set != config.MIGStrategyAuto {
		return set
	}
	if explicit := s.ExplicitStrategy(); explicit != "" {
		return explicit
	}
	if want != nil && want.Strategy != "" {
		return want.Strategy
	}
	if want != nil && want.Sharing.Strategy == catalog.SharingMPS {
		return config.MIGStrategyNone // a plugin without a strategy runs with none, and MPS does not work with mixed
	}
	return set.On(s.Node.Labels[config.LabelMIGStrategy])
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

// MissingMPS says what a node lacks that shall share its GPUs by MPS. MPS's control daemon must have each GPU in exclusive-process mode.
func (s *Observed) MissingMPS() []string {
	var out []string
	capable, there := s.Node.Labels[LabelMPSCapable]
	switch {
	case len(s.DevicePlugin.MPSDaemons) > 0:
	case capable == "true":
		out = append(out, "no MPS control daemon runs on this node: none of its pods matches mps.podSelector of the settings")
	case there:
		out = append(out, fmt.Sprintf("no MPS control daemon runs on this node, whose label %s is %q and not true: %s", LabelMPSCapable, capable, SetsMPSCapable))
	default:
		out = append(out, fmt.Sprintf("no MPS control daemon runs on this node, which has not the label %s=true by which it comes: %s",
			LabelMPSCapable, SetsMPSCapable))
	}
	for _, gpu := range s.GPUs {
		if !gpu.Lost && gpu.ComputeMode != "" && gpu.ComputeMode != computeMPS {
			out = append(out, fmt.Sprintf("GPU %d: its compute mode is %s, and is %s under MPS", gpu.Index, gpu.ComputeMode, computeMPS))
		}
	}
	return out
}

// RunsWithoutStrategy reports whether the device plugin runs, or will run, with the MIG strategy none, since nothing gives it another: neither its
// environment and arguments, for which see ExplicitStrategy, nor its config, which is the desired one if there is any.
func (s *Observed) RunsWithoutStrategy(want *DesiredPlugin) bool {
	switch {
	case len(s.DevicePlugin.Pods) == 0:
		return false
	case want != nil:
		return want.Known && want.Strategy == ""
	case s.Plugin.Method != "":
		return s.Plugin.Current != nil && s.Plugin.Current.MIGStrategy == ""
	default:
		return !slices.ContainsFunc(s.DevicePlugin.Pods, readsConfig) && !s.offersMIGDevices()
	}
}

// offersMIGDevices reports whether kubelet has MIG devices to give out, which a plugin with the strategy none never offers.
func (s *Observed) offersMIGDevices() bool {
	for _, devices := range s.Kubelet.Offered {
		if slices.ContainsFunc(devices, func(id string) bool { return strings.HasPrefix(id, plan.MIGDeviceID) }) {
			return true
		}
	}
	return false
}

// PicksKeyWithoutLabel reports whether the config manager takes one of the ConfigMap's keys for a node without the label.
func (m *ConfigManager) PicksKeyWithoutLabel() bool {
	_, named := m.Files[fallbackNameKey]
	return slices.Contains(m.Fallbacks, fallbackNamed) && named || slices.Contains(m.Fallbacks, fallbackSingle) && len(m.Files) == 1
}

// computeMPS is the compute mode of a GPU that MPS uses.
const computeMPS = nvml.ComputeExclusiveProcess

// LacksDevicePlugin reports whether the node has no device plugin that the agent knows, although the agent keeps none away. Where NVIDIA's DRA driver gives
// out the GPUs, none is missing: one beside it would give each GPU out twice.
func (s *Observed) LacksDevicePlugin() bool {
	noPod := !s.Owner.ByClaims() && s.Kubelet.Err == nil && len(s.DevicePlugin.Pods) == 0
	return noPod && !s.Marks.Fenced && !s.paused() && (s.OffersGPUs() || len(s.Marks.Startup) == 0)
}

// KubeletPlugins returns the pods of what gives out the node's GPUs, and reads how they are cut when it starts: NVIDIA's device plugin, or the
// kubelet plugin of its DRA driver.
func (s *Observed) KubeletPlugins() []corev1.Pod {
	if !s.Owner.ByClaims() {
		return s.DevicePlugin.Pods
	}
	var out []corev1.Pod
	for _, p := range driverPods(s.Pods) {
		out = append(out, *p)
	}
	return out
}

// Offerer names what gives out the node's GPUs.
func (s *Observed) Offerer() string {
	if s.Owner.ByClaims() {
		return "NVIDIA's DRA driver"
	}
	return "the device plugin"
}

// Offered returns the GPUs, and the parts of them, that pods can get: those of the device plugin that kubelet gives out, or those in the ResourceSlices of
// NVIDIA's DRA driver.
func (s *Observed) Offered() capacity.Resources {
	switch {
	case s.Owner.Kind == api.OwnerDRAStatic && s.Owner.ByClaims():
		return s.DRA.Offered()
	case s.Owner.ByClaims(): // it is not settled yet how the GPUs are cut
		return capacity.Resources{}
	}
	return capacity.Offered(s.Kubelet.Offered)
}

// CapacityText writes what Offered returns for users to check. Those who claim devices know them by class and profile: "gpu.nvidia.com 1, mig.nvidia.com
// 1g.10gb 7". Where NVIDIA's DRA driver cuts the GPUs itself there is no such figure.
func (s *Observed) CapacityText(want Desired) string {
	byClaims := s.Owner.ByClaims()
	switch {
	case byClaims && s.Owner.Kind == api.OwnerDRADynamic:
		return "as claims ask"
	case byClaims && s.DRA.Err != nil, !byClaims && s.Kubelet.Err != nil:
		return "not known"
	case !byClaims:
		return s.Offered().Summary(want.Plugin.SharingKnown())
	}
	out := capacity.Resources{}
	for name, ids := range s.Offered() {
		out[byClass(name)] = ids
	}
	return out.String()
}

// OffersGPUs reports whether kubelet has GPUs, or parts of them, to give out. Beside LacksDevicePlugin it says that they are a plugin's which the
// agent cannot start again, and which would not read what a change has made.
func (s *Observed) OffersGPUs() bool { return len(capacity.Offered(s.Kubelet.Offered)) > 0 }

// RunsUnder returns the MIG strategy under which the device plugin runs by what kubelet offers, if that differs from the one that the agent
// assumes.
func (s *Observed) RunsUnder() config.MIGStrategy {
	if s.Kubelet.Err != nil || s.DevicePlugin.Rivals != "" {
		return ""
	}
	return capacity.RunsUnder(s.GPUs, s.Kubelet.Offered, s.Capacity.Strategy)
}

// WhyNoPlugin is the message about a node that LacksDevicePlugin.
func (s *Observed) WhyNoPlugin() string {
	if s.OffersGPUs() {
		return "what offers " + sanitize.Listed(slices.Sorted(maps.Keys(capacity.Offered(s.Kubelet.Offered)))) +
			" to kubelet is no pod that devicePlugin of the settings matches, so that the agent cannot restart it"
	}
	return "no device plugin offers the GPUs to kubelet, and no pod of this node matches devicePlugin.podSelector of the settings"
}

// WithTargets returns the GPUs as they will be, with what the device plugin reads of them.
func WithTargets(gpus []nvml.GPU, targets plan.Targets) []nvml.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		if target, named := targets[out[i].UUID]; named {
			out[i] = out[i].With(target.Request)
		}
	}
	return out
}

// PluginAskedBy returns the label or setting that asks for the device plugin's config.
func (d Desired) PluginAskedBy() string {
	if d.Plugin != nil && d.Plugin.AskedBy != "" {
		return d.Plugin.AskedBy
	}
	return fmt.Sprintf("label %s=%s", d.Label, d.Name)
}
