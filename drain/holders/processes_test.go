package holders_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

const (
	podUID  = "12345678-1234-5678-9abc-def012345678"
	inSlice = "12345678_1234_5678_9abc_def012345678" // as systemd's names have it
	hash    = "8a5a4c9f0ac7ffa7a0b6dbd0b9d3bdb1"     // a static pod's
	id      = "3f2a9c51d0e7b86a4f1c2d3e4f5061728394a5b6c7d8e9f00112233445566778"
	other   = "00000000000000000000000000000000000000000000000000000000000000aa"
)

// process is a process of a made process table.
type process struct {
	pid     int
	command string
	cgroup  string
	files   []string         // where its open files lead
	threads map[int][]string // the same of threads other than the first
}

// agentPID is the agent's own process in each made process table.
const agentPID = 700

// processTable writes a folder that looks like /proc, with the agent's process and the others.
func processTable(t testing.TB, others ...process) holders.Processes {
	t.Helper()
	root := t.TempDir()
	write := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("making a process table: %v", err)
		}
	}
	open := func(folder string, files []string) {
		t.Helper()
		write(os.MkdirAll(filepath.Join(folder, "fd"), 0o700))
		for i, target := range files {
			write(os.Symlink(target, filepath.Join(folder, "fd", strconv.Itoa(i))))
		}
	}
	write(os.Symlink(strconv.Itoa(agentPID), filepath.Join(root, "self")))
	write(os.WriteFile(filepath.Join(root, "uptime"), []byte("1.00 1.00\n"), 0o600))
	for _, p := range append(others, process{pid: agentPID, command: "gpuslice-agent", files: []string{"/dev/null"}}) {
		folder := filepath.Join(root, strconv.Itoa(p.pid))
		open(folder, p.files)
		write(os.WriteFile(filepath.Join(folder, "comm"), []byte(p.command+"\n"), 0o600))
		write(os.WriteFile(filepath.Join(folder, "cgroup"), []byte(p.cgroup), 0o600))
		open(filepath.Join(folder, "task", strconv.Itoa(p.pid)), nil)
		for tid, files := range p.threads {
			open(filepath.Join(folder, "task", strconv.Itoa(tid)), files)
		}
	}
	return holders.Processes{Root: root}
}

// theGPU is one GPU that goes as a whole.
func theGPU(minor int, reported ...int) []holders.Sought {
	return []holders.Sought{{Device: "GPU-1", Minor: minor, Reported: reported}}
}

func clientsOf(t *testing.T, p holders.Processes, minor int, reported ...int) []holders.Client {
	t.Helper()
	return holdersOf(t, p, theGPU(minor, reported...)...)
}

func holdersOf(t *testing.T, p holders.Processes, sought ...holders.Sought) []holders.Client {
	t.Helper()
	clients, err := p.Holders(t.Context(), sought)
	if err != nil {
		t.Fatalf("Holders: %v", err)
	}
	return clients
}

func pids(clients []holders.Client) []int {
	var out []int
	for _, c := range clients {
		out = append(out, c.PID)
	}
	return out
}

func TestClientsAreNamedWithWhatTheyBelongTo(t *testing.T) {
	table := processTable(t,
		process{
			pid: 4711, command: "python",
			cgroup: "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
			files:  []string{"/dev/null", "socket:[1]", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap408"},
		},
		process{pid: 812, command: "nvidia-persiste", cgroup: "0::/system.slice/nvidia-persistenced.service\n", files: []string{"/dev/nvidia3"}},
		process{pid: 5, command: "kworker/0:1"},
		process{pid: 900, command: "bash", cgroup: "0::/user.slice/user-1000.slice/session-3.scope\n", files: []string{"/dev/pts/0"}},
		process{pid: 901, command: "ends in NVML", cgroup: "0::/\n", files: []string{"/dev/null"}},
	)
	device := []string{"GPU-1"}
	want := []holders.Client{
		{
			PID: 812, Command: "nvidia-persiste", Owner: holders.Owner{Unit: "nvidia-persistenced.service"}, Devices: device,
			Sources: []holders.Source{"device file /dev/nvidia3"},
		},
		{PID: 901, Command: "ends in NVML", Devices: device, Sources: []holders.Source{holders.SourceNVML}},
		{
			PID: 4711, Command: "python", Owner: holders.Owner{PodUID: podUID, Container: id}, Devices: device,
			// Capability 408 = 3 + 135 x 3 is that of GPU instance 0 of GPU 3.
			Sources: []holders.Source{holders.SourceNVML, "device file /dev/nvidia-caps/nvidia-cap408", "device file /dev/nvidia3"},
		},
		{PID: 5000, Devices: device, Sources: []holders.Source{holders.SourceNVML}, Unlisted: true},
	}
	if diff := cmp.Diff(want, clientsOf(t, table, 3, 4711, 5000, 901, 4711)); diff != "" {
		t.Errorf("Holders (-want +got):\n%s", diff)
	}
}

// A plan takes away GPU 0 as a whole, two of the instances of GPU 1, and GPU 7, whose minor number the driver does not say.
func TestHoldersNameTheDevicesThatTheyHold(t *testing.T) {
	table := processTable(t,
		process{pid: 10, command: "whole", files: []string{"/dev/nvidia0", "/dev/nvidia0"}},
		process{pid: 20, command: "one", files: []string{"/dev/nvidia1"}},
		process{pid: 21, command: "both"},
		process{pid: 30, command: "neither", files: []string{"/dev/nvidia1"}},
		process{pid: 40, command: "monitor", files: []string{"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"}},
	)
	whole := holders.Sought{Device: "GPU-0", Minor: 0, Reported: []int{10, 10}}
	parts := []holders.Sought{
		{Device: "MIG-1b", Minor: holders.NoFiles, Reported: []int{21}}, {Device: "MIG-1a", Minor: holders.NoFiles, Reported: []int{20, 21}},
	}
	unknown := holders.Sought{Device: "GPU-7", Minor: holders.AnyGPU}
	nvml, file := holders.SourceNVML, func(minor int) holders.Source { return holders.Source(fmt.Sprintf("device file /dev/nvidia%d", minor)) }
	for _, c := range []struct {
		name   string
		sought []holders.Sought
		want   []holders.Client
	}{
		{"nothing", nil, nil},
		{"a GPU that goes as a whole", []holders.Sought{whole}, []holders.Client{
			{PID: 10, Command: "whole", Devices: []string{"GPU-0"}, Sources: []holders.Source{nvml, file(0)}},
			{PID: 40, Command: "monitor", Devices: []string{"GPU-0"}, Sources: []holders.Source{file(0)}},
		}},
		{"instances of a GPU, whose files others have open too", parts, []holders.Client{
			{PID: 20, Command: "one", Devices: []string{"MIG-1a"}, Sources: []holders.Source{nvml}},
			{PID: 21, Command: "both", Devices: []string{"MIG-1a", "MIG-1b"}, Sources: []holders.Source{nvml}},
		}},
		{"a GPU that may be any", []holders.Sought{whole, unknown}, []holders.Client{
			{PID: 10, Command: "whole", Devices: []string{"GPU-0", "GPU-7"}, Sources: []holders.Source{nvml, file(0)}},
			{PID: 20, Command: "one", Devices: []string{"GPU-7"}, Sources: []holders.Source{file(1)}},
			{PID: 30, Command: "neither", Devices: []string{"GPU-7"}, Sources: []holders.Source{file(1)}},
			{PID: 40, Command: "monitor", Devices: []string{"GPU-0", "GPU-7"}, Sources: []holders.Source{file(0), file(1), file(2)}},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, holdersOf(t, table, c.sought...)); diff != "" {
				t.Errorf("Holders (-want +got):\n%s", diff)
			}
		})
	}
}

// A look at a few processes is cheap, and an answer even where others may not be looked at.
func TestWhereNoFilesCountOnlyReportedProcessesAreRead(t *testing.T) {
	table := processTable(t, process{pid: 99, command: "python"}, process{pid: 100, command: "python"})
	for _, pid := range []string{"99", "100"} {
		replace(t, filepath.Join(table.Root, pid, "fd"), asFile)
	}
	part := holders.Sought{Device: "MIG-1", Minor: holders.NoFiles, Reported: []int{99}}
	if diff := cmp.Diff([]int{99}, pids(holdersOf(t, table, part))); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	if _, err := table.Holders(t.Context(), append(theGPU(0), part)); err == nil {
		t.Error("a GPU that goes as a whole was found free, though open files could not be read")
	}
}

func TestOnlyFilesOfTheGPUCount(t *testing.T) {
	for _, c := range []struct {
		file  string
		minor int
		holds bool
	}{
		{"/dev/nvidia3", 3, true},
		{"/dev/nvidia3", 2, false},
		{"/dev/nvidia13", 3, false},
		{"/dev/nvidia3", 13, false},
		{"/dev/nvidia3", -1, true}, // the driver does not say which minor the GPU has
		{"/dev/nvidia3 (deleted)", 3, true},
		{"/run/nvidia/driver/dev/nvidia3", 3, true}, // chroot into the driver's container
		{"/dev/nvidiactl", 3, false},
		{"/dev/nvidiactl", -1, false},
		{"/dev/nvidia-uvm", 3, false},
		{"/dev/nvidia-uvm-tools", 3, false},
		{"/dev/nvidia-modeset", 3, false},
		{"/dev/nvidia-modeset", -1, false},
		{"/dev/nvidia-nvswitch3", 3, false},
		{"/dev/nvidia-nvswitchctl", -1, false},
		{"/srv/anna/nvidia3", 3, false},
		{"/dev/nvidia3/notes", 3, false},
		{"/dev/nvidia-3", 3, false},
		{"/dev/nvidia", 0, false},
		{"socket:[3]", 3, false},
		// 1 and 2 are MIG's config and monitor. Then come 135 for each GPU: mig-minors of driver 580 on an H200.
		{"/dev/nvidia-caps/nvidia-cap1", 0, false},
		{"/dev/nvidia-caps/nvidia-cap2", 0, false},
		{"/dev/nvidia-caps/nvidia-cap2", -1, false},
		{"/dev/nvidia-caps/nvidia-cap3", 0, true},    // gpu0/gi0/access 3
		{"/dev/nvidia-caps/nvidia-cap137", 0, true},  // gpu0/gi14/ci7/access 137
		{"/dev/nvidia-caps/nvidia-cap138", 0, false}, // gpu1/gi0/access 138
		{"/dev/nvidia-caps/nvidia-cap138", 1, true},
		{"/dev/nvidia-caps/nvidia-cap138", -1, true},
		{"/dev/nvidia-caps/nvidia-cap4322", 31, true}, // gpu31/gi14/ci7/access 4322
		{"/dev/nvidia-caps/nvidia-cap138 (deleted)", 1, true},
		{"/dev/nvidia-caps/nvidia-caps", 0, false},
		{"/dev/nvidia-cap3", 0, false},
		{"/dev/nvidia-caps-imex-channels/channel0", 0, false},
	} {
		t.Run(fmt.Sprintf("%s of %d", c.file, c.minor), func(t *testing.T) {
			clients := clientsOf(t, processTable(t, process{pid: 99, command: "python", files: []string{"/dev/null", c.file}}), c.minor)
			if (len(clients) == 1) != c.holds {
				t.Errorf("got clients %v, want that it holds the GPU: %t", clients, c.holds)
			}
		})
	}
}

// When the first thread of a process has ended, Linux shows the files of the process only in its other threads.
func TestAThreadHoldsAGPUForAProcessWhoseFirstThreadHasEnded(t *testing.T) {
	clients := clientsOf(t, processTable(t,
		process{pid: 99, command: "python", threads: map[int][]string{100: {"/dev/null"}, 101: {"/dev/null", "/dev/nvidia3"}}},
		process{pid: 200, command: "python", threads: map[int][]string{201: {"/dev/nvidia2"}}},
	), 3)
	if diff := cmp.Diff([]int{99}, pids(clients)); diff != "" {
		t.Errorf("clients (-want +got):\n%s", diff)
	}
}

func TestTheAgentKnowsItself(t *testing.T) {
	table := processTable(t, process{pid: 99, command: "gpuslice-agent", files: []string{"/dev/nvidia0"}})
	if err := os.Symlink("/dev/nvidia0", filepath.Join(table.Root, strconv.Itoa(agentPID), "fd", "7")); err != nil {
		t.Fatal(err)
	}
	clients := clientsOf(t, table, 0)
	if len(clients) != 2 || clients[0].Self || !clients[1].Self {
		t.Fatalf("got %+v, want another process of the same name, and the agent", clients)
	}
	if want, got := "pid 700 gpuslice-agent (the agent itself)", clients[1].String(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Promise 16. A process that has a device file may give it as many names as it likes, and open each.
func TestAProcessThatOpensADeviceByThousandsOfNamesIsReportedByAFew(t *testing.T) {
	var files []string
	for i := range 5000 {
		files = append(files, fmt.Sprintf("/%d/dev/nvidia0", i))
	}
	clients := clientsOf(t, processTable(t, process{pid: 99, command: "a", files: files}), 0, 99)
	if len(clients) != 1 || clients[0].Sources[0] != holders.SourceNVML || !slices.Equal(clients[0].Devices, []string{"GPU-1"}) {
		t.Fatalf("found %.300v", clients)
	}
	if n := len(clients[0].Sources); n > 8 {
		t.Errorf("the process was found by %d names", n)
	}
}

func TestANameThatAProcessGivesItselfIsFitForLogs(t *testing.T) {
	clients := clientsOf(t, processTable(t, process{pid: 99, command: "a\x1b[31m\nb\xff\u202ec d", files: []string{"/dev/nvidia0"}}), 0)
	if want := "pid 99 a?[31m?b??c d"; len(clients) != 1 || clients[0].String() != want {
		t.Errorf("got %v, want %s", clients, want)
	}
}

// replace puts a file in the place of a folder, or of nothing, so that reading it is an error even for root, which
// permissions do not stop.
func replace(t *testing.T, path string, by func(path string) error) {
	t.Helper()
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := by(path); err != nil {
		t.Fatal(err)
	}
}

func asFile(path string) error   { return os.WriteFile(path, nil, 0o600) }
func asFolder(path string) error { return os.Mkdir(path, 0o700) }

func TestWhatCannotBeReadIsAnErrorThatNamesIt(t *testing.T) {
	for _, c := range []struct {
		name   string
		path   string // below the process table
		by     func(string) error
		others []int // clients that are found all the same
	}{
		{"open files", "99/fd", asFile, []int{101}},
		{"an open file", "99/fd/0", asFile, []int{101}},
		{"threads of a process without files", "100/task", asFile, []int{99, 101}},
		{"open files of a thread", "100/task/102/fd", asFile, []int{99, 101}},
		{"a client's command", "99/comm", asFolder, []int{99, 101}},
		{"a client's cgroup", "99/cgroup", asFolder, []int{99, 101}},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := processTable(t,
				process{pid: 99, command: "python", files: []string{"/dev/nvidia0"}},
				process{pid: 100, command: "python", threads: map[int][]string{102: {"/dev/null"}}},
				process{pid: 101, command: "python", files: []string{"/dev/nvidia0"}},
			)
			path := filepath.Join(table.Root, c.path)
			replace(t, path, c.by)
			clients, err := table.Holders(t.Context(), theGPU(0))
			if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "/dev/nvidia0") {
				t.Errorf("got error %v, want one that names %s and the GPU", err, path)
			}
			if diff := cmp.Diff(c.others, pids(clients)); diff != "" {
				t.Errorf("clients beside the error (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMuchThatCannotBeReadIsOneShortError(t *testing.T) {
	var many []process
	for pid := 1000; pid < 1300; pid++ {
		many = append(many, process{pid: pid})
	}
	table := processTable(t, many...)
	for _, p := range many {
		replace(t, filepath.Join(table.Root, strconv.Itoa(p.pid), "fd"), asFile)
	}
	_, err := table.Holders(t.Context(), theGPU(0))
	if err == nil || !strings.Contains(err.Error(), "(and 299 more)") || len(err.Error()) > 400 {
		t.Errorf("got %v, want one of them, and the count of the others", err)
	}
}

func TestAFolderThatIsNotTheHostsProcessTableIsAnError(t *testing.T) {
	self := func(target string) holders.Processes {
		root := t.TempDir()
		if err := os.Symlink(target, filepath.Join(root, "self")); err != nil {
			t.Fatal(err)
		}
		return holders.Processes{Root: root}
	}
	for _, c := range []struct {
		name  string
		table holders.Processes
	}{
		{"an empty folder", holders.Processes{Root: t.TempDir()}},
		{"a folder that is not there", holders.Processes{Root: "/no/such/proc"}},
		{"the agent's own PID namespace", self("1")},
		{"something else", self("elsewhere")},
	} {
		t.Run(c.name, func(t *testing.T) {
			if clients, err := c.table.Holders(t.Context(), theGPU(0, 99)); err == nil || clients != nil {
				t.Errorf("got %v and error %v, want an error alone", clients, err)
			}
		})
	}
}

func TestProcessesThatEndWhileTheyAreReadAreNoError(t *testing.T) {
	for _, missing := range []string{"99", "99/fd", "99/task", "99/comm"} {
		t.Run(missing, func(t *testing.T) {
			table := processTable(t,
				process{pid: 99, command: "python", files: []string{"/dev/nvidia0"}, threads: map[int][]string{}},
				process{pid: 101, command: "python", files: []string{"/dev/nvidia0"}},
			)
			if missing == "99/task" {
				replace(t, filepath.Join(table.Root, "99/fd"), asFolder)
			}
			// A link to nowhere is listed and yet cannot be opened, as a process that ends after the table was listed.
			replace(t, filepath.Join(table.Root, missing), func(path string) error { return os.Symlink("nowhere", path) })
			if diff := cmp.Diff([]int{101}, pids(clientsOf(t, table, 0))); diff != "" {
				t.Errorf("clients (-want +got):\n%s", diff)
			}
		})
	}
}

// The look finds the process and reads its name, and the process ends before the look reads its owner: the look must leave it out.
func TestAProcessThatEndsBeforeItsOwnerIsReadIsNone(t *testing.T) {
	table := processTable(t,
		process{pid: 99, command: "python", files: []string{"/dev/nvidia0"}}, process{pid: 101, command: "python", files: []string{"/dev/nvidia0"}},
	)
	folder := filepath.Join(table.Root, "99")
	replace(t, filepath.Join(folder, "comm"), func(path string) error { return unix.Mkfifo(path, 0o600) })
	ended := make(chan error, 1)
	go func() {
		name, err := os.OpenFile(filepath.Join(folder, "comm"), os.O_WRONLY, 0) // returns as soon as the look reads
		if err == nil {
			_, err = name.WriteString("python\n")
			err = errors.Join(err, os.RemoveAll(folder), name.Close())
		}
		ended <- err
	}()
	if diff := cmp.Diff([]int{101}, pids(clientsOf(t, table, 0))); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
	if err := receive.From(t, ended); err != nil {
		t.Fatal(err)
	}
}

func TestAHostWithoutCgroupsStillHasClients(t *testing.T) {
	table := processTable(t, process{pid: 99, command: "python", files: []string{"/dev/nvidia0"}})
	if err := os.Remove(filepath.Join(table.Root, "99/cgroup")); err != nil {
		t.Fatal(err)
	}
	want := []holders.Client{{PID: 99, Command: "python", Devices: []string{"GPU-1"}, Sources: []holders.Source{"device file /dev/nvidia0"}}}
	if diff := cmp.Diff(want, clientsOf(t, table, 0)); diff != "" {
		t.Errorf("Holders (-want +got):\n%s", diff)
	}
}

func TestLookingForClientsEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	table := processTable(t, process{pid: 99, command: "python", files: []string{"/dev/nvidia0"}})
	if clients, err := table.Holders(ctx, theGPU(0, 99)); !errors.Is(err, context.Canceled) || clients != nil {
		t.Errorf("got %v and error %v, want nothing but that the context has ended", clients, err)
	}
}

// childWith starts a process that has the file open, until end is called or the test is over.
func childWith(t *testing.T, file *os.File) (pid int, end func()) {
	t.Helper()
	child := exec.Command("cat")
	child.ExtraFiles = []*os.File{file}
	input, err := child.StdinPipe() // it reads until we close this
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	end = sync.OnceFunc(func() {
		_ = input.Close()
		if err := child.Wait(); err != nil {
			t.Errorf("waiting for the child: %v", err)
		}
	})
	t.Cleanup(end)
	return child.Process.Pid, end
}

// Promise 15: Believe only what this host's agent wrote.
func TestAPlainFileIsNoGPUWhateverItsName(t *testing.T) {
	devices := filepath.Join(t.TempDir(), "dev")
	if err := os.Mkdir(devices, 0o700); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(devices, "nvidia0"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	child, _ := childWith(t, file)
	if clients := heldOnThisMachine(t, 0); slices.ContainsFunc(clients, func(c holders.Client) bool { return c.PID == child }) {
		t.Errorf("who has %s open is taken for a holder: %v", file.Name(), clients)
	}
	if clients := heldOnThisMachine(t, holders.AnyGPU); slices.ContainsFunc(clients, func(c holders.Client) bool { return c.PID == child }) {
		t.Errorf("who has %s open is taken for a holder of any GPU: %v", file.Name(), clients)
	}
}

func heldOnThisMachine(t *testing.T, minor int) []holders.Client {
	t.Helper()
	clients, err := holders.Processes{}.Holders(t.Context(), theGPU(minor))
	// Without CAP_SYS_PTRACE, which root need not have either, the test cannot see the files of other processes, but its own.
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		t.Fatalf("Holders: %v", err)
	}
	return clients
}

func TestReportedProcessesOfARealTableAreNamed(t *testing.T) {
	child, end := childWith(t, os.Stdin)
	observe := func() holders.Client {
		clients := holdersOf(t, holders.Processes{}, holders.Sought{Device: "GPU-1", Minor: holders.NoFiles, Reported: []int{child}})
		if len(clients) != 1 {
			t.Fatalf("got %v, want the child alone", clients)
		}
		return clients[0]
	}
	if c := observe(); c.Command != "cat" || c.Self || c.Unlisted {
		t.Errorf("the child runs; got %+v", c)
	}
	end()
	if c := observe(); !c.Unlisted {
		t.Errorf("the child has ended; got %+v", c)
	}
}

// Promise 14: Never hang. A pod opens a file on a volume whose server it then stops.
func TestAFileOfASilentServerHoldsUpNoRead(t *testing.T) {
	files := stalledfs.Mount(t, "dev/nvidia0")
	fd, err := unix.Open(filepath.Join(files.Dir, "dev/nvidia0"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "nvidia0")
	defer file.Close()
	childWith(t, file)
	asked := files.Stall()
	defer files.Answer()
	observed := make(chan error, 1)
	go func() {
		_, err := holders.Processes{}.Holders(t.Context(), theGPU(0))
		observed <- err
	}()
	select {
	case err := <-observed:
		if err != nil && !errors.Is(err, fs.ErrPermission) {
			t.Error(err)
		}
	case <-asked:
		t.Error("the server was asked, and whoever asks it waits for ever")
	}
}

// Promise 14: Never hang. A pod mounts a volume where its program is looked at.
func TestAReadIntoAPodThatHangsIsAbandonedOnce(t *testing.T) {
	files := stalledfs.Mount(t, "configs/a")
	table := t.TempDir()
	listProcess(t, table, 4711, "config-manager", pluginPod)
	if err := os.Symlink(files.Dir, filepath.Join(table, "4711", "root")); err != nil {
		t.Fatal(err)
	}
	processes := holders.Processes{Root: table, Lanes: &holders.Lanes{}}
	asked := files.Stall()
	defer files.Answer()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel() // as at a deadline
	}()
	if there, err := processes.FileOf(ctx, pluginPod, "config-manager", "/configs/a"); there || !errors.Is(err, context.Canceled) || !aside.Hangs(err) {
		t.Errorf("got %t, %v; want that the look was given up", there, err)
	}
	if there, err := processes.FileOf(t.Context(), pluginPod, "config-manager", "/configs/a"); there || !aside.Hangs(err) {
		t.Errorf("got %t, %v; want that no other look follows one that hangs", there, err)
	}
}

func TestAnAgentThatMayNotReadAllProcessesSaysSo(t *testing.T) {
	result := make(chan error)
	go func() {
		// The thread gives up its rights for good, and ends with this goroutine, which does not unlock it.
		runtime.LockOSThread()
		if os.Geteuid() == 0 {
			const keep, nobody = ^uintptr(0), 65534
			if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, keep, nobody, keep); errno != 0 {
				result <- errno
				return
			}
		}
		_, err := holders.Processes{}.Holders(t.Context(), theGPU(0))
		result <- err
	}()
	err := <-result
	if err == nil {
		t.Skip("every process here is the user's own")
	}
	if !errors.Is(err, fs.ErrPermission) {
		t.Errorf("got %v, want that it is denied", err)
	}
	for _, part := range []string{"/proc/", "CAP_SYS_PTRACE", "SELinux", "hidepid"} { // the process, and each that may deny the look
		if !strings.Contains(err.Error(), part) {
			t.Errorf("got %v, want %s named", err, part)
		}
	}
}

// A large node: 2,000 processes with 100 open files each, eight of which hold one of eight GPUs.
func BenchmarkHolders(b *testing.B) {
	sockets := make([]string, 99)
	for n := range sockets {
		sockets[n] = fmt.Sprintf("socket:[%d]", 4026531840+n)
	}
	// Symbolic links are costly to make: the processes share the folders of these nine.
	idle := process{pid: 5, files: slices.Concat(sockets, []string{"/dev/null"})}
	processes := []process{idle}
	var sought []holders.Sought
	for minor := range 8 {
		processes = append(processes, process{pid: 100 + minor, command: "python", files: slices.Concat(sockets, []string{fmt.Sprintf("/dev/nvidia%d", minor)})})
		sought = append(sought, holders.Sought{Device: fmt.Sprintf("GPU-%d", minor), Minor: minor, Reported: []int{100 + minor}})
	}
	for pid := 1000; pid < 2991; pid++ {
		processes = append(processes, process{pid: pid, command: "python", cgroup: "0::/kubepods/burstable/pod" + podUID + "/" + id + "\n"})
	}
	table := processTable(b, processes...)
	for _, p := range processes[9:] {
		files := filepath.Join(table.Root, strconv.Itoa(p.pid), "fd")
		if err := errors.Join(os.Remove(files), os.Symlink(filepath.Join(table.Root, "5/fd"), files)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		clients, err := table.Holders(b.Context(), sought)
		if err != nil || len(clients) != 8 {
			b.Fatalf("got %d holders and error %v, want 8", len(clients), err)
		}
	}
}
