// Package metrics is what the agent tells Prometheus of its loop. Parts of the agent have metrics of their own beside these.
package metrics

import (
	"errors"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/described"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

// Bounds of those who ask: an answer takes milliseconds, and there is one Prometheus, or two.
const (
	mostScrapes = 2
	scrapeTime  = 10 * time.Second
)

// Results of steps, as the metric says them.
const (
	resultDone    = "done"
	resultWaiting = "waiting"
	resultFailed  = "failed"
)

// Set is what the agent tells Prometheus. It is read while the loop works. A nil one is told everything, and keeps
// nothing.
type Set struct {
	registry                        *prometheus.Registry
	steps                           *prometheus.CounterVec
	evictions, recoveries, requests *prometheus.CounterVec
	clock                           clock.PassiveClock

	mu      sync.Mutex
	report  Report
	pass    time.Time                   // when one last ended
	since   time.Time                   // when its phase began, or its time was last counted
	phases  map[api.Phase]time.Duration // without that since then
	parts   []prometheus.Collector
	window  Window
	look    *look
	fenced  *bool                           // nil before the first look
	passed  time.Time                       // when one last ended in which nothing failed
	blocked map[config.Reason]time.Duration // as phases
	blocks  map[config.Reason]int           // how often
}

// Report is what the last pass has told of the node.
type Report struct {
	Phase     api.Phase
	Ready     bool // condition GPUPartitionReady is True
	Reason    config.Reason
	Converged bool
	Blocked   bool // it waits for others than the agent and the hardware, or for good
	Failed    bool // something that the agent tried has failed
}

// Window is what the last pass has found of the node's windows.
type Window struct {
	Known   bool
	Open    bool
	Next    time.Time // when the change that waits for a window begins, or the next window opens; zero if none comes
	Overrun time.Duration
}

var _ prometheus.Collector = (*Set)(nil)

// The metrics that are made of the last pass when they are asked for.
var (
	descReady      = described.Desc(config.MetricPartitionReady)
	descConverged  = described.Desc(config.MetricConverged)
	descPhase      = described.Desc(config.MetricPhaseSeconds)
	descPass       = described.Desc(config.MetricLastPass)
	descPassed     = described.Desc(config.MetricLastSuccessfulPass)
	descPhaseInfo  = described.Desc(config.MetricPhaseInfo)
	descBlocked    = described.Desc(config.MetricBlockedSeconds)
	descBlocks     = described.Desc(config.MetricBlocks)
	descWindow     = described.Desc(config.MetricWindowOpen)
	descNextWindow = described.Desc(config.MetricNextWindow)
	descOverrun    = described.Desc(config.MetricWindowOverrun)
)

// New makes an empty set, with those of the process itself.
func New(c clock.PassiveClock) *Set {
	m := &Set{
		registry: prometheus.NewRegistry(), clock: c, phases: map[api.Phase]time.Duration{}, blocked: map[config.Reason]time.Duration{},
		blocks: map[config.Reason]int{}, steps: described.Counter(config.MetricSteps), evictions: described.Counter(config.MetricEvictions),
		recoveries: described.Counter(config.MetricRecoveries), requests: described.Counter(config.MetricAPIRequests),
	}
	m.registry.MustRegister(m, m.steps, m.evictions, m.recoveries, m.requests, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler answers Prometheus. Few answers are made at a time, and who comes meanwhile waits for a turn: whoever asks without end would
// else have everybody refused. A turn ends before the answer is sent, for which a slow reader may take long.
func (m *Set) Handler() http.Handler {
	answer := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
	turns := make(chan struct{}, mostScrapes)
	inTurn := func(w http.ResponseWriter, r *http.Request) {
		select {
		case turns <- struct{}{}:
			defer func() { <-turns }()
			answer.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}
	return http.TimeoutHandler(http.HandlerFunc(inTurn), scrapeTime, "there are too many who ask")
}

// Register adds metrics of another package. Those of the same name twice are a mistake of the program, and panic.
func (m *Set) Register(c prometheus.Collector) { m.registry.MustRegister(c) }

// Gatherer has all metrics.
func (m *Set) Gatherer() prometheus.Gatherer { return m.registry }

// Describe implements prometheus.Collector.
func (m *Set) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descReady, descConverged, descPhase, descPass, descPassed, descWindow, descNextWindow, descOverrun, descPhaseInfo, descBlocked, descBlocks} {
		out <- d
	}
	for _, d := range lookDescs {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Set) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	if m.report.Phase != "" {
		gauge(descReady, bit(m.report.Ready), string(m.report.Reason))
		gauge(descConverged, bit(m.report.Converged))
		gauge(descPhaseInfo, 1, string(m.report.Phase))
		m.count()
	}
	if !m.pass.IsZero() {
		gauge(descPass, float64(m.pass.UnixMilli())/1000)
	}
	if !m.passed.IsZero() {
		gauge(descPassed, float64(m.passed.UnixMilli())/1000)
	}
	if m.fenced != nil {
		gauge(descFenced, bit(*m.fenced))
	}
	m.look.collect(gauge)
	for reason, spent := range m.blocked {
		out <- prometheus.MustNewConstMetric(descBlocked, prometheus.CounterValue, spent.Seconds(), string(reason))
	}
	for reason, n := range m.blocks {
		out <- prometheus.MustNewConstMetric(descBlocks, prometheus.CounterValue, float64(n), string(reason))
	}
	for phase, spent := range m.phases {
		out <- prometheus.MustNewConstMetric(descPhase, prometheus.CounterValue, spent.Seconds(), string(phase))
	}
	if m.window.Known {
		gauge(descWindow, bit(m.window.Open))
		gauge(descOverrun, m.window.Overrun.Seconds())
	}
	if !m.window.Next.IsZero() {
		gauge(descNextWindow, float64(m.window.Next.Unix()))
	}
}

func bit(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// count adds the time of the present phase until now.
func (m *Set) count() {
	now := m.clock.Now()
	m.phases[m.report.Phase] += now.Sub(m.since)
	if m.report.Blocked {
		m.blocked[m.report.Reason] += now.Sub(m.since)
	}
	m.since = now
}

// Stepped notes what came of the first step of a pass.
func (m *Set) Stepped(steps []plan.Step, err error) {
	if m == nil || len(steps) == 0 {
		return
	}
	result := resultFailed
	switch {
	case err == nil:
		result = resultDone
	case errors.As(err, new(*outcome.Waiting)):
		result = resultWaiting
	}
	m.steps.WithLabelValues(string(steps[0].Kind), result).Inc()
}

// Reported notes what a pass has told.
func (m *Set) Reported(r Report) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.report.Phase == "" {
		m.since = m.clock.Now()
	} else {
		m.count()
	}
	if r.Blocked && (!m.report.Blocked || m.report.Reason != r.Reason) {
		m.blocks[r.Reason]++
	}
	m.report = r
	if !r.Failed {
		m.passed = m.clock.Now()
	}
}

// Passed notes that a pass has ended.
func (m *Set) Passed() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pass = m.clock.Now()
}

// Windowed notes how the node's windows are.
func (m *Set) Windowed(seen Window) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.window = seen
}

// TakeOver has the metrics of these parts told, in place of those of an agent before.
func (m *Set) TakeOver(parts []prometheus.Collector) {
	if m == nil {
		return
	}
	for _, part := range m.parts {
		m.registry.Unregister(part)
	}
	for _, part := range parts {
		m.registry.MustRegister(part)
	}
	m.parts = parts
}

// Evicted counts pods that were sent away.
func (m *Set) Evicted(verdicts []drain.Verdict) {
	if m == nil {
		return
	}
	for _, v := range verdicts {
		switch {
		case v.Overdue:
			m.evictions.WithLabelValues("overdue").Inc()
		case v.State == drain.Requested:
			m.evictions.WithLabelValues("evicted").Inc()
		case v.State == drain.Deleted:
			m.evictions.WithLabelValues("deleted").Inc()
		}
	}
}

// Resumed counts a change that the agent before this process had begun.
func (m *Set) Resumed() { m.recovered("interrupted") }

// Adopted counts marks of ours that were found without a journal, or beside one that this host's agent did not write.
func (m *Set) Adopted(forged bool) {
	if forged {
		m.recovered("strange_journal")
		return
	}
	m.recovered("leftovers")
}

func (m *Set) recovered(cause string) {
	if m != nil {
		m.recoveries.WithLabelValues(cause).Inc()
	}
}
