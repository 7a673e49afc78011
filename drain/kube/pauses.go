package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
)

// longestPause bounds the pause after a failure, with its jitter. It is a third of the time that a node keeps its slot of a pool, so that a slot is
// renewed in time once the API server answers again.
const longestPause = 30 * time.Second

// jitter is the share of each pause that is random: the agents of many nodes must not ask at once.
const jitter = 0.5

// Backoff returns the pauses after failures in a row: from one second they grow to half a minute.
func Backoff() wait.Backoff {
	return wait.Backoff{Duration: time.Second, Factor: 2, Jitter: jitter, Steps: 16, Cap: time.Duration(float64(longestPause) / (1 + jitter))}
}

// longestRetryAfter bounds the pause that the API server, or a proxy before it, requests.
const longestRetryAfter = 2 * time.Minute

// pauses sends requests. While the API server fails all requests of the same method and path, it sends one of them after each pause, and answers the
// others itself. So the API server gets fewer and fewer requests, from observations, reflectors and recorders of Events alike.
type pauses struct {
	next http.RoundTripper

	lock    sync.Mutex
	failing map[string]*failing // by method and path
	failed  uint64              // requests so far
}

// failing are requests that failed in a row.
type failing struct {
	times int
	last  string // why the last one failed
	grows wait.Backoff
	until time.Time // no other is sent before
}

// PausedError is the answer to a request that was not sent, since the API server has failed those before it.
type PausedError struct {
	Until time.Time // when the next one is sent
	Times int       // how many have failed in a row
	Last  string    // why the last one failed
}

// Error implements error.
func (p *PausedError) Error() string {
	return fmt.Sprintf("the API server has failed %d requests like this one in a row (%s); the next is sent at %s",
		p.Times, p.Last, p.Until.UTC().Format("15:04:05Z"))
}

func newPauses(next http.RoundTripper) *pauses {
	return &pauses{next: next, failing: map[string]*failing{}}
}

// WrappedRoundTripper implements net.RoundTripperWrapper.
func (p *pauses) WrappedRoundTripper() http.RoundTripper { return p.next }

var _ net.RoundTripperWrapper = &pauses{}

// RoundTrip implements http.RoundTripper.
func (p *pauses) RoundTrip(request *http.Request) (*http.Response, error) {
	kind := request.Method + " " + request.URL.Path
	if request.URL.Query().Get("watch") != "" {
		kind = "watch " + request.URL.Path
	}
	if err := p.paused(kind); err != nil {
		if request.Body != nil {
			_ = request.Body.Close() // as each RoundTripper has to; nothing was read
		}
		return nil, err
	}
	response, err := p.next.RoundTrip(request)
	switch {
	case err != nil && errors.Is(request.Context().Err(), context.Canceled): // the asker has gone
	case err != nil:
		p.fails(kind, err.Error(), 0)
	case fails(request, response):
		p.fails(kind, response.Status, retryAfter(response))
	default:
		p.lock.Lock()
		delete(p.failing, kind)
		p.lock.Unlock()
	}
	return response, err
}

// fails reports whether the answer only says that the API server cannot perform the request now. To an eviction, 429 says that a disruption budget
// does not allow it, and 500 that more than one selects the pod.
func fails(request *http.Request, response *http.Response) bool {
	switch code := response.StatusCode; code {
	case http.StatusTooManyRequests, http.StatusInternalServerError:
		return !strings.HasSuffix(request.URL.Path, "/eviction")
	default:
		return code > http.StatusInternalServerError
	}
}

func retryAfter(response *http.Response) time.Duration {
	seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(min(seconds, int(longestRetryAfter/time.Second))) * time.Second
}

// paused returns why a request is not sent now; nil if it is. At the end of a pause one is sent, and the next ones wait for as long again, or for its answer.
func (p *pauses) paused(kind string) error {
	p.lock.Lock()
	defer p.lock.Unlock()
	f, now := p.failing[kind], time.Now()
	switch {
	case f == nil:
		return nil
	case now.Before(f.until):
		p.failed++
		return &PausedError{Until: f.until, Times: f.times, Last: f.last}
	case f.times >= tries:
		f.until = now.Add(f.grows.Duration)
	}
	return nil
}

// fails begins a pause. Retry repeats a request sooner at first: one that fails may be alone.
func (p *pauses) fails(kind, why string, least time.Duration) {
	p.lock.Lock()
	defer p.lock.Unlock()
	now := time.Now()
	maps.DeleteFunc(p.failing, func(_ string, f *failing) bool { return now.Sub(f.until) > longestRetryAfter }) // such as Events: each name is used once
	p.failed++
	f := p.failing[kind]
	if f == nil {
		f = &failing{grows: Backoff()}
		p.failing[kind] = f
	}
	f.times++
	f.last, f.until = why, now.Add(least)
	if f.times >= tries {
		f.until = now.Add(max(least, f.grows.Step()))
	}
}

func (p *pauses) failures() uint64 {
	p.lock.Lock()
	defer p.lock.Unlock()
	return p.failed
}
