package cluster_test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestAnAPIServerThatIsTakenAwayFromOneClient(t *testing.T) {
	direct, space := clustertest.Client(t), clustertest.Namespace(t)
	p, err := clustertest.Start(t).Proxy(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	client := clientFor(t, p.Config(clustertest.Start(t).Config()), nil)
	become := func(cut cluster.Cut) {
		t.Helper()
		if err := p.Cut(t.Context(), cut); err != nil {
			t.Fatal(err)
		}
	}
	for _, row := range []struct {
		cut     cluster.Cut
		want    error // what the client is told
		written bool  // the API server did what it was asked for all the same
	}{
		{cluster.Refused, syscall.ECONNREFUSED, false},
		{cluster.Silent, context.DeadlineExceeded, false},
		{cluster.Deaf, context.DeadlineExceeded, true},
	} {
		become(cluster.Mended)
		if err := write(t, client, space, "before-"+row.cut.String()); err != nil {
			t.Fatalf("%s: before: %v", row.cut, err)
		}
		become(row.cut)
		if row.cut == cluster.Refused { // the connection that it has breaks, and it needs another
			if err := write(t, client, space, "broken"); err == nil {
				t.Error("refused: a connection goes on")
			}
		}
		if err := write(t, client, space, row.cut.String()); !errors.Is(err, row.want) {
			t.Errorf("%s: the client is told %v, want %v", row.cut, err, row.want)
		}
		if got := written(t, direct, space, row.cut.String()); got != row.written {
			t.Errorf("%s: written %t, want %t", row.cut, got, row.written)
		}
	}
	become(cluster.Silent)
	late := make(chan error, 1)
	go func() { late <- write(t, client, space, "late") }()
	become(cluster.Mended)
	if err := <-late; err != nil || !written(t, direct, space, "late") {
		t.Errorf("what was sent before it was mended did not arrive: %v", err)
	}
}

// write makes a ConfigMap, and waits a second for the answer.
func write(t *testing.T, client kubernetes.Interface, namespace, name string) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	return err
}

func written(t *testing.T, client kubernetes.Interface, namespace, name string) bool {
	t.Helper()
	_, err := client.CoreV1().ConfigMaps(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	return err == nil
}
