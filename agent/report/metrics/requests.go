package metrics

import (
	"context"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/metrics"
)

// requests counts the requests of client-go to the API server, by verb and by class of the answer.
type requests struct{ *prometheus.CounterVec }

// Increment implements metrics.ResultMetric of client-go. Code is an HTTP status, or "<error>" without an answer, as for a request that was held
// back.
func (r requests) Increment(_ context.Context, code, verb, _ string) {
	class := "none"
	if len(code) == 3 && strings.Contains("12345", code[:1]) {
		class = code[:1] + "xx"
	}
	r.WithLabelValues(verb, class).Inc()
}

var install sync.Once

// CountRequests counts the requests of this process to the API server from now on. Client-go has one counter in a process: the first Metrics that
// calls this gets it.
func (m *Metrics) CountRequests() {
	install.Do(func() {
		metrics.Register(metrics.RegisterOpts{RequestResult: requests{m.requests}})
	})
}
