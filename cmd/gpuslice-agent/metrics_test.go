package main

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
)

func TestMetricsAreServedWhereTheFlagSays(t *testing.T) {
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: "127.0.0.1:0"}
	o.serve(t.Context(), metrics.New(clock.RealClock{}).Handler(), zap.New(core))
	address, ok := logged.All()[0].ContextMap()["address"].(string)
	if !ok {
		t.Fatalf("logged: %v", logged.All())
	}
	if text := getText(t, "http://"+address+"/metrics"); !strings.Contains(text, "process_resident_memory_bytes") {
		t.Errorf("got:\n%s", text)
	}
}

func TestAnAddressThatIsTakenStopsNoAgent(t *testing.T) {
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: taken.Addr().String()}
	o.serve(t.Context(), http.NotFoundHandler(), zap.New(core))
	if all := logged.All(); len(all) != 1 || !strings.Contains(all[0].Message, "choose another --metrics-address") {
		t.Errorf("logged: %v", all)
	}
	o.metricsAddress = ""
	o.serve(t.Context(), http.NotFoundHandler(), zap.New(core))
	if all := logged.All(); len(all) != 1 {
		t.Errorf("without an address, logged: %v", all[1:])
	}
}

// A monitor learns in one word whether the loop goes on, and whether a pass has ended.
func TestProbesAnswerWhetherTheLoopGoesOn(t *testing.T) {
	core, logged := observer.New(zapcore.InfoLevel)
	o := options{metricsAddress: "127.0.0.1:0", alive: report.NewLiveness(time.Nanosecond, zap.NewNop())}
	o.serve(t.Context(), http.NotFoundHandler(), zap.New(core))
	ask := func(page string) int {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprint("http://", logged.All()[0].ContextMap()["address"], page), nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		return response.StatusCode
	}
	is := func(when string, healthy, ready int) {
		t.Helper()
		if h, r := ask("/healthz"), ask("/readyz"); h != healthy || r != ready {
			t.Errorf("%s /healthz is %d and /readyz %d, want %d and %d", when, h, r, healthy, ready)
		}
	}
	is("before the first pass", http.StatusOK, http.StatusServiceUnavailable)
	o.alive.Begin()
	o.alive.Saw(&corev1.Node{})
	o.alive.End(time.Hour)
	is("after a pass", http.StatusOK, http.StatusOK)
	o.alive.Begin() // which has a nanosecond
	is("in a pass that hangs", http.StatusServiceUnavailable, http.StatusServiceUnavailable)
}
