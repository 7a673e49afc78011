package e2e_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/machine"
	"github.com/gpuslice/gpuslice/test/node"
)

const (
	// enabled is set by make e2e: go test ./... leaves this package alone, also where it is root.
	enabled = "GPUSLICE_E2E"
	// built hands the programs on to the process inside the machine, where there is no network to build them with.
	built = "GPUSLICE_E2E_PROGRAMS"
)

// programs are what the tests start.
var programs struct {
	node.Parts
	Runtime string // directory of containerd and what it needs
	Pause   string
	Image   string // the agent's, as make image makes it: an archive
	Release string // folder of a release, whose image is to be in a registry at registryAddress; at full length alone
	Crane   string // pushes to registries, and serves one
}

func TestMain(m *testing.M) {
	if os.Getenv(enabled) == "" {
		fmt.Println("not run: these tests need root; make e2e runs them")
		os.Exit(0)
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	if err := machine.Enter(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
	clustertest.Main(m)
}

// prepare builds the programs outside the machine, and finds them inside.
func prepare() error {
	if text, inside := os.LookupEnv(built); inside {
		return json.Unmarshal([]byte(text), &programs)
	}
	if err := machine.Possible(); err != nil {
		if os.Getenv("CI") != "" {
			return fmt.Errorf("nothing was tested: %w", err)
		}
		fmt.Println("e2e: NOTHING WAS TESTED:", err)
		os.Exit(0)
	}
	ctx, b := context.Background(), binaries.Builder{Log: os.Stderr, Kubelet: true}
	var err error
	if programs.Parts, err = node.Build(ctx, b); err != nil {
		return err
	}
	if flag.Parse(); !testing.Short() { // the tests at full length alone have it
		if err := programs.BuildDRADriver(ctx, b); err != nil {
			return err
		}
	}
	if programs.Runtime, err = b.Runtime(ctx); err != nil {
		return err
	}
	if programs.Pause, err = b.Tool(ctx, "./test/cluster/realkubelet/cmd/pause"); err != nil {
		return err
	}
	if programs.Image, err = makeImage(ctx, b); err != nil {
		return err
	}
	if !testing.Short() {
		if err := makeRelease(ctx); err != nil {
			return err
		}
	}
	text, err := json.Marshal(programs)
	if err != nil {
		return err
	}
	return os.Setenv(built, string(text))
}

// imageVersion is the tag that deploy/base names.
const imageVersion = "v0.1.0"

// makeImage makes the agent's image for this machine. Another run of these tests may read it in the meantime.
func makeImage(ctx context.Context, b binaries.Builder) (string, error) {
	tool, err := b.Image(ctx)
	if err != nil {
		return "", err
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		return "", err
	}
	to := filepath.Join(root, "bin", "e2e", "gpuslice-agent-"+imageVersion+".tar")
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", fmt.Errorf("making the agent's image: %w", err)
	}
	out, err := os.MkdirTemp(filepath.Dir(to), "new-")
	if err != nil {
		return "", fmt.Errorf("making the agent's image: %w", err)
	}
	defer os.RemoveAll(out)
	cmd := exec.CommandContext(ctx, filepath.Join(tool, "image"),
		"-checkout", root, "-out", out, "-platforms", runtime.GOARCH, "-version", imageVersion, "-revision", "e2e", "-created", "1700000000")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	err = cmd.Run()
	if err == nil {
		err = os.Rename(filepath.Join(out, filepath.Base(to)), to)
	}
	if err != nil {
		return "", fmt.Errorf("making the agent's image: %w", err)
	}
	return to, nil
}
