package binaries

import (
	"net/http"
	"time"
)

// SetAskFor makes programs say their version within d, until the returned function is called.
func SetAskFor(d time.Duration) (undo func()) {
	before := askFor
	askFor = d
	return func() { askFor = before }
}

// Progress returns what people read of a build that may have to compile the packages of list, when the Go command has written
// said to its standard error, and what of that is left for an error. The writes come in pieces.
func Progress(list, said string) (shown, left string) {
	s := &status{}
	if list != "" {
		s.expect(list)
	}
	l := &lines{saw: s.saw}
	for i := range said {
		_, _ = l.Write([]byte{said[i]})
	}
	return s.String(), l.String()
}

// SetPublished makes one server that of all that is published, and pins these checksums, until the returned function is called.
func SetPublished(url string, by http.RoundTripper, sums string) (undo func()) {
	kube, store, with, pins := kubernetesAt, etcdAt, transport, pinned
	kubernetesAt, etcdAt, transport, pinned = url, url, by, sums
	return func() { kubernetesAt, etcdAt, transport, pinned = kube, store, with, pins }
}
