package repo_test

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
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

// A tag may be given another image at any time.
func TestTheImageIsBuiltByTheGoThatTheModuleAsksFor(t *testing.T) {
	wants := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))
	image := regexp.MustCompile(`(?m)^ARG BUILD_IMAGE=golang:(\d+\.\d+)\.\d+-\w+@sha256:[0-9a-f]{64}$`).FindStringSubmatch(read(t, "Dockerfile"))
	if wants == nil || image == nil || wants[1] != image[1] {
		t.Errorf("go.mod asks for Go %q, the Dockerfile's image has %q", wants, image)
	}
}

// A program that is tested without a tag by which it is shipped is another program.
func TestTheProgramsAreBuiltByTheSameTagsEverywhere(t *testing.T) {
	makefile := read(t, "Makefile")
	tags := regexp.MustCompile(`(?m)^TAGS := (\S+)$`).FindStringSubmatch(makefile)
	if tags == nil || !regexp.MustCompile(`(?m)^export GOFLAGS := .*-tags=\$\(TAGS\)`).MatchString(makefile) {
		t.Fatal("the Makefile does not hand its TAGS to every go command by GOFLAGS")
	}
	if found := regexp.MustCompile(`(?m)^\t.*\bgo .*-tags\b`).FindString(makefile); found != "" {
		t.Errorf("this line of the Makefile takes the place of the tags in GOFLAGS: %s", found)
	}
	for path, pattern := range map[string]string{
		"Dockerfile":            `go build .*-tags (\S+)`,
		"test/image/compile.go": `"go", "build", .*"-tags", "([^"]+)"`,
	} {
		image := regexp.MustCompile(pattern).FindStringSubmatch(read(t, path))
		if image == nil {
			t.Fatalf("%s builds without tags", path)
		}
		of := strings.Split(image[1], ",")
		for tag := range strings.SplitSeq(tags[1], ",") {
			if !slices.Contains(of, tag) {
				t.Errorf("%s builds with the tags %s, without %s of the Makefile", path, image[1], tag)
			}
		}
	}
	if binaries.Tags != tags[1] {
		t.Errorf("tests build with the tags %s, the Makefile with %s", binaries.Tags, tags[1])
	}
	if !strings.Contains(read(t, "test/release/main.go"), `"-tags", binaries.Tags`) {
		t.Error("test/release builds kubectl's plugin without the tags of tests")
	}
	page := "cmd/kubectl-gpuslice/README.md"
	for _, command := range regexp.MustCompile("`[^`\n]*go build [^`\n]*`").FindAllString(read(t, page), -1) {
		if !strings.Contains(command, "-tags "+tags[1]) {
			t.Errorf("%s has people build without the tags %s: %s", page, tags[1], command)
		}
	}
}

// What the tag is for: with gRPC's tracing comes html/template, which calls methods by names that the linker cannot know.
func TestTheProgramsAreBuiltWithoutTracing(t *testing.T) {
	for _, program := range []string{"./cmd/gpuslice-agent", "./cmd/kubectl-gpuslice"} {
		list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags="+binaries.Tags, program)
		list.Dir = root
		packages, err := list.Output()
		if err != nil {
			t.Fatal(err)
		}
		for pkg := range strings.Lines(string(packages)) {
			if strings.TrimSpace(pkg) == "golang.org/x/net/trace" {
				t.Errorf("%s imports golang.org/x/net/trace", program)
			}
		}
	}
}

// What the release is built with and what people build must not differ, or only one of them is position-independent.
func TestProgramsAreBuiltAlike(t *testing.T) {
	for _, path := range []string{"Makefile", "Dockerfile"} {
		for _, flag := range []string{"-trimpath", "-buildmode=pie", "-Wl,-z,lazy,-z,relro"} {
			if !strings.Contains(read(t, path), flag) {
				t.Errorf("%s does not build with %s", path, flag)
			}
		}
	}
}
