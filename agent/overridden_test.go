package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"

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
		"none":                 {"all-disabled", config.StateFailed},
		"a name of nothing":    {"nonsense", config.StateFailed},
		"what the profile has": {"all-1g.10gb", config.StateSuccess},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.profiles(onePart)
				events := w.listens()
				w.set(config.LabelProfile, "seven")
				w.reach("seven")
				w.edit(func(n *corev1.Node) { asksAnew(n, row.label) })
				w.passes("an answer", func() bool { return stateOf(w.node()) != "" && stateOf(w.node()) != config.StatePending })
				if got := stateOf(w.node()); got != row.want {
					t.Errorf("label %s=%s beside a profile is answered %q, want %q", config.LabelMIGConfig, row.label, got, row.want)
				}
				says := config.LabelMIGConfig + "=" + row.label + " does not count while " + config.LabelProfile + " is there"
				if c := w.condition(); c.Status != corev1.ConditionTrue || !strings.Contains(c.Message, says) {
					t.Errorf("the condition is %s, and its message does not say %q: %s", c.Status, says, c.Message)
				}
				w.turns(20, func() bool { return false })
				if n := heard(events, string(config.ReasonKeyIgnored), says); n != 1 {
					t.Errorf("%d Events say that the label does not count, want 1", n)
				}
				w.set(config.LabelDevicePluginConfig, "shared")
				w.passes("a word about the other label", func() bool {
					return strings.Contains(w.condition().Message, config.LabelDevicePluginConfig+"=shared does not count")
				})
			})
		})
	}
}
