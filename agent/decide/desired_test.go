package decide_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// twice and thrice are configs of the device plugin.
	twice  = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
	thrice = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n"

	// someProfiles have one that cuts, one that shares, and one that does neither.
	someProfiles = `
apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  cut: {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}
  shared: {mig: [{gpus: {all: true}, enabled: false}], sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}
  whole: {mig: [{gpus: {all: true}, enabled: false}]}
`
)

// request is a node with one H100, of which nothing is asked yet, and what the resolver goes by.
type request struct {
	seen     *state.Observed
	resolver *decide.Resolver
}

func newRequest(t *testing.T) *request {
	t.Helper()
	small := nvml.Profile{Name: "1g.10gb", Slices: 1, Max: 7, Engines: nvml.Engines{Copy: 1}}
	for start := range 7 {
		small.Placements = append(small.Placements, nvml.Span{Start: start, Size: 1})
	}
	r := &request{
		seen: &state.Observed{
			Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", Labels: map[string]string{}}},
			GPUs: []nvml.GPU{{UUID: "GPU-a", DeviceID: 0x233010DE, Model: "NVIDIA H100 80GB HBM3", Capable: true, Profiles: []nvml.Profile{small}}},
		},
		resolver: &decide.Resolver{
			Settings: config.Default(), Format: catalog.PluginFormat{Parse: deviceplugin.Parse, Render: deviceplugin.Render},
			Parse: func(text []byte) (map[string]catalog.MIGConfig, error) {
				if string(text) == "no YAML" {
					return nil, errors.New("line 1: is no YAML")
				}
				return map[string]catalog.MIGConfig{"mine": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 3}}}}, nil
			},
		},
	}
	r.seen.Files.Profiles = &state.ConfigMapFile{Name: "ConfigMap gpuslice/profiles", Data: []byte(someProfiles)}
	r.seen.DevicePlugin.Pods = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: "plugin"}}}
	return r
}

func (r *request) label(label, name string) { r.seen.Node.Labels[label] = name }

// setStrategy gives the device plugin's pod a MIG strategy.
func (r *request) setStrategy(strategy string) {
	r.seen.DevicePlugin.Pods[0].Spec.Containers = []corev1.Container{{Env: []corev1.EnvVar{{Name: "MIG_STRATEGY", Value: strategy}}}}
}

// reads has the plugin read that config from a file, beside the settings' configs.
func (r *request) reads(t *testing.T, text string, named map[string]string) {
	t.Helper()
	current, err := deviceplugin.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	r.seen.Plugin = state.PluginConfig{Read: true, Method: config.HandoverFile, Text: text, Exists: true, Current: &current, Named: &state.PluginConfigs{Files: named}}
}

// managed has a config manager give the plugin the config that the label names.
func (r *request) managed(t *testing.T, keys, named map[string]string) {
	t.Helper()
	r.reads(t, keys["any"], named)
	r.seen.Plugin.Method, r.seen.Plugin.Text, r.seen.Plugin.Exists = config.HandoverConfigMap, r.seen.Node.Labels[config.LabelDevicePluginConfig], true
	r.seen.Plugin.Manager = &state.ConfigManager{
		Node: "uid", Label: config.LabelDevicePluginConfig, Namespace: "gpu-operator", ConfigMap: "configs", Fallback: "any", Files: keys,
	}
}

// desired resolves the labels twice, since nothing may depend on how often that is done, and checks that the observation stays as it is.
func (r *request) desired(t *testing.T) (state.Desired, error) {
	t.Helper()
	before := fmt.Sprintf("%+v", *r.seen)
	want, err := r.resolver.Desired(r.seen)
	again, second := r.resolver.Desired(r.seen)
	if after := fmt.Sprintf("%+v", *r.seen); before != after {
		t.Errorf("the observation is %s\nand was %s", after, before)
	}
	if want.Fingerprint != again.Fingerprint || fmt.Sprint(err) != fmt.Sprint(second) {
		t.Errorf("resolved again it is %+v, %v\nand was %+v, %v", again, second, want, err)
	}
	return want, err
}

// The windows of a profile count in place of those of the pool; a profile without windows leaves those of the pool.
func TestAProfilesWindowsAreItsChangesWindows(t *testing.T) {
	t.Parallel()
	for name, windows := range map[string]int{"noon": 1, "whole": 0} {
		r := newRequest(t)
		r.seen.Files.Profiles.Data = append(r.seen.Files.Profiles.Data, "  noon: {mig: [{gpus: {all: true}, enabled: false}], "+
			"windows: [{days: [Sat], start: '12:00', duration: 1h, timeZone: America/New_York}]}\n"...)
		r.label(config.LabelProfile, name)
		want, err := r.desired(t)
		if err != nil || len(want.Windows) != windows {
			t.Errorf("%s: %+v, %v; want %d", name, want.Windows, err, windows)
		} else if windows > 0 && (want.Windows[0].Start != 12*time.Hour || want.Windows[0].Zone.String() != "America/New_York") {
			t.Errorf("%s: %+v", name, want.Windows[0])
		}
	}
}

// A mount that does not answer must not hold up a node that asks for nothing of the plugin, and each reading of a ConfigMap that is not watched is a
// request: the plugin's config is read only where what is asked for depends on it.
func TestWhatIsAskedForDependsOnTheDevicePluginsConfigOnlyWhereItMustBeKnown(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		label, config string
		prepare       func(r *request)
		needs         bool
	}{
		"nothing is asked":                     {},
		"MIG off":                              {label: config.LabelMIGConfig, config: "all-disabled"},
		"a cut, and nothing says the strategy": {label: config.LabelMIGConfig, config: "all-1g.10gb", needs: true},
		"a cut, and the plugin's pod says it":  {label: config.LabelMIGConfig, config: "all-1g.10gb", prepare: func(r *request) { r.setStrategy("mixed") }},
		"a cut, and the node's label says it":  {label: config.LabelMIGConfig, config: "all-1g.10gb", prepare: func(r *request) { r.label(config.LabelMIGStrategy, "mixed") }},
		"a cut, and the settings say it":       {label: config.LabelMIGConfig, config: "all-1g.10gb", prepare: func(r *request) { r.resolver.Settings.MIGStrategy = config.MIGStrategyMixed }},
		"a config that is not there":           {label: config.LabelMIGConfig, config: "none"},
		"a key of the plugin's configs":        {label: config.LabelDevicePluginConfig, config: "any", needs: true},
		"a key that an agent has set":          {label: config.LabelDevicePluginConfig, config: config.OwnPluginKey + "uid-0"},
		"the settings' default":                {prepare: func(r *request) { r.resolver.Settings.DevicePlugin.DefaultConfig = "any" }, needs: true},
		"a profile that shares":                {label: config.LabelProfile, config: "shared", needs: true},
		"a profile that shares nothing":        {label: config.LabelProfile, config: "whole"},
		"a profile that shares, in a file which": {label: config.LabelProfile, config: "shared", prepare: func(r *request) {
			r.seen.Files.Profiles.Data = append(r.seen.Files.Profiles.Data, "  other: {mig: 1}\n"...)
		}, needs: true},
		"the way back of a change that was withdrawn": {prepare: func(r *request) { r.seen.Journal = &journal.Journal{Target: "all-1g.10gb"} }},
	} {
		r := newRequest(t)
		if row.label != "" {
			r.label(row.label, row.config)
		}
		if row.prepare != nil {
			row.prepare(r)
		}
		if _, err := r.desired(t); decide.NeedsPlugin(err) != row.needs {
			t.Errorf("%s: the plugin's config is needed: %t, want %t (%v)", name, !row.needs, row.needs, err)
		}
		r.reads(t, twice, nil)
		if _, err := r.desired(t); decide.NeedsPlugin(err) {
			t.Errorf("%s: the plugin's config is needed, and was read", name)
		}
	}
}

// What a label asks of the device plugin, by what was observed of it.
func TestWhatIsAskedOfTheDevicePlugin(t *testing.T) {
	t.Parallel()
	keys := map[string]string{"any": twice, "three": thrice}
	byDefault := func(r *request) { r.resolver.Settings.DevicePlugin.DefaultConfig = "three" }
	for name, row := range map[string]struct {
		label, config string
		prepare       func(r *request)
		managed       bool
		want          state.DesiredPlugin // its sharing is left out
		replicas      int
		refused       string
	}{
		"a profile, by the file": {
			label: config.LabelProfile, config: "shared", want: state.DesiredPlugin{Known: true, Text: twice, AskedBy: "label gpuslice.io/profile=shared"}, replicas: 2,
		},
		"a key, by the file": {
			label: config.LabelDevicePluginConfig, config: "three", replicas: 3,
			want: state.DesiredPlugin{Known: true, Text: thrice, MatchText: true, AskedBy: "label nvidia.com/device-plugin.config=three"},
		},
		"the default, by the file": {
			prepare: byDefault, replicas: 3,
			want: state.DesiredPlugin{Known: true, Text: thrice, MatchText: true, AskedBy: "devicePlugin.defaultConfig of the settings, three"},
		},
		"a key that is not there": {
			label: config.LabelDevicePluginConfig, config: "four", refused: "label nvidia.com/device-plugin.config=four: ConfigMap /device-plugin-config has no such key; it has any; three",
		},
		"the settings' ConfigMap cannot be seen": {
			label: config.LabelDevicePluginConfig, config: "three", refused: "no answer",
			prepare: func(r *request) { r.seen.Plugin.Named.Err = &outcome.UnseenError{Err: errors.New("no answer")} },
		},
		"a file that does not answer": {
			label: config.LabelProfile, config: "shared", refused: "it hangs",
			prepare: func(r *request) {
				r.seen.Plugin.Current, r.seen.Plugin.ParseErr = nil, &outcome.UnseenError{Err: errors.New("it hangs")}
			},
		},
		"a key, by the config manager": {
			label: config.LabelDevicePluginConfig, config: "any", managed: true, replicas: 2,
			want: state.DesiredPlugin{Known: true, Text: "any", UserManaged: true, AskedBy: "label nvidia.com/device-plugin.config=any"},
		},
		"a profile that shares as the config manager's default": {
			label: config.LabelProfile, config: "shared", managed: true, replicas: 2,
			want: state.DesiredPlugin{Known: true, AskedBy: "label gpuslice.io/profile=shared"},
		},
		"the settings' default, which the config manager does not know": {
			prepare: byDefault, managed: true, replicas: 3,
			want: state.DesiredPlugin{
				Known: true, Text: config.OwnPluginKey + "uid-" + state.Hash(thrice), KeyContent: thrice, AskedBy: "devicePlugin.defaultConfig of the settings, three",
			},
		},
		"no way to give the plugin a config": {
			label: config.LabelProfile, config: "shared", refused: "label gpuslice.io/profile=shared: it mounts nothing",
			prepare: func(r *request) { r.seen.Plugin = state.PluginConfig{Read: true, NoMethod: "it mounts nothing"} },
		},
		"no plugin": {
			label: config.LabelProfile, config: "shared", refused: "deploy it; there is none; changes nothing until then",
			prepare: func(r *request) {
				r.seen.Plugin = state.PluginConfig{Read: true, NoMethod: "there is none"}
				r.seen.DevicePlugin.Pods, r.seen.DevicePlugin.Advice = nil, "deploy it"
			},
		},
	} {
		r := newRequest(t)
		if row.label != "" {
			r.label(row.label, row.config)
		}
		if r.reads(t, twice, keys); row.managed {
			r.managed(t, keys, keys)
		}
		if row.prepare != nil {
			row.prepare(r)
		}
		want, err := r.desired(t)
		switch {
		case row.refused != "":
			if err == nil || err.Error() != row.refused {
				t.Errorf("%s: the error is %v, want %s", name, err, row.refused)
			}
		case err != nil || want.Plugin == nil:
			t.Errorf("%s: the error is %v", name, err)
		default:
			got := *want.Plugin
			if n := got.Sharing.Replicas[nvml.ResourceGPU]; n != row.replicas {
				t.Errorf("%s: %d replicas, want %d", name, n, row.replicas)
			}
			if got.Sharing = (catalog.Sharing{}); !reflect.DeepEqual(got, row.want) {
				t.Errorf("%s: the plugin gets %+v, want %+v", name, got, row.want)
			}
		}
	}
}

// A node stays as it was verified while a file has a mistake elsewhere, and no change begins by such a file. What the process has read before counts where
// the file is no YAML at all.
func TestAFileThatCannotBeReadKeepsWhatWasProven(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		file       string
		remembered bool
		verified   string // before the fingerprint
		underway   *journal.Journal
		stays      bool
	}{
		"it was verified": {file: "no YAML", remembered: true, stays: true},
		"it was verified, and the process is a new one": {file: "no YAML"},
		"it was not verified":                           {file: "no YAML", remembered: true, verified: "another "},
		"a change is under way":                         {file: "no YAML", remembered: true, underway: &journal.Journal{Target: "mine"}},
		"the file can be read":                          {file: "as it was", remembered: true, stays: true},
	} {
		r := newRequest(t)
		r.setStrategy("mixed")
		r.label(config.LabelMIGConfig, "mine")
		r.seen.Files.Configs = &state.ConfigMapFile{Name: "ConfigMap gpuslice/configs", Data: []byte("good")}
		want, err := r.desired(t)
		if err != nil {
			t.Fatal(err)
		}
		if row.remembered {
			r.resolver.Remember(r.seen, want)
		}
		r.seen.Record.Learnt.Verified = row.verified + want.Fingerprint
		r.seen.Journal = row.underway
		r.seen.Files.Configs = &state.ConfigMapFile{Name: "ConfigMap gpuslice/configs", Data: []byte(row.file)}
		got, err := r.desired(t)
		if stays := err == nil && got.Fingerprint == want.Fingerprint; stays != row.stays {
			t.Errorf("%s: the node stays as it is: %t (%v)", name, stays, err)
		}
		if said := fmt.Sprint(got.Unread, err); strings.Contains(said, "line 1: is no YAML") != (row.file == "no YAML") {
			t.Errorf("%s: of the mistake it says %s", name, said)
		}
		r.resolver.Remember(r.seen, got)
		if again, second := r.desired(t); row.stays != (second == nil && again.Fingerprint == want.Fingerprint) {
			t.Errorf("%s: what was understood of a file with a mistake is remembered: %v", name, second)
		}
	}
}

// That the label of a running change is gone withdraws it. A preview asks what would be if a user set another label, which withdraws nothing.
func TestAChangeIsWithdrawnByItsLabelAndNotByAPreview(t *testing.T) {
	t.Parallel()
	r := newRequest(t)
	r.label(config.LabelMIGConfig, "all-disabled")
	r.reads(t, twice, nil)
	r.seen.Journal = &journal.Journal{Target: "all-1g.10gb" + api.DesiredSeparator + "any", Plugin: &journal.FormerPlugin{Label: config.LabelDevicePluginConfig}}
	if want, err := r.desired(t); err == nil || want.Targets != nil {
		t.Errorf("the change goes on to %v, error %v", want.Targets, err)
	}
	if want, err := r.resolver.Resolve(r.seen); err != nil || len(want.Targets) != 1 {
		t.Errorf("the preview is of %v, error %v", want.Targets, err)
	}
}
