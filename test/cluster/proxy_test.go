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
	"k8s.io/apimachinery/pkg/util/wait"
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
	ask := func(name string) error { return write(t.Context(), client, space, name, patience) }
	for _, row := range []struct {
		cut     cluster.Cut
		ask     func(name string) error
		want    error // what the client gets
		written bool  // the API server did what it was asked for all the same
	}{
		{cluster.Refused, func(name string) error {
			if err := ask("broken"); err == nil { // the connection that it has breaks, and it needs another
				t.Error("refused: a connection goes on")
			}
			return ask(name)
		}, syscall.ECONNREFUSED, false},
		{cluster.Silent, func(name string) error {
			return write(t.Context(), client, space, name, time.Second)
		}, context.DeadlineExceeded, false},
		{cluster.Deaf, func(name string) error {
			ctx, giveUp := context.WithCancel(t.Context())
			go func() {
				defer giveUp()
				awaitWritten(ctx, t, direct, space, name)
			}()
			return write(ctx, client, space, name, patience)
		}, context.Canceled, true},
	} {
		become(cluster.Mended)
		if err := ask("before-" + row.cut.String()); err != nil {
			t.Fatalf("%s: before: %v", row.cut, err)
		}
		become(row.cut)
		if err := row.ask(row.cut.String()); !errors.Is(err, row.want) {
			t.Errorf("%s: the client gets %v, want %v", row.cut, err, row.want)
		}
		if got, err := written(t.Context(), direct, space, row.cut.String()); err != nil || got != row.written {
			t.Errorf("%s: written %t (%v), want %t", row.cut, got, err, row.written)
		}
	}
	become(cluster.Silent)
	late := make(chan error, 1)
	go func() { late <- ask("late") }()
	become(cluster.Mended)
	if err := <-late; err != nil {
		t.Errorf("what was sent before it was mended is not answered: %v", err)
	}
	if got, err := written(t.Context(), direct, space, "late"); err != nil || !got {
		t.Errorf("what was sent before it was mended: written %t (%v)", got, err)
	}
	const behind = 300 * time.Millisecond
	p.Slow(behind)
	began := time.Now()
	if err := ask("slow"); err != nil || time.Since(began) < behind {
		t.Errorf("an answer that comes %s late came after %s: %v", behind, time.Since(began), err)
	}
}

// patience bounds a write that is to arrive.
const patience = 5 * time.Minute

// awaitWritten waits until a ConfigMap is there.
func awaitWritten(ctx context.Context, t *testing.T, client kubernetes.Interface, namespace, name string) {
	t.Helper()
	err := wait.PollUntilContextTimeout(ctx, 20*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		return written(ctx, client, namespace, name)
	})
	if err != nil {
		t.Errorf("ConfigMap %s never arrived: %v", name, err)
	}
}

// write makes a ConfigMap, and waits for the answer.
func write(ctx context.Context, client kubernetes.Interface, namespace, name string, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	_, err := client.CoreV1().ConfigMaps(namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	return err
}

// written reports whether the API server has a ConfigMap.
func written(ctx context.Context, client kubernetes.Interface, namespace, name string) (bool, error) {
	_, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
