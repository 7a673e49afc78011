package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
)

// sample is the node at one moment, as anybody sees it.
type sample struct {
	at   time.Time // when it was seen
	node *corev1.Node
}

// watch keeps every state of a node that the API server tells of.
type watch struct {
	stop func()

	mu      sync.Mutex
	samples []sample
	changed chan struct{}
}

// watchNode watches the node until stop.
func watchNode(ctx context.Context, client kubernetes.Interface, name string) (*watch, error) {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	list := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, fields.OneTermEqualSelector("metadata.name", name))
	events, err := watchtools.NewRetryWatcherWithContext(ctx, node.ResourceVersion, list)
	if err != nil {
		return nil, fmt.Errorf("watching node %s: %w", name, err)
	}
	w := &watch{stop: events.Stop, samples: []sample{{time.Now(), node}}, changed: make(chan struct{})}
	go w.follow(events)
	return w, nil
}

func (w *watch) follow(events apiwatch.Interface) {
	for event := range events.ResultChan() {
		node, ok := event.Object.(*corev1.Node)
		if !ok {
			continue
		}
		w.mu.Lock()
		w.samples = append(w.samples, sample{time.Now(), node})
		close(w.changed)
		w.changed = make(chan struct{})
		w.mu.Unlock()
	}
}

// last is the newest sample, and a channel that is closed when there is a newer one.
func (w *watch) last() (sample, <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.samples[len(w.samples)-1], w.changed
}

// since are the samples from a moment on, with the one before them.
func (w *watch) since(moment time.Time) []sample {
	w.mu.Lock()
	defer w.mu.Unlock()
	from := 0
	for i, s := range w.samples {
		if s.at.Before(moment) {
			from = i
		}
	}
	return append([]sample(nil), w.samples[from:]...)
}

// until returns when the node is as done wants it.
func (w *watch) until(ctx context.Context, what string, done func(context.Context, *corev1.Node) (bool, error)) error {
	for {
		newest, changed := w.last()
		ok, err := done(ctx, newest.node)
		if err != nil || ok {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting on node %s for %s: %w; it offers %v", newest.node.Name, what, ctx.Err(), offered(newest.node))
		}
	}
}

// pollEvery is the pause between two looks at something that is not watched. No figure depends on it.
const pollEvery = 100 * time.Millisecond

// until polls until done.
func (st *stage) until(ctx context.Context, what string, done func(context.Context) (bool, error)) error {
	if err := wait.PollUntilContextCancel(ctx, pollEvery, true, done); err != nil {
		return fmt.Errorf("waiting for %s: %w", what, err)
	}
	return nil
}
