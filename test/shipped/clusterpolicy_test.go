package shipped_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// NVIDIA's config manager ends where the default is no key of the ConfigMap ("specified config … does not exist"), and then no device plugin
// starts on any node without a label.
func TestThePatchesOfThePageLeaveADefaultWithItsConfigMap(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "deploy/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	command := regexp.MustCompile(`(?m)^kubectl patch clusterpolicies\.nvidia\.com/cluster-policy --type merge --patch-file (\S+)$`)
	said := command.FindAllStringSubmatch(string(page), -1)
	if len(said) != 2 {
		t.Fatalf("deploy/README.md patches the ClusterPolicy %d times, by %s", len(said), command)
	}
	always, withoutName := said[0][1], said[1][1]
	for name, test := range map[string]struct {
		config string // devicePlugin.config of the ClusterPolicy before
		files  []string
		want   map[string]any
	}{
		"a guide's":        {"{default: tesla-t4, name: time-slicing-config}", []string{always}, map[string]any{"default": "tesla-t4", "name": "time-slicing-config"}},
		"one without":      {"{name: shares}", []string{always}, map[string]any{"name": "shares"}},
		"Helm's own":       {`{default: "", name: ""}`, []string{withoutName, always}, map[string]any{"name": "device-plugin-config"}},
		"none":             {"null", []string{withoutName, always}, map[string]any{"name": "device-plugin-config"}},
		"a default alone":  {"{default: tesla-t4}", []string{withoutName, always}, map[string]any{"name": "device-plugin-config"}},
		"the other way on": {"null", []string{always, withoutName}, map[string]any{"name": "device-plugin-config"}},
	} {
		t.Run(name, func(t *testing.T) {
			policy := "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: cluster-policy}\nspec: {migManager: {enabled: true}, devicePlugin: {config: " + test.config + "}}\n"
			for _, file := range test.files {
				policy = patched(t, policy, file)
			}
			var got unstructured.Unstructured
			if err := sigsyaml.Unmarshal([]byte(policy), &got.Object); err != nil {
				t.Fatal(err)
			}
			config, _, err := unstructured.NestedMap(got.Object, "spec", "devicePlugin", "config")
			if err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(test.want, config); diff != "" {
				t.Errorf("devicePlugin.config after %v (-want +got):\n%s", test.files, diff)
			}
			if on, found, err := unstructured.NestedBool(got.Object, "spec", "migManager", "enabled"); on || !found || err != nil {
				t.Errorf("after %v the MIG manager is not off: %v", test.files, err)
			}
		})
	}
}

// patched is the object as kubectl makes it by the file.
func patched(t *testing.T, object, file string) string {
	t.Helper()
	kube, err := binaries.Builder{Log: os.Stderr}.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	of := filepath.Join(t.TempDir(), "object.yaml")
	if err := os.WriteFile(of, []byte(object), 0o600); err != nil {
		t.Fatal(err)
	}
	run := exec.CommandContext(t.Context(), filepath.Join(kube, "kubectl"), "patch", "--local", "-f", of, "--type", "merge", "--patch-file", filepath.Join(root, file), "-o", "yaml")
	out, err := run.Output()
	if err != nil {
		t.Fatalf("kubectl patch with %s: %v\n%s", file, err, out)
	}
	return string(out)
}
