package deviceplugin_test

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
)

// gpus is whole GPUs that so many pods share by time-slicing.
func gpus(replicas int) catalog.Sharing {
	return catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/gpu": replicas}}
}

var none = catalog.Sharing{Strategy: catalog.SharingNone}

func TestConfigsAreRead(t *testing.T) {
	for name, test := range map[string]struct {
		file string
		want catalog.PluginConfig
	}{
		"that are empty":                 {"", catalog.PluginConfig{Sharing: none}},
		"that have comments only":        {"# nothing\n", catalog.PluginConfig{Sharing: none}},
		"without a version":              {"flags: {migStrategy: none}", catalog.PluginConfig{Sharing: none, MIGStrategy: config.MIGStrategyNone}},
		"with a version of no text":      {`version: ""`, catalog.PluginConfig{Sharing: none}},
		"that share nothing":             {"version: v1\nsharing: {}\nflags:\nimex:\n", catalog.PluginConfig{Sharing: none}},
		"with sharing that has no value": {"version: v1\nsharing:\n", catalog.PluginConfig{Sharing: none}},
		"with flags that have no value":  {"flags: {migStrategy: , failOnInitError: null, plugin: {deviceListStrategy: }}", catalog.PluginConfig{Sharing: none}},
		"that share GPUs": {
			"version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}", catalog.PluginConfig{Sharing: gpus(4)},
		},
		"with a name that the plugin completes": {
			"version: v1\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}", catalog.PluginConfig{Sharing: gpus(2)},
		},
		"with what the plugin does anyway": {
			"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: nvidia.com/gpu.shared, devices: all, replicas: 2}]}}",
			catalog.PluginConfig{Sharing: catalog.Sharing{
				Strategy: catalog.SharingTimeSlicing, Rename: true, Replicas: map[string]int{"nvidia.com/gpu": 2},
			}},
		},
		"with slices of MIG devices": {
			`
version: v1
flags: {migStrategy: mixed}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - {name: nvidia.com/gpu, replicas: 2}
    - {name: nvidia.com/mig-1g.10gb, replicas: 10}
    - {name: mig-1g.24gb.me.all, replicas: 3}
    - {name: nvidia.com/mig-1g.24gb-me, replicas: 4}
`, catalog.PluginConfig{MIGStrategy: config.MIGStrategyMixed, Sharing: catalog.Sharing{
				Strategy: catalog.SharingTimeSlicing, Rename: true, FailMultiple: true, Replicas: map[string]int{
					"nvidia.com/gpu": 2, "nvidia.com/mig-1g.10gb": 10, "nvidia.com/mig-1g.24gb.me.all": 3, "nvidia.com/mig-1g.24gb-me": 4,
				},
			}},
		},
		"by MPS, under which a container gets one replica": {
			"version: v1\nflags: {mpsRoot: /run/nvidia/mps, migStrategy: none}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 48}]}}",
			catalog.PluginConfig{MIGStrategy: config.MIGStrategyNone, MPSRoot: "/run/nvidia/mps", Sharing: catalog.Sharing{
				Strategy: catalog.SharingMPS, FailMultiple: true, Replicas: map[string]int{"nvidia.com/gpu": 48},
			}},
		},
		"by MPS, unless it may have several (from v0.20.0 on)": {
			"sharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: nvidia.com/gpu, replicas: 2}]}}",
			catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingMPS, Replicas: map[string]int{"nvidia.com/gpu": 2}}},
		},
		"with every field that there is": {
			`
version: v1
flags:
  migStrategy: single
  failOnInitError: true
  mpsRoot: /run/mps
  nvidiaDriverRoot: /
  nvidiaDevRoot: /
  gdrcopyEnabled: false
  gdsEnabled: false
  mofedEnabled: false
  useNodeFeatureAPI: true
  deviceDiscoveryStrategy: auto
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-cri]
    deviceIDStrategy: uuid
    cdiAnnotationPrefix: cdi.k8s.io/
    nvidiaCTKPath: /usr/bin/nvidia-ctk
    containerDriverRoot: /driver-root
    sharedDevicesAllocationPolicy: packed
  gfd: {oneshot: false, noTimestamp: false, sleepInterval: infinite, outputFile: /a, machineTypeFile: /b}
imex: {channelIDs: [0], required: true}
`, catalog.PluginConfig{Sharing: none, MIGStrategy: config.MIGStrategySingle, MPSRoot: "/run/mps"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := deviceplugin.Parse([]byte(test.file))
			if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
				t.Errorf("error %v, config (-want +got):\n%s", err, diff)
			}
		})
	}
}

const (
	noResources = `must be a list of at least one entry with "name" and "replicas"`
	notResource = `is not a resource of NVIDIA's device plugin: use nvidia.com/gpu or, for a MIG profile, a name like nvidia.com/mig-1g.10gb`
)

// slices and mps are files with these resources.
func slices(resources string) string { return "sharing: {timeSlicing: {resources: " + resources + "}}" }
func mps(resources string) string    { return "sharing: {mps: {resources: " + resources + "}}" }

// refused are files with what is wrong about them.
var refused = map[string]struct {
	file string
	want []string
}{
	// The table of what the plugin refuses, and of what it passes over.
	"for replicas that are not there": {
		slices("[{name: nvidia.com/gpu}]"), []string{`sharing.timeSlicing.resources[0].replicas: "" must be a whole number from 2 to 60000`},
	},
	"for one replica": {
		slices("[{name: nvidia.com/gpu, replicas: 1}]"),
		[]string{`sharing.timeSlicing.resources[0].replicas: "1" shares nothing, and NVIDIA's device plugin refuses it: write 2 or more, or remove the entry, and sharing with its last entry`},
	},
	"for replicas that are none": {
		slices(`[{name: gpu, replicas: 0}, {name: mig-1g.5gb, replicas: "4"}, {name: mig-2g.10gb, replicas: 60001}, {name: mig-3g.20gb, replicas: 2.5}]`),
		[]string{
			`sharing.timeSlicing.resources[0].replicas: "0" must be a whole number from 2 to 60000`,
			`sharing.timeSlicing.resources[1].replicas: "4" is text: write 4 without quotes`,
			`sharing.timeSlicing.resources[2].replicas: "60001" must be a whole number from 2 to 60000: kubelet takes the ids of all replicas of a resource in one message of 4 MiB, with room for 60000`,
			`sharing.timeSlicing.resources[3].replicas: "2.5" must be a whole number from 2 to 60000`,
		},
	},
	"for a strategy without fields": {
		"sharing: {timeSlicing: {}}", []string{"sharing.timeSlicing.resources: " + noResources},
	},
	"for a strategy without a value":          {"sharing: {timeSlicing: }", []string{"sharing.timeSlicing.resources: " + noResources}},
	"for a strategy without resources":        {"sharing: {timeSlicing: {renameByDefault: true}}", []string{"sharing.timeSlicing.resources: " + noResources}},
	"for a strategy with an empty list":       {slices("[]"), []string{"sharing.timeSlicing.resources: " + noResources}},
	"for MPS without a value":                 {"sharing: {mps: }", []string{"sharing.mps.resources: " + noResources}},
	"for a mapping in place of the resources": {slices("{nvidia.com/gpu: 4}"), []string{"sharing.timeSlicing.resources: " + noResources}},
	"for names that are none": {
		slices("[{name: amd.com/gpu, replicas: 2}, {name: nvidia.com/gpus, replicas: 2}, {name: GPU, replicas: 2}, {replicas: 2}, {name: 5, replicas: 2}]"),
		[]string{
			`sharing.timeSlicing.resources[0].name: "amd.com/gpu" ` + notResource,
			`sharing.timeSlicing.resources[1].name: "nvidia.com/gpus" ` + notResource,
			`sharing.timeSlicing.resources[2].name: "GPU" ` + notResource,
			`sharing.timeSlicing.resources[3].name: "" must be the name of a resource, like nvidia.com/gpu`,
			`sharing.timeSlicing.resources[4].name: "5" must be the name of a resource, like nvidia.com/gpu`,
		},
	},
	"for the name under which it is offered": {
		slices("[{name: nvidia.com/gpu.shared, replicas: 2}]"), []string{`sharing.timeSlicing.resources[0].name: "nvidia.com/gpu.shared" ` + notResource},
	},
	"for a compute instance, which has no resource": {
		slices("[{name: nvidia.com/mig-1c.3g.20gb, replicas: 2}]"), []string{`sharing.timeSlicing.resources[0].name: "nvidia.com/mig-1c.3g.20gb" ` + notResource},
	},
	"for a plus in a name": {
		slices("[{name: nvidia.com/mig-1g.10gb+me, replicas: 2}]"),
		[]string{`sharing.timeSlicing.resources[0].name: "nvidia.com/mig-1g.10gb+me" cannot have a "+": write "nvidia.com/mig-1g.10gb.me"`},
	},
	"for a name that is too long": {
		slices("[{name: nvidia.com/mig-1g.10gb." + strings.Repeat("m", 42) + ", replicas: 2}]"),
		[]string{`sharing.timeSlicing.resources[0].name: "nvidia.com/mig-1g.10gb.` + strings.Repeat("m", 42) + `" is longer than the 63 characters of a resource's name`},
	},
	"for devices and names of one's own": {
		slices(`[{name: nvidia.com/gpu, replicas: 2, devices: [0, 1], rename: nvidia.com/fast}, {name: mig-1g.5gb, replicas: 2, devices: all, rename: mig-1g.5gb.shared}]`),
		[]string{
			`sharing.timeSlicing.resources[0].rename: "nvidia.com/fast" is ignored by NVIDIA's device plugin: renameByDefault names each shared resource <name>.shared`,
			`sharing.timeSlicing.resources[0].devices: "[0,1]" is ignored by NVIDIA's device plugin, which shares all devices of a resource: leave it out`,
			`sharing.timeSlicing.resources[1].rename: "mig-1g.5gb.shared" is ignored by NVIDIA's device plugin: renameByDefault names each shared resource <name>.shared`,
		},
	},
	"for a name that only renameByDefault gives": {
		slices("[{name: gpu, replicas: 2, rename: nvidia.com/gpu.shared}]"),
		[]string{`sharing.timeSlicing.resources[0].rename: "nvidia.com/gpu.shared" is ignored by NVIDIA's device plugin: renameByDefault names each shared resource <name>.shared`},
	},
	"for fields that do not exist, or in another case": {
		"flag: {}\nFlags: {}\nsharing: {time-slicing: {}, timeslicing: {}}\nflags: {MigStrategy: none, plugin: {deviceIdStrategy: uuid}, gfd: {x: 1}}\nimex: {ids: []}",
		[]string{
			"Flags: is unknown here: use flags, imex, resources, sharing, version",
			"flag: is unknown here: use flags, imex, resources, sharing, version",
			"flags.MigStrategy: is unknown here: use deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd," +
				" migStrategy, mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI",
			"flags.gfd.x: is unknown here: use machineTypeFile, noTimestamp, oneshot, outputFile, sleepInterval",
			"flags.plugin.deviceIdStrategy: is unknown here: use cdiAnnotationPrefix, containerDriverRoot, deviceIDStrategy," +
				" deviceListStrategy, nvidiaCTKPath, passDeviceSpecs, sharedDevicesAllocationPolicy",
			"imex.ids: is unknown here: use channelIDs, required",
			"sharing.time-slicing: is unknown here: use timeSlicing, mps",
			"sharing.timeslicing: is unknown here: use timeSlicing, mps",
		},
	},
	"for fields of a strategy and of a resource that do not exist": {
		"sharing: {timeSlicing: {renamebydefault: true, resources: [{resource: gpu, name: gpu, replicas: 2}]}}",
		[]string{
			"sharing.timeSlicing.renamebydefault: is unknown here: use renameByDefault, failRequestsGreaterThanOne, resources",
			"sharing.timeSlicing.resources[0].resource: is unknown here: use name, replicas",
		},
	},
	"for two strategies": {
		"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, replicas: 2}]}}",
		[]string{"sharing: has both timeSlicing and mps: keep one; NVIDIA's device plugin would silently use mps"},
	},
	"for a resource that is there twice": {
		slices("[{name: gpu, replicas: 2}, {name: nvidia.com/gpu, replicas: 4}]"),
		[]string{`sharing.timeSlicing.resources[1].name: "nvidia.com/gpu" is there twice`},
	},
	"for MPS with MIG": {
		"flags: {migStrategy: mixed}\n" + mps("[{name: gpu, replicas: 2}]"),
		[]string{`flags.migStrategy: "mixed" does not go with mps: the device plugin exits on both`},
	},
	"for MPS on MIG": {
		mps("[{name: mig-1g.10gb, replicas: 2}]"),
		[]string{`sharing.mps.resources[0].name: "nvidia.com/mig-1g.10gb" is a MIG device, and NVIDIA's device plugin has no MPS on MIG: share it by timeSlicing`},
	},
	"for MPS with more clients than there can be": {
		mps("[{name: gpu, replicas: 49}]"),
		[]string{`sharing.mps.resources[0].replicas: "49" is more than the 48 clients that an MPS control daemon serves`},
	},
	"for names of one's own": {
		"resources: {gpus: [{pattern: '*', name: gpu}]}",
		[]string{"resources: is ignored by the device plugin, which renames no resource: write what it shares below sharing.timeSlicing or sharing.mps"},
	},
	"of another version": {
		"version: v2", []string{`version: "v2" must be v1, the only version`},
	},
	"of a version that is no text": {
		"version: 1", []string{`version: 1 must be v1, the only version`},
	},
	"for flags that end the plugin": {
		"flags: {migStrategy: all, failOnInitError: 'true', mpsRoot: 1, deviceDiscoveryStrategy: vfio," +
			" plugin: {deviceIDStrategy: name, deviceListStrategy: [envvar, cdi]}, gfd: {sleepInterval: 1}}\nimex: {channelIDs: [1], required: 1}",
		[]string{
			`flags.deviceDiscoveryStrategy: "vfio" must be auto or nvml or tegra`,
			`flags.failOnInitError: "true" must be true or false, without quotes`,
			`flags.migStrategy: "all" must be none or single or mixed`,
			`flags.mpsRoot: 1 must be text`,
			`flags.plugin.deviceIDStrategy: "name" must be uuid or index`,
			`flags.plugin.deviceListStrategy[1]: "cdi" must be envvar or volume-mounts or cdi-annotations or cdi-cri`,
			`imex.channelIDs: [1] must be [] or [0]`,
			`imex.required: 1 must be true or false, without quotes`,
		},
	},
	"for durations that are none": {
		"flags: {gfd: {sleepInterval: soon}}", []string{`flags.gfd.sleepInterval: "soon" must be a duration with its unit, like "60s", or infinite`},
	},
	"for values of another form": {
		"flags: []\nsharing: none\nimex: x",
		[]string{
			"flags: [] must be a mapping of deviceDiscoveryStrategy, failOnInitError, gdrcopyEnabled, gdsEnabled, gfd, migStrategy," +
				" mofedEnabled, mpsRoot, nvidiaDevRoot, nvidiaDriverRoot, plugin, useNodeFeatureAPI",
			`imex: "x" must be a mapping of channelIDs, required`,
			"sharing: must be a mapping, not text",
		},
	},
	"for truths in quotes": {
		`sharing: {timeSlicing: {renameByDefault: "true", failRequestsGreaterThanOne: 1, resources: [{name: gpu, replicas: 2}]}}`,
		[]string{
			`sharing.timeSlicing.renameByDefault: "true" must be true or false, without quotes`,
			`sharing.timeSlicing.failRequestsGreaterThanOne: "1" must be true or false, without quotes`,
		},
	},
	"that are a list": {"- a", []string{`file: ["a"] must be a mapping of flags, imex, resources, sharing, version`}},
}

func TestConfigsAreRefused(t *testing.T) {
	for name, test := range refused {
		t.Run(name, func(t *testing.T) {
			got, err := deviceplugin.Parse([]byte(test.file))
			if err == nil {
				t.Fatalf("config %+v, want an error", got)
			}
			if diff := cmp.Diff(test.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if _, ok := errors.AsType[*check.InvalidError](err); !ok {
				t.Errorf("error %v carries no reason", err)
			}
		})
	}

	t.Run("for a field that is there twice", func(t *testing.T) {
		_, err := deviceplugin.Parse([]byte("version: v1\nversion: v1\n"))
		if err == nil || !strings.Contains(err.Error(), `key "version" already set in map`) {
			t.Errorf("error %v does not name the field", err)
		}
	})
}

func TestRenderKeepsTheRestOfTheFile(t *testing.T) {
	const base = `
version: v1
flags: {migStrategy: mixed, plugin: {deviceListStrategy: [envvar], aNewOne: 3}}
imex: {channelIDs: [0]}
health: {of: [a, newer, plugin]}
Sharing: {timeSlicing: {resources: [{name: gpu, replicas: 9}]}}
sharing: {mps: {resources: [{name: gpu, replicas: 7}]}}
`
	const rest = `flags:
  migStrategy: mixed
  plugin:
    aNewOne: 3
    deviceListStrategy:
    - envvar
health:
  of:
  - a
  - newer
  - plugin
imex:
  channelIDs:
  - 0
`
	for name, test := range map[string]struct {
		base    string
		sharing catalog.Sharing
		want    string
	}{
		"and takes sharing out": {base, none, rest + "version: v1\n"},
		"and changes sharing": {base, gpus(4), rest + `sharing:
  timeSlicing:
    failRequestsGreaterThanOne: false
    renameByDefault: false
    resources:
    - name: nvidia.com/gpu
      replicas: 4
version: v1
`},
		"of which there is none":                      {"", none, "version: v1\n"},
		"of which there are comments only":            {"# empty\n", none, "version: v1\n"},
		"which had no sharing before, and now has it": {"flags: {}", gpus(2), "flags: {}\nsharing:\n  timeSlicing:\n    failRequestsGreaterThanOne: false\n    renameByDefault: false\n    resources:\n    - name: nvidia.com/gpu\n      replicas: 2\nversion: v1\n"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := deviceplugin.Render([]byte(test.base), test.sharing, "")
			if diff := cmp.Diff(test.want, string(got)); err != nil || diff != "" {
				t.Errorf("error %v, file (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestRenderSetsTheMIGStrategyAndKeepsTheOtherFlags(t *testing.T) {
	for base, want := range map[string]string{
		"":                                 "flags:\n  migStrategy: single\nversion: v1\n",
		"flags: {migStrategy: mixed}":      "flags:\n  migStrategy: single\nversion: v1\n",
		"flags: ~":                         "flags:\n  migStrategy: single\nversion: v1\n",
		"flags: {gfd: {oneshot: true}}":    "flags:\n  gfd:\n    oneshot: true\n  migStrategy: single\nversion: v1\n",
		"Flags: {MigStrategy: none, a: b}": "flags:\n  a: b\n  migStrategy: single\nversion: v1\n",
		"version: v1\nflags: {a: b}\n#c\n": "flags:\n  a: b\n  migStrategy: single\nversion: v1\n",
	} {
		got, err := deviceplugin.Render([]byte(base), none, config.MIGStrategySingle)
		if diff := cmp.Diff(want, string(got)); err != nil || diff != "" {
			t.Errorf("%s: error %v, file (-want +got):\n%s", base, err, diff)
		}
	}
	if text, err := deviceplugin.Render([]byte("flags: [a]"), none, config.MIGStrategySingle); err == nil || !strings.Contains(err.Error(), "its flags is not a mapping") {
		t.Errorf("wrote %q, error %v", text, err)
	}
}

func TestRenderWritesNothingThatThePluginWouldRefuse(t *testing.T) {
	for name, test := range map[string]struct {
		base    string
		sharing catalog.Sharing
		want    string
	}{
		"a strategy that shares nothing": {"", catalog.Sharing{Strategy: catalog.SharingTimeSlicing}, "sharing.timeSlicing.resources: must be a list"},
		"one replica":                    {"", gpus(1), `"1" shares nothing`},
		"no strategy":                    {"", catalog.Sharing{}, "is unknown here"},
		"a base that is no mapping":      {"- a", gpus(2), "reading the device plugin config to change"},
		"a base of another version":      {"version: v2", gpus(2), "its version is v2"},
		"a name in the short form":       {"", catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"gpu": 2}}, "would be read back as"},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := deviceplugin.Render([]byte(test.base), test.sharing, "")
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("wrote %q, error %v, want one with %q", text, err, test.want)
			}
		})
	}
}

// anySharing is one of all that a file can say.
func anySharing(random *rand.Rand) catalog.Sharing {
	names := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.10gb.me", "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.24gb.me.all"}
	most := 1000
	s := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Rename: random.IntN(2) == 0, FailMultiple: random.IntN(2) == 0, Replicas: map[string]int{}}
	switch random.IntN(5) {
	case 0:
		return none
	case 1:
		s.Strategy, names, most = catalog.SharingMPS, names[:1], 48
	}
	random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names[:1+random.IntN(len(names))] {
		s.Replicas[name] = 2 + random.IntN(most-1)
	}
	return s
}

// bases are files to render into.
var bases = []string{
	"", "version: v1", `version: ""`, "flags: {failOnInitError: true, plugin: {deviceIDStrategy: uuid}}",
	"version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\nimex: {channelIDs: []}",
}

func TestWhatIsRenderedIsReadBack(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		want, base := anySharing(random), bases[random.IntN(len(bases))]
		text, err := deviceplugin.Render([]byte(base), want, "")
		if err != nil {
			t.Fatalf("%+v: %v", want, err)
		}
		got, err := deviceplugin.Parse(text)
		if diff := cmp.Diff(want, got.Sharing); err != nil || diff != "" {
			t.Fatalf("error %v, sharing (-want +got):\n%s\n%s", err, diff, text)
		}
		again, err := deviceplugin.Render(text, got.Sharing, "")
		if diff := cmp.Diff(string(text), string(again)); err != nil || diff != "" {
			t.Fatalf("error %v, what is right already was changed (-first +second):\n%s", err, diff)
		}
	}
}

// guides are the ConfigMaps of guides that users follow, and the sharing that those guides promise. All are word for word
// but the last one, which a guide only describes.
var guides = map[string]map[string]catalog.Sharing{
	"gpuaas-openshift-ai.yaml":  {"any": gpus(4)},      // "nvidia.com/gpu: 4 (indicating 4 virtual GPUs available)"
	"working-with-gpus.yaml":    {"tesla-t4": gpus(4)}, // "seen as 4 different cards"
	"gpu-sharing-strategy.yaml": {"config.yaml": gpus(3)},
	// "for example name: nvidia.com/mig-1g.5gb / replicas: 2 if you have a MIG configuration applied to a Node with a A100"
	"working-with-gpus-mig.yaml": {"a100-mig": {Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/mig-1g.5gb": 2}}},
}

func TestTheConfigMapsOfGuidesMeanWhatTheGuidesSay(t *testing.T) {
	for file, want := range guides {
		got := map[string]catalog.Sharing{}
		for key, text := range configMap(t, file) {
			read, err := deviceplugin.Parse([]byte(text))
			if err != nil {
				t.Errorf("%s, %s: %v", file, key, err)
			}
			got[key] = read.Sharing
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: sharing by key (-promised +read):\n%s", file, diff)
		}
	}
	files, err := filepath.Glob(filepath.Join("testdata", "*.yaml"))
	if err != nil || len(files) != len(guides) {
		t.Errorf("%d files in testdata, %d in the table (error %v)", len(files), len(guides), err)
	}
}

func configMap(t *testing.T, file string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatal(err)
	}
	if len(m.Data) == 0 {
		t.Fatalf("%s has no data", file)
	}
	return m.Data
}

func FuzzParse(f *testing.F) {
	for _, base := range bases {
		f.Add([]byte(base))
	}
	f.Add([]byte("sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2, devices: all}, {name: mig-1g.5gb, replicas: 3}]}}"))
	f.Add([]byte("version: v1\nflags: {gfd: {sleepInterval: 1.5}}\nsharing: {mps: null}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		read, err := deviceplugin.Parse(text)
		if err != nil {
			return
		}
		if n := len(read.Sharing.Replicas); (n == 0) != (read.Sharing.Strategy == catalog.SharingNone) {
			t.Fatalf("strategy %s with %d resources", read.Sharing.Strategy, n)
		}
		rendered, err := deviceplugin.Render(text, read.Sharing, "")
		if err != nil {
			t.Fatalf("rendering what was read: %v", err)
		}
		again, err := deviceplugin.Parse(rendered)
		if diff := cmp.Diff(read, again); err != nil || diff != "" {
			t.Fatalf("error %v, config (-read +rendered and read):\n%s\n%s", err, diff, rendered)
		}
	})
}

// The plugin runs by the rest of a config of which it passes over a part, and so does a node: it is read as the plugin reads it. Anything else is an error,
// and so is a field in another case, which the plugin obeys.
func TestWhatThePluginPassesOverLeavesTheRest(t *testing.T) {
	shared := func(n int) catalog.PluginConfig {
		return catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/gpu": n}}, MIGStrategy: config.MIGStrategyNone}
	}
	const flags = "flags: {migStrategy: none}\n"
	for name, row := range map[string]struct {
		file   string
		want   catalog.PluginConfig
		passed string // none if the file is refused
	}{
		"a field of another place": {
			"version: v1\nflags: {migStrategy: none, renameByDefault: true, failRequestsGreaterThanOne: false}\n" + slices("[{name: nvidia.com/gpu, replicas: 16384}]"), shared(16384),
			"flags.renameByDefault: is unknown here: it belongs below sharing.timeSlicing or sharing.mps",
		},
		"lost indentation": {
			"version: v1\nsharing:\nmps:\nresources:\n- name: nvidia.com/gpu\nreplicas: 2\n",
			catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingNone}},
			"mps: is unknown here: it belongs below sharing\nreplicas: is unknown here: it belongs below an entry of the resources of sharing.timeSlicing or sharing.mps",
		},
		"a name that nothing has":    {flags + slices("[{name: amd.com/gpu, replicas: 2}, {name: gpu, replicas: 4}]"), shared(4), `resources[0].name: "amd.com/gpu" is not a resource`},
		"names of one's own":         {flags + slices("[{name: gpu, replicas: 4, rename: nvidia.com/fast}]"), shared(4), `resources[0].rename: "nvidia.com/fast" is ignored`},
		"a field in another case":    {"Flags: {}\n" + slices("[{name: gpu, replicas: 4}]"), catalog.PluginConfig{}, ""},
		"replicas that are none":     {flags + slices("[{name: amd.com/gpu, replicas: 2}, {name: gpu, replicas: 1}]"), catalog.PluginConfig{}, ""},
		"a strategy that is none":    {"flags: {migStrategy: some, x: 1}", catalog.PluginConfig{}, ""},
		"more than kubelet can have": {flags + slices("[{name: gpu, replicas: 60001}]"), catalog.PluginConfig{}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := deviceplugin.Parse([]byte(row.file))
			if diff := cmp.Diff(row.want, got); err == nil || check.PassedOver(err) != (row.passed != "") || !strings.Contains(err.Error(), row.passed) || diff != "" {
				t.Errorf("it says %v, config (-want +got):\n%s", err, diff)
			}
		})
	}
}
