package e2e_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
)

// The agent has to distinguish this from a node on which nothing is assigned. The stand-in does the same by Options.ListDelay.
func TestAKubeletThatHasJustStartedListsNoPods(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 1}]")
	r.startPlugin(unshared)
	r.awaitAmount(gpu, 1, 1)
	r.pod("holder", gpu)
	before := r.awaitPod("holder", "to run", running)
	kubelet := holders.DialKubelet(realkubelet.PodResourcesSocket)
	defer kubelet.Close()
	if err := r.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	listed, err := kubelet.Assignments(t.Context())
	if err != nil || len(listed) > 0 {
		t.Errorf("right after its start kubelet lists %v, %v; want no pod, and no error", listed, err)
	}
	after := r.awaitPod("holder", "to be listed", running)
	if got, want := after.Pods["holder"].Devices, before.Pods["holder"].Devices; len(got) != 1 || got[0] != want[0] {
		t.Errorf("the pod has %v after the restart and had %v", got, want)
	}
}
