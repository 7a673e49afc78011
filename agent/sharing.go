package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// desiredPlugin is what shall become of the device plugin's config.
type desiredPlugin struct {
	sharing      config.Sharing
	known        bool               // sharing is what text says; a text from before the change may be nothing that can be read
	strategy     config.MIGStrategy // flags.migStrategy; empty if the config does not say
	text         string             // of the file; by label, the label's value, empty for no label
	matchText    bool               // the config must equal text; otherwise an equivalent one is accepted
	allowMissing bool               // no file at all will do as well
	keyContent   string             // of the key that the label names, if that is ours to write
	userManaged  bool               // people have set the label themselves, and the plugin's own config manager goes by it
}

// sharingKnown is how the plugin is to share GPUs; nil if that is not known, or nothing is wanted of it.
func (w *desiredPlugin) sharingKnown() *config.Sharing {
	if w == nil || !w.known {
		return nil
	}
	return &w.sharing
}

// sharingOf is the config that a profile takes on this node, whose GPUs it cuts so.
func (a *Agent) sharingOf(seen *observed, profile config.Profile, after []nvml.GPU) (*desiredPlugin, error) {
	p := seen.plugin
	if p.method == "" {
		return nil, a.noHandover(*seen)
	}
	if p.manager == nil && outcome.IsUnseen(p.parseErr) {
		return nil, p.parseErr
	}
	want := &desiredPlugin{known: true}
	switch {
	case profile.Sharing != nil:
		want.sharing = *profile.Sharing
	case p.current != nil:
		want.sharing = p.current.Sharing // which stays as it is
	case outcome.IsUnseen(p.parseErr):
		return nil, p.parseErr
	default:
		return nil, &outcome.Stalled{
			Reason: config.ReasonNoHandover, NoHandover: true,
			Message: fmt.Sprintf("the profile leaves the sharing as it is, and that is not known: %v", p.parseErr),
		}
	}
	var err error
	if want.strategy, err = a.strategyOf(seen, profile.MIGStrategy, want.sharing, after); err != nil {
		return nil, err
	}
	if want.as(p.current) {
		want.text = p.text
		return want, nil
	}
	if p.manager != nil {
		return a.keyOf(p, want)
	}
	base := p.text
	if p.current == nil {
		base = "" // what cannot be read is nothing to go on from
	}
	text, err := a.plugin.configs.Render([]byte(base), want.sharing, want.strategy)
	if err != nil {
		return nil, err
	}
	want.text = string(text)
	return want, nil
}

// strategyOf is what the plugin's config is to say of the MIG strategy: what the profile does, or else what fits, which is what the config
// says already wherever that will do. Where the plugin is told besides its config, or by the settings, that is nothing to choose.
func (a *Agent) strategyOf(seen *observed, asked config.MIGStrategy, s config.Sharing, after []nvml.GPU) (config.MIGStrategy, error) {
	now, set := config.MIGStrategy(""), a.settings.MIGStrategy
	if seen.plugin.current != nil {
		now = seen.plugin.current.MIGStrategy
	}
	switch {
	case asked != "" && set != config.MIGStrategyAuto && set != asked:
		return "", &outcome.Stalled{Reason: config.ReasonWrongMIGStrategy, Message: fmt.Sprintf(
			"the profile's migStrategy is %s, and the settings' is %s: set that to auto, so that the device plugin's config decides", asked, set)}
	case asked != "":
		return asked, nil
	case set != config.MIGStrategyAuto || seen.toldStrategy() != "":
		return now, nil
	}
	if fits := config.FittingStrategy(after, orNone(now), s.Strategy == config.SharingMPS); fits != orNone(now) {
		return fits, nil
	}
	return now, nil
}

// as reports whether the config says what is wanted.
func (w *desiredPlugin) as(now *config.PluginConfig) bool {
	return now != nil && now.Sharing.Equal(w.sharing) && orNone(now.MIGStrategy) == orNone(w.strategy)
}

// noHandover says why the plugin cannot be given another config. One that is still to come may be given one then.
func (a *Agent) noHandover(seen observed) error {
	why := seen.plugin.noMethod
	if len(seen.devicePlugin.pods) == 0 {
		return &outcome.Waiting{
			Reason: config.ReasonNoDevicePlugin, For: outcome.ForDevicePlugin, Message: "nothing is disturbed: " + why, After: driverRetry, Advice: a.devicePluginAdvice(seen),
		}
	}
	return &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: why}
}

// keyOf finds a key of the config manager's ConfigMap with the sharing, or makes up one.
func (a *Agent) keyOf(p pluginConfig, want *desiredPlugin) (*desiredPlugin, error) {
	m := p.manager
	if outcome.IsUnseen(m.readErr) {
		return nil, m.readErr
	}
	if m.readErr != nil {
		return nil, &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: m.readErr.Error()}
	}
	for _, key := range slices.Sorted(maps.Keys(m.files)) {
		if len(validation.IsValidLabelValue(key)) > 0 {
			continue // no label can name it
		}
		parsed, err := a.plugin.configs.Parse([]byte(m.files[key]))
		if err != nil || !want.as(&parsed) {
			continue
		}
		want.text = key
		if strings.HasPrefix(key, config.OwnPluginKey) {
			want.keyContent = m.files[key] // it may be so new that the config manager does not see it yet
		}
		return want, nil
	}
	if p.method == config.HandoverLabel {
		return nil, &outcome.Stalled{
			Reason: config.ReasonNoHandover, NoHandover: true,
			Message: fmt.Sprintf("no key of ConfigMap %s/%s has the sharing %s, and the MIG strategy %s; add one, or set devicePlugin.handover to configmap",
				m.namespace, m.configMap, sharingText(want.sharing), orNone(want.strategy)),
		}
	}
	base, err := m.config(p.text) // all else stays as it is
	if err != nil {
		base = ""
	}
	body, err := a.plugin.configs.Render([]byte(base), want.sharing, want.strategy)
	if err != nil {
		return nil, err
	}
	want.keyContent, want.text = string(body), config.OwnPluginKey+hash(string(body))
	return want, nil
}

// orNone is the strategy of a plugin whose config does not say any.
func orNone(s config.MIGStrategy) config.MIGStrategy { return cmp.Or(s, config.MIGStrategyNone) }

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:6])
}

// namedConfig is the config of the device plugin that the node's label names. Where the plugin has a config manager, that goes by the label
// itself, and all that is left is proof.
func (a *Agent) namedConfig(ctx context.Context, seen *observed, key string) (*desiredPlugin, error) {
	p := seen.plugin
	switch {
	case p.method == "":
		return nil, a.noHandover(*seen)
	case outcome.IsUnseen(p.parseErr):
		return nil, p.parseErr
	case p.manager != nil && apierrors.IsForbidden(p.parseErr):
		return nil, nil // what it means is between the label and the config manager
	case p.manager != nil && p.current == nil:
		return nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("%s: %v", a.pluginAskedBy(seen.node, key), p.parseErr)}
	case p.manager != nil:
		return &desiredPlugin{sharing: p.current.Sharing, strategy: p.current.MIGStrategy, known: true, text: p.text, userManaged: true}, nil
	}
	ref := a.settings.DevicePlugin.ConfigMap
	files, err := a.configFiles(ctx, ref.Namespace, ref.Name)
	text, ok := files[key]
	if outcome.IsUnseen(err) {
		return nil, err
	}
	if err == nil && !ok {
		err = noSuchKey(ref.Namespace, ref.Name, files)
	}
	var parsed config.PluginConfig
	if err == nil {
		parsed, err = a.plugin.configs.Parse([]byte(text))
	}
	if err != nil {
		return nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("%s: %v", a.pluginAskedBy(seen.node, key), err)}
	}
	return &desiredPlugin{sharing: parsed.Sharing, strategy: parsed.MIGStrategy, known: true, text: text, matchText: true}, nil
}

// former is the way back to the config that the plugin had.
func (a *Agent) former(seen *observed) *desiredPlugin {
	j := seen.journal
	if !j.ChangesPlugin() {
		return nil
	}
	want := &desiredPlugin{text: j.Plugin.Text, matchText: true, allowMissing: j.Plugin.Absent, keyContent: j.Plugin.Body}
	if m := seen.plugin.manager; m != nil {
		// What it says is in a ConfigMap, and need not be the same as then: enough for a plan, and not for a proof.
		text, err := m.config(want.text)
		if want.keyContent != "" {
			text, err = want.keyContent, nil
		}
		if err == nil {
			if parsed, err := a.plugin.configs.Parse([]byte(text)); err == nil {
				want.sharing, want.strategy = parsed.Sharing, parsed.MIGStrategy
			}
		}
		return want
	}
	parsed, err := a.plugin.configs.Parse([]byte(want.text))
	want.sharing, want.strategy, want.known = parsed.Sharing, parsed.MIGStrategy, err == nil
	return want
}

// pluginSet reports whether the plugin's config is as wanted.
func (s observed) pluginSet(want *desiredPlugin) bool {
	p := s.plugin
	switch {
	case want == nil || want.userManaged:
		return true
	case p.manager != nil:
		return p.text == want.text && (want.keyContent == "" || p.manager.files[want.text] == want.keyContent)
	case want.matchText:
		return p.exists && p.text == want.text || !p.exists && want.allowMissing
	default:
		return want.as(p.current)
	}
}

// pluginTold reports whether everybody who reads the plugin's config file has read it as it is.
func (a *Agent) pluginTold(seen observed) bool {
	return len(a.untold(seen.plugin)) == 0
}

// untold are the readers that run since before the file was written, and were not told since.
func (a *Agent) untold(p pluginConfig) []types.UID {
	var out []types.UID
	for _, pod := range p.readers {
		if p.notifiedPods[pod.UID] == p.writing() {
			continue
		}
		for _, c := range pod.Status.ContainerStatuses {
			// Kubelet tells whole seconds.
			if c.State.Running != nil && !c.State.Running.StartedAt.After(p.written) {
				out = append(out, pod.UID)
				break
			}
		}
	}
	return out
}

// plannedSharing is the sharing as the planner has it.
func plannedSharing(s config.Sharing, strategy config.MIGStrategy) *plan.Sharing {
	return &plan.Sharing{MPS: s.Strategy == config.SharingMPS, Replicas: s.Replicas, Rename: s.Rename, MIG: string(strategy)}
}

// plannedPlugin is what the planner needs of the plugin's config.
func (a *Agent) plannedPlugin(seen observed, want desired) plan.Plugin {
	p := seen.plugin
	out := plan.Plugin{
		Set: seen.pluginSet(want.plugin), Told: a.pluginTold(seen), Tells: p.manager == nil, Noted: seen.journal != nil && seen.journal.ChangesPlugin(),
	}
	if p.current != nil {
		out.Now = plannedSharing(p.current.Sharing, p.current.MIGStrategy)
	}
	return out
}

// replicas are the devices of a pod as kubelet names them.
func replicas(given map[string][]string) []plan.Replica {
	var out []plan.Replica
	for _, resource := range slices.Sorted(maps.Keys(given)) {
		if !holders.GPUResource(resource) {
			continue
		}
		for _, id := range given[resource] {
			out = append(out, plan.Replica{Resource: resource, ID: id})
		}
	}
	return out
}

// sharingText says it as people do: "time-slicing of nvidia.com/gpu x 3".
func sharingText(s config.Sharing) string {
	if s.Strategy == config.SharingNone {
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

// configText names what the plugin's config shall be.
func (w *desiredPlugin) configText() string {
	switch {
	case w == nil:
		return ""
	case !w.known:
		return "as it was"
	default:
		return sharingText(w.sharing)
	}
}

// labelMPSCapable is the label by which NVIDIA's MPS control daemon comes to a node.
const (
	labelMPSCapable = "nvidia.com/mps.capable"
	setsMPSCapable  = "GPU feature discovery sets it by the device plugin's config"
)

// missingMPS says what a node lacks that shall share its GPUs by MPS: its control daemon takes each GPU for itself alone.
func (s observed) missingMPS() []string {
	var out []string
	capable, there := s.node.Labels[labelMPSCapable]
	switch {
	case len(s.devicePlugin.mpsDaemons) > 0:
	case capable == "true":
		out = append(out, "no MPS control daemon runs on this node: none of its pods matches mps.podSelector of the settings")
	case there:
		out = append(out, fmt.Sprintf("no MPS control daemon runs on this node, whose label %s is %q and not true: %s", labelMPSCapable, capable, setsMPSCapable))
	default:
		out = append(out, fmt.Sprintf("no MPS control daemon runs on this node, which has not the label %s=true by which it comes: %s", labelMPSCapable, setsMPSCapable))
	}
	for _, gpu := range s.gpus {
		if !gpu.Lost && gpu.ComputeMode != "" && gpu.ComputeMode != computeMPS {
			out = append(out, fmt.Sprintf("GPU %d: its compute mode is %s, and is %s under MPS", gpu.Index, gpu.ComputeMode, computeMPS))
		}
	}
	return out
}

var errTooLong = errors.New("it is longer than the journal can hold, and could not be brought back")

// fits refuses, before anything is disturbed, what the device plugin of this node would not do.
func (a *Agent) fits(seen observed, want desired) error {
	if len(want.targets) == 0 && want.plugin == nil {
		return nil
	}
	after := asWished(seen.gpus, want.targets)
	strategy, err := a.strategyFor(seen, want)
	if err == nil && a.knowsStrategy(seen, want) {
		err = config.CheckStrategy(after, strategy)
	}
	if err == nil && !a.knowsStrategy(seen, want) && seen.runsUntold(want.plugin) && slices.ContainsFunc(after, func(g nvml.GPU) bool { return g.Enabled }) {
		err = &config.StrategyError{Strategy: config.MIGStrategyNone, Problem: "it offers no MIG device: its config has no flags.migStrategy, " +
			"and neither its environment nor label " + config.LabelMIGStrategy + " says any; set flags.migStrategy: mixed in its config"}
	}
	if err == nil && want.plugin != nil {
		err = config.CheckSharing(after, strategy, want.plugin.sharing, slices.Collect(maps.Keys(capacity.Expected(after, strategy))))
	}
	if err != nil {
		return &outcome.Stalled{Reason: reasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", want.label, want.name, err)}
	}
	return nil
}

// strategyFor is the plugin's MIG strategy under the config that is wanted. What its pod is told wins over the config.
func (a *Agent) strategyFor(seen observed, want desired) (config.MIGStrategy, error) {
	asked := config.MIGStrategy("")
	if want.plugin != nil {
		asked = want.plugin.strategy
	}
	if seen.devicePlugin.rivals != "" {
		return a.strategy(seen, want.plugin), &config.StrategyError{Strategy: a.strategy(seen, want.plugin), Problem: seen.devicePlugin.rivals}
	}
	for _, pod := range seen.devicePlugin.pods {
		told := toldStrategy(pod)
		set := a.settings.MIGStrategy
		switch {
		case told == "":
		case asked != "" && asked != told:
			return told, &config.StrategyError{Strategy: told, Problem: fmt.Sprintf(
				"the config's flags.migStrategy, %s, has no effect: pod %s/%s is told otherwise by its environment or arguments; take it out of either",
				asked, pod.Namespace, pod.Name)}
		case set != config.MIGStrategyAuto && set != told:
			return told, &config.StrategyError{Strategy: told, Problem: fmt.Sprintf(
				"migStrategy of the settings, %s, is not true on this node, by pod %s/%s: set it to auto", set, pod.Namespace, pod.Name)}
		}
	}
	return a.strategy(seen, want.plugin), nil
}

// knowsStrategy reports whether the plugin's MIG strategy is more than a guess, by which nothing is refused.
func (a *Agent) knowsStrategy(seen observed, want desired) bool {
	return a.settings.MIGStrategy != config.MIGStrategyAuto || seen.toldStrategy() != "" || want.plugin != nil && want.plugin.strategy != "" ||
		seen.node.Labels[config.LabelMIGStrategy] != ""
}

// runsUntold reports whether the device plugin is known to be told no MIG strategy at all, by which it has none: all that it is given
// is the config.
func (s observed) runsUntold(want *desiredPlugin) bool {
	return s.plugin.method != "" && len(s.devicePlugin.pods) > 0 && want != nil && want.known && want.strategy == ""
}

// asWished are the GPUs as they will be, as far as the device plugin goes by it.
func asWished(gpus []nvml.GPU, targets plan.Targets) []nvml.GPU {
	out := slices.Clone(gpus)
	for i := range out {
		target, named := targets[out[i].UUID]
		if !named || !out[i].Capable {
			continue
		}
		out[i].Enabled, out[i].Instances = target.MIG, nil
		for _, name := range slices.Sorted(maps.Keys(target.Devices)) {
			for range target.Devices[name] {
				out[i].Instances = append(out[i].Instances, nvml.Instance{Devices: []nvml.Device{{Profile: name}}})
			}
		}
	}
	return out
}
