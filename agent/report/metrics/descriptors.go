package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/config/glossary"
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

// find returns what the glossary has of a metric. A missing metric gets its name as text, so that the command which generates the glossary runs;
// test/repo checks that the glossary has all metrics.
func find(name string) glossary.Entry {
	m, known := glossary.Metrics().Find(name)
	if !known {
		return glossary.Entry{Name: name, Means: name}
	}
	return m
}

// help is a sentence, as Prometheus shows it.
func help(m glossary.Entry) string { return strings.ToUpper(m.Means[:1]) + m.Means[1:] + "." }
