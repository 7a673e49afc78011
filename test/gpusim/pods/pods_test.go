package pods_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// newUsers are the users of two GPUs.
func newUsers(t *testing.T) pods.Users {
	t.Helper()
	gpus, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: gpusim.Models()[0]}, {Model: gpusim.Models()[0]}}})
	if err != nil {
		t.Fatal(err)
	}
	return pods.Users{GPUs: gpus, Table: newTable(t), Log: zap.NewNop()}
}

const firstBoot = "00000000-0000-4000-8000-000000000001"

func newTable(t *testing.T) *pods.Table {
	t.Helper()
	table, err := pods.MakeTable(t.TempDir(), firstBoot)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// reported are the pids that NVML reports on the first GPU.
func reported(t *testing.T, u pods.Users) []int {
	t.Helper()
	seen, err := u.GPUs.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, p := range seen[0].Processes {
		out = append(out, p.PID)
	}
	return out
}

// whoHolds is what the agent finds out about who holds the first GPU, where the table is the host's.
func whoHolds(t *testing.T, u pods.Users, all ...corev1.Pod) string {
	t.Helper()
	clients, err := holders.Processes{Root: u.Table.Dir()}.Holders(t.Context(), []holders.Sought{{Device: u.GPUs.UUIDs()[0], Reported: reported(t, u)}})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for i, name := range holders.NameClients(clients, all) {
		_, name, _ = strings.Cut(name, " ")
		_, name, _ = strings.Cut(name, " ") // without the pid
		lines = append(lines, fmt.Sprintf("%s: %q\n", name, clients[i].Sources))
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func TestAPodIsOneProcessOnItsDeviceHoweverOftenItsKubeletStarts(t *testing.T) {
	users := newUsers(t)
	pod, ids := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "user", UID: "1"}}, []string{users.GPUs.UUIDs()[0] + "::3"}
	for range 2 { // the second is a kubelet that finds the pod running
		users.Hold(pod, ids)
		if n := len(reported(t, users)); n != 1 {
			t.Errorf("%d processes on the GPU of one pod", n)
		}
	}
	users.Release(pod, ids)
	if n := len(reported(t, users)); n != 0 {
		t.Errorf("%d processes on the GPU after its pod has ended", n)
	}
}

// newPod is the pod team/<name>.
func newPod(name string, uid types.UID, class corev1.PodQOSClass) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: uid}, Status: corev1.PodStatus{QOSClass: class},
	}
}

func TestTheAgentFindsWhoHoldsAGPU(t *testing.T) {
	users := newUsers(t)
	first, second := users.GPUs.UUIDs()[0], users.GPUs.UUIDs()[1]
	all := []corev1.Pod{
		newPod("guaranteed", "10000000-0000-0000-0000-000000000000", corev1.PodQOSGuaranteed),
		newPod("burstable", "20000000-0000-0000-0000-000000000000", corev1.PodQOSBurstable),
		newPod("elsewhere", "30000000-0000-0000-0000-000000000000", corev1.PodQOSBestEffort),
		newPod("static", "40000000-0000-0000-0000-000000000000", corev1.PodQOSBestEffort),
		newPod("monitor", "50000000-0000-0000-0000-000000000000", corev1.PodQOSBestEffort),
	}
	all[3].Annotations = map[string]string{"kubernetes.io/config.hash": "8a5a4c9f0ac7ffa7a0b6dbd0b9d3bdb1", corev1.MirrorPodAnnotationKey: "8a5a4c9f0ac7ffa7a0b6dbd0b9d3bdb1"}
	all[3].Spec.NodeName = "gpu-1"
	all[3].OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "gpu-1", Controller: ptr.To(true)}}
	users.Hold(&all[0], []string{first})
	users.Hold(&all[1], []string{first + "::0", first + "::1"})
	users.Hold(&all[2], []string{second})
	users.Hold(&all[3], []string{first})
	for _, err := range []error{
		users.StartMonitor(pods.Process{PID: 1001, Command: "nv-hostengine", Cgroup: pods.OfPod(&all[4])}, first, second),
		users.Start(pods.Process{PID: 1002, Command: "python", Cgroup: pods.OfUnit("training.service")}, first),
		users.Start(pods.Process{PID: 1003, Command: "a-program-with-a-long-name", Cgroup: "/"}, first),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	want := `a-program-with-: ["NVML" "device file /dev/nvidia0"]
burstable of pod team/burstable: ["NVML" "device file /dev/nvidia0"]
burstable of pod team/burstable: ["NVML" "device file /dev/nvidia0"]
guaranteed of pod team/guaranteed: ["NVML" "device file /dev/nvidia0"]
nv-hostengine of pod team/monitor: ["device file /dev/nvidia0"]
python of training.service: ["NVML" "device file /dev/nvidia0"]
static of pod team/static: ["NVML" "device file /dev/nvidia0"]
`
	if diff := cmp.Diff(want, whoHolds(t, users, all...)); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	users.Release(&all[0], []string{first})
	users.Release(&all[1], []string{first + "::0", first + "::1"})
	users.Release(&all[3], []string{first})
	for _, pid := range []int{1001, 1002, 1003} {
		if err := users.End(pid); err != nil {
			t.Error(err)
		}
	}
	if got := whoHolds(t, users, all...); got != "" {
		t.Errorf("after they have ended, got:\n%s", got)
	}
}

func TestAMIGDeviceIsHeldByTheFileOfItsGPU(t *testing.T) {
	users := newUsers(t)
	driver := users.GPUs.Driver()
	gpu := nvml.UUID(users.GPUs.UUIDs()[1])
	if err := driver.SetMode(t.Context(), gpu, true); err != nil {
		t.Fatal(err)
	}
	if err := users.GPUs.Reset(1); err != nil {
		t.Fatal(err)
	}
	seen, err := driver.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	profile := seen[1].Profiles[0]
	if err := driver.Create(t.Context(), gpu, nvml.Placed{Profile: profile.Name, Span: profile.Placements[0]}); err != nil {
		t.Fatal(err)
	}
	pod := newPod("user", "10000000-0000-0000-0000-000000000000", corev1.PodQOSGuaranteed)
	users.Hold(&pod, []string{users.GPUs.MIGDevice(1, profile.Placements[0].Start)})
	clients, err := holders.Processes{Root: users.Table.Dir()}.Holders(t.Context(), []holders.Sought{{Device: string(gpu), Minor: 1}})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := holders.NameClients(clients, []corev1.Pod{pod}), "user of pod team/user"; len(got) != 1 || !strings.HasSuffix(got[0], want) {
		t.Errorf("of GPU 1, got %q, want one: %s", got, want)
	}
}

// The agent may look at any moment.
func TestAProcessIsInTheTableAsAWholeOrNotAtAll(t *testing.T) {
	table := newTable(t)
	pod := newPod("user", "10000000-0000-0000-0000-000000000000", corev1.PodQOSGuaranteed)
	ended, observed := make(chan error, 1), make(chan struct{})
	go func() {
		var err error
		for n := 0; err == nil; n++ {
			err = table.Add(pods.Process{PID: 99, Command: "python", Cgroup: pods.OfPod(&pod), Files: []string{"/dev/nvidia0"}})
			if n%2 == 1 && err == nil {
				err = table.Remove(99)
			}
			select {
			case <-observed:
				ended <- err
				return
			default:
			}
		}
		ended <- err
	}()
	seen, gone := 0, 0
	for end := time.Now().Add(5 * time.Minute); seen < 500 || gone < 500; { // by what was seen: on a busy machine the other may not run for long
		if time.Now().After(end) {
			t.Fatalf("the process was there %d times, and not there %d times", seen, gone)
		}
		clients, err := holders.Processes{Root: table.Dir()}.Holders(t.Context(), []holders.Sought{{Device: "GPU-0"}})
		if err != nil {
			t.Fatal(err)
		}
		if len(clients) == 0 {
			gone++
		}
		for _, c := range clients {
			seen++
			if c.Command != "python" || c.PodUID != pod.UID || len(c.Container) != 64 {
				t.Fatalf("got half a process: %+v", c)
			}
		}
	}
	close(observed)
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
}

func TestAfterARebootOnlyTheAgentRuns(t *testing.T) {
	users := newUsers(t)
	pod := newPod("user", "10000000-0000-0000-0000-000000000000", corev1.PodQOSGuaranteed)
	users.Hold(&pod, []string{users.GPUs.UUIDs()[0]})
	if err := users.GPUs.Reboot(); err != nil {
		t.Fatal(err)
	}
	if err := users.Table.Reboot(users.GPUs.BootID()); err != nil {
		t.Fatal(err)
	}
	if got := whoHolds(t, users, pod); got != "" {
		t.Errorf("got:\n%s", got)
	}
	entries, err := os.ReadDir(users.Table.Dir())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if boot, err := (&host.Kernel{Proc: users.Table.Dir()}).Boot(t.Context()); err != nil || boot != users.GPUs.BootID() || boot == firstBoot {
		t.Errorf("the kernel's boot is %q, %v", boot, err)
	}
	if diff := cmp.Diff([]string{"2", "self", "sys"}, names); diff != "" {
		t.Errorf("the table (-want +got):\n%s", diff)
	}
}

// A program is found in the table by its command line, and by its start it is distinguished from a later one with its pid.
func TestTheTableShowsARealProcessAsProcDoes(t *testing.T) {
	table := newTable(t)
	pid := os.Getpid()
	if err := table.Add(pods.Process{PID: pid, Command: "nvidia-device-plugin", Args: []string{"nvidia-device-plugin", "--config-file=/c"}, Cgroup: "/"}); err != nil {
		t.Fatal(err)
	}
	shown, real := entry(t, table.Dir(), pid), entry(t, "/proc", pid)
	if want := "nvidia-device-plugin\x00--config-file=/c\x00"; shown.cmdline != want {
		t.Errorf("command line %q, want %q", shown.cmdline, want)
	}
	if shown.started != real.started || len(shown.started) == 0 {
		t.Errorf("started at %q, and in /proc at %q", shown.started, real.started)
	}
}

type procEntry struct{ cmdline, started string }

// entry reads a process as those do who look for a program.
func entry(t *testing.T, root string, pid int) procEntry {
	t.Helper()
	read := func(name string) string {
		text, err := os.ReadFile(fmt.Sprintf("%s/%d/%s", root, pid, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	stat := read("stat")
	fields := strings.Fields(stat[strings.LastIndex(stat, ")")+1:])
	const startTime = 22 - 3 // the 22nd, of which the first here is the third
	return procEntry{cmdline: read("cmdline"), started: fields[startTime]}
}
