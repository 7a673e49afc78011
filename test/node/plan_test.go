package node_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// The command as a person runs it on the node: it names the pods that would have to leave, and changes nothing.
func TestAPlanNamesThePodsThatWouldLeave(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "holder", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "holder")
	before := r.GPUs.String()

	var out []byte
	var err error
	for began := time.Now(); time.Since(began) < patience; {
		cmd := exec.Command(r.Parts.Agent, append([]string{"plan", "--mig-config", "all-balanced"}, r.flags()...)...)
		cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.GPUs.Dir())
		// The agent would wait for a kubelet that has just started, and so says the plan.
		if out, err = cmd.CombinedOutput(); !strings.HasPrefix(string(out), r.Name+": would be held up: KubeletUnavailable: ") {
			break
		}
	}
	if err != nil {
		t.Fatalf("plan: %v\n%s", err, out)
	}
	for _, say := range []string{
		r.Name + ": begins at once: no window restricts it\n", "Lost for good: pod " + namespace + "/holder",
		"GPU 1", "│1g.10gb│1g.10gb│ 2g.20gb", "evict " + namespace + "/holder", "1 pod has to leave", "fence", "release",
	} {
		if !strings.Contains(string(out), say) {
			t.Errorf("the plan does not say %q:\n%s", say, out)
		}
	}
	if diff := cmp.Diff(before, r.GPUs.String()); diff != "" {
		t.Errorf("the plan changed the GPUs (-before +after):\n%s", diff)
	}
	if writes := r.writes(""); len(writes) > 0 {
		t.Errorf("the plan wrote to the cluster: %v", writes)
	}
}
