package holders_test

import (
	"errors"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
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

	signaled, err := holders.Processes{Root: table}.Hangup(t.Context(), []types.UID{pluginPod}, []string{"nvidia-device-plugin"})
	if err != nil || len(signaled) != 1 || signaled[0].PID != own || signaled[0].PodUID != pluginPod {
		t.Fatalf("signaled %v, %v; want pid %d", signaled, err, own)
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
		if signaled, err := (holders.Processes{Root: table}).Hangup(t.Context(), row.pods, row.commands); err != nil || len(signaled) > 0 {
			t.Errorf("pods %v, commands %v: signaled %v, %v", row.pods, row.commands, signaled, err)
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
	signaled, err := processes.Hangup(t.Context(), []types.UID{pluginPod}, []string{"nvidia-device-plugin", "gpu-feature-discovery"})
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "pid 4711 nvidia-device-p of pod "+string(pluginPod)) {
		t.Errorf("error %v", err)
	}
	if len(signaled) != 1 || signaled[0].PID != 4712 {
		t.Errorf("signaled %v, want pid 4712", signaled)
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

func TestSocketsAreThoseThatAreListenedOnAtAPath(t *testing.T) {
	const (
		header    = "Num       RefCount Protocol Flags    Type St Inode Path\n"
		listens   = "0000000000000000: 00000002 00000000 00010000 0001 01 21871 /var/lib/kubelet/device-plugins/nvidia-gpu.sock\n"
		connected = "0000000000000000: 00000003 00000000 00000000 0001 03 21872 /var/lib/kubelet/device-plugins/nvidia-gpu.sock\n"
		abstract  = "0000000000000000: 00000002 00000000 00010000 0001 01 21873 @/var/lib/kubelet/device-plugins/nvidia-gpu.sock\n"
		nameless  = "0000000000000000: 00000002 00000000 00010000 0001 01 21874\n"
		other     = "0000000000000000: 00000002 00000000 00010000 0001 01 21875 /other"
	)
	socket := []string{"/var/lib/kubelet/device-plugins/nvidia-gpu.sock"}
	table := t.TempDir()
	listProcess(t, table, 4711, "nvidia-device-p", pluginPod)
	processes := holders.Processes{Root: table}
	if _, err := processes.Listeners(t.Context(), pluginPod, "nvidia-device-plugin"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a kernel that does not say: %v", err)
	}
	if err := os.Mkdir(filepath.Join(table, "4711", "net"), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][]string{
		"": nil, header: nil, header + connected + abstract + nameless: nil, "0 0 0 zz 0 0 0 /a\n": nil,
		header + connected + listens + nameless: socket, strings.Repeat(connected, 100) + listens + other: append(socket, "/other"),
	} {
		if err := os.WriteFile(filepath.Join(table, "4711", "net", "unix"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := processes.Listeners(t.Context(), pluginPod, "nvidia-device-plugin"); !slices.Equal(got, want) || err != nil {
			t.Errorf("sockets %v, %v; want %v by\n%s", got, err, want, text)
		}
	}
	if err := os.WriteFile(filepath.Join(table, "4711", "net", "unix"), []byte(strings.Repeat(connected, 10000)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := processes.Listeners(t.Context(), pluginPod, "nvidia-device-plugin"); err == nil {
		t.Errorf("of more than can be a pod's own: %v", got)
	}
	if _, err := processes.Listeners(t.Context(), otherPod, "nvidia-device-plugin"); !errors.Is(err, holders.ErrNoProcess) {
		t.Errorf("of a pod without such a process: %v", err)
	}
}

func TestTheKernelSaysWhichSocketsAreListenedOn(t *testing.T) {
	dir, err := os.MkdirTemp("", "listens") //nolint:usetesting // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	table, socket := t.TempDir(), filepath.Join(dir, "nvidia-gpu.sock")
	listProcess(t, table, 4711, "nvidia-device-p", pluginPod)
	if err := os.Symlink("/proc/self/net", filepath.Join(table, "4711", "net")); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	processes := holders.Processes{Root: table}
	if got, err := processes.Listeners(t.Context(), pluginPod, "nvidia-device-plugin"); !slices.Contains(got, socket) || err != nil {
		t.Errorf("sockets %v, %v; want %s among them", got, err, socket)
	}
	listener.Close()
	if got, err := processes.Listeners(t.Context(), pluginPod, "nvidia-device-plugin"); slices.Contains(got, socket) || err != nil {
		t.Errorf("sockets %v, %v; want %s no more", got, err, socket)
	}
}
