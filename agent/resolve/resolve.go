// Package resolve turns the labels of the node into what each GPU and the device plugin are to be.
package resolve

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
	"github.com/gpuslice/gpuslice/agent/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Resolver reads them.
type Resolver struct {
	Parse        func(data []byte) (map[string]config.MIGConfig, error) // reads a file in mig-parted's format
	DevicePlugin *deviceplugin.Plugin
	Settings     config.Settings
}

// Desired turns labels into targets. A bad wish is a *Stalled error, which is told and disturbs nothing. Any error ends a
// change that is under way.
func (r *Resolver) Desired(ctx context.Context, seen *state.Observed) (state.Desired, error) {
	want, pluginKey := r.Asked(seen.Node)
	if seen.Journal != nil && seen.Journal.Plugin != nil {
		r.DevicePlugin.Observe(ctx, seen)
	}
	if err := seen.Withdrawn(want, pluginKey != seen.Node.Labels[config.LabelDevicePluginConfig] && pluginKey != ""); err != nil {
		return want, err
	}
	if want.Name == "" {
		seen.DevicePlugin.Unpicked = r.DevicePlugin.Unpicked(ctx, seen)
		return want, nil
	}
	wishes := map[nvml.UUID]nvml.Wish{}
	if want.Label != config.LabelDevicePluginConfig {
		profile, found, beyond, err := r.Wishes(*seen, want.Label, migName(want.Name, pluginKey))
		if err != nil {
			return want, err
		}
		wishes, want.MissingPositions = found, beyond
		if err := r.Apply(ctx, seen, &want, profile, state.WithTargets(seen.GPUs, state.Targets(found))); err != nil {
			return want, err
		}
	}
	if pluginKey != "" {
		if err := r.AskPlugin(ctx, seen, &want, r.DevicePlugin.AskedBy(seen.Node, pluginKey), func() (*state.DesiredPlugin, error) { return r.DevicePlugin.NamedConfig(ctx, seen, pluginKey) }); err != nil {
			return want, err
		}
	}
	want.Targets = state.Targets(wishes)
	want.Fingerprint = fingerprint(want, wishes)
	if err := r.DevicePlugin.Fits(*seen, want); err != nil {
		return want, err
	}
	if failed := seen.Failed(want); failed != nil && seen.Journal == nil {
		return want, &outcome.Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return want, nil
}

// AskPlugin adds to the wish what is asked of the device plugin's config, and says by what it is asked where there is no way to give it
// any. Where the plugin is kept away because the node has just been registered, that comes later.
func (r *Resolver) AskPlugin(ctx context.Context, seen *state.Observed, want *state.Desired, by string, ask func() (*state.DesiredPlugin, error)) error {
	r.DevicePlugin.Observe(ctx, seen)
	var err error
	if want.Plugin, err = ask(); want.Plugin != nil {
		want.Plugin.AskedBy = by
	}
	if want.PluginLater = seen.KeepsPluginAway(err); want.PluginLater {
		return nil
	}
	if stalled, is := errors.AsType[*outcome.Stalled](err); is && stalled.NoHandover {
		return &outcome.Stalled{Reason: stalled.Reason, NoHandover: true, Message: by + ": " + stalled.Message}
	}
	return err
}

// Asked is what the node's labels name, and by what they name it: a profile alone, or a MIG config and a config of the device plugin.
func (r *Resolver) Asked(node *corev1.Node) (want state.Desired, pluginKey string) {
	if name := node.Labels[config.LabelProfile]; name != "" {
		return state.Desired{Label: config.LabelProfile, Name: name}, ""
	}
	pluginKey = node.Labels[config.LabelDevicePluginConfig]
	if strings.HasPrefix(pluginKey, config.OwnPluginKey) { // set by an agent, for a profile or the settings' default
		pluginKey = ""
	}
	pluginKey = cmp.Or(pluginKey, r.Settings.DevicePlugin.DefaultConfig)
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

// Apply adds what a profile asks for besides the geometry, which is that of the GPUs after.
func (r *Resolver) Apply(ctx context.Context, seen *state.Observed, want *state.Desired, profile config.Profile, after []nvml.GPU) error {
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
	if unbearable := untoleratedTaint(*seen, profile.Taints); unbearable != "" {
		return &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("profile %s: %s", want.Name, unbearable)}
	}
	if profile.Sharing == nil && profile.MIGStrategy == "" {
		return nil
	}
	return r.AskPlugin(ctx, seen, want, fmt.Sprintf("label %s=%s", want.Label, want.Name), func() (*state.DesiredPlugin, error) { return r.DevicePlugin.SharingOf(seen, profile, after) })
}

// Wishes is what a label asks of each GPU. A name may mean something else once a file can be read that cannot be now, so nothing is done
// by a catalog of which a part is missing that counts for the name. The profile is that of the name, if there is one.
func (r *Resolver) Wishes(seen state.Observed, label, name string) (
	profile config.Profile, wishes map[nvml.UUID]nvml.Wish, beyond []int, err error,
) {
	catalog, err := r.catalog(seen, label, name)
	if err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error()}
	}
	if wishes, err = state.WishesOf(catalog, label, name, seen.GPUs); err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: config.ReasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", label, name, err)}
	}
	profile, isProfile := catalog.Profile(name)
	if label != config.LabelProfile || !isProfile {
		beyond = catalog.MissingPositions(name, seen.GPUs)
	}
	return profile, wishes, beyond, nil
}

// catalog joins what the hardware offers with the administrator's files, as far as they count for the name. The error says what is wrong
// with a file.
func (r *Resolver) catalog(seen state.Observed, label, name string) (config.Catalog, error) {
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
			custom, err = r.Parse(data)
			return err
		})
		if err != nil {
			return config.Catalog{}, err
		}
	}
	return config.Merge(config.Generate(seen.GPUs), custom).WithProfiles(profiles), nil
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

// untoleratedTaint names a taint that would keep the device plugin away when it is started the next time.
func untoleratedTaint(seen state.Observed, taints []corev1.Taint) string {
	for _, pod := range slices.Concat(seen.DevicePlugin.Pods, seen.DevicePlugin.MPSDaemons) {
		for _, t := range taints {
			if t.Effect == corev1.TaintEffectNoSchedule && !holders.Tolerates(pod.Spec.Tolerations, t) {
				return fmt.Sprintf("pod %s/%s does not tolerate the taint %s, and would not come back: add the toleration to its DaemonSet",
					pod.Namespace, pod.Name, t.ToString())
			}
		}
	}
	return ""
}
