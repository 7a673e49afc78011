package deviceplugin_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// pids of programs on the node.
const (
	pluginPID    = 501
	discoveryPID = 502
	daemonPID    = 503
)

// host is a node on which pods of the device plugin run.
type host struct {
	t      *testing.T
	clock  *clocktesting.FakeClock
	table  string // of its processes
	plugin *deviceplugin.Plugin
	seen   *state.Observed
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, table: t.TempDir(), clock: clocktesting.NewFakeClock(time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)), seen: &state.Observed{Node: &corev1.Node{}}}
	h.plugin = &deviceplugin.Plugin{
		Processes: holders.Processes{Root: h.table}, Settings: config.Default(), Clock: monotonic.New(h.clock), Log: zaptest.NewLogger(t),
	}
	return h
}

// pod makes a pod whose program runs on the host.
func (h *host) pod(pid int, command string, since time.Time) corev1.Pod {
	h.t.Helper()
	uid := "00000000-0000-4000-8000-000000000" + strconv.Itoa(pid)
	dir := filepath.Join(h.table, strconv.Itoa(pid))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		h.t.Fatal(err)
	}
	cgroup := "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-" + strings.Repeat("a", 64) + ".scope"
	for name, text := range map[string]string{"comm": command[:min(15, len(command))] + "\n", "cgroup": cgroup + "\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: command, UID: types.UID(uid)},
		Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{
			Name: command, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(since)}},
		}}},
	}
}

// pluginPod makes a pod of the device plugin's DaemonSet that runs the program and listens on these sockets.
func (h *host) pluginPod(pid int, command string, sockets ...string) corev1.Pod {
	h.t.Helper()
	pod, is := h.pod(pid, command, h.clock.Now()), true
	pod.Labels = map[string]string{"app": "nvidia-device-plugin-daemonset"}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "plugin", UID: types.UID("a"), Controller: &is}}
	pod.Spec.Containers = []corev1.Container{{Name: "nvidia-device-plugin"}}
	h.listens(pid, sockets...)
	return pod
}

// listens has the process listen on these Unix sockets, and no others.
func (h *host) listens(pid int, sockets ...string) {
	h.t.Helper()
	text := "Num       RefCount Protocol Flags    Type St Inode Path\n"
	for _, socket := range sockets {
		text += "0000000000000000: 00000002 00000000 00010000 0001 01 4711 " + socket + "\n"
	}
	dir := filepath.Join(h.table, strconv.Itoa(pid), "net")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "unix"), []byte(text), 0o600); err != nil {
		h.t.Fatal(err)
	}
}

// lost observes the pods, and returns what the observation says of kubelet's connection to the plugin.
func (h *host) lost(pods ...corev1.Pod) string {
	h.t.Helper()
	h.plugin.ObservePods(h.t.Context(), h.seen, pods)
	if len(h.seen.DevicePlugin.Pods) != len(pods) {
		h.t.Fatalf("of %d pods %d are the device plugin's", len(pods), len(h.seen.DevicePlugin.Pods))
	}
	return h.seen.DevicePlugin.Unconnected
}

const kubeletDir = "/var/lib/kubelet/device-plugins/"

func TestWhatKubeletGivesOutNeedsASocketOfThePlugin(t *testing.T) {
	t.Parallel()
	mig := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.10gb"}
	for name, row := range map[string]struct {
		offered []string
		sockets []string
		lost    string // resources
	}{
		"served":                      {mig, []string{kubeletDir + "nvidia-mig-1g.10gb.sock", kubeletDir + "nvidia-gpu.sock"}, ""},
		"shared under another name":   {[]string{"nvidia.com/gpu.shared"}, []string{kubeletDir + "nvidia-gpu.shared.sock"}, ""},
		"none":                        {mig, nil, "nvidia.com/gpu; nvidia.com/mig-1g.10gb"},
		"one of two":                  {mig, []string{kubeletDir + "nvidia-gpu.sock"}, "nvidia.com/mig-1g.10gb"},
		"a mesh listens, too":         {mig, []string{"/run/mesh", kubeletDir + "nvidia-mig-1g.10gb.sock"}, "nvidia.com/gpu"},
		"sockets have other names":    {mig, []string{kubeletDir + "vendor.sock"}, ""},
		"kubelet gives out no device": {nil, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.seen.Journal, h.seen.Kubelet.Offered = &journal.Journal{}, capacity.Resources{}
			for _, resource := range row.offered {
				h.seen.Kubelet.Offered[resource] = []string{"a"}
			}
			got := h.lost(h.pluginPod(pluginPID, "nvidia-device-plugin", row.sockets...))
			if row.lost == "" && got != "" || row.lost != "" && !strings.HasSuffix(got, " fail: "+row.lost) {
				t.Errorf("the observation says %q, want %q", got, row.lost)
			}
		})
	}
}

func TestSocketsThatCannotBeSeenAreNotMissed(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.seen.Journal, h.seen.Kubelet.Offered = &journal.Journal{}, capacity.Resources{"nvidia.com/gpu": {"a"}}
	plugin := h.pluginPod(pluginPID, "nvidia-device-plugin")
	starting := h.pluginPod(daemonPID, "pause")
	if got := h.lost(starting); got != "" {
		t.Errorf("of a pod that has no such process yet: %q", got)
	}
	h.clock.Step(time.Second)
	if got := h.lost(starting, plugin); !strings.Contains(got, "pod gpu-operator/nvidia-device-plugin listens on no socket") {
		t.Errorf("beside a pod that has no such process yet: %q", got)
	}
	if err := os.RemoveAll(filepath.Join(h.table, strconv.Itoa(pluginPID), "net")); err != nil {
		t.Fatal(err)
	}
	h.clock.Step(time.Second)
	if got := h.lost(plugin); got != "" {
		t.Errorf("of a pod whose sockets the kernel does not show: %q", got)
	}
	second := h.pluginPod(discoveryPID, "nvidia-device-plugin", kubeletDir+"nvidia-gpu.sock")
	h.listens(pluginPID)
	h.clock.Step(time.Second)
	if got := h.lost(plugin, second); got != "" {
		t.Errorf("while another pod serves: %q", got)
	}
}

// The observation goes through the table of all processes.
func TestAtRestTheSocketsAreCheckedOnceAMinute(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.seen.Kubelet.Offered = capacity.Resources{"nvidia.com/gpu": {"a"}}
	plugin := h.pluginPod(pluginPID, "nvidia-device-plugin", kubeletDir+"nvidia-gpu.sock")
	if got := h.lost(plugin); got != "" {
		t.Fatal(got)
	}
	h.listens(pluginPID)
	h.clock.Step(59 * time.Second)
	if got := h.lost(plugin); got != "" {
		t.Errorf("within a minute: %q", got)
	}
	h.clock.Step(time.Second)
	if h.lost(plugin) == "" {
		t.Error("after a minute nothing is lost")
	}
	h.listens(pluginPID, kubeletDir+"nvidia-gpu.sock")
	if got := h.lost(plugin); got != "" {
		t.Errorf("when the plugin serves again: %q", got)
	}
	h.listens(pluginPID)
	h.seen.Journal = &journal.Journal{}
	if got := h.lost(plugin); got != "" {
		t.Errorf("at once in a change: %q", got)
	}
	h.clock.Step(time.Second)
	if h.lost(plugin) == "" {
		t.Error("a second later in a change nothing is lost")
	}
	h.plugin.Processes = holders.Processes{Root: t.TempDir()}
	if got := h.lost(plugin); got != "" {
		t.Errorf("of a table without processes: %q", got)
	}
}
