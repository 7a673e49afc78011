package repo_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// module is the path of the root module, before each of its packages.
const module = "github.com/gpuslice/gpuslice/"

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(root + "/" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestTheImageIsBuiltFromEveryPackageOfTheAgent(t *testing.T) {
	context := map[string]bool{}
	for line := range strings.Lines(read(t, ".dockerignore")) {
		if dir, ok := strings.CutPrefix(strings.TrimSpace(line), "!"); ok {
			context[dir] = true
		}
	}
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/gpuslice-agent")
	list.Dir = root
	packages, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(packages)) {
		path, ours := strings.CutPrefix(strings.TrimSpace(pkg), module)
		if dir, _, _ := strings.Cut(path, "/"); ours && !context[dir] {
			t.Errorf("gpuslice-agent imports %s, which .dockerignore leaves out", path)
		}
	}
}

func TestTheImageIsBuiltByTheGoThatTheModuleAsksFor(t *testing.T) {
	wants := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))
	image := regexp.MustCompile(`(?m)^ARG BUILD_IMAGE=golang:(\d+\.\d+)-`).FindStringSubmatch(read(t, "Dockerfile"))
	if wants == nil || image == nil || wants[1] != image[1] {
		t.Errorf("go.mod asks for Go %q, the Dockerfile's image has %q", wants, image)
	}
}
