package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap/zaptest"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/clientset"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// The tests of this package run on a real API server: client-go's fake ignores resourceVersions, on which the protocol rests.

func TestMain(m *testing.M) { clustertest.MainWithoutKubelets(m) }

const poolLabel = "pool"

// noon is about the time at which the nodes of most tests want their slot.
var noon = time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC)

// world is a pool of nodes in a namespace of its own.
type world struct {
	testing.TB
	client    kubernetes.Interface
	namespace string
	pool      fleet.Pool
	wire      *wire // under the clients of the nodes
}

// wire counts the requests of the nodes' agents, and makes some of them fail.
type wire struct {
	next      http.RoundTripper
	lists     atomic.Int64 // requests that list nodes
	requests  atomic.Int64
	sent      atomic.Int64           // bytes
	conflicts atomic.Int64           // how many of the next writes of Leases get a conflict as their answer
	before    atomic.Pointer[func()] // called before the next write of a Lease arrives
}

func (w *wire) RoundTrip(r *http.Request) (*http.Response, error) {
	w.requests.Add(1)
	w.sent.Add(max(0, r.ContentLength))
	if r.Method == http.MethodGet && r.URL.Path == "/api/v1/nodes" {
		w.lists.Add(1)
	}
	writes := r.Method != http.MethodGet && strings.Contains(r.URL.Path, "/leases")
	if do := w.before.Load(); writes && do != nil && w.before.CompareAndSwap(do, nil) {
		(*do)()
	}
	if writes && w.conflicts.Add(-1) >= 0 {
		status := apierrors.NewConflict(coordinationv1.Resource("leases"), "", io.EOF).Status()
		status.APIVersion, status.Kind = "v1", "Status"
		body, err := json.Marshal(status)
		if err != nil {
			return nil, err
		}
		return &http.Response{
			StatusCode: http.StatusConflict, Request: r, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
		}, nil
	}
	return w.next.RoundTrip(r)
}

// newWorld makes a pool with the limit, and no nodes yet.
func newWorld(t testing.TB, limit *maintenance.Limit) *world {
	t.Helper()
	w := &world{TB: t, namespace: clustertest.Namespace(t), wire: &wire{}}
	c := rest.CopyConfig(clustertest.Start(t).Config())
	c.QPS = -1
	c.Wrap(func(next http.RoundTripper) http.RoundTripper {
		w.wire.next = next
		return w.wire
	})
	var err error
	if w.client, err = kubernetes.NewForConfig(c); err != nil {
		t.Fatal(err)
	}
	selector := labels.SelectorFromSet(labels.Set{poolLabel: w.namespace})
	w.pool = fleet.Pool{Name: "research", Selector: selector, Limit: limit, PauseAfter: 3}
	return w
}

// oneGPU is the capacity of a node with GPUs.
var oneGPU = corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}

func atMost(nodes int) *maintenance.Limit { return &maintenance.Limit{Nodes: nodes} }

// agent is the agent of one node.
type agent struct {
	*world
	*fleet.Leases
	clock  *testclock.FakePassiveClock
	change fleet.Change
}

// node adds a ready node, with an agent that has wanted a slot for the time waiting at noon.
func (w *world) node(name string, waiting time.Duration) *agent {
	w.Helper()
	node := w.create(name)
	a := &agent{world: w, change: fleet.Change{Node: node.Name, UID: node.UID, Since: noon.Add(-waiting)}}
	a.clock = testclock.NewFakePassiveClock(noon)
	a.restart()
	return a
}

// create adds a node that kubelet reports as ready. The namespace is a prefix of its name, since nodes have no namespace.
func (w *world) create(name string) *corev1.Node {
	w.Helper()
	node, err := w.client.CoreV1().Nodes().Create(w.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: w.named(name), Labels: map[string]string{poolLabel: w.namespace}},
		Status: corev1.NodeStatus{Capacity: oneGPU, Conditions: []corev1.NodeCondition{{
			Type: corev1.NodeReady, Status: corev1.ConditionTrue,
			LastHeartbeatTime: metav1.NewTime(time.Now()), LastTransitionTime: metav1.NewTime(noon),
		}}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if err := w.client.CoreV1().Nodes().Delete(context.WithoutCancel(w.Context()), node.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			w.Errorf("deleting node %s: %v", node.Name, err)
		}
	})
	return node
}

func (w *world) named(name string) string { return w.namespace + "." + name }

// short removes the namespace from a text.
func (w *world) short(text string) string { return strings.ReplaceAll(text, w.namespace+".", "") }

func (w *world) patch(name, patch string, subresources ...string) {
	w.Helper()
	_, err := w.client.CoreV1().Nodes().Patch(w.Context(), w.named(name), types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{FieldManager: "someone"}, subresources...)
	if err != nil {
		w.Fatalf("patching node %s with %s: %v", name, patch, err)
	}
}

func (w *world) cordon(name string, on bool) {
	w.Helper()
	w.patch(name, fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, on))
}

// images writes the images into the node's status, as kubelet does.
func (w *world) images(node string, images []corev1.ContainerImage) {
	w.Helper()
	text, err := json.Marshal(images)
	if err != nil {
		w.Fatal(err)
	}
	w.patch(strings.TrimPrefix(node, w.namespace+"."), fmt.Sprintf(`{"status":{"images":%s}}`, text), "status")
}

// ready writes the node's Ready condition, as kubelet does.
func (w *world) ready(name string, status corev1.ConditionStatus) {
	w.Helper()
	w.patch(name, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"lastTransitionTime":"2026-12-01T11:30:00Z"}]}}`, status), "status")
}

func (w *world) deleteNode(name string) {
	w.Helper()
	if err := w.client.CoreV1().Nodes().Delete(w.Context(), w.named(name), metav1.DeleteOptions{}); err != nil {
		w.Fatal(err)
	}
}

const leaseOfPool = config.LeasePrefix + "research"

// leaseIsGone reports whether the pool has no Lease.
func (w *world) leaseIsGone() bool {
	w.Helper()
	_, err := w.client.CoordinationV1().Leases(w.namespace).Get(w.Context(), leaseOfPool, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		w.Fatal(err)
	}
	return err != nil
}

func (w *world) lease() *coordinationv1.Lease {
	w.Helper()
	lease, err := w.client.CoordinationV1().Leases(w.namespace).Get(w.Context(), leaseOfPool, metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return lease
}

// annotate edits an annotation of the Lease, as a user does.
func (w *world) annotate(key, value string) {
	w.Helper()
	text := "null"
	if value != "" {
		quoted, err := json.Marshal(value)
		if err != nil {
			w.Fatal(err)
		}
		text = string(quoted)
	}
	_, err := w.client.CoordinationV1().Leases(w.namespace).Patch(w.Context(), leaseOfPool, types.MergePatchType,
		[]byte(fmt.Sprintf(`{"metadata":{"annotations":{%q:%s}}}`, key, text)), metav1.PatchOptions{})
	if err != nil {
		w.Fatal(err)
	}
}

// written is the part of the state that a tool would read.
type written struct {
	Holders []struct{ Node, UID, Operation string }
	Queue   []struct{ Node string }
	Failed  int
}

func (w *world) state() written {
	w.Helper()
	return stateOf(w, w.lease())
}

func stateOf(t testing.TB, lease *coordinationv1.Lease) written {
	t.Helper()
	var st written
	if err := json.Unmarshal([]byte(lease.Annotations[config.AnnotationSlots]), &st); err != nil {
		t.Fatalf("reading the state: %v", err)
	}
	return st
}

// line returns the names of the nodes in the queue, joined.
func (w *world) line() string {
	w.Helper()
	var names []string
	for _, q := range w.state().Queue {
		names = append(names, w.short(q.Node))
	}
	return strings.Join(names, " ")
}

func (w *world) holders() string {
	w.Helper()
	var names []string
	for _, h := range w.state().Holders {
		names = append(names, w.short(h.Node))
	}
	return strings.Join(names, " ")
}

// restart starts the agent again: it remembers nothing, and begins a new change.
func (a *agent) restart() {
	a.change.Operation = uuid.NewString()
	a.Leases = &fleet.Leases{
		Client: clientset.Of(a.client), Namespace: a.namespace, Clock: a.clock, Timeout: 30 * time.Second, Log: zaptest.NewLogger(a.TB),
		Startup: config.Settings{StartupTaint: "example.com/fresh"}.StartupTaints(),
	}
}

func (a *agent) pass(d time.Duration) { a.clock.SetTime(a.clock.Now().Add(d)) }

func (a *agent) take() error { return a.Take(a.Context(), a.pool, a.change) }

func (a *agent) mustTake() {
	a.Helper()
	if err := a.take(); err != nil {
		a.Fatalf("%s has no slot: %v", a.short(a.change.Node), err)
	}
}

// refused calls Take, which must return an error, and returns its text.
func (a *agent) refused() string {
	a.Helper()
	err := a.take()
	if err == nil {
		a.Fatalf("%s has a slot", a.short(a.change.Node))
	}
	return a.short(err.Error())
}

func (a *agent) wantRefused(want string) {
	a.Helper()
	if got := a.refused(); got != want {
		a.Errorf("%s reads\n%s\nwant\n%s", a.short(a.change.Node), got, want)
	}
}

func (a *agent) must(err error) {
	a.Helper()
	if err != nil {
		a.Fatalf("%s: %v", a.short(a.change.Node), err)
	}
}

func (a *agent) release() { a.Helper(); a.must(a.Release(a.Context(), a.pool, a.change)) }
func (a *agent) renew()   { a.Helper(); a.must(a.Renew(a.Context(), a.pool, a.change)) }
func (a *agent) leave()   { a.Helper(); a.must(a.Leave(a.Context(), a.pool, a.change)) }
func (a *agent) fail()    { a.Helper(); a.must(a.Fail(a.Context(), a.pool, a.change, "HardwareFailure")) }

func (a *agent) observe() state.Slot {
	a.Helper()
	seen, err := a.Read(a.Context(), a.pool, a.change)
	a.must(err)
	return seen
}
