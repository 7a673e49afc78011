package watch

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// resourceSlices are the slices in requests.
const resourceSlices = "resourceslices"

// watchedSlices is the watch of the slices, which begins when they are wanted. It keeps the error of its last request.
type watchedSlices struct {
	kept

	wanted      chan struct{} // has an element once they are wanted
	own, others atomic.Int64  // how many are kept, of NVIDIA's driver and of others

	lock   sync.Mutex
	failed error
}

// want starts the watch.
func (w *watchedSlices) want() {
	select {
	case w.wanted <- struct{}{}:
	default: // it has begun, or is about to
	}
}

// note keeps the error of a request of the watch.
func (w *watchedSlices) note(err error) {
	w.lock.Lock()
	defer w.lock.Unlock()
	w.failed = err
}

// failure returns why the last request of the watch has failed; nil if it has not, or none was sent yet.
func (w *watchedSlices) failure() error {
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.failed
}

// Slices returns the ResourceSlices of all DRA drivers for the node, shortened to the relevant fields. The first call begins to watch them: a node
// without a DRA driver costs the API server nothing. Until the watch has shown them, the API server is read: a process that has just started must not take
// slices that it has not seen yet for missing ones. Slices that name their nodes by a selector, as those of devices in a network do, are not among them.
func (o *Objects) Slices(ctx context.Context) ([]resourcev1.ResourceSlice, error) {
	if o.slices != nil {
		o.slices.want()
	}
	if o.fresh || o.slices == nil {
		return o.readSlices(ctx)
	}
	if !o.slices.synced() {
		if err := o.slices.failure(); err != nil { // a server that fails is not asked in each pass, too
			return nil, o.sliceError(err)
		}
		return o.readSlices(ctx)
	}
	all := o.slices.all()
	out := make([]resourcev1.ResourceSlice, 0, len(all))
	emptied := map[*atomic.Int64]bool{}
	for _, object := range all {
		if s, is := object.(*resourcev1.ResourceSlice); is {
			out = append(out, *s)
			emptied[o.slices.sizeOf(s)] = emptied[o.slices.sizeOf(s)] || holders.IsEmptied(s)
		}
	}
	for size, is := range emptied {
		if is && size.Load() <= holders.MaxSlices { // there were too many
			return o.readSlices(ctx)
		}
	}
	return out, nil
}

// sizeOf returns the count that the slice is of.
func (w *watchedSlices) sizeOf(s *resourcev1.ResourceSlice) *atomic.Int64 {
	if s.Spec.Driver == holders.ClaimDriver {
		return &w.own
	}
	return &w.others
}

// grew counts slices that are kept, or no longer are.
func (w *watchedSlices) grew(object any, by int64) {
	if gone, is := object.(cache.DeletedFinalStateUnknown); is {
		object = gone.Obj
	}
	if s, is := object.(*resourcev1.ResourceSlice); is {
		w.sizeOf(s).Add(by)
	}
}

// shortened returns what is kept of a slice: of one too many, that it is there.
func (w *watchedSlices) shortened(object any) (any, error) {
	if s, is := object.(*resourcev1.ResourceSlice); is && w.sizeOf(s).Load() >= holders.MaxSlices {
		if kept, had, err := w.store.GetByKey(s.Name); err != nil || !had || holders.IsEmptied(kept.(*resourcev1.ResourceSlice)) { //nolint:errcheck // it is a slice
			holders.EmptySlice(s)
		}
	}
	return shortened(object)
}

func (o *Objects) readSlices(ctx context.Context) ([]resourcev1.ResourceSlice, error) {
	var list *resourcev1.ResourceSliceList
	err := kube.Retry(ctx, func() (err error) {
		list, err = o.listSlices(ctx, metav1.ListOptions{})
		return err
	})
	if err != nil {
		return nil, o.sliceError(err)
	}
	return list.Items, nil
}

// sliceError says what cannot be read, and what a user can do.
func (o *Objects) sliceError(err error) error {
	err = fmt.Errorf("reading the ResourceSlices of node %s: %w", o.o.Node, err)
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("grant the agent list and watch on resourceslices of the group resource.k8s.io, as deploy/base/rbac.yaml does: %w", err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("the API server does not serve resource.k8s.io/v1, which needs Kubernetes 1.34 or newer: %w", err)
	default:
		return err
	}
}

// selectSlices selects the slices for the node. Node authorizers let a node read only its own.
func (o *Objects) selectSlices() fields.Selector {
	return fields.OneTermEqualSelector("spec.nodeName", o.o.Node)
}

// listSlices asks for a list of slices once, and reads the answer slice by slice.
func (o *Objects) listSlices(ctx context.Context, options metav1.ListOptions) (*resourcev1.ResourceSliceList, error) {
	options.FieldSelector = o.selectSlices().String()
	body, err := o.o.Client.RawResource().Get().Resource(resourceSlices).VersionedParams(&options, metav1.ParameterCodec).
		SetHeader("Accept", runtime.ContentTypeProtobuf).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }() // it is read to its end, or that has failed
	out, has := &resourcev1.ResourceSliceList{}, map[bool]int{}
	err = readObjects(body, &out.ListMeta, func(text []byte) error {
		var s resourcev1.ResourceSlice
		if err := s.Unmarshal(text); err != nil {
			return fmt.Errorf("the slice after %d others: %w", len(out.Items), err)
		}
		own := s.Spec.Driver == holders.ClaimDriver
		if has[own]++; has[own] > holders.MaxSlices {
			holders.EmptySlice(&s)
		}
		holders.ShortenSlice(&s)
		out.Items = append(out.Items, s)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// watchSlices keeps the slices once they are wanted, for as long as ctx lasts, and calls changed when one changes in a way that matters to the agent.
func (o *Objects) watchSlices(ctx context.Context, changed func()) *watchedSlices {
	out := &watchedSlices{wanted: make(chan struct{}, 1)}
	source := cache.NewListWatchFromClient(o.o.Client.RawResource(), resourceSlices, metav1.NamespaceAll, o.selectSlices())
	watchThem := source.WatchFuncWithContext
	source.ListWithContextFunc = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		list, err := o.listSlices(ctx, options)
		out.note(err)
		return list, err
	}
	source.WatchFuncWithContext = func(ctx context.Context, options metav1.ListOptions) (apiwatch.Interface, error) {
		events, err := watchThem(ctx, options)
		out.note(err)
		return events, err
	}
	out.store, out.informer = o.informer(source, &resourcev1.ResourceSlice{}, out.shortened, changed, out.grew)
	go func() {
		select {
		case <-ctx.Done():
		case <-out.wanted:
			out.informer.RunWithContext(ctx)
		}
	}()
	return out
}
