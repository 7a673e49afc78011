package node_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/systemd"
	"github.com/gpuslice/gpuslice/test/systemd/systemdtest"
)

// Promise 6. Whose a cordon is, is what the API server says.
func TestACordonThatAnAdministratorTakesOverInTheMiddleStays(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	goOn := r.runIntoAStep("all-balanced")
	r.kubectl("uncordon", r.Name)
	r.kubectl("cordon", r.Name)
	goOn()
	r.keptAndNamed(r.awaitConverged("all-balanced"), "cordoned by kubectl since")
}

// Promise 6. What is given back is what the administrator wants now, not what was there when the change began.
func TestACordonFromBeforeThatIsLiftedInTheMiddleIsNotPutBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("cordon", r.Name)
	goOn := r.runIntoAStep("all-balanced")
	r.kubectl("uncordon", r.Name)
	goOn()
	r.givenBack(r.awaitConverged("all-balanced"))
}

// keptAndNamed fails the test if a cordon of others was lifted, if it is not said whose it is, or if anything of ours is
// left.
func (r *rig) keptAndNamed(n *corev1.Node, whose string) {
	r.t.Helper()
	if !n.Spec.Unschedulable {
		r.t.Error("the cordon was lifted")
	}
	if c := condition(n); !strings.Contains(c.Message, whose) {
		r.t.Errorf("the message does not say %q: %s", whose, c.Message)
	}
	opened := n.DeepCopy()
	opened.Spec.Unschedulable = false
	r.givenBack(opened)
}

// writeAs is another controller that changes the node.
func (r *rig) writeAs(manager string, change func(*corev1.Node)) {
	r.t.Helper()
	err := retry.RetryOnConflict(wait.Backoff{Steps: 100, Duration: 5 * time.Millisecond}, func() error {
		n, err := r.client.CoreV1().Nodes().Get(r.t.Context(), r.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(n)
		_, err = r.client.CoreV1().Nodes().Update(r.t.Context(), n, metav1.UpdateOptions{FieldManager: manager})
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
}

// runIntoAStep starts the agent and returns when it is making the first of the config's instances, which takes until goOn is
// called. So the agent observes nothing while something is done to the node.
func (r *rig) runIntoAStep(name string) (goOn func()) {
	r.t.Helper()
	host := systemdtest.Start(r.t, systemd.Options{})
	r.agents.bus = host.Address()
	goOn = r.holdCreation()
	r.run()
	r.label(config.LabelMIGConfig, name)
	r.hostHas(host, "a lock for the first instance", func() bool {
		return slices.ContainsFunc(host.Inhibitors(), func(i systemd.Inhibitor) bool { return strings.Contains(i.Why, "create") })
	})
	return goOn
}

// holdCreation keeps each GPU instance that the agent begins to create from now on from being there until goOn is called.
func (r *rig) holdCreation() (goOn func()) {
	r.t.Helper()
	fail := func(f gpusim.Fault) {
		r.t.Helper()
		if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, f); err != nil {
			r.t.Fatal(err)
		}
	}
	fail(gpusim.Fault{Hang: true})
	return func() { r.t.Helper(); fail(gpusim.Fault{}) }
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

// kubectl is what an administrator does.
func (r *rig) kubectl(args ...string) string {
	r.t.Helper()
	out, err := r.cluster.RunKubectl(r.t.Context(), args...)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}
