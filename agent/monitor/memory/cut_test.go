package memory_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/agent/monitor/memory"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// gpus is how many a node of these tests has: too many for the message of a condition to name, if all are full.
const gpus = 16

type noProcesses struct{}

func (noProcesses) Holders(context.Context, []holders.Sought) ([]holders.Client, error) {
	return nil, nil
}

// host is a node whose GPUs two pods share each.
type host struct {
	monitor *memory.Monitor
	clock   *clocktesting.FakePassiveClock
	node    corev1.Node
	used    int // percent of each GPU
	others  int // percent of those of an odd number, if it is not that
	events  int // Events
	former  []string
}

func (h *host) start() {
	h.monitor = memory.New(memory.Options{
		Limits:   config.Default().MemoryPressure,
		Owners:   monitor.OwnerFinder{Processes: noProcesses{}, ComputesForOthers: func(*corev1.Pod) bool { return false }, Log: zap.NewNop()},
		PodEvent: func(types.NamespacedName, types.UID, events.Event) { h.events++ },
		Clock:    h.clock,
		Former:   func() []string { return h.former },
	})
}

// pass is a pass of the agent, and reports whether it writes the condition.
func (h *host) pass(t *testing.T) bool {
	t.Helper()
	h.clock.SetTime(h.clock.Now().Add(time.Minute))
	var all []nvml.GPU
	var with []holders.Pod
	for i := range gpus {
		uuid := nvml.UUID(fmt.Sprintf("GPU-00000000-0000-4000-8000-%012d", i))
		used := h.used
		if h.others > 0 && i%2 == 1 {
			used = h.others
		}
		all = append(all, nvml.GPU{Index: i, UUID: uuid, MemoryMiB: 10000, UsedMiB: 100 * used})
		for _, name := range []string{"a", "b"} {
			name = fmt.Sprintf("%s-%d", name, i)
			with = append(with, holders.Pod{Namespace: "team", Name: name, UID: types.UID(name), Devices: []string{string(uuid)}})
		}
	}
	h.monitor.Observe(t.Context(), &h.node, all, nil, with)
	h.former = h.full()
	written := h.monitor.Conditions(&h.node, true, "", false)
	if len(written) > 0 {
		h.node.Status.Conditions = written
	}
	return len(written) > 0
}

// full are the GPUs that count as full.
func (h *host) full() []string {
	var s api.Status
	h.monitor.Report(&s)
	return s.FullMemory
}

func TestACutMessageIsNoNews(t *testing.T) {
	t.Parallel()
	h := host{clock: clocktesting.NewFakePassiveClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)), used: 99}
	h.start()
	for range 5 {
		h.pass(t)
	}
	if c := h.node.Status.Conditions; len(c) != 1 || c[0].Status != corev1.ConditionTrue {
		t.Fatalf("%d full GPUs are reported as %+v", gpus, c)
	}
	for range 10 {
		if h.pass(t) {
			t.Fatal("the node is written, and nothing has changed")
		}
	}
}

func TestTheNextAgentKnowsWhatACutMessageDoesNotName(t *testing.T) {
	t.Parallel()
	h := host{clock: clocktesting.NewFakePassiveClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)), used: 99}
	h.start()
	for range 5 {
		h.pass(t)
	}
	if h.events == 0 {
		t.Fatal("no pod of a full GPU is reported")
	}
	limits := config.Default().MemoryPressure
	h.used, h.events = (limits.Clear+limits.Threshold)/2, 0
	h.start()
	h.pass(t)
	h.used = 99
	for range 5 {
		h.pass(t)
	}
	if h.events > 0 {
		t.Errorf("%d GPUs that were full all the time are reported again", h.events)
	}
}

// A device that was never full does not become so by a restart of the agent, though it is above the lower limit, and others were full.
func TestTheNextAgentKnowsWhichDevicesWereFull(t *testing.T) {
	t.Parallel()
	limits := config.Default().MemoryPressure
	between := (limits.Clear + limits.Threshold) / 2
	h := host{clock: clocktesting.NewFakePassiveClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)), used: 99, others: between}
	h.start()
	for range 5 {
		h.pass(t)
	}
	before := h.full()
	if len(before) != gpus/2 {
		t.Fatalf("%d of %d GPUs are nearly full, and those count as full: %v", gpus/2, gpus, before)
	}
	h.used = between
	h.start()
	h.pass(t)
	if after := h.full(); !slices.Equal(before, after) {
		t.Errorf("full before the restart: %v\nafter it: %v", before, after)
	}
}
