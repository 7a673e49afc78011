package cut_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/state/hostfile"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
)

// written is a store that has what the GPUs of the node are.
func written(t *testing.T, d nvml.Driver) (*cut.Store, cut.Found) {
	t.Helper()
	s := opened(t, filepath.Join(t.TempDir(), "store"))
	gpus, err := d.Snapshot(t.Context())
	must(t, err)
	must(t, s.Save(t.Context(), cut.Found{GPUs: gpus}))
	found, err := s.Load(t.Context())
	if err != nil || found == nil {
		t.Fatal(err)
	}
	return s, *found
}

func opened(t *testing.T, dir string) *cut.Store {
	t.Helper()
	s, err := cut.Open(dir)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close(t.Context())) })
	return s
}

func simulated(t *testing.T, spec string) *gpusim.Node {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	must(t, err)
	n, err := gpusim.Create(filepath.Join(t.TempDir(), "gpus"), s)
	must(t, err)
	t.Cleanup(func() { must(t, n.Close()) })
	return n
}

// world is a machine with a GPU that is written down.
type world struct {
	*testing.T
	n *gpusim.Node
	d nvml.Driver
	g nvml.GPU
}

// What a run has done when it is killed, or another user after it.
func TestWhateverHasBecomeOfTheGPUsTheyAreRestored(t *testing.T) {
	for name, c := range map[string]struct {
		spec, instances string
		after           func(world)
	}{
		"a reboot loses mode and instances": {"gpus: [{model: H100-80GB, mig: true}]", "3g.40gb(1c+2c)@0 1g.10gb@6", func(w world) {
			must(w.T, w.n.Reboot())
		}},
		"an instance is divided otherwise": {"gpus: [{model: H100-80GB, mig: true}]", "3g.40gb@0", func(w world) {
			at := placed(w.T, w.g, "3g.40gb@0")
			must(w.T, w.d.Destroy(w.Context(), w.g.UUID, at))
			at.Compute = "1c+2c"
			must(w.T, w.d.Create(w.Context(), w.g.UUID, at))
		}},
		"an instance is half made in the place of one": {"gpus: [{model: A30, mig: true}]", "2g.12gb@2", func(w world) {
			at := placed(w.T, w.g, "2g.12gb@2")
			must(w.T, w.d.DestroyPart(w.Context(), w.g.UUID, at, nvml.Part{Name: "2c", Span: nvml.Span{Size: 2}}))
		}},
		"persistence mode, a pending mode": {"gpus: [{model: A100-80GB, persistence: true}]", "", func(w world) {
			must(w.T, w.d.SetMode(w.Context(), w.g.UUID, true))
			if now, err := w.d.Snapshot(w.Context()); err != nil || !now[0].Pending || now[0].Enabled {
				w.Fatalf("the mode is not pending: %v", err)
			}
		}},
		"a destroy is refused for a moment, though no process is there": {"gpus: [{model: A30}]", "", func(w world) {
			must(w.T, w.d.SetMode(w.Context(), w.g.UUID, true), w.d.Create(w.Context(), w.g.UUID, placed(w.T, w.g, "4g.24gb@0")))
			must(w.T, w.n.Fail(gpusim.ComputeInstanceDestroy, gpusim.Fault{Return: gpusim.InUse, Times: 3}))
		}},
		"an earlier call still hangs": {"gpus: [{model: H100-80GB}]", "", func(w world) {
			must(w.T, w.n.Delay(gpusim.SetMigMode, 2*time.Second))
			ctx, cancel := context.WithTimeout(w.Context(), time.Second)
			defer cancel()
			if err := w.d.SetMode(ctx, w.g.UUID, true); !errors.Is(err, nvml.ErrUnresponsive) {
				w.Fatal(err)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := simulated(t, c.spec)
				prepare(t, n, c.instances, nil, "")
				d := n.Driver()
				want := shapes(t, d)
				s, found := written(t, d)
				c.after(world{t, n, d, found.GPUs[0]})
				_, err := s.Restore(t.Context(), d, found)
				must(t, err)
				if diff := cmp.Diff(want, shapes(t, d)); diff != "" {
					t.Errorf("the GPUs (-found +now):\n%s", diff)
				}
				if left, err := s.Load(t.Context()); left != nil || err != nil {
					t.Errorf("the file is still there: %v, %v", left, err)
				}
			})
		})
	}
}

func TestWhatCannotBeRestoredIsNamedAndStaysWrittenDown(t *testing.T) {
	for name, c := range map[string]struct {
		spec  string
		after func(world)
		want  []string
	}{
		"a process has come": {"gpus: [{model: H100-80GB}]", func(w world) {
			must(w.T, w.d.SetMode(w.Context(), w.g.UUID, true), w.d.Create(w.Context(), w.g.UUID, placed(w.T, w.g, "3g.40gb@4")), w.n.Hold(w.n.MIGDevice(0, 4), 4711, "python", 1))
		}, []string{"restoring GPU 0: destroying 3g.40gb@4 on GPU-", "in use (ERROR_IN_USE): tried for 1m0s", "end what uses the GPU, then run make hardware CUT=restore", "found.json"}},
		"a virtual machine was rebooted": {"gpus: [{model: A100-80GB, passthrough: true}]", func(w world) {
			must(w.T, w.d.SetMode(w.Context(), w.g.UUID, true), w.n.Reboot())
		}, []string{"restoring GPU 0: here only a reboot changes MIG mode: reboot the machine"}},
		"the GPU is lost": {"gpus: [{model: H100-80GB}]", func(w world) {
			must(w.T, w.n.SetHealth(0, gpusim.Health{Lost: true}))
		}, []string{"restoring GPU 0: GPU-", "GPU is lost: reset it, or reboot"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := simulated(t, c.spec)
				d := n.Driver()
				s, found := written(t, d)
				c.after(world{t, n, d, found.GPUs[0]})
				_, err := s.Restore(t.Context(), d, found)
				if err == nil {
					t.Fatal("it is restored")
				}
				for _, want := range c.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %q, want %q", err, want)
					}
				}
				if left, err := s.Load(t.Context()); left == nil || err != nil {
					t.Errorf("the file is gone: %v", err)
				}
			})
		})
	}
}

func TestNewUUIDsOfRestoredMIGDevicesAreNamed(t *testing.T) {
	n := simulated(t, "gpus: [{model: H100-80GB, mig: true}]")
	prepare(t, n, "3g.40gb@4", nil, "")
	d, was := n.Driver(), n.MIGDevice(0, 4)
	s, found := written(t, d)
	must(t, d.Destroy(t.Context(), found.GPUs[0].UUID, placed(t, found.GPUs[0], "3g.40gb@4")))
	renamed, err := s.Restore(t.Context(), d, found)
	must(t, err)
	if want := []string{was + " is " + n.MIGDevice(0, 4)}; !cmp.Equal(renamed, want) {
		t.Errorf("%q, want %q", renamed, want)
	}
}

func TestOneRunAtATimeHasTheGPUs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	opened(t, dir)
	if _, err := cut.Open(dir); !errors.Is(err, cut.ErrTaken) {
		t.Errorf("a second run: %v", err)
	}
}

// The write would replace what the next run finds.
func TestNoOtherRunHasTheGPUsWhileTheDiskMayStillDoAWriteOfOneThatHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, mended := filepath.Join(t.TempDir(), "store"), make(chan struct{})
		s, err := cut.Open(dir)
		must(t, err)
		s.Disk().Work = func(do func()) { <-mended; do() }
		if err := s.Save(t.Context(), cut.Found{}); !errors.Is(err, hostfile.ErrSilent) {
			t.Errorf("the write: %v", err)
		}
		must(t, s.Close(t.Context()))
		if _, err := cut.Open(dir); !errors.Is(err, cut.ErrTaken) {
			t.Errorf("the next run: %v", err)
		}
		close(mended)
		synctest.Wait()
		must(t, s.Close(t.Context()))
		opened(t, dir)
	})
}

// The GPU is not there: the file is of a machine that it was in, or it has been replaced since.
func TestAGPUThatIsNoMoreThereIsNamedWithWhatToDoAndTheOthersAreRestored(t *testing.T) {
	n := simulated(t, "gpus: [{model: H100-80GB, count: 2}]")
	d := n.Driver()
	want := shapes(t, d)
	s, found := written(t, d)
	must(t, d.SetMode(t.Context(), found.GPUs[1].UUID, true))
	found.GPUs[0].UUID = "GPU-gone"
	_, err := s.Restore(t.Context(), d, found)
	if err == nil {
		t.Fatal("it is restored")
	}
	for _, want := range []string{
		"restoring GPU 0: GPU-gone is not on this machine; what it was is in " + s.Path(), "if it is in another machine, or has been replaced, remove the file",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q, want %q", err, want)
		}
	}
	if strings.Contains(err.Error(), "end what uses the GPU") {
		t.Errorf("error %q", err)
	}
	if diff := cmp.Diff(want, shapes(t, d)); diff != "" {
		t.Errorf("the other GPU (-found +now):\n%s", diff)
	}
}

func TestAFileThatIsNotOfThisProgramIsNotRestored(t *testing.T) {
	for text, want := range map[string]string{`{"Format": 2}`: "has format 2, and this program knows 1", `{"GPUs": [`: "bring them back by hand, and remove the file"} {
		dir := t.TempDir()
		must(t, os.Chmod(dir, 0o700), os.WriteFile(filepath.Join(dir, "found.json"), []byte(text), 0o600))
		if left, err := opened(t, dir).Load(t.Context()); left != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", text, left, err)
		}
	}
}
