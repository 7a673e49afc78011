package agent_test

import (
	"errors"
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
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
	if err := errors.Join(corev1.AddToScheme(kinds), policyv1.AddToScheme(kinds), coordinationv1.AddToScheme(kinds)); err != nil {
		t.Fatal(err)
	}
	ofNodes.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Node{}, &corev1.NodeList{})
	c := &client{
		Clientset: &fake.Clientset{},
		nodes: k8stesting.NewFieldManagedObjectTracker(ofNodes, serializer.NewCodecFactory(ofNodes).UniversalDecoder(),
			applyconfigurations.NewTypeConverter(ofNodes)),
		others: k8stesting.NewObjectTracker(kinds, serializer.NewCodecFactory(kinds).UniversalDecoder()),
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
	c.AddReactor("*", "nodes", k8stesting.ObjectReaction(c.nodes))
	c.AddWatchReactor("nodes", watchOf(c.nodes))
	c.AddReactor("*", "*", k8stesting.ObjectReaction(c.others))
	c.AddWatchReactor("*", watchOf(c.others))
	return c
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
	return true, &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: a.GetNamespace(), Name: get.GetName(), UID: uidOf(get.GetName())}}, nil
}

func uidOf(set string) types.UID { return types.UID("daemonset-" + set) }

// ofDaemonSet is the owner of a pod of the DaemonSet.
func ofDaemonSet(name string) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: name, UID: uidOf(name), Controller: ptr.To(true)}}
}
