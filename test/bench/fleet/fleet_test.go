package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
)

// The tally of this program is that of the API server's audit log, and nothing that does not concern a node makes its agent ask.
func TestRequestsAreCountedAsTheAPIServerDoesAndIdleAgentsSendNone(t *testing.T) {
	if testing.Short() {
		t.Skip("a control plane and three agents; test/node shows that an agent at rest sends nothing")
	}
	t.Parallel()
	f, err := start(t.Context(), options{idle: 2 * time.Second, updates: 20, limit: "1", patience: time.Minute, log: t.Output()}, 3)
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	t.Cleanup(func() {
		if !stopped {
			_ = f.stop() // the test has failed already
		}
	})
	if err := f.begin(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := f.tally.now()
	for _, disturb := range []func() error{
		func() error { return f.updatePods(t.Context()) },
		func() error { return f.edit(unrelated, "key", "other")(t.Context()) },
		func() error { return f.editUnused(t.Context()) },
		func() error { return f.rest(t.Context()) }, // a pass would come by now
	} {
		if err := disturb(); err != nil {
			t.Fatal(err)
		}
	}
	if sent := f.tally.now().since(before); sent.sum(func(r request) bool { return !isWatch(r) }) > 0 {
		t.Errorf("60 updates of pods, two edits and two seconds made the agents send %v", sent)
	}
	if err := f.await(t.Context(), "the former state", func(n *corev1.Node) bool { return reason(n) == config.ReasonNotRequested }); err != nil {
		t.Error(err)
	}
	asAudited(t, f)
	stopped = true
	if err := f.stop(); err != nil {
		t.Error(err)
	}
}

func TestWhatCannotBeMeasuredIsRefusedBeforeAnythingStarts(t *testing.T) {
	ended, end := context.WithCancel(t.Context())
	end() // what is not refused ends at the start of the control plane
	run := func(args ...string) error {
		c := command() //nolint:contextcheck // which its commands get from ExecuteContext
		c.SetArgs(args)
		return c.ExecuteContext(ended)
	}
	for _, wrong := range []string{
		"--nodes 0", "--nodes -3", "--max-unavailable foo", "--max-unavailable 0", "--max-unavailable -1", "--max-unavailable 0%",
		"--max-unavailable null", "--max-unavailable 1}]", "--updates -1", "--idle -5s", "--patience 0s", "--patience -1s", "--storm -1s",
	} {
		flag, value, _ := strings.Cut(wrong, " ")
		err := run(flag, value)
		if err == nil || !strings.HasPrefix(err.Error(), wrong+": it must be ") {
			t.Errorf("%s: error %v", wrong, err)
		}
		if err := run("--nodes", "3", "--nodes", "30", flag, value); err == nil || !strings.HasPrefix(err.Error(), wrong+": it must be ") {
			t.Errorf("%s beside other sizes: error %v", wrong, err)
		}
	}
	for _, limit := range []string{"1", "30", "1%", "100%"} {
		if err := (options{nodes: []int{1}, limit: limit, patience: time.Second}).check(); err != nil {
			t.Errorf("a limit of %s: %v", limit, err)
		}
	}
}

// asAudited compares the tally with the API server's audit log, watches aside.
func asAudited(t *testing.T, f *fleet) {
	t.Helper()
	audited, got := f.audited(t), f.tally.now()
	for _, c := range []counts{audited, got} {
		for r := range c {
			if isWatch(r) { // which is logged when it ends
				delete(c, r)
			}
		}
	}
	if diff := cmp.Diff(audited, got, cmp.AllowUnexported(request{})); diff != "" || len(got) < 3 {
		t.Errorf("requests (-audited +counted):\n%s", diff)
	}
}

// audited are the agents' requests by the API server's audit log.
func (f *fleet) audited(t *testing.T) counts {
	t.Helper()
	all, err := f.cluster.Requests(func(e cluster.AuditEvent) bool { return e.User == "system:serviceaccount:"+namespace+":"+account })
	if err != nil {
		t.Fatal(err)
	}
	out := counts{}
	for _, e := range all {
		out[request{verb: e.Verb, resource: e.Resource, code: e.Code}]++
	}
	return out
}

func TestARequestIsRecognizedByItsMethodAndPath(t *testing.T) {
	for text, want := range map[string]request{
		"GET /api/v1/nodes":   {verb: "list", resource: "nodes"},
		"GET /api/v1/nodes/a": {verb: "get", resource: "nodes"},
		"GET /api/v1/pods?fieldSelector=spec.nodeName%3Da&watch=1":    {verb: "watch", resource: "pods"},
		"PATCH /api/v1/nodes/a/status":                                {verb: "patch", resource: "nodes/status"},
		"POST /api/v1/namespaces/b/pods/c/eviction":                   {verb: "create", resource: "pods/eviction"},
		"PUT /apis/coordination.k8s.io/v1/namespaces/b/leases/c":      {verb: "update", resource: "leases"},
		"DELETE /api/v1/namespaces/b/pods/c":                          {verb: "delete", resource: "pods"},
		"GET /api/v1/namespaces/b":                                    {verb: "get", resource: "namespaces"},
		"POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {verb: "create", resource: "selfsubjectaccessreviews"},
	} {
		var method, path string
		if _, err := fmt.Sscan(text, &method, &path); err != nil {
			t.Fatal(err)
		}
		r, err := http.NewRequestWithContext(t.Context(), method, "https://api"+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if got := kindOf(r); got != want {
			t.Errorf("%s is %v, want %v", text, got, want)
		}
	}
}

func TestLatencyIsReadFromTheAPIServersHistograms(t *testing.T) {
	before, err := parseServed([]byte(`apiserver_request_total{code="200",verb="GET"} 10
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="0.1"} 10
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="0.2"} 10
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="+Inf"} 10
`))
	if err != nil {
		t.Fatal(err)
	}
	after, err := parseServed([]byte(`apiserver_request_total{code="200",verb="GET"} 60
apiserver_request_total{code="200",verb="LIST"} 50
apiserver_request_total{code="200",verb="WATCH"} 1000
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="0.1"} 60
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="0.2"} 60
apiserver_request_duration_seconds_bucket{resource="nodes",verb="GET",le="+Inf"} 60
apiserver_request_duration_seconds_bucket{resource="nodes",verb="LIST",le="0.1"} 0
apiserver_request_duration_seconds_bucket{resource="nodes",verb="LIST",le="0.2"} 50
apiserver_request_duration_seconds_bucket{resource="nodes",verb="LIST",le="+Inf"} 50
apiserver_request_duration_seconds_bucket{resource="nodes",verb="WATCH",le="+Inf"} 1000
`))
	if err != nil {
		t.Fatal(err)
	}
	s := after.since(before)
	if s.requests != 100 || s.quantile(0.75) != 150*time.Millisecond || s.quantile(0.25) != 50*time.Millisecond {
		t.Errorf("%v requests, half of them up to 0.1 s and half up to 0.2 s; quarters at %s and %s", s.requests, s.quantile(0.25), s.quantile(0.75))
	}
}

func TestTheTableShowsWhatAnAgentAsksFor(t *testing.T) {
	of := func(nodes, gets, conflicts int) result {
		return result{nodes: nodes, phases: []phase{{name: "a change", took: time.Second, agents: counts{
			{verb: "get", resource: "nodes", code: 200}: gets, {verb: "update", resource: "leases", code: 409}: conflicts,
			{verb: "watch", resource: "pods", code: 200}: 6 * nodes,
		}}}}
	}
	const want = `| phase | nodes | reads | writes | watches | of Leases | Lease conflicts | all of the fleet | took | p99 |
| --- | ---:| ---:| ---:| ---:| ---:| ---:| ---:| ---:| ---:|
| a change | 10 | 2.00 | 0 | 6.00 | 0 | 0 | 80 | 1s | 0s |
|  | 100 | 3.00 | 1.00 | 6.00 | 1.00 | 100 | 1000 | 1s | 0s |

| phase | requests of an agent, at 100 nodes to those at 10 | of 5000 agents, if it stays so |
| --- | ---:| ---:|
| a change | 1.25 times | 50000 |

At rest 5000 agents send by the clock 16.7 heartbeats a second, one each in 5m0s, and begin again 66.7 watches a second, each of their 6.00 after 5m0s to 10m0s.
If all have started at the same moment, that is none for 5m0s, and then 100.0 watches a second for as long. An idle phase of less sees neither.
`
	if diff := cmp.Diff(want, table([]result{of(10, 20, 0), of(100, 300, 100)})); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}
}
