// Package impersonate sends the agent's requests about pods in the name of the node that the agent runs on, where the API server allows it
// (constrained impersonation, Kubernetes 1.36). The agent then reads and evicts the pods of that node alone, and reads the resource claims that they
// name and the node's ResourceSlices. Elsewhere the requests are in the name of the agent's account.
//
// It knows nothing of what the pods are.
package impersonate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/config"
)

// impersonate is the header with the user that a request impersonates. Any further one of its kind ends the constrained mode.
const impersonate = "Impersonate-User"

// recheck is the least time between two answers of the API server that make a Sender ask again which way is open to it.
const recheck = time.Minute

// Options is what a Sender works with.
type Options struct {
	Node    string // name of the node that the agent runs on; without it no request is in its name
	Access  config.PodAccess
	Timeout time.Duration // of one question to the API server
	Log     *zap.Logger
}

// Sender decides who sends requests about pods: the node or the agent's account. Several goroutines may use it.
type Sender struct {
	o Options

	turn  chan struct{} // holds one value while no goroutine has the fields below
	known bool          // the API server has answered
	open  bool          // and lets the agent ask in the name of its node
	since time.Time     // of that answer
}

// New makes a Sender. It asks the API server when the first request about pods is made.
func New(o Options) *Sender {
	s := &Sender{o: o, turn: make(chan struct{}, 1)}
	s.turn <- struct{}{}
	return s
}

// Works reports whether the API server lets the agent ask in the name of its node. It is not known before the first request about pods was
// answered, and not asked at all where the settings want another way.
func (s *Sender) Works() (works, known bool) {
	<-s.turn
	defer func() { s.turn <- struct{}{} }()
	return s.open, s.known
}

// Wrap puts the Sender before a transport, as rest.Config.Wrap takes it.
func (s *Sender) Wrap(next http.RoundTripper) http.RoundTripper { return &transport{s, next} }

type transport struct {
	*Sender
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *transport) RoundTrip(request *http.Request) (*http.Response, error) {
	base, ours := aboutPods(request)
	if !ours || !t.impersonates() {
		return t.next.RoundTrip(request)
	}
	inItsName, err := t.decide(request, base)
	if err != nil {
		if request.Body != nil {
			_ = request.Body.Close() // as a transport has to, and nothing was read from it
		}
		return nil, err
	}
	if inItsName {
		request = t.named(request)
	}
	response, err := t.next.RoundTrip(request)
	if err == nil && response.StatusCode == http.StatusForbidden {
		t.doubt()
	}
	return response, err
}

// impersonates reports whether the settings let requests be made in the name of the node.
func (s *Sender) impersonates() bool {
	return s.o.Node != "" && (s.o.Access == config.PodAccessAuto || s.o.Access == config.PodAccessImpersonation)
}

func (s *Sender) named(request *http.Request) *http.Request {
	request = request.Clone(request.Context())
	request.Header.Set(impersonate, "system:node:"+s.o.Node)
	return request
}

// decide returns whether a request is to be made in the name of the node, and asks the API server if that is not known.
func (t *transport) decide(request *http.Request, base string) (bool, error) {
	select {
	case <-t.turn:
	case <-request.Context().Done():
		return false, request.Context().Err()
	}
	defer func() { t.turn <- struct{}{} }()
	if !t.known {
		open, err := t.ask(request, base)
		if err != nil {
			return false, fmt.Errorf("asking the API server whether pods may be read in the name of node %s: %w", t.o.Node, err)
		}
		if t.since.IsZero() || open != t.open {
			t.o.Log.Info("who asks the API server about pods", zap.Bool("inTheNameOfTheNode", open))
		}
		t.known, t.open, t.since = true, open, time.Now()
	}
	return t.open || t.o.Access == config.PodAccessImpersonation, nil
}

// doubt has the API server asked again: an administrator may have given other rights since. It refuses requests for other reasons too, so
// that is not done each time.
func (s *Sender) doubt() {
	select {
	case <-s.turn:
	default: // it is being asked
		return
	}
	defer func() { s.turn <- struct{}{} }()
	if s.known && time.Since(s.since) >= recheck {
		s.known = false
	}
}

// ask finds out whether the API server shows a node its own pods alone. If it shows the pods of all nodes, it does not confine nodes, and the
// account's own rights say more about what the agent may do.
func (t *transport) ask(request *http.Request, base string) (bool, error) {
	own, err := t.shows(request, base, url.Values{"fieldSelector": {"spec.nodeName=" + t.o.Node}, "resourceVersion": {"0"}}) // from its cache
	if err != nil || !own {
		return false, err
	}
	all, err := t.shows(request, base, url.Values{"limit": {"1"}})
	return !all, err
}

// errUnclear is an answer that is neither yes nor no.
var errUnclear = errors.New("it answers neither with pods nor with a refusal")

// shows asks for a list of pods in the name of the node, and reads nothing of the answer but whether it is one.
func (t *transport) shows(request *http.Request, base string, query url.Values) (bool, error) {
	ctx, cancel := context.WithTimeout(request.Context(), t.o.Timeout)
	defer cancel()
	question, err := http.NewRequestWithContext(ctx, http.MethodGet, (&url.URL{
		Scheme: request.URL.Scheme, Host: request.URL.Host, Path: base + "pods", RawQuery: query.Encode(),
	}).String(), nil)
	if err != nil {
		return false, err
	}
	for _, header := range []string{"Authorization", "User-Agent"} { // which other transports have put there
		question.Header[header] = request.Header.Values(header)
	}
	question.Header.Set("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json")
	answer, err := t.next.RoundTrip(t.named(question))
	if err != nil {
		return false, err
	}
	defer func() {
		_, _ = io.CopyN(io.Discard, answer.Body, 4<<10) // a short answer is read to its end, so that the connection can be used again
		_ = answer.Body.Close()
	}()
	switch answer.StatusCode {
	case http.StatusOK:
		return true, nil
	case http.StatusForbidden:
		return false, nil
	default:
		return false, fmt.Errorf("%w, but %q", errUnclear, answer.Status)
	}
}

// aboutPods reports whether a request reads pods or evicts one, or reads a resource claim or slices, and returns the path below which the API server has the
// core group. Other requests, deletions of pods among them, are the account's: admission policies confine those by what they are about.
func aboutPods(request *http.Request) (base string, is bool) {
	const group, resources = "/api/v1/", "/apis/resource.k8s.io/v1/"
	if before, path, ok := strings.Cut(request.URL.Path, resources); ok {
		parts := strings.Split(path, "/")
		claim := len(parts) == 4 && parts[0] == "namespaces" && parts[2] == "resourceclaims"
		return before + group, request.Method == http.MethodGet && (claim || path == "resourceslices")
	}
	before, path, ok := strings.Cut(request.URL.Path, group)
	if !ok {
		return "", false
	}
	parts := strings.Split(path, "/")
	if len(parts) > 2 && parts[0] == "namespaces" {
		parts = parts[2:]
	}
	switch {
	case parts[0] != "pods":
		return "", false
	case request.Method == http.MethodGet && len(parts) <= 2, request.Method == http.MethodPost && len(parts) == 3 && parts[2] == "eviction":
		return before + group, true
	default:
		return "", false
	}
}
