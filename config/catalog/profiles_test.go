package catalog_test

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/nvml"
)

const profilesHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\n"

func TestProfilesInEveryForm(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "profiles.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := catalog.ParseProfiles(text)
	want := map[string]catalog.Profile{
		"production-inference": {
			Description: "Two sizes of instance on the GPUs that serve.",
			MIG: catalog.MIGConfig{
				{
					UUIDs: []nvml.UUID{"GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76", "GPU-00000000-1111-2222-3333-444444444444"},
					MIG:   true, Devices: map[string]int{"3g.40gb": 1, "2g.20gb": 2},
				},
				{PCI: []string{"0000:af:00.0", "0000:17:00.0", "10000:01:1f.7"}},
			},
		},
		"by-position": {MIG: catalog.MIGConfig{
			{
				Indices: []int{0}, MIG: true,
				Devices: map[string]int{"1g.10gb": 4, "1g.10gb+me": 1, "1g.24gb-me": 1, "4g.96gb+gfx": 1},
			},
			{
				Indices: []int{1, 2}, Models: []string{"NVIDIA H100*"}, DeviceFilter: []string{"0x233010DE", "0x20B210DE"},
				MIG: true, Devices: map[string]int{"1c.3g.40gb": 3, "3g.40gb": 2},
			},
		}},
		"by-model": {MIG: catalog.MIGConfig{
			{All: true, Models: []string{"NVIDIA A100*", "NVIDIA H?00 80GB HBM3"}, MIG: true, Devices: map[string]int{}},
			{All: true, DeviceFilter: []string{"0x1EB810DE"}},
		}},
		"whole": {MIG: catalog.MIGConfig{{All: true}}},
		"shared": {
			Sharing: &catalog.Sharing{
				Strategy: catalog.SharingTimeSlicing, Rename: true, Replicas: map[string]int{"nvidia.com/gpu": 4, "nvidia.com/mig-1g.10gb.me": 2},
			},
			Labels: map[string]string{"workload-type": "research", "example.com/empty": ""},
			Taints: []corev1.Taint{{Key: "gpu", Value: "true", Effect: "NoSchedule"}, {Key: "example.com/gpu", Effect: "PreferNoSchedule"}},
			Drain: &config.DrainOverrides{Deadline: 2 * time.Hour, Eviction: config.Eviction{
				Mode: config.DrainGradual, GradualFor: 24 * time.Hour, AfterDeadline: config.AfterDeadlineDelete, DeleteGrace: 5 * time.Minute,
				UnmanagedPods: config.DrainRefuse, EmptyDir: config.DrainEvict, OnUncordon: config.UncordonRefence,
				Rules: []config.DrainRule{
					{Namespaces: []string{"training"}, Selector: parsed(t, "app in (a,b)"), Action: config.DrainWait, For: 8 * time.Hour},
					{Selector: parsed(t, "app"), Action: config.DrainRefuse},
				},
			}},
		},
		"by-mps": {
			Sharing: &catalog.Sharing{Strategy: catalog.SharingMPS, FailMultiple: true, Replicas: map[string]int{"nvidia.com/gpu": 48}},
			Drain:   &config.DrainOverrides{},
		},
		"not-shared": {
			Sharing: &catalog.Sharing{Strategy: catalog.SharingNone},
			Windows: []window.Window{
				{Days: []time.Weekday{time.Friday, time.Saturday}, Start: 22*time.Hour + 30*time.Minute, Duration: 6 * time.Hour, Zone: located(t, "Europe/Berlin")},
				{Zone: time.UTC, NotBefore: at(t, "2026-12-01T20:00:00Z"), NotAfter: at(t, "2026-12-02T04:00:00Z")},
			},
		},
	}
	if diff := cmp.Diff(want, got, asText); err != nil || diff != "" {
		t.Errorf("error %v, profiles (-want +got):\n%s", err, diff)
	}
}

// The examples of the pages, which users copy, must work.
func TestProfilesThatWeShowAreRead(t *testing.T) {
	for _, show := range []struct{ file, from, to string }{
		{filepath.Join("..", "README.md"), "metadata: {name: gpuslice-profiles,", "```"},
		{filepath.Join("..", "..", "deploy", "examples", "configmap-profiles.yaml"), "metadata:", ""},
	} {
		text, err := os.ReadFile(show.file)
		if err != nil {
			t.Fatal(err)
		}
		_, manifest, found := strings.Cut(string(text), show.from)
		if show.to != "" {
			manifest, _, _ = strings.Cut(manifest, show.to)
		}
		var m struct{ Data map[string]string }
		if err := yaml.Unmarshal([]byte(show.from+manifest), &m); err != nil || !found {
			t.Fatalf("%s has no ConfigMap of profiles: %v", show.file, err)
		}
		profiles, err := catalog.ParseProfiles([]byte(m.Data["profiles.yaml"]))
		if err != nil {
			t.Fatalf("%s: %v", show.file, err)
		}
		merged := catalog.Merge(nil, nil).WithProfiles(profiles)
		requests, err := merged.ProfileRequests("production-inference", node(h100(), a100()))
		want := nvml.Request{MIG: true, Devices: map[string]int{"3g.40gb": 1, "2g.20gb": 2}}
		if diff := cmp.Diff(map[nvml.UUID]nvml.Request{"GPU-0": want, "GPU-1": want}, requests); err != nil || diff != "" {
			t.Errorf("%s: error %v, requests (-want +got):\n%s", show.file, err, diff)
		}
	}
}

func TestProfilesMayBeNone(t *testing.T) {
	for _, text := range []string{profilesHead, profilesHead + "profiles: {}", profilesHead + "profiles:"} {
		got, err := catalog.ParseProfiles([]byte(text))
		if err != nil || len(got) > 0 {
			t.Errorf("%s: profiles %v, error %v", text, got, err)
		}
	}
}

func TestProfilesAreRefused(t *testing.T) {
	entry := func(entry string) string {
		return profilesHead + "profiles:\n  mine:\n    mig:\n      - " + entry + "\n"
	}
	tests := map[string]struct {
		file string
		want []string
	}{
		"in an empty file": {
			file: "# nothing\n",
			want: []string{`reading profiles: the file is empty, and needs at least "apiVersion: gpuslice.io/v1alpha1", "kind: Profiles" and "profiles"`},
		},
		"in a list": {
			file: "- profiles",
			want: []string{"file: must be a mapping, not a list"},
		},
		"in a file of MIG configs": {
			file: "version: v1\nmig-configs: {}",
			want: []string{
				"mig-configs: is unknown here: use apiVersion, kind, profiles",
				"version: is unknown here: use apiVersion, kind, profiles",
				`apiVersion: "" must be gpuslice.io/v1alpha1`,
				`kind: "" must be Profiles`,
			},
		},
		"of another version": {
			file: "apiVersion: gpuslice.io/v9\nkind: Settings\nprofiles: {}",
			want: []string{`apiVersion: "gpuslice.io/v9" must be gpuslice.io/v1alpha1`, `kind: "Settings" must be Profiles`},
		},
		"in a list of profiles": {
			file: profilesHead + "profiles: [{name: mine}]",
			want: []string{"profiles: must be a mapping, not a list"},
		},
		"under names that no label can hold": {
			file: profilesHead + `profiles: {"": {mig: [{gpus: {all: true}, enabled: false}]}, 1g.10gb+me: {mig: [{gpus: {all: true}, enabled: false}]}}`,
			want: []string{
				`profiles: "" cannot be the value of a label, so no node could request it: write letters, digits, '-', '_' and '.', at most 63,` +
					` beginning and ending with a letter or digit`,
				`profiles: "1g.10gb+me" cannot be the value of a label, so no node could request it: write letters, digits, '-', '_' and '.', at most 63,` +
					` beginning and ending with a letter or digit`,
			},
		},
		"under names that YAML reads as something else": {
			file: profilesHead + `profiles: {off: {mig: [{gpus: {all: true}, enabled: false}]}}`,
			want: []string{"reading profiles as YAML: line 3: the key off is read as false: put it in quotes"},
		},
		"that say nothing": {
			file: profilesHead + "profiles: {mine: }",
			want: []string{`profile "mine": requests nothing: it must have at least one of mig, sharing, migStrategy, labels and taints`},
		},
		"that are no mapping": {
			file: profilesHead + "profiles: {mine: [], yours: all}",
			want: []string{`profile "mine": must be a mapping, not a list`, `profile "yours": must be a mapping, not text`},
		},
		"with fields that do not exist": {
			file: profilesHead + "profiles: {mine: {text: x, mig: [{gpu: {all: true}, gpus: {All: true}, enabled: false}]}}",
			want: []string{
				`profile "mine", text: is unknown here: use description, mig, sharing, migStrategy, labels, taints, drain, windows`,
				`profile "mine", mig entry 1, gpu: is unknown here: use gpus, enabled, instances`,
				`profile "mine", mig entry 1, gpus.All: is unknown here: use all, uuid, pci, index, model, deviceFilter`,
				`profile "mine", mig entry 1, gpus: selects no GPU: write all: true, or at least one of uuid, pci, index, model and deviceFilter`,
			},
		},
		"with a description that is no text, and no entries": {
			file: profilesHead + "profiles: {mine: {description: [a], mig: []}}",
			want: []string{
				`profile "mine", description: "[\"a\"]" must be text`,
				`profile "mine", mig: must be a list of at least one entry with "gpus" and "enabled"`,
			},
		},
		"with entries of the wrong form, all at once": {
			file: profilesHead + "profiles: {mine: {mig: [all, null, {gpus: all, enabled: true, instances: [1g.10gb]}]}}",
			want: []string{
				`profile "mine", mig entry 1: must be a mapping, not text`,
				`profile "mine", mig entry 2, enabled: "" must be true or false`,
				`profile "mine", mig entry 2, gpus: is missing: write all: true, or at least one of uuid, pci, index, model and deviceFilter`,
				`profile "mine", mig entry 3, gpus: must be a mapping, not text`,
				`profile "mine", mig entry 3, instances: must be a mapping, not a list`,
			},
		},
		"with UUIDs that are not whole": {
			file: entry("{gpus: {uuid: [GPU-8dcd427f, MIG-8dcd427f-483b-b48f-d7e5-75fb19a52b76, 8dcd427f-483b-b48f-d7e5-75fb19a52b76]}, enabled: false}"),
			want: []string{
				`profile "mine", mig entry 1, gpus.uuid[0]: "GPU-8dcd427f" must be the whole UUID of a GPU, as nvidia-smi -L prints it:` +
					` "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76"`,
				`profile "mine", mig entry 1, gpus.uuid[1]: "MIG-8dcd427f-483b-b48f-d7e5-75fb19a52b76" is a MIG device, which changes may delete:` +
					` write its GPU's UUID`,
				`profile "mine", mig entry 1, gpus.uuid[2]: "8dcd427f-483b-b48f-d7e5-75fb19a52b76" must be the whole UUID of a GPU,` +
					` as nvidia-smi -L prints it: "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76"`,
			},
		},
		"with addresses that are none": {
			file: entry(`{gpus: {pci: ["17:00", "000:17:00.0", "0000:17:20.0", "0000:17:00.8"]}, enabled: false}`),
			want: []string{
				`profile "mine", mig entry 1, gpus.pci[0]: "17:00" must be a PCI address: "0000:17:00.0", "00000000:17:00.0" or "17:00.0"`,
				`profile "mine", mig entry 1, gpus.pci[1]: "000:17:00.0" must be a PCI address: "0000:17:00.0", "00000000:17:00.0" or "17:00.0"`,
				`profile "mine", mig entry 1, gpus.pci[2]: "0000:17:20.0" must be a PCI address: "0000:17:00.0", "00000000:17:00.0" or "17:00.0"`,
				`profile "mine", mig entry 1, gpus.pci[3]: "0000:17:00.8" must be a PCI address: "0000:17:00.0", "00000000:17:00.0" or "17:00.0"`,
			},
		},
		"with values that are there twice, in whatever form": {
			file: entry(`{gpus: {pci: ["17:00.0", "00000000:17:00.0"], index: [0, 1, 0]}, enabled: false}`),
			want: []string{
				`profile "mine", mig entry 1, gpus.pci[1]: "00000000:17:00.0" is there twice`,
				`profile "mine", mig entry 1, gpus.index[2]: "0" is there twice`,
			},
		},
		"with positions, patterns and ids that are none": {
			file: entry(`{gpus: {index: [-1, 1.5], model: ["A[", ""], deviceFilter: H100}, enabled: false}`),
			want: []string{
				`profile "mine", mig entry 1, gpus.index[0]: "-1" must be a position in PCI order, a whole number from 0 to 1000`,
				`profile "mine", mig entry 1, gpus.index[1]: "1.5" must be a position in PCI order, a whole number from 0 to 1000`,
				`profile "mine", mig entry 1, gpus.model[0]: "A[" must be a model as nvidia-smi -L prints it; * stands for anything: "NVIDIA A100*"`,
				`profile "mine", mig entry 1, gpus.model[1]: "" must be a model as nvidia-smi -L prints it; * stands for anything: "NVIDIA A100*"`,
				`profile "mine", mig entry 1, gpus.deviceFilter: "H100" is not of the form "0x233010DE", the PCI device id followed by the vendor id, or "0x233010DE:0x16C110DE" with those of the subsystem`,
			},
		},
		"with empty selectors": {
			file: entry(`{gpus: {uuid: []}, enabled: false}`),
			want: []string{`profile "mine", mig entry 1, gpus.uuid: [] selects no GPU: give at least one, or leave it out`},
		},
		"for all GPUs and then not": {
			file: entry(`{gpus: {all: true, model: "NVIDIA A100*"}, enabled: false}`),
			want: []string{`profile "mine", mig entry 1, gpus.all: "true" must stand alone: leave it out where others select`},
		},
		"for not all GPUs": {
			file: entry(`{gpus: {all: false}, enabled: false}`),
			want: []string{`profile "mine", mig entry 1, gpus.all: "false" must be true, or left out`},
		},
		"for instances with MIG off, and MIG on without saying which": {
			file: entry("{gpus: {all: true}, enabled: false, instances: {}}") + "      - {gpus: {all: true}, enabled: true}",
			want: []string{
				`profile "mine", mig entry 1, instances: needs enabled: true`,
				`profile "mine", mig entry 2, instances: is missing: for MIG mode without instances write {}`,
			},
		},
		"for instances beside their field": {
			file: entry("{gpus: {all: true}, enabled: true, instances: , 1g.10gb: 7}"),
			want: []string{`profile "mine", mig entry 1, 1g.10gb: is a MIG device: it belongs below instances`},
		},
		"for instances that cannot be": {
			file: entry("{gpus: {all: true}, enabled: true, instances: {1g10gb: 1, 4c.3g.40gb: 1, 1g.10gb: 0, 2g.20gb: two, 3g.40gb: }}"),
			want: []string{
				`profile "mine", mig entry 1, instances.1g.10gb: "0" must be a whole number from 1 to 1000`,
				`profile "mine", mig entry 1, instances: "1g10gb" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`,
				`profile "mine", mig entry 1, instances.2g.20gb: "two" must be a whole number from 1 to 1000`,
				`profile "mine", mig entry 1, instances.3g.40gb: "" must be a whole number from 1 to 1000`,
				`profile "mine", mig entry 1, instances: "4c.3g.40gb" cannot be: a GPU instance of 3 slices has no room for a compute instance of 4`,
			},
		},
		"in the order of names and entries": {
			file: profilesHead + "profiles:\n  b: {mig: [{gpus: {all: true}, enabled: 1}]}\n" +
				"  a: {mig: [{gpus: {all: true}, enabled: false}, {gpus: {index: x}, enabled: false}]}\nother: 1",
			want: []string{
				`other: is unknown here: use apiVersion, kind, profiles`,
				`profile "a", mig entry 2, gpus.index: "x" must be a position in PCI order, a whole number from 0 to 1000`,
				`profile "b", mig entry 1, enabled: "1" must be true or false`,
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			profiles, err := catalog.ParseProfiles([]byte(test.file))
			if err == nil {
				t.Fatalf("profiles %v, want an error", profiles)
			}
			if diff := cmp.Diff(test.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if profiles != nil {
				t.Errorf("profiles beside the error: %v", profiles)
			}
		})
	}

	t.Run("when a field is there twice", func(t *testing.T) {
		_, err := catalog.ParseProfiles([]byte(entry("{gpus: {all: true}, enabled: true, instances: {1g.10gb: 1, 1g.10gb: 2}}")))
		if err == nil || !strings.Contains(err.Error(), `key "1g.10gb" already set in map`) {
			t.Errorf("error %v does not name the field", err)
		}
	})
}

func renderSharing(s *catalog.Sharing) map[string]any {
	type object = map[string]any
	if s == nil {
		return nil
	}
	var resources []object
	for _, name := range s.Resources() {
		resources = append(resources, object{"name": name, "replicas": s.Replicas[name]})
	}
	strategy, ok := map[catalog.SharingStrategy]string{catalog.SharingTimeSlicing: "timeSlicing", catalog.SharingMPS: "mps"}[s.Strategy]
	if !ok { // in the longer of the two ways to say it
		strategy, resources = "timeSlicing", []object{{"name": "nvidia.com/gpu", "replicas": 1}}
	}
	return object{strategy: object{"renameByDefault": s.Rename, "failRequestsGreaterThanOne": s.FailMultiple, "resources": resources}}
}

func renderDrain(d *config.DrainOverrides) map[string]any {
	type object = map[string]any
	if d == nil {
		return nil
	}
	drain := object{}
	for field, value := range map[string]any{
		"mode": d.Mode, "gradualFor": d.GradualFor.String(), "deadline": d.Deadline.String(), "afterDeadline": d.AfterDeadline, "deleteGrace": d.DeleteGrace.String(),
		"unmanagedPods": d.UnmanagedPods, "emptyDir": d.EmptyDir, "onUncordon": d.OnUncordon,
	} {
		if !reflect.ValueOf(value).IsZero() && value != "0s" {
			drain[field] = value
		}
	}
	var rules []object
	for _, r := range d.Rules {
		rule := object{"namespaces": r.Namespaces, "selector": r.Selector.String(), "action": r.Action}
		if r.For > 0 {
			rule["for"] = r.For.String()
		}
		rules = append(rules, rule)
	}
	drain["rules"] = rules
	return drain
}

// renderProfiles writes profiles as a file.
func renderProfiles(t *testing.T, profiles map[string]catalog.Profile) []byte {
	t.Helper()
	type object = map[string]any
	written := object{}
	for name, p := range profiles {
		var entries []object
		for _, rule := range p.MIG {
			gpus := object{"uuid": rule.UUIDs, "pci": rule.PCI, "index": rule.Indices, "model": rule.Models, "deviceFilter": rule.DeviceFilter}
			maps.DeleteFunc(gpus, func(_ string, values any) bool { return reflect.ValueOf(values).Len() == 0 })
			if len(gpus) == 0 {
				gpus["all"] = rule.All
			}
			e := object{"gpus": gpus, "enabled": rule.MIG}
			if rule.MIG {
				e["instances"] = rule.Devices
			}
			entries = append(entries, e)
		}
		profile := object{"description": p.Description}
		for field, value := range map[string]any{"mig": entries, "sharing": renderSharing(p.Sharing), "labels": p.Labels, "taints": p.Taints, "drain": renderDrain(p.Drain), "windows": renderWindows(p.Windows)} {
			if !reflect.ValueOf(value).IsZero() {
				profile[field] = value
			}
		}
		written[name] = profile
	}
	text, err := yaml.Marshal(object{"apiVersion": catalog.ProfilesAPIVersion, "kind": catalog.ProfilesKind, "profiles": written})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// renderWindows writes windows as a file would have them.
func renderWindows(windows []window.Window) (out []map[string]any) {
	for _, w := range windows {
		in := map[string]any{"timeZone": w.Zone.String()}
		if len(w.Days) > 0 {
			var days []string
			for _, d := range w.Days {
				days = append(days, d.String())
			}
			in["days"], in["duration"] = days, w.Duration.String()
			in["start"] = time.Time{}.Add(w.Start).Format("15:04")
		}
		for field, bound := range map[string]time.Time{"notBefore": w.NotBefore, "notAfter": w.NotAfter} {
			if !bound.IsZero() {
				in[field] = bound.Format(time.RFC3339Nano)
			}
		}
		out = append(out, in)
	}
	return out
}

func FuzzParseProfiles(f *testing.F) {
	text, err := os.ReadFile(filepath.Join("testdata", "profiles.yaml"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	for _, entry := range []string{
		"{gpus: {all: true}, enabled: false}", "{gpus: {pci: 17:00.0, model: 'A*'}, enabled: true, instances: {1c.2g.10gb: 2}}",
		"null", "[]", "{gpus: {index: [0, 1]}, enabled: true, instances: {1g.6gb+me.all: 1}}",
	} {
		f.Add([]byte(profilesHead + "profiles:\n  a:\n    mig: [" + entry + "]\n"))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		profiles, err := catalog.ParseProfiles(text)
		if err != nil {
			if profiles != nil {
				t.Fatalf("profiles %v beside the error %v", profiles, err)
			}
			return
		}
		rendered := renderProfiles(t, profiles)
		again, err := catalog.ParseProfiles(rendered)
		if err != nil {
			t.Fatalf("reading what was rendered: %v\n%s", err, rendered)
		}
		if diff := cmp.Diff(profiles, again, asText); diff != "" {
			t.Fatalf("rendered and read again (-first +again):\n%s", diff)
		}
	})
}

// The GPUs of a node under the names that they really have.
const (
	uuid0 = nvml.UUID("GPU-00000000-0000-0000-0000-000000000000")
	uuid1 = nvml.UUID("GPU-11111111-1111-1111-1111-111111111111")
	uuid2 = nvml.UUID("GPU-22222222-2222-2222-2222-222222222222")
)

// addressed is a node of at most three GPUs, with UUIDs and addresses.
func addressed(gpus ...nvml.GPU) []nvml.GPU {
	for i := range gpus {
		gpus[i].Index = i
		gpus[i].UUID = []nvml.UUID{uuid0, uuid1, uuid2}[i]
		gpus[i].PCI = []string{"0000:17:00.0", "0000:65:00.0", "10000:ca:00.0"}[i]
	}
	return gpus
}

// profileRequests asks for a profile that has these entries.
func profileRequests(t *testing.T, entries string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Request, error) {
	t.Helper()
	profiles, err := catalog.ParseProfiles([]byte(profilesHead + "profiles:\n  mine:\n    mig:\n" +
		strings.ReplaceAll(entries, "- {gpus", "    - {gpus")))
	if err != nil {
		t.Fatal(err)
	}
	return catalog.Merge(catalog.Generate(gpus), nil).WithProfiles(profiles).ProfileRequests("mine", gpus)
}

func TestRequestedProfiles(t *testing.T) {
	type requests = map[nvml.UUID]nvml.Request
	cut := nvml.Request{MIG: true, Devices: map[string]int{"3g.40gb": 2}}
	const enabled = ", enabled: true, instances: {3g.40gb: 2}}\n"
	tests := map[string]struct {
		entries string
		gpus    []nvml.GPU
		want    requests
	}{
		"by UUID are for that GPU, and leave the others alone": {
			entries: "- {gpus: {uuid: " + string(uuid1) + "}" + enabled,
			gpus:    addressed(h100(), h100(), h100()),
			want:    requests{uuid1: cut},
		},
		"by address are for the GPU there, in whatever form it is written": {
			entries: `- {gpus: {pci: ["00000000:17:00.0", "00010000:CA:00.0"]}` + enabled,
			gpus:    addressed(h100(), h100(), h100()),
			want:    requests{uuid0: cut, uuid2: cut},
		},
		"by model are for every GPU that the pattern fits": {
			entries: `- {gpus: {model: ["NVIDIA A100*", "NVIDIA H100 80GB HBM3"]}` + enabled,
			gpus:    addressed(h100(), h200(), a100()),
			want:    requests{uuid0: cut, uuid2: cut},
		},
		"by several selectors are for GPUs that all of them select": {
			entries: `- {gpus: {index: [0, 1], model: "NVIDIA H100*", pci: ["17:00.0", "65:00.0", "ca:00.0"]}` + enabled,
			gpus:    addressed(h100(), a100(), h100()),
			want:    requests{uuid0: cut},
		},
		"of entries for GPUs of other nodes are passed over": {
			entries: `- {gpus: {uuid: GPU-33333333-3333-3333-3333-333333333333}` + enabled +
				`- {gpus: {pci: "99:00.0"}` + enabled +
				`- {gpus: {model: "NVIDIA B200", index: 7}` + enabled +
				`- {gpus: {pci: "99:00.0", index: 7}` + enabled +
				"- {gpus: {uuid: [GPU-33333333-3333-3333-3333-333333333333, " + string(uuid0) + "]}" + enabled,
			gpus: addressed(h100(), h100()),
			want: requests{uuid0: cut},
		},
		"for all GPUs pass over those that cannot do MIG, which another entry may be about": {
			entries: "- {gpus: {all: true}" + enabled + `- {gpus: {model: "Tesla T4"}, enabled: false}`,
			gpus:    addressed(t4(), h100()),
			want:    requests{uuid0: {}, uuid1: cut},
		},
		"for a filter pass over GPUs that cannot do MIG": {
			entries: `- {gpus: {deviceFilter: ["0x1EB810DE", "0x233010DE"]}` + enabled,
			gpus:    addressed(t4(), h100()),
			want:    requests{uuid1: cut},
		},
		"for a lost GPU are kept, for the planner to report": {
			entries: "- {gpus: {uuid: " + string(uuid0) + "}" + enabled,
			gpus:    addressed(nvml.GPU{Lost: true}, h100()),
			want:    requests{uuid0: cut},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := profileRequests(t, test.entries, test.gpus)
			if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
				t.Errorf("error %v, requests (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestWrongRequestsOfProfilesAreRefused(t *testing.T) {
	const enabled = ", enabled: true, instances: {3g.40gb: 2}}\n"
	tests := map[string]struct {
		entries string
		gpus    []nvml.GPU
		want    string
		reason  config.Reason
	}{
		"when two entries select a GPU": {
			entries: "- {gpus: {all: true}, enabled: false}\n- {gpus: {index: 1}" + enabled,
			gpus:    addressed(h100(), h100()),
			want: `profile "mine", mig entry 2, gpus: GPU 1` +
				` is already in mig entry 1: a GPU may be in one entry of a profile only`,
			reason: config.ReasonInvalidCatalog,
		},
		"when it is for GPUs of other nodes alone": {
			entries: `- {gpus: {uuid: GPU-33333333-3333-3333-3333-333333333333}` + enabled + `- {gpus: {pci: "99:00.0", model: "NVIDIA H*"}` + enabled,
			gpus:    addressed(h100(), h100(), nvml.GPU{Lost: true}),
			want: `profile "mine" selects no GPU of this node: it selects uuid GPU-33333333-3333-3333-3333-333333333333,` +
				` or pci 0000:99:00.0 and model NVIDIA H*; this node has NVIDIA H100 80GB HBM3 (` + string(uuid0) + `, 0000:17:00.0),` +
				` NVIDIA H100 80GB HBM3 (` + string(uuid1) + `, 0000:65:00.0), GPU 2 (lost)`,
			reason: config.ReasonNoCapableGPU,
		},
		"when it is for other models": {
			entries: `- {gpus: {model: "NVIDIA A100*"}` + enabled + `- {gpus: {deviceFilter: "0x290110DE"}` + enabled,
			gpus:    addressed(h100(), h100(), t4()),
			want: `profile "mine" selects no GPU of this node: it selects model NVIDIA A100*, or deviceFilter 0x290110DE;` +
				` this node has NVIDIA H100 80GB HBM3 (0x233010DE), Tesla T4 (0x1EB810DE)`,
			reason: config.ReasonNoCapableGPU,
		},
		"when its positions are of other models": {
			entries: `- {gpus: {index: 1, model: "NVIDIA H100*"}` + enabled,
			gpus:    addressed(h100(), t4()),
			want: `profile "mine" selects no GPU of this node: it selects index 1 and model NVIDIA H100*;` +
				` this node has NVIDIA H100 80GB HBM3 (index 0), Tesla T4 (index 1)`,
			reason: config.ReasonNoCapableGPU,
		},
		"for positions beyond the node's GPUs": {
			entries: `- {gpus: {index: [0, 2]}` + enabled,
			gpus:    addressed(h100(), h100()),
			want:    `profile "mine", mig entry 1, gpus.index: 2 is not a GPU of this node, which has 0 to 1`,
			reason:  config.ReasonInvalidCatalog,
		},
		"for MIG on GPUs that are named and cannot do it": {
			entries: "- {gpus: {uuid: " + string(uuid0) + "}" + enabled + "- {gpus: {pci: 65:00.0}" + enabled + "- {gpus: {index: 2}" + enabled,
			gpus:    addressed(t4(), t4(), h100()),
			want: `profile "mine", mig entry 1, gpus: GPU 0` +
				` is a Tesla T4, which cannot do MIG: leave it out, or set enabled to false for it` + "\n" +
				`profile "mine", mig entry 2, gpus: GPU 1` +
				` is a Tesla T4, which cannot do MIG: leave it out, or set enabled to false for it`,
			reason: config.ReasonInvalidCatalog,
		},
		"for MIG on a model that cannot do it": {
			entries: `- {gpus: {model: "Tesla*"}` + enabled,
			gpus:    addressed(h100(), t4()),
			want: `profile "mine" requests MIG, but no GPU that it names can do MIG: Tesla T4;` +
				` choose a profile with enabled false, or remove the label`,
			reason: config.ReasonNoCapableGPU,
		},
		"on a node without GPUs": {
			entries: `- {gpus: {all: true}, enabled: false}`,
			want:    `profile "mine" names no GPU, since this node has none`,
			reason:  config.ReasonNoCapableGPU,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			requests, err := profileRequests(t, test.entries, test.gpus)
			if err == nil {
				t.Fatalf("requests %v, want an error", requests)
			}
			if diff := cmp.Diff(test.want, err.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if reason := catalog.ReasonOf(err); reason != test.reason {
				t.Errorf("the reason of %v is %s, want %s", err, reason, test.reason)
			}
		})
	}
}

func TestEachOfTheTwoLabelsReadsItsOwnPlaces(t *testing.T) {
	gpus := node(h100())
	custom := map[string]catalog.MIGConfig{
		"night":   {all(map[string]int{"7g.80gb": 1})},
		"serving": {all(map[string]int{"2g.20gb": 3})},
	}
	profiles := map[string]catalog.Profile{
		"night":                {MIG: catalog.MIGConfig{all(nil)}},
		"all-balanced":         {MIG: catalog.MIGConfig{all(nil)}},
		"production-inference": {MIG: catalog.MIGConfig{all(map[string]int{"3g.40gb": 2})}},
	}
	before := catalog.Merge(catalog.Generate(gpus), custom)
	catalog := before.WithProfiles(profiles)

	for _, name := range before.Names() {
		want, wantErr := before.Requests(name, gpus)
		got, err := catalog.Requests(name, gpus)
		if diff := cmp.Diff(want, got); err != nil || wantErr != nil || diff != "" {
			t.Errorf("a profile changed the MIG config %s: %v, %v (-before +after):\n%s", name, wantErr, err, diff)
		}
	}
	if !slices.Equal(before.Names(), catalog.Names()) {
		t.Errorf("profiles are among the MIG configs: %v", catalog.Names())
	}
	if want := len(before.Names()) + 1; len(catalog.ProfileNames()) != want || !slices.IsSorted(catalog.ProfileNames()) {
		t.Errorf("a profile may be %v, want %d names in order", catalog.ProfileNames(), want)
	}
	for name, want := range map[string]nvml.Request{
		"night":                {},
		"all-balanced":         {},
		"production-inference": {MIG: true, Devices: map[string]int{"3g.40gb": 2}},
		"serving":              {MIG: true, Devices: map[string]int{"2g.20gb": 3}},
		"all-1g.10gb":          {MIG: true, Devices: map[string]int{"1g.10gb": 7}},
	} {
		got, err := catalog.ProfileRequests(name, gpus)
		if diff := cmp.Diff(map[nvml.UUID]nvml.Request{"GPU-0": want}, got); err != nil || diff != "" {
			t.Errorf("%s: error %v, requests (-want +got):\n%s", name, err, diff)
		}
	}
}

func TestAnUnknownProfile(t *testing.T) {
	gpus := node(h200())
	configs := catalog.Merge(catalog.Generate(gpus), nil).WithProfiles(map[string]catalog.Profile{
		"production-inference": {MIG: catalog.MIGConfig{all(nil)}}, "all-balance": {MIG: catalog.MIGConfig{all(nil)}},
	})
	const generated = `all-1g.18gb, all-1g.18gb.me, all-1g.35gb, all-2g.35gb, all-3g.71gb, all-4g.71gb, all-7g.141gb, all-balanced, all-disabled, all-enabled`
	tests := map[string]struct {
		ask  func(string, []nvml.GPU) (map[nvml.UUID]nvml.Request, error)
		name string
		want string
	}{
		"is answered with the nearest of profiles and MIG configs": {
			ask: configs.ProfileRequests, name: "all-balancd",
			want: `no profile or MIG config is named "all-balancd": did you mean all-balance or all-balanced?` +
				` This node has all-balance, production-inference, ` + generated,
		},
		"where the other label asks for one is answered with the label that may": {
			ask: configs.Requests, name: "production-inference",
			want: `no MIG config is named "production-inference": did you mean the profile production-inference (label gpuslice.io/profile)?` +
				` This node has ` + generated,
		},
		"where the other label asks for one is answered with that alone, however near others are": {
			ask: configs.Requests, name: "all-balance",
			want: `no MIG config is named "all-balance": did you mean the profile all-balance (label gpuslice.io/profile)?` +
				` This node has ` + generated,
		},
		"where the other label asks for nearly one is answered with that": {
			ask: configs.Requests, name: "production-inferense",
			want: `no MIG config is named "production-inferense": did you mean the profile production-inference (label gpuslice.io/profile)?` +
				` This node has ` + generated,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := test.ask(test.name, gpus)
			unknown, ok := errors.AsType[*catalog.UnknownConfigError](err)
			if !ok {
				t.Fatalf("error %v is not about an unknown config", err)
			}
			if diff := cmp.Diff(test.want, unknown.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}
