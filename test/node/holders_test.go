package node_test

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// Promise 3. Pods that were given no GPU and yet use one, as with NVIDIA_VISIBLE_DEVICES=all, are found by their processes:
// one computes on the GPU, the other only watches it. The pod on the other GPU, which stays as it is, is left alone.
func TestPodsThatWereGivenNoGPUAreFoundByTheirProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "migConfigMap: {name: first-of-two}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	first, second := r.GPUs.UUIDs()[0], r.GPUs.UUIDs()[1]
	for n, p := range []struct {
		name    string
		start   func(p pods.Process, devices ...string) error
		devices []string
	}{
		{"trainer", r.Users.Start, []string{first}},
		{"watcher", r.Users.StartMonitor, []string{first, second}},
		{"neighbour", r.Users.Start, []string{second}},
	} {
		r.pod(namespace, p.name, nil)
		pod := r.awaitPod(namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + p.name}, running)
		if err := p.start(pods.Process{PID: 4_194_305 + n, Command: p.name, Cgroup: pods.OfPod(pod)}, p.devices...); err != nil {
			t.Fatal(err)
		}
	}
	r.configMap("first-of-two", `version: v1
mig-configs:
  first-cut:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}}
`)
	p := r.run()
	r.label(config.LabelMIGConfig, "first-cut")
	leaves := map[string]int{"evict trainer": 4_194_305, "evict watcher": 4_194_306}
	for timeout := time.After(patience); len(leaves) > 0; {
		select {
		case step, ok := <-p.steps:
			pid, leaving := leaves[step]
			switch {
			case !ok || step == "evict neighbour":
				t.Fatalf("got %q, want %v", step, leaves)
			case leaving:
				delete(leaves, step)
				if err := r.Users.End(pid); err != nil { // kubelet would do it
					t.Fatal(err)
				}
			}
		case <-timeout:
			t.Fatalf("still there: %v", leaves)
		}
	}
	r.givenBack(r.awaitConverged("first-cut"))
	if after := r.GPUs.String(); !strings.Contains(after, "process 4194307 neighbour") {
		t.Errorf("the GPUs are\n%s", after)
	}
}
