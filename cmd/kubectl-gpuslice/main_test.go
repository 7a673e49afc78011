package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

// Client-go pauses before an error that comes too soon after the last one, by a time of the whole process: for ever, where each
// test has a time of its own.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	os.Exit(m.Run())
}

// A file may have any name.
func TestNamesOfFilesForgeNoLine(t *testing.T) {
	file, folder := filepath.Join(t.TempDir(), "a\nFAKE"), filepath.Join(t.TempDir(), "a\nFAKE")
	if err := os.WriteFile(file, []byte("version: v1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"validate", "-f", "no\nFAKE"},
		{"validate", "-f", folder},
		{"validate", "-f", file},
		{"migrate", "--dry-run", "-f", file},
		{"render", "kueue", "-f", file, "--pool", "a=1x8"},
	} {
		if said := agenttest.Said(t, commands, "", args...); strings.Contains(said, "\nFAKE") {
			t.Errorf("%q: a line is forged: %s", args, said)
		}
	}
}
