package node_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// Promise 3. A process that no pod can be blamed for is named as a person would look for it, and waited for.
func TestAProcessOfTheHostIsNamedAndWaitedFor(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	training := pods.Process{PID: 4_194_305, Command: "python", Cgroup: pods.OfUnit("training.service")} // above the largest pid of Linux
	if err := r.Users.Start(training, r.GPUs.UUIDs()[0]); err != nil {
		t.Fatal(err)
	}
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.await("a word about the process", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonGPUInUse)
	})
	if message, want := condition(n).Message, "pid 4194305 python of training.service"; !strings.Contains(message, want) {
		t.Errorf("the message is %q, want it to say %q", message, want)
	}
	if err := r.Users.End(training.PID); err != nil {
		t.Fatal(err)
	}
	r.givenBack(r.awaitConverged("all-balanced"))
}
