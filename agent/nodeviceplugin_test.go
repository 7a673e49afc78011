package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/show"
	"github.com/gpuslice/gpuslice/config"
)

// The log of a plugin that is not there does not help a user, and the agent undoes no change where none has begun.
func TestANodeWithoutADevicePluginSaysSo(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		ask  func(w *world)
		wait string // what the diagnosis says that the agent does
	}{
		"as it is asked for already": {func(w *world) { w.label("all-disabled") }, "waits for the device plugin, without an end, and disturbs nothing meanwhile"},
		"otherwise than asked for":   {func(w *world) { w.label("all-1g.10gb") }, "waits for the device plugin, without an end, and disturbs nothing meanwhile"},
		"a sharing that is asked for": {
			func(w *world) { w.shares(); w.profile("two") },
			"waits for the device plugin, without an end, and disturbs nothing meanwhile",
		},
		"nothing is asked for": {func(*world) {}, "leaves it alone: nothing is asked for"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.unplugged = true
				w.edit(func(n *corev1.Node) {
					n.Spec.Taints = []corev1.Taint{{Key: "restricted", Effect: corev1.TaintEffectNoSchedule}}
				})
				row.ask(w)
				w.spend(time.Hour)
				c := w.condition()
				d := w.agent.Diagnose(t.Context(), true)
				said := show.Diagnosis(d)
				if want := "has to select the node, and to tolerate restricted:NoSchedule"; c.Reason != string(config.ReasonNoDevicePlugin) || !strings.Contains(c.Message, want) {
					t.Errorf("%s: %s: want %q in it", c.Reason, c.Message, want)
				}
				if strings.Contains(c.Message, "log") || strings.Contains(said, "see the log") || strings.Contains(said, "undoes the change") {
					t.Errorf("the node says %q, the diagnosis %q", c.Message, said)
				}
				if !strings.Contains(strings.Join(strings.Fields(said), " "), row.wait) || len(d.Causes) == 0 || d.Causes[len(d.Causes)-1].Cause != api.CauseCapacityMissing {
					t.Errorf("the diagnosis says %q, want %q", said, row.wait)
				}
				if w.owed() {
					t.Error("a change has begun")
				}
				w.unplugged = false
				w.settle(config.ReasonConverged, config.ReasonNotRequested)
			})
		})
	}
}
