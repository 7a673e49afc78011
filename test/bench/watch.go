package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
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

	offers map[string]int // what pods can get: by resource, or the devices of NVIDIA's DRA driver, by UUID
}

// watch keeps every state of a node that the API server reports.
type watch struct {
	stop func()

	mu      sync.Mutex
	samples []sample
	changed chan struct{}
}

// watchNode watches the node until stop. On a node of NVIDIA's DRA driver, it also watches that driver's slices for the
// node.
func watchNode(ctx context.Context, client kubernetes.Interface, name string, dra bool) (*watch, error) {
	node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", name, err)
	}
	list := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll, fields.OneTermEqualSelector("metadata.name", name))
	events, err := watchtools.NewRetryWatcherWithContext(ctx, node.ResourceVersion, list)
	if err != nil {
		return nil, fmt.Errorf("watching node %s: %w", name, err)
	}
	w := &watch{stop: events.Stop, samples: []sample{{time.Now(), node, offered(node)}}, changed: make(chan struct{})}
	if !dra {
		go w.follow(events, nil)
		return w, nil
	}
	// The node is new, and has no slices yet.
	none, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + name})
	if err != nil {
		events.Stop()
		return nil, fmt.Errorf("listing the slices of node %s: %w", name, err)
	}
	list = cache.NewListWatchFromClient(client.ResourceV1().RESTClient(), "resourceslices", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", name))
	slices, err := watchtools.NewRetryWatcherWithContext(ctx, none.ResourceVersion, list)
	if err != nil {
		events.Stop()
		return nil, fmt.Errorf("watching the slices of node %s: %w", name, err)
	}
	w.stop = func() {
		events.Stop()
		slices.Stop()
	}
	go w.follow(events, slices.ResultChan())
	return w, nil
}

// follow takes a sample of each event, until the watch ends. The slices are those of NVIDIA's DRA driver; nil where there is none.
func (w *watch) follow(nodes apiwatch.Interface, slices <-chan apiwatch.Event) {
	known := map[string]*resourcev1.ResourceSlice{}
	for {
		next, _ := w.last()
		var event apiwatch.Event
		open := false
		select {
		case event, open = <-nodes.ResultChan():
		case event, open = <-slices:
		}
		if !open {
			return
		}
		switch object := event.Object.(type) {
		case *corev1.Node:
			next.node = object
			if slices == nil {
				next.offers = offered(object)
			}
		case *resourcev1.ResourceSlice:
			known[object.Name] = object
			if event.Type == apiwatch.Deleted {
				delete(known, object.Name)
			}
			next.offers = published(known)
		default:
			continue
		}
		next.at = time.Now()
		w.mu.Lock()
		w.samples = append(w.samples, next)
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
func (w *watch) until(ctx context.Context, what string, done func(context.Context, sample) (bool, error)) error {
	for {
		newest, changed := w.last()
		ok, err := done(ctx, newest)
		if err != nil || ok {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("waiting on node %s for %s: %w; it offers %v", newest.node.Name, what, ctx.Err(), newest.offers)
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
