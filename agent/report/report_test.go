package report

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// What a step that is done has changed is what the condition says of it: the journal alone, or a slot, changes nothing that users can see, so there the
// condition says what comes next.
func TestTheReasonOfAStepThatIsDoneClaimsNoMoreThanItDid(t *testing.T) {
	for _, row := range []struct {
		steps  []plan.Kind
		undo   bool
		reason config.Reason
		phase  api.Phase
		goesOn bool
	}{
		{[]plan.Kind{plan.Record, plan.Create}, false, config.ReasonRepartitioning, api.PhaseApplying, true},
		{[]plan.Kind{plan.Record, plan.WriteSharing}, false, config.ReasonConfiguringPlugin, api.PhaseApplying, true},
		{[]plan.Kind{plan.Record, plan.Evict}, false, config.ReasonEvicting, api.PhaseDraining, true},
		{[]plan.Kind{plan.Record, plan.Create}, true, config.ReasonRollingBack, api.PhaseRollingBack, true},
		{[]plan.Kind{plan.AcquireSlot, plan.Fence, plan.Evict}, false, config.ReasonFencing, api.PhaseDraining, true},
		{[]plan.Kind{plan.AcquireSlot, plan.Record, plan.Evict}, false, config.ReasonEvicting, api.PhaseDraining, true},
		{[]plan.Kind{plan.Fence, plan.Evict}, false, config.ReasonFencing, api.PhaseDraining, true},
		{[]plan.Kind{plan.WriteSharing, plan.VerifyCapacity}, false, config.ReasonConfiguringPlugin, api.PhaseApplying, true},
		{[]plan.Kind{plan.VerifyCapacity, plan.Release}, false, config.ReasonAwaitingCapacity, api.PhaseVerifying, true},
		{[]plan.Kind{plan.PublishNodeKeys, plan.Release}, false, config.ReasonFinishing, api.PhaseVerifying, true},
		{[]plan.Kind{plan.Release, plan.ReleaseSlot}, false, config.ReasonFinishing, api.PhaseVerifying, true},
		{[]plan.Kind{plan.ReleaseSlot}, false, config.ReasonFinishing, api.PhaseVerifying, true},
		{[]plan.Kind{plan.Park, plan.AskReboot}, false, config.ReasonNeedsReboot, api.PhaseWaiting, false},
	} {
		var steps []plan.Step
		for _, kind := range row.steps {
			steps = append(steps, plan.Step{Kind: kind})
		}
		want := state.Desired{Name: "research", Undo: row.undo, UndoCause: errors.New("no")}
		r := Of(&state.Observed{Node: &corev1.Node{}}, want, steps, nil, outcome.Decision{})
		if r.Reason != row.reason || r.Phase != row.phase || r.GoesOn != row.goesOn {
			t.Errorf("%v, of which the first is done: %s, %s, goes on %t; want %s, %s, %t", row.steps, r.Reason, r.Phase, r.GoesOn, row.reason, row.phase, row.goesOn)
		}
	}
}

func TestAStatusSaysWhetherTheSettingsAskForTheConfigOfTheDevicePlugin(t *testing.T) {
	for _, row := range []struct {
		label, name, plugin string
		want                bool
	}{
		{config.LabelProfile, "research", "slices", false},
		{config.LabelMIGConfig, "all-1g.10gb", "", false},
		{config.LabelMIGConfig, "all-1g.10gb + slices", "slices", false},
		{config.LabelMIGConfig, "all-1g.10gb + slices", "", true},
		{config.LabelMIGConfig, "all-1g.10gb + slices", config.OwnPluginKey + "x", true},
		{config.LabelDevicePluginConfig, "slices", "slices", false},
		{config.LabelDevicePluginConfig, "slices", "", true},
		{config.LabelMIGConfig, "", "", false},
		{"", state.ResetTarget, "", false},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{config.LabelDevicePluginConfig: row.plugin}}}
		if got := ByDefault(node, state.Desired{Label: row.label, Name: row.name}); got != row.want {
			t.Errorf("%+v: %t", row, got)
		}
	}
}

// A tool that sees Drained takes the node for one whose pods are gone.
func TestANodeIsDrainedOnlyWherePodsWereSeenToBeGone(t *testing.T) {
	destroy, evict := []plan.Step{{Kind: plan.Destroy}}, []plan.Step{{Kind: plan.Evict}}
	cordoned, closed := &journal.Journal{Cordoned: true}, &journal.Journal{Closed: []string{"gpu-0"}}
	for name, row := range map[string]struct {
		incomplete, was bool
		journal         *journal.Journal
		undo            bool
		steps           []plan.Step
		want            DrainReport
	}{
		"no change":                          {steps: evict, want: DrainReport{Known: true}},
		"a change without a cordon":          {journal: &journal.Journal{}, steps: destroy, want: DrainReport{Known: true}},
		"pods are evicted":                   {journal: cordoned, steps: evict, want: DrainReport{Known: true, Draining: true, Maintained: true}},
		"pods leave closed devices":          {journal: closed, steps: evict, want: DrainReport{Known: true, Draining: true, Maintained: true}},
		"pods are evicted again":             {journal: cordoned, was: true, steps: evict, want: DrainReport{Known: true, Draining: true, Maintained: true}},
		"pods are gone":                      {journal: cordoned, steps: destroy, want: DrainReport{Known: true, Drained: true, Maintained: true}},
		"the observation has ended early":    {journal: cordoned, incomplete: true, want: DrainReport{}},
		"no step is left":                    {journal: cordoned, want: DrainReport{Known: true, Maintained: true}},
		"no step is left after the drain":    {journal: cordoned, was: true, want: DrainReport{Known: true, Drained: true, Maintained: true}},
		"an undo from the middle of a drain": {journal: cordoned, undo: true, steps: destroy, want: DrainReport{Known: true, Maintained: true}},
		"an undo after the drain":            {journal: cordoned, undo: true, was: true, steps: destroy, want: DrainReport{Known: true, Drained: true, Maintained: true}},
	} {
		node := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: config.ConditionDrained, Status: corev1.ConditionFalse}}}}
		if row.was {
			node.Status.Conditions[0].Status = corev1.ConditionTrue
		}
		seen := &state.Observed{Node: node, Journal: row.journal, Complete: !row.incomplete}
		if got := DrainOf(seen, state.Desired{Undo: row.undo}, row.steps); got != row.want {
			t.Errorf("%s: %+v, want %+v", name, got, row.want)
		}
	}
}
