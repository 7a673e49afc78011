package node_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// beforeAnyRelease stands for the last release until there is one.
const beforeAnyRelease = "3da3b6737762"

// An agent is replaced where it happens to be. Here each step of a change is done by an agent of the other version: by that of the last release and this one in
// turn, so that each has to go on with what the other has written, also for a roll back.
func TestAChangeIsUpgradedAndRolledBackAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("the agent of the last release is compiled")
	}
	t.Parallel()
	build(t)
	former := lastRelease(t)
	s := newStage(t, false)
	s.versions = []string{former, s.Parts.Agent}
	for _, requested := range []string{"whole", "cut"} {
		s.deaths = nil
		s.change(requested, fate{border: true})
		t.Logf("%s by %d agents: %s", requested, len(s.deaths)+1, strings.Join(s.deaths, "; "))
		s.awaitUser(requested)
	}
}

// lastRelease builds the agent of the newest tag before this commit.
func lastRelease(t *testing.T) (program string) {
	t.Helper()
	root, err := binaries.Builder{}.Checkout()
	if err != nil {
		t.Fatal(err)
	}
	git := func(args ...string) ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-c", "safe.directory=*"}, args...)...)
		cmd.Dir = root
		return cmd.Output()
	}
	version := beforeAnyRelease
	if tag, err := git("describe", "--tags", "--abbrev=0", "--match=v*", "HEAD^"); err == nil {
		version = strings.TrimSpace(string(tag))
	}
	sources, err := git("archive", "--format=tar", version, "--", "go.mod", "go.sum", "agent", "cmd", "config", "drain", "nvml")
	if err != nil {
		t.Skipf("this clone has no %s (git fetch --unshallow --tags brings it): %v", version, err)
	}
	dir := t.TempDir()
	unpack := exec.CommandContext(t.Context(), "tar", "-x", "-C", dir)
	unpack.Stdin = bytes.NewReader(sources)
	if said, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("unpacking the sources of %s: %v\n%s", version, err, said)
	}
	program = filepath.Join(dir, "gpuslice-agent")
	compile := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-tags="+binaries.Tags,
		"-ldflags=-s -w -extldflags=-Wl,-z,lazy -X main.version="+version, "-o", program, "./cmd/gpuslice-agent")
	compile.Dir, compile.Env = dir, append(os.Environ(), "GOFLAGS=", "GOMAXPROCS=")
	if said, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("building the agent of %s: %v\n%s", version, err, said)
	}
	t.Logf("the last release is %s", version)
	return program
}
