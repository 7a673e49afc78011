package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

const (
	// retryDelay is between tries of what the API server or a volume has refused.
	retryDelay = 300 * time.Millisecond
	// stopGrace is what processes are given when the kubelet itself stops.
	stopGrace = 5 * time.Second
	// removedGrace is what processes are given when their pod is gone from the API server, as after a forced deletion.
	removedGrace = 2 * time.Second
)

// errKubeletStops ends a pod's life here; the pod continues under the next kubelet.
var errKubeletStops = errors.New("kubelet stops")

// worker leads one pod from its admission to the deletion of its object.
type worker struct {
	pods      *podWatch
	k         *Kubelet
	uid       types.UID
	log       *zap.Logger
	survived  bool // its containers ran before this kubelet started
	volumes   *volumes
	processes *sharedProcesses // nil unless the pod's containers share their process namespace
	wake      chan struct{}    // something of the pod has changed
	stopping  chan struct{}    // closed: containers are to end

	mu         sync.Mutex
	pod        *corev1.Pod // newest known
	removed    bool        // the object is gone from the API server
	ended      bool        // nothing of it runs, and its devices are free
	rejection  *rejection
	address    string
	containers []*container // in the order of the pod's init containers, then its containers
}

// rejection is why a pod was not admitted.
type rejection struct{ reason, message string }

func newWorker(p *podWatch, pod *corev1.Pod, survived bool) *worker {
	w := &worker{
		pods: p, k: p.k, uid: pod.UID, pod: pod, survived: survived,
		log:  p.log.With(zap.String("pod", pod.Namespace+"/"+pod.Name)),
		wake: make(chan struct{}, 1), stopping: make(chan struct{}),
	}
	w.volumes = newVolumes(w)
	w.processes = newSharedProcesses(w)
	w.containers = containersOf(pod, p.k.Images, survived)
	return w
}

func (w *worker) run(ctx context.Context) {
	defer w.pods.done(w)
	pod := w.latest()
	if isTerminal(pod) || (w.isDeleting() && !w.survived) {
		w.conclude(ctx)
		return
	}
	if err := w.admit(ctx); err != nil {
		if ctx.Err() == nil {
			w.report(ctx)
			w.conclude(ctx)
		}
		return
	}
	announce(w.k.OnAllocate, pod, w.k.devices.idsOfPod(w.uid))
	if w.claim(ctx) {
		claimed := w.k.claims.idsOf(w.uid)
		announce(w.k.OnAllocate, pod, claimed)
		if err := w.live(ctx); errors.Is(err, errKubeletStops) {
			return // the pod is still reported as running, on its devices
		}
		announce(w.k.OnFree, pod, claimed)
	}
	if ctx.Err() != nil || !w.unclaim(ctx) {
		return
	}
	w.conclude(ctx)
}

// admit gives the pod its devices, or notes why not.
func (w *worker) admit(ctx context.Context) error {
	if w.survived {
		return nil
	}
	pod := w.latest()
	err := w.k.devices.allocate(ctx, pod)
	reason := "UnexpectedAdmissionError"
	if err == nil {
		if name, lacking := w.k.node.lacks(pod); lacking != nil {
			reason, err = "OutOf"+name, lacking
		}
	}
	if err == nil {
		return nil
	}
	w.log.Warn("pod rejected", zap.String("reason", reason), zap.Error(err))
	w.k.devices.free(w.uid)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rejection = &rejection{reason: reason, message: "Pod was rejected: " + err.Error()}
	return err
}

// live runs the pod's containers until they have ended, by themselves or because the pod is deleted.
func (w *worker) live(ctx context.Context) error {
	address := w.pods.address(w.latest(), w.hasProcesses())
	w.mu.Lock()
	w.address = address
	w.mu.Unlock()

	kill, killAll := context.WithCancel(context.WithoutCancel(ctx))
	defer killAll()
	running := make(chan struct{})
	go func() {
		defer close(running)
		w.runContainers(kill)
	}()
	defer w.volumes.stop()
	for {
		select {
		case <-running:
			return nil
		default:
		}
		if w.isDeleting() || ctx.Err() != nil {
			break
		}
		w.report(ctx)
		select {
		case <-running:
			return nil
		case <-ctx.Done():
		case <-w.wake:
		}
	}
	w.terminate(ctx, running, killAll)
	if ctx.Err() != nil {
		return errKubeletStops
	}
	return nil
}

// terminate asks the containers to end, and kills what is left when the grace period is over. A second deletion may
// shorten it.
func (w *worker) terminate(ctx context.Context, running <-chan struct{}, killAll func()) {
	began := w.k.Clock.Now()
	close(w.stopping)
	for {
		timer := w.k.Clock.NewTimer(w.grace() - w.k.Clock.Since(began))
		select {
		case <-running:
			timer.Stop()
			return
		case <-timer.C():
			killAll()
			<-running
			return
		case <-ctx.Done():
			timer.Stop()
			w.abandon(running, killAll)
			return
		case <-w.wake:
			timer.Stop()
		}
	}
}

// abandon ends the processes because the kubelet stops. It uses real time: no one advances a test's clock any more.
// Containers without a process seem to continue.
func (w *worker) abandon(running <-chan struct{}, killAll func()) {
	if w.hasProcesses() {
		timer := time.NewTimer(stopGrace)
		defer timer.Stop()
		select {
		case <-running:
			return
		case <-timer.C:
		}
	}
	killAll()
	<-running
}

func (w *worker) grace() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	grace := 30 * time.Second
	if seconds := w.pod.Spec.TerminationGracePeriodSeconds; seconds != nil {
		grace = time.Duration(*seconds) * time.Second
	}
	if seconds := w.pod.DeletionGracePeriodSeconds; seconds != nil {
		grace = time.Duration(*seconds) * time.Second
	}
	if w.removed {
		return min(grace, removedGrace)
	}
	return grace
}

// conclude frees the devices, reports how the pod ended, and removes its object once someone requests its deletion.
func (w *worker) conclude(ctx context.Context) {
	w.pods.freed(w.latest())
	if err := w.volumes.remove(); err != nil {
		w.log.Warn("volumes not removed", zap.Error(err))
	}
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	for ctx.Err() == nil && !w.isRemoved() {
		w.report(ctx)
		if w.isDeleting() {
			w.deleteObject(ctx)
			return
		}
		select {
		case <-ctx.Done():
		case <-w.wake:
		}
	}
}

// deleteObject confirms the deletion. Finalizers may keep the object; then the API server removes it after the last of them.
func (w *worker) deleteObject(ctx context.Context) {
	pod, now := w.latest(), int64(0)
	for {
		err := w.k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &now, Preconditions: &metav1.Preconditions{UID: &pod.UID},
		})
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return
		}
		w.log.Warn("pod not deleted", zap.Error(err))
		if !w.sleep(ctx, retryDelay) {
			return
		}
	}
}

// report writes the pod's status if it differs from the API server's. It keeps what others wrote into it.
func (w *worker) report(ctx context.Context) {
	for !w.isRemoved() {
		before := w.latest()
		after := before.DeepCopy()
		w.fillStatus(after)
		patch, err := podPatch(before, after)
		if err != nil {
			w.log.Error("comparing the pod's status", zap.Error(err))
			return
		}
		if patch == nil {
			return
		}
		written, err := w.k.client.CoreV1().Pods(before.Namespace).Patch(ctx, before.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		switch {
		case err == nil:
			w.take(written)
			return
		case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // gone, or another pod of the same name
			return
		}
		if ctx.Err() != nil {
			return
		}
		w.log.Warn("pod status not written", zap.Error(err))
		if !w.sleep(ctx, retryDelay) {
			return
		}
	}
}

// podPatch is the change of status with the pod's UID as its condition; nil if there is none.
func podPatch(before, after *corev1.Pod) ([]byte, error) {
	patch, err := statusPatch(corev1.Pod{Status: before.Status}, corev1.Pod{Status: after.Status})
	if err != nil || string(patch) == "{}" {
		return nil, err
	}
	var fields map[string]any
	if err := json.Unmarshal(patch, &fields); err != nil {
		return nil, fmt.Errorf("reading a patch of our own: %w", err)
	}
	fields["metadata"] = map[string]any{"uid": before.UID}
	return json.Marshal(fields)
}

// sleep waits, and reports false if ctx ended before.
func (w *worker) sleep(ctx context.Context, d time.Duration) bool {
	timer := w.k.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C():
		return true
	}
}

// offer takes a version of the pod, which may be older than one known.
func (w *worker) offer(pod *corev1.Pod) {
	w.take(pod)
	w.poke()
}

func (w *worker) take(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if newer(w.pod, pod) {
		w.pod = pod
	}
}

// newer reports whether b may replace a as the known state of a pod.
func newer(a, b *corev1.Pod) bool {
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err != nil || order <= 0
}

// lost notes that the object is gone from the API server.
func (w *worker) lost() {
	w.mu.Lock()
	w.removed = true
	w.mu.Unlock()
	w.poke()
}

func (w *worker) poke() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *worker) latest() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

func (w *worker) isDeleting() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.removed || w.pod.DeletionTimestamp != nil
}

func (w *worker) isRemoved() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.removed
}

func (w *worker) hasEnded() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ended
}

func (w *worker) hasProcesses() bool {
	for _, c := range w.containers {
		if c.image != nil {
			return true
		}
	}
	return false
}

func isTerminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// lacks names a resource of which the pod requests more than the node has. It looks at the ghosts of lost plugins:
// resources that no device plugin manages any more, but the node's status still shows.
func (n *nodeReporter) lacks(pod *corev1.Pod) (string, error) {
	n.mu.Lock()
	allocatable := n.written.Status.Allocatable
	n.mu.Unlock()
	for _, c := range pod.Spec.Containers {
		for _, name := range resourceNames(c.Resources.Limits) {
			has, shown := allocatable[corev1.ResourceName(name)]
			wants := c.Resources.Limits[corev1.ResourceName(name)]
			if shown && isExtendedResource(name) && !byClaim(pod, c.Name, name) && !n.k.devices.isManaged(name) && has.Cmp(wants) < 0 {
				return name, fmt.Errorf("Node didn't have enough resource: %s, requested: %d, used: 0, capacity: %d", name, wants.Value(), has.Value()) //nolint:staticcheck // kubelet's own words
			}
		}
	}
	return "", nil
}
