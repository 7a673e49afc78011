package migrate

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

var update = flag.Bool("update", false, "write what migrate says into testdata again")

// migrates runs the command.
func migrates(t *testing.T, args ...string) (string, error) {
	t.Helper()
	return agenttest.Runs(t, []cluster.Command{Command}, "", append([]string{"migrate"}, args...)...)
}

func TestMigrateSaysWhatBecomesOfAnInstallation(t *testing.T) {
	const file, golden = "testdata/cluster.yaml", "testdata/cluster.txt"
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil {
		t.Fatal(err)
	}
	agenttest.Golden(t, golden, got, *update)
}

// Migrate judges the objects of the API server as it does the same objects in a file.
func TestMigrateReadsTheClusterAsItReadsFiles(t *testing.T) {
	text, err := os.ReadFile("testdata/cluster.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Items []map[string]any }
	if err := yaml.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	of := map[string][]any{}
	configMaps := map[string]any{}
	for _, item := range list.Items {
		kind, _ := item["kind"].(string)
		of[kind] = append(of[kind], item)
		if meta, ok := item["metadata"].(map[string]any); ok && kind == "ConfigMap" {
			configMaps["/api/v1/namespaces/"+meta["namespace"].(string)+"/configmaps/"+meta["name"].(string)] = item //nolint:errcheck // of testdata
		}
	}
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch path {
		case "/apis/nvidia.com/v1/clusterpolicies":
			return map[string]any{"items": of["ClusterPolicy"]}
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": of["Node"]}
		default:
			return configMaps[path]
		}
	})
	got, err := migrates(t, "--dry-run", "--kubeconfig", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/cluster.txt")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.ReplaceAll(string(want), "testdata/cluster.yaml, ", ""), got); diff != "" {
		t.Errorf("(-from the file +from the cluster):\n%s", diff)
	}
}

// Who may not read a part learns what the rest says, and that it is not all.
func TestMigrateReportsWhatItMayNotRead(t *testing.T) {
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch path {
		case "/apis/nvidia.com/v1/clusterpolicies", "/api/v1/namespaces/default/configmaps/mig-parted-config":
			return errors.New("forbidden")
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": []any{map[string]any{
				"metadata": map[string]any{"name": "gpu-1", "labels": map[string]any{"nvidia.com/mig.config": "all-disabled"}},
			}}}
		}
		return nil
	})
	got, err := migrates(t, "--dry-run", "--kubeconfig", kubeconfig)
	for _, want := range []string{
		"taken over  nvidia.com/mig.config=all-disabled: gpu-1\n",
		"not read    reading the ClusterPolicies: /apis/nvidia.com/v1/clusterpolicies is forbidden\n",
		"not read    reading ConfigMap mig-parted-config of namespace default: ",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("it does not say %q:\n%s", want, got)
		}
	}
	if err == nil || !strings.Contains(err.Error(), "you may not read 2 parts of the installation") || strings.Contains(got, "No change is needed") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// A file that cannot be read is reported, whichever key of mig-manager's ConfigMap has it.
func TestMigrateReportsAConfigMapThatCannotBeRead(t *testing.T) {
	configMap := func(data map[string]string) any {
		return map[string]any{"kind": "ConfigMap", "apiVersion": "v1", "metadata": map[string]any{"name": "mig-parted-config", "namespace": "default"}, "data": data}
	}
	broken := configMap(map[string]string{
		"config.yaml": "version: v1\nmig-configs:\n  a: [\n", "clients.yaml": "systemd-services: dcgm", "broken.yaml": "systemd-services: [", "values.yaml": "a: {{ b }}: c",
	})
	text, err := yaml.Marshal(broken)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "configmap.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch path {
		case "/api/v1/namespaces/default/configmaps/mig-parted-config":
			return broken
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1"}
		}
		return nil
	})
	for from, args := range map[string][]string{"the file": {"-f", file}, "the cluster": {"--kubeconfig", kubeconfig}} {
		got, err := migrates(t, append([]string{"--dry-run"}, args...)...)
		if err == nil || !strings.Contains(err.Error(), "3 texts of the installation cannot be read, and more changes may be needed than these 1") ||
			strings.Count(got, "\n  unreadable  reading YAML: ") != 3 || !strings.Contains(got, "systemd-services: must be a list of names of units") || strings.Contains(got, "gpuslice is installed") {
			t.Errorf("from %s: error %v\n%s", from, err, got)
		}
	}
}

// The device plugin's pods do not start without the ConfigMap that the ClusterPolicy names, and the key in it.
func TestMigrateChecksWhetherTheDevicePluginsConfigIsThere(t *testing.T) {
	policy := map[string]any{
		"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": map[string]any{"name": "p"},
		"spec": map[string]any{"migManager": map[string]any{"enabled": false}, "devicePlugin": map[string]any{"config": map[string]any{"name": "plugin", "default": "any"}}},
	}
	configMap := func(keys ...string) any {
		data := map[string]any{}
		for _, key := range keys {
			data[key] = "version: v1"
		}
		return map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "plugin", "namespace": "gpu-operator"}, "data": data}
	}
	const named, missing = "  taken over  devicePlugin.config.name is plugin", "  change      devicePlugin.config.name is plugin, and no ConfigMap of that name was found, without which NVIDIA's config manager does not start the plugin"
	const right = "  taken over  devicePlugin.config.default is any"
	const wrong = "  change      devicePlugin.config.default is any, and ConfigMap plugin has no such key, but "
	for name, row := range map[string]struct {
		has  any
		want []string
	}{
		"both":         {configMap("any"), []string{named, right}},
		"no ConfigMap": {nil, []string{missing}},
		"another key":  {configMap("none", "two"), []string{named, wrong + "none; two: NVIDIA's config manager does not start the plugin"}},
		"no key":       {configMap(), []string{named, wrong + "none: "}},
		"no rights": {errors.New("forbidden"), []string{
			"  not read    devicePlugin.config.name is plugin, and you may not read whether there is such a ConfigMap", "reading ConfigMap plugin of namespace gpu-operator: ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
				switch path {
				case "/apis/nvidia.com/v1/clusterpolicies":
					return map[string]any{"items": []any{policy}}
				case "/api/v1/namespaces/gpu-operator/configmaps/plugin":
					return row.has
				case "/api/v1/nodes":
					return map[string]any{"kind": "NodeList", "apiVersion": "v1"}
				}
				return nil
			})
			runs := [][]string{{"--kubeconfig", kubeconfig}}
			if _, refused := row.has.(error); !refused {
				items := []any{policy}
				if row.has != nil {
					items = append(items, row.has)
				}
				text, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": items})
				if err != nil {
					t.Fatal(err)
				}
				file := filepath.Join(t.TempDir(), "list.json")
				if err := os.WriteFile(file, text, 0o600); err != nil {
					t.Fatal(err)
				}
				runs = append(runs, []string{"-f", file})
			}
			for _, args := range runs {
				got, _ := migrates(t, append([]string{"--dry-run"}, args...)...)
				for _, want := range row.want {
					if !strings.Contains(got, want) {
						t.Errorf("%s: it does not say %q:\n%s", args[0], want, got)
					}
				}
			}
		})
	}
}

const whereTaint = "where that taint is, no pod of the driver or the device plugin is started; add "

// The operator's pods come to no node with a taint that they do not tolerate, whoever has set it.
func TestMigrateReportsTaintsThatTheOperatorDoesNotTolerate(t *testing.T) {
	for name, row := range map[string]struct {
		tolerations, taint string
		want               string // empty for nothing
	}{
		"a team's":                        {"", "{key: team, value: a, effect: NoSchedule}", "lacks team=a:NoSchedule: " + whereTaint + "{key: team, operator: Exists, effect: NoSchedule}: gpu-1\n"},
		"a team's, which evicts":          {"{key: team, operator: Exists, effect: NoSchedule}", "{key: team, effect: NoExecute}", "lacks team:NoExecute: " + whereTaint + "{key: team, operator: Exists, effect: NoExecute}: gpu-1\n"},
		"another value":                   {"{key: team, value: b}", "{key: team, value: a, effect: NoSchedule}", "lacks team=a:NoSchedule: "},
		"the value":                       {"{key: team, value: a}", "{key: team, value: a, effect: NoSchedule}", ""},
		"all of them":                     {"{operator: Exists}", "{key: team, value: a, effect: NoExecute}", ""},
		"the usual one":                   {"", "{key: nvidia.com/gpu, value: present, effect: NoSchedule}", ""},
		"the usual one, which is no more": {"{key: other, operator: Exists}", "{key: nvidia.com/gpu, effect: NoSchedule}", "lacks nvidia.com/gpu: on a node"},
		"a request":                       {"", "{key: team, effect: PreferNoSchedule}", ""},
		"one of Kubernetes":               {"", "{key: node.kubernetes.io/unreachable, effect: NoExecute}", ""},
	} {
		file := filepath.Join(t.TempDir(), "list.yaml")
		text := "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {migManager: {enabled: false}, daemonsets: {tolerations: [" + row.tolerations + "]}}\n---\n" +
			"apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {nvidia.com/gpu.present: 'true'}}\nspec: {taints: [" + row.taint + "]}\n---\n" +
			"apiVersion: v1\nkind: Node\nmetadata: {name: cpu-1}\nspec: {taints: [{key: cpu, effect: NoSchedule}]}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := migrates(t, "--dry-run", "-f", file)
		said := strings.Contains(got, "where that taint is")
		if err != nil || row.want != "" && !strings.Contains(got, row.want) || said && row.want == "" || strings.Contains(got, "cpu-1") {
			t.Errorf("%s: error %v, want %q\n%s", name, err, row.want, got)
		}
		if strings.Contains(row.want, "on a node") && said {
			t.Errorf("%s: it says it twice\n%s", name, got)
		}
	}
}

func TestMigrateReportsTaintsOfProfiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profiles.yaml")
	const profiles = "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {serving: {taints: [{key: serving, value: a, effect: NoSchedule}]}}\n"
	text := "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {migManager: {enabled: false}}\n---\n" + profiles
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		switch path {
		case "/apis/nvidia.com/v1/clusterpolicies":
			return map[string]any{"items": []any{map[string]any{"metadata": map[string]any{"name": "p"}, "spec": map[string]any{"migManager": map[string]any{"enabled": false}}}}}
		case "/api/v1/namespaces/gpuslice/configmaps/gpuslice-profiles":
			return map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "gpuslice-profiles", "namespace": "gpuslice"}, "data": map[string]any{"profiles.yaml": profiles}}
		case "/api/v1/nodes":
			return map[string]any{"kind": "NodeList", "apiVersion": "v1"}
		}
		return nil
	})
	for _, args := range [][]string{{"-f", file}, {"--kubeconfig", kubeconfig}} {
		got, err := migrates(t, append([]string{"--dry-run"}, args...)...)
		if err != nil || !strings.Contains(got, "lacks serving=a:NoSchedule: "+whereTaint+"{key: serving, operator: Exists, effect: NoSchedule}: profile serving\n") {
			t.Errorf("of a profile, %s: error %v\n%s", args[0], err, got)
		}
	}
}

// Kyverno has ClusterPolicies, and Rancher has Nodes, which have nothing to do with GPUs.
func TestMigratePassesOverKindsOfOthersWithTheSameName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "others.yaml")
	text := "apiVersion: kyverno.io/v1\nkind: ClusterPolicy\nmetadata: {name: no-latest}\n---\n" +
		"apiVersion: management.cattle.io/v3\nkind: Node\nmetadata: {name: n, labels: {nvidia.com/mig.config: all-disabled}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := migrates(t, "--dry-run", "-f", file); err == nil || !strings.Contains(err.Error(), "was found in "+file) || !strings.HasPrefix(got, "Nothing of mig-manager's was found") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// What kubectl get --raw gives are lists whose items do not say their kind.
func TestMigrateReadsListsOfTheAPIServer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lists.yaml")
	text := `{"apiVersion":"nvidia.com/v1","kind":"ClusterPolicyList","items":[{"metadata":{"name":"p"},"spec":{"migManager":{"enabled":false}}}]}` + "\n---\n" +
		`{"apiVersion":"v1","kind":"NodeList","items":[{"metadata":{"name":"gpu-1","labels":{"nvidia.com/mig.config":"all-disabled"}}}]}` + "\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	want := "ClusterPolicy p\n  taken over  migManager is off\nNodes\n  taken over  nvidia.com/mig.config=all-disabled: gpu-1\n"
	if got, err := migrates(t, "--dry-run", "-f", file); err != nil || !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "\nNo change is needed: install gpuslice.\n") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// Without nodes the command cannot compare with what agents make.
func TestMigrateComparesNothingWithoutNodes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, []byte("version: v1\nmig-configs: {all-1g.10gb: [{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 4}}]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil || !strings.Contains(got, "no node was read to compare their counts with") || !strings.HasSuffix(got, "1 change is needed before gpuslice is installed.\n") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// A command to paste has no text of a file in it that a shell could run.
func TestMigrateWritesNoTextOfAFileIntoACommand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: 'x; touch /tmp/x'}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := migrates(t, "--dry-run", "-f", file); err != nil || !strings.Contains(got, "$ kubectl patch clusterpolicies.nvidia.com/NAME --type merge") {
		t.Errorf("error %v\n%s", err, got)
	}
}

func TestMigrateOfAClusterThatHasNothingOfTheKind(t *testing.T) {
	kubeconfig := agenttest.Kubeconfig(t, func(path string) any {
		if path == "/api/v1/nodes" {
			return map[string]any{"kind": "NodeList", "apiVersion": "v1", "items": []any{map[string]any{"metadata": map[string]any{"name": "cpu-1"}}}}
		}
		return nil
	})
	if got, err := migrates(t, "--dry-run", "--kubeconfig", kubeconfig); err != nil || !strings.HasPrefix(got, "Nothing of mig-manager's was found") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// written writes files into a folder of their own.
func written(t *testing.T, files map[string]string) (folder string) {
	t.Helper()
	folder = t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// Whoever gives a file has to learn that it said nothing, and why.
func TestMigrateNamesEachFileThatSaysNothing(t *testing.T) {
	const node = "apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {nvidia.com/gpu.present: 'true'}}\n"
	const policy = "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {migManager: {config: {name: custom}}}\n"
	configMap := func(name, key, text string) string {
		return "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + "}\ndata:\n  " + key + ": |\n    " + strings.ReplaceAll(text, "\n", "\n    ") + "\n"
	}
	const brokenConfig = "all-disabled:\n- devices: all\n    mig-enabled: false"
	for name, row := range map[string]struct {
		files   map[string]string
		unused  []string // files that the error names
		err     string   // what else it says; empty for nothing
		says    string
		saysNot string
	}{
		"a node without a GPU": {
			files: map[string]string{"a.yaml": "apiVersion: v1\nkind: Node\nmetadata: {name: cpu-1}\n"}, unused: []string{"a.yaml"}, says: "Nothing of mig-manager's was found",
		},
		"another program's ConfigMaps": {
			files:  map[string]string{"a.yaml": configMap("hami-device-plugin", "config.json", `{"nodeconfig": []}`) + "---\n" + configMap("b", "device-config.yaml", "nvidia: {deviceSplitCount: 10}"), "b.yaml": node},
			unused: []string{"a.yaml"},
		},
		"another program's template": {
			files: map[string]string{"a.yaml": configMap("a", "values.yaml", "a: {{ b }}: c"), "b.yaml": node}, unused: []string{"a.yaml (reading YAML: "},
		},
		"the ConfigMap of a policy": {
			files: map[string]string{"a.yaml": configMap("custom", "readme", "x"), "b.yaml": policy},
			says:  "migManager.config.name is custom, and no key of that ConfigMap has MIG configs, but it has readme",
		},
		"the ConfigMap of a policy, broken": {
			files: map[string]string{"a.yaml": configMap("custom", "values.yaml", "a: {{ b }}: c"), "b.yaml": policy},
			err:   "1 text of the installation cannot be read", says: "  unreadable  reading YAML: ", saysNot: "is custom, and no",
		},
		"broken MIG configs": {
			files: map[string]string{"a.yaml": configMap("custom", "config.yaml", brokenConfig), "b.yaml": policy},
			err:   "1 text of the installation cannot be read", says: "  unreadable  reading YAML: line 8: mapping values are not allowed in this context\n", saysNot: "no ConfigMap of that name",
		},
		"broken MIG configs that a node asks for": {
			files: map[string]string{"a.yaml": configMap("custom", "config.yaml", brokenConfig), "b.yaml": strings.ReplaceAll(node, "gpu.present: 'true'", "mig.config: custom")},
			err:   "1 text of the installation cannot be read", says: "nvidia.com/mig.config=custom is in no file that could be read, and not all could",
		},
		"a config of the device plugin that it refuses": {
			files: map[string]string{"a.yaml": "version: v1\nsharing:\nmps:\n  resources: []\n"}, says: "NVIDIA's device plugin refuses or ignores a part of it, and so would the agent: line 3, column 1: mps: ",
		},
		"a broken key next to a config": {
			files: map[string]string{"a.yaml": configMap("c", "any", "version: v1") + "  other.yaml: 'a: ['\n"}, err: "1 text of the installation cannot be read", says: "unreadable  reading YAML: ",
		},
		"a dashboard": {
			files: map[string]string{"a.yaml": configMap("a", "a.json", `{"title": "a", "version": 1, "panels": []}`), "b.yaml": node}, unused: []string{"a.yaml"},
		},
		"pods without their nodes": {
			files: map[string]string{"a.yaml": "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "b.yaml": policy}, unused: []string{"a.yaml"},
		},
		"pods next to nodes":     {files: map[string]string{"a.yaml": "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "b.yaml": node}},
		"a part of MIG configs":  {files: map[string]string{"a.yaml": "mine: [{devices: all, mig-enabled: false}]\n"}, says: "line 1, column 1: mine: is a MIG config: it belongs below mig-configs"},
		"a misspelt mig-configs": {files: map[string]string{"a.yaml": "version: v1\nmig_configs: {}\n"}, says: "mig_configs: is no field of MIG configs"},
	} {
		t.Run(name, func(t *testing.T) {
			folder := written(t, row.files)
			args := []string{"--dry-run"}
			for _, file := range slices.Sorted(maps.Keys(row.files)) {
				args = append(args, "-f", filepath.Join(folder, file))
			}
			got, err := migrates(t, args...)
			said := fmt.Sprint(err)
			if (err != nil) != (len(row.unused) > 0 || row.err != "") || !strings.Contains(said, row.err) || !strings.Contains(got, row.says) || row.saysNot != "" && strings.Contains(got, row.saysNot) {
				t.Errorf("error %s\n%s", said, got)
			}
			for _, file := range row.unused {
				if !strings.Contains(said, "nothing of an installation was found in "+filepath.Join(folder, file)) {
					t.Errorf("error %s does not name %s", said, file)
				}
			}
		})
	}
}

// The ConfigMaps are those of the guides that people come from, word by word, and some with what is wrong in such ConfigMaps.
func TestMigrateSaysWhatBecomesOfConfigsOfTheDevicePluginAlone(t *testing.T) {
	const guides, label = "../../../config/deviceplugin/testdata/", "nvidia.com/device-plugin.config="
	const four = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"
	const lets, wrong, mps = " lets the agent use that ConfigMap", "configs without flags.migStrategy: while ", "which has not been tried on OpenShift: "
	configMap := func(namespace, name, data string) map[string]string {
		return map[string]string{"a.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: " + name + ", namespace: " + namespace + "}\ndata:\n" + data}
	}
	for name, row := range map[string]struct {
		guide string            // its ConfigMap
		files map[string]string // without one
		says  []string
		not   []string
	}{
		"OpenShift AI": {
			guide: "gpuaas-openshift-ai.yaml", says: []string{
				"ConfigMap time-slicing-config\n  taken over  configs of the device plugin: a node gets one by its label, with gpuslice as without: " + label + "any\n",
				"  taken over  the ClusterPolicy was not read: its devicePlugin.config.name has to be time-slicing-config. ", "without a default they share nothing\n",
				"  taken over  overlays/openshift" + lets + "\n", string(config.ReasonWrongMIGStrategy), "has flags: {migStrategy: mixed}: any\nNo change is needed: install gpuslice.\n",
			}, not: []string{mps},
		},
		"a T4":            {guide: "working-with-gpus.yaml", says: []string{label + "tesla-t4\n", "  taken over  overlays/openshift" + lets + "\n"}},
		"slices of a MIG": {guide: "working-with-gpus-mig.yaml", says: []string{label + "a100-mig\n", wrong, "mixed}: a100-mig\n"}},
		"an older operator": {
			guide: "gpu-sharing-strategy.yaml", says: []string{label + "config.yaml\n", "  taken over  overlays/gpu-operator" + lets + ", once a copy of its operator.yaml has namespace: gpu-operator-resources\n"},
		},
		"another name and namespace": {
			files: configMap("gpus", "mine", "  a: '{version: v1, flags: {migStrategy: single}}'\n  b: 'version: v1'\n"),
			says:  []string{label + "a; " + label + "b\n", lets + ", once a copy of its operator.yaml has configMap: mine and namespace: gpus\n", "migStrategy: mixed}: b\n"},
		},
		"MPS on OpenShift": {
			files: configMap("nvidia-gpu-operator", "device-plugin-config", "  m: '{version: v1, sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}}'\n"), says: []string{mps, "there: m\n"}, not: []string{wrong},
		},
		"MPS elsewhere": {
			files: configMap("gpu-operator", "device-plugin-config", "  m: '{version: v1, sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}}'\n"), not: []string{mps, wrong, "once a copy"},
		},
		"a replica of one": {
			files: configMap("gpu-operator", "device-plugin-config", "  one: '"+strings.Replace(four, "4", "1", 1)+"'\n"),
			says:  []string{"  change      NVIDIA's device plugin refuses or ignores a part of it, and so would the agent: ", "replicas: \"1\" shares nothing", "1 change is needed"}, not: []string{label},
		},
		"beside a policy that names none": {
			files: map[string]string{
				"a.yaml": configMap("gpu-operator", "time-slicing-config", "  any: '"+four+"'\n")["a.yaml"],
				"b.yaml": "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {migManager: {enabled: false}}\n",
			}, says: []string{"the ClusterPolicy names no ConfigMap: its devicePlugin.config.name has to be time-slicing-config. "},
		},
		"beside a policy without a default": {
			files: map[string]string{
				"a.yaml": configMap("gpu-operator", "time-slicing-config", "  any: '"+four+"'\n")["a.yaml"],
				"b.yaml": "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {migManager: {enabled: false}, devicePlugin: {config: {name: time-slicing-config}}}\n",
			}, says: []string{"devicePlugin.config.default is not set: a node gets a config by the label nvidia.com/device-plugin.config alone", wrong}, not: []string{"has to be"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			at := guides + row.guide
			if row.guide == "" {
				at = written(t, row.files)
			}
			got, err := migrates(t, "--dry-run", "-f", at)
			if err != nil {
				t.Error(err)
			}
			for _, want := range row.says {
				if !strings.Contains(got, want) {
					t.Errorf("it does not say %q:\n%s", want, got)
				}
			}
			for _, no := range row.not {
				if strings.Contains(got, no) {
					t.Errorf("it says %q:\n%s", no, got)
				}
			}
		})
	}
}

// A folder is read as kubectl reads it, and named as a whole if it says nothing.
func TestMigrateReadsAFolder(t *testing.T) {
	folder := written(t, map[string]string{
		"a.yml": "version: v1\nmig-configs: {mine: [{devices: all, mig-enabled: false}]}\n", "b.json": `{"apiVersion": "v1", "kind": "Service"}`, "c.txt": "mig-configs: [",
	})
	if err := os.MkdirAll(filepath.Join(folder, "d.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	if got, err := migrates(t, "--dry-run", "-f", folder); err != nil || !strings.HasPrefix(got, filepath.Join(folder, "a.yml")+"\n  change      1 MIG config to copy") {
		t.Errorf("error %v\n%s", err, got)
	}
	other := written(t, map[string]string{"b.json": `{"apiVersion": "v1", "kind": "Service"}`})
	if _, err := migrates(t, "--dry-run", "-f", folder, "-f", other); err == nil || !strings.Contains(err.Error(), "was found in "+other+":") {
		t.Errorf("error %v", err)
	}
	if _, err := migrates(t, "--dry-run", "-f", t.TempDir()); err == nil || !strings.Contains(err.Error(), "has no file of YAML or JSON (*.yaml, *.yml, *.json)") {
		t.Errorf("error %v", err)
	}
}

func TestMigrateSaysWhatIsWrongWithItsInput(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct {
		text, want string
		args       []string
	}{
		"without --dry-run":                {want: "say --dry-run"},
		"a policy whose strategy is a map": {text: "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nspec: {mig: {strategy: {a: b}}}\n", args: []string{"--dry-run"}, want: "reading a ClusterPolicy: spec.mig.strategy: a value must be text, "},
		"a node named n": {
			text: "apiVersion: v1\nkind: Node\nmetadata: {name: n}\n", args: []string{"--dry-run"},
			want: "reading a Node: metadata.name: a value must be text, in quotes where YAML reads it as other than text (1, true, n), not true or false",
		},
		"a ConfigMap with a mapping": {
			text: "apiVersion: v1\nkind: ConfigMap\ndata: {any: {version: v1}}\n", args: []string{"--dry-run"}, want: "reading a ConfigMap: data: a value must be text, ",
		},
		"a pod whose containers are none": {
			text: "apiVersion: v1\nkind: Pod\nspec: {containers: 1}\n", args: []string{"--dry-run"}, want: "reading a Pod: spec.containers: a value must be a list, not a number",
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, "file.yaml")
			if err := os.WriteFile(file, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := migrates(t, append(test.args, "-f", file)...); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q\n%s", err, test.want, got)
			}
		})
	}
}

// A file that mig-manager takes and the agent does not is said to be wrong, with what is right in it still reported.
func TestMigrateReportsAFileThatTheAgentWouldRefuse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "version: v1\nmig-configs:\n  odd\x1b[2J: [{devices: all, mig-enabled: yes-please}]\n"
	if err := os.WriteFile(file, []byte(strings.ReplaceAll(text, "\x1b", "")), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil || !strings.Contains(got, "the agent would refuse the file") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// What one wrong name keeps from being read is not said to be missing.
func TestMigrateDoesNotSayThatAConfigOfABrokenFileIsMissing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "list.yaml")
	text := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: mig-parted-config, namespace: default}\ndata:\n  config.yaml: |\n    version: v1\n    mig-configs:\n" +
		"      custom: [{devices: all, mig-enabled: false}]\n      a/b: [{devices: all, mig-enabled: false}]\n---\n" +
		"apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {nvidia.com/mig.config: custom}}\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "-f", file)
	if err != nil || strings.Contains(got, "none of the files") || !strings.Contains(got, "nvidia.com/mig.config=custom is in no file that could be read, and not all could") ||
		!strings.Contains(got, "none of its configs could be read here: ") {
		t.Errorf("error %v\n%s", err, got)
	}
}

// Unset alone, the strategy would be none where no config of the device plugin says another.
func TestMigrateUnsetsTheStrategyOnlyWhereAConfigSaysOne(t *testing.T) {
	for name, row := range map[string]struct {
		spec, want string
		patches    bool
	}{
		"no config":             {"mig: {strategy: mixed}", "unset alone, it leaves the device plugin with the strategy none", false},
		"a config without name": {"mig: {strategy: single}, devicePlugin: {config: {name: '', default: ''}}", "first make a ConfigMap with a default config that says flags: {migStrategy: single}", false},
		"a config":              {"mig: {strategy: mixed}, devicePlugin: {config: {name: c}}", "unset it where profiles", true},
		"none":                  {"mig: {strategy: none}", "unset it where profiles", true},
	} {
		file := filepath.Join(t.TempDir(), "policy.yaml")
		if err := os.WriteFile(file, []byte("apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p}\nspec: {"+row.spec+"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := migrates(t, "--dry-run", "-f", file)
		if err != nil || !strings.Contains(got, row.want) || strings.Contains(got, `{"strategy": null}`) != row.patches {
			t.Errorf("%s: error %v\n%s", name, err, got)
		}
	}
}

func TestMigrateNamesTheOverlayOfTheCluster(t *testing.T) {
	for name, row := range map[string]struct{ policy, namespace, labels, want string }{
		"another cluster":     {"cluster-policy", "gpu-operator", "", "overlays/gpu-operator lets"},
		"OpenShift's policy":  {"gpu-cluster-policy", "gpu-operator", "", "overlays/openshift lets"},
		"OpenShift's catalog": {"p", "nvidia-gpu-operator", "", "overlays/openshift lets"},
		"OpenShift's node":    {"p", "gpu-operator", "node.openshift.io/os_id: rhel", "overlays/openshift lets"},
	} {
		file := filepath.Join(t.TempDir(), "list.yaml")
		text := "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: " + row.policy + "}\nspec: {devicePlugin: {config: {name: c}}}\n---\n" +
			"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c, namespace: " + row.namespace + "}\ndata: {a: 'version: v1'}\n---\n" +
			"apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {nvidia.com/gpu.present: 'true', " + row.labels + "}}\n"
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := migrates(t, "--dry-run", "-f", file); err != nil || !strings.Contains(got, row.want) {
			t.Errorf("%s: error %v\n%s", name, err, got)
		}
	}
}
