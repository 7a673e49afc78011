package incumbent_test

import (
	"context"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
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
