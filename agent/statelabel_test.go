package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// asksAgain writes what README has users write who wait for the answer: by one write it sets the request and removes the former answer.
func asksAgain(n *corev1.Node, name string) {
	metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, name)
	delete(n.Labels, config.LabelMIGConfigState)
}

func stateOf(n *corev1.Node) config.State { return config.State(n.Labels[config.LabelMIGConfigState]) }

// A user who removes the former answer with the request and waits for a success never sees an old one, and need not know how the node was.
func TestASuccessIsOfTheConfigThatIsRequested(t *testing.T) {
	t.Parallel()
	for name, requested := range map[string]string{"already as asked": "all-balanced", "not yet": "all-1g.10gb"} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.converge("all-balanced")
				w.edit(func(n *corev1.Node) { asksAgain(n, requested) })
				w.passes("a success", func() bool { return stateOf(w.node()) == config.StateSuccess })
				if c := w.condition(); c.Reason != string(config.ReasonConverged) || !strings.HasPrefix(c.Message, requested+":") {
					t.Errorf("at the success the node says %s: %s", c.Reason, c.Message)
				}
			})
		})
	}
}

// The agent has observed the node, and is about to write its answer, when a user asks for another config.
func TestASuccessIsNotWrittenBesideALaterRequest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		asked := false
		w.patched(func(patch string) error {
			if asked || !strings.Contains(patch, `"`+config.LabelMIGConfigState+`":"success"`) {
				return nil
			}
			asked = true
			if err := w.writeBetween(func(n *corev1.Node) { asksAgain(n, "all-1g.10gb") }); err != nil {
				return err
			}
			if strings.Contains(patch, "resourceVersion") { // as the API server does
				return apierrors.NewConflict(nodeResource.GroupResource(), nodeName, nil)
			}
			return nil
		})
		w.label("all-balanced")
		w.passes("the other request", func() bool { return asked })
		if state := stateOf(w.node()); state == config.StateSuccess {
			t.Errorf("the node asks for all-1g.10gb, and its state is %s, which all-balanced has reached", state)
		}
		w.reach("all-1g.10gb")
		w.passes("a success", func() bool { return stateOf(w.node()) == config.StateSuccess })
	})
}
