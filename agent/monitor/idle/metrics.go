package idle

import (
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
)

var (
	descGPU  = metrics.Desc(config.MetricGPUBusy)
	descPod  = metrics.Desc(config.MetricPodGPUBusy)
	descIdle = metrics.Desc(config.MetricPodGPUIdle)
)

var _ prometheus.Collector = (*Monitor)(nil)

// Describe implements prometheus.Collector.
func (m *Monitor) Describe(out chan<- *prometheus.Desc) {
	out <- descGPU
	out <- descPod
	out <- descIdle
}

// Collect implements prometheus.Collector.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	at := now.Sub(m.began)
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for id, d := range m.devices {
		if ratio, known := lately(&d.recent, at, 0); known {
			gauge(descGPU, ratio, string(d.gpu), id)
		}
	}
	written := map[[2]string]bool{} // of several pods with one name, the newest has the series
	for _, k := range slices.SortedFunc(maps.Keys(m.histories), func(a, b key) int { return m.histories[b].since.Compare(m.histories[a].since) }) {
		h := m.histories[k]
		if written[[2]string{k.device, h.pod.String()}] {
			continue
		}
		written[[2]string{k.device, h.pod.String()}] = true
		if ratio, known := lately(&h.recent, at, min(recently, now.Sub(h.since))); known {
			gauge(descPod, ratio, h.pod.Namespace, h.pod.Name, string(h.gpu), k.device)
		}
		switch h.idle {
		case idle:
			gauge(descIdle, 1, h.pod.Namespace, h.pod.Name, string(h.gpu), k.device)
		case inUse:
			gauge(descIdle, 0, h.pod.Namespace, h.pod.Name, string(h.gpu), k.device)
		case unjudged:
		}
	}
}
