package watch

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// kept is what one watch has shown.
type kept struct {
	store    cache.Store
	informer cache.Controller
}

// synced reports whether there is a watch and it has shown all present objects. Without the right to watch, it never does.
func (k *kept) synced() bool { return k != nil && k.informer.HasSynced() }

// all returns the objects of the watch, sorted by namespace and name.
func (k *kept) all() []any {
	keys := k.store.ListKeys()
	slices.Sort(keys)
	out := make([]any, 0, len(keys))
	for _, key := range keys {
		if object, is, err := k.store.GetByKey(key); err == nil && is {
			out = append(out, object)
		}
	}
	return out
}

// only returns the object of a watch for a single object, or nil.
func (k *kept) only() any {
	if all := k.store.List(); len(all) == 1 {
		return all[0]
	}
	return nil
}

func notFound(configMap string) error {
	return apierrors.NewNotFound(schema.GroupResource{Resource: "configmaps"}, configMap)
}

// Watch keeps the objects for as long as ctx lasts, and calls changed when one changes in a way that matters to the agent. It does not wait: until
// the API server has shown all of them, observations read from it.
func (o *Objects) Watch(ctx context.Context, changed func()) {
	o.node = o.watch(ctx, "nodes", metav1.NamespaceAll, fields.OneTermEqualSelector("metadata.name", o.o.Node), &corev1.Node{}, changed)
	o.pods = o.watch(ctx, "pods", metav1.NamespaceAll, fields.OneTermEqualSelector("spec.nodeName", o.o.Node), &corev1.Pod{}, changed)
	o.slices = o.watchSlices(ctx, changed)
	for _, ref := range o.o.ConfigMaps {
		key := config.ConfigMapKey{Namespace: ref.Namespace, Name: ref.Name}
		if o.configMaps[key] != nil {
			continue
		}
		o.configMaps[key] = o.watch(ctx, "configmaps", ref.Namespace, fields.OneTermEqualSelector("metadata.name", ref.Name), &corev1.ConfigMap{}, changed)
	}
}

func (o *Objects) watch(ctx context.Context, resource, namespace string, selector fields.Selector, kind runtime.Object, changed func()) *kept {
	client := o.o.Client.RawCore()
	source := cache.NewListWatchFromClient(client, resource, namespace, selector)
	if resource == "pods" { // an API server that does not begin a watch with the present objects sends a list of any length
		source.ListWithContextFunc = func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.FieldSelector = selector.String()
			return Read(ctx, client, options)
		}
	}
	store, informer := o.informer(source, kind, shortened, changed, func(any, int64) {})
	go informer.RunWithContext(ctx)
	return &kept{store: store, informer: informer}
}

// informer makes an informer, which keeps of each object what transform leaves. It calls grew with 1 for each object that it adds, and with -1 for each that
// it removes.
func (o *Objects) informer(source *cache.ListWatch, kind runtime.Object, transform cache.TransformFunc, changed func(), grew func(object any, by int64)) (cache.Store, cache.Controller) {
	return cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: source,
		ObjectType:    kind,
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc: func(added any) { grew(added, 1); changed() },
			UpdateFunc: func(before, after any) {
				o.NoteRequest(before, after)
				if !decidesAlike(before, after) {
					changed()
				}
			},
			DeleteFunc: func(deleted any) { grew(deleted, -1); changed() },
		},
		Transform: transform,
	})
}

// shortened returns what the store keeps of a watched object, which may be large.
func shortened(object any) (any, error) {
	switch object := object.(type) {
	case *corev1.Node: // its managed fields name who cordoned it
		object.Status.Images, object.Status.VolumesInUse, object.Status.VolumesAttached = nil, nil, nil
	case *corev1.Pod:
		Shorten(object)
	case *corev1.ConfigMap:
		object.ManagedFields = nil
	case *resourcev1.ResourceSlice:
		holders.ShortenSlice(object)
	}
	return object, nil
}

// decidesAlike reports whether both states of an object lead to the same decisions: they differ only in annotations and fields of other programs, and
// in a heartbeat's changes.
func decidesAlike(before, after any) bool {
	switch after := after.(type) {
	case *corev1.Node:
		before, is := before.(*corev1.Node)
		return is && equality.Semantic.DeepEqual(decisive(before), decisive(after))
	case *corev1.Pod:
		before, is := before.(*corev1.Pod)
		return is && equality.Semantic.DeepEqual(decisiveOfPod(before), decisiveOfPod(after))
	case *corev1.ConfigMap:
		before, is := before.(*corev1.ConfigMap)
		return is && before.UID == after.UID && equality.Semantic.DeepEqual(before.Data, after.Data)
	case *resourcev1.ResourceSlice:
		before, is := before.(*resourcev1.ResourceSlice)
		return is && before.UID == after.UID && equality.Semantic.DeepEqual(before.Spec, after.Spec)
	default:
		return false
	}
}

// decisive returns the node without kubelet's writes at each heartbeat and when it pulls an image.
func decisive(node *corev1.Node) *corev1.Node {
	out := *node
	out.ResourceVersion, out.Generation, out.ManagedFields = "", 0, nil
	out.Status.Images, out.Status.VolumesInUse, out.Status.VolumesAttached = nil, nil, nil
	out.Status.Conditions = slices.Clone(node.Status.Conditions)
	for i := range out.Status.Conditions {
		out.Status.Conditions[i].LastHeartbeatTime = metav1.Time{}
	}
	return &out
}

// decisiveOfPod returns the pod without its annotations, except kubelet's marks of static pods.
func decisiveOfPod(pod *corev1.Pod) *corev1.Pod {
	out := *pod
	out.ResourceVersion, out.Generation, out.ManagedFields, out.Annotations = "", 0, nil, nil
	for key, value := range pod.Annotations {
		if strings.HasPrefix(key, "kubernetes.io/config.") {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[key] = value
		}
	}
	return &out
}
