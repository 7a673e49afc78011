package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/config/metrics"
)

// Desc describes a metric that Collect makes.
func Desc(name string) *prometheus.Desc {
	m := find(name)
	return prometheus.NewDesc(m.Name, help(m), m.Labels, nil)
}

// Counter makes a counter.
func Counter(name string) *prometheus.CounterVec {
	m := find(name)
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: m.Name, Help: help(m)}, m.Labels)
}

// find returns the text of a metric. One without a text gets its name, so that the command runs which generates the texts; test/repo holds
// that all metrics have a text.
func find(name string) metrics.Text {
	m, known := metrics.Find(name)
	if !known {
		return metrics.Text{Name: name, Is: name}
	}
	return m
}

// help is a sentence, as Prometheus shows it.
func help(m metrics.Text) string { return strings.ToUpper(m.Is[:1]) + m.Is[1:] + "." }
