package main

import (
	"encoding/json"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
)

// asked counts the requests of the command, by verb and resource.
func (w *world) asked() map[string]int {
	out := map[string]int{}
	for _, a := range w.client.Actions() {
		out[a.GetVerb()+" "+a.GetResource().Resource]++
	}
	return out
}

// fifty are nodes on which agents run, and their names.
func fifty() (nodes []func() *corev1.Node, names []string) {
	for i := range 50 {
		name := fmt.Sprintf("gpu-%02d", i)
		nodes, names = append(nodes, gpu(name)), append(names, name)
	}
	return nodes, names
}

// A fleet is read by one request, whatever its size, so that fifty nodes take no longer than one.
func TestFiftyNodesAreReadByOneRequest(t *testing.T) {
	nodes, names := fifty()
	for _, args := range [][]string{
		{"status"}, {"status", "-o", "json"}, {"status", "-l", "pool=research"}, append([]string{"status", "--ask=false"}, names...),
	} {
		inWorld(t, func(w *world) {
			w.client.ClearActions()
			if said, code := w.run(args...); code != 0 {
				t.Fatalf("%q: exit code %d: %s", args, code, said)
			}
			got := w.asked()
			if got["list nodes"] != 1 || got["get nodes"] != 0 || got["list pods"] > 1 || len(got) > 2 {
				t.Errorf("%q: %v", args[:2], got)
			}
		}, nodes...)
	}
}

// Where the nodes have the same GPUs, one agent answers for all whether it would refuse.
func TestOneAgentIsAskedWhetherFiftyWouldRefuse(t *testing.T) {
	nodes, _ := fifty()
	nodes = append(nodes, func() *corev1.Node {
		n := gpuNode("gpu-50")
		n.Labels[features.LabelProduct] = "NVIDIA-L4"
		return n
	})
	inWorld(t, func(w *world) {
		w.client.ClearActions()
		w.start(apply("--wait")...)
		if got := w.asked(); got["patch nodes"] != 51+2*2 {
			t.Errorf("%v", got)
		}
		w.stop()
		w.ended()
	}, nodes...)
}

// The command asks each agent by one write, and removes the request by another one.
func TestFiftyAgentsAreAskedByTwoWritesEach(t *testing.T) {
	nodes, names := fifty()
	inWorld(t, func(w *world) {
		w.client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) { return w.answersAtOnce(a) })
		w.client.ClearActions()
		if said, code := w.run(append([]string{"status"}, names...)...); code != 0 {
			t.Fatalf("exit code %d: %s", code, said)
		}
		if got := w.asked(); got["patch nodes"] != 2*len(names) || got["get nodes"] != 0 || got["list pods"] != 0 || got["list nodes"]+got["watch nodes"] > 3 {
			t.Errorf("%v", got)
		}
		w.untouched(names...)
	}, nodes...)
}

// keepsSilent in place of a request is an agent that does not answer.
const keepsSilent = "silent"

// answersAtOnce is an agent that answers a request at once: as w.names has it, or with a diagnosis.
func (w *world) answersAtOnce(a k8stesting.Action) (bool, runtime.Object, error) {
	patch, ok := a.(k8stesting.PatchAction)
	var asks struct {
		Metadata struct{ Annotations map[string]*string }
	}
	if !ok {
		return false, nil, nil
	}
	if err := json.Unmarshal(patch.GetPatch(), &asks); err != nil {
		return true, nil, err
	}
	request := asks.Metadata.Annotations[config.AnnotationPreview]
	given, special := w.names[patch.GetName()]
	switch {
	case request == nil, given.For == keepsSilent:
		return false, nil, nil
	case !special:
		given.Diagnosis = &api.Diagnosis{Node: patch.GetName()}
	}
	given.For = *request
	object, err := w.client.Tracker().Get(a.GetResource(), "", patch.GetName())
	if err != nil {
		return true, nil, err
	}
	node, ok := object.(*corev1.Node)
	if !ok {
		return true, nil, fmt.Errorf("the node is a %T", object)
	}
	answer, err := json.Marshal(given)
	n := node.DeepCopy()
	n.Annotations[config.AnnotationPreview], n.Annotations[config.AnnotationPlan] = *request, string(answer)
	if err == nil {
		err = w.client.Tracker().Update(a.GetResource(), n, "")
	}
	return true, n, err
}
