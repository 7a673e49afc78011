package holders_test

import (
	"errors"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders"
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

func TestHangupReachesTheProgramsOfThePodAndNoOthers(t *testing.T) {
	hungUp := make(chan os.Signal, 2)
	signal.Notify(hungUp, unix.SIGHUP) // even if the program that has started the tests ignores it
	defer signal.Stop(hungUp)
	table, own, parent := t.TempDir(), os.Getpid(), os.Getppid()
	listProcess(t, table, own, "nvidia-device-p", pluginPod)
	listProcess(t, table, parent, "nvidia-device-p", otherPod)

	told, err := holders.Processes{Root: table}.Hangup(t.Context(), []types.UID{pluginPod}, []string{"nvidia-device-plugin"})
	if err != nil || len(told) != 1 || told[0].PID != own || told[0].PodUID != pluginPod {
		t.Fatalf("told %v, %v; want pid %d", told, err, own)
	}
	select {
	case <-hungUp:
	case <-t.Context().Done():
	case <-time.After(time.Minute):
		t.Error("no SIGHUP has come")
	}
	for _, row := range []struct {
		pods     []types.UID
		commands []string
	}{{[]types.UID{pluginPod}, []string{"gpu-feature-discovery"}}, {nil, []string{"nvidia-device-plugin"}}} {
		if told, err := (holders.Processes{Root: table}).Hangup(t.Context(), row.pods, row.commands); err != nil || len(told) > 0 {
			t.Errorf("pods %v, commands %v: told %v, %v", row.pods, row.commands, told, err)
		}
	}
}

func TestHangupNamesTheProcessThatItCouldNotSignal(t *testing.T) {
	table := t.TempDir()
	listProcess(t, table, 4711, "nvidia-device-p", pluginPod)
	listProcess(t, table, 4712, "gpu-feature-dis", pluginPod)
	processes := holders.Processes{Root: table, Signal: func(pid int, _ unix.Signal) error {
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
	processes := holders.Processes{Root: table}
	if there, err := processes.FileOf(t.Context(), pluginPod, "config-manager", "/available-configs/a"); there || err != nil {
		t.Errorf("before it is there: %t, %v", there, err)
	}
	if err := os.WriteFile(filepath.Join(seen, "available-configs", "a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if there, err := processes.FileOf(t.Context(), pluginPod, "config-manager", "/available-configs/a"); !there || err != nil {
		t.Errorf("when it is there: %t, %v", there, err)
	}
	if _, err := processes.FileOf(t.Context(), otherPod, "config-manager", "/available-configs/a"); err == nil {
		t.Error("a pod without such a process sees it")
	}
}
