package pods_test

import (
	"testing"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

func TestAPodIsOneProcessOnItsDeviceHoweverOftenItsKubeletStarts(t *testing.T) {
	gpus, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: gpusim.Models()[0]}}})
	if err != nil {
		t.Fatal(err)
	}
	processes := func() int {
		t.Helper()
		seen, err := gpus.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(seen[0].Processes)
	}
	pod, ids := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "user", UID: "1"}}, []string{gpus.UUIDs()[0] + "::3"}
	users := pods.Users{GPUs: gpus, Log: zap.NewNop()}
	for range 2 { // the second is a kubelet that finds the pod running
		users.Hold(pod, ids)
		if n := processes(); n != 1 {
			t.Errorf("%d processes on the GPU of one pod", n)
		}
	}
	users.Release(pod, ids)
	if n := processes(); n != 0 {
		t.Errorf("%d processes on the GPU after its pod has ended", n)
	}
}
