package main

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/metrics"
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
