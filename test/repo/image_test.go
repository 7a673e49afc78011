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

func TestTheImageIsBuiltFromEveryPackageOfTheAgent(t *testing.T) {
	t.Parallel()
	context := map[string]bool{}
	for line := range strings.Lines(read(t, ".dockerignore")) {
		if dir, ok := strings.CutPrefix(strings.TrimSpace(line), "!"); ok {
			context[dir] = true
		}
	}
	for _, pkg := range linked(t, "linux", "./cmd/gpuslice-agent") {
		path, ours := strings.CutPrefix(pkg, module)
		if dir, _, _ := strings.Cut(path, "/"); ours && !context[dir] {
			t.Errorf("gpuslice-agent imports %s, which .dockerignore leaves out", path)
		}
	}
}

// A tag may be given another image at any time.
func TestTheImageIsBuiltByTheGoThatTheModuleAsksFor(t *testing.T) {
	t.Parallel()
	wants := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "go.mod"))
	image := regexp.MustCompile(`(?m)^ARG BUILD_IMAGE=golang:(\d+\.\d+)\.\d+-\w+@sha256:[0-9a-f]{64}$`).FindStringSubmatch(read(t, "Dockerfile"))
	if wants == nil || image == nil || wants[1] != image[1] {
		t.Errorf("go.mod asks for Go %q, the Dockerfile's image has %q", wants, image)
	}
}

// What the image is built with, what people build and what tests run must not differ: the agent would not start where the driver's library is
// missing, or it would lie at a fixed address.
func TestProgramsAreBuiltAlike(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"Makefile", "Dockerfile"} {
		for _, flag := range []string{"-trimpath", "-buildmode=pie", "-Wl,-z,lazy,-z,relro", binaries.Tags} {
			if !strings.Contains(read(t, path), flag) {
				t.Errorf("%s does not build with %s", path, flag)
			}
		}
	}
}

// client-go's own client has the types of every API group, a quarter of a program. With gRPC's tracing comes html/template, which calls methods
// by names that the linker cannot know, so that it keeps all.
func TestProgramsLinkNothingThatMakesThemHuge(t *testing.T) {
	t.Parallel()
	for _, path := range linked(t, "linux", "./cmd/...") {
		switch {
		case path == "k8s.io/client-go/kubernetes" || strings.HasPrefix(path, "k8s.io/client-go/kubernetes/"):
			t.Errorf("the programs link %s: add the kind that is missing to drain/kube", path)
		case path == "golang.org/x/net/trace":
			t.Errorf("the programs link %s in spite of the tags %s", path, binaries.Tags)
		}
	}
}

// The plugin runs on people's own machines, whatever their system. The scheduler's allocator of devices brings Prometheus' client with it, which serves nothing
// there.
func TestThePluginLinksNothingOfTheDaemon(t *testing.T) {
	t.Parallel()
	daemons := []string{
		module + "agent", module + "drain", "google.golang.org/grpc", "github.com/godbus", "github.com/coreos/go-systemd",
	}
	shared := []string{module + "agent/api", module + "agent/plan/demand", module + "agent/state/capacity", module + "drain/managed", clientPackage}
	for _, system := range []string{"linux", "darwin", "windows"} {
		for _, path := range linked(t, system, "./cmd/kubectl-gpuslice") {
			for _, forbidden := range daemons {
				if path == forbidden || strings.HasPrefix(path, forbidden+"/") && !slices.Contains(shared, path) {
					t.Errorf("on %s the plugin links %s: take what it needs to agent/api", system, path)
				}
			}
		}
	}
}

// linked are the packages that programs are made of on a system; on another one than where the agent runs they are built without cgo.
func linked(t *testing.T, system, programs string) []string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "-tags="+binaries.Tags, programs)
	list.Dir, list.Env = root, append(os.Environ(), "GOOS="+system)
	if system != "linux" {
		list.Env = append(list.Env, "CGO_ENABLED=0")
	}
	out, err := list.Output()
	if err != nil {
		t.Fatalf("listing what %s links on %s: %v", programs, system, err)
	}
	packages := strings.Fields(string(out))
	if !slices.Contains(packages, clientPackage) {
		t.Fatalf("what %s links on %s has no client of Kubernetes, so this shows nothing:\n%s", programs, system, out)
	}
	return packages
}
