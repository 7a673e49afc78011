package agent_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// pretend makes a pod with the labels of the device plugin, and with another MIG strategy.
func pretend(namespace string, owners []metav1.OwnerReference) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Namespace, p.OwnerReferences = namespace, owners
		p.Labels = map[string]string{"app": "nvidia-device-plugin-daemonset"}
		p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		p.Spec.Containers = []corev1.Container{
			{Name: "nvidia-device-plugin", Env: []corev1.EnvVar{{Name: "MIG_STRATEGY", Value: "none"}}},
			{Name: "config-manager", Env: []corev1.EnvVar{
				{Name: "NODE_LABEL", Value: "example.com/mine"}, {Name: "CONFIG_FILE_SRCDIR", Value: "/configs"},
			}, VolumeMounts: []corev1.VolumeMount{{Name: "configs", MountPath: "/configs"}}},
			{Name: "mps-control-daemon-ctr"},
		}
		p.Spec.Volumes = []corev1.Volume{{Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "mine"},
		}}}}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{
			Name:                 "nvidia-device-plugin",
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1, FinishedAt: metav1.NewTime(time.Now().Add(time.Hour)), Message: "call 0900 1234"}},
		}}
	}
}

// Promise 15: Believe only what this host's agent wrote. A user who may create pods may give one the labels of the device plugin.
func TestATenantsPodIsNoDevicePlugin(t *testing.T) {
	old := ofDaemonSet("plugin")
	old[0].APIVersion = "none.example/v1"
	for _, c := range []struct {
		name, namespace string
		owners          []metav1.OwnerReference
	}{
		{"in a namespace of its own", "a-team", nil},
		{"in a namespace of its own, with a DaemonSet", "a-team", ofDaemonSet("mine")},
		{"in one of the settings, without a DaemonSet", "gpu-operator", nil},
		{"in one of the settings, of a DaemonSet that does not exist", "gpu-operator", ofDaemonSet(noDaemonSet)},
		{"in one of the settings, of something else of that name", "gpu-operator", old},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.converge("all-balanced")
				w.pod("pretender", "", pretend(c.namespace, c.owners))
				w.spend(time.Minute)
				if got := w.condition(); got.Status != corev1.ConditionTrue {
					t.Errorf("a node that has converged says %s, %s: %s", got.Status, got.Reason, got.Message)
				}
				w.converge("all-disabled")
			})
		})
	}
}

func TestTwoDevicePluginsThatDisagreeAreReportedAndNoneIsChosen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		w.pod("second", "", pretend("gpu-operator", ofDaemonSet("second")))
		w.label("all-balanced")
		got := w.settle(config.ReasonWrongMIGStrategy, config.ReasonAwaitingCapacity)
		if got.Status == corev1.ConditionTrue || !strings.Contains(got.Message, "gpu-operator/second") || !strings.Contains(got.Message, "kube-system/plugin-") {
			t.Errorf("the node says %s, %s: %s; want both pods named", got.Status, got.Reason, got.Message)
		}
		if w.hasJournal() {
			t.Error("a change has begun")
		}
	})
}

func TestNothingIsDoneWhileTheOwnerOfAPodIsNotKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-disabled")
		refused := true
		w.client.PrependReactor("get", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) {
			return refused, nil, apierrors.NewForbidden(schema.GroupResource{Group: "apps", Resource: "daemonsets"}, "plugin", errors.New("no"))
		})
		w.restart()
		w.label("all-balanced")
		w.spend(time.Minute)
		if got := w.condition(); w.hasJournal() || !strings.Contains(got.Message, "daemonsets of the group apps") {
			t.Errorf("a change has begun: %t; the node says %s: %s", w.hasJournal(), got.Reason, got.Message)
		}
		refused = false
		w.converge("all-balanced")
	})
}

// A tenant may give a pod any label. The agent takes a pod for a mig-manager only if it is of a DaemonSet.
func TestAPodWithTheLabelOfAMIGManagerKeepsNoNodeFromItsChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployOperands(map[string]string{labelDCGM: "paused-for-mig-change", config.LabelDevicePlugin: "true"})
		w.pod("mallory", "", func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": "nvidia-mig-manager"}
			p.OwnerReferences = ofDaemonSet(noDaemonSet)
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		})
		w.label("all-1g.10gb")
		w.spend(10 * time.Minute)
		if !w.done("all-1g.10gb")() {
			t.Errorf("%s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}
