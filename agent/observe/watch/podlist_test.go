package watch_test

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// answer is the API server's answer to a list of pods.
func answer(t *testing.T, pods ...*corev1.Pod) string {
	t.Helper()
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: "7"}}
	for _, p := range pods {
		list.Items = append(list.Items, *p)
	}
	var b bytes.Buffer
	if err := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(&list, &b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// listFrom lists the pods of a server that gives these answers, one after the other.
func listFrom(t *testing.T, answers ...string) ([]corev1.Pod, error) {
	t.Helper()
	asked := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if r.URL.Path != "/api/v1/pods" || q.Get("fieldSelector") != "spec.nodeName=gpu-1" || q.Has("limit") || q.Has("resourceVersion") {
			t.Errorf("asked for %s, which is not answered from the cache of the API server with what is there now", r.URL)
		}
		if got := r.Header.Get("Accept"); got != runtime.ContentTypeProtobuf {
			t.Errorf("the agent accepts %s", got)
		}
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		text := answers[min(asked, len(answers)-1)]
		if text == "" {
			w.WriteHeader(http.StatusInternalServerError)
		}
		asked++
		_, _ = io.WriteString(w, text)
	}))
	defer server.Close()
	client, err := kube.New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return watch.Lister{Client: client, Node: "gpu-1"}.List(t.Context())
}

// The pod keeps what the agent decides by, and loses texts that are only long.
func TestOfALargePodWhatCountsIsKept(t *testing.T) {
	visible := corev1.EnvVar{Name: "NVIDIA_VISIBLE_DEVICES", ValueFrom: &corev1.EnvVarSource{}}
	pod := func(text string) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: "large", Namespace: "team", UID: "uid", Labels: map[string]string{"app": "large"},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "large", UID: "set", Controller: new(true)}},
				Finalizers:      []string{"example.com/f"}, Annotations: map[string]string{"kubernetes.io/config.hash": "hash"},
			},
			Spec: corev1.PodSpec{
				NodeName: "gpu-1", NodeSelector: map[string]string{"a": "b"}, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
				Volumes: []corev1.Volume{
					{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
					{Name: "host", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/gpuslice"}}},
					{Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "configs"}}}},
				},
				ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu"}},
				Containers: []corev1.Container{{
					Name: "c", Command: []string{"run"}, Args: []string{"--mig-strategy=mixed"}, Env: []corev1.EnvVar{visible, {Name: "MIG_STRATEGY", Value: "mixed"}},
					Resources:    corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}},
					VolumeMounts: []corev1.VolumeMount{{Name: "configs", MountPath: "/configs"}},
				}},
				EphemeralContainers: []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", Env: []corev1.EnvVar{visible}}}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "c", ContainerID: "containerd://1"}}},
		}
		if text != "" {
			p.Annotations["example.com/text"] = text
			c := &p.Spec.Containers[0]
			c.Env = slices.Concat(c.Env[1:], []corev1.EnvVar{{Name: "TEXT", Value: text}}, make([]corev1.EnvVar, 300), []corev1.EnvVar{visible})
			p.Spec.EphemeralContainers[0].Command = []string{text}
			p.ManagedFields = []metav1.ManagedFieldsEntry{{FieldsV1: metav1.NewFieldsV1(`{"f:` + text + `":{}}`)}}
		}
		return p
	}
	pods, err := listFrom(t, answer(t, pod(strings.Repeat("x", 1<<20))))
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d pods, %v", len(pods), err)
	}
	if size := pods[0].Size(); size > 8<<10 {
		t.Errorf("%d bytes are kept", size)
	}
	delete(pods[0].Annotations, "example.com/text")
	pods[0].Spec.Containers[0].Env = pods[0].Spec.Containers[0].Env[:2]
	if diff := cmp.Diff(pod(""), &pods[0]); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A list whose end is missing may lack pods that hold GPUs.
func TestAListWithoutItsEndIsNone(t *testing.T) {
	whole := answer(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "b"}})
	const afterTheList = len("\x1a\x00\x22\x00") // that it is not compressed, and no JSON
	for cut := range len(whole) - afterTheList {
		if pods, err := watch.ReadStream(strings.NewReader(whole[:cut])); err == nil {
			t.Fatalf("of %q: %d pods and no error", whole[:cut], len(pods.Items))
		}
	}
	for _, other := range []string{
		`{"items":[]}`, "k8s\x00", "k8s\x00\x12\x02\x12\x01", "k8s\x00\x12\x03\x12\x01\xff", "k8s\x00\x10\x01", "k8s\x00\x0a\xff\xff\xff\xff\x7f",
		"k8s\x00\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x12\xff\xff\xff\xff\x7f",
	} {
		if pods, err := watch.ReadStream(strings.NewReader(other)); err == nil {
			t.Errorf("of %q: %d pods and no error", other, len(pods.Items))
		}
	}
}

func TestAListThatFailsForAMomentIsAskedForAgain(t *testing.T) {
	a := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a"}}
	pods, err := listFrom(t, "", answer(t, a))
	if err != nil || len(pods) != 1 || pods[0].Name != "a" {
		t.Errorf("%d pods, %v", len(pods), err)
	}
	if pods, err := listFrom(t, answer(t)); err != nil || len(pods) != 0 {
		t.Errorf("of an empty node: %d pods, %v", len(pods), err)
	}
}
