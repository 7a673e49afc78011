package main

import (
	"testing"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

func TestAPodIsOneProcessOnItsDeviceHoweverOftenItsKubeletStarts(t *testing.T) {
	dir := t.TempDir()
	gpus, err := gpusim.Create(dir, gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: gpusim.Models()[0]}}})
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
	for range 2 { // the second is a kubelet that finds the pod running
		o := kubelet.Options{Log: zap.NewNop()}
		if err := showPods(&o, dir); err != nil {
			t.Fatal(err)
		}
		o.OnAllocate(pod, ids)
		if n := processes(); n != 1 {
			t.Errorf("%d processes on the GPU of one pod", n)
		}
	}
	o := kubelet.Options{Log: zap.NewNop()}
	if err := showPods(&o, dir); err != nil {
		t.Fatal(err)
	}
	o.OnFree(pod, ids)
	if n := processes(); n != 0 {
		t.Errorf("%d processes on the GPU after its pod has ended", n)
	}
}
