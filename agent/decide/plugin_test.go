package decide_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	mixedTwice = "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	mixed      = "version: v1\nflags: {migStrategy: mixed}\n"
	hooked     = "version: v1\nflags: {plugin: {nvidiaCTKPath: /usr/bin/of-people}}\n"

	// What a profile asks for.
	threeTimes = "{sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}}"
	byMPS      = "{sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}"
	sliced     = "{mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], " +
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}}"
)

// profile asks for a profile of this text.
func (r *request) profile(text string) {
	r.label(config.LabelProfile, "it")
	r.seen.Files.Profiles.Data = append([]byte(someProfiles), "  it: "+text+"\n"...)
}

// refusal is the reason and the message of a request that is refused, or waits.
func refusal(err error) string {
	var stalled *outcome.Stalled
	var waiting *outcome.Waiting
	switch {
	case outcome.IsUnseen(err):
		return "unseen: " + err.Error()
	case errors.As(err, &stalled):
		return fmt.Sprintf("%s: %s", stalled.Reason, stalled.Message)
	case errors.As(err, &waiting):
		return fmt.Sprintf("waits, %s: %s", waiting.Reason, waiting.Message)
	}
	return fmt.Sprint(err)
}

// given says what the device plugin gets: its MIG strategy, sharing, and the text by which it gets them.
func given(want state.Desired) string {
	p := want.Plugin
	switch {
	case want.PluginLater:
		return "later"
	case p == nil:
		return "nothing"
	case p.KeyContent != "":
		return fmt.Sprintf("%s, %s, by %s of %q", state.OrNone(p.Strategy), state.SharingText(p.Sharing), p.Text, p.KeyContent)
	}
	return fmt.Sprintf("%s, %s, by %q", state.OrNone(p.Strategy), state.SharingText(p.Sharing), p.Text)
}

// expect checks what the device plugin gets, by its beginning and a part of it, or the beginning of why that is refused.
func (r *request) expect(t *testing.T, name, gets, part, refused string) {
	t.Helper()
	want, err := r.desired(t)
	switch {
	case err != nil || refused != "":
		if said := refusal(err); refused == "" || !strings.HasPrefix(said, refused) {
			t.Errorf("%s: %s, want %q", name, said, refused)
		}
	case !strings.HasPrefix(given(want), gets) || !strings.Contains(given(want), part):
		t.Errorf("%s: it gets %s, want %s, and %q in it", name, given(want), gets, part)
	}
}

// A profile says of the sharing and of the MIG strategy what it says, and all else of the plugin's config stays.
func TestTheDevicePluginGetsWhatAProfileSaysAndKeepsTheRest(t *testing.T) {
	t.Parallel()
	set := func(s config.MIGStrategy) func(*request) {
		return func(r *request) { r.resolver.Settings.MIGStrategy = s }
	}
	const threefold, twofold = "time-slicing of nvidia.com/gpu x 3", "time-slicing of nvidia.com/gpu x 2"
	const strategyIs = "WrongMIGStrategy: label gpuslice.io/profile=it: the device plugin's MIG strategy is "
	for name, row := range map[string]struct {
		profile string
		reads   string // the plugin's config
		prepare func(r *request)
		gets    string // the beginning
		keeps   string // of the config
		refused string
	}{
		"another sharing": {profile: threeTimes, reads: hooked, gets: "none, " + threefold, keeps: "nvidiaCTKPath: /usr/bin/of-people"},
		"another sharing, under a strategy that fits": {profile: threeTimes, reads: mixedTwice, gets: "mixed, " + threefold, keeps: "migStrategy: mixed"},
		"the sharing that is there": {
			profile: "{sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}",
			reads:   twice,
			gets:    fmt.Sprintf("none, %s, by %q", twofold, twice),
		},
		"a strategy, and no sharing": {profile: "{migStrategy: single}", reads: mixedTwice, gets: "single, " + twofold, keeps: "migStrategy: single"},
		"MIG devices, under a strategy that has none": {
			profile: sliced,
			reads:   twice,
			gets:    "mixed, time-slicing of nvidia.com/mig-1g.10gb x 2",
			keeps:   "migStrategy: mixed",
		},
		"MPS, under a strategy that it does not share": {profile: byMPS, reads: mixed, gets: "none, mps of nvidia.com/gpu x 2", keeps: "migStrategy: none"},
		"a strategy that the settings say, too": {
			profile: "{migStrategy: mixed}",
			reads:   twice,
			prepare: set(config.MIGStrategyMixed),
			gets:    "mixed, " + twofold,
		},
		"a strategy, and the settings say another": {
			profile: "{migStrategy: mixed}",
			reads:   twice,
			prepare: set(config.MIGStrategyNone),
			refused: "WrongMIGStrategy: set migStrategy of the settings to auto, so that the device plugin's config decides: the profile says mixed, the settings say none",
		},
		"MIG devices, and the settings say how": {
			profile: sliced,
			reads:   twice,
			prepare: set(config.MIGStrategyMixed),
			gets:    "none, time-slicing of nvidia.com/mig-1g.10gb x 2",
		},
		"MIG devices, and the plugin's pod says how": {
			profile: sliced,
			reads:   twice,
			prepare: func(r *request) { r.setStrategy("mixed") },
			gets:    "none, time-slicing of nvidia.com/mig-1g.10gb x 2",
		},
		"a sharing, in place of what is no config": {
			profile: threeTimes,
			prepare: func(r *request) { unreadable(r, "flags: [") },
			gets:    "none, " + threefold,
		},
		"a strategy, and the sharing cannot be read": {
			profile: "{migStrategy: mixed}",
			prepare: func(r *request) { unreadable(r, "flags: [") },
			refused: "NoHandover: label gpuslice.io/profile=it: the profile keeps the current sharing, which is not known: no config",
		},
		"a sharing, and a config that cannot be edited": {profile: threeTimes, reads: twice, prepare: unwritable, refused: "no room for it"},
		"neither": {profile: "{labels: {a: b}}", reads: twice, gets: "nothing"},
		"a resource that the node will not have": {
			profile: "{sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}}",
			reads:   twice,
			refused: "ImpossibleSharing: label gpuslice.io/profile=it: nvidia.com/mig-1g.10gb is to be shared",
		},
		"a strategy that has no effect": {
			profile: "{migStrategy: single}",
			reads:   twice,
			prepare: func(r *request) { r.setStrategy("mixed") },
			refused: strategyIs + "mixed, under which the config's flags.migStrategy, single, has no effect",
		},
		"the strategy of the plugin's pod": {
			profile: "{migStrategy: mixed}",
			reads:   twice,
			prepare: func(r *request) { r.setStrategy("mixed") },
			gets:    "mixed, " + twofold,
		},
		"a sharing, and the settings are wrong": {
			profile: threeTimes,
			reads:   twice,
			prepare: func(r *request) { set(config.MIGStrategySingle)(r); r.setStrategy("mixed") },
			refused: strategyIs + "mixed, under which migStrategy of the settings, single, is not what pod ",
		},
		"a sharing, and the settings are right": {
			profile: threeTimes,
			reads:   twice,
			prepare: func(r *request) { set(config.MIGStrategyMixed)(r); r.setStrategy("mixed") },
			gets:    "none, " + threefold,
		},
		"a sharing, and two plugins contradict each other": {
			profile: threeTimes,
			reads:   twice,
			prepare: func(r *request) { r.seen.DevicePlugin.Rivals = "two pods differ" },
			refused: strategyIs + "mixed, under which two pods differ",
		},
	} {
		r := newRequest(t)
		r.reads(t, row.reads, nil)
		r.profile(row.profile)
		if row.prepare != nil {
			row.prepare(r)
		}
		r.expect(t, name, row.gets, row.keeps, row.refused)
	}
}

// unreadable has the plugin read what is no config.
func unreadable(r *request, text string) {
	r.seen.Plugin.Text, r.seen.Plugin.Current, r.seen.Plugin.ParseErr = text, nil, errors.New("no config")
}

// unwritable has no config of the plugin written.
func unwritable(r *request) {
	r.resolver.Format.Render = func([]byte, catalog.Sharing, config.MIGStrategy) ([]byte, error) {
		return nil, errors.New("no room for it")
	}
}

// The agent takes a key of people that says what a profile asks for, and else writes one of its own from the config of people that counted before.
func TestTheKeyOfAConfigManagerThatAProfileGets(t *testing.T) {
	t.Parallel()
	own := func(text string) string { return config.OwnPluginKey + "uid-" + state.Hash(text) }
	noted, forged := state.Noted("hooks", hooked), state.Noted(own(hooked), twice)
	formerlyNoted := "# All that is not asked of gpuslice is as in key hooks\n" + hooked
	labelled := func(key string) func(*request) {
		return func(r *request) { r.label(config.LabelDevicePluginConfig, key); r.seen.Plugin.Text = key }
	}
	const writes = "none, time-slicing of nvidia.com/gpu x 3, by gpuslice-uid-"
	for name, row := range map[string]struct {
		keys    map[string]string // beside any, which shares twice
		prepare func(r *request)
		gets    string // the beginning
		keeps   string
		refused string
	}{
		"a key has it": {keys: map[string]string{"three": thrice}, gets: `none, time-slicing of nvidia.com/gpu x 3, by "three"`},
		"a key before it is no config": {
			keys: map[string]string{"broken": "[", "three": thrice},
			gets: `none, time-slicing of nvidia.com/gpu x 3, by "three"`,
		},
		"a key before it can be in no label": {
			keys: map[string]string{"-three": thrice, "three": thrice},
			gets: `none, time-slicing of nvidia.com/gpu x 3, by "three"`,
		},
		"no key has it":              {gets: writes, keeps: "replicas: 3"},
		"the key can be in no label": {keys: map[string]string{strings.Repeat("a", 64): thrice, "-three": thrice}, gets: writes, keeps: "replicas: 3"},
		"the key is another agent's": {keys: map[string]string{config.OwnPluginKey + "other-" + state.Hash(thrice): thrice}, gets: writes},
		"the agent's own, which the node has": {
			keys: map[string]string{own(thrice): thrice}, prepare: labelled(own(thrice)),
			gets: fmt.Sprintf("none, time-slicing of nvidia.com/gpu x 3, by %s of %q", own(thrice), thrice),
		},
		// Another program may have put it there.
		"the agent's own, which the node has not": {
			keys:  map[string]string{own(thrice): thrice},
			gets:  writes,
			keeps: `of "# Everything but the sharing is copied from key any`,
		},
		"the settings let the agent write no key": {
			prepare: func(r *request) { r.seen.Plugin.Method = config.HandoverLabel },
			refused: "NoHandover: label gpuslice.io/profile=it: no key of ConfigMap gpu-operator/configs has the sharing time-slicing of nvidia.com/gpu x 3, and the",
		},
		"the ConfigMap cannot be read": {
			prepare: func(r *request) { r.seen.Plugin.Manager.ReadErr = errors.New("forbidden") }, refused: "NoHandover: label gpuslice.io/profile=it: forbidden",
		},
		"the ConfigMap is not seen": {
			prepare: func(r *request) { r.seen.Plugin.Manager.ReadErr = &outcome.UnseenError{Err: errors.New("no answer")} }, refused: "unseen: no answer",
		},
		"a config that cannot be edited": {prepare: unwritable, refused: "no room for it"},
		"from the key that the node has": {keys: map[string]string{"hooks": hooked}, prepare: labelled("hooks"), gets: writes, keeps: "/usr/bin/of-people"},
		"from the key that the agent's own names": {
			keys:    map[string]string{"hooks": hooked, own(noted): noted},
			prepare: labelled(own(noted)),
			gets:    writes,
			keeps:   "/usr/bin/of-people",
		},
		"from the key that the note of an earlier agent names": {
			keys:    map[string]string{"hooks": hooked, own(formerlyNoted): formerlyNoted},
			prepare: labelled(own(formerlyNoted)),
			gets:    writes,
			keeps:   "/usr/bin/of-people",
		},
		"from no agent's key that the agent's own names": {
			keys:    map[string]string{own(hooked): hooked, own(forged): forged},
			prepare: labelled(own(forged)),
			gets:    writes,
			keeps:   "is copied from key any",
		},
		"from no agent's key that the manager takes for nodes without the label": {keys: map[string]string{own(hooked): hooked}, prepare: func(r *request) {
			labelled(own(hooked))(r)
			delete(r.seen.Plugin.Manager.Files, "any")
			r.seen.Plugin.Manager.Fallback, r.seen.Plugin.Manager.Fallbacks = "", []string{"single"}
		}, gets: writes, keeps: `of "sharing:`},
		"from the settings' default, where the agent's own names none": {keys: map[string]string{own(twice): twice}, prepare: func(r *request) {
			labelled(own(twice))(r)
			r.resolver.Settings.DevicePlugin.DefaultConfig = "hooks"
		}, gets: writes, keeps: "/usr/bin/of-people"},
		"from the key for nodes without the label, where there is no such default": {keys: map[string]string{own(hooked): hooked}, prepare: func(r *request) {
			labelled(own(hooked))(r)
			r.resolver.Settings.DevicePlugin.DefaultConfig = "gone"
		}, gets: writes, keeps: "is copied from key any"},
		"from that key, where the settings have no default": {
			keys:    map[string]string{own(hooked): hooked},
			prepare: labelled(own(hooked)),
			gets:    writes,
			keeps:   "is copied from key any",
		},
	} {
		r := newRequest(t)
		keys := map[string]string{"any": twice}
		for key, text := range row.keys {
			keys[key] = text
		}
		r.managed(t, keys, map[string]string{"hooks": hooked})
		r.profile(threeTimes)
		if row.prepare != nil {
			row.prepare(r)
		}
		r.expect(t, name, row.gets, row.keeps, row.refused)
	}
}

// A key of the plugin's configs is read where the plugin gets it, and one that cannot be read, or that does not fit the GPUs, is refused before
// anything is disturbed.
func TestAKeyOfTheDevicePluginsConfigsIsReadWhereItIsGivenToThePlugin(t *testing.T) {
	t.Parallel()
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "configs", errors.New("no role"))
	spoils := func(err error) func(*request) {
		return func(r *request) { r.seen.Plugin.Current, r.seen.Plugin.ParseErr = nil, err }
	}
	cuts := func(r *request) { r.label(config.LabelMIGConfig, "all-1g.10gb") }
	byDefault := func(r *request) {
		delete(r.seen.Node.Labels, config.LabelDevicePluginConfig)
		r.resolver.Settings.DevicePlugin.DefaultConfig = "named"
	}
	for name, row := range map[string]struct {
		managed bool
		named   string // the config
		prepare func(r *request)
		gets    string // the beginning
		refused string
	}{
		"a file that may not be read, where the agent writes the next": {
			named:   thrice,
			prepare: spoils(forbidden),
			gets:    "none, time-slicing of nvidia.com/gpu x 3",
		},
		"a file that is no config, where the agent writes the next": {
			named:   thrice,
			prepare: spoils(errors.New("no config")),
			gets:    "none, time-slicing of nvidia.com/gpu x 3",
		},
		"a ConfigMap that the agent may not read is the manager's": {managed: true, named: thrice, prepare: spoils(forbidden), gets: "nothing"},
		"a key of the manager's that is no config": {
			managed: true,
			named:   thrice,
			prepare: spoils(errors.New("no config")),
			refused: "InvalidCatalog: label nvidia.com/device-plugin.config=named: no config",
		},
		"a key that is no config": {named: "[", refused: "InvalidCatalog: label nvidia.com/device-plugin.config=named: "},
		"the ConfigMap of the settings is not there": {
			named: thrice, prepare: func(r *request) {
				r.seen.Plugin.Named.Err = fmt.Errorf("reading it: %w", apierrors.NewNotFound(schema.GroupResource{Resource: "configmaps"}, "configs"))
			},
			refused: "InvalidCatalog: label nvidia.com/device-plugin.config=named: reading it: configmaps \"configs\" not found: " +
				"create it, or name yours in devicePlugin.configMap of the settings",
		},
		"a default, and a key of the manager's which shares alike": {
			managed: true,
			named:   twice,
			prepare: byDefault,
			gets:    `none, time-slicing of nvidia.com/gpu x 2, by ""`,
		},
		"a default, and the manager's ConfigMap cannot be read": {
			managed: true,
			named:   thrice,
			prepare: func(r *request) { byDefault(r); r.seen.Plugin.Manager.ReadErr = errors.New("no role") },
			refused: "NoHandover: devicePlugin.defaultConfig of the settings, named: no role",
		},
		"a default, and the settings let the agent write no key": {
			managed: true,
			named:   thrice,
			prepare: func(r *request) { byDefault(r); r.seen.Plugin.Method = config.HandoverLabel },
			refused: "NoHandover: devicePlugin.defaultConfig of the settings, named: set devicePlugin.handover to configmap, so that the agent may add a key for the default to ConfigMap gpu-operator/configs;",
		},
		"a strategy, beside a cut that fits it": {named: mixed, prepare: cuts, gets: "mixed, nothing shared"},
		"no strategy, beside a cut": {
			named:   "version: v1\n",
			prepare: cuts,
			refused: "WrongMIGStrategy: label nvidia.com/mig.config=all-1g.10gb + named: the device plugin's MIG strategy is none, under which it advertises",
		},
		"no strategy, beside a cut, and the node's label says one": {
			named:   "version: v1\n",
			prepare: func(r *request) { cuts(r); r.label(config.LabelMIGStrategy, "mixed") },
			gets:    "none, nothing shared",
		},
		"no strategy, beside a cut, and the node's label says that of the present config": {
			named: "version: v1\n",
			prepare: func(r *request) {
				cuts(r)
				r.label(config.LabelMIGStrategy, "mixed")
				r.seen.Plugin.Current = &catalog.PluginConfig{MIGStrategy: config.MIGStrategyMixed}
			},
			refused: "WrongMIGStrategy: label nvidia.com/mig.config=all-1g.10gb + named: the device plugin's MIG strategy is none, under which it advertises",
		},
		"a strategy that is for GPUs of one profile, beside two of two": {
			named:   "version: v1\nflags: {migStrategy: single}\n",
			prepare: func(r *request) { cuts(r); r.seen.GPUs = append(r.seen.GPUs, nvml.GPU{UUID: "GPU-b", Index: 1}) },
			refused: "WrongMIGStrategy: label nvidia.com/mig.config=all-1g.10gb + named: the device plugin's MIG strategy is single, under which it exits when",
		},
	} {
		r := newRequest(t)
		r.label(config.LabelDevicePluginConfig, "named")
		named := map[string]string{"named": row.named}
		if r.reads(t, twice, named); row.managed {
			r.managed(t, map[string]string{"any": twice}, named)
		}
		if row.prepare != nil {
			if row.prepare(r); row.managed {
				r.seen.Plugin.Text = r.seen.Node.Labels[config.LabelDevicePluginConfig]
			}
		}
		r.expect(t, name, row.gets, "", row.refused)
	}
}

// A startup taint keeps the plugin of a new node away: the GPUs are cut, and the plugin gets its config once it is there.
func TestAPluginThatTheStartupTaintKeepsAwayGetsItsConfigLater(t *testing.T) {
	t.Parallel()
	fresh := []corev1.Taint{{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}}
	for name, row := range map[string]struct {
		prepare func(r *request)
		gets    string
		refused string
	}{
		"a new node": {prepare: func(r *request) { r.seen.Marks.Startup = fresh }, gets: "later"},
		"a node whose startup taint the change has taken": {prepare: func(r *request) {
			r.seen.Journal = &journal.Journal{Target: "it"}
			r.seen.Journal.RecordStartup(fresh)
		}, gets: "later"},
		"an old node": {prepare: func(*request) {}, refused: "waits, NoDevicePlugin: there is none"},
	} {
		r := newRequest(t)
		r.profile(threeTimes)
		r.seen.Plugin = state.PluginConfig{Read: true, NoMethod: "there is none"}
		r.seen.DevicePlugin.Pods = nil
		row.prepare(r)
		r.expect(t, name, row.gets, "", row.refused)
	}
}

// An undo gives the plugin back what the journal holds, but what a user asks the config manager for since counts.
func TestTheFormerConfigThatAnUndoGivesBack(t *testing.T) {
	t.Parallel()
	own := func(text string) string { return config.OwnPluginKey + "uid-" + state.Hash(text) }
	keys := map[string]string{"any": twice, "three": thrice, "broken": "["}
	for name, row := range map[string]struct {
		former  *journal.FormerPlugin
		managed bool
		label   string // of the config manager, now
		gets    string
		known   bool
	}{
		"the change leaves it":     {former: &journal.FormerPlugin{Text: thrice, Stays: true}},
		"the change has none":      {},
		"a file":                   {former: &journal.FormerPlugin{Text: thrice}, gets: fmt.Sprintf("none, time-slicing of nvidia.com/gpu x 3, by %q", thrice), known: true},
		"a file that is no config": {former: &journal.FormerPlugin{Text: "["}, gets: `none,  of , by "["`},
		"a key": {
			former:  &journal.FormerPlugin{Text: "three"},
			managed: true,
			label:   own(twice),
			gets:    `none, time-slicing of nvidia.com/gpu x 3, by "three"`,
		},
		"a key, and the label is gone": {
			former:  &journal.FormerPlugin{Text: "three"},
			managed: true,
			gets:    `none, time-slicing of nvidia.com/gpu x 3, by "three"`,
		},
		"a key, which the label names again": {
			former:  &journal.FormerPlugin{Text: "three"},
			managed: true,
			label:   "three",
			gets:    `none, time-slicing of nvidia.com/gpu x 3, by "three"`,
		},
		"a key, and a user has set another": {former: &journal.FormerPlugin{Text: "three"}, managed: true, label: "any"},
		"a key that is no config":           {former: &journal.FormerPlugin{Text: "broken"}, managed: true, label: own(twice), gets: `none,  of , by "broken"`},
		"a key that is gone":                {former: &journal.FormerPlugin{Text: "gone"}, managed: true, label: own(twice), gets: `none,  of , by "gone"`},
		"a key of the agent's, by its text": {
			former:  &journal.FormerPlugin{Text: own(thrice), Body: thrice},
			managed: true,
			label:   own(twice),
			gets:    fmt.Sprintf("none, time-slicing of nvidia.com/gpu x 3, by %s of %q", own(thrice), thrice),
		},
		"a key of the agent's before a new node ID": {
			former:  &journal.FormerPlugin{Text: config.OwnPluginKey + "before", Body: thrice},
			managed: true,
			label:   own(twice),
			gets:    fmt.Sprintf("none, time-slicing of nvidia.com/gpu x 3, by %s of %q", own(thrice), thrice),
		},
	} {
		r := newRequest(t)
		if r.reads(t, twice, nil); row.managed {
			r.label(config.LabelDevicePluginConfig, row.label)
			r.managed(t, keys, nil)
		}
		r.seen.Journal = &journal.Journal{Target: "it", Plugin: row.former}
		got := r.resolver.Former(r.seen)
		switch {
		case got == nil || row.gets == "":
			if got != nil || row.gets != "" {
				t.Errorf("%s: %+v, want %q", name, got, row.gets)
			}
		case given(state.Desired{Plugin: got}) != row.gets || got.Known != row.known || !got.MatchText:
			t.Errorf("%s: %s, known: %t, by its text: %t; want %s, %t", name, given(state.Desired{Plugin: got}), got.Known, got.MatchText, row.gets, row.known)
		}
	}
}

// Labels and taints of other programs are not changed, and no taint keeps the device plugin or the node's pods away for good.
func TestTheLabelsAndTaintsOfAProfileThatAreRefused(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		profile string
		prepare func(r *request)
		refused string
	}{
		"a label that the node has not": {profile: "{labels: {team: a}}"},
		"a label of another program": {
			profile: "{labels: {team: a}}",
			prepare: func(r *request) { r.label("team", "b") },
			refused: `NodeKeyConflict: profile it: label team is "b" on the node, and "a" in the profile, which the agent did not set and does not change; remove it from the node`,
		},
		"a label that the agent has set": {profile: "{labels: {team: a}}", prepare: func(r *request) {
			r.label("team", "b")
			r.seen.Record.Learnt.Published.Labels = map[string]string{"team": "b"}
		}},
		"the startup taint": {
			profile: "{taints: [{key: fresh, effect: NoSchedule}]}",
			prepare: func(r *request) { r.resolver.Settings.StartupTaint = "fresh" },
			refused: `InvalidCatalog: profile it: taints[0].key: "fresh" is startupTaint of the settings`,
		},
		"a taint that the plugin does not bear": {
			profile: "{taints: [{key: gpu, effect: NoSchedule}]}",
			refused: "InvalidCatalog: profile it: pod gpu-operator/plugin does not tolerate the taint gpu:NoSchedule",
		},
		"a taint that is only preferred": {profile: "{taints: [{key: gpu, effect: PreferNoSchedule}]}"},
		"a taint that the plugin bears":  {profile: "{taints: [{key: gpu, effect: NoSchedule}]}", prepare: tolerant},
		"a taint that the plugin bears beside one": {
			profile: "{taints: [{key: gpu, effect: NoSchedule}, {key: other, effect: NoSchedule}]}",
			prepare: tolerant,
			refused: "InvalidCatalog: profile it: pod gpu-operator/plugin does not tolerate the taint other:NoSchedule",
		},
		"a taint that the MPS daemon does not bear": {profile: "{taints: [{key: gpu, effect: NoSchedule}]}", prepare: func(r *request) {
			tolerant(r)
			r.seen.DevicePlugin.MPSDaemons = []corev1.Pod{{}}
			r.seen.DevicePlugin.MPSDaemons[0].Name = "mps"
		}, refused: "InvalidCatalog: profile it: pod /mps does not tolerate"},
	} {
		r := newRequest(t)
		r.profile(row.profile)
		if row.prepare != nil {
			row.prepare(r)
		}
		if _, err := r.desired(t); (err != nil) != (row.refused != "") || err != nil && !strings.HasPrefix(refusal(err), row.refused) {
			t.Errorf("%s: %s, want %q", name, refusal(err), row.refused)
		}
	}
}

// tolerant has the plugin's pod bear the taint gpu.
func tolerant(r *request) {
	r.seen.DevicePlugin.Pods[0].Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
}
