package show

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/test/agenttest"
)

// A fleet is read by one request, whatever its size, so that fifty nodes take no longer than one.
func TestFiftyNodesAreReadByOneRequest(t *testing.T) {
	nodes, names := agenttest.Fifty()
	for _, args := range [][]string{
		{"status"}, {"status", "-o", "json"}, {"status", "-l", "pool=research"}, append([]string{"status", "--ask=false"}, names...),
	} {
		inWorld(t, func(w *world) {
			w.Client.ClearActions()
			if said, code := w.Run(args...); code != 0 {
				t.Fatalf("%q: exit code %d: %s", args, code, said)
			}
			got := w.Asked()
			if got["list nodes"] != 1 || got["get nodes"] != 0 || got["list pods"] > 1 || len(got) > 2 {
				t.Errorf("%q: %v", args[:2], got)
			}
		}, nodes...)
	}
}

// The command asks each agent by one write, and removes the request by another one.
func TestFiftyAgentsAreAskedByTwoWritesEach(t *testing.T) {
	nodes, names := agenttest.Fifty()
	inWorld(t, func(w *world) {
		w.Client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) { return w.AnswersAtOnce(a) })
		w.Client.ClearActions()
		if said, code := w.Run(append([]string{"status"}, names...)...); code != 0 {
			t.Fatalf("exit code %d: %s", code, said)
		}
		if got := w.Asked(); got["patch nodes"] != 2*len(names) || got["get nodes"] != 0 || got["list pods"] != 0 || got["list nodes"]+got["watch nodes"] > 3 {
			t.Errorf("%v", got)
		}
		w.Untouched(names...)
	}, nodes...)
}
