package memory

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
)

const mebibyte = 1 << 20

// gauges holds the last observation, since Prometheus may scrape at any moment.
type gauges struct {
	mu   sync.Mutex
	all  []usage
	full map[string]bool
}

var (
	descTotal    = metrics.Desc(config.MetricGPUMemoryTotal)
	descUsed     = metrics.Desc(config.MetricGPUMemoryUsed)
	descPod      = metrics.Desc(config.MetricPodGPUMemoryUsed)
	descPressure = metrics.Desc(config.MetricGPUMemoryPressure)
)

func (g *gauges) observed(all []usage, full map[string]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all, g.full = all, full
}

var _ prometheus.Collector = (*Monitor)(nil)

// Describe implements prometheus.Collector.
func (m *Monitor) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descTotal, descUsed, descPod, descPressure} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.metrics.mu.Lock()
	defer m.metrics.mu.Unlock()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for _, u := range m.metrics.all {
		gauge(descTotal, float64(u.totalMiB)*mebibyte, string(u.gpu), u.device)
		gauge(descUsed, float64(u.usedMiB)*mebibyte, string(u.gpu), u.device)
		full := 0.0
		if m.metrics.full[u.device] {
			full = 1
		}
		gauge(descPressure, full, string(u.gpu), u.device)
		for _, p := range u.pods {
			gauge(descPod, float64(p.mib)*mebibyte, p.pod.Namespace, p.pod.Name, string(u.gpu), u.device)
		}
	}
}
