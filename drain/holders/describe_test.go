package holders_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
)

func TestDescribeSaysWhatAPodLosesAndWhatBringsItBack(t *testing.T) {
	exists := []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	for name, c := range map[string]struct {
		change func(*corev1.Pod)
		want   holders.Pod // but for its name, namespace and UID
	}{
		"nothing": {func(*corev1.Pod) {}, holders.Pod{}},
		"a controller": {
			func(p *corev1.Pod) {
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "Cluster", Name: "c"}, {Kind: "Job", Name: "train", Controller: ptr.To(true)}}
			},
			holders.Pod{Controller: "Job/train"},
		},
		"an owner that is no controller": {
			func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{{Kind: "Cluster", Name: "c"}} },
			holders.Pod{},
		},
		"critical for the cluster":     {func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-cluster-critical" }, holders.Pod{Critical: true}},
		"critical for the node":        {func(p *corev1.Pod) { p.Spec.PriorityClassName = "system-node-critical" }, holders.Pod{Critical: true}},
		"the priority of critical":     {func(p *corev1.Pod) { p.Spec.Priority = ptr.To(int32(2_000_000_000)) }, holders.Pod{Critical: true}},
		"the highest of other classes": {func(p *corev1.Pod) { p.Spec.Priority = ptr.To(int32(1_000_000_000)) }, holders.Pod{}},
		"grace":                        {func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(90)) }, holders.Pod{Grace: 90 * time.Second}},
		"tolerations":                  {func(p *corev1.Pod) { p.Spec.Tolerations = exists }, holders.Pod{Tolerations: exists}},
		"ready": {
			func(p *corev1.Pod) {
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: "True"}, {Type: corev1.PodReady, Status: "True"}}
			},
			holders.Pod{Ready: true},
		},
		"not ready": {
			func(p *corev1.Pod) {
				p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: "False"}}
			},
			holders.Pod{},
		},
		"volumes": {
			func(p *corev1.Pod) {
				p.Spec.Volumes = []corev1.Volume{
					{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
					{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
					{Name: "huge", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumHugePages}}},
					{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}},
					{Name: "data", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data-0"}}},
					{Name: "cache", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
				}
			},
			holders.Pod{EmptyDirs: []string{"scratch"}, Claims: []string{"data-0", "a-cache"}},
		},
		"containers": {
			func(p *corev1.Pod) {
				runs := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
				ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
				p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "init", State: ended}, {Name: "sidecar", State: runs}}
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: runs}, {Name: "log", State: ended}, {Name: "late"}}
				p.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{{Name: "debug", State: runs}}
			},
			holders.Pod{Running: []string{"sidecar", "main", "debug"}, Started: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod("a", c.change)
			c.want.Namespace, c.want.Name, c.want.UID = "team", "a", "uid-a"
			c.want.Conditions = p.Status.Conditions
			if diff := cmp.Diff(c.want, holders.Describe(&p)); diff != "" {
				t.Errorf("Describe (-want +got):\n%s", diff)
			}
		})
	}
}
