package agent_test

import (
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent"
)

// What decisions are made by is in the pod still, and what is only long is not.
func TestOfALargePodWhatCountsIsKept(t *testing.T) {
	pod := func(text string) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "large", Namespace: "team", UID: "uid", Labels: map[string]string{"app": "large"}, OwnerReferences: ofDaemonSet("large"),
				Finalizers: []string{"example.com/f"}, Annotations: map[string]string{"kubernetes.io/config.hash": "hash"},
			},
			Spec: corev1.PodSpec{
				NodeName: nodeName, NodeSelector: map[string]string{"a": "b"}, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
				Volumes: []corev1.Volume{
					{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
					{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/gpuslice"}}},
					{Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "configs"}}}},
				},
				ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}},
				Containers: []corev1.Container{{
					Name: "c", Command: []string{"run"}, Args: []string{"--mig-strategy=mixed"}, Env: []corev1.EnvVar{{Name: "MIG_STRATEGY", Value: "mixed"}},
					Resources:    corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}},
					VolumeMounts: []corev1.VolumeMount{{Name: "configs", MountPath: "/configs"}},
				}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "c", ContainerID: "containerd://1"}}},
		}
		if text != "" {
			p.Annotations["example.com/text"] = text
			p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env, corev1.EnvVar{Name: "TEXT", Value: text})
			p.ManagedFields = []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(`{"f:` + text + `":{}}`)}}
		}
		return p
	}
	pods, err := agent.PodsOf(t.Context(), fake.NewClientset(pod(strings.Repeat("x", 1<<20))), nodeName)
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d pods, %v", len(pods), err)
	}
	if size := pods[0].Size(); size > 8<<10 {
		t.Errorf("%d bytes are kept", size)
	}
	delete(pods[0].Annotations, "example.com/text")
	pods[0].Spec.Containers[0].Env = pods[0].Spec.Containers[0].Env[:1]
	if diff := cmp.Diff(pod(""), &pods[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A page that fails is asked for again with those before it: what it continues may be gone.
func TestPodsComeInPages(t *testing.T) {
	client, asked := fake.NewClientset(), 0
	client.PrependReactor("list", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		asked++
		name, next := "first", "more"
		switch asked {
		case 2:
			return true, nil, apierrors.NewInternalError(io.ErrUnexpectedEOF)
		case 4:
			name, next = "second", ""
		}
		return true, &corev1.PodList{ListMeta: metav1.ListMeta{Continue: next}, Items: []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: name}}}}, nil
	})
	pods, err := agent.PodsOf(t.Context(), client, nodeName)
	if err != nil || len(pods) != 2 || pods[0].Name != "first" || pods[1].Name != "second" {
		t.Errorf("%d pods, %v", len(pods), err)
	}
}
