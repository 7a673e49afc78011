package verdict_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

var began = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// well is the reading of a GPU of which the driver has nothing to say.
func well(index int) nvml.Health {
	return nvml.Health{
		Index: index, UUID: nvml.UUID(fmt.Sprintf("GPU-%d", index)), PCI: fmt.Sprintf("0000:%02x:00.0", index+1), Action: nvml.Answered(nvml.RecoverNothing),
	}
}

func checkVerdict(t *testing.T, n *verdict.Node, now time.Time, status corev1.ConditionStatus, reason config.Reason) {
	t.Helper()
	if v, known := n.Judge(now); !known || v.Status != status || v.Reason != reason {
		t.Errorf("after %s the verdict is %s %s (known: %t), want %s %s", now.Sub(began), v.Status, v.Reason, known, status, reason)
	}
}

func TestNothingIsKnownBeforeTheFirstReading(t *testing.T) {
	n := verdict.New(config.Health{})
	if _, known := n.Judge(began); known {
		t.Error("there is a verdict before anything was observed")
	}
	n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
	checkVerdict(t, n, began, corev1.ConditionFalse, config.ReasonGPUsHealthy)
}

func TestTheWorstFindingOfTheWorstGPUIsTheReason(t *testing.T) {
	n := verdict.New(config.Health{})
	pending, lost := well(0), well(2)
	pending.Rows.Pending, pending.RepairPending, lost.Lost = nvml.Answered(true), nvml.Answered(true), true
	n.ObserveGPUs(began, []nvml.Health{pending, well(1), lost}, true)
	checkVerdict(t, n, began, corev1.ConditionTrue, config.ReasonGPULost)
	v, _ := n.Judge(began)
	if len(v.Unhealthy) != 2 || v.Unhealthy[0].UUID() != lost.UUID || v.Unhealthy[1].Findings()[0].Reason != config.ReasonRowRemapPending {
		t.Errorf("unhealthy are %v, want GPU 2 and then GPU 0 with its row before its repair", v.Unhealthy)
	}
	if !verdict.Worse(config.ReasonGPULost, config.ReasonRowRemapPending) || verdict.Worse(config.ReasonRowRemapPending, config.ReasonGPULost) {
		t.Error("a lost GPU is not worse than a row to be replaced")
	}
}

func TestAFindingIsOverAfterTwoReadingsWithoutIt(t *testing.T) {
	n := verdict.New(config.Health{})
	sick := well(0)
	sick.Rows.Pending = nvml.Answered(true)
	n.ObserveGPUs(began, []nvml.Health{sick}, true)
	mended := well(0)
	mended.Rows.Pending = nvml.Answered(false)
	now := began
	for _, status := range []corev1.ConditionStatus{corev1.ConditionTrue, corev1.ConditionFalse} {
		now = now.Add(verdict.Interval)
		n.ObserveGPUs(now, []nvml.Health{mended}, true)
		if v, _ := n.Judge(now); v.Status != status {
			t.Errorf("after %s the verdict is %s, want %s", now.Sub(began), v.Status, status)
		}
	}
}

// Of a GPU that comes and goes, what it was before does not hide what it is now: one that has fallen off the bus, and that the driver does not find
// again, is missing.
func TestWhatFlapsGivesWayToWhatIsAsBad(t *testing.T) {
	n := verdict.New(config.Health{})
	lost, other := well(0), well(1)
	lost.Lost = true
	now := began
	observe := func(gpus ...nvml.Health) {
		n.ObserveGPUs(now, gpus, true)
		now = now.Add(verdict.Interval)
	}
	for range 2 {
		observe(lost, other)
		for range 3 {
			observe(well(0), other)
		}
	}
	observe(lost, other)
	checkVerdict(t, n, now, corev1.ConditionTrue, config.ReasonGPULost)
	for range 3 {
		observe(other)
	}
	checkVerdict(t, n, now, corev1.ConditionTrue, config.ReasonGPUMissing)
	for range 3 {
		observe(well(0), other)
	}
	checkVerdict(t, n, now, corev1.ConditionTrue, config.ReasonGPUMissing) // it flaps
	pending := well(0)
	pending.Rows.Pending = nvml.Answered(true)
	for range 3 {
		observe(pending, other)
	}
	checkVerdict(t, n, now, corev1.ConditionTrue, config.ReasonGPUMissing) // what is less bad hides nothing
}

func TestADriverThatIsSilent(t *testing.T) {
	for _, row := range []struct {
		err    error
		lasted time.Duration
		status corev1.ConditionStatus
		reason config.Reason
	}{
		{nvml.ErrUnresponsive, 5 * time.Second, corev1.ConditionUnknown, config.ReasonDriverUnresponsive},
		{nvml.ErrUnresponsive, 2 * time.Minute, corev1.ConditionTrue, config.ReasonDriverUnresponsive},
		{nvml.ErrNoDriver, 2 * time.Minute, corev1.ConditionUnknown, config.ReasonDriverNotLoaded},
		{errors.New("odd"), 2 * time.Minute, corev1.ConditionUnknown, config.ReasonHealthUnknown},
	} {
		n := verdict.New(config.Health{})
		n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
		n.ObserveError(began, row.err)
		n.ObserveError(began.Add(row.lasted), row.err)
		checkVerdict(t, n, began.Add(row.lasted), row.status, row.reason)
	}
}

func TestWhatTheAgentChangesIsNoFinding(t *testing.T) {
	n := verdict.New(config.Health{})
	n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
	g := n.GPU("GPU-0")
	lost := well(0)
	lost.Lost = true
	g.BeginChange()
	n.ObserveGPUs(began.Add(time.Hour), []nvml.Health{lost}, true)
	checkVerdict(t, n, began.Add(time.Hour), corev1.ConditionFalse, config.ReasonGPUsHealthy)
	g.EndChange(began.Add(time.Hour))
	n.ObserveGPUs(began.Add(time.Hour+20*time.Second), []nvml.Health{lost}, true)
	checkVerdict(t, n, began.Add(time.Hour+20*time.Second), corev1.ConditionFalse, config.ReasonGPUsHealthy)
	n.ObserveGPUs(began.Add(time.Hour+time.Minute), []nvml.Health{lost}, true)
	checkVerdict(t, n, began.Add(time.Hour+time.Minute), corev1.ConditionTrue, config.ReasonGPULost)
}

// What is remembered of one GPU is bounded, whatever the driver reports; what is unsettled is not forgotten for it.
func TestXidsThatAreRememberedAreBounded(t *testing.T) {
	n := verdict.New(config.Health{})
	n.ObserveGPUs(began, []nvml.Health{well(0)}, true)
	n.ObserveEvent(began, nvml.Event{Kind: nvml.EventXid, GPU: "GPU-0", Xid: 79, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
	for i := range 10000 {
		at := began.Add(time.Duration(i) * time.Millisecond)
		n.ObserveEvent(at, nvml.Event{Kind: nvml.EventXid, GPU: "GPU-0", Xid: uint64(200 + i), GI: i % 7, CI: i % 3})
		n.ObserveEvent(at, nvml.Event{Kind: nvml.EventXid, GPU: nvml.UUID(fmt.Sprintf("GPU-%d", i)), Xid: 62, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
		n.GPU("GPU-0").NoteProgramError(at, types.UID(fmt.Sprint(i)))
	}
	xids := n.Xids(n.GPU("GPU-0"))
	if len(xids) > 64 || len(n.GPUs()) > 64 {
		t.Errorf("%d Xids of one GPU and %d GPUs are remembered", len(xids), len(n.GPUs()))
	}
	if first := xids[0].Xid.Number; first != 62 && first != 79 {
		t.Errorf("the first Xid is %d, want an unsettled one", first)
	}
	checkVerdict(t, n, began.Add(10*time.Second), corev1.ConditionTrue, config.ReasonXidCritical)
}

// A next process goes on from the record in the same boot. From another boot it takes over only what no reboot mends.
func TestARecordIsRecalled(t *testing.T) {
	n := verdict.New(config.Health{})
	sick := well(0)
	sick.SRAMThreshold = nvml.Answered(true)
	n.ObserveGPUs(began, []nvml.Health{sick, well(1)}, true)
	n.ObserveEvent(began, nvml.Event{Kind: nvml.EventXid, GPU: "GPU-1", Xid: 62, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
	v, _ := n.Judge(began)
	data, err := json.Marshal(n.Record("boot-1", v.Key()))
	if err != nil {
		t.Fatal(err)
	}
	for boot, want := range map[string][]config.Reason{
		"boot-1": {config.ReasonXidCritical, config.ReasonSRAMThresholdExceeded},
		"boot-2": {config.ReasonSRAMThresholdExceeded},
		"":       {config.ReasonSRAMThresholdExceeded},
	} {
		r, err := verdict.ParseRecord(data)
		if err != nil {
			t.Fatal(err)
		}
		next := verdict.New(config.Health{})
		next.Recall(r, boot)
		next.ObserveGPUs(began.Add(time.Second), []nvml.Health{well(0), well(1)}, true)
		v, known := next.Judge(began.Add(time.Second))
		var got []config.Reason
		for _, g := range v.Unhealthy {
			got = append(got, g.Findings()[0].Reason)
		}
		if !known || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("in boot %q the next process finds %v, want %v", boot, got, want)
		}
		if boot == "boot-1" && next.Record("boot-1", v.Key()).Key() != r.Key() {
			t.Error("the next process writes another record of the same state")
		}
	}
}

// The host's clock was years ahead, and is set: what was noted by it settles, ends and can be acknowledged all the same, in the same process and in
// the next, which has it from the disk.
func TestWhatAClockThatWasAheadHasNotedIsOver(t *testing.T) {
	ahead := began.AddDate(10, 0, 0)
	for _, next := range []bool{false, true} {
		n := verdict.New(config.Health{})
		n.ObserveGPUs(ahead, []nvml.Health{well(0)}, true)
		for _, xid := range []uint64{62, 109} { // one that a person has to acknowledge, and one that settles
			n.ObserveEvent(ahead, nvml.Event{Kind: nvml.EventXid, GPU: "GPU-0", Xid: xid, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
		}
		n.ObserveEvent(ahead, nvml.Event{Kind: nvml.EventECC, GPU: "GPU-0"})
		if v, _ := n.Judge(ahead); next {
			data, err := json.Marshal(n.Record("boot-1", v.Key()))
			if err != nil {
				t.Fatal(err)
			}
			r, err := verdict.ParseRecord(data)
			if err != nil {
				t.Fatal(err)
			}
			n = verdict.New(config.Health{})
			n.Recall(r, "boot-1")
		}
		n.LimitTimes(began)
		now := began
		observe := func() {
			for range 20 {
				now = now.Add(verdict.Interval)
				n.ObserveGPUs(now, []nvml.Health{well(0)}, true)
			}
		}
		observe()
		checkVerdict(t, n, now, corev1.ConditionTrue, config.ReasonXidCritical)
		n.Acknowledge(now)
		observe()
		checkVerdict(t, n, now, corev1.ConditionFalse, config.ReasonGPUsHealthy)
		if _, is := n.GPUs()[0].RecoveredFrom(now); !is {
			t.Error("the GPU has not recovered")
		}
	}
}

// Who restarts a device plugin for it needs to know when something was last wrong, after a restart of the agent too.
func TestAGPURecoversWhenNothingWasWrongForAWhile(t *testing.T) {
	n := verdict.New(config.Health{})
	now := began
	observe := func(h nvml.Health) {
		now = now.Add(verdict.Interval)
		n.ObserveGPUs(now, []nvml.Health{h}, false)
	}
	recovered := func() (time.Time, bool) { return n.GPUs()[0].RecoveredFrom(now) }
	observe(well(0))
	if at, is := recovered(); !is || !at.IsZero() {
		t.Errorf("a GPU that was always well is so: %t, from trouble at %s; want true, and no time", is, at)
	}
	lost := well(0)
	lost.Lost = true
	observe(lost)
	trouble := now
	if at, is := recovered(); is {
		t.Errorf("a GPU that is lost has recovered at %s", at)
	}
	for range 10 {
		observe(well(0))
	}
	at, is := recovered()
	if !is || at.Before(trouble) || !at.Before(now) {
		t.Errorf("the GPU has recovered: %t, from trouble at %s; want true, and between %s and %s", is, at, trouble, now)
	}
	n.ObserveEvent(now, nvml.Event{Kind: nvml.EventXid, GPU: well(0).UUID, Xid: 31, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
	if at, is := recovered(); is {
		t.Errorf("a GPU that has just had an error has recovered at %s", at)
	}
	trouble = now
	data, err := json.Marshal(n.Record("boot", ""))
	if err != nil {
		t.Fatal(err)
	}
	r, err := verdict.ParseRecord(data)
	if err != nil {
		t.Fatal(err)
	}
	n = verdict.New(config.Health{})
	n.Recall(r, "boot")
	for range 5 {
		observe(well(0))
	}
	if at, is := recovered(); !is || !at.Equal(trouble) {
		t.Errorf("for the next agent the GPU has recovered: %t, from trouble at %s; want true, %s", is, at, trouble)
	}
}
