package health_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// kernelLog is the log of the node's kernel, and the processes that it names.
type kernelLog struct {
	lines   chan kernellog.Xid
	opened  int
	refuses error
	of      map[int]holders.Owner
}

func (l *kernelLog) Xids(ctx context.Context) (<-chan kernellog.Xid, error) {
	l.opened++
	if l.refuses != nil {
		return nil, l.refuses
	}
	out := make(chan kernellog.Xid)
	go func() {
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case x := <-l.lines:
				if x.Number == 0 { // the log ends
					return
				}
				out <- x
			}
		}
	}()
	return out, nil
}

func (l *kernelLog) Holders(_ context.Context, sought []holders.Sought) ([]holders.Client, error) {
	owner, there := l.of[sought[0].Reported[0]]
	return []holders.Client{{PID: sought[0].Reported[0], Owner: owner, Unlisted: !there}}, nil
}

// newLoggedWorld has a kernel's log, and two pods that share GPU 0: their processes are 100 and 200, and 300 is of no pod.
func newLoggedWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, twoH200)
	w.log = &kernelLog{lines: make(chan kernellog.Xid), of: map[int]holders.Owner{
		100: {PodUID: "one"}, 200: {PodUID: "other"}, 300: {Unit: "miner.service"},
	}}
	w.holds("one", w.gpus.UUIDs()[0])
	w.holds("other", w.gpus.UUIDs()[0])
	w.start()
	w.within(5*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
	w.heard("")
	return w
}

// logs writes a line of the driver's in the kernel's log, about GPU 0.
func (w *world) logs(xid uint64, pid int) {
	w.t.Helper()
	w.log.lines <- kernellog.Xid{PCI: mustHealth(w.t, w)[0].PCI, GI: nvml.WholeGPU, CI: nvml.WholeGPU, Number: xid, PID: pid}
	synctest.Wait()
}

// reports is an event of the driver's about GPU 0.
func (w *world) reports(xid uint64) {
	w.t.Helper()
	must(w.t, w.gpus.Xid(0, xid))
	w.passes(200 * time.Millisecond)
}

func (w *world) counted(xid uint64) float64 {
	w.t.Helper()
	n, _ := w.metric("gpuslice_gpu_xid_events_total", fmt.Sprint(xid))
	return n
}

func TestAnXidThatBothSourcesReportCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoggedWorld(t)
		both := []func(){func() { w.logs(31, 100) }, func() { w.reports(31) }}
		want := 0.0
		for range 3 {
			for _, order := range [][]int{{0, 1}, {1, 0}, {0, 0, 1, 1}, {1, 1, 1, 0, 0, 0}, {0}, {1}} {
				for _, source := range order {
					both[source]()
				}
				want += float64((len(order) + 1) / 2)
				w.passes(20 * time.Second)
				if n := w.counted(31); n != want {
					t.Fatalf("after %v there are %v Xids, want %v", order, n, want)
				}
			}
		}
		// What is critical is so by the driver's word, whichever came first.
		w.logs(62, 0)
		w.reports(62)
		w.within(5*time.Second, corev1.ConditionTrue, config.ReasonXidCritical)
		if n := w.counted(62); n != 1 {
			t.Errorf("Xid 62 was counted %v times", n)
		}
	})
}

// Whoever could write the log could otherwise take GPUs away.
func TestTheKernelsLogAloneTakesNoGPUAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoggedWorld(t)
		w.logs(79, 0)
		for _, pid := range []int{100, 200, 300} {
			w.logs(13, pid)
		}
		w.logs(63, 0)
		w.logs(64, 0)
		w.stays(time.Minute, corev1.ConditionFalse)
		if heard := w.heard("Xid 79 ("); len(heard) != 3 || !strings.Contains(heard[0], "by the kernel's log") {
			t.Errorf("of Xid 79 these hear: %q; want the node and two pods, by the kernel's log", heard)
		}
		if n := w.counted(79); n != 1 {
			t.Errorf("Xid 79 was counted %v times", n)
		}
		// With the GPU's state it is the cause.
		must(t, w.gpus.SetHealth(0, gpusim.Health{Lost: true}))
		if c := w.within(5*time.Second, corev1.ConditionTrue, config.ReasonGPULost); !strings.Contains(c.Message, "Xid 79 (") {
			t.Errorf("the message does not name the cause: %s", c.Message)
		}
	})
}

// Some drivers do not report the Xids by which they hang.
func TestADriverThatHangsAfterALineInTheLogIsAFaultAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoggedWorld(t)
		w.logs(119, 0)
		w.stays(5*time.Second, corev1.ConditionFalse)
		must(t, w.gpus.Fail(gpusim.GetFieldValues, gpusim.Fault{Hang: true}))
		w.within(15*time.Second, corev1.ConditionTrue, config.ReasonDriverUnresponsive)
		must(t, w.gpus.Fail(gpusim.GetFieldValues, gpusim.Fault{}))
		w.within(10*time.Second, corev1.ConditionFalse)
	})
}

func TestTheProcessSaysWhichPodsErrorItWas(t *testing.T) {
	for name, row := range map[string]struct {
		happens func(w *world)
		want    []string // beginnings of Events, in any order
	}{
		"the log first":               {func(w *world) { w.logs(31, 200); w.reports(31) }, []string{"ml/other Warning ApplicationXid: Xid 31 ("}},
		"the driver first":            {func(w *world) { w.reports(31); w.logs(31, 200) }, []string{"ml/other Warning ApplicationXid: Xid 31 ("}},
		"each pod once":               {func(w *world) { w.logs(31, 100); w.logs(31, 200); w.logs(31, 200) }, []string{"ml/one Warning", "ml/other Warning"}},
		"the log says nothing":        {func(w *world) { w.reports(31) }, []string{"ml/one Warning ApplicationXid: Xid 31 (", "ml/other Warning ApplicationXid: Xid 31 ("}},
		"the process has ended":       {func(w *world) { w.logs(31, 400); w.reports(31) }, []string{"ml/one Warning", "ml/other Warning"}},
		"no pod's process":            {func(w *world) { w.logs(31, 300); w.reports(31) }, []string{"node Warning XidError: Xid 31 (memory access that is not allowed (MMU fault)): process 300, in no pod"}},
		"what follows from it":        {func(w *world) { w.logs(31, 200); w.logs(45, 200); w.reports(31); w.reports(45) }, []string{"ml/other Warning"}},
		"a GPU that no one knows":     {func(w *world) { w.log.lines <- kernellog.Xid{PCI: "0000:ff:00.0", Number: 31, PID: 100} }, nil},
		"after one without a process": {func(w *world) { w.reports(31); w.passes(2 * time.Second); w.heard(""); w.reports(31); w.logs(31, 100) }, []string{"ml/one Warning"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newLoggedWorld(t)
				row.happens(w)
				w.passes(5 * time.Second)
				heard := w.heard("")
				if len(heard) != len(row.want) {
					t.Errorf("these hear: %q, want %q", heard, row.want)
				}
				for _, want := range row.want {
					if !slices.ContainsFunc(heard, func(e string) bool { return strings.HasPrefix(e, want) }) {
						t.Errorf("these hear: %q, want %q", heard, row.want)
					}
				}
			})
		})
	}
}

func TestTheKernelsLogIsReadAgainAndOnlyIfItMay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newLoggedWorld(t)
		read := func() float64 { n, _ := w.metric("gpuslice_health_kernel_log_read"); return n }
		if read() != 1 {
			t.Error("the metric does not say that the log is read")
		}
		w.log.lines <- kernellog.Xid{}
		synctest.Wait()
		if read() != 0 {
			t.Error("the metric says that a log is read that has ended")
		}
		w.passes(15 * time.Second)
		w.logs(31, 100)
		if n := w.counted(31); n != 1 || read() != 1 {
			t.Errorf("after the log was opened again %v Xids were counted", n)
		}
		w.kill()
		w.log.refuses = errors.New("operation not permitted")
		w.start()
		w.passes(time.Minute)
		w.reports(31)
		if n := w.counted(31); n != 1 || read() != 0 {
			t.Errorf("without the log %v Xids were counted", n)
		}
		w.kill()
		w.log.opened, w.settings.KernelLog = 0, config.KernelLogNever
		w.start()
		w.passes(time.Minute)
		if w.log.opened != 0 {
			t.Error("the log is read although it is not to be")
		}
	})
}

// A pod on a shared GPU that makes an error before a pass has seen it: the one that was seen there has not made it.
func TestAnErrorOfAPodThatNoPassHasSeenIsNotItsNeighbours(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, twoH200)
		w.log = &kernelLog{lines: make(chan kernellog.Xid), of: map[int]holders.Owner{400: {PodUID: "new"}}}
		w.holds("one", w.gpus.UUIDs()[0])
		w.start()
		w.within(5*time.Second, corev1.ConditionFalse, config.ReasonGPUsHealthy)
		w.heard("")
		for _, order := range [][]func(){
			{func() { w.reports(31) }, func() { w.logs(31, 400) }},
			{func() { w.logs(31, 400) }, func() { w.reports(31) }},
		} {
			for _, source := range order {
				source()
			}
			w.passes(10 * time.Minute)
			if heard := w.heard(string(config.ReasonApplicationXid)); len(heard) > 0 {
				t.Errorf("heard: %q", heard)
			}
		}
		if n := w.counted(31); n != 2 {
			t.Errorf("counted %v Xids, want 2", n)
		}
	})
}
