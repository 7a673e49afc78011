package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheSlowestComeFirst(t *testing.T) {
	t.Parallel()
	events := filepath.Join(t.TempDir(), "events.json")
	lines := `{"Action":"pass","Package":"github.com/gpuslice/gpuslice/agent","Test":"TestQuick","Elapsed":0.1}
a program's own line
{"Action":"pass","Package":"github.com/gpuslice/gpuslice/agent","Test":"TestSlow/case","Elapsed":9}
{"Action":"fail","Package":"github.com/gpuslice/gpuslice/agent","Test":"TestSlow","Elapsed":9.5}
{"Action":"pass","Package":"github.com/gpuslice/gpuslice/nvml","Elapsed":1}
{"Action":"output","Package":"github.com/gpuslice/gpuslice/nvml","Elapsed":100}
{"Action":"fail","Package":"github.com/gpuslice/gpuslice/agent","Elapsed":10}
`
	if err := os.WriteFile(events, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := run(&out, []string{events}); err != nil {
		t.Fatal(err)
	}
	const want = `
slowest packages
  10.0 s  agent
  1.0 s   nvml

slowest tests
  9.5 s  agent: TestSlow
  0.1 s  agent: TestQuick
`
	if out.String() != want {
		t.Errorf("printed\n%s\nwant\n%s", out.String(), want)
	}
}

func TestAMissingFileIsNamed(t *testing.T) {
	t.Parallel()
	err := run(&strings.Builder{}, []string{"missing.json"})
	if err == nil || !strings.Contains(err.Error(), "missing.json") {
		t.Errorf("error %v does not name the file", err)
	}
	if err := run(&strings.Builder{}, nil); err == nil {
		t.Error("no file is no error")
	}
}
