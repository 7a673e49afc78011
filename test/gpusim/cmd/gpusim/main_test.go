package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/receive"
)

// execute runs a command line and gives what it prints, and its error behind.
func execute(c *cobra.Command, stdin string, args ...string) string {
	var out bytes.Buffer
	c.SetIn(strings.NewReader(stdin))
	c.SetOut(&out)
	c.SetErr(&bytes.Buffer{})
	c.SetArgs(args)
	if err := c.Execute(); err != nil {
		fmt.Fprintf(&out, "error: %v\n", err)
	}
	return out.String()
}

func TestCommandsDoToANodeWhatTheySay(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "node")
	t.Setenv("GPUSIM_NODE", dir)
	for _, step := range []struct{ line, stdin, want string }{
		{"show", "", "error: opening node in " + dir + ": open " + dir + "/lock: no such file or directory: make it with gpusim create\n"},
		{"create -", "gpus: [{model: A100-80GB}, {model: T4}]", "gpu 0 A100-80GB mig=off\ngpu 1 T4\n"},
		{"hold 0 77 --name dcgm --hidden", "", ""},
		{"hold 1 78 --name trainer --used 20", "", ""},
		{"health 1 --recovery-action 1 --remap-pending", "", ""},
		{"hold 1 79 --name server --used 3 --mps", "", ""},
		{"use 79 30", "", ""},
		{"use 77 30", "", "error: changing the memory of process 77: it computes on no device, or the memory is negative\n"},
		{"show", "", "gpu 0 A100-80GB mig=off\n  client 77 dcgm\ngpu 1 T4 recovery-action=1 remap-pending\n  process 78 trainer 20 MiB\n  MPS client 79 server 30 MiB\n"},
		{"release 79", "", ""},
		{"reset 0", "", "error: resetting GPU 0: In use by another client\n"},
		{"release 78", "", ""},
		{"release 78", "", "error: releasing process 78: it holds no device\n"},
		{"reset 1", "", ""},
		{"reload", "", "error: reloading the driver: process 77 holds GPU 0: release it first\n"},
		{"upgrade 590.44.01", "", "error: replacing the driver: process 77 holds GPU 0: release it first\n"},
		{"upgrade latest", "", "error: replacing the driver: version is \"latest\": use one such as \"580.159.04\"\n"},
		{"show", "", "gpu 0 A100-80GB mig=off\n  client 77 dcgm\ngpu 1 T4\n"},
		{"calls --reads", "", "Init 2\n"},
		{"calls --forget", "", "Reset 2\n"},
		{"calls", "", ""},
		{"calls --reads", "", ""},
		{"fail SetMigMode", "", "error: the fault does nothing: set --return, --activation or --hang, or --off to take faults away\n"},
		{"fail SetMigMode --return in_use --after 2", "", ""},
		{"fail SetMigMode --off", "", ""},
		{"fail ComputeInstanceDestroy --return in_use --for 300ms", "", ""},
		{"delay Init 1parsec", "", "error: DURATION is \"1parsec\": use one such as 1.5s\n"},
		{"delay SetMigMode 1s", "", ""},
		{"xid 0 79", "", ""},
		{"ecc 2", "", "error: reporting an event: there is no GPU 2: use 0 to 1\n"},
		{"reboot", "", ""},
		{"upgrade 590.44.01", "", ""},
		{"show", "", "gpu 0 A100-80GB mig=off\ngpu 1 T4\n"},
		{"render " + filepath.Join(dir, "host"), "", ""},
	} {
		if diff := cmp.Diff(step.want, execute(command(), step.stdin, strings.Fields(step.line)...)); diff != "" {
			t.Errorf("gpusim %s (-want +got):\n%s", step.line, diff)
		}
	}
}

func TestNvidiaSMIDoesWhatNVIDIAsProgramsRunItFor(t *testing.T) {
	t.Setenv("GPUSIM_NODE", t.TempDir())
	execute(command(), "gpus: [{model: A100-80GB, count: 2}]", "create", "-")
	for _, step := range []struct {
		line string
		want string
	}{
		{"-r -i 0000:07:00.0,00000000:15:00.0", "GPU 00000000:07:00.0 was successfully reset.\nGPU 00000000:15:00.0 was successfully reset.\n"},
		{"-i 1 -c EXCLUSIVE_PROCESS", ""},
		{"-i 2 -r", "error: no devices were found for [\"2\"]: use an index, a UUID or a PCI address\n"},
		{"-pm 1 -i 1", "Enabled persistence mode for GPU 00000000:15:00.0.\nAll done.\n"},
		{"-r -i 1", "error: resetting GPU 0000:15:00.0: In use by another client\n"},
		{"--persistence-mode=DISABLED -i 1", "Disabled persistence mode for GPU 00000000:15:00.0.\nAll done.\n"},
		{"-r -i 1", "GPU 00000000:15:00.0 was successfully reset.\n"},
		{"-i 0 -pm 1", "Enabled persistence mode for GPU 00000000:07:00.0.\nAll done.\n"},
		{"-pm yes", "error: persistence mode is \"yes\": use 0 or DISABLED, 1 or ENABLED\n"},
		{"-i 1 -c EXCLUSIVE_PROCESS", ""},
		{"-i 1 -c SHARED", "error: compute mode is \"SHARED\": use DEFAULT, PROHIBITED or EXCLUSIVE_PROCESS\n"},
	} {
		if diff := cmp.Diff(step.want, execute(smi(), "", spell(strings.Fields(step.line))...)); diff != "" {
			t.Errorf("nvidia-smi %s (-want +got):\n%s", step.line, diff)
		}
	}
	if diff := cmp.Diff("gpu 0 A100-80GB mig=off persistence=on\ngpu 1 A100-80GB mig=off compute-mode=3\n", execute(command(), "", "show")); diff != "" {
		t.Errorf("GPUs (-want +got):\n%s", diff)
	}
	if got := execute(smi(), "", "-L"); strings.Count(got, "NVIDIA A100-SXM4-80GB (UUID: GPU-") != 2 {
		t.Errorf("nvidia-smi -L: got %s", got)
	}
}

func TestNVIDIASMIAnswersTheQueriesOfTestHardware(t *testing.T) {
	t.Setenv("GPUSIM_NODE", filepath.Join(t.TempDir(), "node"))
	execute(command(), "gpus: [{model: H200}, {model: T4}]", "create", "-")
	execute(command(), "", "hold", "1", "78", "--name", "trainer", "--used", "20")
	const format = "--format=csv,noheader,nounits"
	for _, step := range []struct{ query, want string }{
		{
			"--query-gpu=index,name,memory.total,mig.mode.current,mig.mode.pending,persistence_mode,compute_mode,compute_cap",
			"0, NVIDIA H200, 143771, Disabled, Disabled, Disabled, Default, 9.0\n1, Tesla T4, 15360, [N/A], [N/A], Disabled, Default, 7.5\n",
		},
		{"--query-compute-apps=pid", "78\n"},
		{"--query-gpu=fan.speed", "error: field \"fan.speed\" is not simulated\n"},
	} {
		if diff := cmp.Diff(step.want, execute(smi(), "", step.query, format)); diff != "" {
			t.Errorf("nvidia-smi %s (-want +got):\n%s", step.query, diff)
		}
	}
	if got := execute(smi(), "", "--query-gpu=uuid,pci.bus_id", format); !strings.HasPrefix(got, "GPU-") || strings.Count(got, ", 00000000:") != 2 {
		t.Errorf("uuid and pci.bus_id: got %s", got)
	}
}

// A monitoring agent stands in the way of a reset for as long as it runs.
func TestAMonitorKeepsEveryGPUOpenUntilItIsStopped(t *testing.T) {
	t.Setenv("GPUSIM_NODE", filepath.Join(t.TempDir(), "node"))
	execute(command(), "gpus: [{model: A100-80GB, count: 2}]", "create", "-")
	ctx, end := context.WithCancel(t.Context())
	out, in := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		c := command() //nolint:contextcheck // ExecuteContext gives it one
		c.SetOut(in)
		c.SetArgs([]string{"monitor"})
		ended <- c.ExecuteContext(ctx)
	}()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "every GPU is open\n" {
		t.Fatalf("the monitor says %q, %v", line, err)
	}
	for _, gpu := range []string{"0", "1"} {
		if got := execute(command(), "", "reset", gpu); !strings.HasPrefix(got, "error: ") {
			t.Errorf("GPU %s was reset under a monitor: %q", gpu, got)
		}
	}
	end()
	if err := receive.From(t, ended); err != nil {
		t.Fatal(err)
	}
	for _, gpu := range []string{"0", "1"} {
		if got := execute(command(), "", "reset", gpu); got != "" {
			t.Errorf("resetting GPU %s after the monitor has ended: %q", gpu, got)
		}
	}
}
