package plugin_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// The readers of the file, by the pids of their programs.
const (
	pluginPID    = 501
	discoveryPID = 502
	daemonPID    = 503
)

// host is a node on which pods read the plugin's config file.
type host struct {
	t       *testing.T
	clock   *clocktesting.FakeClock
	table   string
	plugin  *plugin.Handover
	seen    *state.Observed
	signals []int // pids of programs that got a SIGHUP
}

// newHost has a plugin and GPU feature discovery that began a minute before the file was written.
func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, table: t.TempDir(), clock: clocktesting.NewFakeClock(time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC))}
	settings, clock := config.Default(), monotonic.New(h.clock)
	file := filepath.Join(t.TempDir(), "config.yaml")
	h.plugin = &plugin.Handover{
		Plugin: &deviceplugin.Plugin{
			Processes: holders.Processes{Root: h.table, Signal: func(pid int, _ unix.Signal) error {
				h.signals = append(h.signals, pid)
				return nil
			}},
			File: deviceplugin.NewFile(file, file), Settings: settings, Clock: clock, Log: zaptest.NewLogger(t),
		},
		Retries: decide.NewRetries(clock, settings),
	}
	h.seen = &state.Observed{
		Node: &corev1.Node{}, GPUs: []nvml.GPU{{UUID: "GPU-a", ComputeMode: nvml.ComputeDefault}},
		Plugin: state.PluginConfig{Method: config.HandoverFile, Text: "mps", Exists: true, Written: h.clock.Now(), NotifiedPods: map[types.UID]string{}},
	}
	before := h.clock.Now().Add(-time.Minute)
	h.seen.DevicePlugin.Pods = []corev1.Pod{h.pod(pluginPID, "nvidia-device-plugin", before)}
	h.seen.Plugin.Readers = []corev1.Pod{h.seen.DevicePlugin.Pods[0], h.pod(discoveryPID, "gpu-feature-discovery", before)}
	return h
}

// pod makes a pod that runs the program since then.
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

// startDaemon starts the control daemon of MPS, which has read the file.
func (h *host) startDaemon() {
	h.t.Helper()
	pod := h.pod(daemonPID, "mps-control-daemon", h.clock.Now().Add(time.Second))
	h.seen.DevicePlugin.MPSDaemons = []corev1.Pod{pod}
	h.seen.Plugin.Readers = append(h.seen.Plugin.Readers, pod)
	h.seen.GPUs[0].ComputeMode = nvml.ComputeExclusiveProcess
}

// readies has the daemon say that it is ready.
func (h *host) readies() {
	h.t.Helper()
	dir := filepath.Join(h.table, strconv.Itoa(daemonPID), "root", "mps")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, ".ready"), nil, 0o600)); err != nil {
		h.t.Fatal(err)
	}
}

// after lets time pass and reloads; it returns who got a signal, and whether the agent waits.
func (h *host) after(d time.Duration, sharing catalog.SharingStrategy) (signals []int, waits bool) {
	h.t.Helper()
	h.clock.Step(d)
	h.signals = nil
	want := state.Desired{Plugin: &state.DesiredPlugin{Known: true, Sharing: catalog.Sharing{Strategy: sharing}}}
	err := h.plugin.Reload(h.t.Context(), act.Input{Seen: h.seen, Want: want, Steps: []plan.Step{{Kind: plan.ReloadPlugin}}})
	var wait *outcome.Waiting
	if err != nil && !errors.As(err, &wait) {
		h.t.Fatal(err)
	}
	return h.signals, wait != nil
}

func (h *host) expect(what string, d time.Duration, sharing catalog.SharingStrategy, want []int, waiting bool) {
	h.t.Helper()
	signals, waits := h.after(d, sharing)
	slices.Sort(signals)
	if !slices.Equal(signals, want) || waits != waiting {
		h.t.Errorf("%s: the programs %v are notified, and the agent waits: %t; want %v and %t", what, signals, waits, want, waiting)
	}
}

// A plugin that reads of MPS before the control daemon is ready tries again only after half a minute.
func TestThePluginReadsOfMPSWhenTheControlDaemonIsReady(t *testing.T) {
	h := newHost(t)
	h.expect("at first", 0, catalog.SharingMPS, []int{discoveryPID}, true)
	h.expect("without a daemon", 2*time.Second, catalog.SharingMPS, nil, true)
	h.startDaemon()
	h.expect("with a daemon that is not ready", 2*time.Second, catalog.SharingMPS, nil, true)
	h.readies()
	h.expect("with a daemon that is", 100*time.Millisecond, catalog.SharingMPS, []int{pluginPID}, false)
}

func TestADaemonThatReadsItsConfigAgainIsNotReady(t *testing.T) {
	h := newHost(t)
	h.startDaemon()
	h.readies()
	h.seen.Plugin.Written = h.clock.Now().Add(2 * time.Second) // it shared by MPS before, in another way
	h.expect("at first", 3*time.Second, catalog.SharingMPS, []int{discoveryPID, daemonPID}, true)
	h.expect("at once", 10*time.Millisecond, catalog.SharingMPS, nil, true)
	h.expect("after a second", time.Second, catalog.SharingMPS, []int{pluginPID}, false)
}

func TestADaemonThatCannotBeSeenIsTakenForReadyInTime(t *testing.T) {
	h := newHost(t)
	h.startDaemon()
	if err := os.RemoveAll(filepath.Join(h.table, strconv.Itoa(daemonPID))); err != nil { // no process of it is seen
		t.Fatal(err)
	}
	h.expect("at first", 0, catalog.SharingMPS, []int{discoveryPID}, true)
	h.expect("after four seconds", 4*time.Second, catalog.SharingMPS, nil, true)
	h.expect("after seven", 3*time.Second, catalog.SharingMPS, []int{pluginPID}, false)
}

func TestADaemonThatDoesNotComeKeepsThePluginFromItsConfigForAMinute(t *testing.T) {
	h := newHost(t)
	h.expect("at first", 0, catalog.SharingMPS, []int{discoveryPID}, true)
	h.expect("after 59 seconds", 59*time.Second, catalog.SharingMPS, nil, true)
	h.expect("after a minute", time.Second, catalog.SharingMPS, []int{pluginPID}, false)
}

func TestADaemonThatIsNotNeededIsNotWaitedFor(t *testing.T) {
	h := newHost(t)
	h.expect("time-slicing", 0, catalog.SharingTimeSlicing, []int{pluginPID, discoveryPID}, false)
	alone := newHost(t)
	alone.seen.Plugin.Readers = alone.seen.DevicePlugin.Pods
	alone.expect("nothing that could bring a daemon", 0, catalog.SharingMPS, []int{pluginPID}, false)
}
