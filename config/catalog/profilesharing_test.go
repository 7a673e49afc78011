package catalog_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

func timeSlicing(resource string, replicas int) *catalog.Sharing {
	return &catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{resource: replicas}}
}

func TestProfilesOfPools(t *testing.T) {
	none := &catalog.Sharing{Strategy: catalog.SharingNone}
	off := catalog.MIGConfig{{All: true}}
	for name, test := range map[string]struct {
		profile string
		want    catalog.Profile
	}{
		"may say how GPUs are shared and leave MIG as it is": {
			"{sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}}", catalog.Profile{Sharing: timeSlicing("nvidia.com/gpu", 3)},
		},
		"may want no sharing": {"{sharing: none}", catalog.Profile{Sharing: none}},
		"want none where each resource has one replica": {
			"{sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 1}, {name: mig-1g.10gb, replicas: 1}]}}}", catalog.Profile{Sharing: none},
		},
		"want one replica for none, also by MPS and beside MIG": {
			"{mig: [{gpus: {all: true}, enabled: true, instances: {}}], sharing: {mps: {resources: [{name: gpu, replicas: 1}]}}}",
			catalog.Profile{MIG: catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{}}}, Sharing: none},
		},
		"share what has more than one": {
			"{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}, {name: mig-1g.10gb.me, replicas: 2}]}}}",
			catalog.Profile{Sharing: timeSlicing("nvidia.com/mig-1g.10gb.me", 2)},
		},
		"share by MPS, with one replica for each container": {
			"{mig: [{gpus: {all: true}, enabled: false}], sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 48}]}}}",
			catalog.Profile{MIG: off, Sharing: &catalog.Sharing{Strategy: catalog.SharingMPS, FailMultiple: true, Replicas: map[string]int{"nvidia.com/gpu": 48}}},
		},
		"rename what they share": {
			"{sharing: {timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 2}]}}}",
			catalog.Profile{Sharing: &catalog.Sharing{
				Strategy: catalog.SharingTimeSlicing, Rename: true, FailMultiple: true, Replicas: map[string]int{"nvidia.com/gpu": 2},
			}},
		},
		"may be labels and taints alone": {
			`{labels: {workload-type: research, example.com/empty: ""}, taints: [{key: gpu, value: "true", effect: NoSchedule}, {key: gpu, effect: PreferNoSchedule}]}`,
			catalog.Profile{
				Labels: map[string]string{"workload-type": "research", "example.com/empty": ""},
				Taints: []corev1.Taint{{Key: "gpu", Value: "true", Effect: "NoSchedule"}, {Key: "gpu", Effect: "PreferNoSchedule"}},
			},
		},
		"may be under domains that only look like those of others": {
			"{labels: {my-nvidia.com/pool: a, kueue.x-k8s.io/flavor: b}}",
			catalog.Profile{Labels: map[string]string{"my-nvidia.com/pool": "a", "kueue.x-k8s.io/flavor": "b"}},
		},
		"are drained in ways of their own": {
			"{sharing: none, drain: {deadline: 2h, afterDeadline: delete, deleteGrace: 5m, unmanagedPods: refuse, emptyDir: refuse, onUncordon: refence," +
				" rules: [{namespaces: [training], action: wait, for: 8h}]}}",
			catalog.Profile{Sharing: none, Drain: &config.DrainOverrides{Deadline: 2 * time.Hour, Eviction: config.Eviction{
				AfterDeadline: config.AfterDeadlineDelete, DeleteGrace: 5 * time.Minute,
				UnmanagedPods: config.DrainRefuse, EmptyDir: config.DrainRefuse, OnUncordon: config.UncordonRefence,
				Rules: []config.DrainRule{{Namespaces: []string{"training"}, Selector: labels.Everything(), Action: config.DrainWait, For: 8 * time.Hour}},
			}}},
		},
		"have a MIG strategy": {
			"{mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], migStrategy: single}",
			catalog.Profile{MIG: catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}, MIGStrategy: config.MIGStrategySingle},
		},
		"ask for a MIG strategy alone": {
			"{migStrategy: none}", catalog.Profile{MIGStrategy: config.MIGStrategyNone},
		},
		"with parts that have no value are as without them": {
			"{sharing: none, labels: , taints: , drain: , mig: }", catalog.Profile{Sharing: none},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := catalog.ParseProfiles([]byte(profilesHead + "profiles:\n  mine: " + test.profile + "\n"))
			if diff := cmp.Diff(map[string]catalog.Profile{"mine": test.want}, got, selectorsAsText); err != nil || diff != "" {
				t.Errorf("error %v, profiles (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestProfilesOfPoolsAreRefused(t *testing.T) {
	const noResources = `must be a list of at least one entry with "name" and "replicas"`
	const notMine = "where a profile may not set keys: use one of your own"
	for name, test := range map[string]struct {
		profile string
		want    []string
	}{
		"that are drained for nothing": {
			"{drain: {deadline: 1h}}", []string{"requests nothing: it must have at least one of mig, sharing, migStrategy, labels and taints"},
		},
		"that put nothing on their nodes": {
			"{labels: {}, taints: []}", []string{"requests nothing: it must have at least one of mig, sharing, migStrategy, labels and taints"},
		},
		"that share by nothing": {
			"{sharing: {}}", []string{"sharing: must have timeSlicing or mps; for GPUs that are not shared write none"},
		},
		"that share by a word": {
			"{sharing: timeSlicing}", []string{`sharing: "timeSlicing" must be none, or a mapping with "timeSlicing" or "mps"`},
		},
		"that share by another case": {
			"{sharing: {timeslicing: {}}}", []string{"sharing.timeslicing: is unknown here: use timeSlicing, mps"},
		},
		"that share in both ways, with what is wrong about each": {
			"{sharing: {timeSlicing: {resources: []}, mps: {resources: [{name: gpu, replicas: 49}]}}}",
			[]string{
				"sharing: has both timeSlicing and mps: keep one; NVIDIA's device plugin would silently use mps",
				"sharing.timeSlicing.resources: " + noResources,
				`sharing.mps.resources[0].replicas: "49" is more than the 48 clients that an MPS control daemon serves`,
			},
		},
		"that share a resource twice": {
			"{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}, {name: nvidia.com/gpu, replicas: 2}]}}}",
			[]string{`sharing.timeSlicing.resources[1].name: "nvidia.com/gpu" is there twice`},
		},
		"that share MIG devices by MPS": {
			"{mig: [{gpus: {index: 0}, enabled: false}, {gpus: {index: 1}, enabled: true, instances: {}}], sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}}",
			[]string{`mig entry 2, enabled: "true" does not go with mps: NVIDIA's device plugin has no MPS on MIG; share by timeSlicing`},
		},
		"with devices and names of their own": {
			"{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: all, rename: gpu.shared}]}}}",
			[]string{
				`sharing.timeSlicing.resources[0].rename: "gpu.shared" is ignored by NVIDIA's device plugin: renameByDefault names each shared resource <name>.shared`,
				`sharing.timeSlicing.resources[0].devices: "all" is ignored by NVIDIA's device plugin, which shares all devices of a resource: leave it out`,
			},
		},
		"with replicas that are none": {
			"{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 0}, {name: mig-1g.10gb+me, replicas: two}, gpu]}}}",
			[]string{
				`sharing.timeSlicing.resources[0].replicas: "0" must be a whole number from 1 to 60000`,
				`sharing.timeSlicing.resources[1].name: "mig-1g.10gb+me" cannot have a "+": write "mig-1g.10gb.me"`,
				`sharing.timeSlicing.resources[1].replicas: "two" must be a whole number from 1 to 60000`,
				`sharing.timeSlicing.resources[2]: must be a mapping, not text`,
			},
		},
		"with labels that are not theirs to set": {
			"{labels: {nvidia.com/gpu.present: 'true', gpuslice.io/profile: a, node-role.kubernetes.io/gpu: '', feature.node.kubernetes.io/a: b, k8s.io/a: b}}",
			[]string{
				`labels: "feature.node.kubernetes.io/a" is under kubernetes.io, ` + notMine,
				`labels: "gpuslice.io/profile" is under gpuslice.io, ` + notMine,
				`labels: "k8s.io/a" is under k8s.io, ` + notMine,
				`labels: "node-role.kubernetes.io/gpu" is under kubernetes.io, ` + notMine,
				`labels: "nvidia.com/gpu.present" is under nvidia.com, ` + notMine,
			},
		},
		"with keys by which the policy would take a user's for theirs": {
			"{labels: {labels: a, team: b}, taints: [{key: effect, effect: NoSchedule}]}",
			[]string{
				`labels: "labels" is a name in gpuslice.io/published, by which the admission policy recognizes the agent's keys: use another one`,
				`taints[0].key: "effect" is a name in gpuslice.io/published, by which the admission policy recognizes the agent's keys: use another one`,
			},
		},
		"with labels that cannot be": {
			"{labels: {-a: b, c: true, d: e f}}",
			[]string{
				`labels: "-a" name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')`,
				`labels.c: "true" must be text: put it in quotes, as YAML reads y, yes, on and 1 as other than text`,
				`labels.d: "e f" a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')`,
			},
		},
		"with more labels and taints than can be recorded": {
			"{labels: {" + numbered(101, "l%d: a", ", ") + "}, taints: [" + numbered(101, "{key: t%d, effect: NoSchedule}", ", ") + "]}",
			[]string{"labels: has 101 entries: at most 100 are allowed", "taints: has 101 entries: at most 100 are allowed"},
		},
		"with labels that are a list": {
			"{labels: [a], taints: {gpu: true}}",
			[]string{"labels: must be a mapping, not a list", `taints: must be a list of entries with "key", "value" and "effect"`},
		},
		"with taints that cannot be": {
			"{taints: [{key: gpu, value: true, effect: NoSchedule}, {key: gpu, effect: NoExecute}, {value: a, effect: Always}, {key: gpu, effect: NoSchedule}," +
				" {key: nvidia.com/gpu, effect: NoSchedule}, {name: a}]}",
			[]string{
				`taints[0].value: "true" must be text: put it in quotes, as YAML reads y, yes, on and 1 as other than text`,
				`taints[1].effect: "NoExecute" deletes pods whatever their disruption budget says: write NoSchedule`,
				`taints[2].key: "" name part must be non-empty`,
				`taints[2].key: "" name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')`,
				`taints[2].effect: "Always" must be NoSchedule or PreferNoSchedule`,
				`taints[3]: "gpu:NoSchedule" is there twice`,
				`taints[4].key: "nvidia.com/gpu" is under nvidia.com, ` + notMine,
				`taints[5].name: is unknown here: use key, value, effect`,
				`taints[5].key: "" name part must be non-empty`,
				`taints[5].key: "" name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')`,
				`taints[5].effect: "" must be NoSchedule or PreferNoSchedule`,
			},
		},
		"that are drained in ways that are none": {
			"{sharing: none, drain: {deadline: 10s, afterDeadline: force, deleteGrace: 0s, unmanagedPods: wait, emptyDir: wait, onUncordon: undo, clients: [], rules: [{action: wait}]}}",
			[]string{
				"drain.clients: is unknown here: use deadline, mode, gradualFor, afterDeadline, deleteGrace, unmanagedPods, emptyDir, onUncordon, rules",
				`drain.deadline: "10s" must be from 1m to 168h`,
				`drain.afterDeadline: "force" must be undo or delete`,
				`drain.deleteGrace: "0s" must be from 1s to 1h`,
				`drain.unmanagedPods: "wait" must be evict or refuse`,
				`drain.emptyDir: "wait" must be evict or refuse`,
				`drain.onUncordon: "undo" must be cancel or refence`,
				`drain.rules[0]: fits every pod: write "namespaces", "selector" or both`,
				`drain.rules[0].for: must say how long to wait, like "8h"`,
			},
		},
		"with a MIG strategy that is none": {
			"{migStrategy: auto}", []string{`migStrategy: "auto" must be none or single or mixed`},
		},
		"with a MIG strategy that nothing they cut is offered under": {
			"{mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}], migStrategy: none}",
			[]string{`migStrategy: "none" does not go with mig entry 1: GPUs in MIG mode would be advertised as whole ones that nothing can run on; write single or mixed, or leave it out`},
		},
		"with two sizes under single": {
			"{mig: [{gpus: {index: 0}, enabled: false}, {gpus: {index: 1}, enabled: true, instances: {1g.10gb: 2, 3g.40gb: 1}}], migStrategy: single}",
			[]string{`migStrategy: "single" does not go with mig entry 2: NVIDIA's device plugin exits on instances of several sizes; write mixed, or leave it out`},
		},
		"with MPS under mixed": {
			"{sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}, migStrategy: mixed}",
			[]string{`migStrategy: "mixed" does not go with mps: NVIDIA's device plugin exits on both; write none, or leave it out`},
		},
		"that are drained by a rule of another form": {
			"{sharing: none, drain: {rules: {action: wait}}}", []string{"drain.rules: must be a list, not a mapping"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := catalog.ParseProfiles([]byte(profilesHead + "profiles:\n  mine: " + test.profile + "\n"))
			if err == nil {
				t.Fatal("no error")
			}
			var want []string
			for _, line := range test.want {
				separator := ", "
				if strings.HasPrefix(line, "requests") {
					separator = ": "
				}
				want = append(want, `profile "mine"`+separator+line)
			}
			if diff := cmp.Diff(want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAProfileWithoutMIGLeavesEveryGPUAsItIs(t *testing.T) {
	shared := catalog.Profile{Sharing: timeSlicing("nvidia.com/gpu", 3)}
	configs := catalog.Merge(nil, nil).WithProfiles(map[string]catalog.Profile{"research": shared})
	requests, err := configs.ProfileRequests("research", node(h100()))
	if err != nil || len(requests) > 0 {
		t.Errorf("requests %v, error %v; want neither", requests, err)
	}
	got, ok := configs.Profile("research")
	if diff := cmp.Diff(shared, got); !ok || diff != "" {
		t.Errorf("found %t, profile (-want +got):\n%s", ok, diff)
	}
	if _, ok := configs.Profile("all-disabled"); ok {
		t.Error("a MIG config was found among the profiles")
	}
}

func TestDrainOverridesTakeThePlaceOfSettings(t *testing.T) {
	jobs := config.DrainRule{Selector: parsed(t, "job"), Action: config.DrainRefuse}
	mine := config.DrainRule{Namespaces: []string{"training"}, Selector: labels.Everything(), Action: config.DrainEvict}
	settings := config.Default()
	settings.Drain.Rules = []config.DrainRule{jobs}

	if diff := cmp.Diff(settings, settings.With(nil), selectorsAsText); diff != "" {
		t.Errorf("settings without overrides (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(settings, settings.With(&config.DrainOverrides{}), selectorsAsText); diff != "" {
		t.Errorf("settings with overrides that say nothing (-want +got):\n%s", diff)
	}
	got := settings.With(&config.DrainOverrides{Deadline: 2 * time.Hour, Eviction: config.Eviction{
		Mode: config.DrainGradual, GradualFor: time.Hour, AfterDeadline: config.AfterDeadlineDelete, DeleteGrace: time.Minute,
		UnmanagedPods: config.DrainRefuse, EmptyDir: config.DrainRefuse, OnUncordon: config.UncordonRefence, Rules: []config.DrainRule{mine},
	}})
	want := config.Default()
	want.Timeouts.Drain = 2 * time.Hour
	want.Drain = config.Drain{Fence: config.DrainFenceNode, Eviction: config.Eviction{
		Mode: config.DrainGradual, GradualFor: time.Hour,
		AfterDeadline: config.AfterDeadlineDelete, DeleteGrace: time.Minute, UnmanagedPods: config.DrainRefuse, EmptyDir: config.DrainRefuse,
		OnUncordon: config.UncordonRefence, Rules: []config.DrainRule{mine, jobs},
	}}
	if diff := cmp.Diff(want, got, selectorsAsText); diff != "" {
		t.Errorf("settings with overrides (-want +got):\n%s", diff)
	}
	if len(settings.Drain.Rules) != 1 {
		t.Errorf("the settings themselves have now %d rules", len(settings.Drain.Rules))
	}
}

func TestWhatIsOffered(t *testing.T) {
	s := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/gpu": 3}}
	for _, test := range []struct {
		rename   bool
		resource string
		name     string
		replicas int
	}{
		{false, "nvidia.com/gpu", "nvidia.com/gpu", 3},
		{true, "nvidia.com/gpu", "nvidia.com/gpu.shared", 3},
		{true, "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb", 1},
	} {
		s.Rename = test.rename
		if name, n := s.Offered(test.resource); name != test.name || n != test.replicas {
			t.Errorf("%s with renaming %t is offered as %s, %d times; want %s, %d times", test.resource, test.rename, name, n, test.name, test.replicas)
		}
	}
}

// numbered writes a text so many times, each with its number.
func numbered(n int, text, between string) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf(text, i))
	}
	return strings.Join(all, between)
}

// Whoever may write annotations writes anything there.
func TestAnAllowanceIsForTheChangeThatItNames(t *testing.T) {
	t.Parallel()
	mig := map[string]string{config.LabelMIGConfig: "all-balanced", config.LabelDevicePluginConfig: "shared"}
	profile := map[string]string{config.LabelProfile: "research"}
	both := config.DrainOverrides{Eviction: config.Eviction{UnmanagedPods: config.DrainEvict, EmptyDir: config.DrainEvict}}
	for name, c := range map[string]struct {
		text string
		asks map[string]string
		want *config.DrainOverrides
	}{
		"both":                           {config.Allowance(config.LabelMIGConfig, "all-balanced", config.FieldUnmanagedPods, config.FieldEmptyDir), mig, &both},
		"one":                            {"nvidia.com/mig.config=all-balanced emptyDir", mig, &config.DrainOverrides{Eviction: config.Eviction{EmptyDir: config.DrainEvict}}},
		"asked by the second label":      {"nvidia.com/device-plugin.config=shared unmanagedPods emptyDir", mig, &both},
		"a label that another overrides": {"nvidia.com/mig.config=all-balanced emptyDir", profile, nil},
		"for a change before":            {"nvidia.com/mig.config=all-disabled emptyDir", mig, nil},
		"for a label that is not there":  {"gpuslice.io/profile=all-balanced emptyDir", profile, nil},
		"for no name":                    {"gpuslice.io/profile= emptyDir", profile, nil},
		"for any change":                 {"now", mig, nil},
		"nothing":                        {"nvidia.com/mig.config=all-balanced", mig, nil},
		"empty":                          {"", mig, nil},
		"a field that there is not":      {"nvidia.com/mig.config=all-balanced emptyDir rules", mig, nil},
		"too long":                       {"nvidia.com/mig.config=all-balanced" + strings.Repeat(" emptyDir", 30), mig, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var none *config.DrainOverrides
			if diff := cmp.Diff(c.want, none.Allowing(c.text, c.asks)); diff != "" {
				t.Errorf("overrides (-want +got):\n%s", diff)
			}
			refuses := config.DrainOverrides{Eviction: config.Eviction{EmptyDir: config.DrainRefuse}, Deadline: time.Hour}
			got := refuses.Allowing(c.text, c.asks)
			if refuses.EmptyDir != config.DrainRefuse || got.Deadline != time.Hour || (got.EmptyDir == config.DrainEvict) != (c.want != nil) {
				t.Errorf("a profile that refuses is %+v, with it %+v", refuses, *got)
			}
		})
	}
}
