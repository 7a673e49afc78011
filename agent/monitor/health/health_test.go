package health_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const twoH200 = "gpus: [{model: H200, count: 2}]"

// ends says what becomes of a sequence: what the node says within 5 s of the fault, and a good while later if no one cures it.
var ends = map[string]struct {
	soon  []config.Reason // none: the node stays well
	later config.Reason   // empty: well again
}{
	"application":                    {nil, ""},
	"contained-ecc":                  {[]config.Reason{config.ReasonXidCritical}, config.ReasonRowRemapPending},
	"contained-ecc-drain":            {[]config.Reason{config.ReasonXidCritical, config.ReasonDrainRequired}, config.ReasonDrainRequired},
	"context-switch-timeout":         {[]config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
	"context-switch-timeout-settled": {[]config.Reason{config.ReasonXidCritical}, ""},
	"dead":                           {[]config.Reason{config.ReasonGPULost, config.ReasonXidCritical, config.ReasonGPUMissing}, config.ReasonGPUMissing},
	"fallen-off":                     {[]config.Reason{config.ReasonXidCritical, config.ReasonGPULost}, config.ReasonGPULost},
	"fallen-off-silently":            {[]config.Reason{config.ReasonGPULost}, config.ReasonGPULost},
	"gsp-hang":                       {[]config.Reason{config.ReasonXidCritical, config.ReasonDriverUnresponsive}, config.ReasonDriverUnresponsive},
	"gsp-hiccup":                     {[]config.Reason{config.ReasonXidCritical}, ""},
	"init-failure":                   {[]config.Reason{config.ReasonGPUMissing}, config.ReasonGPUMissing},
	"nvlink5":                        {[]config.Reason{config.ReasonDrainRequired}, config.ReasonDrainRequired},
	"nvlink":                         {[]config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
	"pmu-halt":                       {[]config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
	"remap-failure":                  {[]config.Reason{config.ReasonXidCritical, config.ReasonRowRemapFailed}, config.ReasonRowRemapFailed},
	"users-reset":                    {[]config.Reason{config.ReasonResetRequired}, config.ReasonResetRequired},
	"uncontained-ecc":                {[]config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
	"uncontained-ecc-settled":        {[]config.Reason{config.ReasonXidCritical}, ""},
}

// death is when an agent is killed in a sequence.
type death string

const (
	lives             death = "the agent lives"
	diesInBetween     death = "the agent is killed while it happens"
	diesWhenItReports death = "the agent is killed when it has reported"
)

// Each sequence is reported within 5 s, by condition, Event, metric and status, said alike by an agent that is killed in the middle, and over
// within 10 s of its cure. Of harmless ones nothing is reported. The machine's reboot ends the agent, too.
func TestEachSequenceIsReportedAndHeals(t *testing.T) {
	for _, s := range gpusim.Sequences() {
		for _, when := range []death{lives, diesInBetween, diesWhenItReports} {
			t.Run(fmt.Sprintf("%s, %s", s.Name, when), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { sequence(t, s, when) })
			})
		}
	}
}

func sequence(t *testing.T, s gpusim.Sequence, when death) {
	t.Helper()
	end, known := ends[s.Name]
	if !known {
		t.Fatalf("no one says what becomes of %s", s.Name)
	}
	w := newWorld(t, twoH200)
	w.holds("train-0", w.gpus.UUIDs()[1])
	w.start()
	w.within(5*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
	w.heard("")
	boot := w.gpus.BootID()
	restart := func() {
		w.kill()
		w.start()
	}
	played := make(chan error, 1)
	go func() { played <- w.gpus.Play(t.Context(), 1, gpusim.NoInstance, s.Name) }()
	if when == diesInBetween {
		w.passes(25 * time.Millisecond) // all have steps that are 50 ms apart at least
		restart()
	}
	must(t, <-played)
	if boot != w.gpus.BootID() {
		restart()
		boot = w.gpus.BootID()
	}
	switch {
	case when == diesInBetween: // what was reported while no agent ran shows in the GPU's state alone
	case len(end.soon) == 0:
		w.stays(time.Minute, corev1.ConditionFalse)
		w.agrees(s.Name, 1, true)
		if heard := w.heard("node Warning"); len(heard) > 0 {
			t.Errorf("the node hears: %q", heard)
		}
	default:
		began := time.Now()
		c := w.within(5*time.Second, corev1.ConditionTrue, end.soon...)
		if !strings.Contains(c.Message, "GPU 1") && !strings.Contains(c.Message, w.gpus.UUIDs()[1]) || !strings.Contains(c.Message, "Action: ") {
			t.Errorf("the message names no GPU or action: %s", c.Message)
		}
		synctest.Wait() // the Event follows the write
		if len(w.heard(string(config.ReasonGPUUnhealthy)+": ")) == 0 {
			t.Error("no Event says that a GPU is unhealthy")
		}
		w.agrees(s.Name, 1, false)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("all of that took %s", took)
		}
	}
	if when == diesWhenItReports {
		was := w.condition().Status
		restart()
		w.stays(5*time.Second, was)
	}
	w.passes(2 * time.Minute)
	w.pass(false)
	want := corev1.ConditionFalse
	if end.later != "" {
		want = corev1.ConditionTrue
	} else {
		end.later = config.ReasonGPUsHealthy
	}
	w.within(5*time.Second, want, end.later)
	must(t, w.gpus.Cure(t.Context(), 1, s.Name))
	if boot != w.gpus.BootID() {
		restart()
	}
	w.within(10*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
	w.stays(time.Minute, corev1.ConditionFalse)
	w.agrees(s.Name, 1, true)
}

// agrees checks that metric and status say of a GPU what the condition does.
func (w *world) agrees(sequence string, gpu int, healthy bool) {
	w.t.Helper()
	sum, found := w.metric("gpuslice_gpu_healthy")
	all, problems := float64(len(w.gpus.UUIDs())), 0.0
	if !healthy {
		all, problems = all-1, 1
	}
	if !found || sum != all {
		w.t.Errorf("%s: by the metric %v GPUs are healthy, want %v", sequence, sum, all)
	}
	if n, _ := w.metric("gpuslice_gpu_problem"); n < problems || healthy && n > 0 {
		w.t.Errorf("%s: the metric has %v problems", sequence, n)
	}
	if !w.answers() { // then no status is written
		return
	}
	for _, g := range w.status().GPUs {
		if bad := g.Health != nil && g.Health.Reason != ""; g.Index == gpu && g.UUID != "" && bad == healthy { // a lost one may not say its UUID here
			w.t.Errorf("%s: the status has %+v", sequence, g.Health)
		}
	}
}

// answers reports whether the driver reports all GPUs.
func (w *world) answers() bool {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
	defer cancel()
	gpus, err := w.gpus.Driver().Snapshot(ctx)
	return err == nil && len(gpus) == len(w.gpus.UUIDs())
}

// The agent's watch may show the write to a pass of its loop before the write is answered.
func TestAWriteThatAPassSeesBeforeItsAnswerIsReportedAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		synctest.Wait()
		w.heard("")
		w.seen = func() {
			w.mu.Lock()
			node := w.node.DeepCopy()
			w.mu.Unlock()
			w.m.Conditions(node, true, "", false)
		}
		must(t, w.gpus.Play(t.Context(), 1, gpusim.NoInstance, "fallen-off"))
		w.within(5*time.Second, corev1.ConditionTrue)
		synctest.Wait()
		if heard := w.heard(string(config.ReasonGPUUnhealthy) + ": "); len(heard) == 0 {
			t.Error("no Event says that a GPU is unhealthy")
		}
	})
}

// A GPU with instances does not report its rows: an Xid is all that shows that one is to be replaced, and a reset what ends it.
func TestAnErrorOfOneInstanceLeavesTheOthersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.cut(0, nvml.Placed{Profile: "3g.71gb", Span: nvml.Span{Start: 0, Size: 4}}, nvml.Placed{Profile: "3g.71gb", Span: nvml.Span{Start: 4, Size: 4}})
		w.holds("one", w.gpus.MIGDevice(0, 0))
		w.holds("other", w.gpus.MIGDevice(0, 4))
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.XidOn(0, 4, 109))
		c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		if !strings.Contains(c.Message, "Only 3g.71gb@4 is affected: ml/other.") {
			t.Errorf("the message is %q, want that only 3g.71gb@4 is affected", c.Message)
		}
		if g := w.status().GPUs[0].Health; g == nil || !slices.Equal(g.Instances, []string{"3g.71gb@4"}) {
			t.Errorf("the status has %+v, want instance 3g.71gb@4", g)
		}
		on := w.heard(string(config.ReasonXidError))
		if len(on) != 2 || !strings.HasPrefix(on[0], "node ") || !strings.HasPrefix(on[1], "ml/other ") {
			t.Errorf("Events are %q, want one on the node and one on ml/other", on)
		}
		w.within(time.Minute, corev1.ConditionFalse)

		must(t, w.gpus.Play(t.Context(), 0, 0, "contained-ecc"))
		w.within(5*time.Second, corev1.ConditionTrue)
		if heard := w.heard(string(config.ReasonApplicationXid)); len(heard) != 1 || !strings.HasPrefix(heard[0], "ml/one ") || !strings.Contains(heard[0], "was hit by it") {
			t.Errorf("of the contained error the pods hear %q, want ml/one alone", heard)
		}
		w.within(time.Minute, corev1.ConditionTrue, config.ReasonRowRemapPending)
		if _, there := w.metric("gpuslice_gpu_row_remap_pending", w.gpus.UUIDs()[0]); !there {
			t.Error("the metric does not have the row that is pending")
		}
		if _, there := w.metric("gpuslice_gpu_remapped_rows", w.gpus.UUIDs()[0]); there {
			t.Error("rows that the driver does not report have a metric")
		}
		w.kill()
		w.start()
		w.stays(10*time.Second, corev1.ConditionTrue)
		must(t, w.gpus.Cure(t.Context(), 0, "contained-ecc"))
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

func TestProgramsErrorsAreReportedOnTheirPodsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.holds("train-0", w.gpus.UUIDs()[0])
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		for range 3 {
			must(t, w.gpus.Play(t.Context(), 0, gpusim.NoInstance, "application"))
			w.passes(time.Minute)
		}
		heard := w.heard(" Warning ")
		if len(heard) != 1 || !strings.HasPrefix(heard[0], "ml/train-0 Warning ApplicationXid: Xid 31 (") {
			t.Errorf("Events are %q, want one on ml/train-0", heard)
		}
		if n, _ := w.metric("gpuslice_gpu_xid_events_total", "31", w.gpus.UUIDs()[0]); n != 3 {
			t.Errorf("Xid 31 was counted %v times, want 3", n)
		}
		must(t, w.gpus.Play(t.Context(), 0, gpusim.NoInstance, "application"))
		w.passes(time.Second)
		if heard = w.heard("2 more since"); len(heard) != 1 {
			t.Errorf("the next Event does not count those before: %q", heard)
		}
		const withholds = "NVIDIA's device plugin withholds the GPU"
		if heard = w.heard(withholds); len(heard) != 0 {
			t.Errorf("the plugin takes no Xid 31 for a fault of the GPU: %q", heard)
		}
		for range 3 {
			must(t, w.gpus.Xid(0, 69))
			w.passes(12 * time.Second)
		}
		w.passes(4 * time.Minute)
		must(t, w.gpus.Xid(0, 69))
		w.passes(time.Second)
		if heard = w.heard(withholds); len(heard) != 2 || !strings.HasPrefix(heard[1], "ml/train-0 Warning ApplicationXid: Xid 69 (") || !strings.Contains(heard[1], "; 2 more since") {
			t.Errorf("Events on the pod whose errors take a GPU away are %q, want two, the last with the count", heard)
		}
		// Those of three pods are more than their own mistakes.
		for _, pod := range []string{"b", "c"} {
			w.stays(time.Second, corev1.ConditionFalse)
			w.holders = nil
			w.holds(pod, w.gpus.UUIDs()[0])
			w.pass(false)
			must(t, w.gpus.Xid(0, 13))
		}
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonRepeatedXid)
		w.passes(time.Hour)
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

// afterAnXid runs a test in a world whose GPU 0 has had an error that no state shows to be over.
func afterAnXid(t *testing.T, test func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Xid(0, 62))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		test(w)
	})
}

// acknowledges sets the annotation by which a person acknowledges the errors until then.
func (w *world) acknowledges(until string) {
	w.node.Annotations = map[string]string{config.AnnotationHealthAck: until}
}

// What only a person can say to be over stays until one does, whatever the agent's processes.
func TestAPersonAcknowledgesWhatNoStateShowsToBeOver(t *testing.T) {
	afterAnXid(t, func(w *world) {
		since := w.condition().LastTransitionTime
		w.passes(time.Hour)
		w.pass(true)
		for _, text := range []string{"yesterday", time.Now().Add(-48 * time.Hour).Format(time.RFC3339), time.Now().Add(48 * time.Hour).Format(time.RFC3339)} {
			w.acknowledges(text)
			w.pass(false)
			w.stays(10*time.Second, corev1.ConditionTrue)
		}
		if now := w.condition().LastTransitionTime; !now.Equal(&since) {
			w.t.Errorf("the condition has changed at %s, want %s", now, since)
		}
		w.acknowledges(time.Now().Format(time.RFC3339))
		w.pass(false)
		w.within(10*time.Second, corev1.ConditionFalse)
		must(w.t, w.gpus.Xid(0, 62))
		w.within(5*time.Second, corev1.ConditionTrue)
	})
}

// Neither a time to come nor one that managedFields show to be after the write acknowledges what happens then. An Event names who has done it.
func TestWhatHappensAfterTheAcknowledgementWasWrittenIsNotAcknowledged(t *testing.T) {
	afterAnXid(t, func(w *world) {
		w.passes(time.Minute)
		acknowledge := func(written *metav1.Time) {
			w.acknowledges(time.Now().Add(50 * time.Second).Format(time.RFC3339))
			w.node.ManagedFields = []metav1.ManagedFieldsEntry{{
				Manager: "kubectl-annotate", Operation: metav1.ManagedFieldsOperationUpdate, Time: written, FieldsType: "FieldsV1",
				FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:gpuslice.io/health-ack":{}}}}`),
			}}
			w.pass(false)
		}
		acknowledge(&metav1.Time{Time: time.Now()})
		w.within(10*time.Second, corev1.ConditionFalse)
		heard := w.heard(string(config.ReasonHealthAcknowledged))
		if len(heard) != 1 || !strings.Contains(heard[0], "kubectl-annotate has acknowledged") || !strings.Contains(heard[0], ": Xid 62 of GPU 0") {
			w.t.Errorf("Events are %q, want one that says who has acknowledged what", heard)
		}
		w.passes(2 * time.Second)
		must(w.t, w.gpus.Xid(0, 62))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		w.pass(false)
		w.stays(70*time.Second, corev1.ConditionTrue)

		w.node.Annotations = map[string]string{config.AnnotationHealthAck: time.Now().Add(72 * time.Second).Format(time.RFC3339)}
		w.node.ManagedFields = nil // who may patch the node can empty them
		w.pass(false)
		w.passes(5 * time.Second)
		must(t, w.gpus.Xid(0, 62))
		w.passes(15 * time.Second)
		w.pass(false)
		w.stays(70*time.Second, corev1.ConditionTrue)

		w.kill()
		acknowledge(&metav1.Time{Time: time.Now().Add(-2 * time.Minute)})
		w.start()
		w.stays(10*time.Second, corev1.ConditionTrue)
	})
}

// A person acknowledges while no agent runs, and a pass of the next one sees that before its record is read.
func TestAnAcknowledgementThatIsSeenBeforeTheRecordCounts(t *testing.T) {
	afterAnXid(t, func(w *world) {
		w.passes(time.Minute)
		w.kill()
		w.acknowledges(time.Now().Format(time.RFC3339))
		w.disk.slow = time.Second
		w.start()
		w.within(15*time.Second, corev1.ConditionFalse)
	})
}

// A clock that was ahead when a fault was reported, and is right for the next process.
func TestAFaultOfAClockThatWasAheadCanBeAcknowledged(t *testing.T) {
	afterAnXid(t, func(w *world) {
		w.kill()
		now := time.Now().Format("2006-")
		w.disk.text = bytes.ReplaceAll(w.disk.text, []byte(now), []byte("2036-"))
		w.start()
		w.passes(time.Minute)
		w.acknowledges(time.Now().Format(time.RFC3339))
		w.pass(false)
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

func TestTheSettingsSayWhichXidsAreCritical(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.settings = config.Health{CriticalXids: []int{167}, ApplicationXids: []int{62}}
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Xid(0, 62))
		w.stays(10*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Xid(0, 167))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
	})
}

// NVIDIA has another catalog for Volta and Turing.
func TestAnOlderGPUHasAnotherCatalog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: T4}]")
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		w.pass(false)
		must(t, w.gpus.Xid(0, 109))
		w.stays(10*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.SetHealth(0, gpusim.Health{RetiringPages: true}))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonPageRetirementPending)
		must(t, w.gpus.Reload())
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

// A driver from before R565 recommends nothing: what it has reported is over only with a reset, that the counts show.
func TestAnOlderDriverRecommendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "driverVersion: 535.230.02\n"+twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Play(t.Context(), 0, gpusim.NoInstance, "uncontained-ecc"))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		w.stays(5*time.Minute, corev1.ConditionTrue)
		if _, there := w.metric("gpuslice_gpu_recovery_action"); there {
			t.Error("an action that no driver reports has a metric")
		}
		must(t, w.gpus.Cure(t.Context(), 0, "uncontained-ecc"))
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

// Every state has its reason, and heals as soon as it is gone.
func TestEachStateHasItsReason(t *testing.T) {
	for reason, h := range map[config.Reason]gpusim.Health{
		config.ReasonRebootRequired:        {RecoveryAction: 7},
		config.ReasonResetRequired:         {RecoveryAction: 9},
		config.ReasonDrainRequired:         {RecoveryAction: 5},
		config.ReasonRepairPending:         {RepairPending: true},
		config.ReasonModePending:           {ECCModeChanging: true},
		config.ReasonFabricUnhealthy:       {Fabric: gpusim.FabricHealth{State: 3, Status: gpusim.Unknown}},
		config.ReasonSRAMThresholdExceeded: {SRAMThreshold: true},
	} {
		t.Run(string(reason), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, twoH200)
				w.start()
				w.within(5*time.Second, corev1.ConditionFalse)
				must(t, w.gpus.SetHealth(1, h))
				w.within(65*time.Second, corev1.ConditionTrue, reason) // some are read each minute
				must(t, w.gpus.SetHealth(1, gpusim.Health{}))
				if reason == config.ReasonSRAMThresholdExceeded {
					w.stays(5*time.Minute, corev1.ConditionTrue) // which no reading undoes
					return
				}
				w.within(15*time.Second, corev1.ConditionFalse)
			})
		})
	}
}

// Two modes that wait are one problem: Prometheus gets nothing at all of an agent that has a series twice.
func TestModesThatWaitTogetherAreOneProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB}]")
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		gpu := nvml.UUID(w.gpus.UUIDs()[0])
		must(t, w.gpus.Hold(string(gpu), 4711, "python", 1))
		must(t, w.gpus.Driver().SetMode(t.Context(), gpu, true)) // by another client; pending, since the GPU is held
		must(t, w.gpus.SetHealth(0, gpusim.Health{ECCModeChanging: true}))
		c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonModePending)
		if !strings.Contains(c.Message, "ECC, MIG") {
			t.Errorf("the message is %q, want both modes in it", c.Message)
		}
		if n, _ := w.metric("gpuslice_gpu_problem"); n != 1 {
			t.Errorf("the metric has %v problems, want 1", n)
		}
	})
}

func TestGPUsThatNoDriverAnswersForAreFoundOnTheBus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H200, count: 3}]")
		for i, g := range mustHealth(t, w) {
			w.onBus = append(w.onBus, nvml.BusGPU{PCI: g.PCI, Driver: []string{"nvidia", "", "vfio-pci"}[i]})
		}
		must(t, w.gpus.SetHealth(1, gpusim.Health{Absent: true}))
		must(t, w.gpus.SetHealth(2, gpusim.Health{Absent: true})) // a virtual machine has it
		w.start()
		c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonGPUMissing)
		if !strings.Contains(c.Message, "3 are on the PCI bus, and 1 answer") || !strings.Contains(c.Message, w.onBus[1].PCI) || strings.Contains(c.Message, w.onBus[2].PCI) {
			t.Errorf("the message is %q, want that it names %s alone", c.Message, w.onBus[1].PCI)
		}
		there := w.status().GPUs
		if last := there[len(there)-1]; len(there) != 2 || !last.Missing || last.PCI != w.onBus[1].PCI || last.Index != -1 || last.Health == nil || last.Health.Reason != config.ReasonGPUMissing {
			t.Errorf("the status has %+v, want one GPU and the missing one", there)
		}
		must(t, w.gpus.SetHealth(1, gpusim.Health{}))
		w.within(10*time.Second, corev1.ConditionFalse)
		for _, g := range w.status().GPUs {
			if g.Missing {
				t.Errorf("the status has %+v", g)
			}
		}
	})
}

func mustHealth(t *testing.T, w *world) []nvml.Health {
	t.Helper()
	all, err := w.gpus.Health().Health(t.Context(), false)
	must(t, err)
	return all
}

func TestANodeWithoutDriverIsDistinguishedFromOneWithoutGPUs(t *testing.T) {
	for _, row := range []struct {
		onBus  []nvml.BusGPU
		status corev1.ConditionStatus
		reason config.Reason
		says   string
	}{
		{[]nvml.BusGPU{}, corev1.ConditionFalse, config.ReasonNoGPU, "neither"},
		{[]nvml.BusGPU{{PCI: "0000:07:00.0"}, {PCI: "0000:15:00.0"}}, corev1.ConditionUnknown, config.ReasonDriverNotLoaded, "The PCI bus has 2 GPUs, but no driver"},
	} {
		t.Run(string(row.reason), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, twoH200)
				must(t, w.gpus.Fail(gpusim.Init, gpusim.Fault{Return: gpusim.DriverNotLoaded, Times: -1}))
				w.onBus = row.onBus
				w.start()
				if c := w.within(10*time.Second, row.status, row.reason); !strings.Contains(c.Message, row.says) {
					t.Errorf("the message is %q, want %q in it", c.Message, row.says)
				}
				must(t, w.gpus.Fail(gpusim.Init, gpusim.Fault{}))
				w.within(10*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
			})
		})
	}
}

func TestADriverThatHangsIsAFaultAfterAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Fail(gpusim.GetFieldValues, gpusim.Fault{Hang: true}))
		w.within(15*time.Second, corev1.ConditionUnknown, config.ReasonDriverUnresponsive)
		w.stays(30*time.Second, corev1.ConditionUnknown)
		w.within(30*time.Second, corev1.ConditionTrue, config.ReasonDriverUnresponsive)
		must(t, w.gpus.Fail(gpusim.GetFieldValues, gpusim.Fault{}))
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

// The agent's own changes make GPUs look lost, away and without their mode.
func TestAChangeOfOursIsNoFinding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB}]")
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		d := w.m.Through(w.gpus.Driver())
		gpu := nvml.UUID(w.gpus.UUIDs()[0])
		must(t, w.gpus.Delay(gpusim.Reset, 20*time.Second))
		must(t, w.gpus.Hold(string(gpu), 4711, "python", 1))
		must(t, d.SetMode(t.Context(), gpu, true)) // pending, since the GPU is held
		w.stays(time.Minute, corev1.ConditionFalse)
		must(t, w.gpus.Release(4711))
		done := make(chan error)
		go func() { done <- d.Reset(t.Context(), gpu) }()
		w.passes(time.Second)
		must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
		w.stays(15*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.SetHealth(0, gpusim.Health{}))
		must(t, <-done)
		w.stays(time.Minute, corev1.ConditionFalse)
		must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonGPULost)
	})
}

func TestWhatComesAndGoesStaysForAWhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		for range 2 {
			must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
			w.within(5*time.Second, corev1.ConditionTrue)
			must(t, w.gpus.SetHealth(0, gpusim.Health{}))
			w.within(10*time.Second, corev1.ConditionFalse)
		}
		must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
		if c := w.within(5*time.Second, corev1.ConditionTrue); !strings.Contains(c.Message, "Flapping") {
			t.Errorf("the message is %q, want that it flaps", c.Message)
		}
		must(t, w.gpus.SetHealth(0, gpusim.Health{}))
		w.stays(9*time.Minute, corev1.ConditionTrue)
		w.within(2*time.Minute, corev1.ConditionFalse)
	})
}

// Nothing that changes by itself is written: only the heartbeat.
func TestANodeAtRestIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		writes, saves := w.written()
		for range 60 {
			w.passes(time.Minute)
			w.pass(false)
		}
		now, saved := w.written()
		if now != writes {
			t.Errorf("a node at rest was written %d times in an hour", now-writes)
		}
		if n := saved - saves; n > 61 {
			t.Errorf("the record was written %d times in an hour", n)
		}
		w.kill()
		w.start()
		w.passes(time.Minute)
		if now, _ = w.written(); now != writes {
			t.Error("a restart has written the node")
		}
		w.pass(true)
		if now, _ = w.written(); now != writes+1 {
			t.Errorf("on the heartbeat there were %d writes, want one", now-writes)
		}
	})
}

func TestWhatCouldNotBeReportedIsReportedLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		w.mu.Lock()
		w.broken = errServer
		w.mu.Unlock()
		must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
		w.passes(time.Minute)
		w.mu.Lock()
		w.broken = nil
		w.mu.Unlock()
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonGPULost)
	})
}

// 500 Xids a second from 8 GPUs, with an agent that is killed in the middle, and a reboot.
func TestPromise16AStormOfXidsTakesNoMemoryAndFewWrites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H200, count: 8}]")
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		writes, saves := w.written()
		before := heap()
		numbers := verdict.Xids()
		seconds := 60
		if testing.Short() {
			seconds = 8
		}
		for n := range 500 * seconds {
			must(t, w.gpus.Xid(n%8, numbers[n*7%len(numbers)].Number))
			if n%100 == 0 {
				must(t, w.gpus.Xid(n%8, uint64(1000+n))) // none that anyone knows
			}
			w.passes(2 * time.Millisecond)
			if n == 250*seconds || n == 375*seconds {
				w.kill()
				if n == 375*seconds {
					must(t, w.gpus.Reboot())
				}
				w.start()
			}
		}
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		if n, _ := w.metric("gpuslice_gpu_xid_events_total"); n < 500 {
			t.Errorf("%v Xids were counted since the restart", n)
		}
		grown := int64(heap()) - int64(before)
		now, saved := w.written()
		t.Logf("%d s of Xids: %d writes of the node, %d of the record of %d bytes, %d Events, heap +%d KiB",
			seconds, now-writes, saved-saves, len(w.record()), len(w.heard("")), grown>>10)
		if n := now - writes; n > 20 {
			t.Errorf("the node was written %d times", n)
		}
		if n := saved - saves; n > 4*seconds {
			t.Errorf("the record was written %d times in %d seconds", n, seconds)
		}
		if grown > 4<<20 {
			t.Errorf("the heap has grown by %d bytes", grown)
		}
		if len(w.record()) > verdict.LongestRecord/2 {
			t.Errorf("the record has %d bytes", len(w.record()))
		}
	})
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A damaged record is forgotten, and does not stop the watch.
func TestARecordThatIsNoneIsForgotten(t *testing.T) {
	for _, text := range []string{
		"", "{", `{"version":2}`, `{"version":1,"boot":"\u0007"}`, `{"version":1,"more":1}`, `{"version":1,"gpus":[{"index":5000}]}`,
		`{"version":1,"gpus":[{"index":0,"findings":[{"reason":"Rust"}]}]}`,
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, twoH200)
			w.disk.text = []byte(text)
			w.start()
			w.within(5*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
			if now := w.record(); !json.Valid(now) || string(now) == text {
				t.Errorf("of the record %q the agent has made %q", text, now)
			}
		})
	}
}

// The message says what the agent does in addition to reporting, and that it resets nothing where NVSentinel manages the node.
func TestTheMessageSaysWhatIsDoneBesides(t *testing.T) {
	const byTaint = "Taint gpuslice.io/gpu-unhealthy keeps new pods away."
	const resetsNothing = " The agent resets nothing: NVSentinel manages this node (condition GpuMemWatch)."
	synctest.Test(t, func(t *testing.T) {
		for _, test := range []struct {
			taint config.HealthTaint
			reset config.HealthReset
			kind  corev1.NodeConditionType
			want  string
		}{
			{config.HealthTaintNone, "", "", ""},
			{config.HealthTaintNoSchedule, "", "", byTaint},
			{config.HealthTaintPreferNoSchedule, "", "GpuMemWatch", byTaint},
			{config.HealthTaintNoSchedule, config.HealthResetCritical, "GpuMemWatch", byTaint + resetsNothing},
			{config.HealthTaintNone, config.HealthResetCritical, "GpuMemWatch", strings.TrimSpace(resetsNothing)},
			{config.HealthTaintNone, "", "GpuMemWatch", ""},
		} {
			w := newWorld(t, twoH200)
			w.settings = config.Health{Taint: test.taint, Reset: test.reset}
			w.foreign = []corev1.NodeCondition{{Type: test.kind}}
			w.start()
			w.within(5*time.Second, corev1.ConditionFalse)
			critical, known := w.m.Critical()
			if len(critical) > 0 || !known {
				t.Errorf("GPUs that are well: critical %v, known %v", critical, known)
			}
			must(t, w.gpus.SetHealth(0, gpusim.Health{RecoveryAction: 1}))
			c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonResetRequired)
			if critical, _ := w.m.Critical(); !maps.Equal(critical, map[nvml.UUID]bool{nvml.UUID(w.gpus.UUIDs()[0]): true}) {
				t.Errorf("GPU 0 needs a reset, and critical are %v", critical)
			}
			if said := c.Message[strings.LastIndex(c.Message, "Action: "):]; strings.TrimPrefix(said, "Action: ResetGPU.") != strings.TrimRight(" "+test.want, " ") {
				t.Errorf("with %+v the message ends in %q", test, said)
			}
			w.kill()
		}
	})
}

// What to do, and how many GPUs there are more, is in the message however long the names of pods are, and however much is wrong.
func TestTheMessageSaysWhatToDoHoweverLongTheNamesAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H200, count: 8}]")
		for g := range 8 {
			for i := range 5 {
				w.holds(fmt.Sprintf("%s-%d-%d", strings.Repeat("a", 245), g, i), w.gpus.UUIDs()[g])
			}
		}
		w.settings = config.Health{Taint: config.HealthTaintNoSchedule}
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		for _, h := range []gpusim.Health{
			{RecoveryAction: 1},
			{
				RecoveryAction: 1, RemapPending: true, RemapFailed: true, RepairPending: true, Unrepairable: true, SRAMThreshold: true, ECCModeChanging: true,
				Volatile: gpusim.Volatile{Uncorrectable: 3}, Fabric: gpusim.FabricHealth{State: 3, Status: gpusim.Unknown},
			},
		} {
			for g := range 8 {
				must(t, w.gpus.SetHealth(g, h))
			}
			w.passes(65 * time.Second)
			w.pass(true)
			c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonResetRequired)
			for _, want := range []string{"Action: ResetGPU.", "And 7 more.", "Taint gpuslice.io/gpu-unhealthy keeps new pods away."} {
				if !strings.Contains(c.Message, want) {
					t.Errorf("the message is %q, want %q in it", c.Message, want)
				}
			}
		}
	})
}

// What settles by itself is no reason for a reset: either the driver recommends one by then, or nothing is left of it half a minute later.
func TestWhatSettlesHasNoGPUReset(t *testing.T) {
	type errs func(w *world, n int) error
	xid := func(w *world, _ int) error { return w.gpus.Xid(0, 109) }
	memory := func(w *world, n int) error {
		return w.gpus.SetHealth(0, gpusim.Health{Volatile: gpusim.Volatile{Uncorrectable: uint64(n)}})
	}
	for name, row := range map[string]struct {
		errs  errs
		times int
	}{"an Xid": {xid, 1}, "Xids that are 20 s apart": {xid, 2}, "an error of memory": {memory, 1}, "errors of memory that are 20 s apart": {memory, 2}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, twoH200)
				w.settings = config.Health{Reset: config.HealthResetDegraded}
				w.start()
				w.within(5*time.Second, corev1.ConditionFalse)
				for n := range row.times {
					must(t, row.errs(w, n+1))
					w.passes(20 * time.Second)
				}
				for range 600 {
					if gpus, known := w.m.ToReset(); len(gpus) > 0 || !known {
						c := w.condition()
						t.Fatalf("to reset are %v (known: %v), while the condition is %s %s", gpus, known, c.Status, c.Reason)
					}
					w.passes(100 * time.Millisecond)
				}
				w.within(5*time.Second, corev1.ConditionFalse)
				must(t, w.gpus.Xid(0, 62)) // nothing but a reset ends it
				w.passes(35 * time.Second)
				if gpus, _ := w.m.ToReset(); len(gpus) != 1 {
					t.Errorf("to reset are %v, want the GPU whose error stays", gpus)
				}
			})
		})
	}
}

func TestWhatIsDueIsNotCritical(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.SetHealth(0, gpusim.Health{RemapPending: true}))
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonRowRemapPending)
		if critical, known := w.m.Critical(); len(critical) > 0 || !known {
			t.Errorf("critical %v, known %v", critical, known)
		}
	})
}
