package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
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

// A help page fits the narrowest terminal that people have, and pipes get it as it is.
func TestHelpPagesFitEightyColumns(t *testing.T) {
	o := cluster.Options{}
	root := o.Root(commands...)
	root.AddCommand(cli.Version(version))
	narrow(root)
	root.InitDefaultCompletionCmd()
	var all func(c *cobra.Command, path []string)
	all = func(c *cobra.Command, path []string) {
		var said, stderr strings.Builder
		root.SetOut(&said)
		root.SetErr(&stderr)
		root.SetArgs(append(path, "--help"))
		if err := root.Execute(); err != nil || stderr.Len() > 0 {
			t.Errorf("%s: %v: %s", path, err, stderr.String())
		}
		for line := range strings.SplitSeq(said.String(), "\n") {
			if n := runewidth.StringWidth(line); n > helpWidth {
				t.Errorf("%s: %d columns: %s", path, n, line)
			}
		}
		for _, part := range []string{"Usage:\n  kubectl gpuslice", "Flags:\n"} {
			if !strings.Contains(said.String(), part) {
				t.Errorf("%s lacks %q:\n%s", path, part, &said)
			}
		}
		for _, sub := range c.Commands() {
			all(sub, append(path[:len(path):len(path)], sub.Name()))
		}
	}
	all(root, nil)
}
