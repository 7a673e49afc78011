// Package keptout has tests that are kept out of the Go command's cache of results, and one that is not.
package keptout

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
)

func TestAlone(*testing.T) {}

func TestKeptOut(*testing.T) { binaries.KeepOutOfTestCache() }

func TestProgram(t *testing.T) {
	if _, err := (binaries.Builder{}).Tool(t.Context(), "./test/cluster/realkubelet/cmd/pause"); err != nil {
		t.Fatal(err)
	}
}
