package kube_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// answers is an API server that gives the same answer to all requests, and notes when they came.
type answers struct {
	status int // 0 for none before the request's deadline
	after  string
	came   []time.Time
}

// RoundTrip implements http.RoundTripper.
func (a *answers) RoundTrip(request *http.Request) (*http.Response, error) {
	a.came = append(a.came, time.Now())
	if a.status == 0 {
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	header := http.Header{"Content-Type": {"application/json"}}
	if a.after != "" {
		header.Set("Retry-After", a.after)
	}
	return &http.Response{
		StatusCode: a.status, Status: http.StatusText(a.status), Header: header, Request: request,
		Body: io.NopCloser(strings.NewReader(`{"kind":"Node","apiVersion":"v1"}`)),
	}, nil
}

// asks returns what asks the server, by the client that all programs have.
func (a *answers) asks(t *testing.T) kube.Interface {
	t.Helper()
	client, err := kube.New(&rest.Config{Host: "http://server.example", Transport: a, QPS: 1000, Burst: 1000})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// askFor reads the node once a second for as long as d, as someone does who knows of no pause, and returns the longest time between two requests.
func (a *answers) askFor(t *testing.T, client kube.Interface, d time.Duration) (longest time.Duration) {
	t.Helper()
	a.came = nil
	for range int(d / time.Second) {
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
		_, _ = client.Nodes().Get(ctx, "gpu-1", metav1.GetOptions{})
		cancel()
		<-time.After(time.Second)
	}
	for i := 1; i < len(a.came); i++ {
		longest = max(longest, a.came[i].Sub(a.came[i-1]))
	}
	return longest
}

func TestPromise16RequestsThatFailAreSentEverLessOften(t *testing.T) {
	for name, c := range map[string]struct {
		server        answers
		most          int // requests in five minutes
		least, atMost time.Duration
	}{
		"500":                          {answers{status: 500}, 26, 20 * time.Second, 32 * time.Second},
		"503":                          {answers{status: 503}, 26, 20 * time.Second, 32 * time.Second},
		"429":                          {answers{status: 429}, 26, 20 * time.Second, 32 * time.Second},
		"429 with Retry-After":         {answers{status: 429, after: "1"}, 26, 20 * time.Second, 32 * time.Second},
		"a Retry-After of a minute":    {answers{status: 429, after: "60"}, 7, time.Minute, 62 * time.Second},
		"a Retry-After without end":    {answers{status: 503, after: "999999"}, 3, 2 * time.Minute, 122 * time.Second},
		"a Retry-After of no number":   {answers{status: 503, after: "Sun, 29 Nov 2026 00:00:00 GMT"}, 26, 20 * time.Second, 32 * time.Second},
		"no answer before a deadline":  {answers{}, 26, 20 * time.Second, 60 * time.Second},
		"what fails for good (403)":    {answers{status: 403}, 300, time.Second, time.Second},
		"what there is not (404)":      {answers{status: 404}, 300, time.Second, time.Second},
		"what was written since (409)": {answers{status: 409}, 300, time.Second, time.Second},
		"200":                          {answers{status: 200}, 300, time.Second, time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			client := c.server.asks(t)
			longest := c.server.askFor(t, client, 5*time.Minute)
			if n := len(c.server.came); n > c.most || c.most < 300 && n < 3 || c.most == 300 && n < 300 || longest < c.least || longest > c.atMost {
				t.Errorf("%s: %d requests, want at most %d; the longest pause is %s, want %s to %s", name, n, c.most, longest, c.least, c.atMost)
			}
			if failed := client.Failures() > 0; failed != (c.most < 300) {
				t.Errorf("%s: it counts %d failures", name, client.Failures())
			}
			c.server.status = 200
			<-time.After(2 * time.Minute)
			if longest := c.server.askFor(t, client, 10*time.Second); longest > time.Second || len(c.server.came) != 10 {
				t.Errorf("%s: well again, it is asked %d times in 10 s", name, len(c.server.came))
			}
		})
	}
}

// A webhook that fails for one kind of request, or a budget that keeps a pod, says nothing about other requests.
func TestRequestsPauseForThoseLikeThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &answers{status: 500}
		client := server.asks(t)
		server.askFor(t, client, time.Minute)
		sent := func(request func() error) bool {
			server.came = nil
			_ = request() // its error is the server's
			return len(server.came) > 0
		}
		node := func(name string) func() error {
			return func() error { _, err := client.Nodes().Get(t.Context(), name, metav1.GetOptions{}); return err }
		}
		if sent(node("gpu-1")) {
			t.Error("a request like those that failed is sent within their pause")
		}
		if !sent(node("gpu-2")) {
			t.Error("a request for something else is not sent")
		}
		for _, server.status = range []int{429, 500} { // of one budget, and of two for the same pod
			for range 20 {
				if !sent(func() error {
					return client.Pods("team").EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "pod", Namespace: "team"}})
				}) {
					t.Fatalf("an eviction that is refused by %d is not asked for again", server.status)
				}
			}
		}
	})
}

// Whoever gives up waiting says nothing about the server.
func TestARequestThatIsCancelledIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &answers{}
		client := server.asks(t)
		for range 20 {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			_, _ = client.Nodes().Get(ctx, "gpu-1", metav1.GetOptions{})
		}
		if client.Failures() != 0 || len(server.came) != 20 {
			t.Errorf("%d failures in %d requests", client.Failures(), len(server.came))
		}
	})
}

// Of all that waits for the end of a pause, one request finds out whether the server is well.
func TestAfterAPauseOneRequestIsSentAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &answers{status: 500}
		client := server.asks(t)
		server.askFor(t, client, 2*time.Minute)
		<-time.After(time.Minute)
		server.came, server.status = nil, 0
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		ended := make(chan error)
		for range 5 {
			go func() {
				_, err := client.Nodes().Get(ctx, "gpu-1", metav1.GetOptions{})
				ended <- err
			}()
		}
		refused := 0
		for range 5 {
			if paused, is := errors.AsType[*kube.PausedError](<-ended); is && paused.Until.After(time.Now()) {
				refused++
			}
		}
		if len(server.came) != 1 || refused != 4 {
			t.Errorf("%d requests were sent, and %d refused", len(server.came), refused)
		}
	})
}

func TestRetryDoesNotWaitForTheEndOfALongPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &answers{status: 500}
		client := server.asks(t)
		read := func() error {
			return kube.Retry(t.Context(), func() error { _, err := client.Nodes().Get(t.Context(), "gpu-1", metav1.GetOptions{}); return err })
		}
		for i, want := range []int{6, 0} {
			server.came = nil
			began := time.Now()
			err := read()
			_, unanswered := errors.AsType[*kube.UnansweredError](err)
			if !unanswered || len(server.came) != want || i == 1 && time.Since(began) > 0 {
				t.Errorf("%d requests after %s, want %d: %v", len(server.came), time.Since(began), want, err)
			}
			if i == 1 && !strings.Contains(err.Error(), "has failed 6 requests like this one in a row (Internal Server Error)") {
				t.Errorf("the error is %q", err)
			}
		}
	})
}
