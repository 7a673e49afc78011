package lib_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Names of environment variables that tell the tests, and the simulated library, where things are.
const (
	nodeDir     = "GPUSIM_NODE" // read by the library when it is loaded
	libraryFile = "GPUSIM_LIBRARY"
)

// TestMain builds the simulated library, and starts the tests in a process whose environment names the simulated node
// from its beginning: the library's own Go runtime sees no other.
func TestMain(m *testing.M) {
	if os.Getenv(lookerRoot) != "" {
		if err := lookUntilEOF(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(libraryFile) != "" {
		code := m.Run()
		if err := os.RemoveAll(os.Getenv(nodeDir)); err != nil {
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
	return syscall.Exec(program, os.Args, append(os.Environ(), nodeDir+"="+dir, libraryFile+"="+file))
}

// newNode makes a node of the simulated GPUs that spec describes, which the library sees. It replaces the node of the
// test before, so that no two tests may run at the same time.
func newNode(t *testing.T, spec string) *gpusim.Node {
	t.Helper()
	return nodeIn(t, os.Getenv(nodeDir), spec)
}

func nodeIn(t *testing.T, dir, spec string) *gpusim.Node {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	n, err := gpusim.Create(dir, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

func openDriver(t *testing.T) *lib.Driver {
	t.Helper()
	return releasing(t, lib.Open(lib.Options{Library: os.Getenv(libraryFile)}))
}

// releasing lets go of the library at the end of the test, which all tests of the process share. A driver that a test has
// left hanging cannot do that.
func releasing(t *testing.T, d *lib.Driver) *lib.Driver {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := d.Release(ctx); err != nil && !errors.Is(err, nvml.ErrUnresponsive) {
			t.Error(err)
		}
	})
	return d
}

// install puts the simulated library where Debian has it in the file system at root.
func install(t *testing.T, root string) {
	t.Helper()
	folder := filepath.Join(root, "usr/lib/x86_64-linux-gnu")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(os.Getenv(libraryFile), filepath.Join(folder, "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
}
