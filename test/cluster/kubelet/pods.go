package kubelet

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	informers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// listTimeout is how long a kubelet may wait for the first list of its pods.
const listTimeout = 30 * time.Second

// podWatch follows the pods that are bound to the node, and keeps a worker for each. Its lock comes before a worker's.
type podWatch struct {
	k   *Kubelet
	log *zap.Logger

	mu      sync.Mutex
	workers map[types.UID]*worker
	ips     int  // pod addresses assigned so far
	closed  bool // no more workers
	work    sync.WaitGroup
	cancel  context.CancelFunc
}

func newPodWatch(k *Kubelet) *podWatch {
	return &podWatch{k: k, log: k.Log.Named("pods"), workers: map[types.UID]*worker{}}
}

// start lists the pods, releases the devices of those that are gone, and follows the rest until ctx ends or stop.
func (p *podWatch) start(ctx context.Context) error {
	ctx, p.cancel = context.WithCancel(ctx)
	// Containers survive a stopped kubelet, but not a reboot or a new machine.
	survive := !p.k.devices.isNew()
	informer := informers.NewFilteredPodInformer(p.k.client, metav1.NamespaceAll, 0, nil, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", p.k.Node).String()
	})
	handler, err := informer.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(object any, initial bool) { p.seen(ctx, object, initial && survive) },
		UpdateFunc: func(_, object any) { p.seen(ctx, object, false) },
		DeleteFunc: p.removed,
	})
	if err != nil {
		return fmt.Errorf("watching the pods of node %s: %w", p.k.Node, err)
	}
	p.work.Go(func() { informer.RunWithContext(ctx) })
	listing, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	if !cache.WaitForCacheSync(listing.Done(), handler.HasSynced) {
		return fmt.Errorf("listing the pods of node %s: no answer in %v", p.k.Node, listTimeout)
	}
	for _, pod := range p.k.devices.owners() {
		if !p.knows(pod.UID) {
			p.freed(pod)
		}
	}
	for _, pod := range p.k.claims.owners() {
		if !p.knows(pod.UID) {
			p.work.Go(func() { p.unclaim(ctx, pod) })
		}
	}
	return nil
}

// unclaim makes the drivers unprepare the claims of a pod that was deleted while no kubelet ran.
func (p *podWatch) unclaim(ctx context.Context, pod *corev1.Pod) {
	announce(p.k.OnFree, pod, p.k.claims.idsOf(pod.UID))
	for p.k.unprepare(ctx, pod.UID) != nil {
		timer := p.k.Clock.NewTimer(retryDelay)
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return
		}
	}
}

// stop ends the processes of all pods and returns when they are dead.
func (p *podWatch) stop() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	if p.cancel != nil {
		p.cancel()
	}
	p.work.Wait()
}

func (p *podWatch) seen(ctx context.Context, object any, survived bool) {
	pod, isPod := object.(*corev1.Pod)
	if !isPod || pod.Spec.NodeName != p.k.Node {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.workers[pod.UID]; w != nil {
		w.offer(pod)
		return
	}
	if p.closed {
		return
	}
	w := newWorker(p, pod, survived && pod.Status.Phase == corev1.PodRunning)
	p.workers[pod.UID] = w
	p.work.Go(func() { w.run(ctx) })
}

func (p *podWatch) removed(object any) {
	if last, isTombstone := object.(cache.DeletedFinalStateUnknown); isTombstone {
		object = last.Obj
	}
	pod, isPod := object.(*corev1.Pod)
	if !isPod {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.workers[pod.UID]; w != nil {
		w.lost()
		if w.hasEnded() {
			delete(p.workers, pod.UID)
		} // else it keeps its devices until its processes have ended, and done removes it
	}
}

// done takes from a worker that it has nothing more to do. It stays known as long as its object exists.
func (p *podWatch) done(w *worker) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w.isRemoved() {
		delete(p.workers, w.uid)
	}
}

func (p *podWatch) knows(uid types.UID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers[uid] != nil
}

// active are the pods that have not ended, by namespace and name.
func (p *podWatch) active() []*corev1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	var pods []*corev1.Pod
	for _, w := range p.workers {
		if !w.hasEnded() {
			pods = append(pods, w.latest())
		}
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return pods
}

// freed releases the pod's devices, and reports it.
func (p *podWatch) freed(pod *corev1.Pod) {
	announce(p.k.OnFree, pod, p.k.devices.free(pod.UID))
}

// announce calls a hook of Options, if there is one, with the devices that a pod has or had.
func announce(hook func(*corev1.Pod, []string), pod *corev1.Pod, ids []string) {
	if len(ids) > 0 && hook != nil {
		hook(pod, ids)
	}
}

// address is the pod's IP: the node's own where processes run, since they listen on the machine itself.
func (p *podWatch) address(pod *corev1.Pod, processes bool) string {
	if pod.Spec.HostNetwork || processes {
		return nodeAddress
	}
	if pod.Status.PodIP != "" {
		return pod.Status.PodIP
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ips++
	subnet := fnv.New32a()
	_, _ = subnet.Write([]byte(p.k.Node)) // a hash takes everything
	return fmt.Sprintf("10.%d.%d.%d", 128+subnet.Sum32()%128, p.ips/250%256, p.ips%250+1)
}
