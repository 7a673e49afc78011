package migparted_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	spec "github.com/NVIDIA/mig-parted/api/spec/v1"
	"github.com/NVIDIA/mig-parted/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
)

// all is a rule for every GPU; without devices it turns MIG off.
func all(devices map[string]int, filter ...string) catalog.MIGRule {
	return catalog.MIGRule{All: true, MIG: devices != nil, Devices: devices, DeviceFilter: filter}
}

func TestParse(t *testing.T) {
	t.Run("reads each form of a rule", func(t *testing.T) {
		got, err := migparted.Parse(read(t, filepath.Join("testdata", "forms.yaml")))
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]catalog.MIGConfig{
			"all-disabled": {all(nil)},
			"all-enabled":  {all(map[string]int{})},
			"recommended":  {all(map[string]int{"3g.40gb": 1, "2g.20gb": 2})},
			"fleet": {
				all(map[string]int{"1g.10gb": 7}, "0x233010DE", "0x20B210DE"),
				all(map[string]int{"1g.6gb": 4}, "0x20B710DE"),
			},
			"by-index": {
				{Indices: []int{0, 1}},
				{Indices: []int{2}, MIG: true, Devices: map[string]int{"1g.10gb+me": 1, "2g.20gb": 3}},
			},
			"sub-slices": {all(map[string]int{"1c.3g.40gb": 3, "4g.40gb": 1})},
			"attributes": {all(map[string]int{"1g.24gb+me.all": 1, "1g.24gb-me": 2, "1g.24gb+gfx": 1})},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("configs (-want +got):\n%s", diff)
		}
	})

	t.Run("reads a ConfigMap of the options that a platform team writes down", func(t *testing.T) {
		got, err := migparted.Parse(configMaps(t, filepath.Join("testdata", "strategy.yaml"))[0])
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]catalog.MIGConfig{
			"option-1": {all(map[string]int{"1g.10gb": 7})},
			"option-2": {all(map[string]int{"2g.20gb": 3, "1g.10gb": 1})},
			"option-3": {all(map[string]int{"3g.40gb": 2, "1g.10gb": 1})},
			"option-4": {all(map[string]int{"3g.40gb": 1, "2g.20gb": 2})},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("configs (-want +got):\n%s", diff)
		}
	})

	t.Run("refuses a device plugin's config by the field that gives it away", func(t *testing.T) {
		files := configMaps(t, filepath.Join("testdata", "device-plugin.yaml"))
		if len(files) != 3 {
			t.Fatalf("%d files, want 3", len(files))
		}
		for _, file := range files {
			_, err := migparted.Parse(file)
			if diff := cmp.Diff("sharing: is no field of MIG configs: use version and mig-configs", text(err)); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		}
	})

	t.Run("takes a file that says nothing but its version, as mig-parted does", func(t *testing.T) {
		got, err := migparted.Parse([]byte("version: v1\n"))
		if err != nil || len(got) > 0 {
			t.Errorf("got %v, %v; want no configs", got, err)
		}
	})
}

func TestParseRefuses(t *testing.T) {
	rule := func(rule string) string { return "version: v1\nmig-configs:\n  mine:\n    - " + rule + "\n" }
	tests := map[string]struct {
		file string
		want string
	}{
		"an empty file": {
			file: "# nothing\n",
			want: `reading MIG configs: the file is empty, and needs at least "version: v1" and "mig-configs"`,
		},
		"a missing version": {
			file: "mig-configs: {mine: [{devices: all, mig-enabled: false}]}",
			want: "version: must be v1, the only version",
		},
		"another version": {
			file: "version: v2\nmig-configs: {mine: [{devices: all, mig-enabled: false}]}",
			want: `version: "v2" must be v1, the only version`,
		},
		"a list in place of the file": {
			file: "- version: v1",
			want: `file: must be a mapping with "version" and "mig-configs"`,
		},
		"no configs under mig-configs": {
			file: "version: v1\nmig-configs: {}",
			want: "mig-configs: must be a mapping of at least one name to a list of rules",
		},
		"a config without rules": {
			file: "version: v1\nmig-configs: {mine: []}",
			want: `config "mine": must be a list of at least one rule with "devices" and "mig-enabled"`,
		},
		"a name that no label can hold": {
			file: "version: v1\nmig-configs: {all-1g.10gb+me: [{devices: all, mig-enabled: false}]}",
			want: `mig-configs: "all-1g.10gb+me" cannot be the value of a label, so no node could request it: write letters, digits, '-', '_'` +
				` and '.', at most 63, beginning and ending with a letter or digit (NVIDIA writes '.' for the '+' of a profile)`,
		},
		"an empty name": {
			file: "version: v1\nmig-configs: {\"\": [{devices: all, mig-enabled: false}]}",
			want: `mig-configs: "" is empty: a label cannot request it`,
		},
		"a rule that is no mapping": {
			file: rule("all"),
			want: `config "mine", rule 1: "all" must be a mapping with "devices" and "mig-enabled"`,
		},
		"a field that is not one": {
			file: rule("{devices: all, mig-enabled: false, mig-device: {}}"),
			want: `config "mine", rule 1, mig-device: is no field of a rule: use device-filter, devices, mig-enabled and mig-devices`,
		},
		"a rule without devices and mode": {
			file: rule("{device-filter: 0x233010DE}"),
			want: `config "mine", rule 1, device-filter: 590352606 must be a device id in quotes, "0x233010DE", or a list of them` + "\n" +
				`config "mine", rule 1, devices: is missing` + "\n" +
				`config "mine", rule 1, mig-enabled: is missing`,
		},
		"a filter by the name of a model": {
			file: rule("{device-filter: A100-SXM4-40GB, devices: all, mig-enabled: false}"),
			want: `config "mine", rule 1, device-filter: "A100-SXM4-40GB" is not of the form "0x233010DE", the PCI device id followed by the vendor id,` +
				` or "0x233010DE:0x16C110DE" with those of the subsystem`,
		},
		"a filter by subsystem alone": {
			file: rule(`{device-filter: [":0x18BF10DE"], devices: all, mig-enabled: false}`),
			want: `config "mine", rule 1, device-filter: ":0x18BF10DE" begins with a colon, so that mig-parted matches no GPU:` +
				` write the device id before it, "0x233010DE:0x16C110DE"`,
		},
		"a filter by a subsystem that is none": {
			file: rule(`{device-filter: "0x233010DE:", devices: all, mig-enabled: false}`),
			want: `config "mine", rule 1, device-filter: "0x233010DE:" is not of the form "0x233010DE", the PCI device id followed by the vendor id,` +
				` or "0x233010DE:0x16C110DE" with those of the subsystem`,
		},
		"devices other than all or a list": {
			file: rule("{devices: some, mig-enabled: false}"),
			want: `config "mine", rule 1, devices: "some" must be "all" or a list of positions in PCI order, [0, 1]`,
		},
		"a negative position": {
			file: rule("{devices: [0, -1], mig-enabled: false}"),
			want: `config "mine", rule 1, devices: -1 is negative: the first GPU in PCI order is 0`,
		},
		"an empty list of positions": {
			file: rule("{devices: [], mig-enabled: false}"),
			want: `config "mine", rule 1, devices: [] names no GPU: write "all" or a list of positions, [0, 1]`,
		},
		"a mode in words": {
			file: rule(`{devices: all, mig-enabled: "on"}`),
			want: `config "mine", rule 1, mig-enabled: "on" must be true or false`,
		},
		"MIG devices with MIG off": {
			file: rule(`{devices: all, mig-enabled: false, mig-devices: {"1g.10gb": 7}}`),
			want: `config "mine", rule 1, mig-devices: {"1g.10gb":7} needs mig-enabled: true`,
		},
		"no MIG devices with MIG on": {
			file: rule("{devices: all, mig-enabled: true}"),
			want: `config "mine", rule 1, mig-devices: is missing: for MIG mode without instances write {}`,
		},
		"a list of MIG devices": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: [1g.10gb]}"),
			want: `config "mine", rule 1, mig-devices: ["1g.10gb"] must be a mapping of names to whole numbers, {"1g.10gb": 7}`,
		},
		"a MIG device that is misspelt": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {1g10gb: 7}}"),
			want: `config "mine", rule 1, mig-devices: "1g10gb" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`,
		},
		"a MIG device that mig-parted would only fail to find": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {01g.10gb: 7}}"),
			want: `config "mine", rule 1, mig-devices: "01g.10gb" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`,
		},
		"MIG devices that mig-parted refuses": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {'1g.24gb+me,me': 1, '1g.24gb+me,': 1, 1g.24gb+me.: 1, 1g.24gb+: 1, 1g.99999999999999999999gb: 1}}"),
			want: `config "mine", rule 1, mig-devices: "1g.24gb+" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.24gb+me," is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.24gb+me,me" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.24gb+me." is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.99999999999999999999gb" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`,
		},
		"values that mig-parted takes for 0": {
			file: rule("{devices: [null], mig-enabled: true, mig-devices: {1g.10gb: null, 2g.20gb: 1}}"),
			want: `config "mine", rule 1, devices: null must be a position in PCI order, a whole number without quotes` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.10gb": null must be a whole number`,
		},
		"a compute instance larger than its GPU instance": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {4c.3g.40gb: 1}}"),
			want: `config "mine", rule 1, mig-devices: "4c.3g.40gb" cannot be: a GPU instance of 3 slices has no room for a compute instance of 4`,
		},
		"a negative count": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {1g.10gb: -1}}"),
			want: `config "mine", rule 1, mig-devices: "1g.10gb": -1 is negative`,
		},
		"more than any GPU holds": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 9223372036854775807, 1c.3g.40gb: 1}}"),
			want: `config "mine", rule 1, mig-devices: "3g.40gb": 9223372036854775807 is more than any GPU holds: give at most 1000`,
		},
		"more than any GPU holds, by two spellings": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 9223372036854775807, 3c.3g.40gb: 9223372036854775807}}"),
			want: `config "mine", rule 1, mig-devices: "3c.3g.40gb": 9223372036854775807 is more than any GPU holds: give at most 1000` + "\n" +
				`config "mine", rule 1, mig-devices: "3g.40gb": 9223372036854775807 is more than any GPU holds: give at most 1000`,
		},
		"more than a number holds": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 9223372036854775808}}"),
			want: `config "mine", rule 1, mig-devices: "3g.40gb": 9223372036854775808 is more than any GPU holds: give at most 1000`,
		},
		"counts of nothing": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 0}}"),
			want: `config "mine", rule 1, mig-devices: {"1g.10gb":0} counts nothing: for MIG mode without instances write {}`,
		},
		"a number beyond 64 bits": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 99999999999999999999}}"),
			want: `config "mine", rule 1, mig-devices: "3g.40gb": 99999999999999999999 is more than any GPU holds: give at most 1000`,
		},
		"a number in quotes": {
			file: rule(`{devices: ["0"], mig-enabled: true, mig-devices: {3g.40gb: "1", 1g.10gb: 1.5}}`),
			want: `config "mine", rule 1, devices: "0" must be a position in PCI order, a whole number without quotes` + "\n" +
				`config "mine", rule 1, mig-devices: "1g.10gb": 1.5 must be a whole number` + "\n" +
				`config "mine", rule 1, mig-devices: "3g.40gb": "1" must be a whole number without quotes`,
		},
		"mistakes that mig-parted refuses beside others": {
			file: "version: v2\nmore: 1\nmig-configs:\n" +
				"  a+: [{device-filter: T4, devices: [-1], mig-enabled: on, mig-devices: {1g.10gb: -1, x: 1, 4c.3g.40gb: 1001}, more: 2}]\n" +
				"  b: []\n" +
				"  c: [{devices: [-2], mig-enabled: false}, {mig-enabled: \"x\"}, {devices: all, mig-enabled: false, mig-devices: {1g.10gb: 1001}}]\n",
			want: `version: "v2" must be v1, the only version
more: is no field of MIG configs: use version and mig-configs
mig-configs: "a+" cannot be the value of a label, so no node could request it: write letters, digits, '-', '_' and '.', at most 63, ` +
				`beginning and ending with a letter or digit (NVIDIA writes '.' for the '+' of a profile)
config "a+", rule 1, device-filter: "T4" is not of the form "0x233010DE", the PCI device id followed by the vendor id, or "0x233010DE:0x16C110DE" with those of the subsystem
config "a+", rule 1, devices: -1 is negative: the first GPU in PCI order is 0
config "a+", rule 1, mig-devices: "1g.10gb": -1 is negative
config "a+", rule 1, mig-devices: "4c.3g.40gb" cannot be: a GPU instance of 3 slices has no room for a compute instance of 4
config "a+", rule 1, mig-devices: "x" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"
config "a+", rule 1, more: is no field of a rule: use device-filter, devices, mig-enabled and mig-devices
config "b": must be a list of at least one rule with "devices" and "mig-enabled"
config "c", rule 1, devices: -2 is negative: the first GPU in PCI order is 0
config "c", rule 2, mig-enabled: "x" must be true or false
config "c", rule 2, devices: is missing
config "c", rule 3, mig-devices: "1g.10gb": 1001 is more than any GPU holds: give at most 1000
config "c", rule 3, mig-devices: {"1g.10gb":1001} needs mig-enabled: true`,
		},
		"more mistakes than are read": {
			file: "version: v1\nmig-configs:\n  a:\n" + strings.Repeat("  - {devices: [-1], mig-enabled: x}\n", 60),
			want: strings.Join(slices.Collect(func(yield func(string) bool) {
				for i := range 50 {
					_ = yield(fmt.Sprintf(`config "a", rule %d, devices: -1 is negative: the first GPU in PCI order is 0`, i+1)) &&
						yield(fmt.Sprintf(`config "a", rule %d, mig-enabled: "x" must be true or false`, i+1))
				}
				yield("and 20 more")
			}), "\n"),
		},
		"a config beside mig-configs": {
			file: "version: v1\nmig-configs:\nmine: [{devices: all, mig-enabled: false}]\n",
			want: "mine: is a MIG config: it belongs below mig-configs",
		},
		"a config beside others": {
			file: "version: v1\nmig-configs: {a: []}\nmine: [{devices: all}]\n",
			want: "mine: is a MIG config: it belongs below mig-configs\n" + `config "a": must be a list of at least one rule with "devices" and "mig-enabled"`,
		},
		"a config without a file around it": {
			file: "mine: [{devices: all, mig-enabled: false}]\n",
			want: "version: must be v1, the only version\nmine: is a MIG config: it belongs below mig-configs",
		},
		"MIG devices beside their field": {
			file: rule("{devices: all, mig-enabled: true, mig-devices: , 1g.10gb: 7}"),
			want: `config "mine", rule 1, 1g.10gb: is a MIG device: it belongs below mig-devices`,
		},
		"fields of the file in a rule": {
			file: rule("{devices: all, mig-enabled: false, version: v1}"),
			want: `config "mine", rule 1, version: belongs to the top of the file, not into a rule`,
		},
		"a file without indentation": {
			file: "version: v1\nmig-configs:\nmine:\n- devices: all\nmig-enabled: true\nmig-devices:\n1g.10gb: 7\nother:\n- devices: all\nmig-enabled: false\n",
			want: "1g.10gb: is a MIG device: it belongs below mig-devices of a rule\n" +
				"mig-devices: belongs into a rule of a MIG config, below mig-configs\n" +
				"mig-enabled: belongs into a rule of a MIG config, below mig-configs\n" +
				"mine: is a MIG config: it belongs below mig-configs\n" +
				"other: is a MIG config: it belongs below mig-configs\n" +
				`reading MIG configs as YAML: line 10: key "mig-enabled" already set in map`,
		},
		"every mistake at once": {
			file: "version: v1\nmig-configs:\n" +
				"  b: [{devices: all, mig-enabled: false}, {devices: [-2], mig-enabled: false}]\n" +
				"  a: [{device-filter: T4, devices: [-1], mig-enabled: false}]\n",
			want: `config "a", rule 1, device-filter: "T4" is not of the form "0x233010DE", the PCI device id followed by the vendor id,` +
				` or "0x233010DE:0x16C110DE" with those of the subsystem` + "\n" +
				`config "a", rule 1, devices: -1 is negative: the first GPU in PCI order is 0` + "\n" +
				`config "b", rule 2, devices: -2 is negative: the first GPU in PCI order is 0`,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			configs, err := migparted.Parse([]byte(test.file))
			if diff := cmp.Diff(test.want, text(err)); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if configs != nil {
				t.Errorf("configs beside the error: %v", configs)
			}
		})
	}

	t.Run("a field that is there twice", func(t *testing.T) {
		_, err := migparted.Parse([]byte(rule(`{devices: all, mig-enabled: true, mig-devices: {"1g.10gb": 1, "1g.10gb": 2}}`)))
		if !strings.Contains(text(err), `key "1g.10gb" already set in map`) {
			t.Errorf("error %v does not name the field", err)
		}
	})
}

// TestParseAgreesWithMigParted hands every example that comes with mig-parted to both, and compares what they ask of
// the GPUs of nodes with each device id that the examples name.
func TestParseAgreesWithMigParted(t *testing.T) {
	for _, file := range examples(t) {
		t.Run(file.name, func(t *testing.T) {
			var theirs spec.Spec
			if err := yaml.Unmarshal(file.text, &theirs); err != nil {
				t.Fatal(err)
			}
			ours, err := migparted.Parse(file.text)
			if err != nil {
				t.Fatal(err)
			}
			if len(ours) != len(theirs.MigConfigs) {
				t.Errorf("%d configs, want %d", len(ours), len(theirs.MigConfigs))
			}
			configs := catalog.Merge(nil, ours)
			for name, rules := range theirs.MigConfigs {
				for _, id := range deviceIDs(t, theirs) {
					node := nodeOf(id)
					got, err := configs.Requests(name, node)
					want := requestsOf(rules, node)
					if err != nil && len(want) == 0 {
						continue // a config for other GPUs: mig-parted does nothing, and we say so
					}
					if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); err != nil || diff != "" {
						t.Errorf("%s on 0x%X: %v\nrequests (-mig-parted +ours):\n%s", name, id, err, diff)
					}
				}
			}
		})
	}
}

func TestRenderedConfigsAreReadBackTheSame(t *testing.T) {
	files := examples(t)
	files = append(files, example{"forms.yaml", read(t, filepath.Join("testdata", "forms.yaml"))})
	for _, file := range files {
		t.Run(file.name, func(t *testing.T) { roundTrip(t, file.text) })
	}
}

func TestGeneratedConfigsAreReadBackTheSame(t *testing.T) {
	h100 := nvml.GPU{Model: "NVIDIA H100 80GB HBM3", DeviceID: 0x233010DE, Capable: true, Profiles: []nvml.Profile{
		{Name: "1g.10gb", Slices: 1, Max: 7}, {Name: "1g.10gb+me", Slices: 1, Max: 1}, {Name: "7g.80gb", Slices: 7, Max: 1},
	}}
	generated := catalog.Generate([]nvml.GPU{h100, {Model: "Tesla T4", DeviceID: 0x1EB810DE, Index: 1}})
	rendered, err := migparted.Render(generated)
	if err != nil {
		t.Fatal(err)
	}
	again, err := migparted.Parse(rendered)
	if diff := cmp.Diff(generated, again); err != nil || diff != "" {
		t.Errorf("error %v, rendered and read again (-generated +again):\n%s", err, diff)
	}
}

func FuzzParse(f *testing.F) {
	for _, file := range examples(f) {
		f.Add(file.text)
	}
	for _, name := range []string{"forms.yaml", "strategy.yaml", "device-plugin.yaml"} {
		f.Add(read(f, filepath.Join("testdata", name)))
	}
	f.Add([]byte("version: v1\nmig-configs:\n  a: [{devices: [0], mig-enabled: true, mig-devices: {1c.2g.10gb: 2}}]"))
	f.Add([]byte("version: v1\nmig-configs: {a: [null], b: 1, c: {}}"))
	f.Fuzz(func(t *testing.T, text []byte) { roundTrip(t, text) })
}

// roundTrip demands of a text that is refused no configs, and of one that is taken that mig-parted takes it too and reads the same
// rules, and that what is rendered from it means the same.
func roundTrip(t *testing.T, text []byte) {
	t.Helper()
	configs, err := migparted.Parse(text)
	if err != nil {
		if configs != nil {
			t.Fatalf("configs %v beside the error %v", configs, err)
		}
		return
	}
	var theirs spec.Spec
	if err := yaml.Unmarshal(text, &theirs); err != nil {
		t.Fatalf("mig-parted refuses what is taken here: %v", err)
	}
	if diff := cmp.Diff(rulesOf(theirs), configs, cmpopts.EquateEmpty()); diff != "" {
		t.Fatalf("rules (-mig-parted +ours):\n%s", diff)
	}
	rendered, err := migparted.Render(configs)
	if err != nil {
		t.Fatal(err)
	}
	again, err := migparted.Parse(rendered)
	if err != nil {
		t.Fatalf("reading what was rendered: %v\n%s", err, rendered)
	}
	if diff := cmp.Diff(configs, again); diff != "" {
		t.Fatalf("rendered and read again (-first +again):\n%s", diff)
	}
}

// rulesOf gives the rules as mig-parted has read them.
func rulesOf(file spec.Spec) map[string]catalog.MIGConfig {
	out := map[string]catalog.MIGConfig{}
	for name, rules := range file.MigConfigs {
		for _, r := range rules {
			rule := catalog.MIGRule{MIG: r.MigEnabled, All: r.MatchesAllDevices()}
			rule.Indices, _ = r.Devices.([]int)
			if filter, ok := r.DeviceFilter.(string); ok && filter != "" {
				rule.DeviceFilter = []string{filter}
			} else if several, ok := r.DeviceFilter.([]string); ok {
				rule.DeviceFilter = several
			}
			for device, n := range r.MigDevices {
				if n == 0 {
					continue
				}
				if rule.Devices == nil {
					rule.Devices = map[string]int{}
				}
				canonical, err := catalog.DeviceName(device)
				if err != nil {
					panic(err) // Parse has taken it
				}
				rule.Devices[canonical] += n
			}
			out[name] = append(out[name], rule)
		}
	}
	return out
}

type example struct {
	name string
	text []byte
}

// examples lists the MIG configs that come with mig-parted's module, whether as files or in ConfigMaps.
func examples(tb testing.TB) []example {
	tb.Helper()
	out, err := exec.CommandContext(tb.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/mig-parted").Output()
	if err != nil {
		tb.Fatalf("finding mig-parted's module: %v", err)
	}
	dir := strings.TrimSpace(string(out))
	var found []example
	for _, name := range []string{"examples/config.yaml", "examples/dgx-station-80gb-config.yaml", "deployments/systemd/config-default.yaml"} {
		found = append(found, example{name, read(tb, filepath.Join(dir, name))})
	}
	for _, name := range []string{"nvidia-mig-manager-example.yaml", "nvidia-mig-manager-example-hopper-blackwell.yaml"} {
		for _, text := range configMaps(tb, filepath.Join(dir, "deployments/container", name)) {
			if strings.Contains(string(text), "mig-configs") {
				found = append(found, example{name, text})
			}
		}
	}
	if len(found) != 5 {
		tb.Fatalf("%d examples in %s, want 5", len(found), dir)
	}
	return found
}

// configMaps lists the values of all ConfigMaps in a file of several YAML documents.
func configMaps(tb testing.TB, path string) [][]byte {
	tb.Helper()
	var values [][]byte
	for doc := range strings.SplitSeq(string(read(tb, path)), "\n---\n") {
		var cm corev1.ConfigMap
		if err := yaml.Unmarshal([]byte(doc), &cm); err != nil {
			tb.Fatalf("reading %s: %v", path, err)
		}
		if cm.Kind != "ConfigMap" {
			continue
		}
		for _, value := range cm.Data {
			values = append(values, []byte(value))
		}
	}
	return values
}

func read(tb testing.TB, path string) []byte {
	tb.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// deviceIDs lists the device ids that the configs name, and one that they do not.
func deviceIDs(t *testing.T, file spec.Spec) []types.DeviceID {
	t.Helper()
	ids := []types.DeviceID{0x123410DE}
	for _, rules := range file.MigConfigs {
		for _, rule := range rules {
			var filters []string
			switch f := rule.DeviceFilter.(type) {
			case string:
				filters = []string{f}
			case []string:
				filters = f
			}
			for _, f := range filters {
				id, err := types.NewDeviceIDFromString(f)
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// nodeOf is a node with eight GPUs of one kind.
func nodeOf(id types.DeviceID) []nvml.GPU {
	var gpus []nvml.GPU
	for i := range 8 {
		gpus = append(gpus, nvml.GPU{
			UUID: nvml.UUID("GPU-" + string(rune('0'+i))), Index: i, DeviceID: uint32(id), Model: "model", Capable: true,
		})
	}
	return gpus
}

// requestsOf is what mig-parted makes of the rules: each in turn, on every GPU that it matches.
func requestsOf(rules spec.MigConfigSpecSlice, gpus []nvml.GPU) map[nvml.UUID]nvml.Request {
	requests := map[nvml.UUID]nvml.Request{}
	for _, rule := range rules {
		for _, g := range gpus {
			if rule.MatchesDeviceFilter(types.DeviceID(g.DeviceID)) && rule.MatchesDevices(g.Index) {
				requests[g.UUID] = nvml.Request{MIG: rule.MigEnabled, Devices: rule.MigDevices}
			}
		}
	}
	return requests
}
