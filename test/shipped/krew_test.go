package shipped_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// krewTakes has krew's own programs check the manifest of a release, install the plugin by it, and refuse another archive.
func krewTakes(t *testing.T, release, archive string) {
	t.Helper()
	home := t.TempDir()
	tool := func(args ...string) (string, error) {
		cmd := exec.CommandContext(t.Context(), "go", append([]string{"tool", "-modfile=test/krew/go.mod"}, args...)...)
		cmd.Dir = root
		cmd.Env = compiling("KREW_ROOT="+home, "KREW_NO_UPGRADE_CHECK=1")
		said, err := cmd.CombinedOutput()
		return string(said), err
	}
	manifest := filepath.Join(release, "gpuslice.yaml")
	if said, err := tool("validate-krew-manifest", "-manifest", manifest, "-skip-install"); err != nil {
		t.Errorf("krew refuses the manifest: %v\n%s", err, said)
	}
	if said, err := tool("krew", "install", "--manifest", manifest, "--archive", filepath.Join(release, archive)); err != nil {
		t.Errorf("krew does not install the plugin: %v\n%s", err, said)
	}
	said, err := exec.CommandContext(t.Context(), filepath.Join(home, "bin", "kubectl-gpuslice"), "version").CombinedOutput()
	if err != nil || strings.TrimSpace(string(said)) != "v9.8.7" {
		t.Errorf("the plugin that krew has installed says %q: %v", said, err)
	}
	home = t.TempDir() // where it is not installed already
	other := filepath.Join(home, "other.tar.gz")
	text, err := os.ReadFile(filepath.Join(release, archive))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(other, append(text, 0), 0o600); err != nil {
		t.Fatal(err)
	}
	if said, err := tool("krew", "install", "--manifest", manifest, "--archive", other); err == nil || !strings.Contains(said, "checksum") {
		t.Errorf("krew installs another archive than the manifest's: %v\n%s", err, said)
	}
}
