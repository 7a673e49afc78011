package agent

import (
	"context"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/config"
)

// watch wakes the loop when something may have changed. Wakes carry no data: they only say "look again".
func (a *Agent) watch(ctx context.Context) <-chan struct{} {
	wake := make(chan struct{}, 1)
	poke := func() {
		select {
		case wake <- struct{}{}:
		default: // a wake is pending already
		}
	}
	a.watchObjects(ctx, "nodes", metav1.NamespaceAll, fields.OneTermEqualSelector("metadata.name", a.node), &corev1.Node{}, poke)
	a.watchObjects(ctx, "pods", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", a.node), &corev1.Pod{}, poke)
	for _, ref := range []config.ConfigMapKey{a.settings.MIGConfigMap, a.settings.Profiles} {
		if ref.Name == "" {
			continue
		}
		a.watchObjects(ctx, "configmaps", ref.Namespace, fields.OneTermEqualSelector("metadata.name", ref.Name), &corev1.ConfigMap{}, poke)
	}
	go a.watchDriver(ctx, poke)
	return wake
}

// watchObjects pokes at every change of the selected objects. It lists and watches again for as long as ctx lasts.
func (a *Agent) watchObjects(ctx context.Context, resource, namespace string, selector fields.Selector, kind runtime.Object, poke func()) {
	source := cache.NewListWatchFromClient(a.client.CoreV1().RESTClient(), resource, namespace, selector)
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    kind,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { poke() },
			UpdateFunc: func(any, any) { poke() },
			DeleteFunc: func(any) { poke() },
		},
	})
	go informer.RunWithContext(ctx)
}

// eventsRetry is the pause before asking again for the driver's news, which has none while it is not loaded.
const eventsRetry = time.Minute

// watchDriver pokes at news of the GPUs. It never holds up the loop, which looks at every heartbeat anyway.
func (a *Agent) watchDriver(ctx context.Context, poke func()) {
	for ctx.Err() == nil {
		news, err := a.driver.Events(ctx)
		if err != nil {
			a.log.Debug("no news from the driver", zap.Error(err))
		} else {
			for range news {
				poke()
			}
		}
		select {
		case <-ctx.Done():
		case <-a.clock.After(eventsRetry):
		}
	}
}
