package main

import (
	"runtime/debug"
	"testing"
)

// What Go's collector was given is the whole process's: this test runs alone, and puts it back.
func TestTheMemoryLimitOfTheContainerBoundsTheHeap(t *testing.T) {
	limit, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	t.Cleanup(func() {
		debug.SetMemoryLimit(limit)
		debug.SetGCPercent(percent)
	})
	limits := func() (int64, int) {
		collects := debug.SetGCPercent(100)
		return debug.SetMemoryLimit(-1), collects
	}
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	for _, wrong := range []string{"256Mi", "0", "-1", "1", "33554431", "99999999999999999999"} {
		if boundMemory(wrong) == nil {
			t.Errorf("a limit of %q is accepted", wrong)
		}
	}
	if got, _ := limits(); got != limit {
		t.Errorf("limits that cannot be read bound the heap to %d bytes", got)
	}
	if err := boundMemory("33554432"); err != nil {
		t.Errorf("32 MiB are refused: %v", err)
	}
	if err := boundMemory("268435456"); err != nil {
		t.Fatal(err)
	}
	if got, collects := limits(); got != 192<<20 || collects != collectAt {
		t.Errorf("of 256 MiB Go may take %d bytes, and collects at %d %%, want three quarters and %d %%", got, collects, collectAt)
	}
	t.Setenv("GOGC", "80")
	t.Setenv("GOMEMLIMIT", "100MiB")
	if err := boundMemory("134217728"); err != nil {
		t.Fatal(err)
	}
	if got, collects := limits(); got != 192<<20 || collects != 100 {
		t.Errorf("beside GOGC and GOMEMLIMIT Go was given %d bytes and %d %%", got, collects)
	}
}
