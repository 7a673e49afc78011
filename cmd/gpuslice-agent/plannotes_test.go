package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/nvml"
)

// What a plan says of resets and reboots comes true.
func TestAPlanNamesTheResetsThatItTakes(t *testing.T) {
	ampere := nvml.GPU{UUID: "GPU-1", Index: 3, Capable: true, ComputeCapability: nvml.ComputeCapability{Major: 8}}
	with := func(change func(*nvml.GPU)) nvml.GPU {
		g := ampere
		change(&g)
		return g
	}
	for name, row := range map[string]struct {
		gpu  nvml.GPU
		want string // none for no note
	}{
		"MIG on":                      {ampere, "GPU 3: its MIG mode changes by a reset"},
		"off that was pending":        {with(func(g *nvml.GPU) { g.Enabled = true }), ""},
		"a GPU of a virtual machine":  {with(func(g *nvml.GPU) { g.Virtualization = nvml.PassedThrough }), "Plan for a reboot of the node: GPU 3 is passed through"},
		"a GPU that resets by itself": {with(func(g *nvml.GPU) { g.ComputeCapability.Major = 9 }), ""},
	} {
		got := resetNotes(preview.Result{Before: []nvml.GPU{row.gpu}, Steps: []plan.Step{{Kind: plan.SetMode, GPU: "GPU-1", Index: 3, On: true}}})
		if text := strings.Join(got, " "); row.want == "" && text != "" || !strings.Contains(text, row.want) {
			t.Errorf("%s: %q, want %q", name, text, row.want)
		}
	}
}

// Anyone names a process of their own.
func TestTheNameOfAProcessMovesNoCursor(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "4711"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "4711", "comm"), []byte("py\x1b[2Jthon\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, want := (&options{procRoot: root}).processName(4711), "py?[2Jthon"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestAPlanReadsTheSettingsThatAreNamed(t *testing.T) {
	c := command()
	c.SetArgs([]string{"plan", "--offline", "--mig-config", "all-disabled", "--settings", "/none.yaml"})
	if err := c.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "/none.yaml") {
		t.Errorf("the error is %v", err)
	}
}
