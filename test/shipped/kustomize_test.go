package shipped_test

import (
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

// deploy is the folder of what kustomize installs.
var deploy = filepath.Join(root, "deploy")

// build builds a kustomization of deploy/ that nothing is wrong with.
func build(t *testing.T, files kustomize.Files) string {
	t.Helper()
	out, err := kustomize.Build(t, deploy, files)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// operator is the file by which the component gpu-operator knows where the operator is.
func operator(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy/overlays/gpu-operator/operator.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// components are those of deploy/, the defaults of sharing aside but for one: they take each other's place.
func components(t *testing.T) (all []string) {
	t.Helper()
	folders, err := os.ReadDir(filepath.Join(root, "deploy/components"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range folders {
		if _, isMode := modes[f.Name()]; (!isMode || f.Name() == "mps-2") && f.Name() != "default-config" {
			all = append(all, f.Name())
		}
	}
	if len(all) < 10 {
		t.Fatalf("deploy/components has %v", all)
	}
	return all
}

// Whoever takes a component more does not look for the place in the list where it does no harm.
func TestComponentsGoTogetherInEveryOrder(t *testing.T) {
	all := components(t)
	for i, first := range all {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			for _, second := range all[i+1:] {
				var made []map[string]map[string]any
				for _, order := range [][]string{{first, second}, {second, first}} {
					files := kustomize.Over("overlays/device-plugin", order...)
					if slices.Contains(order, "gpu-operator") {
						files["operator.yaml"] = operator(t)
						files["kustomization.yaml"] = strings.Replace(files["kustomization.yaml"], "device-plugin]", "device-plugin, operator.yaml]", 1)
					}
					made = append(made, comparable(t, objects(t, build(t, files))))
				}
				if diff := gocmp.Diff(made[0], made[1]); diff != "" {
					t.Errorf("%s and %s (-in this order +in the other):\n%s", first, second, diff)
				}
			}
		})
	}
}

// Of two defaults for the cluster neither is the right one.
func TestTwoDefaultsOfSharingAreRefused(t *testing.T) {
	for _, order := range [][]string{{"mig-mixed", "time-sliced-4"}, {"time-sliced-4", "mig-mixed"}} {
		if _, err := kustomize.Build(t, deploy, kustomize.Over("base", order...)); err == nil || !strings.Contains(err.Error(), "device-plugin-config") {
			t.Errorf("%v: error %v, want one that names the ConfigMap", order, err)
		}
	}
}

// The policies for agents may be left out; who may ask for which profile is another matter, and so is what can have pods of all nodes deleted.
func TestPoliciesOfComponentsStayWithoutTheAgentsPolicies(t *testing.T) {
	for component, policy := range map[string]string{"assign-by-right": "gpuslice-assign", "device-taint-rules": "gpuslice-device-taint-rules"} {
		for _, order := range [][]string{{component, "without-policies"}, {"without-policies", component}} {
			var left []string
			for key := range objects(t, build(t, kustomize.Over("base", order...))) {
				if strings.HasPrefix(key, "ValidatingAdmissionPolicy") {
					left = append(left, key)
				}
			}
			slices.Sort(left)
			if diff := gocmp.Diff([]string{"ValidatingAdmissionPolicy /" + policy, "ValidatingAdmissionPolicyBinding /" + policy}, left); diff != "" {
				t.Errorf("%v (-want +got):\n%s", order, diff)
			}
		}
	}
}

// An overlay may say "namespace:". What stayed behind would confine no one, or look where nothing is.
func TestAnotherNamespaceTakesEverythingAlong(t *testing.T) {
	text := "namespace: elsewhere\nresources: [DEPLOY/overlays/device-plugin]\ncomponents:\n"
	for _, c := range components(t) {
		if c != "gpu-operator" && c != "without-policies" {
			text += "  - DEPLOY/components/" + c + "\n"
		}
	}
	for name, test := range map[string]struct {
		files     kustomize.Files
		namespace string
		operator  string // its namespace
	}{
		"components":                    {files: kustomize.Files{"kustomization.yaml": text}, namespace: "elsewhere"},
		"the GPU Operator":              {files: pairOfThePage(t, "gpu-operator", "elsewhere"), namespace: "elsewhere", operator: "gpu-operator"},
		"the GPU Operator of OpenShift": {files: pairOfThePage(t, "openshift", "elsewhere"), namespace: "elsewhere", operator: "nvidia-gpu-operator"},
		"the GPU Operator's own":        {files: pairOfThePage(t, "gpu-operator", "gpu-operator"), namespace: "gpu-operator", operator: "gpu-operator"},
		"the GPU Operator's, OpenShift": {files: pairOfThePage(t, "openshift", "nvidia-gpu-operator"), namespace: "nvidia-gpu-operator", operator: "nvidia-gpu-operator"},
	} {
		t.Run(name, func(t *testing.T) {
			all := objects(t, build(t, test.files))
			confined(t, "kustomize", all)
			theirs := 0
			for key, object := range all {
				if strings.HasSuffix(key, " "+test.operator+"/gpuslice-agent-gpu-operator") { // where the operator is
					theirs++
					unstructured.RemoveNestedField(object, "metadata", "namespace")
				}
				isElsewhere(t, test.namespace, key, object)
			}
			if test.operator != "" && theirs != 2 {
				t.Errorf("%d objects are where the operator is, want a role and its binding; there are %v", theirs, slices.Sorted(maps.Keys(all)))
			}
			if all["Namespace /"+test.namespace] == nil || all["ServiceAccount "+test.namespace+"/gpuslice-agent"] == nil {
				t.Errorf("there are %v", slices.Sorted(maps.Keys(all)))
			}
			data, _, err := unstructured.NestedStringMap(all["ConfigMap "+test.namespace+"/gpuslice-settings"], "data")
			if err != nil {
				t.Fatal(err)
			}
			settings, err := config.Parse([]byte(data["settings.yaml"]))
			if err != nil {
				t.Fatal(err)
			}
			if at := cmp.Or(settings.Profiles.Namespace, settings.MIGConfigMap.Namespace, settings.Maintenance.Namespace, settings.DevicePlugin.ConfigMap.Namespace); at != "" {
				t.Errorf("the agent looks for its ConfigMaps in %s", at)
			}
		})
	}
}

// pairOfThePage are the two overlays that deploy/README.md has people write for another namespace beside the GPU Operator, with the operator.yaml
// of an overlay, and with each component where the page says that it belongs.
func pairOfThePage(t *testing.T, overlay, namespace string) kustomize.Files {
	t.Helper()
	inner := ofThePage(t, "`deploy/mine/agent/kustomization.yaml`")
	const one = "  - DEPLOY/components/prometheus "
	if !strings.Contains(inner, "\nnamespace: gpus\n") || !strings.Contains(inner, one) {
		t.Fatalf("deploy/README.md has another inner overlay: %s", inner)
	}
	var all string
	for _, c := range components(t) {
		if c != "gpu-operator" && c != "without-policies" && c != "runtime-class" { // which patches overlays/device-plugin
			all += "  - DEPLOY/components/" + c + "\n"
		}
	}
	head, _, _ := strings.Cut(inner, one)
	text, err := os.ReadFile(filepath.Join(root, "deploy/overlays", overlay, "operator.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return kustomize.Files{
		"agent/kustomization.yaml": strings.Replace(head, "\nnamespace: gpus\n", "\nnamespace: "+namespace+"\n", 1) + all,
		"operator.yaml":            string(text),
		"kustomization.yaml":       ofThePage(t, "`deploy/mine/kustomization.yaml`, has a copy of"),
	}
}

// ofThePage is the kustomization of deploy/README.md that follows these words, as build takes it.
func ofThePage(t *testing.T, words string) string {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "deploy/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(page), words)
	_, after, opened := strings.Cut(after, "```yaml\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization")
	text, _, closed := strings.Cut(after, "```\n")
	if !found || !opened || !closed {
		t.Fatalf("deploy/README.md has no kustomization after %q", words)
	}
	return regexp.MustCompile(`(\.\./)+(base|components)`).ReplaceAllString(text, "DEPLOY/$2")
}

// isElsewhere fails the test if something of the object is in another namespace than this one.
func isElsewhere(t *testing.T, want, key string, object map[string]any) {
	t.Helper()
	of := unstructured.Unstructured{Object: object}
	if namespace := of.GetNamespace(); namespace != "" && namespace != want {
		t.Errorf("%s stays behind in %q", key, namespace)
	}
	out, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{`"namespace":"gpuslice"`, "serviceaccount:gpuslice", `namespace: gpuslice`, `- gpuslice\n`} {
		if strings.Contains(string(out), left) {
			t.Errorf("%s says %s: %s", key, left, out)
		}
	}
}

// The operator's role belongs into the operator's namespace. What takes it away from there is refused, and not found out at the first node.
func TestAnotherNamespaceOverTheOperatorsRoleIsRefused(t *testing.T) {
	_, err := kustomize.Build(t, deploy, kustomize.Files{"kustomization.yaml": "namespace: elsewhere\nresources: [DEPLOY/overlays/gpu-operator]\n"})
	if err == nil || !strings.Contains(err.Error(), "ID conflict") || !strings.Contains(err.Error(), "another-namespace-takes-two-overlays") {
		t.Errorf("error %v, want one that says how it goes", err)
	}
}

// The overlay of one's own that deploy/README.md has people write, over each that it names there.
func TestTheOverlayOfThePageRunsTheImageOfTheRegistry(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "deploy/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(page), "`deploy/mine/kustomization.yaml`:\n\n```yaml\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n")
	overlay, _, found := strings.Cut(after, "```\n")
	said, says, _ := strings.Cut(overlay, "  - ../overlays/device-plugin # or ")
	says, end, more := strings.Cut(says, "\n")
	if !found || !more {
		t.Fatalf("deploy/README.md has no overlay to write: %s", after)
	}
	for _, over := range append(strings.Split(says, ", "), "../overlays/device-plugin") {
		text := build(t, kustomize.Files{"kustomization.yaml": said + "  - DEPLOY/" + strings.TrimPrefix(over, "../") + "\n" + end})
		if !strings.Contains(text, "image: registry.example.com/gpuslice/gpuslice-agent:v0.1.0\n") || strings.Contains(text, "image: gpuslice/") {
			t.Errorf("over %s the agents run another image than the registry has", over)
		}
	}
}
