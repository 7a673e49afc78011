package geometry_test

import (
	"context"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

var (
	wishes = flag.Int("wishes", 2000, "random wishes for each model")
	seed   = flag.Uint64("seed", 1, "where random numbers begin")
	full   = flag.Bool("full", false, "every wish with parts, and not a quarter of them")
)

// Names of environment variables that tell the tests, and the simulated library in this process, where things are.
const (
	nodeDir     = "GPUSIM_NODE" // read by the library when it is loaded
	libraryFile = "GPUSIM_LIBRARY"
)

// TestMain starts the tests in a process whose environment names, from its beginning, the node that the simulated library
// shows: the library's own Go runtime sees no other.
func TestMain(m *testing.M) {
	if os.Getenv(libraryFile) != "" {
		code := m.Run()
		if err := os.RemoveAll(filepath.Dir(os.Getenv(nodeDir))); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}
	if err := startAgain(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// startAgain replaces this process by one with the simulated library. It returns only if it cannot.
func startAgain() error {
	file, err := binaries.Builder{}.LibNVML(context.Background())
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gpusim")
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}
	env := append(os.Environ(), nodeDir+"="+filepath.Join(dir, "gpus"), libraryFile+"="+file)
	return syscall.Exec(program, os.Args, env)
}

// newRandom gives random numbers that are others for each model, and the same for each run.
func newRandom(model string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(model))
	return rand.New(rand.NewPCG(*seed, h.Sum64()))
}

// most is how many GPUs a node can have. NVIDIA's tool looks at all of them in one run, which takes the most time here.
const most = 16

// newHost makes a machine of so many GPUs of the model in dir, with MIG mode on.
func newHost(t *testing.T, dir, model string, gpus int) *incumbent.Host {
	t.Helper()
	programs, err := incumbent.Build(t.Context(), binaries.Builder{})
	if err != nil {
		t.Fatal(err)
	}
	h, err := incumbent.NewHost(dir, specOf(model, gpus), programs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeNode(t, h.GPUs) })
	return h
}

func specOf(model string, gpus int) gpusim.Spec {
	return gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model, Count: gpus, MIG: true}}}
}

func closeNode(t *testing.T, n *gpusim.Node) {
	t.Helper()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}

func modelsWithMIG() []string {
	var out []string
	for _, m := range gpusim.Models() {
		if m != "T4" {
			out = append(out, m)
		}
	}
	return out
}
