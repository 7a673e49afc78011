// Package clustertest gives the tests of a package one control plane, and each test namespaces and nodes in it.
package clustertest

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/cluster"
)

// shared are the control planes of this test process: starting one takes as long as most tests together.
var shared struct {
	planes sync.Map // *plane by name: "" is the one that most packages have alone
	stops  bool     // Main runs and will stop them
	flags  []string // of the controller manager
}

type plane struct {
	once    sync.Once
	cluster *cluster.Cluster
	err     error
}

// Main runs the tests of a package and stops the control planes that they have started. It is called from TestMain and
// ends the process.
func Main(m *testing.M) {
	shared.stops = true
	code := m.Run()
	shared.planes.Range(func(_, started any) bool {
		if p, ok := started.(*plane); ok && p.cluster != nil {
			if err := p.cluster.Stop(); err != nil {
				fmt.Fprintf(os.Stderr, "stopping the control plane: %v\n", err)
				code = max(code, 1)
			}
		}
		return true
	})
	os.Exit(code)
}

// MainWithoutKubelets is Main for tests with nodes that have no kubelet. The node lifecycle controller does not change
// such a node. By default it would mark the node unreachable after 50 seconds, and a test on a busy machine may need
// longer.
func MainWithoutKubelets(m *testing.M) {
	shared.flags = []string{"--node-monitor-grace-period=1h", "--node-startup-grace-period=1h"}
	Main(m)
}

// Start returns the control plane of this package and starts it when this is the first test to ask. The programs are
// built when they are not built yet, which takes minutes.
func Start(t testing.TB) *cluster.Cluster {
	t.Helper()
	return Apart(t, "")
}

// Apart is Start for tests that share another control plane, named by its argument, because their cluster-wide objects
// would change what other tests see.
func Apart(t testing.TB, name string) *cluster.Cluster {
	t.Helper()
	if !shared.stops {
		t.Fatal("this package needs func TestMain(m *testing.M) { clustertest.Main(m) }, which stops the control plane")
	}
	known, _ := shared.planes.LoadOrStore(name, &plane{})
	p, ok := known.(*plane)
	if !ok {
		t.Fatalf("control plane %q is a %T", name, known)
	}
	p.once.Do(func() {
		p.cluster, p.err = cluster.Start(t.Context(), cluster.Options{Log: os.Stderr, ControllerManagerFlags: shared.flags})
	})
	if p.err != nil {
		t.Fatal(p.err)
	}
	return p.cluster
}

// Client returns the administrator's client of the control plane. It retries requests that etcd was too busy for.
func Client(t testing.TB) kubernetes.Interface {
	t.Helper()
	return ClientOf(t, Start(t))
}

// ClientOf is Client for a control plane.
func ClientOf(t testing.TB, c *cluster.Cluster) kubernetes.Interface {
	t.Helper()
	config := rest.CopyConfig(c.Config())
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return patient{next} })
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// Namespace creates a namespace that accepts pods at once. It is deleted with the test.
func Namespace(t testing.TB) string {
	t.Helper()
	return NamespaceOf(t, Start(t))
}

// NamespaceOf is Namespace in a control plane.
func NamespaceOf(t testing.TB, c *cluster.Cluster) string {
	t.Helper()
	client := ClientOf(t, c)
	namespace, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{GenerateName: prefix(t.Name())},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating a namespace: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		// Its content is deleted in the background, and the rest ends with the control plane.
		if err := client.CoreV1().Namespaces().Delete(ctx, namespace.Name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("deleting namespace %s: %v", namespace.Name, err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		_, err := client.CoreV1().ServiceAccounts(namespace.Name).Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
	if err != nil {
		t.Fatalf("waiting for the service account that pods of namespace %s run as: %v", namespace.Name, err)
	}
	return namespace.Name
}

// Node creates a node that only the control plane looks after. It is deleted with the test.
func Node(t testing.TB) *corev1.Node {
	t.Helper()
	return NodeOf(t, Start(t))
}

// NodeOf is Node in a control plane.
func NodeOf(t testing.TB, c *cluster.Cluster) *corev1.Node {
	t.Helper()
	client := ClientOf(t, c)
	node, err := client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{GenerateName: prefix(t.Name())}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("creating a node: %v", err)
	}
	t.Cleanup(func() {
		if err := client.CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), node.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("deleting node %s: %v", node.Name, err)
		}
	})
	return node
}

// patience is how long the control plane may take for anything: a machine may be busy with other work.
const patience = 5 * time.Minute

// Follow watches until done is satisfied with an object. The error says why ctx ended first, or why watching is
// impossible. The API server ends watches early, above all those of slow clients. Then Follow starts another watch,
// which reports all objects again. It calls again, which may be nil, before each one.
func Follow[T runtime.Object](
	ctx context.Context, open func(context.Context) (watch.Interface, error), again func(), done func(watch.EventType, T) bool,
) error {
	for ctx.Err() == nil {
		w, err := open(ctx)
		if err != nil {
			return err
		}
		if again != nil {
			again()
		}
		for event := range w.ResultChan() {
			object, ok := event.Object.(T)
			if !ok {
				break
			}
			if done(event.Type, object) {
				w.Stop()
				return nil
			}
		}
		w.Stop()
	}
	return context.Cause(ctx)
}

// Eventually waits for the control plane to reach a state.
func Eventually(t testing.TB, what string, done func(context.Context) (bool, error)) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 50*time.Millisecond, patience, true, done); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

var unfit = regexp.MustCompile(`[^a-z0-9]+`)

// prefix makes the start of a name from the name of a test.
func prefix(test string) string {
	const room = 40
	name := strings.Trim(unfit.ReplaceAllString(strings.ToLower(test), "-"), "-")
	return strings.Trim(name[:min(len(name), room)], "-") + "-"
}
