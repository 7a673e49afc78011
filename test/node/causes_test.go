package node_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Why nodes are found cordoned, for those causes that only a real API server shows. README.md has the table, with all others.

// impatient gives pods the shortest time that the settings allow.
const impatient = "timeouts: {drain: 1m}\n"

// Each of the two pods may go, as a dry run says. When one is gone, the other may not.
func TestCauseDrainBlockedByABudget(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, impatient)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	for _, name := range []string{"api-0", "api-1"} {
		r.user(namespace, name, func(p *corev1.Pod) { p.Labels["app"] = "api" })
	}
	r.budget(namespace, "api", 1)
	r.awaitBudget(namespace, "api", 1)
	before := r.geometry()
	r.run()
	given := r.cause()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.awaitReason(config.ReasonEvictionBlocked)
	given(r.awaitGivenUp(config.ReasonEvictionBlocked, namespace+"/api-", "change PDB "+namespace+"/api or add pods to it: it needs 1 healthy pod and has 1"))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs have changed from %s to %s", before, after)
	}
}

// Promise 10. A change that has failed, a request that is withdrawn, an agent that is restarted: once the node is given back, nothing takes it
// again.
func TestCauseTheWayBackCordonsAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "retry: {failures: 3, first: 1s}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	before := r.geometry()
	r.runToTheMiddle("all-balanced")
	if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 3}); err != nil {
		t.Fatal(err)
	}
	r.givenBack(r.awaitGivenUp(config.ReasonHardwareFailure, "given up after 3 attempts"))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs are cut as %s, and were as %s", after, before)
	}
	r.kill()
	r.run()
	r.awaitGivenUp(config.ReasonHardwareFailure, "given up after 3 attempts")
	r.kubectl("label", "node", r.Name, config.LabelMIGConfig+"-")
	n := r.awaitReason(config.ReasonNotRequested)
	r.givenBack(n)
	if cordons := r.cordons(); cordons != 1 {
		t.Errorf("the node was cordoned %d times for one change", cordons)
	}
}

// The API server says yes to the uncordon, and does nothing.
func TestCauseUncordonDidNotStick(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	lies := r.behindALiar()
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")
	if lies.Load() != 2 {
		t.Errorf("the API server has lied %d times, want 2", lies.Load())
	}
	r.givenBack(n)
}

// cause is the moment from which it is counted how long the node is kept. Given checks that it is back, and says how long it took.
func (r *rig) cause() (given func(*corev1.Node)) {
	r.t.Helper()
	began := time.Now()
	return func(n *corev1.Node) {
		r.t.Helper()
		r.givenBack(n)
		r.t.Logf("given back after %s", time.Since(began).Round(100*time.Millisecond))
	}
}

// user is a pod that holds a GPU.
func (r *rig) user(namespace, name string, change func(*corev1.Pod)) {
	r.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       r.podSpec(map[string]string{"nvidia.com/gpu": "1"}),
	}
	if change != nil {
		change(p)
	}
	if _, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), p, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.awaitRunning(namespace, name)
}

// awaitBudget waits until the controller manager has counted so many pods that may go.
func (r *rig) awaitBudget(namespace, name string, allowed int32) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.PolicyV1().PodDisruptionBudgets(namespace).Watch(ctx, metav1.SingleObject(metav1.ObjectMeta{Name: name}))
	}
	err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, b *policyv1.PodDisruptionBudget) bool {
		return b.Status.DisruptionsAllowed == allowed
	})
	if err != nil {
		r.t.Fatalf("waiting for budget %s to let %d pods go: %v", name, allowed, err)
	}
}

// awaitGivenUp waits until the change is undone, and checks that the node says why.
func (r *rig) awaitGivenUp(reason config.Reason, says ...string) *corev1.Node {
	r.t.Helper()
	n := r.await("the end of the change", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(reason) && n.Annotations[config.AnnotationJournal] == "" &&
			n.Labels[config.LabelMIGConfigState] == string(config.StateFailed)
	})
	for _, want := range says {
		if !strings.Contains(condition(n).Message, want) {
			r.t.Errorf("the message does not say %q: %s", want, condition(n).Message)
		}
	}
	return n
}

// behindALiar has the agent reach the API server by way of a proxy that twice swallows an uncordon, and answers with the node
// as it would be.
func (r *rig) behindALiar() *atomic.Int32 {
	r.t.Helper()
	lies := &atomic.Int32{}
	r.behind(func(onward http.Handler, w http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		if err != nil {
			return // the agent has given it up
		}
		request.Body = io.NopCloser(bytes.NewReader(body))
		if request.Method == http.MethodPatch && bytes.Contains(body, []byte(`"unschedulable":false`)) && lies.Load() < 2 {
			lies.Add(1)
			query := request.URL.Query()
			query.Set("dryRun", metav1.DryRunAll)
			request.URL.RawQuery = query.Encode()
		}
		onward.ServeHTTP(w, request)
	})
	return lies
}

// behind has the next agent reach the API server by way of serve, which has a request answered by onward.
func (r *rig) behind(serve func(onward http.Handler, w http.ResponseWriter, request *http.Request)) {
	r.t.Helper()
	transport, err := rest.TransportFor(r.account)
	if err != nil {
		r.t.Fatal(err)
	}
	to, err := url.Parse(r.account.Host)
	if err != nil {
		r.t.Fatal(err)
	}
	onward := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, // watches are answered bit by bit
		Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) },
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) { serve(onward, w, request) }))
	r.t.Cleanup(func() {
		if r.agents.running != nil {
			r.kill() // it would watch on
		}
		server.Close()
	})
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, &rest.Config{Host: server.URL}); err != nil {
		r.t.Fatal(err)
	}
}

// geometry is how the GPUs are cut.
func (r *rig) geometry() string {
	r.t.Helper()
	var out []string
	for _, gpu := range r.snapshot() {
		out = append(out, fmt.Sprintf("GPU %d MIG %t %s", gpu.Index, gpu.Enabled, gpu.Geometry()))
	}
	return strings.Join(out, ", ")
}

func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// closed reports whether the taint of a cordon keeps pods away. The node lifecycle controller writes it, and takes it away some time after the cordon.
func closed(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnschedulable })
}
