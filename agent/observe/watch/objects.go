// Package watch holds the objects of the API server by which the agent decides: its node, the node's pods, and the ConfigMaps of the
// settings. It says when the loop should observe again; a wake carries no data.
//
// Watches keep the objects, so that an observation that leads to no step costs the API server no request. Before the agent takes a GPU, an instance or
// a pod away it reads them again: by a stale cordon or a stale list of pods it would take GPUs from running pods. Lists are read pod by pod, so that one
// of any length takes little memory.
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

	ahead chan podsAnswer // the pods, for which this observation has asked already; nil if it has not

	node       *kept
	pods       *kept
	configMaps map[config.ConfigMapKey]*kept
	slices     *watchedSlices // nil before Watch

	requests chan struct{} // has an element if a label of the node asks for something else than before
	hurried  bool          // RequestedBefore has reported a request the last time

	lock   sync.Mutex
	newest *corev1.Node // the newest state that the agent has read or written
}

// NewObjects makes Objects without a watch: before Watch each observation reads from the API server.
func NewObjects(o Options) *Objects {
	return &Objects{o: o, configMaps: map[config.ConfigMapKey]*kept{}, requests: make(chan struct{}, 1)}
}

// Begin begins an observation: by what the watches have shown, or, after ReadAgain or if this one has to, by reading from the API server.
func (o *Objects) Begin(fresh bool) {
	o.fresh, o.again = o.again || o.node == nil || fresh, false
	o.ahead = nil
}

// podsAnswer is an answer of the API server.
type podsAnswer struct {
	pods []corev1.Pod
	err  error
}

// askForPods asks for the pods while the observation goes on. The API server may wait for a tenth of a second, until its cache has seen all that was written
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

// FreshFor reports whether a step may rest on this observation, which has to have read the API server if the step needs that. If it may not, or the step
// after it needs that, the next observation reads the API server.
func (o *Objects) FreshFor(step, next bool) bool {
	fresh := o.fresh || !step
	o.again = o.again || !fresh || next
	return fresh
}

// RequestedBefore waits until the labels of the node ask for something else, and reports whether they did before the end of the pause or ctx.
// If it has reported that the last time, it waits for the end, so that a user does not keep the loop busy by labels.
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

// TakeRequest begins a pass, which sees what the labels ask for until now. If that is something else than before, there is most likely something
// to do, for which the pass has to read the API server.
func (o *Objects) TakeRequest() {
	select {
	case <-o.requests:
		o.again = true
	default:
	}
}

// NoteRequest notes a request if the labels of both states of the node ask for different things. Objects that are no nodes ask for
// nothing.
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

// requestLabels are the labels by which users ask for something.
var requestLabels = []string{config.LabelProfile, config.LabelMIGConfig, config.LabelDevicePluginConfig}

// Node is the agent's node. It is at least as new as what the agent has read or written before. An observation that reads the API server asks for the pods at
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

// SawNode takes over the node as the agent has read it, or as its write has left it.
func (o *Objects) SawNode(node *corev1.Node) {
	o.lock.Lock()
	defer o.lock.Unlock()
	if o.newest == nil || o.newest.UID != node.UID || !older(node, o.newest) {
		o.newest = node
	}
}

// watchedNode returns the node of the watch, or the newer one that the agent has read or written. It returns nil if the watch has no node, or if the
// two are not one node: it was deleted and registered again, or the cluster restored from a backup, and only the API server knows which one is there.
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

// older compares two states of one object. If the versions cannot be compared, which never happens with Kubernetes, it returns false, so
// that the node which the agent has read or written counts.
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
