package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// Client-go pauses before an error that comes too soon after the last one, by a time of the whole process: for ever, where each
// test has a time of its own.
func TestMain(m *testing.M) {
	utilruntime.ErrorHandlers = nil
	os.Exit(m.Run())
}

// world is a cluster with nodes of which a test plays the agents.
type world struct {
	t      *testing.T
	client *fake.Clientset
	said   *output
	end    chan error
	stop   context.CancelFunc
	// what agents answer at once when apply asks whether they would refuse, by node; the others would not
	names map[string]api.Answer
}

// output is what the command has written, of which a test may read while it writes.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String is all of it.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// inWorld runs a test in a bubble, where time passes when all wait.
func inWorld(t *testing.T, test func(w *world), nodes ...func() *corev1.Node) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, client: fake.NewClientset(), names: map[string]api.Answer{}}
		for _, n := range nodes {
			w.create(n())
		}
		test(w)
	})
}

// gpuNode is a node of the pool. Its agent has reported NotRequested.
func gpuNode(name string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), Labels: map[string]string{"pool": "research"}, Annotations: map[string]string{},
	}}
	return says(n, api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested}, "no config is asked for")
}

// gpu is such a node, made in the test's time.
func gpu(name string) func() *corev1.Node { return func() *corev1.Node { return gpuNode(name) } }

// bare is a node on which no agent has ever run.
func bare(name string, labels ...string) func() *corev1.Node {
	return func() *corev1.Node { return &corev1.Node{ObjectMeta: meta(name, labels...)} }
}

// says is what an agent writes: the status, and the condition by it.
func says(n *corev1.Node, s api.Status, message string) *corev1.Node {
	return concludes(states(n, s), s, message)
}

// states writes the status alone.
func states(n *corev1.Node, s api.Status) *corev1.Node {
	if s.Since.IsZero() {
		s.Since = time.Now().UTC().Truncate(time.Second)
	}
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	n.Annotations[config.AnnotationStatus] = string(text)
	return n
}

// concludes writes the condition alone.
func concludes(n *corev1.Node, s api.Status, message string) *corev1.Node {
	c := corev1.NodeCondition{
		Type: config.ConditionGPUPartitionReady, Status: corev1.ConditionFalse, Reason: string(s.Reason), Message: message,
		LastHeartbeatTime: metav1.Now(),
	}
	if s.Reason == config.ReasonConverged || s.Reason == config.ReasonNotRequested {
		c.Status = corev1.ConditionTrue
	}
	if s.Reason == config.ReasonDriverNotLoaded {
		c.Status = corev1.ConditionUnknown
	}
	n.Status.Conditions = []corev1.NodeCondition{c}
	return n
}

// research is the status of an agent that has seen the request of most tests.
func research(phase api.Phase, reason config.Reason, left int, blockers ...string) api.Status {
	return api.Status{Desired: "research", Label: config.LabelProfile, Phase: phase, Reason: reason, Left: left, Blockers: blockers}
}

// done is that of one that has fulfilled it.
func done() api.Status { return research(api.PhaseIdle, config.ReasonConverged, 0) }

func (w *world) create(n *corev1.Node) {
	w.t.Helper()
	if _, err := w.client.CoreV1().Nodes().Create(w.t.Context(), n, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) node(name string) *corev1.Node {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

// edit writes the node, and waits until the command has seen it.
func (w *world) edit(name string, change func(n *corev1.Node)) {
	w.t.Helper()
	synctest.Wait()
	n := w.node(name)
	change(n)
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
}

// says is what an agent says a second later.
func (w *world) says(name string, s api.Status, message string) {
	w.t.Helper()
	<-time.After(time.Second)
	w.edit(name, func(n *corev1.Node) { says(n, s, message) })
}

func (w *world) remove(name string) {
	w.t.Helper()
	synctest.Wait()
	if err := w.client.CoreV1().Nodes().Delete(w.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
}

// start begins a command, and returns when it waits for something.
func (w *world) start(args ...string) {
	w.t.Helper()
	if args[0] == "apply" && !slices.Contains(args, "--dry-run") {
		w.client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) { return w.answersAtOnce(a) })
	}
	o := options{invoked: args, connect: func() (kube.Interface, error) { return clientset.Of(w.client), nil }}
	c := o.command()
	w.said, w.end = &output{}, make(chan error, 1)
	c.SetOut(w.said)
	c.SetErr(w.said)
	c.SetArgs(args)
	var ctx context.Context
	ctx, w.stop = context.WithCancel(w.t.Context())
	go func() { w.end <- c.ExecuteContext(ctx) }()
	synctest.Wait()
}

// run runs one to its end.
func (w *world) run(args ...string) (said string, code int) {
	w.t.Helper()
	w.start(args...)
	return w.ended()
}

// ended is what the command has said at its end, with its error as main writes it, and the exit code.
func (w *world) ended() (said string, code int) {
	w.t.Helper()
	err := <-w.end
	w.stop()
	if err == nil {
		return w.said.String(), 0
	}
	return w.said.String() + "error: " + err.Error() + "\n", cli.ExitCode(err)
}

// is compares what the command has said.
func (w *world) is(want string, code int) {
	w.t.Helper()
	got, ended := w.ended()
	if diff := cmp.Diff(strings.TrimPrefix(want, "\n"), got); diff != "" || code != ended {
		w.t.Errorf("exit code %d, want %d; what is said (-want +got):\n%s", ended, code, diff)
	}
}

// runs reports whether the command has not ended.
func (w *world) runs() bool {
	synctest.Wait()
	select {
	case err := <-w.end:
		w.end <- err
		return false
	default:
		return true
	}
}

var errRefused = errors.New("connection refused")

// meta is a node's, with labels.
func meta(name string, labels ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{}}
	for i := 0; i < len(labels); i += 2 {
		m.Labels[labels[i]] = labels[i+1]
	}
	return m
}
