package node_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// A node is registered with both startup taints, and the agent is killed behind its fence. The next one goes back, since the label asks for what no
// node can have, and gives both back; then it opens the node.
func TestANodeWithBothStartupTaintsIsAsItWasOrOpen(t *testing.T) {
	t.Parallel()
	const second = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"
	r := newRig(t, twoH100, "startupTaint: "+second+"\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("taint", "node", r.Name, config.TaintNotReady+"=pool-a:NoSchedule", second+"=:NoSchedule", second+"=pool-a:PreferNoSchedule")
	r.kubectl("delete", "pod", "-n", "kube-system", r.plugin().Name, "--wait")
	registered := texts(r.node().Spec.Taints)
	if len(registered) != 3 {
		t.Fatalf("the node is registered with the taints %v", registered)
	}
	r.runToTheMiddle("all-balanced")
	r.kill()
	if journal := r.node().Annotations[config.AnnotationJournal]; strings.Count(journal, second) != 2 || !strings.HasPrefix(journal, `{"version":7,`) {
		t.Errorf("the journal does not hold the second key's two taints: %s", journal)
	}
	r.label(config.LabelMIGConfig, "all-9g.999gb")
	r.run()
	n := r.await("the way back", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonUnknownConfig) && n.Annotations[config.AnnotationJournal] == "" && !closed(n)
	})
	r.givenBack(n)
	if got := texts(n.Spec.Taints); !slices.Equal(got, registered) {
		t.Errorf("after a change that was undone the node has the taints %v, and was registered with %v", got, registered)
	}
	r.label(config.LabelMIGConfig, "all-balanced")
	n = r.await("an open node", func(n *corev1.Node) bool { return !n.Spec.Unschedulable && len(n.Spec.Taints) == 0 })
	if got := n.Status.Allocatable["nvidia.com/mig-3g.40gb"]; got.Value() != 2 {
		t.Errorf("when the node was opened it had %d nvidia.com/mig-3g.40gb, want 2", got.Value())
	}
	r.givenBack(r.awaitConverged("all-balanced"))
}

// texts are the taints, in an order of their own.
func texts(taints []corev1.Taint) (all []string) {
	for _, t := range taints {
		all = append(all, t.ToString())
	}
	slices.Sort(all)
	return all
}
