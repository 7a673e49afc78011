package lib_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// TestMain runs the tests with the simulated library; a process that one of them starts is a looker.
func TestMain(m *testing.M) {
	if os.Getenv(lookerRoot) != "" {
		if err := observeUntilEOF(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	gpusimtest.Main(m)
}

func openDriver(t *testing.T) *lib.Driver {
	t.Helper()
	return releasing(t, lib.Open(lib.Options{Library: gpusimtest.Library(t)}))
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
	if err := os.Symlink(gpusimtest.Library(t), filepath.Join(folder, "libnvidia-ml.so.1")); err != nil {
		t.Fatal(err)
	}
}
