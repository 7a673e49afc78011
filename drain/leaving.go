package drain

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// systemCritical is the priority from which on a pod counts as critical for the cluster or for its node. PriorityClasses that
// people make lie below it.
const systemCritical = 2_000_000_000

func critical(spec *corev1.PodSpec) bool {
	return spec.PriorityClassName == "system-cluster-critical" || spec.PriorityClassName == "system-node-critical" ||
		ptr.Deref(spec.Priority, 0) >= systemCritical
}

func ready(status *corev1.PodStatus) bool {
	return slices.ContainsFunc(status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// running names the containers of any kind that run.
func running(status *corev1.PodStatus) []string {
	var out []string
	for _, c := range slices.Concat(status.InitContainerStatuses, status.ContainerStatuses, status.EphemeralContainerStatuses) {
		if c.State.Running != nil {
			out = append(out, c.Name)
		}
	}
	return out
}

// volumes names the volumes that are directories on the node's disk, and the claims of those that outlive the pod or have
// to be detached. An emptyDir in memory, or of huge pages, is memory: nobody expects it to stay.
func volumes(pod *corev1.Pod) (emptyDirs, claims []string) {
	for _, v := range pod.Spec.Volumes {
		switch {
		case v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumDefault:
			emptyDirs = append(emptyDirs, v.Name)
		case v.PersistentVolumeClaim != nil:
			claims = append(claims, v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil: // its claim is made for the pod, by this name
			claims = append(claims, pod.Name+"-"+v.Name)
		}
	}
	return emptyDirs, claims
}
