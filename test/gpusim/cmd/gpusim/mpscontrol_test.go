package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// mpsRig is a node on which NVIDIA's MPS control daemon for Kubernetes runs.
type mpsRig struct {
	t       *testing.T
	gpus    *gpusim.Node
	root    string // the daemon's /mps
	config  string
	daemon  string // NVIDIA's program
	sandbox string
	o       sandbox.Options
}

func newMPSRig(t *testing.T) *mpsRig {
	t.Helper()
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	b := binaries.Builder{}
	build := func(file string, err error) string {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	dir := t.TempDir()
	spec, err := gpusim.ParseSpec([]byte("gpus: [{model: A100-80GB}, {model: T4}]"))
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := gpusim.Create(filepath.Join(dir, "gpus"), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = gpus.Close() }) // its directory goes with the test
	self := build(b.Tool(t.Context(), "./test/gpusim/cmd/gpusim"))
	bin := filepath.Join(dir, "bin")
	for _, d := range []string{bin, filepath.Join(dir, "mps")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"nvidia-smi", mpsControlName} {
		if err := os.Symlink(self, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	r := &mpsRig{
		t: t, gpus: gpus, root: filepath.Join(dir, "mps"), config: filepath.Join(dir, "config.yaml"),
		daemon:  filepath.Join(build(b.DevicePlugin(t.Context())), "mps-control-daemon"),
		sandbox: build(b.Tool(t.Context(), "./test/sandbox/cmd/sandbox")),
	}
	r.o = sandbox.Options{
		Mounts: []sandbox.Mount{{Source: r.root, Target: "/mps"}},
		Env: []string{
			"GPUSIM_NODE=" + gpus.Dir(), "LD_LIBRARY_PATH=" + filepath.Dir(build(b.LibNVML(t.Context()))), "CONFIG_FILE=" + r.config,
			"CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu/pipe",
		},
	}
	return r
}

// share writes the config that the device plugin reads, too.
func (r *mpsRig) share(replicas int) {
	r.t.Helper()
	text := fmt.Sprintf("version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n", replicas)
	if err := os.WriteFile(r.config, []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// start starts the daemon and waits until it says that it is ready. What it returns waits for its end.
func (r *mpsRig) start() (process *os.Process, ended func() error) {
	r.t.Helper()
	var log bytes.Buffer
	cmd := sandbox.Command(r.t.Context(), r.sandbox, r.o, r.daemon)
	cmd.Stdout, cmd.Stderr = &log, &log
	// The tail that it follows its log with outlives it when it is killed, but in a container, and keeps these open.
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }) // nothing is left of it if it has ended well
	end := make(chan error, 1)
	go func() { end <- cmd.Wait() }()
	r.await(func() bool {
		_, err := os.Stat(filepath.Join(r.root, ".ready"))
		return err == nil
	}, &log)
	return cmd.Process, func() error { return receive.From(r.t, end) }
}

func (r *mpsRig) await(done func() bool, log *bytes.Buffer) {
	r.t.Helper()
	err := wait.PollUntilContextTimeout(r.t.Context(), 20*time.Millisecond, 5*time.Minute, true, func(context.Context) (bool, error) {
		return done(), nil
	})
	if err != nil {
		r.t.Fatalf("%v\n%s", err, log)
	}
}

// ask runs nvidia-cuda-mps-control as the device plugin does to find out whether the daemon is well.
func (r *mpsRig) ask(command string) (string, error) {
	cmd := sandbox.Command(r.t.Context(), r.sandbox, r.o, mpsControlName)
	cmd.Stdin = strings.NewReader(command)
	out, err := cmd.Output()
	return string(out), err
}

func (r *mpsRig) expect(want string) {
	r.t.Helper()
	if diff := cmp.Diff(strings.TrimPrefix(want, "\n"), r.gpus.String()); diff != "" {
		r.t.Errorf("GPUs (-want +got):\n%s", diff)
	}
}

const (
	exclusive = "gpu 0 A100-80GB mig=off compute-mode=3\ngpu 1 T4 compute-mode=3\n"
	open      = "gpu 0 A100-80GB mig=off\ngpu 1 T4\n"
)

func TestNVIDIAsControlDaemonSharesTheSimulatedGPUsByMPS(t *testing.T) {
	r := newMPSRig(t)
	r.share(4)
	process, ended := r.start()
	r.expect(exclusive)
	if got, err := r.ask("get_default_active_thread_percentage"); got != "25.0\n" || err != nil {
		t.Errorf("a client of four has %q of the threads, %v", got, err)
	}
	if got, err := r.ask("get_default_device_pinned_mem_limit 0"); got != "20480M\n" || err != nil {
		t.Errorf("a client of four may have %q of the memory of GPU 0, %v", got, err)
	}

	r.share(10)
	if err := errors.Join(os.Remove(filepath.Join(r.root, ".ready")), process.Signal(syscall.SIGHUP)); err != nil {
		t.Fatal(err)
	}
	r.await(func() bool {
		_, err := os.Stat(filepath.Join(r.root, ".ready"))
		return err == nil
	}, new(bytes.Buffer))
	if got, err := r.ask("get_default_active_thread_percentage"); got != "10.0\n" || err != nil {
		t.Errorf("a client of ten has %q of the threads, %v", got, err)
	}

	if err := process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := ended(); err != nil {
		t.Errorf("the daemon ended with %v", err)
	}
	r.expect(open)
	if _, err := r.ask("get_default_active_thread_percentage"); err == nil {
		t.Error("a daemon that has ended answers")
	}
	if _, err := os.Stat(filepath.Join(r.root, ".ready")); err == nil {
		t.Error("a daemon that has ended is said to be ready")
	}
}

// Leftovers of a daemon that was killed are what an agent has to clean up.
func TestAControlDaemonThatIsKilledLeavesTheComputeModeBehind(t *testing.T) {
	r := newMPSRig(t)
	r.share(2)
	process, ended := r.start()
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := ended(); err == nil {
		t.Error("it was not killed")
	}
	r.await(func() bool {
		_, err := r.ask("get_default_active_thread_percentage")
		return err != nil
	}, new(bytes.Buffer))
	r.expect(exclusive)
	if _, err := os.Stat(filepath.Join(r.root, ".ready")); err != nil {
		t.Error(err)
	}
}

func TestTheControlDaemonRefusesMoreReplicasThanMPSHasClients(t *testing.T) {
	r := newMPSRig(t)
	r.share(49)
	out, err := sandbox.Command(t.Context(), r.sandbox, r.o, r.daemon).CombinedOutput()
	if exit := new(exec.ExitError); !errors.As(err, &exit) || !strings.Contains(string(out), "maximum allowed replicas exceeded: 49 > 48") {
		t.Errorf("got %v\n%s", err, out)
	}
	r.expect(open)
}

func TestMPSControlAnswersWhatItIsAsked(t *testing.T) {
	d := mpsDaemon{log: new(bytes.Buffer), pinned: map[string]string{}, quit: func() error { return nil }}
	for _, step := range []struct{ command, want string }{
		{"get_default_active_thread_percentage", "100.0\n"},
		{"set_default_active_thread_percentage 33", "33.0\n"},
		{"set_default_active_thread_percentage 0", "Invalid argument\n"},
		{"get_default_active_thread_percentage", "33.0\n"},
		{"set_default_device_pinned_mem_limit 0 10G", ""},
		{"get_default_device_pinned_mem_limit 0", "10G\n"},
		{"get_default_device_pinned_mem_limit", "Unknown command\n"},
		{"start_server", "Unknown command\n"},
		{"", ""},
	} {
		if got := d.answer(strings.Fields(step.command)); got != step.want {
			t.Errorf("%s: got %q, want %q", step.command, got, step.want)
		}
	}
}
