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

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// settingsFor are the settings as the profile that is asked for has them.
func (a *Agent) settingsFor(want state.Desired) config.Settings { return a.settings.With(want.Drain) }

// resolve turns labels into targets. A bad wish is a *Stalled error, which is told and disturbs nothing. Any error ends a
// change that is under way.
func (a *Agent) resolve(ctx context.Context, seen *state.Observed) (state.Desired, error) {
	want, pluginKey := a.asked(seen.Node)
	if seen.Journal != nil && seen.Journal.Plugin != nil {
		a.observePlugin(ctx, seen)
	}
	if err := seen.Withdrawn(want); err != nil {
		return want, err
	}
	if want.Name == "" {
		seen.DevicePlugin.Unpicked = a.unpickedConfigs(ctx, seen)
		return want, nil
	}
	wishes := map[nvml.UUID]nvml.Wish{}
	if want.Label != config.LabelDevicePluginConfig {
		profile, found, beyond, err := a.wishes(*seen, want.Label, migName(want.Name, pluginKey))
		if err != nil {
			return want, err
		}
		wishes, want.MissingPositions = found, beyond
		if err := a.apply(ctx, seen, &want, profile, state.AsWished(seen.GPUs, state.Targets(found))); err != nil {
			return want, err
		}
	}
	if pluginKey != "" {
		if err := a.askPlugin(ctx, seen, &want, a.pluginAskedBy(seen.Node, pluginKey), func() (*state.DesiredPlugin, error) { return a.namedConfig(ctx, seen, pluginKey) }); err != nil {
			return want, err
		}
	}
	want.Targets = state.Targets(wishes)
	want.Fingerprint = fingerprint(want, wishes)
	if err := a.fits(*seen, want); err != nil {
		return want, err
	}
	if failed := seen.Failed(want); failed != nil && seen.Journal == nil {
		return want, &outcome.Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return want, nil
}

// askPlugin adds to the wish what is asked of the device plugin's config, and says by what it is asked where there is no way to give it
// any. Where the plugin is kept away because the node has just been registered, that comes later.
func (a *Agent) askPlugin(ctx context.Context, seen *state.Observed, want *state.Desired, by string, ask func() (*state.DesiredPlugin, error)) error {
	a.observePlugin(ctx, seen)
	var err error
	want.Plugin, err = ask()
	if want.PluginLater = seen.KeepsPluginAway(err); want.PluginLater {
		return nil
	}
	if stalled, is := errors.AsType[*outcome.Stalled](err); is && stalled.NoHandover {
		return &outcome.Stalled{Reason: stalled.Reason, NoHandover: true, Message: by + ": " + stalled.Message}
	}
	return err
}

// pluginAskedBy is what asks for a key of the device plugin's configs.
func (a *Agent) pluginAskedBy(node *corev1.Node, key string) string {
	if node.Labels[config.LabelDevicePluginConfig] != key {
		return "devicePlugin.defaultConfig of the settings, " + key
	}
	return fmt.Sprintf("label %s=%s", config.LabelDevicePluginConfig, key)
}

// asked is what the node's labels name, and by what they name it: a profile alone, or a MIG config and a config of the device plugin.
func (a *Agent) asked(node *corev1.Node) (want state.Desired, pluginKey string) {
	if name := node.Labels[config.LabelProfile]; name != "" {
		return state.Desired{Label: config.LabelProfile, Name: name}, ""
	}
	pluginKey = cmp.Or(node.Labels[config.LabelDevicePluginConfig], a.settings.DevicePlugin.DefaultConfig)
	if strings.HasPrefix(pluginKey, config.OwnPluginKey) { // left by a profile
		pluginKey = ""
	}
	want = state.Desired{Label: config.LabelMIGConfig, Name: node.Labels[config.LabelMIGConfig]}
	switch {
	case pluginKey == "":
	case want.Name == "":
		want.Label, want.Name = config.LabelDevicePluginConfig, pluginKey
	default:
		want.Name += api.DesiredSeparator + pluginKey
	}
	if want.Name != "" {
		want.Keys = &nodekeys.Keys{} // those of a profile go when something else is asked for
	}
	return want, pluginKey
}

// migName is the MIG config of a wish that may be joined with a config of the device plugin.
func migName(name, pluginKey string) string {
	return strings.TrimSuffix(name, api.DesiredSeparator+pluginKey)
}

// apply adds what a profile asks for besides the geometry, which is that of the GPUs after.
func (a *Agent) apply(ctx context.Context, seen *state.Observed, want *state.Desired, profile config.Profile, after []nvml.GPU) error {
	if want.Label != config.LabelProfile {
		return nil
	}
	want.Drain, want.Windows = profile.Drain, profile.Windows
	want.Keys = &nodekeys.Keys{Labels: profile.Labels, Taints: profile.Taints}
	if foreign := nodekeys.Foreign(seen.Node, seen.Record.Published, *want.Keys); foreign != "" {
		return &outcome.Stalled{
			Reason:  config.ReasonNodeKeyConflict,
			Message: fmt.Sprintf("profile %s: %s, which is not ours to change; take it away, or out of the profile", want.Name, foreign),
		}
	}
	if unbearable := unbearable(*seen, profile.Taints); unbearable != "" {
		return &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("profile %s: %s", want.Name, unbearable)}
	}
	if profile.Sharing == nil && profile.MIGStrategy == "" {
		return nil
	}
	return a.askPlugin(ctx, seen, want, fmt.Sprintf("label %s=%s", want.Label, want.Name), func() (*state.DesiredPlugin, error) { return a.sharingOf(seen, profile, after) })
}

// wishes is what a label asks of each GPU. A name may mean something else once a file can be read that cannot be now, so nothing is done
// by a catalog of which a part is missing that counts for the name. The profile is that of the name, if there is one.
func (a *Agent) wishes(seen state.Observed, label, name string) (
	profile config.Profile, wishes map[nvml.UUID]nvml.Wish, beyond []int, err error,
) {
	catalog, err := a.catalog(seen, label, name)
	if err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error()}
	}
	if wishes, err = state.WishesOf(catalog, label, name, seen.GPUs); err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: reasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", label, name, err)}
	}
	profile, isProfile := catalog.Profile(name)
	if label != config.LabelProfile || !isProfile {
		beyond = catalog.Beyond(name, seen.GPUs)
	}
	return profile, wishes, beyond, nil
}

// catalog joins what the hardware offers with the administrator's files, as far as they count for the name. The error says what is wrong
// with a file.
func (a *Agent) catalog(seen state.Observed, label, name string) (config.Catalog, error) {
	var profiles map[string]config.Profile
	var err error
	if label == config.LabelProfile {
		if profiles, err = seen.CatalogOfProfiles(); err != nil {
			return config.Catalog{}, err
		}
	}
	var custom map[string]config.MIGConfig
	if _, isProfile := profiles[name]; !isProfile { // which goes before a MIG config of its name, and needs none
		err = seen.Files.Configs.Read(func(data []byte) (err error) {
			custom, err = a.parse(data)
			return err
		})
		if err != nil {
			return config.Catalog{}, err
		}
	}
	return config.Merge(config.Generate(seen.GPUs), custom).WithProfiles(profiles), nil
}

// reasonOf is the reason that an error of the catalog carries.
func reasonOf(err error) config.Reason {
	var reasoned interface{ Reason() config.Reason }
	if errors.As(err, &reasoned) {
		return reasoned.Reason()
	}
	return config.ReasonInvalidCatalog
}

func fingerprint(want state.Desired, wishes map[nvml.UUID]nvml.Wish) string {
	h := sha256.New()
	fmt.Fprint(h, want.Name)
	for _, gpu := range slices.Sorted(maps.Keys(wishes)) {
		fmt.Fprintf(h, " %s %v", gpu, wishes[gpu]) // prints maps in the order of their keys
	}
	if p := want.Plugin; p != nil && p.MatchText {
		fmt.Fprintf(h, " %s", p.Text)
	} else if p != nil {
		fmt.Fprintf(h, " %v %s", p.Sharing, state.OrNone(p.Strategy))
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}
