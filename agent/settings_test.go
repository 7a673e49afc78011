package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/config"
)

// Wrong settings are not obeyed, and the condition says so while they are; other ones end the run, so that a new process takes them over.
func TestWrongSettingsAreReportedAndOtherOnesEndTheRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		var other bool
		var wrong string
		o := w.optionsFor(&w.host)
		o.Edited = func() (bool, string) { return other, wrong }
		w.agent = agent.New(o)
		w.untilReason(config.ReasonConverged)
		rests := func() time.Duration {
			began := time.Now()
			w.agent.Rest(t.Context(), time.Hour)
			return time.Since(began)
		}
		if took := rests(); took != time.Hour {
			t.Errorf("the agent rests %s while nothing is edited", took)
		}
		wrong = `settings.yaml: nodeHeartbeat: "often" must be a duration`
		if took := rests(); took > time.Minute {
			t.Errorf("the agent rests %s after an edit", took)
		}
		w.passes("a word about the settings", func() bool { return strings.Contains(w.condition().Message, "mend the settings: "+wrong) })
		if c := w.condition(); c.Status != corev1.ConditionTrue || c.Reason != string(config.ReasonConverged) || w.agent.Edited() {
			t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
		}
		wrong = ""
		rests()
		w.passes("no word about them", func() bool { return !strings.Contains(w.condition().Message, "settings") })
		other = true
		if took := rests(); took > time.Minute || !w.agent.Edited() {
			t.Errorf("the agent rests %s after a good edit, and ends then: %t", took, w.agent.Edited())
		}
	})
}
