package idle_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/agent/monitor/idle"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// world is a monitor with simulated GPUs and pods.
type world struct {
	t        *testing.T
	gpus     *gpusim.Node
	driver   nvml.Driver
	monitor  *idle.Monitor
	settings config.Idle
	node     corev1.Node
	pods     []corev1.Pod
	holders  []holders.Pod
	owners   map[int]string // pod by pid
	deaf     bool           // kubelet does not say who has what
	events   []string       // Events
	end      func()
}

func newWorld(t *testing.T, spec string, change ...func(*config.Idle)) *world {
	t.Helper()
	n, err := gpusim.Create(t.TempDir(), parsed(t, spec))
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, gpus: n, driver: n.Driver(), settings: config.Default().Idle, owners: map[int]string{}}
	for _, c := range change {
		c(&w.settings)
	}
	w.start()
	t.Cleanup(func() {
		w.end()
		_ = n.Close()
	})
	return w
}

// running is a clock that goes on between any two readings of it, as a real one does and that of a test does not.
type running struct {
	clock.RealClock
	reads *atomic.Int64
}

func (r running) Now() time.Time { return r.RealClock.Now().Add(time.Duration(r.reads.Add(1))) }

func parsed(t *testing.T, spec string) gpusim.Spec {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// start is the start of an agent.
func (w *world) start() {
	w.monitor = idle.New(idle.Options{
		Settings: w.settings, Reader: w.gpus.Usage(), Clock: running{reads: &atomic.Int64{}}, Log: zaptest.NewLogger(w.t),
		Owners: monitor.OwnerFinder{Processes: w, ComputesForOthers: func(p *corev1.Pod) bool { return p.Name == "mps" }, Log: zaptest.NewLogger(w.t)},
		PodEvent: func(_ types.NamespacedName, uid types.UID, e events.Event) {
			w.events = append(w.events, fmt.Sprintf("%s %s %s: %s", uid, e.Type, e.Reason, e.Message))
		},
	})
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.monitor.Watch(ctx, func() {})
	}()
	w.end = func() { cancel(); <-ended }
}

// Holders is the process table.
func (w *world) Holders(_ context.Context, sought []holders.Sought) ([]holders.Client, error) {
	var out []holders.Client
	for _, s := range sought {
		for _, pid := range s.Reported {
			out = append(out, holders.Client{PID: pid, Owner: holders.Owner{PodUID: types.UID(w.owners[pid])}})
		}
	}
	return out, nil
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// cut makes an instance of one slice at each place.
func (w *world) cut(gpu int, starts ...int) {
	w.t.Helper()
	all := w.snapshot()
	for _, start := range starts {
		w.must(w.driver.Create(w.t.Context(), all[gpu].UUID, nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: start, Size: 1}}))
	}
}

func (w *world) snapshot() []nvml.GPU {
	w.t.Helper()
	all, err := w.driver.Snapshot(w.t.Context())
	w.must(err)
	return all
}

// give gives the pod the device, with the process of that number there, or with none.
func (w *world) give(name, device string, pid int) {
	w.t.Helper()
	uid := types.UID("uid-of-" + name)
	if !slices.ContainsFunc(w.pods, func(p corev1.Pod) bool { return p.UID == uid }) {
		w.pods = append(w.pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: uid}})
	}
	w.holders = append(w.holders, holders.Pod{Namespace: "team-a", Name: name, UID: uid, Devices: []string{device}, DevicesKnown: true, Running: []string{"main"}})
	if pid > 0 {
		w.must(w.gpus.Hold(device, pid, "python", 512))
		w.owners[pid] = string(uid)
	}
}

// pass is a pass of the agent's loop.
func (w *world) pass() {
	w.t.Helper()
	with := slices.Clone(w.holders)
	for i := range with {
		if w.deaf {
			with[i].Devices, with[i].DevicesKnown = nil, false
		}
	}
	w.monitor.Observe(w.t.Context(), &w.node, w.snapshot(), slices.Clone(w.pods), with)
	w.monitor.Conditions(&w.node, true, "", false)
}

// after lets the time pass, with a pass of the loop every five minutes, and gives the Events of that time.
func (w *world) after(d time.Duration) []string {
	w.t.Helper()
	w.events = nil
	for end := time.Now().Add(d); ; {
		w.pass()
		left := time.Until(end)
		if left <= 0 {
			break
		}
		<-time.After(min(left, 5*time.Minute))
		synctest.Wait()
	}
	return w.events
}

// uses are how busy pods are, by pod.
func (w *world) uses() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, d := range monitor.Devices(w.snapshot()) {
		for _, h := range d.Holders(w.holders) {
			uses := []api.Use{{Namespace: h.Namespace, Pod: h.Name, UUID: d.GPU, Instance: d.Instance(), Unknown: "no one watches it"}}
			w.monitor.AddBusy(uses)
			if out[h.Name] = uses[0].Unknown; uses[0].Busy != nil {
				out[h.Name] = fmt.Sprintf("%.1f%%", *uses[0].Busy)
			}
		}
	}
	return out
}

// series are the values of the metrics that have a pod or a device, by metric and pod or device.
func (w *world) series() map[string]float64 {
	w.t.Helper()
	r := prometheus.NewPedanticRegistry()
	w.must(r.Register(w.monitor))
	problems, err := testutil.GatherAndLint(r)
	w.must(err)
	for _, p := range problems {
		w.t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
	found, err := r.Gather()
	w.must(err)
	out := map[string]float64{}
	for _, family := range found {
		for _, m := range family.GetMetric() {
			name := family.GetName()
			for _, l := range m.GetLabel() {
				if l.GetName() == "pod" {
					name += " " + l.GetValue()
				}
			}
			if name == config.MetricGPUBusy {
				name += fmt.Sprintf(" %d", len(out))
			}
			out[name] = m.GetGauge().GetValue()
		}
	}
	return out
}

func TestAPodThatDoesNotUseWhatItHasIsReportedOnceInAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB, mig: true, count: 4}]")
		w.cut(3, 0, 1)
		w.after(time.Hour)
		w.give("notebook-0", w.gpus.MIGDevice(3, 0), 0)
		if events := w.after(6*time.Hour - time.Minute); events != nil {
			t.Errorf("before 6 h are over: %q", events)
		}
		want := []string{"uid-of-notebook-0 Warning GPUIdle: team-a/notebook-0 has had GPU 3 1g.10gb for 6 h and used it for 0 %; no process is on it (" +
			w.gpus.MIGDevice(3, 0) + ")"}
		if diff := cmp.Diff(want, w.after(2*time.Minute)); diff != "" {
			t.Errorf("after 6 h (-want +got):\n%s", diff)
		}
		if events := w.after(6*time.Hour - 2*time.Minute); events != nil {
			t.Errorf("again within 6 h: %q", events)
		}
		want[0] = strings.Replace(want[0], "for 6 h and used it for 0 %", "for 12 h and used it for 0 % of the last 6 h", 1)
		if diff := cmp.Diff(want, w.after(2*time.Minute)); diff != "" {
			t.Errorf("after 12 h (-want +got):\n%s", diff)
		}
	})
}

func TestAShortTimeIsReportedToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB, mig: true}]", func(i *config.Idle) {
			*i = config.Idle{Every: time.Second, After: 10 * time.Second, Below: 1, Instances: config.IdleInstancesSample}
		})
		w.cut(0, 0, 1)
		w.after(time.Minute)
		w.give("trainer", w.gpus.MIGDevice(0, 0), 11)
		w.must(w.gpus.Busy(11, 60))
		w.give("notebook", w.gpus.MIGDevice(0, 1), 12)
		events := w.after(15 * time.Second)
		if len(events) != 1 || !strings.Contains(events[0], "team-a/notebook has had GPU 0 1g.10gb for 10 s and used it for 0 %; 512 of ") {
			t.Errorf("Events: %q", events)
		}
	})
}

func TestAPodThatWorksIsReportedWhenItHasNotForSoLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]")
		w.after(time.Minute)
		w.give("train", w.gpus.UUIDs()[0], 11)
		w.must(w.gpus.Busy(11, 80))
		if events := w.after(20 * time.Hour); events != nil {
			t.Errorf("of a pod that works: %q", events)
		}
		if got := w.uses()["train"]; got != "80.0%" {
			t.Errorf("it is busy for %s", got)
		}
		w.must(w.gpus.Busy(11, 0))
		if events := w.after(5 * time.Hour); events != nil {
			t.Errorf("of a pod that has worked 5 h ago: %q", events)
		}
		events := w.after(2 * time.Hour)
		const words = "team-a/train has had GPU 0 for 25 h and used it for less than 1 % of the last 6 h; 512 of 15360 MiB in use by a process"
		if len(events) != 1 || !strings.Contains(events[0], words) {
			t.Errorf("of a pod that has worked more than 6 h ago: %q", events)
		}
		w.must(w.gpus.Busy(11, 50))
		if events := w.after(time.Hour); events != nil {
			t.Errorf("of a pod that works again: %q", events)
		}
		w.must(w.gpus.Busy(11, 0))
		if events := w.after(6*time.Hour + 20*time.Minute); len(events) != 1 {
			t.Errorf("of a pod that has stopped again: %q", events)
		}
	})
}

func TestANewAgentCountsFromItsStartAndSaysForAtLeastHowLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]")
		w.give("notebook", w.gpus.UUIDs()[0], 11)
		w.after(7 * time.Hour)
		w.end()
		w.start()
		if events := w.after(6*time.Hour - time.Minute); events != nil {
			t.Errorf("a new agent within 6 h: %q", events)
		}
		if events := w.after(2 * time.Minute); len(events) != 1 || !strings.Contains(events[0], "has had GPU 0 for at least 6 h and used it for 0 %;") {
			t.Errorf("a new agent after 6 h: %q", events)
		}
	})
}

// Kubelet reports after its restart for a while that no pod has anything.
func TestAKubeletThatReportsNothingMakesNoPodNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}, {model: T4}]")
		w.deaf = true
		w.give("early", w.gpus.UUIDs()[0], 11)
		w.after(time.Minute)
		w.deaf = false
		w.after(4 * time.Hour)
		w.deaf = true
		w.after(5 * time.Minute)
		w.deaf = false
		if events := w.after(2*time.Hour + 10*time.Minute); len(events) != 1 || !strings.Contains(events[0], "for at least 6 h and used it for 0 %") {
			t.Errorf("of a pod that the agent has seen for 6 h and kubelet reported when it could: %q", events)
		}
	})
}

func TestWhatIsNotKnownIsNoIdleness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB, mig: true}, {model: T4}, {model: T4}]")
		w.cut(0, 0)
		w.give("on-ampere", w.gpus.MIGDevice(0, 0), 11)
		w.give("mps-client", w.gpus.UUIDs()[1], 0)
		w.must(w.gpus.Hold(w.gpus.UUIDs()[1], 12, "nvidia-cuda-mps-server", 30))
		w.must(w.gpus.Busy(12, 40))
		w.give("lost", w.gpus.UUIDs()[2], 13)
		w.must(w.gpus.SetHealth(2, gpusim.Health{Lost: true}))
		if events := w.after(20 * time.Hour); events != nil {
			t.Errorf("Events: %q", events)
		}
		want := map[string]string{
			"on-ampere":  "the driver does not report how busy an instance is on this kind of GPU, or is too old (ERROR_NOT_SUPPORTED)",
			"mps-client": "a busy process belongs to no pod that has the GPU, or computes for others as MPS's server does",
		}
		if diff := cmp.Diff(want, w.uses()); diff != "" {
			t.Errorf("uses (-want +got):\n%s", diff)
		}
		if got := w.series(); len(got) != 1 { // that of the GPU on which the server computes
			t.Errorf("metrics: %v", got)
		}
	})
}

func TestInstancesAreSampledOnHopper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB, mig: true}]")
		w.cut(0, 0, 1, 2)
		for i, name := range []string{"works", "rests", "empty"} {
			w.give(name, w.gpus.MIGDevice(0, i), []int{11, 12, 0}[i])
		}
		w.must(w.gpus.Busy(11, 30))
		events := w.after(6*time.Hour + time.Minute)
		if len(events) != 2 || !strings.Contains(strings.Join(events, "\n"), "rests") || !strings.Contains(strings.Join(events, "\n"), "empty") {
			t.Errorf("Events: %q", events)
		}
		if diff := cmp.Diff(map[string]string{"works": "30.0%", "rests": "0.0%", "empty": "0.0%"}, w.uses()); diff != "" {
			t.Errorf("uses (-want +got):\n%s", diff)
		}
		want := map[string]float64{
			config.MetricPodGPUBusy + " works": 0.3, config.MetricPodGPUBusy + " rests": 0, config.MetricPodGPUBusy + " empty": 0,
			config.MetricPodGPUIdle + " works": 0, config.MetricPodGPUIdle + " rests": 1, config.MetricPodGPUIdle + " empty": 1,
		}
		got := w.series()
		maps.DeleteFunc(got, func(name string, _ float64) bool { return strings.HasPrefix(name, config.MetricGPUBusy) })
		near := cmp.Comparer(func(a, b float64) bool { return a-b < 0.001 && b-a < 0.001 })
		if diff := cmp.Diff(want, got, near); diff != "" {
			t.Errorf("metrics (-want +got):\n%s", diff)
		}
	})
}

// A sample that is kept may keep an instance from being destroyed.
func TestNoInstanceIsSampledInAChangeOrAgainstTheSetting(t *testing.T) {
	for name, row := range map[string]struct {
		instances config.IdleInstances
		journal   map[string]string
		unknown   string
	}{
		"a change":    {config.IdleInstancesSample, map[string]string{config.AnnotationJournal: "{}"}, "the agent samples no instance while a change is under way"},
		"the setting": {config.IdleInstancesSkip, nil, "setting idle.instances is skip"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus: [{model: H100-80GB, mig: true}]", func(i *config.Idle) { i.Instances = row.instances })
				w.cut(0, 0)
				w.give("works", w.gpus.MIGDevice(0, 0), 11)
				w.node.Annotations = row.journal
				w.must(w.gpus.Fail(gpusim.GpmMigSampleGet, gpusim.Fault{Return: gpusim.Unknown, Times: 1}))
				w.after(time.Minute)
				if len(w.gpus.Faults()) == 0 {
					t.Error("an instance was sampled")
				}
				if got := w.uses()["works"]; !strings.Contains(got, row.unknown) {
					t.Errorf("its use is %s", got)
				}
				w.node.Annotations = nil
				w.after(time.Minute)
				if sampled := len(w.gpus.Faults()) == 0; sampled != (row.instances == config.IdleInstancesSample) {
					t.Errorf("after a change: sampled is %v", sampled)
				}
			})
		})
	}
}

func TestASilentDriverIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]")
		w.give("notebook", w.gpus.UUIDs()[0], 11)
		w.after(time.Minute)
		w.monitor.Conditions(&w.node, false, "it is being upgraded", false)
		w.must(w.gpus.Fail(gpusim.GetCount, gpusim.Fault{Return: gpusim.Unknown, Times: 1}))
		<-time.After(time.Hour)
		synctest.Wait()
		if len(w.gpus.Faults()) == 0 {
			t.Error("the driver was asked")
		}
	})
}

// An observation that takes long, or fails for a while, is no time for which anything is known.
func TestTimeWithoutAnObservationCountsForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]")
		w.give("notebook", w.gpus.UUIDs()[0], 11)
		w.after(2 * time.Hour)
		w.must(w.gpus.Fail(gpusim.GetProcessUtilization, gpusim.Fault{Return: gpusim.Unknown, Times: -1}))
		w.after(time.Hour)
		w.must(w.gpus.Fail(gpusim.GetProcessUtilization, gpusim.Fault{}))
		if events := w.after(3*time.Hour + 30*time.Minute); events != nil {
			t.Errorf("of 6 h one of which is not known: %q", events)
		}
		if events := w.after(2 * time.Hour); len(events) != 1 {
			t.Errorf("of 6 h that are known: %q", events)
		}
	})
}

func TestAMonitorThatIsSwitchedOffPollsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]", func(i *config.Idle) { i.Every = 0 })
		w.give("notebook", w.gpus.UUIDs()[0], 11)
		w.must(w.gpus.Fail(gpusim.GetCount, gpusim.Fault{Return: gpusim.Unknown, After: 1000}))
		before := w.gpus.Faults()[gpusim.GetCount][0].After
		w.monitor.Observe(t.Context(), &w.node, nil, nil, nil)
		<-time.After(time.Hour)
		if got := w.uses()["notebook"]; got != "setting idle.every is 0" || w.gpus.Faults()[gpusim.GetCount][0].After != before-1 {
			t.Errorf("uses: %s", got)
		}
	})
}

func TestWhatIsRememberedIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]", func(i *config.Idle) { i.After = 10 * time.Minute })
		for i := range 1500 {
			w.give(fmt.Sprintf("notebook-%d", i), w.gpus.UUIDs()[0], 0)
		}
		events := w.after(10*time.Minute + 30*time.Second)
		if len(events) == 0 || len(events) > 4*16 {
			t.Errorf("%d Events within half a minute", len(events))
		}
		if got := testutil.CollectAndCount(w.monitor); got != 2*1024+1 { // without series(), whose linter compares each with each other
			t.Errorf("%d series", got)
		}
		w.pods, w.holders = nil, nil
		w.after(time.Minute)
		if got := w.series(); len(got) != 1 {
			t.Errorf("%d series of pods that are gone", len(got))
		}
	})
}
