package holders_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders"
)

func TestNameClients(t *testing.T) {
	trainer := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "trainer-0", UID: podUID}}
	static := corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "kube-system", Name: "monitor-node-1", UID: "ffffffff-0000-0000-0000-000000000000",
	}}
	custom := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "own-uid-node-1"}}
	mirror(&static, hash)
	mirror(&custom, "my_own-uid")
	plain := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-b", Name: "plain", UID: "eeeeeeee-0000-0000-0000-000000000000"},
		Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{ContainerID: ""}, {ContainerID: "containerd://" + other}}},
	}
	pods := []corev1.Pod{trainer, static, custom, plain}
	for _, c := range []struct {
		client holders.Client
		want   string
	}{
		{holders.Client{PID: 4711, Command: "python", Owner: holders.Owner{PodUID: podUID, Container: id}}, "pid 4711 python of pod team-a/trainer-0"},
		{holders.Client{PID: 12, Command: "dcgm-exporter", Owner: holders.Owner{PodUID: hash}}, "pid 12 dcgm-exporter of pod kube-system/monitor-node-1"},
		{holders.Client{PID: 12, Command: "python", Owner: holders.Owner{PodUID: "my-own-uid"}}, "pid 12 python of pod kube-system/own-uid-node-1"},
		{holders.Client{PID: 13, Command: "python", Owner: holders.Owner{Container: other}}, "pid 13 python of pod team-b/plain"},
		// The pod's own word counts more than the container's.
		{holders.Client{PID: 14, Command: "python", Owner: holders.Owner{PodUID: "0-0", Container: other}}, "pid 14 python (pod with UID 0-0)"},
		{holders.Client{PID: 812, Command: "nvidia-persiste", Owner: holders.Owner{Unit: "nvidia-persistenced.service"}}, "pid 812 nvidia-persiste of nvidia-persistenced.service"},
		{holders.Client{PID: 99, Command: "dcgm-exporter", Owner: holders.Owner{Container: id}}, "pid 99 dcgm-exporter (container 3f2a9c51d0e7)"},
		{holders.Client{PID: 99, Command: "python"}, "pid 99 python"},
		{holders.Client{PID: 99, Unlisted: true}, "pid 99 (reported by NVML, not in the process table)"},
		{holders.Client{PID: 700, Command: "gpuslice-agent", Self: true, Owner: holders.Owner{PodUID: podUID}}, "pid 700 gpuslice-agent (the agent itself)"},
	} {
		t.Run(c.want, func(t *testing.T) {
			if got := holders.NameClients([]holders.Client{c.client}, pods); len(got) != 1 || got[0] != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
	if got := holders.NameClients(nil, pods); len(got) != 0 {
		t.Errorf("of no clients, got %q", got)
	}
	if want, got := "pid 4711 python (pod with UID "+podUID+")", fmt.Sprint(holders.Client{PID: 4711, Command: "python", Owner: holders.Owner{PodUID: podUID}}); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Promise 15: Believe only what this host's agent wrote. A tenant's pod says of itself that the processes of others are its own.
func TestNoPodTakesTheProcessesOfAnother(t *testing.T) {
	trainer := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "trainer-0", UID: podUID}}
	of := func(uid string) []holders.Client {
		return []holders.Client{{PID: 11, Command: "python", Owner: holders.Owner{PodUID: types.UID(uid), Container: id}}}
	}
	pretender := func(name, hash string, image bool) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-b", Name: name, UID: types.UID("uid-" + name)}}
		mirror(&p, hash)
		if !image {
			delete(p.Annotations, corev1.MirrorPodAnnotationKey)
		}
		return p
	}
	elsewhere := pretender("elsewhere", hash, true)
	elsewhere.OwnerReferences[0].Name = "gpu-2"
	for _, c := range []struct {
		name string
		uid  string
		pods []corev1.Pod
		want string
	}{
		{"by the annotation alone", podUID, []corev1.Pod{trainer, pretender("a", podUID, false)}, "pid 11 python of pod team-a/trainer-0"},
		{"of a pod that is listed", podUID, []corev1.Pod{trainer, pretender("a", podUID, true)}, "pid 11 python of pod team-a/trainer-0"},
		{"of a pod that is not, by the annotation alone", hash, []corev1.Pod{pretender("a", hash, false)}, "pid 11 python (pod with UID " + hash + ")"},
		{"as the image of another node's pod", hash, []corev1.Pod{elsewhere}, "pid 11 python (pod with UID " + hash + ")"},
		{"of a static pod that has an image already", hash, []corev1.Pod{pretender("a", hash, true), pretender("b", hash, true)}, "pid 11 python (pod with UID " + hash + ")"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := holders.NameClients(of(c.uid), c.pods); got[0] != c.want {
				t.Errorf("got %q, want %q", got[0], c.want)
			}
		})
	}
}

func TestKnownProgramsHaveARemedy(t *testing.T) {
	for _, program := range []string{
		"nvidia-persistenced", "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "nvsm_core", "nvsm-api-gateway",
		"nvidia-smi", "nvidia-device-plugin", "gpu-feature-discovery", "nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-mig-manager",
	} {
		command := program[:min(len(program), 15)] // TASK_COMM_LEN is 16, with the final zero
		if (holders.Client{Command: command}).Remedy() == "" {
			t.Errorf("no remedy for %s, which shows as %s", program, command)
		}
	}
	for _, command := range []string{"", "python", "nvidia", "Xorg"} {
		if got := (holders.Client{Command: command}).Remedy(); got != "" {
			t.Errorf("%q has remedy %q, want none", command, got)
		}
	}
}
