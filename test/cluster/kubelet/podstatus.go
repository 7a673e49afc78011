package kubelet

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ownPodConditions are the types that kubelet writes, and removes from a pod that it rejects.
var ownPodConditions = []corev1.PodConditionType{
	corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady,
}

// fillStatus sets what a kubelet says of a pod, and leaves the rest.
func (w *worker) fillStatus(pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := metav1.NewTime(w.k.Clock.Now().Truncate(time.Second))
	s := &pod.Status
	s.ObservedGeneration = pod.Generation
	if s.StartTime == nil {
		s.StartTime = &now
	}
	if w.rejection != nil {
		s.Phase, s.Reason, s.Message = corev1.PodFailed, w.rejection.reason, w.rejection.message
		s.InitContainerStatuses, s.ContainerStatuses = nil, nil
		s.Conditions = slices.DeleteFunc(s.Conditions, func(c corev1.PodCondition) bool { return slices.Contains(ownPodConditions, c.Type) })
		return
	}
	if isTerminal(pod) || w.address == "" {
		return // it ended before this kubelet, or never began
	}
	s.HostIP, s.HostIPs = nodeAddress, []corev1.HostIP{{IP: nodeAddress}}
	s.PodIP, s.PodIPs = w.address, []corev1.PodIP{{IP: w.address}}
	s.InitContainerStatuses, s.ContainerStatuses = nil, nil
	for _, c := range w.containers {
		status := *c.status.DeepCopy()
		if c.init {
			s.InitContainerStatuses = append(s.InitContainerStatuses, status)
		} else {
			s.ContainerStatuses = append(s.ContainerStatuses, status)
		}
	}
	s.Phase = w.phase()
	initialized, ready := initDone(w.containers), allReady(w.containers)
	done := s.Phase == corev1.PodSucceeded
	setPodCondition(s, pod.Generation, corev1.PodReadyToStartContainers, !w.ended, "", now)
	setPodCondition(s, pod.Generation, corev1.PodInitialized, initialized, unless(initialized, "ContainersNotInitialized"), now)
	for _, t := range []corev1.PodConditionType{corev1.PodReady, corev1.ContainersReady} {
		reason := unless(ready, "ContainersNotReady")
		if done {
			reason = "PodCompleted"
		}
		setPodCondition(s, pod.Generation, t, ready && !w.ended, reason, now)
	}
}

// phase sums up the containers. The caller holds w.mu.
func (w *worker) phase() corev1.PodPhase {
	begun, failed, over := false, false, true
	for _, c := range w.containers {
		ended := c.status.State.Terminated
		failed = failed || (ended != nil && ended.ExitCode != 0)
		if !c.init {
			begun = begun || ended != nil || c.status.State.Running != nil || c.status.RestartCount > 0
			over = over && ended != nil
		}
	}
	switch {
	case w.ended && over && !failed:
		return corev1.PodSucceeded
	case w.ended:
		return corev1.PodFailed
	case begun:
		return corev1.PodRunning
	}
	return corev1.PodPending
}

func initDone(containers []*container) bool {
	for _, c := range containers {
		if t := c.status.State.Terminated; c.init && (t == nil || t.ExitCode != 0) {
			return false
		}
	}
	return true
}

func allReady(containers []*container) bool {
	for _, c := range containers {
		if !c.init && !c.status.Ready {
			return false
		}
	}
	return true
}

func unless(fine bool, reason string) string {
	if fine {
		return ""
	}
	return reason
}

func setPodCondition(s *corev1.PodStatus, generation int64, t corev1.PodConditionType, holds bool, reason string, now metav1.Time) {
	value := corev1.ConditionFalse
	if holds {
		value = corev1.ConditionTrue
	}
	for i := range s.Conditions {
		c := &s.Conditions[i]
		if c.Type != t {
			continue
		}
		if c.Status != value {
			c.LastTransitionTime = now
		}
		c.Status, c.Reason, c.ObservedGeneration = value, reason, generation
		return
	}
	s.Conditions = append(s.Conditions, corev1.PodCondition{Type: t, Status: value, Reason: reason, LastTransitionTime: now, ObservedGeneration: generation})
}
