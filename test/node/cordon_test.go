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
	"github.com/gpuslice/gpuslice/drain/fence"
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

// Promise 6. The change is done under the cordon, which is not ours to lift, and it is said whose it is.
func TestACordonFromBeforeStaysAndIsNamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("cordon", r.Name)
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.keptAndNamed(r.awaitConverged("all-balanced"), "cordoned by kubectl since")
}

// Promise 6. Who cordons a cordoned node leaves no trace; the annotation is how to say it.
func TestACordonThatIsToBeKeptStaysUntilTheAnnotationGoes(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	goOn := r.runIntoAStep("all-balanced")
	r.kubectl("annotate", "node", r.Name, config.AnnotationKeepCordoned+"=for the night shift")
	goOn()
	r.keptAndNamed(r.awaitConverged("all-balanced"), config.AnnotationKeepCordoned)
	r.kubectl("annotate", "node", r.Name, config.AnnotationKeepCordoned+"-")
	r.givenBack(r.await("the end of the cordon", func(n *corev1.Node) bool {
		return !n.Spec.Unschedulable && n.Annotations[config.AnnotationJournal] == ""
	}))
}

// Promise 6. Whoever lifts our cordon wants the node back, unless it was agreed that it is for the change to keep it.
func TestAnUncordonInTheMiddle(t *testing.T) {
	t.Parallel()
	t.Run("calls the change off", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, twoH100, "")
		r.awaitOffered("nvidia.com/gpu", 2)
		before := r.GPUs.String()
		goOn := r.runIntoAStep("all-balanced")
		r.kubectl("uncordon", r.Name)
		goOn()
		n := r.await("the end of it", func(n *corev1.Node) bool {
			c := condition(n)
			return c != nil && c.Reason == string(config.ReasonCancelled) && n.Annotations[config.AnnotationJournal] == ""
		})
		r.givenBack(n)
		if after := r.GPUs.String(); after != before {
			t.Errorf("the GPUs are not as they were, but\n%s", after)
		}
	})
	t.Run("is undone by policy", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, twoH100, "drain: {onUncordon: refence}\n")
		r.awaitOffered("nvidia.com/gpu", 2)
		goOn := r.runIntoAStep("all-balanced")
		r.kubectl("uncordon", r.Name)
		goOn()
		r.await("another cordon", func(n *corev1.Node) bool {
			who, _, on := fence.Cordoner(n)
			return on && who == "gpuslice-agent"
		})
		r.givenBack(r.awaitConverged("all-balanced"))
	})
}

// Promises 6 and 13. Another controller is named and waited for, before the fence and at the end, and keeps its cordon.
func TestAnotherControllerIsWaitedFor(t *testing.T) {
	t.Parallel()
	const taint, tool = "medik8s.io/drain", "node-maintenance-operator"
	t.Run("that has cordoned the node before", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, twoH100, "")
		r.awaitOffered("nvidia.com/gpu", 2)
		before := r.GPUs.String()
		r.writeAs(tool, func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: taint, Effect: corev1.TaintEffectNoSchedule})
		})
		r.run()
		r.label(config.LabelMIGConfig, "all-balanced")
		r.keptAndNamed(r.awaitReason(config.ReasonOtherMaintenance), tool)
		if after := r.GPUs.String(); after != before {
			t.Errorf("the GPUs were touched:\n%s", after)
		}
		r.writeAs(tool, func(n *corev1.Node) {
			n.Spec.Unschedulable = false
			n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taint })
		})
		r.givenBack(r.awaitConverged("all-balanced"))
	})
	t.Run("that comes in the middle", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, twoH100, "")
		r.awaitOffered("nvidia.com/gpu", 2)
		goOn := r.runIntoAStep("all-balanced")
		r.writeAs(tool, func(n *corev1.Node) { // it is cordoned already
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: taint, Effect: corev1.TaintEffectPreferNoSchedule})
		})
		goOn()
		n := r.awaitReason(config.ReasonOtherMaintenance)
		if c := condition(n); !n.Spec.Unschedulable || !strings.Contains(c.Message, tool) {
			t.Errorf("the node is unschedulable %t, and says: %s", n.Spec.Unschedulable, c.Message)
		}
		r.writeAs(tool, func(n *corev1.Node) {
			n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == taint })
		})
		r.givenBack(r.awaitConverged("all-balanced"))
	})
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
// called. So nobody of the agent looks while something is done to the node.
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
