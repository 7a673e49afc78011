package decide

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// pluginKeyAskedBy names the label or setting that requests a key of the device plugin's configs.
func pluginKeyAskedBy(node *corev1.Node, key string) string {
	if node.Labels[config.LabelDevicePluginConfig] != key {
		return "devicePlugin.defaultConfig of the settings, " + key
	}
	return fmt.Sprintf("label %s=%s", config.LabelDevicePluginConfig, key)
}

// sharingOf returns the plugin's config for a profile on this node. After holds the GPUs as the profile cuts them.
func (r *Resolver) sharingOf(seen *state.Observed, profile catalog.Profile, after []nvml.GPU) (*state.DesiredPlugin, error) {
	p := seen.Plugin
	if p.Method == "" {
		return nil, r.noHandover(seen)
	}
	if p.Manager == nil && outcome.IsUnseen(p.ParseErr) {
		return nil, p.ParseErr
	}
	want := &state.DesiredPlugin{Known: true}
	switch {
	case profile.Sharing != nil:
		want.Sharing = *profile.Sharing
	case p.Current != nil:
		want.Sharing = p.Current.Sharing // the profile does not change it
	case outcome.IsUnseen(p.ParseErr):
		return nil, p.ParseErr
	default:
		return nil, &outcome.Stalled{
			Reason: config.ReasonNoHandover, NoHandover: true,
			Message: fmt.Sprintf("the profile keeps the current sharing, which is not known: %v", p.ParseErr),
		}
	}
	var err error
	if want.Strategy, err = r.strategyOf(seen, profile.MIGStrategy, want.Sharing, after); err != nil {
		return nil, err
	}
	if want.Matches(p.Current) {
		want.Text = p.Text
		return want, nil
	}
	if p.Manager != nil {
		return r.keyOf(seen, want)
	}
	base := p.Text
	if p.Current == nil {
		base = "" // the agent cannot edit a config that it cannot read
	}
	text, err := r.Format.Render([]byte(base), want.Sharing, want.Strategy)
	if err != nil {
		return nil, err
	}
	want.Text = string(text)
	return want, nil
}

// strategyOf returns the MIG strategy for the plugin's config: the profile's, else the present one if it fits the GPUs, else one that fits. If the
// settings or the plugin's environment or arguments set the strategy, the config keeps its own.
func (r *Resolver) strategyOf(seen *state.Observed, asked config.MIGStrategy, s catalog.Sharing, after []nvml.GPU) (config.MIGStrategy, error) {
	now, set := config.MIGStrategy(""), r.Settings.MIGStrategy
	if seen.Plugin.Current != nil {
		now = seen.Plugin.Current.MIGStrategy
	}
	switch {
	case asked != "" && set != config.MIGStrategyAuto && set != asked:
		return "", &outcome.Stalled{Reason: config.ReasonWrongMIGStrategy, Message: fmt.Sprintf(
			"set migStrategy of the settings to auto, so that the device plugin's config decides: the profile says %s, the settings say %s", asked, set)}
	case asked != "":
		return asked, nil
	case set != config.MIGStrategyAuto || seen.ExplicitStrategy() != "":
		return now, nil
	}
	if fits := catalog.FittingStrategy(after, state.OrNone(now), s.Strategy == catalog.SharingMPS); fits != state.OrNone(now) {
		return fits, nil
	}
	return now, nil
}

// noHandover returns why the agent cannot give the plugin another config. If no plugin runs yet, the agent waits for one.
func (r *Resolver) noHandover(seen *state.Observed) error {
	why := seen.Plugin.NoMethod
	if len(seen.DevicePlugin.Pods) == 0 {
		return &outcome.Waiting{
			Reason: config.ReasonNoDevicePlugin, For: offer.AbsentFor(seen), Advice: seen.DevicePlugin.Advice,
			Message: why, Else: "changes nothing until then", After: outcome.DriverRetry,
		}
	}
	return &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: why}
}

// keyOf finds a key of the config manager's ConfigMap with the sharing, or makes a new one.
func (r *Resolver) keyOf(seen *state.Observed, want *state.DesiredPlugin) (*state.DesiredPlugin, error) {
	p, m := seen.Plugin, seen.Plugin.Manager
	if outcome.IsUnseen(m.ReadErr) {
		return nil, m.ReadErr
	}
	if m.ReadErr != nil {
		return nil, &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: m.ReadErr.Error()}
	}
	for _, key := range slices.Sorted(maps.Keys(m.Files)) {
		if len(validation.IsValidLabelValue(key)) > 0 || !m.Believes(key) || m.Owns(key) && key != p.Text {
			continue // no label can name it, it is another agent's, or anyone may have written it: the agent writes its own again, under the same name
		}
		parsed, err := r.Format.Parse([]byte(m.Files[key]))
		if err != nil || !want.Matches(&parsed) {
			continue
		}
		want.Text = key
		if m.Owns(key) {
			want.KeyContent = m.Files[key] // the key may be so new that the config manager does not see it yet
		}
		return want, nil
	}
	if p.Method == config.HandoverLabel {
		return nil, &outcome.Stalled{
			Reason: config.ReasonNoHandover, NoHandover: true,
			Message: fmt.Sprintf("no key of ConfigMap %s/%s has the sharing %s, and the MIG strategy %s; add one, or set devicePlugin.handover to configmap",
				m.Namespace, m.ConfigMap, state.SharingText(want.Sharing), state.OrNone(want.Strategy)),
		}
	}
	key, base := r.base(seen)
	body, err := r.Format.Render([]byte(base), want.Sharing, want.Strategy)
	if err != nil {
		return nil, err
	}
	want.KeyContent = state.Noted(key, string(body))
	want.Text = m.OwnKey(want.KeyContent)
	return want, nil
}

// base returns the user-written config that the agent copies into its own config, except for the sharing, and its key if that is in the same ConfigMap. It
// never returns an agent's config, since the fields have paths and hooks that the container runtime uses as root.
func (r *Resolver) base(seen *state.Observed) (key, text string) {
	m, value := seen.Plugin.Manager, seen.Plugin.Text
	if strings.HasPrefix(value, config.OwnPluginKey) {
		if key := m.NotedBase(value); key != "" {
			return key, m.Files[key]
		}
		if byDefault := r.Settings.DevicePlugin.DefaultConfig; byDefault != "" {
			if named, err := r.ownConfig(seen, byDefault); err == nil {
				return "", named.Text
			}
		}
		value = ""
	}
	key = m.BaseFor(value)
	return key, m.Files[key]
}

// namedConfig returns the config of the device plugin that the node's label names, or the settings' default. A config manager reads the label itself, so
// the agent only has to verify the capacity; but the config manager does not know the settings' default.
func (r *Resolver) namedConfig(seen *state.Observed, key string) (*state.DesiredPlugin, error) {
	p := seen.Plugin
	switch {
	case p.Method == "":
		return nil, r.noHandover(seen)
	case p.Manager != nil && seen.Node.Labels[config.LabelDevicePluginConfig] != key:
		return r.managedDefault(seen, key)
	case outcome.IsUnseen(p.ParseErr):
		return nil, p.ParseErr
	case p.Manager != nil && apierrors.IsForbidden(p.ParseErr):
		return nil, nil // the agent may not read the ConfigMap: it leaves the label to the config manager
	case p.Manager != nil && p.Current == nil:
		return nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("%s: %v", pluginKeyAskedBy(seen.Node, key), p.ParseErr)}
	case p.Manager != nil:
		return &state.DesiredPlugin{Sharing: p.Current.Sharing, Strategy: p.Current.MIGStrategy, Known: true, Text: p.Text, UserManaged: true}, nil
	}
	want, err := r.ownConfig(seen, key)
	if err != nil {
		return nil, err
	}
	want.MatchText = true
	return want, nil
}

// ownConfig returns a config of the ConfigMap that the settings name.
func (r *Resolver) ownConfig(seen *state.Observed, key string) (*state.DesiredPlugin, error) {
	ref, named := r.Settings.DevicePlugin.ConfigMap, seen.Plugin.Named
	if named == nil {
		return nil, errPluginUnread
	}
	text, ok := named.Files[key]
	err := named.Err
	if outcome.IsUnseen(err) {
		return nil, err
	}
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("%w: create it, or name yours in devicePlugin.configMap of the settings", err)
	}
	if err == nil && !ok {
		err = state.NoSuchKey(ref.Namespace, ref.Name, named.Files)
	}
	var parsed catalog.PluginConfig
	if err == nil {
		parsed, err = r.Format.Parse([]byte(text))
	}
	if err != nil {
		return nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("%s: %v", pluginKeyAskedBy(seen.Node, key), err), Cause: err}
	}
	return &state.DesiredPlugin{Sharing: parsed.Sharing, Strategy: parsed.MIGStrategy, Known: true, Text: text}, nil
}

// managedDefault returns the settings' default for a plugin with a config manager: the present config if it shares alike, else a key of the agent with the
// default's text. It never takes a user's key: on the node's label, that would look like a user's request.
func (r *Resolver) managedDefault(seen *state.Observed, key string) (*state.DesiredPlugin, error) {
	p, m := seen.Plugin, seen.Plugin.Manager
	want, err := r.ownConfig(seen, key)
	switch {
	case err != nil:
		return nil, err
	case want.Matches(p.Current):
		want.Text = p.Text
		return want, nil
	case outcome.IsUnseen(m.ReadErr):
		return nil, m.ReadErr
	case m.ReadErr != nil:
		return nil, &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: m.ReadErr.Error()}
	case p.Method == config.HandoverLabel:
		return nil, &outcome.Stalled{Reason: config.ReasonNoHandover, NoHandover: true, Message: fmt.Sprintf(
			"set devicePlugin.handover to configmap, so that the agent may add a key for the default to ConfigMap %s/%s; or give the config manager "+
				"a default, as by devicePlugin.config.default of the GPU Operator's ClusterPolicy", m.Namespace, m.ConfigMap)}
	}
	want.KeyContent, want.Text = want.Text, m.OwnKey(want.Text)
	return want, nil
}

// Former returns the config that the plugin had before the change, as the target of an undo. It returns nil if the change keeps the config. It also
// returns nil if a user has since set the config manager's label to another key that is not an agent's: that is a new request.
func (r *Resolver) Former(seen *state.Observed) *state.DesiredPlugin {
	j := seen.Journal
	if !j.ChangesPlugin() {
		return nil
	}
	if key := seen.Plugin.Text; seen.Plugin.Manager != nil && key != "" && key != j.Plugin.Text && !strings.HasPrefix(key, config.OwnPluginKey) {
		return nil
	}
	want := &state.DesiredPlugin{Text: j.Plugin.Text, MatchText: true, AllowMissing: j.Plugin.Absent, KeyContent: j.Plugin.Body}
	if m := seen.Plugin.Manager; m != nil {
		// A user may have edited the ConfigMap since: its text is good enough to plan with, but not to verify a capacity.
		text, err := m.Config(want.Text)
		if want.KeyContent != "" {
			text, err = want.KeyContent, nil
			want.Text = m.OwnKey(text) // the node may have been recreated since, with another UID
		}
		if err == nil {
			if parsed, err := r.Format.Parse([]byte(text)); err == nil {
				want.Sharing, want.Strategy = parsed.Sharing, parsed.MIGStrategy
			}
		}
		return want
	}
	parsed, err := r.Format.Parse([]byte(want.Text))
	want.Sharing, want.Strategy, want.Known = parsed.Sharing, parsed.MIGStrategy, err == nil
	return want
}

// HowToSet says how a user sets the plugin's MIG strategy.
func HowToSet(s config.MIGStrategy) string {
	return fmt.Sprintf("set MIG_STRATEGY=%[1]s in the environment of its DaemonSet, or flags.migStrategy: %[1]s in its config", s)
}

// fits refuses, before the agent disturbs anything, a desired state that this node's device plugin would not advertise. If no config is desired, and
// nothing else sets the MIG strategy, the plugin's present config counts.
func (r *Resolver) fits(seen *state.Observed, want state.Desired) error {
	if len(want.Targets) == 0 && want.Plugin == nil {
		return nil
	}
	after := state.WithTargets(seen.GPUs, want.Targets)
	strategy, err := r.strategyFor(seen, want)
	switch cut := slices.ContainsFunc(after, func(g nvml.GPU) bool { return g.Enabled }); {
	case err != nil:
	case r.knowsStrategy(seen, want):
		err = catalog.CheckStrategy(after, strategy)
	case cut:
		if !seen.Plugin.Read {
			return errPluginUnread
		}
		if offer.RunsWithoutStrategy(seen, want.Plugin) {
			err = &catalog.StrategyError{Strategy: config.MIGStrategyNone, Problem: "it advertises no MIG device; " +
				"neither its config nor its environment sets another: " + HowToSet(config.MIGStrategyMixed)}
		}
	}
	if err == nil && want.Plugin != nil {
		err = catalog.CheckSharing(after, strategy, want.Plugin.Sharing, slices.Collect(maps.Keys(capacity.Expected(after, strategy))))
	}
	if err != nil {
		return &outcome.Stalled{Reason: catalog.ReasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", want.Label, want.Name, err), Cause: err}
	}
	return nil
}

// strategyFor returns the plugin's MIG strategy under the desired config. The environment and arguments of its pod override the config.
func (r *Resolver) strategyFor(seen *state.Observed, want state.Desired) (config.MIGStrategy, error) {
	asked := config.MIGStrategy("")
	if want.Plugin != nil {
		asked = want.Plugin.Strategy
	}
	if seen.DevicePlugin.Rivals != "" {
		return offer.Of(seen).Strategy(r.Settings.MIGStrategy, want.Plugin), &catalog.StrategyError{
			Strategy: offer.Of(seen).Strategy(r.Settings.MIGStrategy, want.Plugin),
			Problem:  seen.DevicePlugin.Rivals,
		}
	}
	for _, pod := range seen.DevicePlugin.Pods {
		own := state.StrategyOf(pod)
		set := r.Settings.MIGStrategy
		switch {
		case own == "":
		case asked != "" && asked != own:
			return own, &catalog.StrategyError{Strategy: own, Problem: fmt.Sprintf(
				"the config's flags.migStrategy, %s, has no effect: the environment or arguments of pod %s/%s set another; remove it from either",
				asked, pod.Namespace, pod.Name)}
		case set != config.MIGStrategyAuto && set != own:
			return own, &catalog.StrategyError{Strategy: own, Problem: fmt.Sprintf(
				"migStrategy of the settings, %s, is not what pod %s/%s runs with: set it to auto", set, pod.Namespace, pod.Name)}
		}
	}
	return offer.Of(seen).Strategy(r.Settings.MIGStrategy, want.Plugin), nil
}

// knowsStrategy reports whether the agent knows the plugin's MIG strategy. It refuses nothing on a guess. GPU feature discovery publishes the strategy of the
// plugin's present config, too: that says nothing of the plugin under a config that takes its place.
func (r *Resolver) knowsStrategy(seen *state.Observed, want state.Desired) bool {
	published, current := seen.Node.Labels[config.LabelMIGStrategy], seen.Plugin.Current
	ends := want.Plugin != nil && want.Plugin.Known && current != nil && string(current.MIGStrategy) == published
	return r.Settings.MIGStrategy != config.MIGStrategyAuto || seen.ExplicitStrategy() != "" || want.Plugin != nil && want.Plugin.Strategy != "" ||
		published != "" && !ends
}
