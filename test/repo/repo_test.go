// Package repo_test checks what neither the compiler nor the linter does: that what looks or decides writes nothing, that the manifests
// in deploy/ can be applied and grant what the code calls, that links lead somewhere, and that nothing of one machine or one registry is
// written into the project.
//
// It knows the repository's layout and no behaviour of the agent.
package repo_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	root   = "../.."                         // the top of the repository, as seen from this package
	module = "github.com/gpuslice/gpuslice/" // before the path of each of its packages
)

// nvidiasRegistry is where NVIDIA publishes its images. In parts, so that TestNothingNamesARegistryOrABuildMachine does not find it.
const nvidiasRegistry = "nvcr" + ".io/nvidia/"

func TestTopLevelHoldsOnlyWhatBelongsThere(t *testing.T) {
	allowed := []string{
		"cmd", "agent", "nvml", "drain", "config", "deploy", "test",
		"Makefile", "Dockerfile", "go.mod", "go.sum", "README.md", "LICENSE",
		"bin", // what make build writes; git ignores it
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && !slices.Contains(allowed, e.Name()) {
			t.Errorf("%s: the top level is for people who use the project; put it into one of %s", e.Name(), strings.Join(allowed[:7], ", "))
		}
	}
}

func TestNothingNamesARegistryOrABuildMachine(t *testing.T) {
	// Written in parts, so that this file does not find itself.
	forbidden := map[string]*regexp.Regexp{
		"name images without a registry, people bring their own; but NVIDIA's are where NVIDIA publishes them": regexp.MustCompile(
			`\b(docker\.` + `io|ghcr\.` + `io|gcr\.` + `io|nvcr\.` + `io|quay\.` + `io|registry\.k8s\.` + `io)\b`),
		"a path of one machine": regexp.MustCompile(
			`(^|[\s"'=(:])/(ro` + `ot|ho` + `me|Use` + `rs)/\w`),
		"where modules come from is each machine's own setting": regexp.MustCompile(
			`GOPR` + `OXY=|proxy\.golang\.` + `org|GOSU` + `MDB=`),
	}
	for _, path := range files(t) {
		if filepath.Base(path) == "go.sum" {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			line = strings.ReplaceAll(line, nvidiasRegistry, "")
			for why, pattern := range forbidden {
				if found := pattern.FindString(line); found != "" {
					t.Errorf("%s:%d: %q: %s", path, i+1, strings.TrimSpace(found), why)
				}
			}
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// files lists the repository's files, without what git keeps and what make build writes.
func files(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == ".git" || path == filepath.Join(root, "bin")) {
			return fs.SkipDir
		}
		if d.Type().IsRegular() {
			out = append(out, path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
