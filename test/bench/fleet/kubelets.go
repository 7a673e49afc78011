package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// kubelets stand in for the kubelets and device plugins of all nodes. Pods that have a node run at once and end at once. When a device
// plugin's pod starts, it advertises what the GPUs of its node are cut into.
type kubelets struct {
	client kubernetes.Interface
	nodes  map[string]*node
	log    *zap.Logger

	store cache.Store
	queue workqueue.TypedInterface[types.NamespacedName]
}

// workers work off the pods of all nodes.
const workers = 8

func (k *kubelets) run(ctx context.Context) {
	k.queue = workqueue.NewTyped[types.NamespacedName]()
	add := func(object any) {
		if gone, is := object.(cache.DeletedFinalStateUnknown); is {
			object = gone.Obj
		}
		pod, is := object.(*corev1.Pod)
		if is && pod.Spec.NodeName != "" {
			k.queue.Add(types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name})
		}
	}
	var informer cache.Controller
	k.store, informer = cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(k.client.CoreV1().RESTClient(), "pods", metav1.NamespaceAll, fields.Everything()),
		ObjectType:    &corev1.Pod{},
		Handler:       cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, after any) { add(after) }, DeleteFunc: func(before any) { k.gone(ctx, before) }},
	})
	go informer.RunWithContext(ctx)
	for range workers {
		go func() {
			for {
				name, end := k.queue.Get()
				if end {
					return
				}
				if err := k.work(ctx, name); err != nil && ctx.Err() == nil {
					k.log.Warn("kubelet", zap.Stringer("pod", name), zap.Error(err))
					k.queue.Add(name)
				}
				k.queue.Done(name)
			}
		}()
	}
	context.AfterFunc(ctx, k.queue.ShutDown)
}

// work brings a pod to where a kubelet would have it.
func (k *kubelets) work(ctx context.Context, name types.NamespacedName) error {
	object, is, err := k.store.GetByKey(name.String())
	if err != nil || !is {
		return err
	}
	pod, isPod := object.(*corev1.Pod)
	if !isPod {
		return nil
	}
	n := k.nodes[pod.Spec.NodeName]
	switch {
	case n == nil:
		return nil
	case pod.DeletionTimestamp != nil:
		n.end(pod)
		return unlessGone(k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: new(int64), Preconditions: &metav1.Preconditions{UID: &pod.UID},
		}))
	case pod.Status.Phase == corev1.PodPending || pod.Status.Phase == "":
		n.begin(pod)
		if err := k.patchStatus(ctx, pod); err != nil {
			return err
		}
		if isPlugin(pod) {
			return k.offer(ctx, n, n.devices(ctx))
		}
	}
	return nil
}

// gone takes a pod off its node, and with the device plugin what it has offered.
func (k *kubelets) gone(ctx context.Context, object any) {
	if last, is := object.(cache.DeletedFinalStateUnknown); is {
		object = last.Obj
	}
	pod, is := object.(*corev1.Pod)
	if !is || k.nodes[pod.Spec.NodeName] == nil {
		return
	}
	n := k.nodes[pod.Spec.NodeName]
	n.end(pod)
	if isPlugin(pod) {
		if err := k.offer(ctx, n, map[string][]string{}); err != nil && ctx.Err() == nil {
			k.log.Warn("kubelet", zap.String("node", n.name), zap.Error(err))
		}
	}
}

// unlessGone drops the error about a pod that is gone, or that another has replaced.
func unlessGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// isPlugin recognizes the pods of manifests/device-plugin.yaml by their label.
func isPlugin(pod *corev1.Pod) bool { return pod.Labels["name"] == "nvidia-device-plugin-ds" }

func (k *kubelets) patchStatus(ctx context.Context, pod *corev1.Pod) error {
	container := corev1.ContainerStatus{Name: pod.Spec.Containers[0].Name, Ready: true, Started: new(true), State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": corev1.PodStatus{
		Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		ContainerStatuses: []corev1.ContainerStatus{container},
	}})
	if err != nil {
		return err
	}
	_, err = k.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
	return unlessGone(err)
}

// offer has kubelet report in the node's status what it can allocate. A name that was there once stays, at 0.
func (k *kubelets) offer(ctx context.Context, n *node, offered map[string][]string) error {
	list := n.offer(offered)
	body, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": list, "allocatable": list}})
	if err != nil {
		return err
	}
	if _, err := k.client.CoreV1().Nodes().Patch(ctx, n.name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status"); err != nil {
		return fmt.Errorf("reporting what node %s offers: %w", n.name, err)
	}
	return nil
}

// answers are a node's pods and devices, as its kubelet reports them.
type answers struct {
	lock    sync.Mutex
	offered map[string][]string
	names   map[string]bool
	given   holders.Assignments
}

// Assignments implements agent.Kubelet.
func (a *answers) Assignments(context.Context) (holders.Assignments, error) {
	a.lock.Lock()
	defer a.lock.Unlock()
	out := holders.Assignments{}
	for pod, given := range a.given {
		out[pod] = given
	}
	return out, nil
}

// Allocatable implements agent.Kubelet.
func (a *answers) Allocatable(context.Context) (map[string][]string, error) {
	a.lock.Lock()
	defer a.lock.Unlock()
	return a.offered, nil
}

// offer replaces what is offered, and returns the quantities for the node's status.
func (a *answers) offer(offered map[string][]string) corev1.ResourceList {
	a.lock.Lock()
	defer a.lock.Unlock()
	a.offered = offered
	for name := range offered {
		a.names[name] = true
	}
	list := corev1.ResourceList{}
	for name := range a.names {
		list[corev1.ResourceName(name)] = *resource.NewQuantity(int64(len(offered[name])), resource.DecimalSI)
	}
	return list
}

// give allocates to a pod the first device of each GPU resource that it requests, and returns the devices.
func (a *answers) give(pod *corev1.Pod) []string {
	a.lock.Lock()
	defer a.lock.Unlock()
	given, ids := map[string][]string{}, []string(nil)
	for name := range pod.Spec.Containers[0].Resources.Limits {
		if devices := a.offered[string(name)]; len(devices) > 0 {
			given[string(name)] = devices[:1]
			ids = append(ids, devices[0])
		}
	}
	a.given[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = given
	return ids
}

// take takes a pod's devices back.
func (a *answers) take(pod *corev1.Pod) []string {
	a.lock.Lock()
	defer a.lock.Unlock()
	name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	var ids []string
	for _, devices := range a.given[name] {
		ids = append(ids, devices...)
	}
	delete(a.given, name)
	return ids
}
