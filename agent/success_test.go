package agent_test

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// Scripts wait for the state label and look at the condition then.
func TestWhenTheStateLabelSaysSuccessTheConditionIsTrue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settle(config.ReasonNotRequested)
		watch, err := w.client.CoreV1().Nodes().Watch(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		successes := map[string]int{}
		var seen sync.WaitGroup
		seen.Go(func() {
			for event := range watch.ResultChan() {
				n, is := event.Object.(*corev1.Node)
				if !is || n.Labels[config.LabelMIGConfigState] != string(config.StateSuccess) {
					continue
				}
				asked := n.Labels[config.LabelMIGConfig]
				successes[asked]++
				for _, c := range n.Status.Conditions {
					if c.Type == config.ConditionGPUPartitionReady && (c.Status != corev1.ConditionTrue || !strings.HasPrefix(c.Message, asked+":")) {
						t.Errorf("%s is answered by success, and the condition is %s with %s: %s", asked, c.Status, c.Reason, c.Message)
					}
				}
			}
		})
		for _, asked := range []string{"all-balanced", "all-1g.10gb"} {
			w.edit(func(n *corev1.Node) { asksAgain(n, asked) })
			w.reach(asked)
		}
		watch.Stop()
		seen.Wait()
		if successes["all-balanced"] == 0 || successes["all-1g.10gb"] == 0 {
			t.Errorf("never answered: %v", successes)
		}
	})
}
