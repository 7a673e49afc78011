package schema_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/schema"
)

var deploy = filepath.Join("..", "..", "deploy")

const (
	profilesHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\n"
	settingsHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n"

	maintenanceHead = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n"
)

func shipped(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deploy, "schema", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func compiled(t *testing.T, name string) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(shipped(t, name)))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(name, doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// validate checks YAML by a schema.
func validate(t *testing.T, s *jsonschema.Schema, text string) error {
	t.Helper()
	doc, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	return s.Validate(value)
}

// data is one file of a ConfigMap in deploy.
func data(t *testing.T, key string, path ...string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{deploy}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatal(err)
	}
	if m.Data[key] == "" {
		t.Fatalf("%s has no %s", path, key)
	}
	return m.Data[key]
}

func TestTheShippedSchemasAreGenerated(t *testing.T) {
	files, err := schema.Files("..")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if diff := cmp.Diff(string(text), string(shipped(t, name))); diff != "" {
			t.Errorf("deploy/schema/%s is not as make generate writes it (-generated +shipped):\n%s", name, diff)
		}
	}
}

func TestFilesThatAreRightPass(t *testing.T) {
	for name, files := range map[string]map[string]string{
		schema.ProfilesFile: {
			"examples of profiles": data(t, "profiles.yaml", "examples", "configmap-profiles.yaml"),
			"examples of pools":    data(t, "profiles.yaml", "examples", "configmap-pools.yaml"),
			"none":                 profilesHead,
			"windows":              profilesHead + "profiles: {a: {sharing: none, windows: [{days: [Fri], start: '22:00', duration: 1h}]}}",
			"all selectors": profilesHead + "profiles: {a: {mig: [{gpus: {uuid: [GPU-8DCD427F-483b-b48f-d7e5-75fb19a52b76], pci: ['17:00.0', '00000000:af:00.0']," +
				" index: 0, model: 'A*', deviceFilter: [0x233010DE, '0x20b210de', 0x233010DE:0x16C110DE]}, enabled: true, instances: {1c.3g.40gb: 1, 1g.10gb+me: 1, 1g.24gb-me: 2}}]}}",
			"sharing of MIG devices": profilesHead + "profiles: {a: {sharing: {timeSlicing: {renameByDefault: true, failRequestsGreaterThanOne: true," +
				" resources: [{name: gpu, replicas: 1}, {name: nvidia.com/mig-1g.10gb.me, replicas: 60000}]}}}}",
			"MPS":                           profilesHead + "profiles: {a: {mig: [{gpus: {all: true}, enabled: false}], sharing: {mps: {resources: [{name: gpu, replicas: 48}]}}}}",
			"one replica by MPS beside MIG": profilesHead + "profiles: {a: {mig: [{gpus: {all: true}, enabled: true, instances: {}}], sharing: {mps: {resources: [{name: gpu, replicas: 1}]}}}}",
			"all of drain": profilesHead + "profiles: {a: {labels: {a: '', b/c: d}, taints: [{key: a, effect: PreferNoSchedule}], drain: {deadline: 1h30m, afterDeadline: undo, deleteGrace: 1.5s," +
				" unmanagedPods: refuse, emptyDir: evict, onUncordon: refence, rules: [{namespaces: [a], action: wait, for: 2h}, {selector: 'a in (b,c)', action: refuse}]}}}",
		},
		schema.MaintenanceFile: {
			"the example": data(t, "maintenance.yaml", "examples", "configmap-maintenance.yaml"),
			"none":        maintenanceHead,
			"everything": maintenanceHead + "windows: [{days: mon, start: '00:00', duration: 1h30m, notBefore: '2026-12-20T22:00:00.5+01:00'}, {days: [Sunday, Tue], start: '23:59', duration: 7h, timeZone: UTC}]\n" +
				"freezes: []\njitter: 0s\npools: [{name: a, selector: '!b', maxUnavailable: 0, pauseAfter: 0}, {name: b, selector: a in (b), maxUnavailable: 100%}]",
		},
		schema.SettingsFile: {
			"those that are deployed": data(t, "settings.yaml", "base", "configmap-settings.yaml"),
			"none":                    settingsHead,
			"what is turned off":      settingsHead + "memoryPressure: {threshold: 0, clear: 0, for: 0s}\nidle: {every: 0s, below: 0}\nprofiles: {name: ''}\noperands: []\nunits: []\ndevicePlugin: {containers: []}",
			"a startup taint":         settingsHead + "startupTaint: startup-taint.cluster-autoscaler.kubernetes.io/gpuslice",
			"another startup taint":   settingsHead + "startupTaint: example.com/not-ready",
			"rules":                   settingsHead + "drain: {rules: [{namespaces: [a], action: evict}], clients: [a=b]}\nrecover: {adopt: [mig-manager]}",
		},
	} {
		s := compiled(t, name)
		for what, text := range files {
			if err := validate(t, s, text); err != nil {
				t.Errorf("%s: %v", what, err)
			}
			if err := read(name, text); err != nil {
				t.Errorf("%s are refused by the agent itself: %v", what, err)
			}
		}
	}
}

// read is the agent's own check.
func read(name, text string) error {
	var err error
	switch name {
	case schema.ProfilesFile:
		_, err = catalog.ParseProfiles([]byte(text))
	case schema.MaintenanceFile:
		_, err = maintenance.Parse([]byte(text))
	default:
		_, err = config.Parse([]byte(text))
	}
	return err
}

func TestFilesThatAreWrongDoNotPass(t *testing.T) {
	entry := func(entry string) string { return profilesHead + "profiles: {a: {mig: [" + entry + "]}}" }
	profile := func(profile string) string { return profilesHead + "profiles: {a: " + profile + "}" }
	resources := func(resources string) string {
		return profile("{sharing: {timeSlicing: {resources: [" + resources + "]}}}")
	}
	window := func(window string) string { return maintenanceHead + "windows: [{" + window + "}]" }
	pool := func(pool string) string { return maintenanceHead + "pools: [{" + pool + "}]" }
	for name, files := range map[string][]string{
		schema.ProfilesFile: {
			"apiVersion: v1\nkind: Profiles", "apiVersion: gpuslice.io/v1alpha1\nkind: Settings", "kind: Profiles", profilesHead + "profile: {}",
			profilesHead + "profiles: []", profilesHead + "profiles: {-a: {sharing: none}}", profilesHead + "profiles: {off: {sharing: none}}",
			profilesHead + "profiles: {'': {sharing: none}}", profilesHead + "profiles: {1g.10gb+me: {sharing: none}}",
			profile("{}"), profile("{description: a}"), profile("{labels: {}}"), profile("{taints: []}"), profile("{drain: {deadline: 1h}}"), profile("{mig: []}"), profile("{sharing: none, windows: []}"), profile("{shared: none, sharing: none}"),
			entry("{enabled: false}"), entry("{gpus: {}, enabled: false}"), entry("{gpus: {all: false}, enabled: false}"), entry("{gpus: {all: true, index: 0}, enabled: false}"),
			entry("{gpus: {all: true}}"), entry("{gpus: {all: true}, enabled: true}"), entry("{gpus: {all: true}, enabled: false, instances: {}}"),
			entry("{gpus: {all: true}, enabled: true, instances: {1g10gb: 1}}"), entry("{gpus: {all: true}, enabled: true, instances: {1g.10gb: 0}}"),
			entry("{gpus: {uuid: GPU-1}, enabled: false}"), entry("{gpus: {uuid: []}, enabled: false}"), entry("{gpus: {pci: '17:00'}, enabled: false}"),
			entry("{gpus: {index: [0, 0]}, enabled: false}"), entry("{gpus: {index: -1}, enabled: false}"), entry("{gpus: {model: ''}, enabled: false}"),
			entry("{gpus: {deviceFilter: H100}, enabled: false}"), entry("{gpus: {gpu: 0}, enabled: false}"),
			profile("{sharing: {}}"), profile("{sharing: all}"), profile("{sharing: {time-slicing: {resources: [{name: gpu, replicas: 2}]}}}"),
			profile("{sharing: {timeSlicing: {}}}"), profile("{sharing: {timeSlicing: {renameByDefault: 'true', resources: [{name: gpu, replicas: 2}]}}}"),
			profile("{sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}, mps: {resources: [{name: gpu, replicas: 2}]}}}"),
			resources(""), resources("{name: gpu}"), resources("{replicas: 2}"), resources("{name: gpu, replicas: 0}"), resources("{name: gpu, replicas: '2'}"),
			resources("{name: gpu, replicas: 60001}"), resources("{name: mig-1g.10gb+me, replicas: 2}"), resources("{name: amd.com/gpu, replicas: 2}"),
			resources("{name: gpu, replicas: 2, devices: all}"), resources("{name: nvidia.com/gpu.shared, replicas: 2}"),
			profile("{sharing: {mps: {resources: [{name: gpu, replicas: 49}]}}}"), profile("{sharing: {mps: {resources: [{name: mig-1g.10gb, replicas: 2}]}}}"),
			profile("{mig: [{gpus: {all: true}, enabled: true, instances: {}}], sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}}"),
			profile("{labels: {nvidia.com/a: b}}"), profile("{labels: {node-role.kubernetes.io/a: b}}"), profile("{labels: {k8s.io/a: b}}"), profile("{labels: {a: true}}"),
			profile("{labels: {a: b c}}"), profile("{labels: {-a: b}}"), profile("{labels: [a]}"),
			profile("{taints: [{key: a, effect: NoExecute}]}"), profile("{taints: [{effect: NoSchedule}]}"), profile("{taints: [{key: gpuslice.io/a, effect: NoSchedule}]}"),
			profile("{taints: [{key: a, value: true, effect: NoSchedule}]}"), profile("{taints: [{key: a, effect: NoSchedule}, {key: a, effect: NoSchedule}]}"),
			profile("{sharing: none, drain: {deadline: 1}}"), profile("{sharing: none, drain: {clients: []}}"), profile("{sharing: none, drain: {rules: [{action: evict}]}}"),
			profile("{sharing: none, drain: {rules: [{selector: a, action: wait}]}}"), profile("{sharing: none, drain: {rules: [{selector: a, action: evict, for: 1h}]}}"),
		},
		schema.MaintenanceFile: {
			"apiVersion: gpuslice.io/v1alpha1\nkind: Settings", maintenanceHead + "window: []", maintenanceHead + "windows: []", maintenanceHead + "windows: [{}]",
			window("days: []"), window("days: Freitag, start: '22:00', duration: 1h"), window("days: Fri, duration: 1h"), window("days: Fri, start: '22:00'"),
			window("days: Fri, start: '24:00', duration: 1h"), window("days: Fri, start: 1320, duration: 1h"), window("days: Fri, start: '22:00', duration: 1d"),
			window("start: '22:00', duration: 1h"), window("notBefore: '2026-12-20T22:00:00Z'"), window("notBefore: '2026-12-20T22:00:00', notAfter: '2026-12-21T22:00:00Z'"),
			window("notBefore: '2026-12-20T22:00:00Z', notAfter: '2026-12-21T22:00:00Z', start: '22:00'"),
			maintenanceHead + "freezes: [{from: '2026-12-20T22:00:00Z'}]", maintenanceHead + "freezes: [{from: 2026-12-20, to: 2026-12-21}]", maintenanceHead + "estimate: 15",
			pool("name: a"), pool("selector: a"), pool("name: a, selector: ''"), pool("name: A, selector: a"), pool("name: a, selector: a, maxUnavailable: -1"),
			pool("name: a, selector: a, maxUnavailable: 101%"), pool("name: a, selector: a, pauseAfter: 1001"), pool("name: a, selector: a, windows: []"),
		},
		schema.SettingsFile: {
			"apiVersion: gpuslice.io/v1alpha1\nkind: Profiles", settingsHead + "setting: 1", settingsHead + "nodeHeartbeat: soon", settingsHead + "migStrategy: both",
			settingsHead + "migConfigMap: mine", settingsHead + "profiles: {file: a}", settingsHead + "devicePlugin: {podSelector: []}",
			settingsHead + "devicePlugin: {podSelector: a=b}", settingsHead + "devicePlugin: {handover: sighup}", settingsHead + "devicePlugin: {configFile: a}",
			settingsHead + "devicePlugin: {configMap: {key: a}}", settingsHead + "devicePlugin: {containers: [A_]}", settingsHead + "devicePlugin: {defaultConfig: a/b}",
			settingsHead + "mps: {handover: auto}", settingsHead + "mps: {podSelector: []}", settingsHead + "memoryPressure: {threshold: 101}", settingsHead + "memoryPressure: {clear: -1}",
			settingsHead + "memoryPressure: {for: 1}", settingsHead + "staleResources: bust", settingsHead + "podAccess: any", settingsHead + "idle: {below: 101}", settingsHead + "idle: {instances: all}", settingsHead + "reboot: {policy: always}", settingsHead + "reboot: {sentinel: a}",
			settingsHead + "drain: {afterDeadline: force}", settingsHead + "drain: {deadline: 1h}", settingsHead + "drain: {rules: [{action: refuse}]}",
			settingsHead + "operands: [nvidia.com/gpu.deploy.driver]", settingsHead + "operands: [a]", settingsHead + "units: [a.slice]", settingsHead + "recover: {adopt: [a]}",
			settingsHead + "timeouts: {drain: 1}", settingsHead + "timeouts: 1h", settingsHead + "retry: {failures: 0}", settingsHead + "retry: {noEffect: many}",
			settingsHead + "startupTaint: gpuslice.io/not-ready", settingsHead + "startupTaint: node.kubernetes.io/not-ready", settingsHead + "startupTaint: nvidia.com/gpu",
			settingsHead + "startupTaint: a b", settingsHead + "startupTaint: status-taint.cluster-autoscaler.kubernetes.io/a", settingsHead + "startupTaint: startup-taint.cluster-autoscaler.kubernetes.io/",
		},
	} {
		s := compiled(t, name)
		for _, text := range files {
			err := validate(t, s, text)
			if _, ok := errors.AsType[*jsonschema.ValidationError](err); !ok {
				t.Errorf("error %v, want that %s refuses:\n%s", err, name, text)
			}
			if read(name, text) == nil {
				t.Errorf("the agent takes what %s refuses:\n%s", name, text)
			}
		}
	}
}

// object is a schema as it is written.
type object struct {
	Ref        string `json:"$ref"`
	Defs       map[string]object
	Properties map[string]object
}

func parsedSchema(t *testing.T, name string) object {
	t.Helper()
	var root object
	if err := json.Unmarshal(shipped(t, name), &struct {
		*object
		Defs *map[string]object `json:"$defs"`
	}{&root, &root.Defs}); err != nil {
		t.Fatal(err)
	}
	return root
}

// at follows a reference.
func (o object) at(root object) object {
	if o.Ref == "" {
		return o
	}
	return root.Defs[strings.TrimPrefix(o.Ref, "#/$defs/")]
}

// The agent says which fields it knows when it finds one that it does not.
func TestTheSchemasHaveTheFieldsThatTheAgentReads(t *testing.T) {
	hasFields(t, schema.MaintenanceFile, map[string]string{
		"Maintenance": maintenanceHead + "xx: 1",
		"Window":      maintenanceHead + "windows: [{xx: 1}]",
		"Freeze":      maintenanceHead + "freezes: [{xx: 1}]",
		"Pool":        maintenanceHead + "pools: [{xx: 1}]",
	})
	hasFields(t, schema.ProfilesFile, map[string]string{
		"Profiles": profilesHead + "xx: 1",
		"Profile":  profilesHead + "profiles: {a: {xx: 1}}",
		"MIGEntry": profilesHead + "profiles: {a: {mig: [{xx: 1}]}}",
		"Selector": profilesHead + "profiles: {a: {mig: [{gpus: {xx: 1}}]}}",

		"ReplicatedResources": profilesHead + "profiles: {a: {sharing: {timeSlicing: {xx: 1}}}}",
		"ReplicatedResource":  profilesHead + "profiles: {a: {sharing: {mps: {resources: [{xx: 1}]}}}}",

		"Taint":          profilesHead + "profiles: {a: {taints: [{xx: 1}]}}",
		"DrainOverrides": profilesHead + "profiles: {a: {drain: {xx: 1}}}",
		"Window":         profilesHead + "profiles: {a: {windows: [{xx: 1}]}}",
	})
}

// hasFields compares definitions of a schema with what the agent says of a file that has the field xx in their place.
func hasFields(t *testing.T, name string, files map[string]string) {
	t.Helper()
	root := parsedSchema(t, name)
	for def, file := range files {
		_, said, _ := strings.Cut(read(name, file).Error(), "xx: is unknown here: use ")
		said, _, _ = strings.Cut(said, "\n")
		known := strings.Split(said, ", ")
		slices.Sort(known)
		if diff := cmp.Diff(known, slices.Sorted(maps.Keys(root.Defs[def].Properties))); diff != "" {
			t.Errorf("fields of %s (-agent +schema):\n%s", def, diff)
		}
	}
}

// The deployed settings show every field that there is, but for the namespaces of ConfigMaps: they are the agent's own, whatever an overlay makes it.
func TestTheSchemaOfSettingsHasTheFieldsThatTheAgentReads(t *testing.T) {
	root := parsedSchema(t, schema.SettingsFile)
	var shown map[string]any
	if err := yaml.Unmarshal([]byte(data(t, "settings.yaml", "base", "configmap-settings.yaml")), &shown); err != nil {
		t.Fatal(err)
	}
	fields := slices.DeleteFunc(root.paths("", root.at(root)), func(path string) bool { return strings.HasSuffix(path, ".namespace") })
	if diff := cmp.Diff(paths("", shown), fields); diff != "" {
		t.Errorf("fields of settings (-deployed +schema):\n%s", diff)
	}
	for _, path := range root.paths("", root.at(root)) {
		if path == "apiVersion" || path == "kind" {
			continue
		}
		text := settingsHead + strings.ReplaceAll(path, ".", ": {") + ": " + strings.Repeat("}", strings.Count(path, "."))
		if _, err := config.Parse([]byte(text)); err != nil && strings.Contains(err.Error(), "is unknown here") {
			t.Errorf("the agent does not know %s: %v", path, err)
		}
	}
}

func paths(within string, fields map[string]any) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if inner, ok := fields[name].(map[string]any); ok {
			all = append(all, paths(within+name+".", inner)...)
		} else {
			all = append(all, within+name)
		}
	}
	return all
}

func (o object) paths(within string, of object) (all []string) {
	for _, name := range slices.Sorted(maps.Keys(of.Properties)) {
		if inner := of.Properties[name].at(o); len(inner.Properties) > 0 {
			all = append(all, o.paths(within+name+".", inner)...)
		} else {
			all = append(all, within+name)
		}
	}
	return all
}
