package decide_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// Without a label the agent heals GPUs on its own account. A label counts before that, and so does the way back of a change.
func TestAnUnhealthyGPUIsResetWithoutALabel(t *testing.T) {
	t.Parallel()
	sick := func(r *request) { r.seen.Sick = plan.Sick{"GPU-a": true} }
	resets := func(r *request) { r.seen.Journal = &journal.Journal{Target: state.ResetTarget} }
	for name, row := range map[string]struct {
		prepare func(r *request)
		heals   bool
	}{
		"all are healthy":                     {prepare: func(*request) {}},
		"one is not":                          {prepare: sick, heals: true},
		"one is not, and MIG is asked for":    {prepare: func(r *request) { sick(r); r.label(config.LabelMIGConfig, "all-disabled") }},
		"one is not in another change":        {prepare: func(r *request) { sick(r); r.seen.Journal = &journal.Journal{Target: "mine"} }},
		"the reset is under way":              {prepare: resets, heals: true},
		"MIG is asked for in the reset":       {prepare: func(r *request) { resets(r); r.label(config.LabelMIGConfig, "all-disabled") }},
		"one is not, and the reset has begun": {prepare: func(r *request) { sick(r); resets(r) }, heals: true},
	} {
		r := newRequest(t)
		row.prepare(r)
		want, _ := r.desired(t)
		if heals := want.Name == state.ResetTarget && want.Fingerprint != "" && want.Targets != nil; heals != row.heals {
			t.Errorf("%s: it heals: %t, want %t: %+v", name, heals, row.heals, want)
		}
	}
}

// A change ends where what asked for it is gone. The label of the config manager is that only where a user has set it.
func TestAChangeEndsWhereTheLabelThatAskedForItIsGone(t *testing.T) {
	t.Parallel()
	former := &journal.FormerPlugin{Label: config.LabelDevicePluginConfig}
	off, ownKey := map[string]string{config.LabelMIGConfig: "all-disabled"}, config.OwnPluginKey+"uid-0"
	for name, row := range map[string]struct {
		journal journal.Journal
		labels  map[string]string
		byDef   string // the settings' default
		says    string // empty if it goes on
	}{
		"no label":                 {journal: journal.Journal{Target: "mine"}, says: "the label that requested mine was removed"},
		"no label, and no change":  {says: "nothing is requested; the agent restores what an earlier change left on the node"},
		"another label":            {journal: journal.Journal{Target: "mine"}, labels: off},
		"another, of what is left": {labels: off},
		"the MIG config alone": {
			journal: journal.Journal{Target: "all-disabled + any", Plugin: former}, labels: off,
			says: "the label that requested all-disabled + any was removed",
		},
		"the MIG config, beside a key that an agent has set": {
			journal: journal.Journal{Target: "all-disabled + any", Plugin: former}, says: "was removed",
			labels: map[string]string{config.LabelMIGConfig: "all-disabled", config.LabelDevicePluginConfig: ownKey},
		},
		"the MIG config, beside the settings' default": {
			journal: journal.Journal{Target: "all-disabled + any", Plugin: former}, labels: off, byDef: "any",
		},
		"a profile, whose key the agent has set": {
			journal: journal.Journal{Target: "shared", Plugin: former},
			labels:  map[string]string{config.LabelProfile: "shared", config.LabelDevicePluginConfig: ownKey},
		},
		"the MIG config, and the plugin's config is in a file": {
			journal: journal.Journal{Target: "all-disabled + any", Plugin: &journal.FormerPlugin{}}, labels: off,
		},
		"the MIG config, and the plugin's config stays": {
			journal: journal.Journal{Target: "all-disabled", Plugin: &journal.FormerPlugin{Label: config.LabelDevicePluginConfig, Stays: true}},
			labels:  off,
		},
	} {
		r := newRequest(t)
		r.reads(t, twice, map[string]string{"any": twice})
		r.resolver.Settings.DevicePlugin.DefaultConfig = row.byDef
		for label, name := range row.labels {
			r.label(label, name)
		}
		r.seen.Journal = &row.journal
		if _, err := r.desired(t); (err == nil) != (row.says == "") || err != nil && !strings.Contains(err.Error(), row.says) {
			t.Errorf("%s: %v, want %q", name, err, row.says)
		}
	}
}

// NVIDIA's label beside a profile is answered with success only if what it asks for stands: its scripts wait for the answer.
func TestAnOverriddenMIGConfigIsAnsweredOnlyIfTheProfileCutsTheSame(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		profile string
		label   string
		mine    catalog.MIGConfig
		waits   bool
	}{
		"the same":                {profile: "cut", label: "mine", mine: catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}},
		"no label":                {profile: "cut"},
		"MIG off":                 {profile: "cut", label: "all-disabled", waits: true},
		"a name of nothing":       {profile: "cut", label: "nonsense", waits: true},
		"MIG off, by both":        {profile: "whole", label: "all-disabled"},
		"MIG on":                  {profile: "whole", label: "all-1g.10gb", waits: true},
		"MIG on, and no instance": {profile: "whole", label: "mine", mine: catalog.MIGConfig{{All: true, MIG: true}}, waits: true},
		"fewer instances": {
			profile: "cut",
			label:   "mine",
			mine:    catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 3}}},
			waits:   true,
		},
		"the same of the first": {
			profile: "cut",
			label:   "mine",
			mine:    catalog.MIGConfig{{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
		},
		"the same of the second": {
			profile: "cut",
			label:   "mine",
			mine:    catalog.MIGConfig{{Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
		},
		"another of the second": {
			profile: "cut",
			label:   "mine",
			mine:    catalog.MIGConfig{{Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.10gb": 3}}},
			waits:   true,
		},
		"MIG off of the second":    {profile: "cut", label: "mine", mine: catalog.MIGConfig{{Indices: []int{1}}}, waits: true},
		"MIG off, of a whole node": {profile: "whole", label: "mine", mine: catalog.MIGConfig{{Indices: []int{1}}}},
	} {
		r := newRequest(t)
		r.setStrategy("mixed")
		second := r.seen.GPUs[0]
		second.UUID, second.Index = "GPU-b", 1
		r.seen.GPUs = append(r.seen.GPUs, second)
		r.seen.Files.Configs = &state.ConfigMapFile{Name: "ConfigMap gpuslice/configs"}
		r.resolver.Parse = func([]byte) (map[string]catalog.MIGConfig, error) {
			return map[string]catalog.MIGConfig{"mine": row.mine}, nil
		}
		r.label(config.LabelProfile, row.profile)
		r.label(config.LabelMIGConfig, row.label)
		if want, err := r.desired(t); err != nil || want.Unanswered != row.waits {
			t.Errorf("%s: the label waits for its answer: %t, want %t (%v)", name, want.Unanswered, row.waits, err)
		}
	}
}

// One file serves nodes of four GPUs and of eight: what it says of positions that the node does not have is passed over, and listed.
func TestPositionsThatTheNodeDoesNotHaveArePassedOver(t *testing.T) {
	t.Parallel()
	both := catalog.Merge(nil, map[string]catalog.MIGConfig{"whole": {{Indices: []int{0, 4}}}}).WithProfiles(map[string]catalog.Profile{
		"whole": {MIG: catalog.MIGConfig{{All: true}}},
	})
	for name, row := range map[string]struct {
		label, config string
		catalog       *catalog.Catalog
		beyond        []int
	}{
		"a MIG config":                            {label: config.LabelMIGConfig, config: "mine", beyond: []int{4, 5}},
		"a MIG config, asked for as a profile":    {label: config.LabelProfile, config: "mine", beyond: []int{4, 5}},
		"a profile":                               {label: config.LabelProfile, config: "whole"},
		"a profile by the name of a MIG config":   {label: config.LabelProfile, config: "whole", catalog: &both},
		"the MIG config by the name of a profile": {label: config.LabelMIGConfig, config: "whole", catalog: &both, beyond: []int{4}},
	} {
		r := newRequest(t)
		r.setStrategy("mixed")
		r.resolver.Catalog = row.catalog
		r.resolver.Parse = func([]byte) (map[string]catalog.MIGConfig, error) {
			return map[string]catalog.MIGConfig{"mine": {{Indices: []int{5, 0, 4}, MIG: true, Devices: map[string]int{"1g.10gb": 3}}}}, nil
		}
		r.seen.Files.Configs = &state.ConfigMapFile{Name: "ConfigMap gpuslice/configs"}
		r.label(row.label, row.config)
		if want, err := r.desired(t); err != nil || !slices.Equal(want.MissingPositions, row.beyond) {
			t.Errorf("%s: the positions %v are passed over, want %v (%v)", name, want.MissingPositions, row.beyond, err)
		}
	}
}

// A name that is unknown may be in the file that is not there: the message names that file, and no other.
func TestANameThatIsUnknownIsSaidWithTheFileThatIsNotThere(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		label             string
		configs, profiles bool // the file is there
		missing           string
	}{
		"a MIG config, and both files are there": {label: config.LabelMIGConfig, configs: true, profiles: true},
		"a MIG config, and its file is not":      {label: config.LabelMIGConfig, profiles: true, missing: "; the settings name configs, which does not exist"},
		"a MIG config, and no profiles":          {label: config.LabelMIGConfig, configs: true},
		"a profile, and its file is not":         {label: config.LabelProfile, configs: true, missing: "; the settings name profiles, which does not exist"},
		"a profile, and no MIG configs":          {label: config.LabelProfile, profiles: true},
	} {
		r := newRequest(t)
		r.label(row.label, "unknown")
		r.seen.Files.Configs = &state.ConfigMapFile{Name: "configs", Absent: !row.configs}
		r.seen.Files.Profiles = &state.ConfigMapFile{Name: "profiles", Absent: !row.profiles, Data: []byte(someProfiles)}
		_, err := r.desired(t)
		said := fmt.Sprint(err)
		if !strings.Contains(said, row.label+"=unknown") || strings.Contains(said, "does not exist") != (row.missing != "") || !strings.HasSuffix(said, row.missing) {
			t.Errorf("%s: %s, want %q", name, said, row.missing)
		}
	}
}

// What has failed is not tried again until it is asked for otherwise; the way back of it goes on.
func TestAChangeThatHasFailedIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		failed  bool
		journal *journal.Journal
		refused string
	}{
		"it has failed":                      {failed: true, refused: "HardwareFailure: the driver said so"},
		"another has":                        {},
		"it has, and something is under way": {failed: true, journal: &journal.Journal{Target: "all-disabled"}},
	} {
		r := newRequest(t)
		r.label(config.LabelMIGConfig, "all-disabled")
		want, err := r.desired(t)
		if err != nil {
			t.Fatal(err)
		}
		r.seen.Record.Learnt.Failed = &api.Failure{Fingerprint: "another", Reason: config.ReasonHardwareFailure, Message: "the driver said so"}
		if row.failed {
			r.seen.Record.Learnt.Failed.Fingerprint = want.Fingerprint
		}
		r.seen.Journal = row.journal
		if _, err := r.desired(t); (err != nil) != (row.refused != "") || err != nil && refusal(err) != row.refused {
			t.Errorf("%s: %s, want %q", name, refusal(err), row.refused)
		}
	}
}

// A user allows for one label what the settings refuse: of a change that two labels ask for, for either of them.
func TestWhatAUserAllowsIsAllowedForTheLabelThatIsNamed(t *testing.T) {
	t.Parallel()
	for text, allows := range map[string]bool{
		config.LabelMIGConfig + "=all-disabled emptyDir":       true,
		config.LabelDevicePluginConfig + "=any emptyDir":       true,
		config.LabelDevicePluginConfig + "=another emptyDir":   false,
		config.LabelMIGConfig + "=all-disabled + any emptyDir": false,
		config.LabelProfile + "=all-disabled emptyDir":         false,
	} {
		r := newRequest(t)
		r.reads(t, twice, map[string]string{"any": twice})
		r.label(config.LabelMIGConfig, "all-disabled")
		r.label(config.LabelDevicePluginConfig, "any")
		r.seen.Node.Annotations = map[string]string{config.AnnotationAllowEviction: text}
		if want, err := r.desired(t); err != nil || (want.Drain != nil) != allows {
			t.Errorf("%s allows %+v, want %t (%v)", text, want.Drain, allows, err)
		}
	}
}

// What this process has read of a file counts for the name that it was read for, until that can be read again.
func TestWhatWasReadOfAFileCountsForTheNameThatItWasReadFor(t *testing.T) {
	t.Parallel()
	seven := catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}
	three := catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 3}}}
	const mistake = "version: v1\nmig-configs:\n  mine: []\n  other: []\n"
	for name, row := range map[string]struct {
		read  [2]string // the label and the name that it was read for
		then  state.Desired
		file  string
		count int // of instances; 0 if what stands is not known
	}{
		"for this name":                      {read: [2]string{config.LabelMIGConfig, "mine"}, file: "no YAML", count: 7},
		"for another":                        {read: [2]string{config.LabelMIGConfig, "all-disabled"}, file: "no YAML"},
		"for a profile of this name":         {read: [2]string{config.LabelProfile, "mine"}, file: "no YAML"},
		"and an entry of it can be read now": {read: [2]string{config.LabelMIGConfig, "mine"}, file: mistake, count: 3},
		"and a reset needs no file":          {read: [2]string{config.LabelMIGConfig, "mine"}, then: state.Desired{Fingerprint: "reset"}, file: "no YAML", count: 7},
		"and a config of the plugin needs it": {
			read:  [2]string{config.LabelMIGConfig, "mine"},
			then:  state.Desired{Label: config.LabelDevicePluginConfig, Name: "any", Fingerprint: "any"},
			file:  "no YAML",
			count: 7,
		},
		"and another is refused": {
			read:  [2]string{config.LabelMIGConfig, "mine"},
			then:  state.Desired{Label: config.LabelMIGConfig, Name: "none"},
			file:  "no YAML",
			count: 7,
		},
	} {
		r := newRequest(t)
		r.setStrategy("mixed")
		r.resolver.Parse = func(text []byte) (map[string]catalog.MIGConfig, error) {
			switch said := string(text); {
			case said == "good":
				return map[string]catalog.MIGConfig{"mine": seven}, nil
			case said == "no YAML" || strings.Contains(said, "other"):
				return nil, errors.New("a mistake")
			default:
				return map[string]catalog.MIGConfig{"mine": three}, nil
			}
		}
		file := func(text string) {
			r.seen.Files.Configs = &state.ConfigMapFile{Name: "configs", Data: []byte(text)}
		}
		file("good")
		r.label(row.read[0], row.read[1])
		want, err := r.desired(t)
		if err != nil {
			t.Fatal(err)
		}
		r.resolver.Remember(r.seen, want)
		delete(r.seen.Node.Labels, row.read[0])
		r.label(config.LabelMIGConfig, "mine")
		verified, err := r.desired(t)
		if row.file == mistake {
			file("three")
			verified, err = r.desired(t)
		}
		if err != nil {
			t.Fatal(err)
		}
		r.seen.Record.Learnt.Verified = verified.Fingerprint
		file(row.file)
		r.resolver.Remember(r.seen, row.then)
		got, err := r.desired(t)
		count := 0
		if err == nil {
			count = got.Targets[nvml.UUID("GPU-a")].Request.Devices["1g.10gb"]
		}
		if count != row.count || !strings.Contains(fmt.Sprint(err, got.Unread), "a mistake") {
			t.Errorf("%s: %d instances, want %d (%v)", name, count, row.count, err)
		}
	}
}
