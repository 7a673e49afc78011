package main

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// begin gives the GPUs of a scenario as it begins, without latencies.
func begin(t *testing.T, s scenario) (*gpusim.Node, []nvml.GPU) {
	t.Helper()
	spec := s.spec()
	spec.Latency = ""
	node, err := gpusim.Create(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := prepare(t.Context(), node, s.start); err != nil {
		t.Fatal(err)
	}
	if err := hold(t.Context(), node, s.users); err != nil {
		t.Fatal(err)
	}
	return node, observe(t, node)
}

func observe(t *testing.T, node *gpusim.Node) []nvml.GPU {
	t.Helper()
	gpus, err := node.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus
}

// A scenario that is written wrongly would measure something else than its name says.
func TestScenariosBeginAsTheySay(t *testing.T) {
	for _, s := range slices.Concat(scenarios, profiled) {
		t.Run(s.name, func(t *testing.T) {
			_, gpus := begin(t, s)
			held := map[string]int{}
			for i, gpu := range gpus {
				if got := cuts(gpus)[i].Devices; !maps.Equal(got, s.start[i]) {
					t.Errorf("GPU %d begins with %v, want %v", i, got, s.start[i])
				}
				for _, instance := range gpu.Instances {
					held[instance.Profile] += len(instance.Processes)
				}
			}
			for profile, n := range s.users {
				if held[profile] != n {
					t.Errorf("%d of %s are in use, want %d", held[profile], profile, n)
				}
			}
			want, err := s.want(gpus)
			if err != nil {
				t.Fatal(err)
			}
			for i, gpu := range gpus {
				if _, err := nvml.Solve(gpu, want[i].Devices); err != nil {
					t.Errorf("GPU %d cannot become %s: %v", i, want[i], err)
				}
			}
			if s.sharing() { // which is judged by what the node offers
				if offers := s.offers(gpus); offers["nvidia.com/gpu"] != s.replicas*len(gpus) {
					t.Errorf("the node is to offer %v", offers)
				}
				return
			}
			text, err := judge(s, success, gpus, gpus)
			if err != nil {
				t.Fatal(err)
			}
			if done, noop := text == "as asked", strings.HasPrefix(s.name, "no-op"); done != noop {
				t.Errorf("before anything was done it is judged: %s", text)
			}
		})
	}
}

// What is lost is counted by identity: an instance that was made again in the same place is another one.
func TestLossIsReported(t *testing.T) {
	s := scenarios[1]
	node, before := begin(t, s)
	driver := node.Driver()
	for _, instance := range before[0].Instances {
		if instance.Profile != "1g.10gb" {
			continue
		}
		if err := driver.Destroy(t.Context(), before[0].UUID, instance.Placed); err != nil {
			t.Fatal(err)
		}
	}
	again := nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 4, Size: 1}}
	if err := driver.Create(t.Context(), before[0].UUID, again); err != nil {
		t.Fatal(err)
	}
	got, err := judge(s, "failed", before, observe(t, node))
	if err != nil {
		t.Fatal(err)
	}
	if want := "failed, not as asked; GPU 0 is left with 1x 1g.10gb 1x 4g.40gb; 3 idle instances lost"; got != want {
		t.Errorf("judged %q, want %q", got, want)
	}
}

func TestAPendingModeIsReportedThoughNothingIsLost(t *testing.T) {
	i := slices.IndexFunc(scenarios, func(s scenario) bool { return s.gpus[0].Persistence })
	s := scenarios[i]
	node, before := begin(t, s)
	if err := node.Driver().SetMode(t.Context(), before[0].UUID, true); err != nil {
		t.Fatal(err)
	}
	got, err := judge(s, "failed", before, observe(t, node))
	if err != nil {
		t.Fatal(err)
	}
	if want := "failed, not as asked; GPU 0 is left with a mode change that is pending; nothing lost"; got != want {
		t.Errorf("judged %q, want %q", got, want)
	}
}

func TestPersistenceModeThatIsNotGivenBackIsReported(t *testing.T) {
	node, before := begin(t, scenarios[0])
	if err := node.Driver().SetPersistence(t.Context(), before[3].UUID, true); err != nil {
		t.Fatal(err)
	}
	got, err := judge(scenarios[0], success, before, observe(t, node))
	if err != nil {
		t.Fatal(err)
	}
	if want := "as asked; persistence mode of GPU 3 is another"; got != want {
		t.Errorf("judged %q, want %q", got, want)
	}
}

func TestTimesAreThoseOfTheLastChange(t *testing.T) {
	began := time.Now()
	at := func(after time.Duration, state string, slices string) sample {
		n := &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{labelState: state}},
			Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
				"nvidia.com/mig-1g.10gb": resource.MustParse(slices), "nvidia.com/gpu": resource.MustParse("0"), "cpu": resource.MustParse("64"),
			}},
		}
		return sample{began.Add(after), n, offered(n)}
	}
	want := map[string]int{"nvidia.com/mig-1g.10gb": 7}
	for _, row := range []struct {
		name        string
		samples     []sample
		said, ready time.Duration
	}{
		{
			"capacity goes away and comes back after the program is done",
			[]sample{
				at(-time.Second, "", "7"), at(time.Second, "pending", "7"), at(2*time.Second, "pending", "0"),
				at(3*time.Second, "success", "0"), at(4*time.Second, "success", "7"), at(5*time.Second, "success", "7"),
			},
			3 * time.Second, 4 * time.Second,
		},
		{
			"nothing changes but the label",
			[]sample{at(-time.Second, "", "7"), at(time.Second, "success", "7")},
			time.Second, 0,
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			word, said := lastWord(row.samples, began)
			ready := readyAfter(row.samples, began, want)
			if word != success || said != row.said || ready != row.ready {
				t.Errorf("said %s after %s and ready after %s, want success, %s and %s", word, said, ready, row.said, row.ready)
			}
		})
	}
}

func TestCapacityIsWhatThePluginOffers(t *testing.T) {
	gpus := []nvml.GPU{
		{},
		{Enabled: true},
		{Enabled: true, Instances: []nvml.Instance{
			{Devices: []nvml.Device{{Profile: "1g.10gb+me"}}},
			{Devices: []nvml.Device{{Profile: "1c.3g.40gb"}, {Profile: "2c.3g.40gb"}}},
		}},
	}
	want := map[string]int{
		"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb.me": 1, "nvidia.com/mig-1c.3g.40gb": 1, "nvidia.com/mig-2c.3g.40gb": 1,
	}
	if got := capacity(gpus); !maps.Equal(got, want) {
		t.Errorf("capacity is %v, want %v", got, want)
	}
}

func TestTheTableShowsMediansAndEveryOutcome(t *testing.T) {
	reset := func(n int) map[string]int { return map[string]int{gpusim.Reset: n, gpusim.SetMigMode: 10 * n} }
	rows := []row{
		{scenario{name: "first"}, measured{name: "tool"}, []result{
			{calls: reset(3), bound: 3 * time.Second, said: 9 * time.Second, noNode: true, outcome: "as asked"},
			{calls: reset(1), bound: 200 * time.Millisecond, said: 1 * time.Second, noNode: true, outcome: "as asked"},
			{calls: reset(2), bound: 700 * time.Millisecond, said: 2 * time.Second, noNode: true, outcome: "failed"},
		}},
		{scenario{name: "first"}, measured{name: "agent"}, []result{
			{ready: 500 * time.Millisecond, evicted: 4, outcome: "as asked", cost: cost{memory: 2049, cpu: 10 * time.Millisecond}},
			{ready: 500 * time.Millisecond, evicted: 4, outcome: "as asked", cost: cost{memory: 7, cpu: 1230 * time.Millisecond}},
		}},
	}
	got := tabulate(rows, true)
	for _, line := range []string{
		"| first | tool | 20 | 2 | 0.7 s | 2.0 s | 1.3 s |  |  |  |  | 2 times: as asked<br/>1 times: failed |",
		"|  | agent | 0 | 0 | 0.0 s |  |  | 0.5 s | 4 | 0 | 0 | as asked |", // it has said nothing,
		"\nagent has taken at most 3 MiB of memory and 1.23 s of processor time.\n",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("the table has no line %q:\n%s", line, got)
		}
	}
}

// The bound is of the calls that a run has made: what the GPUs recorded, and what a call takes on them.
func TestTheBoundIsWhatTheRecordedCallsTake(t *testing.T) {
	node, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: "H100-80GB", MIG: true}}, Delays: map[string]string{
		gpusim.GpuInstanceDestroy: "30ms", gpusim.CreateGpuInstanceWithPlacement: "2ms", gpusim.CreateComputeInstanceWithPlacement: "3ms",
		gpusim.CreateComputeInstance: "3ms", gpusim.ComputeInstanceDestroy: "5ms", gpusim.GetMigMode: "1ms",
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := node.Close(); err != nil {
			t.Error(err)
		}
	}()
	whole, uuid := nvml.Placed{Profile: "7g.80gb", Span: nvml.Span{Size: 8}}, observe(t, node)[0].UUID
	if err := node.ForgetCalls(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for range 2 {
		if err := errors.Join(node.Driver().Create(t.Context(), uuid, whole), node.Driver().Destroy(t.Context(), uuid, whole)); err != nil {
			t.Fatal(err)
		}
	}
	r := result{said: time.Since(began)}
	r.count(node)
	if want := 80 * time.Millisecond; r.bound != want { // twice 2 + 3 + 5 + 30
		t.Errorf("the bound of %v is %s, want %s", r.calls, r.bound, want)
	}
	if r.own() != r.said-r.bound || r.own() < 0 {
		t.Errorf("%s is said to be its own share of %s", r.own(), r.said)
	}
	if silent := (result{bound: time.Second}).own(); silent != 0 {
		t.Errorf("a program that says nothing has an own share of %s", silent)
	}
}

// What the agent writes to its log is divided so that nothing is left over.
func TestTheTimeOfAChangeIsDividedWithoutRest(t *testing.T) {
	const log = `{"level":"info","ts":"2026-11-24T13:10:54.900Z","msg":"watching"}
{"level":"info","ts":"2026-11-24T13:10:55.100Z","msg":"step done","step":"fence: journal, cordon, taint","took":"23.9ms"}
{"level":"info","ts":"2026-11-24T13:10:56.500Z","msg":"step done","step":"GPU 0: destroy 1g.10gb@4","took":"1.1s"}
{"level":"info","ts":"2026-11-24T13:10:56.600Z","msg":"reporting","reason":"Repartitioning"}
{"level":"info","ts":"2026-11-24T13:10:57.800Z","msg":"step done","step":"GPU 0: create 3g.40gb@4","took":"200ms"}
{"level":"info","ts":"2026-11-24T13:10:58.000Z","msg":"step done","step":"resume device plugin","took":"9ms"}
{"level":"info","ts":"2026-11-24T13:11:02.000Z","msg":"step done","step":"release: give the node back","took":"10ms"}
`
	file := filepath.Join(t.TempDir(), "agent.log")
	if err := os.WriteFile(file, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	steps, err := stepsIn(file)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Date(2026, 11, 24, 13, 10, 55, 0, time.UTC)
	r := result{bound: 1300 * time.Millisecond, ready: 4500 * time.Millisecond, said: 7 * time.Second}
	got := divide(r, began, steps)
	want := spent{drain: 400 * time.Millisecond, passes: 1100 * time.Millisecond, plugin: 1700 * time.Millisecond, verification: 2500 * time.Millisecond}
	if got != want {
		t.Errorf("divided into %+v, want %+v", got, want)
	}
	if sum := got.drain + r.bound + got.passes + got.plugin + got.verification; sum != r.said {
		t.Errorf("the parts add up to %s, want %s", sum, r.said)
	}
	if got := divide(r, began, steps[:1]); got != (spent{}) {
		t.Errorf("a change of nothing is divided into %+v", got)
	}
	shared := []step{{text: "set the device plugin's config: time-slicing of nvidia.com/gpu x 4", began: began.Add(time.Second), end: began.Add(2 * time.Second)}}
	if got := divide(result{ready: 3 * time.Second, said: 5 * time.Second}, began, shared); got != (spent{drain: time.Second, plugin: 2 * time.Second, verification: 2 * time.Second}) {
		t.Errorf("a change of the sharing is divided into %+v", got)
	}
	r.spent = got
	table := tabulateSpent([]row{{scenario{name: "first"}, measured{name: "gpuslice"}, []result{r}}, {scenario{name: "none"}, measured{name: "other"}, []result{{}}}}, true)
	if line := "| first | 0.40 s | 1.30 s | 1.10 s | 1.70 s | 2.50 s | 7.00 s |"; !strings.Contains(table, line) || strings.Contains(table, "none") {
		t.Errorf("the table has no line %q, or others:\n%s", line, table)
	}
}

func TestTheTableOfFaultsSaysWhatNeverHappened(t *testing.T) {
	known := map[string]bool{}
	for _, s := range gpusim.Sequences() {
		known[s.Name] = true
	}
	for _, f := range faults {
		if !known[f.sequence] {
			t.Errorf("%s: there is no sequence %s", f.name, f.sequence)
		}
	}
	at := func(d time.Duration) moment { return moment{d, true} }
	got := tabulateFaults([]faultRow{
		{faults[0], "device plugin", false, []course{{fell: at(time.Second)}, {fell: at(3 * time.Second)}, {fell: at(2 * time.Second), whole: at(0)}}},
		{faults[0], "gpuslice", true, []course{{at(1500 * time.Millisecond), at(time.Second), at(time.Minute), at(4 * time.Second)}}},
		{faults[2], "gpuslice", true, []course{{}}},
	}, true)
	for _, line := range []string{
		"| " + faults[0].name + " | device plugin |  | 2.0 s |  | never |",
		"|  | gpuslice | 1.5 s | 1.0 s | 60.0 s | 4.0 s |",
		"| " + faults[2].name + " | gpuslice | none | none |  |  |",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("the table has no line %q:\n%s", line, got)
		}
	}
}

// What the kernel says of a process by rusage is what /proc says of it.
func TestTheCostOfAProcessIsFound(t *testing.T) {
	block := make([]byte, 64<<20)
	for i := range block {
		block[i] = byte(i)
	}
	runtime.KeepAlive(block)
	var want syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &want); err != nil {
		t.Fatal(err)
	}
	got, err := costOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if got.memory < 64<<10 || int64(got.memory) > 2*want.Maxrss {
		t.Errorf("%d KiB of memory, want at least 64 MiB and about %d KiB", got.memory, want.Maxrss)
	}
	used := time.Duration(want.Utime.Nano() + want.Stime.Nano())
	if got.cpu < used-100*time.Millisecond {
		t.Errorf("%s of processor time, want at least %s", got.cpu, used)
	}
}

func TestProcessorTimeIsReadWhateverTheProgramsName(t *testing.T) {
	const stat = "4711 (a) b 1) S 1 4711 4711 0 -1 4194560 5093 811 0 0 12 34 500 6000 20 0 9 0 12345 1 2\n"
	got, err := processorTime([]byte(stat))
	if err != nil || got != 65460*time.Millisecond {
		t.Errorf("processor time is %s (%v), want 65.46 s", got, err)
	}
	if _, err := processorTime([]byte("4711 (ended) Z 1 2")); err == nil {
		t.Error("processor time is read where there is none")
	}
	if _, err := peak("Name:\tended\nState:\tZ (zombie)\n"); err == nil {
		t.Error("memory is read where there is none")
	}
}
