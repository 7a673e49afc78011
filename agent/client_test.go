package agent_test

import (
	"errors"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"
)

// client is client-go's fake API server. It keeps managedFields for nodes alone: the agent reads no others', and for each
// write that keeps them the fake makes a table of all the kinds it knows, which was a third of the time of the tests.
type client struct {
	*fake.Clientset
	nodes, others k8stesting.ObjectTracker
}

// Tracker holds all objects but nodes, for changes that no reactor shall see. The fake's own tracker is empty.
func (c *client) Tracker() k8stesting.ObjectTracker { return c.others }

func newClient(t *testing.T, objects ...runtime.Object) *client {
	t.Helper()
	kinds, ofNodes := runtime.NewScheme(), runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(kinds), policyv1.AddToScheme(kinds), coordinationv1.AddToScheme(kinds), resourcev1.AddToScheme(kinds)); err != nil {
		t.Fatal(err)
	}
	ofNodes.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Node{}, &corev1.NodeList{})
	c := &client{
		Clientset: &fake.Clientset{},
		nodes:     newNodes(t, ofNodes),
		others:    k8stesting.NewObjectTracker(kinds, serializer.NewCodecFactory(kinds).UniversalDecoder()),
	}
	for _, o := range objects {
		tracker := c.others
		if _, ok := o.(*corev1.Node); ok {
			tracker = c.nodes
		}
		if err := tracker.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	c.AddReactor("get", "daemonsets", daemonSet)
	c.AddReactor("patch", "nodes", patchOf(c.nodes))
	c.AddReactor("*", "nodes", k8stesting.ObjectReaction(c.nodes))
	c.AddWatchReactor("nodes", watchOf(c.nodes))
	c.AddReactor("*", "*", k8stesting.ObjectReaction(c.others))
	c.AddWatchReactor("*", watchOf(c.others))
	return c
}

// nodes is client-go's tracker that keeps managedFields, for nodes alone: client-go's asks all kinds for their names and makes another
// manager of the fields at each write.
type nodes struct {
	k8stesting.ObjectTracker
	fields *managedfields.FieldManager
}

func newNodes(t *testing.T, scheme *runtime.Scheme) nodes {
	t.Helper()
	kind := corev1.SchemeGroupVersion.WithKind("Node")
	fields, err := managedfields.NewDefaultFieldManager(applyconfigurations.NewTypeConverter(scheme), scheme, scheme, scheme, kind, kind.GroupVersion(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	return nodes{k8stesting.NewObjectTracker(scheme, serializer.NewCodecFactory(scheme).UniversalDecoder()), fields}
}

// Create implements k8stesting.ObjectTracker. The other nodes of a test come by it.
func (n nodes) Create(resource schema.GroupVersionResource, created runtime.Object, namespace string, options ...metav1.CreateOptions) error {
	created.GetObjectKind().SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	none := &corev1.Node{}
	none.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Node"))
	managed, err := n.fields.Update(none, created, managerOf(options, func(o metav1.CreateOptions) string { return o.FieldManager }))
	if err != nil {
		return err
	}
	return n.ObjectTracker.Create(resource, managed, namespace, options...)
}

// Update implements k8stesting.ObjectTracker.
func (n nodes) Update(resource schema.GroupVersionResource, updated runtime.Object, namespace string, options ...metav1.UpdateOptions) error {
	managed, err := n.managed(resource, updated, managerOf(options, func(o metav1.UpdateOptions) string { return o.FieldManager }))
	if err != nil {
		return err
	}
	return n.ObjectTracker.Update(resource, managed, namespace, options...)
}

// Patch implements k8stesting.ObjectTracker.
func (n nodes) Patch(resource schema.GroupVersionResource, patched runtime.Object, namespace string, options ...metav1.PatchOptions) error {
	managed, err := n.managed(resource, patched, managerOf(options, func(o metav1.PatchOptions) string { return o.FieldManager }))
	if err != nil {
		return err
	}
	return n.ObjectTracker.Patch(resource, managed, namespace, options...)
}

// Apply implements k8stesting.ObjectTracker. The agent applies no node.
func (nodes) Apply(schema.GroupVersionResource, runtime.Object, string, ...metav1.PatchOptions) error {
	return errors.New("the fake API server applies no node")
}

// managed returns the written node with its managedFields.
func (n nodes) managed(resource schema.GroupVersionResource, written runtime.Object, manager string) (runtime.Object, error) {
	node, ok := written.(*corev1.Node)
	if !ok {
		return nil, fmt.Errorf("writing a node: it is a %T", written)
	}
	before, err := n.Get(resource, "", node.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return n.fields.Update(before, written, manager)
}

func managerOf[O any](options []O, manager func(O) string) string {
	if len(options) == 0 {
		return ""
	}
	return manager(options[0])
}

// patchOf patches nodes as client-go's fake does, but as maps and not as text.
func patchOf(tracker k8stesting.ObjectTracker) k8stesting.ReactionFunc {
	return func(action k8stesting.Action) (bool, runtime.Object, error) {
		a, ok := action.(k8stesting.PatchActionImpl)
		if !ok || a.GetPatchType() != types.MergePatchType && a.GetPatchType() != types.StrategicMergePatchType {
			return false, nil, nil
		}
		before, err := tracker.Get(a.GetResource(), "", a.GetName(), metav1.GetOptions{})
		if err != nil {
			return true, nil, err
		}
		patch := map[string]any{}
		if err := utiljson.Unmarshal(a.GetPatch(), &patch); err != nil {
			return true, nil, err
		}
		node, err := runtime.DefaultUnstructuredConverter.ToUnstructured(before)
		if err != nil {
			return true, nil, err
		}
		if a.GetPatchType() == types.MergePatchType {
			merge(node, patch)
		} else if node, err = strategicpatch.StrategicMergeMapPatch(node, patch, &corev1.Node{}); err != nil {
			return true, nil, err
		}
		after := &corev1.Node{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(node, after); err != nil {
			return true, nil, err
		}
		if err := tracker.Patch(a.GetResource(), after, "", a.PatchOptions); err != nil {
			return true, nil, err
		}
		return true, after, nil
	}
}

// merge does to the object what RFC 7386 says about the patch.
func merge(object, patch map[string]any) {
	for key, value := range patch {
		inner, is := value.(map[string]any)
		switch {
		case value == nil:
			delete(object, key)
		case is:
			below, was := object[key].(map[string]any)
			if !was {
				below = map[string]any{}
				object[key] = below
			}
			merge(below, inner)
		default:
			object[key] = value
		}
	}
}

func watchOf(tracker k8stesting.ObjectTracker) k8stesting.WatchReactionFunc {
	return func(a k8stesting.Action) (bool, watch.Interface, error) {
		impl, ok := a.(k8stesting.WatchActionImpl)
		if !ok {
			return true, nil, fmt.Errorf("watching %s: the action is a %T", a.GetResource(), a)
		}
		w, err := tracker.Watch(a.GetResource(), a.GetNamespace(), impl.ListOptions)
		return true, w, err
	}
}

// noDaemonSet is the name of a DaemonSet that does not exist. Those of any other name do, in every namespace.
const noDaemonSet = "none"

func daemonSet(a k8stesting.Action) (bool, runtime.Object, error) {
	get, ok := a.(k8stesting.GetAction)
	if !ok || get.GetName() == noDaemonSet {
		return true, nil, apierrors.NewNotFound(schema.GroupResource{Group: "apps", Resource: "daemonsets"}, noDaemonSet)
	}
	return true, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: a.GetNamespace(), Name: get.GetName(), UID: uidOf(get.GetName())},
		Spec:       appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"set": get.GetName()}}},
	}, nil
}

func uidOf(set string) types.UID { return types.UID("daemonset-" + set) }

// ofDaemonSet is the owner of a pod of the DaemonSet.
func ofDaemonSet(name string) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: name, UID: uidOf(name), Controller: ptr.To(true)}}
}
