package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/gpuslice/gpuslice/drain/kube"
)

// silenceCheck is how often the command checks which agents have not answered. It learns everything else by the watch.
const silenceCheck = 2 * time.Second

// Watcher receives the changes of nodes.
type Watcher interface {
	See(node *corev1.Node)  // the node is new or has changed
	Gone(name string)       // the node was deleted
	Passed(now time.Time)   // some time has passed
	Trouble(err error)      // the API server does not answer; the watch begins again
	Settled() (bool, error) // reports whether the watch may end
}

// Follow watches the named nodes for the watcher until that is settled or ctx ends. It begins a watch that is lost again.
func Follow(ctx context.Context, client kube.Interface, names []string, w Watcher) error {
	troubles := make(chan error, 1)
	index, informer, events, ended := watchtools.NewIndexerInformerWatcherWithLogger(logr.Discard(), source(client, names, troubles), &corev1.Node{})
	defer func() { events.Stop(); <-ended }()
	ticks := time.NewTicker(silenceCheck)
	defer ticks.Stop()
	for {
		if done, err := w.Settled(); done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case event := <-events.ResultChan():
			deliver(w, event)
		case err := <-troubles:
			if apierrors.IsForbidden(err) {
				return err
			}
			w.Trouble(err)
		case now := <-ticks.C:
			if informer.HasSynced() {
				missing(index, names, w)
			}
			w.Passed(now)
		}
	}
}

func deliver(w Watcher, event watch.Event) {
	node, ok := event.Object.(*corev1.Node)
	switch {
	case !ok:
	case event.Type == watch.Deleted:
		w.Gone(node.Name)
	default:
		w.See(node)
	}
}

// missing reports nodes that were deleted before the watch began.
func missing(index cache.Indexer, names []string, w Watcher) {
	for _, name := range names {
		if _, there, err := index.GetByKey(name); err == nil && !there {
			w.Gone(name)
		}
	}
}

// source watches the node, or all nodes if there are several. With a selector, a node would seem deleted when its labels change; and one watch of all
// costs the API server less than one for each. It sends errors to troubles, unless one is there already.
func source(client kube.Interface, names []string, troubles chan<- error) cache.ListerWatcher {
	only := fields.Everything()
	if len(names) == 1 {
		only = fields.OneTermEqualSelector("metadata.name", names[0])
	}
	report := func(err error) {
		if err == nil || apierrors.IsInvalid(err) { // an older API server cannot stream the list: the informer asks for the list then
			return
		}
		select {
		case troubles <- fmt.Errorf("watching nodes: %w", err):
		default:
		}
	}
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = only.String()
			list, err := client.Nodes().List(ctx, o)
			report(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only.String()
			w, err := client.Nodes().Watch(ctx, o)
			report(err)
			return w, err
		},
	}, client)
}

// ErrLate ends a wait at its timeout.
var ErrLate = errors.New("the timeout has come first")
