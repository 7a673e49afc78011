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
		"values-text.yaml": {"MIG config to copy", "three-2g-one-1g-and-4g-3g", "migManager is enabled", "mig.strategy is mixed", "migManager.config.default is all-disabled"},
		"values-map.yaml":  {"1 MIG config to copy", "five-1g-one-2g"},
		"k3s-helmchart.yaml": {
			"1 MIG config to copy", "custom-mig", "devicePlugin.config.name is time-slicing-config-all: ", "devicePlugin.config.default is any: NVIDIA's config manager gives it",
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
