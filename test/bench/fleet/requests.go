package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// request is a kind of request of agents.
type request struct {
	verb     string // get, list, watch, create, update, patch, delete
	resource string // with its subresource, as pods/eviction
	code     int    // of the answer; 0 for none
}

// reads reports whether it is one that reads at once. A watch is counted apart: it begins again every few minutes.
func (r request) reads() bool { return r.verb == "get" || r.verb == "list" }

func (r request) writes() bool { return !r.reads() && !isWatch(r) }

// counts are requests by their kind.
type counts map[request]int

// sum is the number of those that match.
func (c counts) sum(match func(request) bool) int {
	n := 0
	for r, times := range c {
		if match(r) {
			n += times
		}
	}
	return n
}

// String has a line for each kind, the most frequent first.
func (c counts) String() string {
	kinds := slices.SortedFunc(maps.Keys(c), func(a, b request) int {
		return cmp.Or(c[b]-c[a], strings.Compare(a.resource, b.resource), strings.Compare(a.verb, b.verb), a.code-b.code)
	})
	var out strings.Builder
	for _, r := range kinds {
		fmt.Fprintf(&out, "%8d  %s %s: %d\n", c[r], r.verb, r.resource, r.code)
	}
	return out.String()
}

// since are the requests that were not there before.
func (c counts) since(before counts) counts {
	out := counts{}
	for r, n := range c {
		if n > before[r] {
			out[r] = n - before[r]
		}
	}
	return out
}

// tally counts the requests of all agents, each when its answer begins.
type tally struct {
	lock   sync.Mutex
	counts counts
}

func (t *tally) now() counts {
	t.lock.Lock()
	defer t.lock.Unlock()
	return maps.Clone(t.counts)
}

// wrap puts the tally under a client, as rest.Config.Wrap takes it.
func (t *tally) wrap(next http.RoundTripper) http.RoundTripper { return &counted{t, next} }

type counted struct {
	tally *tally
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (c *counted) RoundTrip(r *http.Request) (*http.Response, error) {
	kind := kindOf(r)
	answer, err := c.next.RoundTrip(r)
	if answer != nil {
		kind.code = answer.StatusCode
	}
	c.tally.lock.Lock()
	defer c.tally.lock.Unlock()
	c.tally.counts[kind]++
	return answer, err
}

// kindOf gives a request's verb and resource by its method and path, as the API server does.
func kindOf(r *http.Request) request {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(parts) > 2 && parts[0] == "api":
		parts = parts[2:]
	case len(parts) > 3 && parts[0] == "apis":
		parts = parts[3:]
	default:
		return request{verb: strings.ToLower(r.Method), resource: r.URL.Path}
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	k := request{resource: parts[0]}
	if len(parts) > 2 {
		k.resource += "/" + parts[2]
	}
	named := len(parts) > 1
	switch r.Method {
	case http.MethodGet:
		k.verb = "list"
		if named {
			k.verb = "get"
		}
		if w := r.URL.Query().Get("watch"); w == "true" || w == "1" {
			k.verb = "watch"
		}
	case http.MethodPost:
		k.verb = "create"
	case http.MethodPut:
		k.verb = "update"
	default:
		k.verb = strings.ToLower(r.Method)
	}
	return k
}

func isWatch(r request) bool { return r.verb == "watch" }
