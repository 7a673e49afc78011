package agent

import (
	"context"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
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
	plugin := config.ConfigMapKey{Namespace: a.settings.DevicePlugin.ConfigMap.Namespace, Name: a.settings.DevicePlugin.ConfigMap.Name}
	for _, ref := range []config.ConfigMapKey{a.settings.MIGConfigMap, a.settings.Profiles, a.settings.Maintenance, plugin} {
		if ref.Name == "" {
			continue
		}
		a.watchObjects(ctx, "configmaps", ref.Namespace, fields.OneTermEqualSelector("metadata.name", ref.Name), &corev1.ConfigMap{}, poke)
	}
	go a.watchDriver(ctx, poke)
	a.watched.namespaces = make(chan map[string]bool, 1)
	go a.watchBudgets(ctx, a.watched.namespaces, poke)
	return wake
}

// watchBudgets pokes at every change of the disruption budgets in the namespaces that were last sent. Only those that are in the way
// are: all budgets of a cluster, watched from each of its nodes, would be a load for the API server.
func (a *Agent) watchBudgets(ctx context.Context, blocked <-chan map[string]bool, poke func()) {
	watched := map[string]context.CancelFunc{}
	for {
		var namespaces map[string]bool
		select {
		case <-ctx.Done():
			return
		case namespaces = <-blocked:
		}
		for namespace := range namespaces {
			if watched[namespace] != nil {
				continue
			}
			watch, stop := context.WithCancel(ctx)
			watched[namespace] = stop
			a.watchAll(watch, a.client.PolicyV1().RESTClient(), "poddisruptionbudgets", namespace, fields.Everything(),
				&policyv1.PodDisruptionBudget{}, poke)
		}
		for namespace, stop := range watched {
			if !namespaces[namespace] {
				stop()
				delete(watched, namespace)
			}
		}
	}
}

// budgetWatch is where the loop says which disruption budgets are in the way.
type budgetWatch struct {
	namespaces chan map[string]bool // nil if no loop runs that could be woken
}

// blockedBy tells which budgets are in the way now: those of the namespaces of pods that one does not let go.
func (a *Agent) blockedBy(verdicts []drain.Verdict) {
	if a.watched.namespaces == nil { // no loop runs that could be woken
		return
	}
	namespaces := map[string]bool{}
	for _, v := range verdicts {
		if v.State == drain.Blocked {
			namespaces[v.Pod.Namespace] = true
		}
	}
	select {
	case <-a.watched.namespaces: // what was not taken yet is out of date
	default:
	}
	a.watched.namespaces <- namespaces
}

// watchObjects pokes at every change of the selected objects. It lists and watches again for as long as ctx lasts.
func (a *Agent) watchObjects(ctx context.Context, resource, namespace string, selector fields.Selector, kind runtime.Object, poke func()) {
	a.watchAll(ctx, a.client.CoreV1().RESTClient(), resource, namespace, selector, kind, poke)
}

func (a *Agent) watchAll(ctx context.Context, client cache.Getter, resource, namespace string, selector fields.Selector, kind runtime.Object, poke func()) {
	source := cache.NewListWatchFromClient(client, resource, namespace, selector)
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    kind,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { poke() },
			UpdateFunc: func(any, any) { poke() },
			DeleteFunc: func(any) { poke() },
		},
		Transform: nameOnly,
	})
	go informer.RunWithContext(ctx)
}

// nameOnly is what is kept of a watched object, which may be large: a wake carries no data.
func nameOnly(object any) (any, error) {
	of, err := meta.Accessor(object)
	if err != nil {
		return object, nil //nolint:nilerr // of what has no name, as the note that an object is gone, nothing can be left out
	}
	kept := metav1.ObjectMeta{Name: of.GetName(), Namespace: of.GetNamespace(), UID: of.GetUID(), ResourceVersion: of.GetResourceVersion()}
	switch object.(type) {
	case *corev1.Node:
		return &corev1.Node{ObjectMeta: kept}, nil
	case *corev1.Pod:
		return &corev1.Pod{ObjectMeta: kept}, nil
	case *corev1.ConfigMap:
		return &corev1.ConfigMap{ObjectMeta: kept}, nil
	case *policyv1.PodDisruptionBudget:
		return &policyv1.PodDisruptionBudget{ObjectMeta: kept}, nil
	default:
		return object, nil
	}
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
