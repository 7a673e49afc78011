package shipped_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

func TestMain(m *testing.M) { clustertest.Main(m) }

// atFullLength skips a test in a short run: to compile what it starts takes minutes on a fresh machine, for a few tests.
func atFullLength(t *testing.T, starts string) {
	t.Helper()
	if testing.Short() {
		t.Skipf("%s is compiled at full length (without -short) alone", starts)
	}
}

// openShift is how a chart knows the cluster.
const openShift = "security.openshift.io/v1"

// answersOfHelm is a process with Helm's engine, which tests ask in turn: to start one takes longer than to render the chart.
type answersOfHelm struct {
	mu      sync.Mutex
	ask     *json.Encoder
	answers *json.Decoder
}

var startHelm = sync.OnceValues(func() (*answersOfHelm, error) {
	tool, err := binaries.Builder{Log: os.Stderr}.Helm(context.Background()) // for all tests
	if err != nil {
		return nil, err
	}
	run := exec.Command(filepath.Join(tool, "helm"), "each") // it ends with its input, which ends with the tests
	run.Stderr = os.Stderr
	in, err := run.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := run.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &answersOfHelm{ask: json.NewEncoder(in), answers: json.NewDecoder(out)}, run.Start()
})

// helm has Helm's engine render the chart with values, or lint it, and gives what it prints.
func helm(t *testing.T, do, values string, flags ...string) (string, error) {
	t.Helper()
	atFullLength(t, "Helm's engine")
	process, err := startHelm()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		t.Fatal(err)
	}
	process.mu.Lock()
	defer process.mu.Unlock()
	if err := process.ask.Encode(append([]string{do, "-chart", root + "/deploy/chart", "-values", file}, flags...)); err != nil {
		t.Fatalf("asking helm: %v", err)
	}
	var answer struct{ Said, Error string }
	if err := process.answers.Decode(&answer); err != nil {
		t.Fatalf("helm %s: %v", do, err)
	}
	if answer.Error != "" {
		return answer.Said, fmt.Errorf("helm %s: %s", do, answer.Error)
	}
	return answer.Said, nil
}

func template(t *testing.T, values string, flags ...string) string {
	t.Helper()
	out, err := helm(t, "template", values, flags...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// documents are those of a stream of YAML.
func documents(t *testing.T, text string) (out [][]byte) {
	t.Helper()
	r := yaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(doc)) > 0 {
			out = append(out, doc)
		}
	}
}

// objects are those of a stream of YAML by kind, namespace and name, with their defaults left open. A field that a type does not have
// fails the test.
func objects(t *testing.T, text string) map[string]map[string]any {
	t.Helper()
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	all := map[string]map[string]any{}
	for _, doc := range documents(t, text) {
		o := unstructured.Unstructured{}
		if err := sigsyaml.UnmarshalStrict(doc, &o.Object); err != nil {
			t.Fatalf("%v\n%s", err, doc)
		}
		if o.Object == nil {
			continue // a comment alone
		}
		if object, _, err := strict.Decode(doc, nil, nil); err == nil {
			// The same meaning in the same words: as the type is written.
			if o.Object, err = runtime.DefaultUnstructuredConverter.ToUnstructured(object); err != nil {
				t.Fatal(err)
			}
		} else if o.GroupVersionKind().Group != "monitoring.coreos.com" { // of whose kinds alerts_test.go has the types
			t.Fatalf("%v\n%s", err, doc)
		}
		if strings.HasPrefix(o.GetKind(), "ValidatingAdmissionPolicy") {
			o.SetNamespace("") // kustomize takes them for objects of a namespace, and the API server does not mind
		}
		key := o.GetKind() + " " + o.GetNamespace() + "/" + o.GetName()
		if all[key] != nil {
			t.Errorf("%s is there twice", key)
		}
		all[key] = o.Object
	}
	return all
}

// comparable takes away what a release has and a kustomization has not, and the order of what has none.
func comparable(t *testing.T, all map[string]map[string]any) map[string]map[string]any {
	t.Helper()
	for key, object := range all {
		o := unstructured.Unstructured{Object: object}
		labels := o.GetLabels()
		for _, of := range []string{"app.kubernetes.io/instance", "app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"} {
			delete(labels, of)
		}
		o.SetLabels(labels)
		unstructured.RemoveNestedField(object, "spec", "template", "metadata", "annotations", "checksum/settings")
		if of, found, err := unstructured.NestedMap(object, "spec", "template", "metadata", "annotations"); err == nil && found && len(of) == 0 {
			unstructured.RemoveNestedField(object, "spec", "template", "metadata", "annotations")
		}
		exactly(t, object)
		if strings.HasPrefix(key, "DaemonSet ") {
			sortByName(object, "spec", "template", "spec", "volumes")
			containers, _, err := unstructured.NestedSlice(object, "spec", "template", "spec", "containers")
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range containers {
				sortByName(c.(map[string]any), "volumeMounts") //nolint:errcheck // the type has objects there
			}
			if err := unstructured.SetNestedSlice(object, containers, "spec", "template", "spec", "containers"); err != nil {
				t.Fatal(err)
			}
		}
		data, _, _ := unstructured.NestedStringMap(object, "data") // other kinds have none
		for name, text := range data {
			var meaning any
			if err := sigsyaml.Unmarshal([]byte(text), &meaning); err != nil {
				t.Fatalf("%s, %s: %v", key, name, err)
			}
			same, err := json.Marshal(meaning)
			if err != nil {
				t.Fatal(err)
			}
			data[name] = string(same)
		}
		if data != nil {
			if err := unstructured.SetNestedStringMap(object, data, "data"); err != nil {
				t.Fatal(err)
			}
		}
	}
	return all
}

// byItsName is how the policies of deploy/ know the agents' account; Helm knows its namespace besides.
const byItsName = "request.userInfo.username.matches('^system:serviceaccount:[^:]+:gpuslice-agent$')"

// exactly puts into a policy of deploy/ what the chart's says of the account. Other objects stay as they are.
func exactly(t *testing.T, policy map[string]any) {
	t.Helper()
	conditions, found, err := unstructured.NestedSlice(policy, "spec", "matchConditions")
	if !found || err != nil {
		return
	}
	for _, c := range conditions {
		c := c.(map[string]any) //nolint:errcheck // the type has objects there
		c["expression"] = strings.ReplaceAll(fmt.Sprint(c["expression"]), byItsName, "request.userInfo.username == 'system:serviceaccount:gpuslice:gpuslice-agent'")
	}
	if err := unstructured.SetNestedSlice(policy, conditions, "spec", "matchConditions"); err != nil {
		t.Fatal(err)
	}
}

func sortByName(object map[string]any, path ...string) {
	list, found, err := unstructured.NestedSlice(object, path...)
	if !found || err != nil {
		return
	}
	name := func(of any) string { return fmt.Sprint(of.(map[string]any)["name"]) } //nolint:errcheck // as above
	slices.SortStableFunc(list, func(a, b any) int { return cmp.Compare(name(a), name(b)) })
	if err := unstructured.SetNestedSlice(object, list, path...); err != nil {
		panic(err) // it was read from there
	}
}

// ways are the ways of installing that both the chart and kustomize have.
var ways = map[string]struct {
	values     string
	apis       string
	kube       string // version of the cluster; empty for one that lets no account ask in the name of its node
	overlay    string
	components []string
	settings   bool // the values change the settings, which people of kustomize write into the ConfigMap themselves
}{
	"the chart's own values":    {overlay: "base"},
	"the GPU Operator":          {values: "gpuOperator: {enabled: true}", overlay: "overlays/gpu-operator"},
	"OpenShift":                 {values: "gpuOperator: {enabled: true, namespace: nvidia-gpu-operator}", apis: openShift, overlay: "overlays/openshift"},
	"NVIDIA's device plugin":    {values: "devicePlugin: {enabled: true}", overlay: "overlays/device-plugin"},
	"NVIDIA's DRA driver":       {values: "dra: {enabled: true}", overlay: "overlays/dra"},
	"a runtime class":           {values: "devicePlugin: {enabled: true, runtimeClassName: nvidia}", overlay: "overlays/device-plugin", components: []string{"runtime-class"}},
	"without policies":          {values: "policies: {enabled: false}", overlay: "base", components: []string{"without-policies"}},
	"impersonation":             {kube: "v1.36.0", overlay: "base", components: []string{"impersonation"}},
	"no policy, impersonation":  {values: "policies: {enabled: false}", kube: "v1.37.1", overlay: "base", components: []string{"impersonation", "without-policies"}},
	"assigning by right":        {values: "assignByRight: {enabled: true}", overlay: "base", components: []string{"assign-by-right"}},
	"claims by device":          {values: "deviceTaintRules: {enabled: true}", kube: "v1.37.1", overlay: "base", components: []string{"device-taint-rules", "impersonation"}},
	"a share of the API server": {values: "flowControl: {enabled: true}", overlay: "base", components: []string{"flow-control"}},
	"a Prometheus operator":     {values: "podMonitor: {enabled: true}\nprometheusRule: {enabled: true}\ndashboards: {enabled: true}", overlay: "base", components: []string{"prometheus"}},
	"pods deleted in the end":   {values: "settings: {drain: {afterDeadline: delete}}", overlay: "base", components: []string{"delete-after-deadline"}, settings: true},
	"a second startup taint":    {values: "devicePlugin: {enabled: true}\nsettings: {startupTaint: startup-taint.cluster-autoscaler.kubernetes.io/gpuslice}", overlay: "overlays/device-plugin", components: []string{"startup-taint"}},
	"a reboot by the sentinel":  {values: "settings: {reboot: {policy: delegate}}", overlay: "base", components: []string{"reboot-sentinel"}, settings: true},
}

func TestTheChartIsTheBaseObjectByObject(t *testing.T) {
	for name, way := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			made := objects(t, template(t, "namespace: {create: true}\n"+way.values, "-apis", way.apis, "-kube", cmp.Or(way.kube, "v1.35.4")))
			of := objects(t, build(t, kustomize.Over(way.overlay, way.components...)))
			for by, all := range map[string]map[string]map[string]any{"the chart": made, "kustomize": of} {
				if !slices.Contains(way.components, "without-policies") {
					confined(t, by, all)
				}
			}
			got, want := comparable(t, made), comparable(t, of)
			if len(want) < 10 {
				t.Fatalf("%s has %d objects", way.overlay, len(want))
			}
			if way.settings {
				delete(want, "ConfigMap gpuslice/gpuslice-settings")
				delete(got, "ConfigMap gpuslice/gpuslice-settings")
			}
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("objects (-%s with %v +chart):\n%s", way.overlay, way.components, diff)
			}
		})
	}
}

func TestTheChartHasNoFaultThatHelmFinds(t *testing.T) {
	for name, way := range ways {
		if said, err := helm(t, "lint", way.values); err != nil {
			t.Errorf("%s: %v\n%s", name, err, said)
		}
	}
}

// A value with a mistake is reported before anything is sent to the cluster.
func TestWrongValuesAreRefused(t *testing.T) {
	for _, test := range []struct{ values, kube, want string }{
		{"images: {}", "", "additional properties 'images' not allowed"},
		{"image: {digest: abc}", "", "/image/digest"},
		{"settings: {nodeHeartbeat: soon}", "", "/settings/nodeHeartbeat"},
		{"settings: {drain: {mode: never}}", "", "/settings/drain/mode"},
		{"openshift: yes", "", "/openshift"},
		{"gpuOperator: {enabled: true, configMaps: []}", "", "/gpuOperator/configMaps"},
		{"gpuOperator: {enabled: true}\ndevicePlugin: {enabled: true}", "", "two on one node offer the same GPUs twice"},
		{"dra: {enabled: true}\ndevicePlugin: {enabled: true}", "", "give each GPU out twice"},
		{"profiles: {whole: {sharing: none}}\nsettings: {profiles: {name: other}}", "", "would never be read"},
		{"profiles: {whole: {mig: [{gpus: {all: true}, enabled: maybe}]}}", "", "/profiles/whole/mig/0/enabled"},
		{"profiles: {apiVersion: gpuslice.io/v1alpha1, kind: Profiles, profiles: {}}", "", "/profiles/apiVersion"},
		{"maintenance: {windows: [{days: [Tue], start: '22:00', duration: long}]}", "", "/maintenance/windows/0"},
		{"maintenance: {apiVersion: gpuslice.io/v1alpha1, kind: Maintenance}", "", "at '/maintenance': additional properties"},
		{"migConfigs: [a]", "", "/migConfigs"},
		{"migConfigs: 'version: [v1'", "", "migConfigs: it is no YAML"},
		{"migConfigs: '{version: v2, mig-configs: {}}'", "", "it must have version: v1"},
		{"migConfigs: '{version: v1, mig-configs: {small: {devices: all, mig-enabled: true}}}'", "", "migConfigs: small must be a list"},
		{"migConfigs: '{version: v1, mig-configs: {small: [{devices: all, mig-enabled: true, mig-device: {}}]}}'", "", "small has a rule with mig-device, and"},
		{"migConfigs: '{version: v1, mig-configs: {small: [{mig-enabled: yes please}]}}'", "", "each rule of small must say devices"},
		{"settings: {migConfigMap: {name: mine}}", "", "migConfigs: settings.migConfigMap names another ConfigMap or key"},
		{"settings: {migConfigMap: {key: mine}}", "", "migConfigs: settings.migConfigMap names another ConfigMap or key"},
		{"profiles: {whole: {sharing: none}}\nsettings: {profiles: {namespace: other}}", "", "settings.profiles.namespace: the agents may read ConfigMaps of the release's namespace gpuslice only"},
		{"settings: {maintenance: {namespace: other}}", "", "settings.maintenance.namespace"},
		{"migConfigs: ''\nsettings: {migConfigMap: {namespace: other}}", "", "settings.migConfigMap.namespace"},
		{"settings: {devicePlugin: {configMap: {namespace: other}}}", "", "settings.devicePlugin.configMap.namespace"},
		{"settings: {devicePlugin: {configFile: /etc/nvidia/config.yaml}}", "", "/etc/nvidia/config.yaml is not below /var/lib/gpuslice/device-plugin"},
		{"settings: {devicePlugin: {configFile: /var/lib/gpuslice/device-plugin/../x}}", "", "is not below /var/lib/gpuslice/device-plugin"},
		{"devicePlugin: {enabled: true}\nsettings: {devicePlugin: {configFile: /var/lib/gpuslice/device-plugin/x}}", "", "the pods of devicePlugin.enabled read"},
		{"settings: {reboot: {policy: delegate, sentinel: /run/reboot-required}}", "", "/run/reboot-required is not below /run/host"},
		{"podLabels: {app.kubernetes.io/name: other}", "", "podLabels: the chart sets app.kubernetes.io/name itself"},
		{"podAnnotations: {checksum/settings: none}", "", "podAnnotations: the chart sets"},
		{"podMonitor: {labels: {helm.sh/chart: mine}}", "", "podMonitor.labels: the chart sets helm.sh/chart itself"},
		{"settings: null", "", "missing property 'settings'"},
		{"", "v1.29.14", "set it to false, and read deploy/SECURITY.md"},
		{"settings: {podAccess: impersonation}", "v1.35.4", "which came with 1.36: set it to auto"},
		{"settings: {podAccess: policy}\npolicies: {enabled: false}", "", "policy takes policies.enabled"},
		{"settings: {podAccess: any}", "", "/settings/podAccess"},
		{"settings: {startupTaint: nvidia.com/gpu}", "", "/settings/startupTaint"},
		{"assignByRight: {enabled: true}\npolicies: {enabled: false}", "v1.29.14", "assignByRight.enabled"},
		{"deviceTaintRules: {enabled: true}", "v1.36.4", "deviceTaintRules.enabled"},
		{"settings: {drain: {fence: devices}}", "", "settings.drain.fence: devices takes deviceTaintRules.enabled"},
		{"settings: {health: {deviceTaint: NoSchedule}}", "", "settings.health.deviceTaint takes deviceTaintRules.enabled"},
		{"flowControl: {enabled: true}\npolicies: {enabled: false}", "v1.28.15", "flowControl.enabled"},
		{"", "v1.27.16", "the chart is for Kubernetes >=1.28.0-0"},
	} {
		flags := []string{"-kube", cmp.Or(test.kube, "v1.37.1")}
		if out, err := helm(t, "template", test.values, flags...); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q on %q: error %v, want %q\n%.200s", test.values, test.kube, err, test.want, out)
		}
	}
}

// A null takes a value of the chart away. It is refused by the schema, or works: an error of the template's language helps no one.
func TestANullIsRefusedOrWorks(t *testing.T) {
	said, err := helm(t, "nulls", "devicePlugin: {enabled: true}\npodMonitor: {enabled: true}\nprometheusRule: {enabled: true}\ndashboards: {enabled: true}")
	if err != nil {
		t.Fatal(err)
	}
	works, refused := 0, 0
	for line := range strings.Lines(said) {
		switch path, result, found := strings.Cut(strings.TrimSpace(line), ": "); {
		case !found:
			t.Fatalf("helm nulls says %q", line)
		case result == "works":
			works++
		case strings.Contains(result, "specifications of the schema"):
			refused++
		default:
			t.Errorf("%s: null gives %s", path, result)
		}
	}
	if works < 50 || refused < 30 {
		t.Errorf("%d nulls work and %d are refused", works, refused)
	}
}

// A release may be in the operator's own namespace: of two roles of one name there the API server would have one, and Helm refuses both.
func TestAReleaseInTheOperatorsNamespaceHasEachObjectOnce(t *testing.T) {
	all := objects(t, template(t, "gpuOperator: {enabled: true}", "-namespace", "gpu-operator")) // which fails for what is there twice
	for _, kind := range []string{"Role", "RoleBinding"} {
		for _, name := range []string{"gpuslice-agent", "gpuslice-agent-gpu-operator"} {
			if all[kind+" gpu-operator/"+name] == nil {
				t.Errorf("there is no %s %s, but %v", kind, name, slices.Sorted(maps.Keys(all)))
			}
		}
	}
}

// The role is of no use elsewhere than where the operator is, and Helm gives up at a namespace that is not there.
func TestTheChartFindsTheNamespaceOfTheGPUOperator(t *testing.T) {
	for _, test := range []struct{ values, apis, there, want string }{
		{"", "", "", "gpu-operator"},
		{"", openShift, "", "nvidia-gpu-operator"},
		{"", "", "kube-system,nvidia-gpu-operator", "nvidia-gpu-operator"},
		{"", "", "kube-system,gpu-operator,nvidia-gpu-operator", "gpu-operator"},
		{"", openShift, "kube-system,gpu-operator,nvidia-gpu-operator", "nvidia-gpu-operator"},
		{"", openShift, "kube-system,gpu-operator", "gpu-operator"},
		{", namespace: gpus", openShift, "kube-system,gpu-operator", "gpus"},
	} {
		all := objects(t, template(t, "gpuOperator: {enabled: true"+test.values+"}", "-apis", test.apis, "-there", test.there))
		if all["Role "+test.want+"/gpuslice-agent-gpu-operator"] == nil {
			t.Errorf("%+v: there is no role in %s, but %v", test, test.want, slices.Sorted(maps.Keys(all)))
		}
		settings, err := json.Marshal(all["ConfigMap gpuslice/gpuslice-settings"])
		if err != nil || !strings.Contains(string(settings), "- "+test.want+`\n`) {
			t.Errorf("%+v: the agents do not look for the plugin in %s: %s (%v)", test, test.want, settings, err)
		}
	}
	said, err := helm(t, "template", "gpuOperator: {enabled: true}", "-there", "kube-system")
	if err == nil || !strings.Contains(err.Error(), "gpuOperator.namespace: there is no namespace gpu-operator and no nvidia-gpu-operator") {
		t.Errorf("without an operator: %v\n%s", err, said)
	}
}

// Helm stores its release in the namespace first: the chart can make it only where none is stored.
func TestHelmInstallSaysThatItCannotMakeTheNamespace(t *testing.T) {
	said, err := helm(t, "template", "namespace: {create: true}", "-there", "kube-system")
	if err == nil || !strings.Contains(err.Error(), "namespace.create: Helm stores its release in the namespace gpuslice") {
		t.Errorf("%v\n%s", err, said)
	}
	if all := objects(t, template(t, "namespace: {create: true}")); all["Namespace /gpuslice"] == nil {
		t.Errorf("helm template makes no namespace, but %v", slices.Sorted(maps.Keys(all)))
	}
}

// People who keep MIG configs in a ConfigMap of their own have the chart make none.
func TestAConfigMapOfOnesOwnHasMIGConfigs(t *testing.T) {
	all := objects(t, template(t, "migConfigs: ''\nsettings: {migConfigMap: {name: mine, key: mig.yaml}}"))
	if all["ConfigMap gpuslice/gpuslice-mig-configs"] != nil {
		t.Error("the chart makes a ConfigMap that is never read")
	}
}

// What confines an agent to the pods of its node is chosen by the version of the cluster, or by people.
func TestTheChartChoosesWhatConfinesAnAgentToItsPods(t *testing.T) {
	for _, test := range []struct {
		values, kube   string
		asNode, policy bool
	}{
		{"", "v1.35.4", false, true},
		{"", "v1.36.0-gke.1", true, true},
		{"", "v1.37.1", true, true},
		{"policies: {enabled: false}", "v1.28.0", false, false},
		{"policies: {enabled: false}", "v1.37.1", true, false},
		{"settings: {podAccess: policy}", "v1.37.1", false, true},
		{"settings: {podAccess: rbac}", "v1.37.1", false, false},
		{"settings: {podAccess: impersonation}", "v1.37.1", true, true},
	} {
		all := objects(t, template(t, test.values, "-kube", test.kube))
		role := fmt.Sprint(all["ClusterRole /gpuslice-agent-pods"]["rules"])
		if asNode := strings.Contains(role, "impersonate:associated-node"); asNode != test.asNode || asNode == strings.Contains(role, "[get list watch]") {
			t.Errorf("%q on %s: the rules are %s", test.values, test.kube, role)
		}
		policy := all["ValidatingAdmissionPolicy /gpuslice-agent-evictions"]
		if (policy != nil) != test.policy || policy != nil && strings.Contains(fmt.Sprint(policy), "system:node:") != test.asNode {
			t.Errorf("%q on %s: the policy for evictions is %v", test.values, test.kube, policy)
		}
	}
}

// What people put in comes out where it belongs, and the agent's own reader takes it.
func TestValuesComeIntoTheObjects(t *testing.T) {
	const values = `
image: {repository: registry.example.com/agent, digest: "sha256:` + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" + `", pullPolicy: Always}
imagePullSecrets: [{name: pull}]
serviceAccount: {name: slicer, annotations: {a: b}}
networkPolicy: {namespaces: [metrics]}
podAnnotations: {x: "1"}
podLabels: {team: gpus}
nodeSelector: {pool: a}
extraEnv: [{name: GOGC, value: "50"}]
podMonitor: {enabled: true, labels: {release: prom}}
prometheusRule: {enabled: true, labels: {release: prom}}
dashboards: {enabled: true, labels: {board: "yes"}}
settings: {nodeHeartbeat: 7m, devicePlugin: {defaultConfig: shared}}
gpuOperator: {enabled: true, namespace: gpus, configMaps: [shares]}
profiles: {whole: {mig: [{gpus: {all: true}, enabled: false}], sharing: none}}
maintenance: {windows: [{days: [Tue], start: "22:00", duration: 6h, timeZone: Europe/Berlin}]}
`
	all := objects(t, template(t, values, "-namespace", "slices"))
	text := func(key string) string {
		object, ok := all[key]
		if !ok {
			t.Fatalf("there is no %s, but %v", key, slices.Sorted(maps.Keys(all)))
		}
		out, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	for key, wants := range map[string][]string{
		"DaemonSet slices/gpuslice-agent": {
			`"image":"registry.example.com/agent@sha256:0123456789abcdef`, `"imagePullPolicy":"Always"`, `"imagePullSecrets":[{"name":"pull"}]`,
			`"serviceAccountName":"slicer"`, `"x":"1"`, `"team":"gpus"`, `"nodeSelector":{"pool":"a"}`, `{"name":"GOGC","value":"50"}`,
		},
		"ServiceAccount slices/slicer":                 {`"a":"b"`},
		"ClusterRoleBinding /gpuslice-agent":           {`"name":"slicer","namespace":"slices"`},
		"Role gpus/gpuslice-agent-gpu-operator":        {`"resourceNames":["shares"]`},
		"RoleBinding gpus/gpuslice-agent-gpu-operator": {`"name":"slicer","namespace":"slices"`},
		"NetworkPolicy slices/gpuslice-agent":          {`"values":["metrics"]`},
		"PodMonitor slices/gpuslice-agent":             {`"release":"prom"`},
		"PrometheusRule slices/gpuslice":               {`"release":"prom"`, `{{ $labels.node }}`},
		"ConfigMap slices/gpuslice-dashboards":         {`"board":"yes"`, `{{reason}}`},
		"ConfigMap slices/gpuslice-profiles":           {`whole:`},
		"ConfigMap slices/gpuslice-maintenance":        {`windows:`},
		"ConfigMap slices/gpuslice-settings":           {`defaultConfig: shared`},
	} {
		for _, want := range wants {
			if got := text(key); !strings.Contains(got, want) {
				t.Errorf("%s has no %s:\n%s", key, want, got)
			}
		}
	}
	confined(t, "the chart", all)
	if conditions := text("ValidatingAdmissionPolicy /gpuslice-agent-nodes"); !strings.Contains(conditions, "'system:serviceaccount:slices:slicer'") {
		t.Errorf("the policies are for another account: %s", conditions)
	}
	readByTheAgent(t, all)
}

// confined fails the test unless there are policies, and each names the account that the agent's pods have. Of a policy for another account
// no one would notice that it never acts.
func confined(t *testing.T, by string, all map[string]map[string]any) {
	t.Helper()
	account, policies := "", 0
	for key, object := range all {
		if of := (unstructured.Unstructured{Object: object}); of.GetKind() == "DaemonSet" && of.GetName() == "gpuslice-agent" {
			name, _, err := unstructured.NestedString(object, "spec", "template", "spec", "serviceAccountName")
			if err != nil || name == "" {
				t.Fatalf("%s: %s has the account %q: %v", by, key, name, err)
			}
			account = "system:serviceaccount:" + of.GetNamespace() + ":" + name
		}
	}
	for key, object := range all {
		if strings.HasPrefix(key, "ValidatingAdmissionPolicy /gpuslice-agent-") {
			policies++
			conditions := fmt.Sprint(object["spec"].(map[string]any)["matchConditions"]) //nolint:errcheck // the type has an object there
			if !strings.Contains(conditions, "'"+account+"'") && (!strings.HasSuffix(account, ":gpuslice-agent") || !strings.Contains(conditions, byItsName)) {
				t.Errorf("%s: %s goes by another account than %s, that of the agent's pods: %s", by, key, account, conditions)
			}
		}
	}
	if account == "" || policies < 6 {
		t.Errorf("%s: there are %d policies for %q", by, policies, account)
	}
}

// readByTheAgent has the agent's own reader take what the chart has put into ConfigMaps of the namespace slices.
func readByTheAgent(t *testing.T, all map[string]map[string]any) {
	t.Helper()
	read := func(name, key string) []byte {
		data, _, err := unstructured.NestedStringMap(all["ConfigMap slices/"+name], "data")
		if err != nil {
			t.Fatal(err)
		}
		return []byte(data[key])
	}
	settings, err := config.Parse(read("gpuslice-settings", "settings.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for of, namespace := range map[string]string{
		"profiles": settings.Profiles.Namespace, "migConfigMap": settings.MIGConfigMap.Namespace, "maintenance": settings.Maintenance.Namespace,
		"devicePlugin.configMap": settings.DevicePlugin.ConfigMap.Namespace,
	} {
		if namespace != "" { // which is the agent's own
			t.Errorf("settings: %s is looked for in %q", of, namespace)
		}
	}
	if n := settings.DevicePlugin.Namespaces; !slices.Contains(n, "gpus") || slices.Contains(n, "gpuslice") {
		t.Errorf("settings: the device plugin is looked for in %v", n)
	}
	if _, err := catalog.ParseProfiles(read("gpuslice-profiles", "profiles.yaml")); err != nil {
		t.Error(err)
	}
	if _, err := maintenance.Parse(read("gpuslice-maintenance", "maintenance.yaml")); err != nil {
		t.Error(err)
	}
}

// modes are the components that set the cluster's default, each with an overlay openshift-…, by what each of two GPUs is offered as.
var modes = map[string]string{
	"default": "single", "mig-single": "single", "mig-mixed": "mixed",
	"time-sliced-2": "single time-slicing 2", "time-sliced-4": "single time-slicing 4", "mps-2": "none mps 2", "mps-4": "none mps 4",
}

// What they do on a node is shown by test/node.
func TestEachOverlayOfSharingSetsTheDefaultAndNothingElse(t *testing.T) {
	base := comparable(t, objects(t, build(t, kustomize.Over("overlays/openshift"))))
	for name, want := range modes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := comparable(t, objects(t, build(t, kustomize.Over("overlays/openshift-"+name))))
			changed := map[string]bool{}
			for key := range got {
				changed[key] = !gocmp.Equal(base[key], got[key])
			}
			maps.DeleteFunc(changed, func(_ string, is bool) bool { return !is })
			if diff := gocmp.Diff(map[string]bool{"ConfigMap gpuslice/device-plugin-config": true, "ConfigMap gpuslice/gpuslice-settings": true}, changed); diff != "" || len(got) != len(base)+1 {
				t.Errorf("objects that differ from those of overlays/openshift (-want +got):\n%s", diff)
			}
			read := func(name, key string) []byte {
				data, _, err := unstructured.NestedStringMap(got["ConfigMap gpuslice/"+name], "data")
				if err != nil {
					t.Fatal(err)
				}
				return []byte(data[key])
			}
			settings, err := config.Parse(read("gpuslice-settings", "settings.yaml"))
			if err != nil {
				t.Fatal(err)
			}
			if p := settings.DevicePlugin; p.DefaultConfig != "default" || p.ConfigMap.Name != "device-plugin-config" || p.ConfigMap.Namespace != "" {
				t.Errorf("the agent's default is %q of ConfigMap %s/%s", p.DefaultConfig, p.ConfigMap.Namespace, p.ConfigMap.Name)
			}
			before, err := config.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n" +
				"migConfigMap: {name: gpuslice-mig-configs}\nreboot: {sentinel: /run/host/reboot-required}\n"))
			if err != nil {
				t.Fatal(err)
			}
			before.DevicePlugin.DefaultConfig = "default"
			if fmt.Sprint(before) != fmt.Sprint(settings) {
				t.Errorf("settings beside the defaults:\n%v\n%v", settings, before)
			}
			plugin, err := deviceplugin.Parse(read("device-plugin-config", "default"))
			if err != nil {
				t.Fatal(err)
			}
			said := string(cmp.Or(plugin.MIGStrategy, config.MIGStrategyNone))
			if n := plugin.Sharing.Replicas["nvidia.com/gpu"]; n > 0 {
				said += fmt.Sprintf(" %s %d", plugin.Sharing.Strategy, n)
			}
			if said != want {
				t.Errorf("its config says %q, want %q", said, want)
			}
		})
	}
}

// A field that the API server does not know, or a value that it does not take, is found here and not at the first user's.
func TestTheAPIServerTakesEveryManifest(t *testing.T) {
	c := clustertest.Start(t)
	apply := func(text string, flags ...string) string {
		run := exec.CommandContext(t.Context(), c.Kubectl(), append([]string{"--kubeconfig", c.AdminKubeconfig(), "apply", "-f", "-"}, flags...)...)
		run.Stdin = strings.NewReader(text)
		said, err := run.CombinedOutput()
		if err != nil {
			t.Errorf("kubectl apply: %v\n%s", err, said)
		}
		return string(said)
	}
	for _, name := range []string{"gpuslice", "gpu-operator", "nvidia-gpu-operator"} { // in which objects are, and which a dry run does not make
		apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + name + "}\n")
	}
	known := map[string]bool{} // each once: most are the same in each way
	for _, way := range ways {
		made := build(t, kustomize.Over(way.overlay, way.components...))
		if !testing.Short() {
			made += "\n---\n" + template(t, way.values, "-apis", way.apis)
		}
		for _, doc := range documents(t, made) {
			known[string(doc)] = known[string(doc)] || !bytes.Contains(doc, []byte("apiVersion: monitoring.coreos.com/v1\n")) // this cluster has no such types
		}
	}
	maps.DeleteFunc(known, func(_ string, takes bool) bool { return !takes })
	said := apply(strings.Join(slices.Sorted(maps.Keys(known)), "\n---\n"), "--dry-run=server", "--validate=strict")
	if strings.Contains(said, "Warning") || strings.Count(said, "\n") < 30 {
		t.Errorf("kubectl warns, or takes little:\n%s", said)
	}
}
