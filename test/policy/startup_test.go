package policy_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// startupKey is the key of the component startup-taint.
const startupKey = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"

// taintsAre gives a node these taints, and no others.
func taintsAre(name, taints string) func(context.Context, *scene, kubernetes.Interface) error {
	return patchNode(name, types.MergePatchType, `{"spec":{"taints":[`+taints+`]}}`)
}

func taintText(key, value, effect string) string {
	return fmt.Sprintf(`{"key":%q,"value":%q,"effect":%q}`, key, value, effect)
}

// The second key of startup taints is the agent's where the component says so: on its own node, whatever value and effect. No other key is.
func TestTheSecondStartupTaintIsTheAgentsOnItsOwnNode(t *testing.T) {
	s := newScene(t)
	s.apply("startup-taint")
	s.fill()
	const third = "startup-taint.cluster-autoscaler.kubernetes.io/another"
	team, second := taintText("dedicated", "team", "NoSchedule"), taintText(startupKey, "pool-a", "NoExecute")
	all := team + "," + second + "," + taintText(third, "", "NoSchedule")
	for _, name := range []string{"own", "other"} {
		before, err := s.admin.CoreV1().Nodes().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var texts []string
		for _, had := range before.Spec.Taints {
			texts = append(texts, taintText(had.Key, had.Value, string(had.Effect)))
		}
		if err := taintsAre(name, all)(t.Context(), s, s.admin); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := taintsAre(name, strings.Join(texts, ","))(context.WithoutCancel(t.Context()), s, s.admin); err != nil {
				t.Error(err)
			}
		})
	}
	agent := s.tries(s.agent())
	takes := attempt{what: "own node: take the second startup taint away", do: taintsAre("own", team+","+taintText(third, "", "NoSchedule"))}
	goes := func(a attempt, want bool) {
		t.Helper()
		s.until(fmt.Sprintf("%s: goes through %t", a.what, want), func(ctx context.Context) (bool, error) {
			no, err := denied(a.do(ctx, s, agent))
			return no != want, err
		})
	}
	goes(takes, true)
	goes(attempt{what: "own node: put it back with another value and effect", do: taintsAre("own", all+","+taintText(startupKey, "", "PreferNoSchedule"))}, true)
	for _, a := range []attempt{
		{what: "own node: take a third startup taint away", do: taintsAre("own", team+","+second)},
		{what: "own node: put a third startup taint there", do: taint("own", third, "NoExecute")},
		{what: "own node: take a taint of people away with it", do: taintsAre("own", "")},
		{what: "other node: take the second startup taint away", do: taintsAre("other", team+","+taintText(third, "", "NoSchedule"))},
		{what: "other node: put the second startup taint there", do: taint("other", startupKey, "NoSchedule")},
	} {
		goes(a, false)
	}
	s.apply() // without the component
	goes(takes, false)
}
