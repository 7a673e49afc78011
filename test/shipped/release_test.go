package shipped_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// releases runs what "make release" does.
func releases(t *testing.T, args ...string) (string, error) {
	t.Helper()
	atFullLength(t, "a release")
	tool, err := binaries.Builder{Log: os.Stderr}.Tool(t.Context(), "./test/release")
	if err != nil {
		t.Fatal(err)
	}
	run := exec.CommandContext(t.Context(), tool, args...)
	run.Dir, run.Env = root, compiling()
	said, err := run.CombinedOutput()
	return string(said), err
}

func TestARelease(t *testing.T) {
	atFullLength(t, "a release")
	crane := pinned(t, "image", "crane")
	out, at := filepath.Join(t.TempDir(), "release"), registry(t, crane)
	platform := runtime.GOOS + "/" + runtime.GOARCH
	if said, err := releases(t, "-version", "v9.8.7", "-out", out, "-image", at+"/gpuslice/gpuslice-agent", "-platforms", platform, "-images", runtime.GOARCH, "-playground=false"); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	has := map[string][]byte{}
	entries, err := os.ReadDir(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if has[e.Name()], err = os.ReadFile(filepath.Join(out, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	plugin := "kubectl-gpuslice_v9.8.7_" + runtime.GOOS + "_" + runtime.GOARCH + ".tar.gz"
	for _, name := range []string{
		"gpuslice-9.8.7.tgz", "gpuslice-agent-v9.8.7.tar", "gpuslice-agent-v9.8.7-linux-" + runtime.GOARCH + ".cdx.json", plugin, "gpuslice.yaml",
		"install.yaml", "install-device-plugin.yaml", "install-gpu-operator.yaml", "install-openshift.yaml", "install-dra.yaml", "NOTES.md",
	} {
		sum := sha256.Sum256(has[name])
		if len(has[name]) == 0 || !strings.Contains(string(has["checksums.txt"]), hex.EncodeToString(sum[:])+"  "+name+"\n") {
			t.Errorf("%s has %d bytes; checksums.txt says\n%s", name, len(has[name]), has["checksums.txt"])
		}
	}
	if len(has) != 12 {
		t.Errorf("there are %d files: %v", len(has), entries)
	}
	namesItsImage(t, has, at)
	holdsThePlugin(t, has, plugin)
	krewTakes(t, out, plugin)
	isPublished(t, crane, out, at)
}

// namesItsImage checks that manifests, notes and chart name the image of the registry, and where they install it by its digest.
func namesItsImage(t *testing.T, has map[string][]byte, at string) {
	t.Helper()
	for name := range places {
		objects(t, string(has[name]))
		if !regexp.MustCompile(`image: ` + at + `/gpuslice/gpuslice-agent:v9\.8\.7@sha256:[0-9a-f]{64}\n`).Match(has[name]) {
			t.Errorf("%s names another image, or no digest", name)
		}
	}
	if notes := string(has["NOTES.md"]); len(notes) > 125_000 || !strings.Contains(notes, at+"/gpuslice/gpuslice-agent:v9.8.7@sha256:") {
		t.Errorf("the notes do not say which image it is, or are more than GitHub takes: %.200s, %d bytes", notes, len(notes))
	}
	chart := untarred(t, has["gpuslice-9.8.7.tgz"])
	if says := chart["gpuslice/Chart.yaml"]; !strings.Contains(says, "version: 9.8.7") || !strings.Contains(says, "appVersion: v9.8.7") {
		t.Errorf("the chart says %s", says)
	}
	if says := chart["gpuslice/values.yaml"]; !strings.Contains(says, `  repository: "`+at+`/gpuslice/gpuslice-agent"`) || !strings.Contains(says, `  digest: "sha256:`) {
		t.Errorf("the chart's values are %s", says)
	}
}

// holdsThePlugin checks krew's manifest against the archive, and runs what is in it.
func holdsThePlugin(t *testing.T, has map[string][]byte, file string) {
	t.Helper()
	var krew struct {
		Spec struct {
			Version   string
			Platforms []struct {
				URI, SHA256, Bin string
				Selector         struct{ MatchLabels map[string]string }
			}
		}
	}
	if err := sigsyaml.Unmarshal(has["gpuslice.yaml"], &krew); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(has[file])
	if p := krew.Spec.Platforms; krew.Spec.Version != "v9.8.7" || len(p) != 1 || p[0].SHA256 != hex.EncodeToString(sum[:]) || !strings.HasSuffix(p[0].URI, "/v9.8.7/"+file) ||
		p[0].Selector.MatchLabels["os"] != runtime.GOOS {
		t.Errorf("krew's manifest: %+v", krew)
	}
	packed := untarred(t, has[file])
	if packed["LICENSE"] == "" {
		t.Error("the plugin's archive has no licence, which krew demands")
	}
	const most = 32_000_000 // bytes; kube-scheduler's allocator of devices, with its CEL, takes 8 million of them
	if size := len(packed[krew.Spec.Platforms[0].Bin]); size > most {
		t.Errorf("the plugin has %d bytes, and may have %d: see what it links again by go tool nm -size -sort size", size, most)
	}
	program := filepath.Join(t.TempDir(), "kubectl-gpuslice")
	if err := os.WriteFile(program, []byte(packed[krew.Spec.Platforms[0].Bin]), 0o700); err != nil {
		t.Fatal(err)
	}
	if said, err := exec.CommandContext(t.Context(), program, "version").CombinedOutput(); err != nil || !strings.Contains(string(said), "v9.8.7") {
		t.Errorf("the plugin says %q, error %v", said, err)
	}
}

func untarred(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	r := tar.NewReader(unzipped)
	for {
		h, err := r.Next()
		if err != nil {
			return all
		}
		var content bytes.Buffer
		if _, err := content.ReadFrom(r); err != nil {
			t.Fatal(err)
		}
		all[h.Name] = content.String()
	}
}

func TestAReleaseIsRefusedBeforeAnythingIsMade(t *testing.T) {
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "old.tar"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for want, args := range map[string][]string{
		"it must be like v1.2.3":   {"-version", "1.2.3", "-out", t.TempDir()},
		"it has files already":     {"-version", "v1.2.3", "-out", full},
		`-version "v1.2-3-gabcde"`: {"-version", "v1.2-3-gabcde", "-out", t.TempDir()},
	} {
		if said, err := releases(t, args...); err == nil || !strings.Contains(said, want) {
			t.Errorf("%v: error %v, want %q in\n%s", args, err, want, said)
		}
	}
}
