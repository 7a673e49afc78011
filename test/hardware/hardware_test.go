package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/bundle"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// The whole run, as on a machine with a real GPU: from the archive, without the checkout, Go, or any variable at all.
func TestTheBundleRunsOnSimulatedGPUs(t *testing.T) {
	if testing.Short() {
		t.Skip("a bundle is made and runs for a minute or two; no change of the agent touches it, and test/node shows what it shows of the agent")
	}
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	b := binaries.Builder{Log: os.Stderr}
	filled := tree(filepath.Join(t.TempDir(), "tree"))
	if err := filled.fill(t.Context(), b, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/hardware") }); err != nil {
		t.Fatal(err)
	}
	archive, into := io.Pipe()
	go func() {
		_, err := bundle.Archive(string(filled), archiveName, into)
		_ = into.CloseWithError(err) // which the reader gets
	}()
	dir := t.TempDir()
	unpack(t, archive, dir)
	const cuts = "gpus: [{model: A100-80GB, count: 2, persistence: true}]"
	for _, c := range []struct {
		name   string
		args   []string
		logged []string
		said   []string // the tables
		checks int
	}{
		{"changes nothing", nil, []string{
			"10 configs, 68 steps", "Xid 31", "names the process", "kubelet gives out 4", "shared by default/greedy", "1 of 2 pods left",
			"1 GPU in its slices, by the UUIDs of NVML", "gpu-0 is GPU 0", "ImpossibleSharing: share GPUs by the claims on this node",
		}, nil, 17},
		{"cuts", []string{"--gpus", cuts, "--cut", "--confirm", firstUUID(t, cuts)}, []string{
			"7 profiles, 5 times each", "7 MIG devices", "the driver's calls took", "GPU 0: MIG mode off, persistence on, compute mode default",
		}, []string{
			"### SIMULATED NVIDIA A100", "| the agent: MIG mode on and 7 x 1g.10gb, on 1 GPU: without the driver's calls |", "| restart of NVIDIA's device plugin",
			"| from the plugin's end to the slices of NVIDIA's DRA driver |", "gpuslice-latency.yaml",
		}, 11},
	} {
		t.Run(c.name, func(t *testing.T) {
			run := exec.CommandContext(t.Context(), filepath.Join(dir, archiveName, "run.sh"), append(c.args, "--simulated")...)
			run.Env = []string{} // not nil, which would be this process's
			run.Dir = dir
			var said, logged bytes.Buffer
			run.Stdout, run.Stderr = &said, &logged
			if err := run.Run(); err != nil {
				t.Fatalf("%v\n%s%s", err, &logged, &said)
			}
			t.Logf("\n%s", &said)
			for where, words := range map[*bytes.Buffer][]string{&said: append(c.said, "on SIMULATED GPUs"), &logged: c.logged} {
				for _, want := range words {
					if !strings.Contains(where.String(), want) {
						t.Errorf("%q is missing in\n%s", want, where)
					}
				}
			}
			if n := strings.Count(said.String(), "│ ok "); n != c.checks || strings.Contains(said.String(), string(notRun)) {
				t.Errorf("%d checks have passed, want %d", n, c.checks)
			}
		})
	}
}

// firstUUID is the UUID of the first of the GPUs.
func firstUUID(t *testing.T, text string) string {
	t.Helper()
	n, err := gpusim.Create(t.TempDir(), spec(t, text))
	must(t, err)
	defer func() { _ = n.Close() }()
	return n.UUIDs()[0]
}

func TestNoGPUIsCutWithoutItsUUIDAsConfirmation(t *testing.T) {
	gpu := nvml.GPU{Index: 3, UUID: "GPU-5", Model: "NVIDIA H100 80GB HBM3", Enabled: true, Pending: true}
	c := cutting{bench: &cut.Bench{Driver: &guard{reader: one{gpu: gpu}}}}
	_, err := c.vacant(t.Context())
	if err == nil {
		t.Fatal("it is cut")
	}
	for _, want := range []string{"no GPU was changed", "GPU 3: CONFIRM=GPU-5 (NVIDIA H100 80GB HBM3; now MIG mode on"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q, want %q", err, want)
		}
	}
	for want, o := range map[error]options{
		errTwoOrders: {simulated: true, cutOptions: cutOptions{cut: true, restore: true}},
		errNothing:   {simulated: true, cutOptions: cutOptions{restore: true}},
	} {
		if err := o.runCut(t.Context(), t.TempDir()); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
	}
}

// An earlier run was killed when it had turned MIG mode on.
func TestWhatAnEarlierRunHasLeftIsRestoredWhenThatIsOrderedAndNothingUsesIt(t *testing.T) {
	ordered, confirmed := cutOptions{restore: true}, cutOptions{cut: true, confirm: []string{"GPU-5"}}
	opened := pods.Process{PID: 99, Command: "python", Cgroup: "/", Files: []string{"/dev/nvidia0"}}
	plugin := pods.Process{PID: 78, Command: pluginProgram, Cgroup: "/"}
	const used = "and they are in use now, so nothing was restored:\n"
	for name, c := range map[string]struct {
		options cutOptions
		beside  pods.Process // none if it has no PID
		absent  bool         // the GPU is of another machine
		want    string       // in the error; empty if it is restored
	}{
		"ordered":                                {options: ordered},
		"a cut is confirmed":                     {options: confirmed},
		"a cut is not confirmed":                 {options: cutOptions{cut: true}, want: "no GPU was changed. The run of "},
		"in use":                                 {options: ordered, beside: opened, want: used + "GPU 0"},
		"in use, and a cut is confirmed":         {options: confirmed, beside: opened, want: used + "GPU 0"},
		"the device plugin runs":                 {options: ordered, beside: plugin, want: used + "process 78"},
		"of another machine, with such a plugin": {options: ordered, beside: plugin, absent: true, want: "GPU-gone is not on this machine"},
	} {
		t.Run(name, func(t *testing.T) {
			n, err := gpusim.Create(t.TempDir(), spec(t, "gpus: [{model: H100-80GB}]"))
			must(t, err)
			t.Cleanup(func() { must(t, n.Close()) })
			processes, err := pods.MakeTable(filepath.Join(t.TempDir(), "proc"), n.BootID())
			must(t, err)
			if c.beside.PID != 0 {
				must(t, processes.Add(c.beside))
			}
			store, err := cut.Open(filepath.Join(t.TempDir(), "store"))
			must(t, err)
			t.Cleanup(func() { must(t, store.Close(t.Context())) })
			d := n.Driver()
			was, err := d.Snapshot(t.Context())
			must(t, err)
			must(t, d.SetMode(t.Context(), was[0].UUID, true))
			if c.absent {
				was[0].UUID = "GPU-gone"
			}
			must(t, store.Save(t.Context(), cut.Found{GPUs: was}))
			err = (&cutting{
				cutOptions: c.options, raw: d, store: store, bench: &cut.Bench{Driver: d},
				users: cut.Machine{Processes: processes.Dir(), Kubelet: filepath.Join(t.TempDir(), "none.sock")},
			}).restoreFormer(t.Context())
			restored := c.want == ""
			if restored != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			now, err := d.Snapshot(t.Context())
			must(t, err)
			if now[0].Enabled == restored {
				t.Errorf("MIG mode is on: %t", now[0].Enabled)
			}
			if left, err := store.Load(t.Context()); err != nil || left == nil != restored {
				t.Errorf("the file is there: %t: %v", left != nil, err)
			}
		})
	}
}

// The run changes no GPU, but its checks see what the other has made of them.
func TestARunSaysThatAnEarlierOneHasLeftAGPUCut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	if said := unfinished(t.Context(), dir); said != "" {
		t.Errorf("before any run that cuts: %q", said)
	}
	store, err := cut.Open(dir)
	must(t, err)
	t.Cleanup(func() { must(t, store.Close(t.Context())) })
	if said := unfinished(t.Context(), dir); said != "" {
		t.Errorf("after a whole run: %q", said)
	}
	must(t, store.Save(t.Context(), cut.Found{Began: time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)}))
	if said := unfinished(t.Context(), dir); !strings.Contains(said, "2026-07-01 12:00:00") || !strings.Contains(said, "CUT=restore") {
		t.Errorf("beside its file: %q", said)
	}
	must(t, os.Chmod(dir, 0o770))
	if said := unfinished(t.Context(), dir); !strings.Contains(said, "is not known") || !strings.Contains(said, store.Path()) {
		t.Errorf("if the file cannot be read: %q", said)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func spec(t *testing.T, text string) gpusim.Spec {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(text))
	must(t, err)
	return s
}

// one is a driver with a GPU.
type one struct {
	none
	gpu nvml.GPU
}

func (o one) Snapshot(context.Context) ([]nvml.GPU, error) { return []nvml.GPU{o.gpu}, nil }

func unpack(t *testing.T, from io.Reader, dir string) {
	t.Helper()
	for r := tar.NewReader(from); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, header.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if header.Typeflag == tar.TypeSymlink {
			if err := os.Symlink(header.Linkname, path); err != nil {
				t.Fatal(err)
			}
			continue
		}
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, header.FileInfo().Mode())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(file, r); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// silent is a driver that has no library.
type silent struct{ none }

var errNoLibrary = errors.New("no library")

func (silent) Snapshot(context.Context) ([]nvml.GPU, error) { return nil, errNoLibrary }

func TestWithoutTheFirstSnapshotNothingThatRestsOnItIsRunAndTheTableComes(t *testing.T) {
	r := newReport(io.Discard, false)
	all := trial{machine: &machine{driver: &guard{reader: silent{}}}, report: r}
	all.all(t.Context())
	if !r.failed() {
		t.Error("the run has not failed")
	}
	if len(r.rows) < 10 || r.rows[0].result != failed || !strings.Contains(r.rows[0].saw, errNoLibrary.Error()) {
		t.Fatalf("%d checks are in the table, and the first has not failed by the snapshot:\n%s", len(r.rows), r.table())
	}
	for _, done := range r.rows[1:] {
		if done.result != notRun || !strings.Contains(done.saw, unmet) {
			t.Errorf("%s: %s, %s", done.check, done.result, done.saw)
		}
	}
}

func TestWhatNvidiaSMIComplainsOfIsShownLegiblyAndBounded(t *testing.T) {
	smi := filepath.Join(t.TempDir(), "nvidia-smi")
	for _, c := range []struct{ script, want string }{
		{`printf 'cannot reach\033[2J the driver\n' >&2; exit 9`, `exit status 9; it wrote: cannot reach\x1b[2J the driver`},
		{`echo 'no devices'; exit 6`, "exit status 6; it wrote: no devices"},
		{`exit 1`, "exit status 1; it wrote: nothing"},
		{`yes complaint | head -n 100000; exit 1`, "it wrote: complaint; complaint"},
		{`printf '"half\033\n'`, `it wrote: "half\x1b`},
	} {
		if err := os.WriteFile(smi, []byte("#!/bin/sh\n"+c.script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		_, err := (&trial{machine: &machine{smi: smi}}).query(t.Context(), "--query-gpu=index")
		if err == nil || !strings.Contains(err.Error(), c.want) || len(err.Error()) > 2*sanitize.Longest {
			t.Errorf("%s: %v, want %q", c.script, err, c.want)
		}
	}
}

func TestACheckThatFailsEndsWhatRestsOnItAndTheRunHasFailed(t *testing.T) {
	wrong := errors.New("wrong")
	r := newReport(io.Discard, false)
	r.check("first", func() (string, error) { return "seen", nil })
	r.check("absent", func() (string, error) { return "", notHere("not on this machine") })
	if r.failed() || r.broken {
		t.Error("what is not on this machine has failed")
	}
	r.check("second", func() (string, error) { return "", wrong })
	r.check("third", func() (string, error) { t.Error("it is made though what it rests on has failed"); return "", nil })
	r.alone("last", func() (string, error) { return "is made", nil })
	if !r.failed() {
		t.Error("the run has not failed")
	}
	for _, want := range []string{"first", "not on this machine", "FAILED", "rests on has not passed", "is made"} {
		if !strings.Contains(r.table(), want) {
			t.Errorf("%q is not in the table:\n%s", want, r.table())
		}
	}
}

func TestTheDRADriverGetsTheLibrariesThatThisProcessHasLoaded(t *testing.T) {
	const line = "7f1c0a000000-7f1c0a0f0000 r-xp 00000000 08:01 1234                       "
	for text, want := range map[string][2]string{
		line + "/usr/lib/x86_64-linux-gnu/libc.so.6\n" + line + "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04\n": {"/usr/lib/x86_64-linux-gnu", "580.159.04"},
		line + "/opt/libnvidia-ml.so.1\n":                  {},
		line + "/usr/lib/libcuda.so.580.159.04\n":          {},
		line + "/lib/libnvidia-ml.so.580.159.04 (deleted)": {},
	} {
		folder, version, err := loaded(text)
		var absent *notHereError
		if [2]string{folder, version} != want || errors.As(err, &absent) != (version == "") {
			t.Errorf("%s: %q, %q, %v, want %q", text, folder, version, err, want)
		}
	}

	libraries, root := t.TempDir(), filepath.Join(t.TempDir(), "root")
	smi := filepath.Join(libraries, "smi")
	for _, name := range []string{"smi", "libnvidia-ml.so.580.1", "libcuda.so.580.1"} {
		if err := os.WriteFile(filepath.Join(libraries, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	over, err := driverFiles(root, libraries, "580.1", smi)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range over {
		got = append(got, m.Target+" "+strings.TrimPrefix(m.Source, libraries))
		if inside, err := filepath.Rel("/driver-root", m.Target); err != nil {
			t.Error(err)
		} else if _, err := os.Stat(filepath.Join(root, inside)); err != nil {
			t.Errorf("nothing is there for the mount on %s: %v", m.Target, err)
		}
	}
	want := []string{
		"/driver-root " + root, "/driver-root/dev /dev", "/driver-root/usr/bin/nvidia-smi /smi", "/driver-root/usr/lib64/libcuda.so.1 /libcuda.so.580.1",
		"/driver-root/usr/lib64/libcuda.so.580.1 /libcuda.so.580.1", "/driver-root/usr/lib64/libnvidia-ml.so.1 /libnvidia-ml.so.580.1",
		"/driver-root/usr/lib64/libnvidia-ml.so.580.1 /libnvidia-ml.so.580.1",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the driver sees (-want +got):\n%s", diff)
	}
	if _, err := driverFiles(root, libraries, "581.1", smi); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a version that is not there: %v", err)
	}
}
