package health

import (
	"errors"
	"maps"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// counts are the counters since the process began.
type counts struct {
	xids   map[xidCount]float64
	errors map[string]float64 // of readings, by code
	took   time.Duration      // of the last reading
	last   time.Time          // reading that succeeded

	events []time.Time // of Events that were sent lately
}

type xidCount struct {
	gpu   nvml.UUID
	xid   string
	class verdict.Class
}

func newCounts() counts { return counts{xids: map[xidCount]float64{}, errors: map[string]float64{}} }

// addXid counts an Xid. All Xids that the table lacks share one counter, so that there are no more series than rows.
func (c *counts) addXid(g *verdict.GPU, x verdict.Xid) {
	number := strconv.FormatUint(x.Number, 10)
	if !verdict.InTable(x.Number) {
		number = "other"
	}
	c.xids[xidCount{g.UUID(), number, x.Class}]++
}

// addRead counts a reading of all GPUs.
func (c *counts) addRead(now time.Time, took time.Duration, err error) {
	c.took = took
	if err == nil {
		c.last = now
		return
	}
	code := "other"
	var e *nvml.Error
	switch {
	case errors.Is(err, nvml.ErrUnresponsive):
		code = "unresponsive"
	case errors.Is(err, nvml.ErrNoDriver):
		code = "no-driver"
	case errors.As(err, &e) && len(c.errors) < 32 && e.Code != "" && len(e.Code) < 64:
		code = e.Code
	}
	c.errors[code]++
}

// addEvent counts an Event, and reports whether to send it: not if there were too many lately.
func (c *counts) addEvent(now time.Time) bool {
	for len(c.events) > 0 && now.Sub(c.events[0]) >= eventPause {
		c.events = c.events[1:]
	}
	if len(c.events) >= mostEvents {
		return false
	}
	c.events = append(c.events, now)
	return true
}

var (
	descHealthy = metrics.Desc(config.MetricGPUHealthy)
	descProblem = metrics.Desc(config.MetricGPUProblem)
	descAction  = metrics.Desc(config.MetricGPURecoveryAction)
	descXids    = metrics.Desc(config.MetricGPUXidEvents)
	descECC     = metrics.Desc(config.MetricGPUECCErrors)
	descRows    = metrics.Desc(config.MetricGPURemappedRows)
	descPending = metrics.Desc(config.MetricGPURowRemapPending)
	descFailed  = metrics.Desc(config.MetricGPURowRemapFailed)
	descBanks   = metrics.Desc(config.MetricGPURemapBanks)
	descWatched = metrics.Desc(config.MetricHealthEventsWatched)
	descLog     = metrics.Desc(config.MetricHealthKernelLogRead)
	descTook    = metrics.Desc(config.MetricHealthReadSeconds)
	descLast    = metrics.Desc(config.MetricHealthLastSuccess)
	descErrors  = metrics.Desc(config.MetricNVMLErrors)
)

var _ prometheus.Collector = (*Monitor)(nil)

// Describe implements prometheus.Collector.
func (m *Monitor) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descHealthy, descProblem, descAction, descXids, descECC, descRows, descPending, descFailed, descBanks, descWatched, descLog, descTook, descLast, descErrors,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	written := map[string]bool{}
	for _, g := range m.node.GPUs() {
		id := string(g.UUID())
		if id == "" {
			id = g.PCI()
		}
		if id == "" || written[id] {
			continue
		}
		written[id] = true
		gauge(descHealthy, number(len(g.Findings()) == 0), id)
		for _, f := range g.Findings() {
			gauge(descProblem, 1, id, string(f.Reason), string(f.Severity()))
		}
		collect(g, id, gauge)
	}
	for of, n := range m.counts.xids {
		out <- prometheus.MustNewConstMetric(descXids, prometheus.CounterValue, n, string(of.gpu), of.xid, string(of.class))
	}
	for code, n := range m.counts.errors {
		out <- prometheus.MustNewConstMetric(descErrors, prometheus.CounterValue, n, code)
	}
	gauge(descWatched, number(m.node.HasEvents()))
	gauge(descLog, number(m.readsLog))
	gauge(descTook, m.counts.took.Seconds())
	if !m.counts.last.IsZero() {
		gauge(descLast, float64(m.counts.last.UnixMilli())/1000)
	}
}

func number(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

// collect sends what the driver last reported about one GPU, and omits what it does not report.
func collect(g *verdict.GPU, id string, gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	h, _ := g.Reading()
	if h.Action.Known && h.UUID != "" {
		gauge(descAction, float64(h.Action.Value), id)
	}
	count := func(d *prometheus.Desc, r nvml.Reading[uint64], labels ...string) {
		if r.Known && h.UUID != "" {
			gauge(d, float64(r.Value), append([]string{id}, labels...)...)
		}
	}
	count(descECC, h.ECC.CorrectedVolatile, "corrected", "volatile")
	count(descECC, h.ECC.UncorrectedVolatile, "uncorrected", "volatile")
	count(descECC, h.ECC.CorrectedAggregate, "corrected", "aggregate")
	count(descECC, h.ECC.UncorrectedAggregate, "uncorrected", "aggregate")
	count(descRows, h.Rows.Corrected, "corrected")
	count(descRows, h.Rows.Uncorrected, "uncorrected")
	if h.Rows.Pending.Known || g.RowPending() {
		gauge(descPending, number(g.RowPending()), id)
	}
	if h.Rows.Failed.Known || g.RowFailed() {
		gauge(descFailed, number(g.RowFailed()), id)
	}
	if b := h.Banks; b.Known {
		for spare, n := range maps.All(map[string]int{"max": b.Value.Max, "high": b.Value.High, "partial": b.Value.Partial, "low": b.Value.Low, "none": b.Value.None}) {
			gauge(descBanks, float64(n), id, spare)
		}
	}
}
