package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
)

const head = "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n"

// selectorsAsText compares label selectors by what they mean, not by how they are held.
var selectorsAsText = cmp.Transformer("text", func(s labels.Selector) string { return s.String() })

func TestSettings(t *testing.T) {
	t.Run("that say nothing are the defaults", func(t *testing.T) {
		got, err := config.Parse([]byte(head))
		if diff := cmp.Diff(config.Default(), got, selectorsAsText); err != nil || diff != "" {
			t.Errorf("error %v, settings (-want +got):\n%s", err, diff)
		}
	})

	t.Run("that say everything are what they say", func(t *testing.T) {
		got, err := config.Parse([]byte(head + `
nodeHeartbeat: 30s
migStrategy: single
migConfigMap: {namespace: gpu-operator, name: mine, key: mig.yaml}
devicePlugin:
  podSelector: ["app in (a, b)"]
profiles: {name: pools, key: pools.yaml}
reboot: {policy: delegate, sentinel: /run/host/reboot-required}
timeouts: {driverCall: 1m, apiCall: 5s, capacity: 10m, drain: 1h30m, reboot: 24h}
retry: {failures: 3, first: 1s, longest: 1m, noEffect: 5}
`))
		if err != nil {
			t.Fatal(err)
		}
		selector, err := labels.Parse("app in (a,b)")
		if err != nil {
			t.Fatal(err)
		}
		want := config.Settings{
			NodeHeartbeat: 30 * time.Second,
			MIGStrategy:   config.MIGStrategySingle,
			MIGConfigMap:  config.ConfigMapKey{Namespace: "gpu-operator", Name: "mine", Key: "mig.yaml"},
			Profiles:      config.ConfigMapKey{Name: "pools", Key: "pools.yaml"},
			Reboot:        config.Reboot{Policy: config.RebootDelegate, Sentinel: "/run/host/reboot-required"},
			DevicePlugin:  config.DevicePlugin{PodSelector: []labels.Selector{selector}},
			Timeouts: config.Timeouts{
				DriverCall: time.Minute, APICall: 5 * time.Second, Capacity: 10 * time.Minute, Drain: 90 * time.Minute,
				Reboot: 24 * time.Hour,
			},
			Retry: config.Retry{Failures: 3, First: time.Second, Longest: time.Minute, NoEffect: 5},
		}
		if diff := cmp.Diff(want, got, selectorsAsText); diff != "" {
			t.Errorf("settings (-want +got):\n%s", diff)
		}
	})

	t.Run("that say a part of a section keep the defaults of the rest", func(t *testing.T) {
		got, err := config.Parse([]byte(head + "timeouts: {drain: 10m}\nnodeHeartbeat:\n"))
		want := config.Default()
		want.Timeouts.Drain = 10 * time.Minute
		if diff := cmp.Diff(want, got, selectorsAsText); err != nil || diff != "" {
			t.Errorf("error %v, settings (-want +got):\n%s", err, diff)
		}
	})

	t.Run("without a ConfigMap's name want generated configs only", func(t *testing.T) {
		got, err := config.Parse([]byte(head + `migConfigMap: {name: ""}`))
		if err != nil || got.MIGConfigMap != (config.ConfigMapKey{}) {
			t.Errorf("error %v, ConfigMap %+v; want none", err, got.MIGConfigMap)
		}
	})

	t.Run("recognise the device plugin as its own manifests label it", func(t *testing.T) {
		for _, pod := range []labels.Set{
			{"app": "nvidia-device-plugin-daemonset"},
			{"app.kubernetes.io/name": "nvidia-device-plugin", "app.kubernetes.io/instance": "nvdp"},
			{"name": "nvidia-device-plugin-ds"},
		} {
			matching := 0
			for _, s := range config.Default().DevicePlugin.PodSelector {
				if s.Matches(pod) {
					matching++
				}
			}
			if matching != 1 {
				t.Errorf("%d selectors match %v, want 1", matching, pod)
			}
		}
	})
}

func TestSettingsAreRefused(t *testing.T) {
	tests := map[string]struct {
		file string
		want []string
	}{
		"when empty": {
			file: "",
			want: []string{`apiVersion: "" must be gpuslice.io/v1alpha1`, `kind: "" must be Settings`},
		},
		"when of another version": {
			file: "apiVersion: gpuslice.io/v1\nkind: Settings\n",
			want: []string{`apiVersion: "gpuslice.io/v1" must be gpuslice.io/v1alpha1`},
		},
		"for fields that do not exist, and for values beside them": {
			file: head + "nodeHeartBeat: 1m\ntimeouts: {drains: 1h, apiCall: 1h}\n",
			want: []string{`unknown field "nodeHeartBeat"`, `unknown field "timeouts.drains"`, `timeouts.apiCall: "1h" must be from 1s to 5m`},
		},
		"for a reboot that nobody knows how to do": {
			file: head + "reboot: {policy: always, sentinel: reboot-required}\n",
			want: []string{
				`reboot.policy: "always" must be never or delegate or self`,
				`reboot.sentinel: "reboot-required" must be the absolute path of a file, like "/var/run/reboot-required"`,
			},
		},
		"for a heartbeat that is too fast": {
			file: head + "nodeHeartbeat: 9s\n",
			want: []string{`nodeHeartbeat: "9s" must be from 10s to 24h`},
		},
		"for a duration without its unit": {
			file: head + "nodeHeartbeat: 30\n",
			want: []string{`nodeHeartbeat: "30" must be a duration with its unit, like "90s" or "1h30m"`},
		},
		"for a strategy that the device plugin does not have": {
			file: head + "migStrategy: both\n",
			want: []string{`migStrategy: "both" must be auto or none or single or mixed`},
		},
		"for a mapping in place of a list": {
			file: head + "devicePlugin: {podSelector: app=x}\n",
			want: []string{`devicePlugin.podSelector: must be a list, not a string`},
		},
		"for a value in place of a section": {
			file: head + "timeouts: 5m\n",
			want: []string{`timeouts: must be a mapping, not a string`},
		},
		"for no device plugin": {
			file: head + "devicePlugin: {podSelector: []}\n",
			want: []string{`devicePlugin.podSelector: [] must have at least one label selector`},
		},
		"for a device plugin that is every pod": {
			file: head + `devicePlugin: {podSelector: [app=x, ""]}`,
			want: []string{`devicePlugin.podSelector[1]: "" matches every pod: name the labels of the device plugin's`},
		},
		"for delays that do not grow": {
			file: head + "retry: {first: 1m, longest: 30s}\n",
			want: []string{`retry.longest: "30s" is less than retry.first, 1m0s`},
		},
		"for counts that are none": {
			file: head + "retry: {failures: 0, noEffect: many}\n",
			want: []string{
				`retry.failures: "0" must be a whole number from 1 to 1000`,
				`retry.noEffect: "many" must be a whole number from 1 to 1000`,
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(test.file))
			if err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff(test.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}

	for name, file := range map[string]string{
		"for a selector that is none":            head + "devicePlugin: {podSelector: [\"app==\\u0001\"]}\n",
		"for a ConfigMap that cannot exist":      head + "migConfigMap: {namespace: a.b, name: A, key: a/b}\n",
		"for a field that is there twice":        head + "nodeHeartbeat: 1m\nnodeHeartbeat: 2m\n",
		"for a field that is there in two cases": head + "NodeHeartbeat: 1m\n",
		"for text that is no YAML":               head + "a: [",
	} {
		t.Run(name, func(t *testing.T) {
			if s, err := config.Parse([]byte(file)); err == nil {
				t.Errorf("settings %+v, want an error", s)
			}
		})
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.yaml")
	if _, err := config.Load(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("error %v of an absent file does not name it", err)
	}
	if err := os.WriteFile(path, []byte(head+"nodeHeartbeat: 1s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "reading settings from " + path + `: nodeHeartbeat: "1s" must be from 10s to 24h`
	if _, err := config.Load(path); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
	if err := os.WriteFile(path, []byte(head+"nodeHeartbeat: 1m\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := config.Load(path); err != nil || s.NodeHeartbeat != time.Minute {
		t.Errorf("heartbeat %s, error %v; want 1m", s.NodeHeartbeat, err)
	}
}

func TestTheMIGStrategyIsTheNodesUnlessSettingsSayOtherwise(t *testing.T) {
	for _, test := range []struct {
		setting config.MIGStrategy
		label   string
		want    config.MIGStrategy
	}{
		{config.MIGStrategyAuto, "", config.MIGStrategyMixed},
		{config.MIGStrategyAuto, "single", config.MIGStrategySingle},
		{config.MIGStrategyAuto, "none", config.MIGStrategyNone},
		{config.MIGStrategyAuto, "auto", config.MIGStrategyMixed},
		{config.MIGStrategyAuto, "bogus", config.MIGStrategyMixed},
		{config.MIGStrategySingle, "mixed", config.MIGStrategySingle},
	} {
		if got := test.setting.On(test.label); got != test.want {
			t.Errorf("%s on a node labelled %q is %s, want %s", test.setting, test.label, got, test.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(head)
	f.Add(head + "nodeHeartbeat: 30s\nmigConfigMap: {name: \"\"}\ndevicePlugin: {podSelector: [app=x]}\n")
	f.Add(head + "timeouts: {drain: -1h}\nretry: {failures: 99999999999999999999}\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := config.Parse([]byte(text))
		if err != nil {
			return
		}
		if s.NodeHeartbeat < 10*time.Second || s.Timeouts.DriverCall <= 0 || s.Timeouts.APICall <= 0 || s.Timeouts.Capacity <= 0 ||
			s.Timeouts.Drain <= 0 || s.Retry.Failures < 1 || s.Retry.NoEffect < 1 || s.Retry.First <= 0 ||
			s.Retry.Longest < s.Retry.First || len(s.DevicePlugin.PodSelector) == 0 {
			t.Errorf("settings that were taken are out of bounds: %+v", s)
		}
	})
}
