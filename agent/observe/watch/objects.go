// Package watch holds the API server's objects that the agent needs: its node, the node's pods, and the ConfigMaps of the settings. It says when the
// loop should observe again; a wake carries no data.
//
// Watches keep the objects, so an observation that leads to no step costs the API server no request. Before the agent removes a GPU, an instance or a
// pod, it reads them again. With a stale cordon or a stale list of pods it would take GPUs from running pods. Lists are read pod by pod, so a list of
// any length takes little memory.
package watch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Pods lists the pods of the node, as the API server has them now.
type Pods interface {
	List(ctx context.Context) ([]corev1.Pod, error)
}

// Options is what Objects works with.
type Options struct {
	Node       string
	Client     kube.Interface
	Pods       Pods
	ConfigMaps []config.ConfigMapKey // those of the settings; others are not watched
}

// Objects are what an observation sees of the API server. One goroutine observes at a time.
type Objects struct {
	o Options

	fresh bool // this observation reads from the API server
	again bool // the next observation does

	ahead chan podsAnswer // the answer to this observation's early request for the pods; nil if there is none

	node       *kept
	pods       *kept
	configMaps map[config.ConfigMapKey]*kept
	slices     *watchedSlices // nil before Watch

	requests chan struct{} // has an element if a label of the node has a new request
	hurried  bool          // the last RequestedBefore has reported a request

	lock   sync.Mutex
	newest *corev1.Node // the newest state that the agent has read or written
}

// NewObjects makes Objects without a watch: before Watch each observation reads from the API server.
func NewObjects(o Options) *Objects {
	return &Objects{o: o, configMaps: map[config.ConfigMapKey]*kept{}, requests: make(chan struct{}, 1)}
}

// Begin begins an observation, from the watches; after ReadAgain, or if fresh is set, from the API server.
func (o *Objects) Begin(fresh bool) {
	o.fresh, o.again = o.again || o.node == nil || fresh, false
	o.ahead = nil
}

// podsAnswer is an answer of the API server.
type podsAnswer struct {
	pods []corev1.Pod
	err  error
}

// askForPods requests the pods while the observation continues. The API server may wait for a tenth of a second, until its cache has seen all writes
// before the request.
func (o *Objects) askForPods(ctx context.Context) {
	ahead := make(chan podsAnswer, 1)
	o.ahead = ahead
	go func() {
		pods, err := o.o.Pods.List(ctx)
		ahead <- podsAnswer{pods, err}
	}()
}

// ReadAgain makes the next observation read everything from the API server.
func (o *Objects) ReadAgain() { o.again = true }

// AreFresh reports whether this observation reads from the API server.
func (o *Objects) AreFresh() bool { return o.fresh }

// FreshFor reports whether a step may rest on this observation; step says whether it needs one that has read the API server, and next whether the
// step after it does. If this observation does not suffice, or next is set, the next one reads the API server.
func (o *Objects) FreshFor(step, next bool) bool {
	fresh := o.fresh || !step
	o.again = o.again || !fresh || next
	return fresh
}

// RequestedBefore waits for a new request in the node's labels, and reports whether one came before the end of the pause or ctx. If it reported one
// the last time, it waits for the end: a user shall not keep the loop busy by labels.
func (o *Objects) RequestedBefore(ctx context.Context, end <-chan time.Time) bool {
	requests := o.requests
	if o.hurried {
		requests = nil
	}
	o.hurried = false
	select {
	case <-ctx.Done():
	case <-end:
	case <-requests:
		o.hurried, o.again = true, true
	}
	return o.hurried
}

// TakeRequest begins a pass, which sees the labels' present request. If that is new, the pass reads the API server, since it will most likely have to
// act.
func (o *Objects) TakeRequest() {
	select {
	case <-o.requests:
		o.again = true
	default:
	}
}

// NoteRequest signals a changed config label of the node. Other objects have none.
func (o *Objects) NoteRequest(before, after any) {
	was, isNode := before.(*corev1.Node)
	is, too := after.(*corev1.Node)
	if !isNode || !too || !slices.ContainsFunc(requestLabels, func(label string) bool { return was.Labels[label] != is.Labels[label] }) {
		return
	}
	select {
	case o.requests <- struct{}{}:
	default: // the loop has not seen the last one yet
	}
}

// requestLabels are the labels for users' requests.
var requestLabels = config.RequestLabels()

// Node is the agent's node, at least as new as the agent's last read or write of it. An observation that reads the API server requests the pods at
// the same time; that request ends with ctx.
func (o *Objects) Node(ctx context.Context) (*corev1.Node, error) {
	if !o.fresh && o.node.synced() {
		if node := o.watchedNode(); node != nil {
			return node, nil
		}
	}
	if o.fresh {
		o.askForPods(ctx)
	}
	var node *corev1.Node
	err := kube.Retry(ctx, func() (err error) {
		node, err = o.o.Client.Nodes().Get(ctx, o.o.Node, metav1.GetOptions{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", o.o.Node, err)
	}
	o.SawNode(node)
	return node, nil
}

// SawNode records the node that the agent has read or written.
func (o *Objects) SawNode(node *corev1.Node) {
	o.lock.Lock()
	defer o.lock.Unlock()
	if o.newest == nil || o.newest.UID != node.UID || !older(node, o.newest) {
		o.newest = node
	}
}

// watchedNode returns the node of the watch, or the newer one that the agent has read or written. It returns nil if the watch has no node, or if the
// two are different objects: the node was deleted and registered again, or the cluster restored from a backup. Only the API server then knows the
// present one.
func (o *Objects) watchedNode() *corev1.Node {
	node, is := o.node.only().(*corev1.Node)
	if !is {
		return nil
	}
	o.lock.Lock()
	defer o.lock.Unlock()
	switch {
	case o.newest != nil && o.newest.UID != node.UID:
		return nil
	case o.newest == nil || older(o.newest, node):
		o.newest = nil // the watch is past it
		return node
	default:
		return o.newest
	}
}

// older compares two states of one object. If the versions cannot be compared, which never happens with Kubernetes, it returns false: then the node
// counts that the agent has read or written.
func older(a, b *corev1.Node) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}

// Pods returns the pods of the node.
func (o *Objects) Pods(ctx context.Context) ([]corev1.Pod, error) {
	if ahead := o.ahead; ahead != nil {
		o.ahead = nil
		answer := <-ahead
		return answer.pods, answer.err
	}
	if o.fresh || !o.pods.synced() {
		return o.o.Pods.List(ctx)
	}
	all := o.pods.all()
	out := make([]corev1.Pod, 0, len(all))
	for _, object := range all {
		if pod, is := object.(*corev1.Pod); is {
			out = append(out, *pod)
		}
	}
	return out, nil
}

// ConfigMap returns a ConfigMap of the settings from its watch, or reads it. If it is missing, the error is the API server's own.
func (o *Objects) ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error) {
	if watch := o.configMaps[config.ConfigMapKey{Namespace: namespace, Name: name}]; watch != nil && !o.fresh && watch.synced() {
		if object, is := watch.only().(*corev1.ConfigMap); is {
			return object, nil
		}
		return nil, notFound(name)
	}
	return kube.GetConfigMap(ctx, o.o.Client, namespace, name)
}
