package node_test

import (
	"context"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/monitoring"
)

// What a running agent reports in the course of a change that is blocked, of sharing, idleness and a fault, is put before Prometheus as it would have
// scraped it, a minute apart. Each panel must have shown something by the end, and each alert must ask for series that are there.
func TestEachPanelShowsWhatARunningAgentReports(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: H100-80GB, count: 2}]", `memoryPressure: {for: 1s}
idle: {every: 1s, after: 10s, instances: sample}
`)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "gpu", func(*corev1.Pod) {})
	r.budget(namespace, "gpu", 1)
	r.awaitBudget(namespace, "gpu", 0)
	r.serveMetrics()
	r.run()
	r.awaitReason(config.ReasonNotRequested)
	var seen scrapes
	seen.add(r.metrics())

	r.label(config.LabelMIGConfig, "all-1g.10gb")
	r.awaitReason(config.ReasonEvictionBlocked)
	seen.add(r.metrics())
	r.awaitMetric(`gpuslice_blocked_seconds_total{reason="EvictionBlocked"}`)
	seen.add(r.metrics())
	r.relax(namespace, "gpu")
	r.awaitConverged("all-1g.10gb")
	r.awaitMetric("gpuslice_converged 1")
	seen.add(r.metrics())

	slice := map[string]string{"nvidia.com/mig-1g.10gb": "1"}
	r.pod(namespace, "notebook-0", slice)
	r.awaitIdle(namespace, regexp.MustCompile("^"+namespace+"/notebook-0 ")) // the pod before it may have been idle, too
	r.awaitMetric("gpuslice_pod_gpu_memory_used_bytes{")
	seen.add(r.metrics())
	if err := r.GPUs.Play(t.Context(), 1, gpusim.NoInstance, "uncontained-ecc"); err != nil {
		t.Fatal(err)
	}
	r.awaitMetric(`gpuslice_gpu_healthy{gpu="` + r.GPUs.UUIDs()[1] + `"} 0`)
	seen.add(r.metrics())
	seen.add(r.metrics())
	seen.judged(t)
}

// awaitIdle watches the Events of the namespace until one that a pod is idle has such a message.
func (r *rig) awaitIdle(namespace string, message *regexp.Regexp) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Events(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "reason=" + string(config.ReasonGPUIdle)})
	}
	var last string
	if err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, e *corev1.Event) bool {
		last = e.Message
		return message.MatchString(last)
	}); err != nil {
		r.t.Fatalf("no Event %s: %v; the last one is %q", message, err, last)
	}
}

// scrapes are what an agent has reported, a minute after another.
type scrapes []string

func (s *scrapes) add(text string) { *s = append(*s, text) }

// series are those of the scrapes that begin so, and whether the target is up, as the input of promtool, with the labels of the target.
func (s scrapes) series(t *testing.T, prefix string, target model.Metric) (out []monitoring.Series) {
	t.Helper()
	values := map[string][]string{}
	for minute, text := range s {
		parser := expfmt.NewTextParser(model.LegacyValidation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		samples, err := expfmt.ExtractSamples(&expfmt.DecodeOptions{}, slices.Collect(maps.Values(families))...)
		if err != nil {
			t.Fatal(err)
		}
		samples = append(samples, &model.Sample{Metric: model.Metric{model.MetricNameLabel: "up"}, Value: 1})
		for _, sample := range samples {
			name := string(sample.Metric[model.MetricNameLabel])
			if value := float64(sample.Value); math.IsNaN(value) || math.IsInf(value, 0) || name != "up" && !strings.HasPrefix(name, prefix) {
				continue
			}
			m := target.Clone()
			for name, value := range sample.Metric {
				if _, taken := m[name]; taken {
					name = "exported_" + name
				}
				m[name] = value
			}
			key := m.String()
			for len(values[key]) < minute {
				values[key] = append(values[key], "_")
			}
			values[key] = append(values[key], fmt.Sprint(float64(sample.Value)))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		out = append(out, monitoring.Series{Series: name, Values: strings.Join(values[name], " ")})
	}
	return out
}

// judged has Prometheus evaluate each query of the dashboards, and look for what each alert asks for.
func (s scrapes) judged(t *testing.T) {
	t.Helper()
	reported := s.series(t, "gpuslice_", model.Metric{"job": "gpuslice/gpuslice-agent", "node": "node-1", "pod": "gpuslice-agent-x", "namespace": "gpuslice"})
	input := append(monitoring.PendingPod(), reported...)
	for _, model := range models(reported) {
		input = append(input, monitoring.Series{Series: fmt.Sprintf("gpuslice:gpu_price:per_hour{currency=\"USD\",model=%q}", model), Values: fmt.Sprintf("2x%d", len(s))})
	}
	component := monitoring.Of("../..")
	shown(t, component, input, len(s), slices.AppendSeq(alerted(t, component), maps.Values(panels(t, component, ""))))
}

// panels are the queries of the dashboards that ask for metrics of this name, as "FILE: TITLE, A".
func panels(t *testing.T, component monitoring.Component, metric string) map[string]string {
	t.Helper()
	boards, err := component.Dashboards()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for file, board := range boards {
		for _, panel := range board.Panels {
			for _, target := range panel.Targets {
				if strings.Contains(target.Expr, metric) {
					out[fmt.Sprintf("%s: %s, %s", file, panel.Title, target.RefID)] = target.Expr
				}
			}
		}
	}
	if len(out) < 10 {
		t.Fatalf("the dashboards have %d queries of %s", len(out), metric)
	}
	return out
}

// shown has Prometheus evaluate each of the expressions in all these minutes. Each has to give something in one of them.
func shown(t *testing.T, component monitoring.Component, input []monitoring.Series, minutes int, expressions []string) {
	t.Helper()
	var checks []monitoring.Check
	for _, expression := range expressions {
		expression = strings.NewReplacer("$__rate_interval", "3m", "$node", "node-1").Replace(expression)
		checks = append(checks, monitoring.Check{
			Expr: fmt.Sprintf("clamp(count(last_over_time((%s)[%dm:1m])), 1, 1)", expression, minutes+1), At: fmt.Sprintf("%dm", minutes),
			Expected: []monitoring.Sample{{Labels: "{}", Value: 1}},
		})
	}
	rules, err := component.Rules()
	if err != nil {
		t.Fatal(err)
	}
	if err := monitoring.Evaluate(t.Context(), t.TempDir(), rules, input, checks); err != nil {
		t.Error(err)
	}
}

// models are those of the GPUs that are reported.
func models(reported []monitoring.Series) (out []string) {
	of := regexp.MustCompile(`^gpuslice_gpu_share.*model="([^"]+)"`)
	for _, one := range reported {
		if found := of.FindStringSubmatch(one.Series); found != nil {
			out = append(out, found[1])
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// alerted are the series that the alerts ask for, with each of the labels that they ask for.
func alerted(t *testing.T, component monitoring.Component) []string {
	t.Helper()
	rules, err := component.Rules()
	if err != nil {
		t.Fatal(err)
	}
	var alerts []string
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			alerts = append(alerts, rule.Expr)
		}
	}
	all, err := monitoring.Read(t.Context(), alerts)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, asked := range all {
		for _, one := range asked.Series {
			labels := []string{}
			for label := range one.Labels {
				labels = append(labels, label+`!=""`)
			}
			out = append(out, one.Metric+"{"+strings.Join(labels, ",")+"}")
		}
	}
	return out
}
