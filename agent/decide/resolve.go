// Package decide says what the node shall have, and whether the agent may perform a step towards that now. It resolves the labels into the desired state
// of each GPU and of the device plugin. Holds, windows and the maintenance file keep changes waiting. It turns the settings into the rules for pods that
// leave, and counts how often steps have failed. It writes nothing, and reads only the clock: it decides from the observation.
package decide

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/nvml"
)

// Resolver resolves the labels of one node.
type Resolver struct {
	Parse    func(data []byte) (map[string]catalog.MIGConfig, error) // reads a file in mig-parted's format
	Format   catalog.PluginFormat
	Settings config.Settings
	// Catalog replaces the generated configs and the node's files where there is no node; nil on a node.
	Catalog *catalog.Catalog

	read reading // of the last call of Remember
}

// errPluginUnread says that the request depends on the device plugin's config, which the observation has not read.
var errPluginUnread = &outcome.UnseenError{Err: errors.New("the device plugin's config was not read")}

// NeedsPlugin reports whether err, from Desired or Resolve, means that the agent has to read the device plugin's config before it can resolve the request.
func NeedsPlugin(err error) bool { return errors.Is(err, errPluginUnread) }

// Desired turns labels into targets, from the observation alone. A bad request is a *Stalled error: the agent reports it, and disturbs nothing. Any error
// ends a change that is under way.
//
// A mistake in a file is the error of every node that the file counts for, since it may hide what a name means. But if the readable part requests just
// what was last verified, the node keeps that: Desired.Unread has the mistake, and no change begins.
func (r *Resolver) Desired(seen *state.Observed) (state.Desired, error) {
	want, pluginKey := r.Asked(seen.Node)
	if healing, is := heals(seen); is && want.Name == "" {
		return healing, nil
	}
	if err := requestRemoved(seen, want, pluginKey != seen.Node.Labels[config.LabelDevicePluginConfig] && pluginKey != ""); err != nil {
		return want, err
	}
	return r.Resolve(seen)
}

// heals returns the desired state of a node without a config label while the agent resets unhealthy GPUs or restores their instances; false if it does
// neither.
func heals(seen *state.Observed) (state.Desired, bool) {
	started := seen.Journal != nil && seen.Journal.Target == state.ResetTarget
	if !started && (seen.Journal != nil || len(seen.Sick) == 0) {
		return state.Desired{}, false
	}
	return state.Desired{Name: state.ResetTarget, Fingerprint: "reset", Targets: plan.Targets{}}, true
}

// requestRemoved returns an error if the label that requested the running change was removed. If byDefault is set, the settings have requested it,
// not a label.
func requestRemoved(seen *state.Observed, want state.Desired, byDefault bool) error {
	if seen.Journal == nil {
		return nil
	}
	// The agent itself has set the label of the device plugin's config, for a profile: that is not a user's request.
	leaves := want.Label != config.LabelProfile && !byDefault && seen.Journal.ChangesPlugin() && seen.Journal.Plugin.Label != ""
	switch {
	case want.Name == "" && seen.Journal.Target == "":
		return errors.New("nothing is requested; the agent restores what an earlier change left on the node")
	case want.Name == "" || leaves:
		return fmt.Errorf("the label that requested %s was removed during the change", seen.Journal.Target)
	default:
		return nil
	}
}

// Resolve is Desired for labels that a user has yet to set. They may differ from those of the running change, so Resolve does not take its request for
// removed.
func (r *Resolver) Resolve(seen *state.Observed) (state.Desired, error) {
	asked, pluginKey := r.Asked(seen.Node)
	if asked.Name == "" {
		return asked, allocatedTwice(seen)
	}
	want, err := r.resolve(seen, asked, pluginKey)
	if NeedsPlugin(err) {
		return asked, err
	}
	if want.Unread != nil && (err != nil || seen.Journal != nil || want.Fingerprint != seen.Record.Learnt.Verified) {
		return asked, want.Unread
	}
	if err == nil {
		err = allocatedTwice(seen)
	}
	return want, err
}

// Remember keeps the files that Desired has resolved the labels with, in case one of them cannot be read later.
func (r *Resolver) Remember(seen *state.Observed, want state.Desired) {
	if want.Label != config.LabelDevicePluginConfig && want.Label != "" && want.Fingerprint != "" && want.Unread == nil {
		r.read = reading{want.Label, want.Name, seen.Files}
	}
}

func (r *Resolver) resolve(seen *state.Observed, want state.Desired, pluginKey string) (state.Desired, error) {
	requests := map[nvml.UUID]nvml.Request{}
	if want.Label != config.LabelDevicePluginConfig {
		profile, found, beyond, err := r.Requests(seen, want.Label, migName(want.Name, pluginKey))
		if unread, is := errors.AsType[*outcome.Stalled](err); is && unread.Unread {
			want.Unread = err
			profile, found, beyond, err = r.requestsOfReadable(seen, want, migName(want.Name, pluginKey))
		}
		if err != nil {
			return want, err
		}
		requests, want.MissingPositions, want.Geometry = found, beyond, len(found) > 0
		if err := geometryRefused(seen, want.Label, want.Name, requests); err != nil {
			return want, err
		}
		after := state.WithTargets(seen.GPUs, state.Targets(found))
		want.Unanswered = want.Unanswered && !r.asksForTheSame(seen, seen.Node.Labels[config.LabelMIGConfig], after)
		if err := r.apply(seen, &want, profile, after); err != nil {
			return want, err
		}
	}
	if pluginKey != "" {
		if err := askPlugin(seen, &want, pluginKeyAskedBy(seen.Node, pluginKey),
			func() (*state.DesiredPlugin, error) { return r.namedConfig(seen, pluginKey) }); err != nil {
			return want, err
		}
	}
	asks := map[string]string{want.Label: migName(want.Name, pluginKey)}
	if pluginKey != "" {
		asks[config.LabelDevicePluginConfig] = pluginKey
	}
	want.Drain = want.Drain.Allowing(seen.Annotation(config.AnnotationAllowEviction), asks)
	want.Targets = modesAlone(seen, state.Targets(requests))
	want.Fingerprint = fingerprint(want, requests)
	return want, r.refuses(seen, want)
}

// refuses returns why the node cannot have the desired state, or has failed to reach it before.
func (r *Resolver) refuses(seen *state.Observed, want state.Desired) error {
	if err := r.fits(seen, want); err != nil {
		return err
	}
	if failed := seen.Failed(want); failed != nil && seen.Journal == nil {
		return &outcome.Stalled{Reason: failed.Reason, Message: failed.Message}
	}
	return nil
}

// askPlugin adds the device plugin's config to the desired state. If the agent cannot give the plugin a config, the error names the label or setting that
// requests it. If the startup taint keeps the plugin away from a new node, askPlugin leaves the config for later.
func askPlugin(seen *state.Observed, want *state.Desired, by string, ask func() (*state.DesiredPlugin, error)) error {
	if err := sharingRefused(seen, by); err != nil {
		return err
	}
	if !seen.Plugin.Read {
		return errPluginUnread
	}
	var err error
	if want.Plugin, err = ask(); want.Plugin != nil {
		want.Plugin.AskedBy = by
	}
	if want.PluginLater = keepsPluginAway(seen, err); want.PluginLater {
		return nil
	}
	if stalled, is := errors.AsType[*outcome.Stalled](err); is && stalled.NoHandover {
		return &outcome.Stalled{Reason: stalled.Reason, NoHandover: true, Message: by + ": " + stalled.Message}
	}
	return err
}

// keepsPluginAway reports whether the agent waits for a device plugin that the startup taint of a new node keeps away.
func keepsPluginAway(seen *state.Observed, err error) bool {
	waiting, waits := errors.AsType[*outcome.Waiting](err)
	return waits && waiting.For == outcome.ForDevicePlugin && (len(seen.Marks.Startup) > 0 || len(seen.Journal.Startup()) > 0)
}

// asksForTheSame reports whether these GPUs already have the MIG config of that name.
func (r *Resolver) asksForTheSame(seen *state.Observed, name string, gpus []nvml.GPU) bool {
	_, requests, _, err := r.Requests(seen, config.LabelMIGConfig, name)
	if err != nil {
		return false
	}
	for _, gpu := range gpus {
		request, asked := requests[gpu.UUID]
		if !asked {
			continue
		}
		has := map[string]int{}
		for _, instance := range gpu.Instances {
			for _, device := range instance.Devices {
				has[device.Profile]++
			}
		}
		if request.MIG != gpu.Enabled || !maps.Equal(has, request.Devices) {
			return false
		}
	}
	return true
}

// migName returns the name of the MIG config: name may also have the key of a device plugin's config at its end.
func migName(name, pluginKey string) string {
	return strings.TrimSuffix(name, api.DesiredSeparator+pluginKey)
}

// Asked is state.Asked with the settings' default.
func (r *Resolver) Asked(node *corev1.Node) (want state.Desired, pluginKey string) {
	return state.Asked(node, r.Settings.DevicePlugin.DefaultConfig)
}

// apply adds what a profile requests besides the geometry. After holds the GPUs as the profile cuts them.
func (r *Resolver) apply(seen *state.Observed, want *state.Desired, profile catalog.Profile, after []nvml.GPU) error {
	if want.Label != config.LabelProfile {
		return nil
	}
	want.Drain, want.Windows = profile.Drain, profile.Windows
	want.Keys = &nodekeys.Keys{Labels: profile.Labels, Taints: profile.Taints}
	if i := slices.IndexFunc(profile.Taints, r.Settings.StartupTaints().Has); i >= 0 {
		return &outcome.Stalled{
			Reason: config.ReasonInvalidCatalog,
			Message: fmt.Sprintf("profile %s: taints[%d].key: %q is startupTaint of the settings, which the agent removes from each ready node: use another key",
				want.Name, i, profile.Taints[i].Key),
		}
	}
	if foreign := nodekeys.Foreign(seen.Node, seen.Record.Learnt.Published, *want.Keys); foreign != "" {
		return &outcome.Stalled{
			Reason:  config.ReasonNodeKeyConflict,
			Message: fmt.Sprintf("profile %s: %s, which the agent did not set and does not change; remove it from the node or from the profile", want.Name, foreign),
		}
	}
	if unbearable, advice := offer.Untolerated(slices.Concat(seen.DevicePlugin.Pods, seen.DevicePlugin.MPSDaemons), profile.Taints); unbearable != "" {
		return &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: fmt.Sprintf("profile %s: %s: %s", want.Name, unbearable, advice)}
	}
	if profile.Sharing == nil && profile.MIGStrategy == "" {
		return nil
	}
	return askPlugin(seen, want, fmt.Sprintf("label %s=%s", want.Label, want.Name),
		func() (*state.DesiredPlugin, error) { return r.sharingOf(seen, profile, after) })
}

// Requests returns what a label requests of each GPU, and the profile of that name, if there is one. It returns an error if it cannot read a file that
// counts for the name: with that file, the name may mean something else.
func (r *Resolver) Requests(seen *state.Observed, label, name string) (
	profile catalog.Profile, requests map[nvml.UUID]nvml.Request, beyond []int, err error,
) {
	configs, err := r.catalog(seen, label, name)
	if err != nil {
		return profile, nil, nil, &outcome.Stalled{Reason: config.ReasonInvalidCatalog, Message: err.Error(), Unread: true}
	}
	if requests, err = state.RequestsOf(configs, label, name, seen.GPUs); err != nil {
		return profile, nil, nil, &outcome.Stalled{
			Reason:  catalog.ReasonOf(err),
			Message: fmt.Sprintf("label %s=%s: %v%s", label, name, err, missingFile(seen, label, err)), Cause: err,
		}
	}
	profile, isProfile := configs.Profile(name)
	if label != config.LabelProfile || !isProfile {
		beyond = configs.MissingPositions(name, seen.GPUs)
	}
	return profile, requests, beyond, nil
}

// missingFile says that the file which would define the name does not exist. It returns nothing unless err is about an unknown name.
func missingFile(seen *state.Observed, label string, err error) string {
	file := seen.Files.Configs
	if label == config.LabelProfile {
		file = seen.Files.Profiles
	}
	if _, unknown := errors.AsType[*catalog.UnknownConfigError](err); !unknown || file == nil || !file.Absent {
		return ""
	}
	return "; the settings name " + file.Name + ", which does not exist"
}

// reading has the files that a label was resolved with.
type reading struct {
	label, name string
	files       state.Files
}

// requestsOfReadable is Requests with the readable parts of the files: the entries of this name. If a file is not even YAML, it takes the text that this
// process read there before. If there is none, it goes without the file: the name may be a generated config's.
func (r *Resolver) requestsOfReadable(seen *state.Observed, want state.Desired, name string) (
	profile catalog.Profile, requests map[nvml.UUID]nvml.Request, beyond []int, err error,
) {
	configs, found := seen.Files.Configs.Only("mig-configs", name)
	profiles, also := seen.Files.Profiles.Only("profiles", name)
	if !(found && also) && r.read.label == want.Label && r.read.name == want.Name {
		configs, profiles = r.read.files.Configs, r.read.files.Profiles
	}
	readable := *seen
	readable.Files = state.Files{Configs: configs, Profiles: profiles}
	return r.Requests(&readable, want.Label, name)
}

// catalog joins the configs that the agent generates for the hardware with the administrator's files that count for the name. The error says what is
// wrong with a file.
func (r *Resolver) catalog(seen *state.Observed, label, name string) (catalog.Catalog, error) {
	if r.Catalog != nil {
		return *r.Catalog, nil
	}
	var profiles map[string]catalog.Profile
	var err error
	if label == config.LabelProfile {
		err = seen.Files.Profiles.Read(func(data []byte) (err error) {
			profiles, err = catalog.ParseProfiles(data)
			return err
		})
		if err != nil {
			return catalog.Catalog{}, err
		}
	}
	var custom map[string]catalog.MIGConfig
	if _, isProfile := profiles[name]; !isProfile { // a profile wins over a MIG config of the same name, and needs no MIG config
		err = seen.Files.Configs.Read(func(data []byte) (err error) {
			custom, err = r.Parse(data)
			return err
		})
		if err != nil {
			return catalog.Catalog{}, err
		}
	}
	return catalog.Merge(catalog.Generate(seen.GPUs), custom).WithProfiles(profiles), nil
}

func fingerprint(want state.Desired, requests map[nvml.UUID]nvml.Request) string {
	h := sha256.New()
	fmt.Fprint(h, want.Name)
	for _, gpu := range slices.Sorted(maps.Keys(requests)) {
		fmt.Fprintf(h, " %s %v", gpu, requests[gpu]) // prints maps in the order of their keys
	}
	if p := want.Plugin; p != nil && p.MatchText {
		fmt.Fprintf(h, " %s", p.Text)
	} else if p != nil {
		fmt.Fprintf(h, " %v %s", p.Sharing, state.OrNone(p.Strategy))
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}
