package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/pages"
)

func TestThePagesPrintWhatTheCommandTakes(t *testing.T) {
	pages.HoldTo(t, "gpuslice-agent", command)
}

// The page leaves lines out, where it has "…".
func TestThePageShowsWhatRenderWrites(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, found := strings.Cut(string(page), "$ gpuslice-agent render ")
	args, after, ends := strings.Cut(after, "\n")
	shown, _, closed := strings.Cut(after, "```")
	if !found || !ends || !closed {
		t.Fatal("README.md shows no run of gpuslice-agent render")
	}
	t.Chdir("../..")
	var out bytes.Buffer
	c := command()
	c.SetOut(&out)
	c.SetArgs(append([]string{"render"}, strings.Fields(args)...))
	if err := c.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	rest := out.String()
	for part := range strings.SplitSeq(shown, "…\n") {
		_, left, there := strings.Cut(rest, part)
		if !there {
			t.Fatalf("README.md shows\n%s\nwhich is not in what is left of the output:\n%s", part, rest)
		}
		rest = left
	}
}
