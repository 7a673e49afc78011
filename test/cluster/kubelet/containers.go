package kubelet

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// maxRestartDelay bounds the back-off, in multiples of the first delay: kubelet goes from 10 s to 5 min.
const maxRestartDelay = 30

// exitKilled is the exit code of a process that SIGKILL ended.
const exitKilled = 137

// container is one container of a pod.
type container struct {
	spec    corev1.Container
	image   *Image // nil: only reported as running
	init    bool   // one of the pod's init containers
	adopted bool   // it runs already, as far as can be seen

	status corev1.ContainerStatus // guarded by the worker's mu
}

// containersOf takes over what the pod's status says of containers that ran before.
func containersOf(pod *corev1.Pod, images map[string]Image, survived bool) []*container {
	var all []*container
	add := func(spec corev1.Container, init bool, before []corev1.ContainerStatus) {
		c := &container{spec: spec, init: init, image: imageOf(images, spec)}
		c.status = corev1.ContainerStatus{
			Name: spec.Name, Image: spec.Image, ImageID: "standin://" + spec.Image,
			State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}},
		}
		for _, old := range before {
			if old.Name == spec.Name {
				c.remember(old, survived)
			}
		}
		all = append(all, c)
	}
	for _, spec := range pod.Spec.InitContainers {
		add(spec, true, pod.Status.InitContainerStatuses)
	}
	for _, spec := range pod.Spec.Containers {
		add(spec, false, pod.Status.ContainerStatuses)
	}
	return all
}

// imageOf is the program that runs for the container; nil if it is only reported as running.
func imageOf(images map[string]Image, spec corev1.Container) *Image {
	words := slices.Concat([]string{spec.Image}, spec.Command, spec.Args)
	for n := len(words); n > 0; n-- {
		if image, known := images[strings.Join(words[:n], " ")]; known {
			return &image
		}
	}
	return nil
}

// remember keeps the status of a container that survived, and counts a restart for one that did not.
func (c *container) remember(old corev1.ContainerStatus, survived bool) {
	if survived && (c.image == nil || c.init && old.State.Terminated != nil) {
		c.status, c.adopted = *old.DeepCopy(), true
		return
	}
	c.status.RestartCount = old.RestartCount
	if running := old.State.Running; running != nil {
		c.status.RestartCount++
		c.status.LastTerminationState.Terminated = &corev1.ContainerStateTerminated{
			ExitCode: exitKilled, Reason: "Error", StartedAt: running.StartedAt, ContainerID: old.ContainerID,
		}
	}
}

// set changes the status of a container and has it reported.
func (w *worker) set(c *container, change func(*corev1.ContainerStatus)) {
	w.mu.Lock()
	change(&c.status)
	w.mu.Unlock()
	w.poke()
}

// runContainers mounts the volumes, runs the init containers one after the other, then the others together. It returns
// when all have ended: by themselves, because the worker is stopping, or because kill has ended.
func (w *worker) runContainers(kill context.Context) {
	until, cancel := context.WithCancel(kill)
	defer cancel()
	go func() {
		select {
		case <-w.stopping:
			cancel()
		case <-until.Done():
		}
	}()
	if !w.mountVolumes(until) {
		return
	}
	var mains sync.WaitGroup
	defer mains.Wait()
	for _, c := range w.containers {
		if !c.init {
			mains.Go(func() { w.runContainer(kill, c) })
			continue
		}
		w.runContainer(kill, c)
		if !w.succeeded(c) {
			return
		}
	}
}

func (w *worker) mountVolumes(until context.Context) bool {
	for {
		err := w.volumes.mount(until)
		if err == nil {
			return true
		}
		if until.Err() == nil {
			w.log.Warn("volumes not mounted", zap.Error(err))
		}
		if !w.sleep(until, retryDelay) {
			return false
		}
	}
}

func (w *worker) succeeded(c *container) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return c.status.State.Terminated != nil && c.status.State.Terminated.ExitCode == 0
}

// runContainer runs one container until it has ended for good.
func (w *worker) runContainer(kill context.Context, c *container) {
	if c.image == nil {
		w.pretend(kill, c)
		return
	}
	if c.adopted {
		return // an init container that has done its work
	}
	delay := w.k.RestartDelay
	for {
		code, ran := w.runProcess(kill, c)
		if isClosed(w.stopping) || kill.Err() != nil || (ran && !w.restarts(c, code)) {
			return
		}
		w.set(c, func(s *corev1.ContainerStatus) {
			if ended := s.State.Terminated; ended != nil {
				s.LastTerminationState.Terminated = ended
				s.State = waiting("CrashLoopBackOff", "back-off "+delay.String()+" restarting the container")
			}
		})
		timer := w.k.Clock.NewTimer(delay)
		select {
		case <-timer.C():
		case <-w.stopping:
		case <-kill.Done():
		}
		timer.Stop()
		delay = min(2*delay, maxRestartDelay*w.k.RestartDelay)
	}
}

// restarts reports whether a container that ended with the code is to run again.
func (w *worker) restarts(c *container, code int32) bool {
	policy := w.latest().Spec.RestartPolicy
	if c.init {
		return code != 0 && policy != corev1.RestartPolicyNever
	}
	return policy == corev1.RestartPolicyAlways || policy == "" || (policy == corev1.RestartPolicyOnFailure && code != 0)
}

// pretend reports a container without a process as running until it is stopped. An init container ends at once.
func (w *worker) pretend(kill context.Context, c *container) {
	if !c.adopted {
		w.set(c, func(s *corev1.ContainerStatus) {
			w.started(s)
			s.Ready = !c.init
		})
	}
	if c.init {
		w.set(c, func(s *corev1.ContainerStatus) { w.terminated(s, 0) })
		return
	}
	select {
	case <-w.stopping:
	case <-kill.Done():
	}
	delay := w.k.TerminationDelay
	if own, err := time.ParseDuration(w.latest().Annotations[TerminationDelayAnnotation]); err == nil {
		delay = own
	}
	code := int32(0)
	if !w.sleep(kill, delay) {
		code = exitKilled
	}
	w.set(c, func(s *corev1.ContainerStatus) { w.terminated(s, code) })
}

// started turns the status into a running one of a container that has just started.
func (w *worker) started(s *corev1.ContainerStatus) {
	yes := true
	s.ContainerID = "standin://" + string(uuid.NewUUID())
	s.State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: w.now()}}
	s.Started = &yes
}

// terminated turns the status of a running container into a terminated one.
func (w *worker) terminated(s *corev1.ContainerStatus, code int32) {
	ended := &corev1.ContainerStateTerminated{ExitCode: code, Reason: "Completed", FinishedAt: w.now(), ContainerID: s.ContainerID}
	if code != 0 {
		ended.Reason = "Error"
	}
	if s.State.Running != nil {
		ended.StartedAt = s.State.Running.StartedAt
	}
	no := false
	s.State, s.Ready, s.Started = corev1.ContainerState{Terminated: ended}, false, &no
}

func (w *worker) now() metav1.Time {
	return metav1.NewTime(w.k.Clock.Now().Truncate(time.Second))
}

func waiting(reason, message string) corev1.ContainerState {
	return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
