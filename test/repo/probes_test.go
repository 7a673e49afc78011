package repo_test

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// A loop that hangs is noticed by nobody else, and by a pod that is available when it starts a bad release comes to all nodes.
func TestTheAgentsPodIsAskedWhetherItWorks(t *testing.T) {
	set := the[*appsv1.DaemonSet](t, "gpuslice-agent").Spec
	container := set.Template.Spec.Containers[0]
	for name, probe := range map[string]*corev1.Probe{"startup": container.StartupProbe, "liveness": container.LivenessProbe, "readiness": container.ReadinessProbe} {
		if probe == nil || probe.Exec == nil || !slices.Contains(probe.Exec.Command, "health") {
			t.Errorf("the %s probe is %v", name, probe)
		}
	}
	if set.MinReadySeconds < 30 {
		t.Errorf("a pod counts as available after %d seconds", set.MinReadySeconds)
	}
}
