package drain_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain"
)

const (
	pluginPod = types.UID("11111111-1111-4111-8111-111111111111")
	otherPod  = types.UID("22222222-2222-4222-8222-222222222222")
)

// listProcess adds a process to a table, as one of a container of the pod.
func listProcess(t *testing.T, table string, pid int, command string, pod types.UID) {
	t.Helper()
	dir := filepath.Join(table, strconv.Itoa(pid))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cgroup := "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(string(pod), "-", "_") +
		".slice/cri-containerd-" + strings.Repeat("b", 64) + ".scope\n"
	for name, text := range map[string]string{"comm": command + "\n", "cgroup": cgroup} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// waits starts a process that does nothing until it is told to end.
func waits(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Wait() // it may have ended before
	})
	return cmd
}

func TestHangupReachesTheProgramsOfThePodAndNobodyElse(t *testing.T) {
	table := t.TempDir()
	plugin, ofAnother, neighbour := waits(t), waits(t), waits(t)
	listProcess(t, table, plugin.Process.Pid, "nvidia-device-p", pluginPod)
	listProcess(t, table, ofAnother.Process.Pid, "nvidia-device-p", otherPod)
	listProcess(t, table, neighbour.Process.Pid, "sh", pluginPod)

	told, err := drain.Processes{Root: table}.Hangup(t.Context(), []types.UID{pluginPod}, []string{"nvidia-device-plugin"})
	if err != nil || len(told) != 1 || told[0].PID != plugin.Process.Pid || told[0].PodUID != pluginPod {
		t.Fatalf("told %v, %v; want pid %d", told, err, plugin.Process.Pid)
	}
	if err := plugin.Wait(); err == nil || err.Error() != "signal: hangup" {
		t.Errorf("the plugin ended by %v, want SIGHUP", err)
	}
	for _, other := range []*exec.Cmd{ofAnother, neighbour} {
		if err := other.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("pid %d: %v", other.Process.Pid, err)
		}
	}
}

func TestHangupSaysWhomItCouldNotTell(t *testing.T) {
	table := t.TempDir()
	listProcess(t, table, 4711, "nvidia-device-p", pluginPod)
	listProcess(t, table, 4712, "gpu-feature-dis", pluginPod)
	processes := drain.Processes{Root: table, Signal: func(pid int, _ unix.Signal) error {
		if pid == 4711 {
			return unix.EPERM
		}
		return nil
	}}
	told, err := processes.Hangup(t.Context(), []types.UID{pluginPod}, []string{"nvidia-device-plugin", "gpu-feature-discovery"})
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "pid 4711 nvidia-device-p of pod "+string(pluginPod)) {
		t.Errorf("error %v", err)
	}
	if len(told) != 1 || told[0].PID != 4712 {
		t.Errorf("told %v, want pid 4712", told)
	}
}

func TestAFileIsLookedForAsTheProcessSeesIt(t *testing.T) {
	table, seen := t.TempDir(), t.TempDir()
	listProcess(t, table, 4711, "config-manager", pluginPod)
	if err := os.Symlink(seen, filepath.Join(table, "4711", "root")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(seen, "available-configs"), 0o755); err != nil {
		t.Fatal(err)
	}
	processes := drain.Processes{Root: table}
	if there, err := processes.FileOf(pluginPod, "config-manager", "/available-configs/a"); there || err != nil {
		t.Errorf("before it is there: %t, %v", there, err)
	}
	if err := os.WriteFile(filepath.Join(seen, "available-configs", "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if there, err := processes.FileOf(pluginPod, "config-manager", "/available-configs/a"); !there || err != nil {
		t.Errorf("when it is there: %t, %v", there, err)
	}
	if _, err := processes.FileOf(otherPod, "config-manager", "/available-configs/a"); err == nil {
		t.Error("a pod without such a process sees it")
	}
}
