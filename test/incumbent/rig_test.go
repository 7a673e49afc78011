package incumbent_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// build builds NVIDIA's programs, or finds them.
func build(t *testing.T) incumbent.Programs {
	t.Helper()
	if testing.Short() {
		t.Skip("to compile NVIDIA's mig-parted takes minutes")
	}
	p, err := incumbent.Build(t.Context(), binaries.Builder{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newHost makes a machine with the GPUs that spec describes, for one test.
func newHost(t *testing.T, p incumbent.Programs, spec string) *incumbent.Host {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	h, err := incumbent.NewHost(t.TempDir(), s, p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := h.NamePCIDevices(); err != nil {
		t.Fatal(err)
	}
	return h
}

// On Ampere, a mode change goes through a reset by nvidia-smi.
func TestItsToolCutsAGPUThatNeedsAReset(t *testing.T) {
	t.Parallel()
	h := newHost(t, build(t), "gpus: [{model: A100-80GB, count: 2}]")
	if err := h.GPUs.Fail(gpusim.SetMigMode, gpusim.Fault{Return: gpusim.Success, Activation: gpusim.ResetRequired}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	text := "version: v1\nmig-configs:\n  one: [{devices: [0], mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 2}}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := h.MIGParted(t.Context(), "apply", "-f", file, "-c", "one"); err != nil {
		t.Fatal(err)
	}
	const want = "gpu 0 A100-80GB mig=on\n  2g.20gb@0\n  2g.20gb@2\n  3g.40gb@4\ngpu 1 A100-80GB mig=off\n"
	if got := h.GPUs.String(); got != want {
		t.Errorf("the GPUs are\n%swant\n%s", got, want)
	}
	if resets := h.GPUs.Calls()[gpusim.Reset]; resets != 2 {
		t.Errorf("%d GPUs were reset, want both: %v", resets, h.GPUs.Calls())
	}
	_, err := h.MIGParted(t.Context(), "apply", "-f", file, "-c", "two")
	if err == nil || !strings.Contains(err.Error(), "two") {
		t.Errorf("a config that is not in the file gives %v", err)
	}
}
