// Package metrics holds the metrics of the agent's loop; config/glossary has the text of each. Monitors have their own metrics.
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
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
)

// Bounds of scrapes: an answer takes milliseconds, and one Prometheus asks, or two.
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

// Metrics holds the metrics. Prometheus scrapes it while the loop works.
type Metrics struct {
	registry                        *prometheus.Registry
	steps                           *prometheus.CounterVec
	evictions, recoveries, requests *prometheus.CounterVec
	clock                           clock.PassiveClock

	mu       sync.Mutex
	report   Report
	pass     time.Time                   // when a pass last ended
	since    time.Time                   // when the present phase began, or count last added its time
	phases   map[api.Phase]time.Duration // times of the phases, without the time after since
	parts    []prometheus.Collector
	window   Window
	observed *observation
	fenced   *bool                           // nil before the first observation
	passed   time.Time                       // when a pass last ended in which nothing failed
	blocked  map[config.Reason]time.Duration // as phases
	blocks   map[config.Reason]int           // how often
}

// Report is what the last pass has reported.
type Report struct {
	Phase     api.Phase
	Ready     bool // condition GPUPartitionReady is True
	Reason    config.Reason
	Converged bool
	Blocked   bool // the agent waits for a user or another tool, or for ever
	Failed    bool // something that the agent tried has failed
}

// Window is what the last pass has found of the node's windows.
type Window struct {
	Known   bool
	Open    bool
	Next    time.Time // when the change that waits for a window begins, or the next window opens; zero if none comes
	Overrun time.Duration
}

var _ prometheus.Collector = (*Metrics)(nil)

// The metrics that Collect makes of the last pass.
var (
	descReady      = Desc(config.MetricPartitionReady)
	descConverged  = Desc(config.MetricConverged)
	descPhase      = Desc(config.MetricPhaseSeconds)
	descPass       = Desc(config.MetricLastPass)
	descPassed     = Desc(config.MetricLastSuccessfulPass)
	descPhaseInfo  = Desc(config.MetricPhaseInfo)
	descBlocked    = Desc(config.MetricBlockedSeconds)
	descBlocks     = Desc(config.MetricBlocks)
	descWindow     = Desc(config.MetricWindowOpen)
	descNextWindow = Desc(config.MetricNextWindow)
	descOverrun    = Desc(config.MetricWindowOverrun)
)

// New makes an empty Metrics, with the metrics of the process itself.
func New(c clock.PassiveClock) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(), clock: c, phases: map[api.Phase]time.Duration{}, blocked: map[config.Reason]time.Duration{},
		blocks: map[config.Reason]int{}, steps: Counter(config.MetricSteps), evictions: Counter(config.MetricEvictions),
		recoveries: Counter(config.MetricRecoveries), requests: Counter(config.MetricAPIRequests),
	}
	m.registry.MustRegister(m, m.steps, m.evictions, m.recoveries, m.requests, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler answers Prometheus. It makes few answers at a time, and lets other requests wait: if it refused them, a client that never stops asking
// would keep Prometheus out. It lets the next answer begin before it sends this one, since a slow client may take long to read it.
func (m *Metrics) Handler() http.Handler {
	// A collector that fails does not take the metrics of the others with it.
	answer := promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	turns := make(chan struct{}, mostScrapes)
	inTurn := func(w http.ResponseWriter, r *http.Request) {
		select {
		case turns <- struct{}{}:
			defer func() { <-turns }()
			answer.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}
	return http.TimeoutHandler(http.HandlerFunc(inTurn), scrapeTime, "too many concurrent scrapes")
}

// Register adds metrics of another package. It panics if a name is registered twice, which is a mistake of the program.
func (m *Metrics) Register(c prometheus.Collector) { m.registry.MustRegister(c) }

// Gatherer gathers all metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descReady, descConverged, descPhase, descPass, descPassed, descWindow, descNextWindow, descOverrun, descPhaseInfo, descBlocked, descBlocks} {
		out <- d
	}
	for _, d := range observationDescs {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(out chan<- prometheus.Metric) {
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
	m.observed.collect(gauge)
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
func (m *Metrics) count() {
	now := m.clock.Now()
	m.phases[m.report.Phase] += now.Sub(m.since)
	if m.report.Blocked {
		m.blocked[m.report.Reason] += now.Sub(m.since)
	}
	m.since = now
}

// Stepped counts the result of the first step of a pass.
func (m *Metrics) Stepped(steps []plan.Step, err error) {
	if len(steps) == 0 {
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

// Reported notes what a pass has reported.
func (m *Metrics) Reported(r Report) {
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
func (m *Metrics) Passed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pass = m.clock.Now()
}

// Windowed notes the state of the node's windows.
func (m *Metrics) Windowed(seen Window) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.window = seen
}

// TakeOver registers the metrics of these parts, in place of those of this process's former agent.
func (m *Metrics) TakeOver(parts []prometheus.Collector) {
	for _, part := range m.parts {
		m.registry.Unregister(part)
	}
	for _, part := range parts {
		m.registry.MustRegister(part)
	}
	m.parts = parts
}

// Evicted counts pods that the agent has evicted or deleted.
func (m *Metrics) Evicted(verdicts []drain.Verdict) {
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
func (m *Metrics) Resumed() { m.recovered("interrupted") }

// Adopted counts marks of an agent that this one has found without a journal, or next to a journal from another host.
func (m *Metrics) Adopted(forged bool) {
	if forged {
		m.recovered("strange_journal")
		return
	}
	m.recovered("leftovers")
}

func (m *Metrics) recovered(cause string) {
	m.recoveries.WithLabelValues(cause).Inc()
}
