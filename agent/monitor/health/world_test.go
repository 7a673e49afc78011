package health_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// world is a node of simulated GPUs with a Monitor, in a bubble of testing/synctest.
type world struct {
	t       *testing.T
	gpus    *gpusim.Node
	m       *health.Monitor
	disk    disk
	onBus   []nvml.BusGPU // none is that the bus cannot be read
	holders []holders.Pod
	pods    []corev1.Pod
	log     *kernelLog             // none is that it cannot be read
	foreign []corev1.NodeCondition // of other tools
	stop    context.CancelFunc
	ended   chan struct{}

	settings config.Health

	mu     sync.Mutex
	node   corev1.Node
	writes int
	events []string
	broken error  // of writes
	seen   func() // what happens between a write and its answer
}

// disk is where the record is.
type disk struct {
	mu     sync.Mutex
	text   []byte
	writes int
	slow   time.Duration // how long a reading takes
}

// Read implements Store.
func (d *disk) Read(context.Context) ([]byte, error) {
	<-time.After(d.slow)
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.text, nil
}

// Write implements Store.
func (d *disk) Write(_ context.Context, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.text = slices.Clone(data)
	d.writes++
	return nil
}

func newWorld(t *testing.T, spec string) *world {
	t.Helper()
	s, err := gpusim.ParseSpec([]byte(spec))
	must(t, err)
	n, err := gpusim.Create(t.TempDir(), s)
	must(t, err)
	w := &world{t: t, gpus: n, node: corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}}}
	t.Cleanup(func() {
		if w.stop != nil {
			w.kill()
		}
		must(t, n.Close())
	})
	return w
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// start is the next process of the agent.
func (w *world) start() {
	w.t.Helper()
	o := health.Options{
		Sources: health.Sources{Driver: w.gpus.Health(), Store: &w.disk}, Settings: w.settings, Clock: clock.RealClock{}, Log: zaptest.NewLogger(w.t), Write: w.write,
		Boot:      func(context.Context) (string, error) { return w.gpus.BootID(), nil },
		NodeEvent: func(e events.Event) { w.event("node", e.Type, e.Reason, e.Message) },
		PodEvent: func(pod types.NamespacedName, _ types.UID, e events.Event) {
			w.event(pod.String(), e.Type, e.Reason, e.Message)
		},
	}
	if w.onBus != nil {
		o.Bus = w
	}
	if w.log != nil {
		o.KernelLog, o.Processes = w.log, w.log
	}
	w.m = health.New(o)
	ctx, stop := context.WithCancel(w.t.Context())
	w.stop, w.ended = stop, make(chan struct{})
	m := w.m
	go func() {
		defer close(w.ended)
		m.Watch(ctx, func() {})
	}()
	w.pass(false)
}

// kill ends the process.
func (w *world) kill() {
	w.stop()
	<-w.ended
	w.stop = nil
}

// pass is one of the agent's loop. It sees the GPUs as they are cut, unless the driver hangs.
func (w *world) pass(beat bool) {
	w.t.Helper()
	w.mu.Lock()
	node := w.node.DeepCopy()
	w.mu.Unlock()
	node.Status.Conditions = append(node.Status.Conditions, w.foreign...)
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
	defer cancel()
	gpus, err := w.gpus.Driver().Snapshot(ctx)
	if err == nil {
		w.m.Observe(w.t.Context(), node, gpus, w.pods, w.holders)
	}
	for _, c := range w.m.Conditions(node, err == nil, "", beat) {
		must(w.t, w.write(w.t.Context(), []corev1.NodeCondition{c}))
	}
}

// GPUs implements nvml.Bus.
func (w *world) GPUs(context.Context) ([]nvml.BusGPU, error) { return w.onBus, nil }

func (w *world) write(_ context.Context, conditions []corev1.NodeCondition) error {
	if w.seen != nil {
		defer w.seen()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken != nil {
		return w.broken
	}
	w.writes++
	w.node.Status.Conditions = conditions
	if len(conditions) != 1 || utf8.RuneCountInString(conditions[0].Message) > 1024 {
		w.t.Errorf("written: %v", conditions)
	}
	return nil
}

func (w *world) event(on, kind string, reason config.Reason, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, fmt.Sprintf("%s %s %s: %s", on, kind, reason, text))
}

// heard are the Events with the words, since the last call.
func (w *world) heard(words string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []string
	for _, e := range w.events {
		if strings.Contains(e, words) {
			out = append(out, e)
		}
	}
	w.events = nil
	return out
}

func (w *world) condition() corev1.NodeCondition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := report.Find(&w.node, config.ConditionGPUUnhealthy); c != nil {
		return *c
	}
	return corev1.NodeCondition{}
}

// within waits until the node says this, at most for d.
func (w *world) within(d time.Duration, status corev1.ConditionStatus, reasons ...config.Reason) corev1.NodeCondition {
	w.t.Helper()
	for end := time.Now().Add(d); ; <-time.After(100 * time.Millisecond) {
		c := w.condition()
		if c.Status == status && (len(reasons) == 0 || slices.Contains(reasons, config.Reason(c.Reason))) {
			return c
		}
		if time.Now().After(end) {
			w.t.Fatalf("after %s the node says %s %s: %s; want %s %v", d, c.Status, c.Reason, c.Message, status, reasons)
		}
	}
}

// stays has the node say the same for so long.
func (w *world) stays(d time.Duration, status corev1.ConditionStatus) {
	w.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); <-time.After(100 * time.Millisecond) {
		if c := w.condition(); c.Status != status {
			w.t.Fatalf("the node says %s %s: %s, want %s all the time", c.Status, c.Reason, c.Message, status)
		}
	}
}

func (w *world) cut(gpu int, places ...nvml.Placed) {
	w.t.Helper()
	d := w.gpus.Driver()
	must(w.t, d.SetMode(w.t.Context(), nvml.UUID(w.gpus.UUIDs()[gpu]), true))
	for _, p := range places {
		must(w.t, d.Create(w.t.Context(), nvml.UUID(w.gpus.UUIDs()[gpu]), p))
	}
}

// holds gives a pod a device.
func (w *world) holds(pod, device string) {
	w.pods = append(w.pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: pod, UID: types.UID(pod)}})
	w.holders = append(w.holders, holders.Pod{Namespace: "ml", Name: pod, UID: types.UID(pod), Devices: []string{device}, DevicesKnown: true})
}

func (w *world) status() api.Status {
	gpus, err := w.gpus.Driver().Snapshot(w.t.Context())
	must(w.t, err)
	var s api.Status
	for _, g := range gpus {
		s.GPUs = append(s.GPUs, api.StatusGPU{Index: g.Index, UUID: g.UUID})
	}
	w.m.Report(&s)
	return s
}

// metric is the value of a series, or the sum of those whose labels have these values.
func (w *world) metric(name string, labels ...string) (sum float64, found bool) {
	w.t.Helper()
	registry := prometheus.NewRegistry()
	must(w.t, registry.Register(w.m))
	families, err := registry.Gather()
	must(w.t, err)
	problems, err := testutil.CollectAndLint(w.m)
	must(w.t, err)
	for _, p := range problems {
		w.t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			var values []string
			for _, l := range m.Label {
				values = append(values, l.GetValue())
			}
			if f.GetName() == name && !slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(values, l) }) {
				sum += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				found = true
			}
		}
	}
	return sum, found
}

var errServer = errors.New("the API server does not answer")

// passes lets the bubble's time pass.
func (w *world) passes(d time.Duration) { <-time.After(d) }

// written counts the writes of the node and of the record.
func (w *world) written() (node, record int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.disk.mu.Lock()
	defer w.disk.mu.Unlock()
	return w.writes, w.disk.writes
}

// record is what the disk has.
func (w *world) record() []byte {
	w.disk.mu.Lock()
	defer w.disk.mu.Unlock()
	return w.disk.text
}
