package holders

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/nvml"
)

// Describe gives the pod without its devices, which only kubelet knows. It takes the pod's word for its owner; see DaemonSets.
func Describe(pod *corev1.Pod) Pod {
	p := Pod{
		Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Labels: pod.Labels, Annotations: pod.Annotations, Conditions: pod.Status.Conditions,
		Requests:    requests(&pod.Spec),
		Critical:    isCritical(&pod.Spec),
		Ready:       isReady(&pod.Status),
		Grace:       time.Duration(ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, 0)) * time.Second,
		Tolerations: pod.Spec.Tolerations,
		Running:     running(&pod.Status),
		Started:     HasStarted(pod),
		Terminating: pod.DeletionTimestamp != nil,
		Finalizers:  pod.Finalizers,
	}
	p.EmptyDirs, p.Claims = volumes(pod)
	if pod.DeletionTimestamp != nil {
		p.GraceEnds = pod.DeletionTimestamp.Time
	}
	p.Mirror = isMirror(pod)
	if owner := metav1.GetControllerOf(pod); owner != nil {
		p.Controller = owner.Kind + "/" + owner.Name
		_, p.Daemon = DaemonSetOf(pod)
	}
	return p
}

// systemCritical is the lowest priority of a pod that counts as critical for the cluster or for its node. PriorityClasses of users lie below it.
const systemCritical = 2_000_000_000

func isCritical(spec *corev1.PodSpec) bool {
	return spec.PriorityClassName == "system-cluster-critical" || spec.PriorityClassName == "system-node-critical" ||
		ptr.Deref(spec.Priority, 0) >= systemCritical
}

func isReady(status *corev1.PodStatus) bool {
	return slices.ContainsFunc(status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// HasStarted reports whether a container of the pod has started, whether it runs or has ended.
func HasStarted(pod *corev1.Pod) bool {
	status := &pod.Status
	return slices.ContainsFunc(slices.Concat(status.InitContainerStatuses, status.ContainerStatuses, status.EphemeralContainerStatuses), func(c corev1.ContainerStatus) bool {
		return c.State.Running != nil || c.State.Terminated != nil || c.LastTerminationState.Terminated != nil
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
// to be detached. An emptyDir in memory, or of huge pages, is left out: its files are lost with any restart.
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

// requests adds up the GPU resources of a pod as the scheduler does. Sidecars run next to the containers; an ordinary init container runs alone with
// the sidecars that were started before it.
func requests(spec *corev1.PodSpec) map[string]int64 {
	running, peak := map[string]int64{}, map[string]int64{}
	for _, c := range spec.InitContainers {
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		for name, n := range gpuRequests(c.Resources) {
			peak[name] = max(peak[name], running[name]+n)
			if sidecar {
				running[name] += n
			}
		}
	}
	for _, c := range spec.Containers {
		for name, n := range gpuRequests(c.Resources) {
			running[name] += n
		}
	}
	for _, c := range spec.EphemeralContainers {
		for name, n := range gpuRequests(c.Resources) {
			running[name] += n
		}
	}
	for name, n := range running {
		peak[name] = max(peak[name], n)
	}
	if len(peak) == 0 {
		return nil
	}
	return peak
}

// gpuRequests is the larger of limit and request for each GPU resource. The API server holds them equal.
func gpuRequests(r corev1.ResourceRequirements) map[string]int64 {
	out := map[string]int64{}
	for _, list := range []corev1.ResourceList{r.Limits, r.Requests} {
		for name, q := range list {
			if nvml.GPUResource(string(name)) && q.Value() > 0 {
				out[string(name)] = max(out[string(name)], q.Value())
			}
		}
	}
	return out
}
