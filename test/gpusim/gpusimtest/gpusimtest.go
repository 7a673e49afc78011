// Package gpusimtest gives tests the simulated driver library. A process can load the library once. The library shows
// one node at a time: the one in the directory that its environment names.
//
// If the tests of a package take turns, its TestMain calls Main. A test that runs in parallel with others calls Apart.
package gpusimtest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Names of environment variables.
const (
	NodeVariable    = "GPUSIM_NODE"    // directory of the node; the library reads it whenever it is initialized
	LibraryVariable = "GPUSIM_LIBRARY" // file of the library; set in the processes that have one
)

// Main runs the tests of a package with the library, and a directory for its node. It is called from TestMain and ends the
// process.
func Main(m *testing.M) {
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func run(m *testing.M) (code int, err error) {
	library, err := binaries.Builder{}.LibNVML(context.Background())
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp("", "gpusim")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := errors.Join(os.Setenv(NodeVariable, dir), os.Setenv(LibraryVariable, library)); err != nil {
		return 0, err
	}
	return m.Run(), nil
}

// Library is the file of the library that this process has.
func Library(tb testing.TB) string {
	tb.Helper()
	return variable(tb, LibraryVariable)
}

// Dir is the directory of the node that the library shows.
func Dir(tb testing.TB) string {
	tb.Helper()
	return variable(tb, NodeVariable)
}

func variable(tb testing.TB, name string) string {
	tb.Helper()
	value := os.Getenv(name)
	if value == "" {
		tb.Fatalf("%s is not set: this package needs func TestMain(m *testing.M) { gpusimtest.Main(m) }, or this test gpusimtest.Apart", name)
	}
	return value
}

// Node creates the node that spec describes; the library then shows it. It replaces the previous test's node, so no two
// tests of a process may use it at the same time.
func Node(tb testing.TB, spec string) *gpusim.Node {
	tb.Helper()
	return NodeIn(tb, Dir(tb), spec)
}

// NodeIn creates a node in dir, replacing any that is there, and closes it at the end of the test.
func NodeIn(tb testing.TB, dir, spec string) *gpusim.Node {
	tb.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		tb.Fatal(err)
	}
	n, err := gpusim.Create(dir, s)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := n.Close(); err != nil {
			tb.Error(err)
		}
	})
	return n
}

// Apart runs the test in parallel with others, in its own process with the library and a directory for its node, and
// logs the output. There, it returns false. The process gets args, and all flags that do not belong to package testing.
func Apart(t *testing.T, args ...string) bool {
	t.Helper()
	if os.Getenv(LibraryVariable) != "" {
		return false
	}
	t.Parallel()
	library, err := binaries.Builder{}.LibNVML(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), program, append(flagsFor(t), args...)...)
	c.Env = append(os.Environ(), NodeVariable+"="+filepath.Join(t.TempDir(), "gpus"), LibraryVariable+"="+library)
	out, err := c.CombinedOutput()
	if err != nil || strings.Contains(string(out), "no tests to run") {
		t.Errorf("%s: %v\n%s", c, err, out)
		return true
	}
	t.Logf("%s", out)
	return true
}

// flagsFor are those of a process that runs the test alone. It ends before this one does, to say where it was.
func flagsFor(t *testing.T) []string {
	t.Helper()
	var levels []string
	for _, name := range strings.Split(t.Name(), "/") {
		levels = append(levels, "^"+regexp.QuoteMeta(name)+"$")
	}
	out := []string{"-test.run=" + strings.Join(levels, "/")}
	if end, ok := t.Deadline(); ok {
		out = append(out, fmt.Sprintf("-test.timeout=%s", max(time.Until(end)-10*time.Second, time.Second)))
	}
	if testing.Short() {
		out = append(out, "-test.short")
	}
	flag.Visit(func(f *flag.Flag) {
		if !strings.HasPrefix(f.Name, "test.") {
			out = append(out, fmt.Sprintf("-%s=%s", f.Name, f.Value))
		}
	})
	return out
}
