package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A fault whose text has changed, or whose test is gone, would be tried by no one until the next night.
func TestEachFaultCanBeTried(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	files, err := filepath.Glob("agent/*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	var tests strings.Builder
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		tests.Write(text)
	}
	for _, f := range faults {
		if _, _, err := f.applied(); err != nil {
			t.Errorf("%s: %v", f.what, err)
		}
		if !strings.Contains(tests.String(), "func "+f.test+"(") {
			t.Errorf("%s: ./agent has no %s", f.what, f.test)
		}
	}
}
