package state

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Picked returns the pods that match a selector and have one of the containers, if any are named: a chart may give pods of several programs the same labels.
func Picked(pods []corev1.Pod, any []labels.Selector, containers []string) []corev1.Pod {
	var out []corev1.Pod
	for i := range pods {
		has := len(containers) == 0 || slices.ContainsFunc(pods[i].Spec.Containers, func(c corev1.Container) bool { return slices.Contains(containers, c.Name) })
		if has && !Ended(&pods[i]) && Selected(&pods[i], any) {
			out = append(out, pods[i])
		}
	}
	return out
}

// Selected reports whether one of the selectors matches the pod.
func Selected(pod *corev1.Pod, any []labels.Selector) bool {
	return slices.ContainsFunc(any, func(s labels.Selector) bool { return s.Matches(labels.Set(pod.Labels)) })
}
