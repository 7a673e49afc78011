package agent_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/receive"
)

// mute is a driver that never returns from Events.
type mute struct{ nvml.Driver }

// Events returns when the agent ends.
func (mute) Events(ctx context.Context) (<-chan nvml.Event, error) {
	<-ctx.Done()
	return nil, nvml.ErrUnresponsive
}

// Promise 14.
func TestADriverThatHangsWhenAskedForEventsDoesNotHoldUpTheLoop(t *testing.T) {
	t.Parallel()
	w := newWorld(t, h100)
	reads := make(chan struct{}, 1)
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/api/v1/nodes/"+nodeName {
			select {
			case reads <- struct{}{}:
			default:
			}
		}
		http.Error(rw, "not now", http.StatusInternalServerError)
	}))
	t.Cleanup(server.Close)
	client, err := kube.New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	a := agent.New(agent.Options{
		Node: nodeName, Client: client, Driver: mute{w.gpus.Driver()}, Kubelet: w, Pods: watch.Lister{Client: client, Node: nodeName},
		Settings: w.settings, Record: &w.disk,
		Clock: clock.RealClock{}, Events: &record.FakeRecorder{}, Log: zaptest.NewLogger(t),
		Metrics: metrics.New(clock.RealClock{}), Liveness: report.NewLiveness(report.Patience(w.settings), zap.NewNop()),
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	select {
	case <-reads:
	case <-ctx.Done():
		t.Error("the agent does not observe its node")
	}
	cancel()
	receive.From(t, ended)
}

// A user who asks for something else waits for no pause of the agent, and no one who does so again and again keeps the agent busy.
func TestAnotherRequestEndsThePauseAfterAPass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.converge("all-1g.10gb")
		pause := w.agent.Pass(t.Context())
		before := w.node()
		settles := func(change func(*corev1.Node)) time.Duration {
			after := before.DeepCopy()
			change(after)
			w.agent.Sees(before, after)
			began := time.Now()
			w.agent.Settle(t.Context(), pause)
			return time.Since(began)
		}
		relabelled := func(n *corev1.Node) { n.Labels[config.LabelMIGConfig] = "all-3g.40gb" }
		if took := settles(func(n *corev1.Node) { n.Labels["team"] = "a" }); took < time.Second {
			t.Errorf("a label of others ends the pause after %s", took)
		}
		if took := settles(relabelled); took > 0 {
			t.Errorf("another request waits for %s", took)
		}
		if took := settles(relabelled); took < time.Second {
			t.Errorf("the second request in a row waits for %s only", took)
		}
		if took := settles(relabelled); took > 0 {
			t.Errorf("a request after a pause waits for %s", took)
		}
	})
}

// TestPromise16ANodeAtRestIsObservedOnceASecondAtMost: each write to the node or to a pod wakes the agent.
func TestPromise16ANodeAtRestIsObservedOnceASecondAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.converge("all-1g.10gb")
		pause := w.agent.Pass(t.Context())
		began := time.Now()
		left := w.agent.Settle(t.Context(), pause)
		took := time.Since(began)
		if took < time.Second || took > 2*time.Second || left != pause-took {
			t.Errorf("the next pass comes after %s, and %s of %s are left", took, left, pause)
		}
		if left := w.agent.Settle(t.Context(), 100*time.Millisecond); left != 0 {
			t.Errorf("what is to come sooner comes %s later", left)
		}
		w.startChange("all-3g.40gb") // in the middle of a change
		began = time.Now()
		if left := w.agent.Settle(t.Context(), 5*time.Second); left != 5*time.Second || time.Since(began) > 0 {
			t.Errorf("a change is slowed down: %s, %s left", time.Since(began), left)
		}
	})
}
