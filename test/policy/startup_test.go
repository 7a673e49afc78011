package policy_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// startupKey is the key of the component startup-taint.
const startupKey = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"

// The second key of startup taints is the agent's where the component says so: on its own node, whatever value and effect. No other key is.
func TestTheSecondStartupTaintIsTheAgentsOnItsOwnNode(t *testing.T) {
	s := newScene(t)
	s.apply("startup-taint")
	s.fill()
	const third = "startup-taint.cluster-autoscaler.kubernetes.io/another"
	added := []corev1.Taint{
		{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule},
		{Key: startupKey, Value: "pool-a", Effect: corev1.TaintEffectNoExecute},
		{Key: third, Effect: corev1.TaintEffectNoSchedule},
	}
	for _, name := range []string{"own", "other"} {
		if err := retaint(name, func(taints []corev1.Taint) []corev1.Taint { return append(taints, added...) })(t.Context(), s, s.admin); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			away := func(taints []corev1.Taint) []corev1.Taint {
				return slices.DeleteFunc(taints, func(t corev1.Taint) bool {
					return slices.ContainsFunc(added, func(a corev1.Taint) bool { return a.Key == t.Key })
				})
			}
			if err := retaint(name, away)(context.WithoutCancel(t.Context()), s, s.admin); err != nil {
				t.Error(err)
			}
		})
	}
	agent := s.tries(s.agent())
	takes := attempt{what: "own node: take the second startup taint away", do: retaint("own", without(startupKey))}
	goes := func(a attempt, want bool) {
		t.Helper()
		s.until(fmt.Sprintf("%s: goes through %t", a.what, want), func(ctx context.Context) (bool, error) {
			no, err := denied(a.do(ctx, s, agent))
			return no != want, err
		})
	}
	goes(takes, true)
	goes(attempt{what: "own node: put it back with another value and effect", do: taint("own", startupKey, "PreferNoSchedule")}, true)
	for _, a := range []attempt{
		{what: "own node: take a third startup taint away", do: retaint("own", without(third))},
		{what: "own node: put a third startup taint there", do: taint("own", third, "NoExecute")},
		{what: "own node: remove a user's taint with it", do: retaint("own", func(taints []corev1.Taint) []corev1.Taint {
			return without(startupKey)(without("team")(taints))
		})},
		{what: "other node: take the second startup taint away", do: retaint("other", without(startupKey))},
		{what: "other node: put the second startup taint there", do: taint("other", startupKey, "NoSchedule")},
	} {
		goes(a, false)
	}
	s.apply() // without the component
	goes(takes, false)
}
