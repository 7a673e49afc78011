package watch

import (
	"context"
	"time"

	"go.uber.org/zap"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// NodeWatch watches the objects that the agent needs, and calls changed when one has changed.
type NodeWatch interface {
	Watch(ctx context.Context, changed func())
}

// Sources are what wakes the loop.
type Sources struct {
	Client  kube.Interface
	Objects NodeWatch
	Driver  nvml.Driver // its events wake the loop; nil if they shall not
	Clock   clock.Clock
	Log     *zap.Logger

	poke       func()
	namespaces chan map[string]bool // of the disruption budgets that block evictions; nil before Watch
}

// Watch wakes the loop when something may have changed. Wakes carry no data: they only say "observe again".
func (s *Sources) Watch(ctx context.Context) <-chan struct{} {
	wake := make(chan struct{}, 1)
	poke := func() {
		select {
		case wake <- struct{}{}:
		default: // a wake is pending already
		}
	}
	s.poke = poke
	s.Objects.Watch(ctx, poke)
	if s.Driver != nil {
		go s.watchDriver(ctx, poke)
	}
	s.namespaces = make(chan map[string]bool, 1)
	go s.watchBudgets(ctx, s.namespaces, poke)
	return wake
}

// Beside runs one more watch that wakes the loop, for as long as ctx lasts. Call Watch first.
func (s *Sources) Beside(ctx context.Context, watch func(ctx context.Context, poke func())) {
	go watch(ctx, s.poke)
}

// watchBudgets pokes at every change of the disruption budgets in the namespaces that BlockedBy last sent. It watches no others: watching all budgets
// of a cluster from each node would be a load for the API server.
func (s *Sources) watchBudgets(ctx context.Context, blocked <-chan map[string]bool, poke func()) {
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
			s.watchBudgetsOf(watch, namespace, poke)
		}
		for namespace, stop := range watched {
			if !namespaces[namespace] {
				stop()
				delete(watched, namespace)
			}
		}
	}
}

// BlockedBy sets which budgets Watch watches: those in the namespaces of pods that a budget keeps.
func (s *Sources) BlockedBy(verdicts []drain.Verdict) {
	if s.namespaces == nil { // no loop runs that could be woken
		return
	}
	namespaces := map[string]bool{}
	for _, v := range verdicts {
		if v.State == drain.Blocked || v.Asked {
			namespaces[v.Pod.Namespace] = true
		}
	}
	select {
	case <-s.namespaces: // a former set that watchBudgets has not read yet is out of date
	default:
	}
	s.namespaces <- namespaces
}

// watchBudgetsOf pokes at every change of the disruption budgets of a namespace. It lists and watches again for as long as ctx lasts.
func (s *Sources) watchBudgetsOf(ctx context.Context, namespace string, poke func()) {
	client := s.Client.RawPolicy()
	source := cache.NewListWatchFromClient(client, "poddisruptionbudgets", namespace, fields.Everything())
	source.ListWithContextFunc = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		return names(ctx, client, "poddisruptionbudgets", namespace, o)
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    &policyv1.PodDisruptionBudget{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { poke() },
			UpdateFunc: func(any, any) { poke() },
			DeleteFunc: func(any) { poke() },
		},
		Transform: nameOnly,
	})
	go informer.RunWithContext(ctx)
}

// nameOnly keeps only the name of a watched object, which may be large: a wake carries no data.
func nameOnly(object any) (any, error) {
	of, err := meta.Accessor(object)
	if err != nil {
		return object, nil //nolint:nilerr // a tombstone of a deleted object has no name, and is kept whole
	}
	kept := metav1.ObjectMeta{Name: of.GetName(), Namespace: of.GetNamespace(), UID: of.GetUID(), ResourceVersion: of.GetResourceVersion()}
	return &policyv1.PodDisruptionBudget{ObjectMeta: kept}, nil
}

// eventsRetry is the pause before the agent asks the driver for events again: a driver has none before it is loaded.
const eventsRetry = time.Minute

// watchDriver pokes at the driver's events. It never holds up the loop, which observes at every heartbeat anyway.
func (s *Sources) watchDriver(ctx context.Context, poke func()) {
	for ctx.Err() == nil {
		news, err := s.Driver.Events(ctx)
		if err != nil {
			s.Log.Debug("no news from the driver", zap.Error(err))
		} else {
			for range news {
				poke()
			}
		}
		select {
		case <-ctx.Done():
		case <-s.Clock.After(eventsRetry):
		}
	}
}
