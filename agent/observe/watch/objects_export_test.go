package watch

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
)

// Shortened is shortened.
var Shortened = shortened

// DecidesAlike is decidesAlike.
var DecidesAlike = decidesAlike

// shown is a watch that has shown all present objects.
type shown struct{ cache.Controller }

func (shown) HasSynced() bool { return true }

// Show makes the watches show these objects, without an API server.
func (o *Objects) Show(node *corev1.Node, pods ...*corev1.Pod) {
	o.node = &kept{store: cache.NewStore(cache.MetaNamespaceKeyFunc), informer: shown{}}
	o.pods = &kept{store: cache.NewStore(cache.MetaNamespaceKeyFunc), informer: shown{}}
	if node != nil {
		_ = o.node.store.Add(node) // a store in memory refuses only objects without a name
	}
	for _, pod := range pods {
		_ = o.pods.store.Add(pod) // as above
	}
}

// ShowNode makes the watches show the node and no pods, and lets Slices begin a watch of their own.
func (o *Objects) ShowNode(ctx context.Context, node *corev1.Node, changed func()) {
	o.Show(node)
	o.slices = o.watchSlices(ctx, changed)
}
