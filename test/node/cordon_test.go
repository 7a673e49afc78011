package node_test

import (
	"os/exec"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Promise 6. Whose a cordon is, is what the API server says.
func TestACordonThatAnAdministratorTakesOverInTheMiddleStays(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kubectl("uncordon", r.Name)
	r.kubectl("cordon", r.Name)
	r.stillInTheMiddle()

	n := r.awaitConverged("all-balanced")
	if who, _, on := drain.Cordoner(n); !on || !strings.HasPrefix(who, "kubectl") {
		t.Errorf("at the end the node is cordoned %t by %q, want the administrator's cordon", on, who)
	}
	n.Spec.Unschedulable = false // nothing else is left
	r.givenBack(n)
}

// Promise 6. What is given back is what the administrator wants now, not what was there when the change began.
func TestACordonFromBeforeThatIsLiftedInTheMiddleIsNotPutBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("cordon", r.Name)
	r.runToTheMiddle("all-balanced")
	r.kubectl("uncordon", r.Name)
	r.stillInTheMiddle()
	r.givenBack(r.awaitConverged("all-balanced"))
}

// runToTheMiddle starts the agent and returns when the first of the config's instances is there. The others take their
// time, so that there is some to do something in.
func (r *rig) runToTheMiddle(name string) {
	r.t.Helper()
	if err := r.GPUs.Delay(gpusim.CreateGpuInstanceWithPlacement, time.Second); err != nil {
		r.t.Fatal(err)
	}
	p := r.run()
	r.label(config.LabelMIGConfig, name)
	timeout := time.After(patience)
	for {
		select {
		case step, ok := <-p.steps:
			if !ok {
				r.t.Fatal("the agent ended by itself")
			}
			if strings.Contains(step, "GPU 0: create") {
				return
			}
		case <-timeout:
			r.t.Fatalf("no instance of %s in %s", name, patience)
		}
	}
}

// stillInTheMiddle fails the test if the fence was opened meanwhile, so that what was done came too late.
func (r *rig) stillInTheMiddle() {
	r.t.Helper()
	n, err := r.client.CoreV1().Nodes().Get(r.t.Context(), r.Name, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, taint := range n.Spec.Taints {
		if taint.Key == config.TaintRepartitioning {
			return
		}
	}
	r.t.Fatal("the change was over too soon")
}

// kubectl is what an administrator does.
func (r *rig) kubectl(args ...string) string {
	r.t.Helper()
	args = append([]string{"--kubeconfig", r.cluster.AdminKubeconfig()}, args...)
	out, err := exec.CommandContext(r.t.Context(), r.cluster.Kubectl(), args...).CombinedOutput()
	if err != nil {
		r.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
