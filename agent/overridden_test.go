package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
)

// Scripts that know NVIDIA's label alone set it, remove its answer and wait for the next one. A profile overrides it: a success would be the answer to
// another label than theirs.
func TestAnOverriddenLabelIsAnsweredBySuccessOnlyIfItsConfigStands(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		label string
		want  config.State
	}{
		"another geometry":     {"all-3g.40gb", config.StateFailed},
		"what the profile has": {"all-1g.10gb", config.StateSuccess},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.profiles(onePart)
				events := w.restartWithEvents()
				w.set(config.LabelProfile, "seven")
				w.reach("seven")
				w.edit(func(n *corev1.Node) { asksAgain(n, row.label) })
				w.passes("an answer", func() bool { return stateOf(w.node()) != "" && stateOf(w.node()) != config.StatePending })
				if got := stateOf(w.node()); got != row.want {
					t.Errorf("label %s=%s beside a profile is answered %q, want %q", config.LabelMIGConfig, row.label, got, row.want)
				}
				says := config.LabelMIGConfig + "=" + row.label + " is ignored while " + config.LabelProfile + " is there"
				if c := w.condition(); c.Status != corev1.ConditionTrue || !strings.Contains(c.Message, says) {
					t.Errorf("the condition is %s, and its message does not say %q: %s", c.Status, says, c.Message)
				}
				w.passesWithin(20, func() bool { return false })
				if n := heard(events, string(config.ReasonKeyIgnored), says); n != 1 {
					t.Errorf("%d Events say that the label does not count, want 1", n)
				}
				w.set(config.LabelDevicePluginConfig, "shared")
				w.passes("a word about the other label", func() bool {
					return strings.Contains(w.condition().Message, config.LabelDevicePluginConfig+"=shared is ignored")
				})
			})
		})
	}
}

// NVIDIA's config manager reads the label of the device plugin's configs whatever other labels are there. Who reads that the label does not count sets it,
// and loses the pods that hold what the plugin gives out no more.
func TestALabelThatTheConfigManagerObeysIsNotSaidToCountForNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := managedWorld(t)
		events := w.restartWithEvents()
		w.set(config.LabelDevicePluginConfig, "renamed")
		w.reach("renamed")
		w.profile("all-disabled")
		w.passes("all-disabled", w.done("all-disabled"))
		w.podOnFirstDevice("gpu.shared::3", controlled)
		w.spend(time.Minute)
		says := config.LabelDevicePluginConfig + "=renamed"
		given := w.ask(config.LabelDevicePluginConfig + "=whole")
		w.unannotate(config.AnnotationPreview)
		for _, want := range []string{"NVIDIA's config manager", "as well", "evicts the pods", "kubectl gpuslice apply " + nodeName + " --device-plugin-config whole"} {
			if !strings.Contains(given.Refused, want) || strings.Contains(given.Refused, "does not count") {
				t.Errorf("the answer does not say %q: %s", want, given.Refused)
			}
		}
		if c := w.condition(); !strings.Contains(c.Message, says) || !strings.Contains(c.Message, "still obeys") || heard(events, string(config.ReasonKeyIgnored), "still obeys") != 1 {
			t.Errorf("the node says of %s: %s", says, c.Message)
		}
		fences := w.recordCordons()
		w.set(config.LabelDevicePluginConfig, "whole")
		w.spend(10 * time.Minute)
		if len(*fences) == 0 || w.runs("gpu.shared::3") {
			t.Errorf("what the answer says does not follow: the node was fenced %d times, the pod runs: %t", len(*fences), w.runs("gpu.shared::3"))
		}
	})
}

// Where the agent gives the device plugin its config by a file, no program reads the label but the agent.
func TestALabelThatNoConfigManagerReadsDoesNotCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.profile("all-disabled")
		w.reach("all-disabled")
		if given := w.ask(config.LabelDevicePluginConfig + "=whole"); !strings.Contains(given.Refused, "does not count") || strings.Contains(given.Refused, "config manager") {
			t.Errorf("the answer is %q", given.Refused)
		}
	})
}
