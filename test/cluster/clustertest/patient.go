package clustertest

import (
	"bytes"
	"io"
	"net/http"
)

// tooBusy is in the API server's internal error for a request that etcd gave up after some seconds: on a busy machine
// etcd may not keep up.
const tooBusy = "etcdserver: request timed out"

// patient repeats requests that etcd was too busy for, until the request's context ends. So a test may write the same
// object twice.
type patient struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (p patient) RoundTrip(request *http.Request) (*http.Response, error) {
	for {
		response, err := p.next.RoundTrip(request)
		if err != nil || response.StatusCode != http.StatusInternalServerError {
			return response, err
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			return nil, err
		}
		if !bytes.Contains(text, []byte(tooBusy)) || request.Body != nil && request.GetBody == nil {
			response.Body = io.NopCloser(bytes.NewReader(text))
			return response, nil
		}
		if request.Body == nil {
			continue
		}
		request = request.Clone(request.Context())
		if request.Body, err = request.GetBody(); err != nil {
			return nil, err
		}
	}
}
