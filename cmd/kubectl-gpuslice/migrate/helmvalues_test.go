package migrate

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Most people have their configs in values of the GPU Operator's chart.
func TestMigrateReadsHelmValues(t *testing.T) {
	for file, want := range map[string][]string{
		"values-text.yaml": {
			"MIG config to copy", "three-2g-one-1g-and-4g-3g", "mig.strategy is mixed", "migManager.config.default is all-disabled",
			"migManager is enabled: two programs that divide the same GPUs undo each other's work; write migManager.enabled: false into the values (line 4), and upgrade the release\n",
		},
		"values-map.yaml": {"1 MIG config to copy", "five-1g-one-2g", "write migManager.enabled: false into the values (line 1), and"},
		"k3s-helmchart.yaml": {
			"1 MIG config to copy", "custom-mig", "write migManager.enabled: false into the values (line 11), and", "; write mig.strategy: null into the values (line 10), and upgrade the release\n", "devicePlugin.config.name is time-slicing-config-all: ", "devicePlugin.config.default is any: NVIDIA's config manager gives it",
		},
	} {
		got, err := migrates(t, "--dry-run", "-f", "testdata/"+file)
		if err != nil {
			t.Errorf("%s: %v", file, err)
		}
		for _, text := range want {
			if !strings.Contains(got, text) {
				t.Errorf("%s: want %q in\n%s", file, text, got)
			}
		}
		if strings.Contains(got, "kubectl patch") {
			t.Errorf("%s: the next upgrade would undo a patch:\n%s", file, got)
		}
	}
}

// Helm writes a ClusterPolicy of its own again.
func TestMigrateNamesTheValuesOfAPolicyThatHelmHasMade(t *testing.T) {
	file := filepath.Join(written(t, map[string]string{
		"policy.yaml": "apiVersion: nvidia.com/v1\nkind: ClusterPolicy\nmetadata: {name: p, labels: {app.kubernetes.io/managed-by: Helm}}\nspec: {mig: {strategy: none}}\n",
	}), "policy.yaml")
	got, err := migrates(t, "--dry-run", "-f", file)
	for _, field := range []string{"migManager.enabled: false", "mig.strategy: null"} {
		if want := "; write " + field + " into the values of the chart too, or the next upgrade of the release undoes the command\n"; err != nil || !strings.Contains(got, want) {
			t.Errorf("error %v, want %q in\n%s", err, want, got)
		}
	}
}

func TestMigrateNamesAFileThatItDidNotRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "application.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: argoproj.io/v1alpha1\nkind: Application\nmetadata: {name: x}\nspec: {source: {helm: {values: x}}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := migrates(t, "--dry-run", "-f", "testdata/values-map.yaml", "-f", file)
	if err == nil || !strings.Contains(err.Error(), "nothing of an installation was found in "+file) || !strings.Contains(got, "five-1g-one-2g") {
		t.Errorf("the error is %v, and it says\n%s", err, got)
	}
}
