package lib_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// lookerRoot names the environment variable that makes this program a looker, and says where its driver is installed: a
// root, or lookerLoader for wherever the dynamic loader finds it.
const (
	lookerRoot   = "GPUSIM_LOOKER_ROOT"
	lookerLoader = "loader"
)

// observeUntilEOF looks at the GPUs once for each line that it reads, and writes what came of it. It keeps its library for its
// whole life, as the agent does.
func observeUntilEOF() error {
	o := lib.Options{DriverRoot: os.Getenv(lookerRoot)}
	if o.DriverRoot == lookerLoader {
		o.DriverRoot = ""
	}
	d := lib.Open(o)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		gpus, err := d.Snapshot(ctx)
		cancel()
		answer := fmt.Sprintf("sees %d GPUs", len(gpus))
		if err != nil {
			answer = causeOf(err)
		}
		if _, err := fmt.Println(answer); err != nil {
			return err
		}
	}
	return nil
}

// looker is a process of its own with the library that is installed in a root.
type looker struct {
	in  io.WriteCloser
	out *bufio.Scanner
}

// newLooker starts one. With byLoader set, it is not given the driver's place.
func newLooker(t *testing.T, n *gpusim.Node, root string, byLoader bool) looker {
	t.Helper()
	env := []string{gpusimtest.NodeVariable + "=" + n.Dir(), lookerRoot + "=" + root}
	if byLoader {
		env = []string{gpusimtest.NodeVariable + "=" + n.Dir(), lookerRoot + "=" + lookerLoader, "LD_LIBRARY_PATH=" + filepath.Join(root, "usr/lib64")}
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), os.Args[0])
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	})
	return looker{in, bufio.NewScanner(out)}
}

func (l looker) expect(t *testing.T, when, want string) {
	t.Helper()
	if _, err := fmt.Fprintln(l.in); err != nil {
		t.Fatal(err)
	}
	if !l.out.Scan() {
		t.Fatalf("%s: the process has ended: %v", when, l.out.Err())
	}
	if got := l.out.Text(); got != want {
		t.Errorf("%s: got %q, want %q", when, got, want)
	}
}

// installVersion puts a copy of the simulated library into root as packages do: a file for each version, and a link to it.
func installVersion(t *testing.T, root, version string) {
	t.Helper()
	folder := filepath.Join(root, "usr/lib64")
	link := filepath.Join(folder, "libnvidia-ml.so.1")
	before, _ := filepath.EvalSymlinks(link) // empty if none is installed
	text, err := os.ReadFile(gpusimtest.Library(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.MkdirAll(folder, 0o700), os.WriteFile(filepath.Join(folder, "libnvidia-ml.so."+version), text, 0o600)); err != nil {
		t.Fatal(err)
	}
	if before != "" {
		if err := errors.Join(os.Remove(link), os.Remove(before)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libnvidia-ml.so."+version, link); err != nil {
		t.Fatal(err)
	}
}

func TestAReplacedDriverNeedsANewProcess(t *testing.T) {
	for _, c := range []struct {
		name     string
		byLoader bool
	}{{"in a root of its own", false}, {"where the loader finds it", true}} {
		t.Run(c.name, func(t *testing.T) {
			n := gpusimtest.NodeIn(t, t.TempDir(), "driverVersion: 570.1.2\ngpus: [{model: H200, count: 2}]")
			root := t.TempDir()
			installVersion(t, root, "570.1.2")
			old := newLooker(t, n, root, c.byLoader)
			old.expect(t, "with the driver it was started with", "sees 2 GPUs")
			if err := n.Reload(); err != nil {
				t.Fatal(err)
			}
			old.expect(t, "after a reload of the same version", "sees 2 GPUs")

			if err := n.Upgrade("580.3.4"); err != nil {
				t.Fatal(err)
			}
			old.expect(t, "while only the kernel module is replaced", nvml.ErrNoDriver.Error())
			away := filepath.Join(root, "usr/lib64.away")
			if err := os.Rename(filepath.Join(root, "usr/lib64"), away); err != nil {
				t.Fatal(err)
			}
			old.expect(t, "while there is no library", nvml.ErrNoDriver.Error())
			if err := os.Rename(away, filepath.Join(root, "usr/lib64")); err != nil {
				t.Fatal(err)
			}
			old.expect(t, "with the old library again", nvml.ErrNoDriver.Error())
			installVersion(t, root, "580.3.4")
			old.expect(t, "when the library is replaced", nvml.ErrReplaced.Error())
			old.expect(t, "at the next look", nvml.ErrReplaced.Error())
			newLooker(t, n, root, c.byLoader).expect(t, "as a new process", "sees 2 GPUs")

			if err := n.Upgrade("570.1.2"); err != nil {
				t.Fatal(err)
			}
			old.expect(t, "when the version is back", "sees 2 GPUs")
		})
	}
}

func TestTheErrorOfAReplacedDriverSaysWhatWasGoingOn(t *testing.T) {
	n := gpusimtest.Node(t, "gpus: [{model: H200, mig: true}]")
	d := openDriver(t)
	g := snapshot(t, d)[0]
	p := create(t, d, g, "3g.71gb@4")
	fail(t, n, gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.LibRMVersionMismatch})
	err := d.Destroy(t.Context(), g.UUID, p)
	expectError(t, err, nvml.ErrNoDriver, "destroying 3g.71gb@4 on "+string(g.UUID))
	if !strings.Contains(err.Error(), "of different versions (ERROR_LIB_RM_VERSION_MISMATCH)") {
		t.Errorf("got %v", err)
	}
}
