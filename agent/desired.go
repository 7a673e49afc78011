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
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/nvml"
)

// desired is what the node's labels ask for.
type desired struct {
	name             string         // of the config; empty if nothing is asked for
	label            string         // that asks for it
	targets          plan.Targets   // GPU by GPU
	plugin           *desiredPlugin // nil leaves the device plugin's config as it is
	keys             *nodekeys.Keys // of a profile; nil leaves the node's labels and taints as they are
	missingPositions []int          // positions that the config names and the node does not have
	pluginLater      bool           // the device plugin is asked for a config once it is there: the startup taint keeps it away
	drain            *config.DrainOverrides
	windows          []window.Window // of a profile; none for those of the pool
	fingerprint      string          // tells this wish from any other, on these GPUs
	left             *api.Failure    // why what an agent has left is given back before; nil if it is a part of the change
	undo             bool            // the way back is taken instead
	undoCause        error           // for another reason than a failure that the journal keeps
}

// settingsFor are the settings as the profile that is asked for has them.
func (a *Agent) settingsFor(want desired) config.Settings { return a.settings.With(want.drain) }

// resolve turns labels into targets. A bad wish is a *Stalled error, which is told and disturbs nothing. Any error ends a
// change that is under way.
func (a *Agent) resolve(ctx context.Context, seen *observed) (desired, error) {
	want, pluginKey := a.asked(seen.node)
	if seen.journal != nil && seen.journal.Plugin != nil {
		a.observePlugin(ctx, seen)
	}
	if err := seen.withdrawn(want); err != nil {
		return want, err
	}
	if want.name == "" {
		seen.devicePlugin.unpicked = a.unpickedConfigs(ctx, seen)
		return want, nil
	}
	wishes := map[nvml.UUID]nvml.Wish{}
	if want.label != config.LabelDevicePluginConfig {
		profile, found, beyond, err := a.wishes(*seen, want.label, migName(want.name, pluginKey))
		if err != nil {
			return want, err
		}
		wishes, want.missingPositions = found, beyond
		if err := a.apply(ctx, seen, &want, profile, asWished(seen.gpus, targets(found))); err != nil {
			return want, err
		}
	}
	if pluginKey != "" {
		if err := a.askPlugin(ctx, seen, &want, a.pluginAskedBy(seen.node, pluginKey), func() (*desiredPlugin, error) { return a.namedConfig(ctx, seen, pluginKey) }); err != nil {
			return want, err
		}
	}
	want.targets = targets(wishes)
	want.fingerprint = fingerprint(want, wishes)
	if err := a.fits(*seen, want); err != nil {
		return want, err
	}
	if failed := seen.failed(want); failed != nil && seen.journal == nil {
		return want, &outcome.Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return want, nil
}

// withdrawn returns an error if the label that requested the running change was removed.
func (s observed) withdrawn(want desired) error {
	if s.journal == nil {
		return nil
	}
	// What a profile has put into the label of the device plugin's config is ours, and nobody's wish.
	leaves := want.label != config.LabelProfile && s.journal.ChangesPlugin() && s.journal.Plugin.Label != ""
	switch {
	case want.name == "" && s.journal.Target == "":
		return errors.New("nothing is asked for, and what an agent has left on the node is given back")
	case want.name == "" || leaves:
		return fmt.Errorf("the label that asked for %s was removed in the middle of the change", s.journal.Target)
	default:
		return nil
	}
}

// askPlugin adds to the wish what is asked of the device plugin's config, and says by what it is asked where there is no way to give it
// any. Where the plugin is kept away because the node has just been registered, that comes later.
func (a *Agent) askPlugin(ctx context.Context, seen *observed, want *desired, by string, ask func() (*desiredPlugin, error)) error {
	a.observePlugin(ctx, seen)
	var err error
	want.plugin, err = ask()
	if want.pluginLater = seen.keepsPluginAway(err); want.pluginLater {
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
func (a *Agent) asked(node *corev1.Node) (want desired, pluginKey string) {
	if name := node.Labels[config.LabelProfile]; name != "" {
		return desired{label: config.LabelProfile, name: name}, ""
	}
	pluginKey = cmp.Or(node.Labels[config.LabelDevicePluginConfig], a.settings.DevicePlugin.DefaultConfig)
	if strings.HasPrefix(pluginKey, config.OwnPluginKey) { // left by a profile
		pluginKey = ""
	}
	want = desired{label: config.LabelMIGConfig, name: node.Labels[config.LabelMIGConfig]}
	switch {
	case pluginKey == "":
	case want.name == "":
		want.label, want.name = config.LabelDevicePluginConfig, pluginKey
	default:
		want.name += api.DesiredSeparator + pluginKey
	}
	if want.name != "" {
		want.keys = &nodekeys.Keys{} // those of a profile go when something else is asked for
	}
	return want, pluginKey
}

// migName is the MIG config of a wish that may be joined with a config of the device plugin.
func migName(name, pluginKey string) string {
	return strings.TrimSuffix(name, api.DesiredSeparator+pluginKey)
}

// apply adds what a profile asks for besides the geometry, which is that of the GPUs after.
func (a *Agent) apply(ctx context.Context, seen *observed, want *desired, profile config.Profile, after []nvml.GPU) error {
	if want.label != config.LabelProfile {
		return nil
	}
	want.drain, want.windows = profile.Drain, profile.Windows
	want.keys = &nodekeys.Keys{Labels: profile.Labels, Taints: profile.Taints}
	if foreign := nodekeys.Foreign(seen.node, seen.record.published, *want.keys); foreign != "" {
		return &outcome.Stalled{
			Reason:  config.ReasonNodeKeyConflict,
			Message: fmt.Sprintf("profile %s: %s, which is not ours to change; take it away, or out of the profile", want.name, foreign),
		}
	}
	if unbearable := unbearable(*seen, profile.Taints); unbearable != "" {
		return &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("profile %s: %s", want.name, unbearable)}
	}
	if profile.Sharing == nil && profile.MIGStrategy == "" {
		return nil
	}
	return a.askPlugin(ctx, seen, want, fmt.Sprintf("label %s=%s", want.label, want.name), func() (*desiredPlugin, error) { return a.sharingOf(seen, profile, after) })
}

// keepsPluginAway reports whether there is no device plugin to be asked for anything because the node has just been registered.
func (s observed) keepsPluginAway(err error) bool {
	var waiting *outcome.Waiting
	return errors.As(err, &waiting) && waiting.For == outcome.ForDevicePlugin &&
		(s.marks.startup != nil || s.journal != nil && s.journal.Startup != nil)
}

func targets(wishes map[nvml.UUID]nvml.Wish) plan.Targets {
	out := plan.Targets{}
	for gpu, w := range wishes {
		out[gpu] = plan.Target{Wish: w}
	}
	return out
}

// wishes is what a label asks of each GPU. A name may mean something else once a file can be read that cannot be now, so nothing is done
// by a catalog of which a part is missing that counts for the name. The profile is that of the name, if there is one.
func (a *Agent) wishes(seen observed, label, name string) (
	profile config.Profile, wishes map[nvml.UUID]nvml.Wish, beyond []int, err error,
) {
	catalog, err := a.catalog(seen, label, name)
	if err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error()}
	}
	if wishes, err = wishesOf(catalog, label, name, seen.gpus); err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: reasonOf(err), Message: fmt.Sprintf("label %s=%s: %v", label, name, err)}
	}
	profile, isProfile := catalog.Profile(name)
	if label != config.LabelProfile || !isProfile {
		beyond = catalog.Beyond(name, seen.gpus)
	}
	return profile, wishes, beyond, nil
}

func wishesOf(catalog config.Catalog, label, name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Wish, error) {
	if label == config.LabelProfile {
		return catalog.ProfileWishes(name, gpus)
	}
	return catalog.Wishes(name, gpus)
}

// catalog joins what the hardware offers with the administrator's files, as far as they count for the name. The error says what is wrong
// with a file.
func (a *Agent) catalog(seen observed, label, name string) (config.Catalog, error) {
	var profiles map[string]config.Profile
	var err error
	if label == config.LabelProfile {
		if profiles, err = seen.catalogOfProfiles(); err != nil {
			return config.Catalog{}, err
		}
	}
	var custom map[string]config.MIGConfig
	if _, isProfile := profiles[name]; !isProfile { // which goes before a MIG config of its name, and needs none
		err = seen.files.configs.read(func(data []byte) (err error) {
			custom, err = a.parse(data)
			return err
		})
		if err != nil {
			return config.Catalog{}, err
		}
	}
	return config.Merge(config.Generate(seen.gpus), custom).WithProfiles(profiles), nil
}

// catalogOfProfiles are the profiles of the administrator's file.
func (s observed) catalogOfProfiles() (profiles map[string]config.Profile, err error) {
	err = s.files.profiles.read(func(data []byte) (err error) {
		profiles, err = config.ParseProfiles(data)
		return err
	})
	return profiles, err
}

// read parses the file, if there is one.
func (f *configMapFile) read(parse func(data []byte) error) error {
	switch {
	case f == nil || f.absent:
		return nil
	case f.err != nil:
		return f.err
	}
	if err := parse(f.data); err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// reasonOf is the reason that an error of the catalog carries.
func reasonOf(err error) config.Reason {
	var reasoned interface{ Reason() config.Reason }
	if errors.As(err, &reasoned) {
		return reasoned.Reason()
	}
	return config.ReasonInvalidCatalog
}

func fingerprint(want desired, wishes map[nvml.UUID]nvml.Wish) string {
	h := sha256.New()
	fmt.Fprint(h, want.name)
	for _, gpu := range slices.Sorted(maps.Keys(wishes)) {
		fmt.Fprintf(h, " %s %v", gpu, wishes[gpu]) // prints maps in the order of their keys
	}
	if p := want.plugin; p != nil && p.matchText {
		fmt.Fprintf(h, " %s", p.text)
	} else if p != nil {
		fmt.Fprintf(h, " %v %s", p.sharing, orNone(p.strategy))
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}
