package decide_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// What a pass works towards follows from the journal, from why what the labels ask for is refused, and from what is left on the node; where the steps to what
// is wanted may not be performed, from them.
func TestTheGoalOfAPass(t *testing.T) {
	t.Parallel()
	const gpu nvml.UUID = "GPU-a"
	refused, unseen := errors.New("refused"), &outcome.UnseenError{Err: errors.New("no answer")}
	pending := fmt.Errorf("GPU 0: %w", plan.ErrStillPending)
	want := state.Desired{Name: "all-1g.10gb", Fingerprint: "wanted", Targets: plan.Targets{gpu: {}}}
	running := &journal.Journal{Target: want.Name, Cordoned: true}
	started := &journal.Journal{Target: want.Name}
	gaveUp := &journal.Journal{Target: want.Name, Cordoned: true, Undo: &api.Failure{Fingerprint: want.Fingerprint}}
	other := &journal.Journal{Target: "all-2g.20gb", Cordoned: true}
	othersUndone := &journal.Journal{Target: want.Name, Cordoned: true, Undo: &api.Failure{Fingerprint: "another"}}
	evicts, cuts, verifies := []plan.Step{{Kind: plan.Evict}}, []plan.Step{{Kind: plan.Create}}, []plan.Step{{Kind: plan.VerifyCapacity}}
	begins := []plan.Step{{Kind: plan.Fence}, {Kind: plan.Evict}}
	fenced := state.Observed{Node: &corev1.Node{}, Marks: state.Marks{Fenced: true}}
	for name, row := range map[string]struct {
		journal    *journal.Journal
		uncordoned bool
		left       *state.Observed // what is on a node without a journal
		steps      []plan.Step
		err        error
		unread     error
		on         config.OnUncordon

		kind decide.Kind
		why  error
	}{
		"nothing is in the way":                    {steps: evicts, kind: decide.Wanted},
		"a change is under way":                    {journal: running, steps: evicts, kind: decide.Wanted},
		"a change for another config is under way": {journal: other, steps: evicts, kind: decide.Wanted},
		"the undo of another config is under way":  {journal: othersUndone, steps: evicts, kind: decide.Wanted},
		"something was not seen":                   {err: unseen, kind: decide.StandStill, why: unseen},
		"something was not seen in a change":       {journal: running, err: unseen, kind: decide.StandStill, why: unseen},
		"refused":                                  {err: refused, kind: decide.StandStill, why: refused},
		"refused, and a fence is left":             {left: &fenced, err: refused, kind: decide.CleanUp, why: refused},
		"refused, and a slot is left": {
			left: &state.Observed{Pool: state.Pool{Slot: state.Slot{Held: true}}},
			err:  refused,
			kind: decide.CleanUp,
			why:  refused,
		},
		"refused, and a place in the queue is left": {
			left: &state.Observed{Pool: state.Pool{Slot: state.Slot{Waiting: true}}},
			err:  refused,
			kind: decide.CleanUp,
			why:  refused,
		},
		"refused, and a stopped unit is left": {
			left: &state.Observed{Leftovers: state.Leftovers{Orphan: state.Orphan{Kept: []string{"x"}}}},
			err:  refused,
			kind: decide.CleanUp,
			why:  refused,
		},
		"a fence is left, and what is wanted has a way": {left: &fenced, steps: evicts, kind: decide.Wanted},
		"refused in a change":                           {journal: running, err: refused, kind: decide.Undo, why: refused},
		"a reset is pending in a change":                {journal: running, err: pending, kind: decide.StandStill},
		"a reset is pending in an undo":                 {journal: gaveUp, err: pending, kind: decide.Undo, why: pending},
		"given up":                                      {journal: gaveUp, steps: evicts, kind: decide.Undo},
		"uncordoned before pods leave":                  {journal: running, uncordoned: true, steps: evicts, on: config.UncordonCancel, kind: decide.Cancel},
		"uncordoned before a GPU is cut":                {journal: running, uncordoned: true, steps: cuts, on: config.UncordonCancel, kind: decide.Cancel},
		"uncordoned before the proof":                   {journal: running, uncordoned: true, steps: verifies, on: config.UncordonCancel, kind: decide.Wanted},
		"uncordoned, which is a mistake by the settings": {
			journal:    running,
			uncordoned: true,
			steps:      evicts,
			on:         config.UncordonRefence,
			kind:       decide.Wanted,
		},
		"uncordoned, and another config is asked for since": {
			journal:    other,
			uncordoned: true,
			steps:      evicts,
			on:         config.UncordonCancel,
			kind:       decide.Wanted,
		},
		"uncordoned in the undo": {journal: gaveUp, uncordoned: true, steps: evicts, on: config.UncordonCancel, kind: decide.Undo},
		"uncordoned by the agent, which had not cordoned then": {
			journal:    started,
			uncordoned: true,
			steps:      evicts,
			on:         config.UncordonCancel,
			kind:       decide.Wanted,
		},
		"a file is not read, and a change would begin":    {unread: refused, steps: begins, kind: decide.StandStill, why: refused},
		"a file is not read, and no change begins":        {unread: refused, steps: verifies, kind: decide.Wanted},
		"a file is not read, and nothing is to be done":   {unread: refused, kind: decide.Wanted},
		"a file is not read, and what is left goes first": {left: &fenced, unread: refused, steps: begins, kind: decide.CleanUp, why: refused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var seen state.Observed
			if row.left != nil {
				seen = *row.left
			}
			seen.Node, seen.Journal, seen.GPUs = &corev1.Node{}, row.journal, []nvml.GPU{{UUID: gpu}}
			seen.Node.Spec.Unschedulable = row.journal != nil && !row.uncordoned
			want := want
			want.Unread = row.unread
			goal := decide.GoalOf(&seen, want, row.err, config.MIGStrategyNone).Revised(&seen, want, row.steps, row.on, config.MIGStrategyNone)
			if goal.Kind != row.kind {
				t.Fatalf("kind %d, want %d: %v", goal.Kind, row.kind, goal.Why)
			}
			if row.why != nil && !errors.Is(goal.Why, row.why) {
				t.Errorf("why: %v, want %v", goal.Why, row.why)
			}
			_, asked := goal.Targets[gpu]
			if wanted := row.kind == decide.Wanted; asked != wanted {
				t.Errorf("the targets are those that the labels ask for: %t, want %t", asked, wanted)
			}
			if (goal.Kind == decide.StandStill || goal.Kind == decide.Cancel) && goal.Why == nil {
				t.Error("nothing says why the node stays as it is")
			}
		})
	}
}

// The way back is the layout of before, unless NVIDIA's DRA driver cuts the GPUs by now.
func TestTheWayBackIsTheLayoutOfBefore(t *testing.T) {
	t.Parallel()
	for owner, goesBack := range map[api.Owner]bool{
		api.OwnerPlugin: true, api.OwnerNone: true, api.OwnerDRAStatic: true, api.OwnerDRADynamic: false,
	} {
		seen := &state.Observed{Node: &corev1.Node{}, GPUs: []nvml.GPU{{UUID: "GPU-a"}}, Journal: &journal.Journal{Previous: []journal.GPULayout{{GPU: "GPU-a"}}}}
		seen.Owner.Kind = owner
		goal := decide.GoalOf(seen, state.Desired{}, errors.New("refused"), config.MIGStrategyNone)
		if goal.Kind != decide.Undo || (goal.Targets != nil) != goesBack || len(goal.Targets) == 1 != goesBack {
			t.Errorf("%v: kind %d, back to %v, want %t", owner, goal.Kind, goal.Targets, goesBack)
		}
	}
}

// Where NVIDIA's DRA driver cuts the GPUs, a change that has switched MIG modes alone goes back to these, and leaves the instances to the driver. A GPU on which
// the driver has made one by then keeps its mode.
func TestTheWayBackOfMIGModesIsTheModesOfBefore(t *testing.T) {
	t.Parallel()
	has := []nvml.Instance{{Placed: nvml.Placed{Profile: "1g.10gb"}}}
	seen := &state.Observed{
		Node: &corev1.Node{}, Owner: state.Owner{Kind: api.OwnerDRADynamic},
		GPUs:    []nvml.GPU{{UUID: "GPU-off"}, {UUID: "GPU-on", Instances: has}, {UUID: "GPU-used", Enabled: true, Instances: has}},
		Journal: &journal.Journal{ModesOnly: true, Previous: []journal.GPULayout{{GPU: "GPU-off"}, {GPU: "GPU-on", MIG: true}, {GPU: "GPU-used"}}},
	}
	want := plan.Targets{"GPU-off": {Undo: true, ModeOnly: true}, "GPU-on": {Request: nvml.Request{MIG: true}, Undo: true, ModeOnly: true}}
	goal := decide.GoalOf(seen, state.Desired{}, errors.New("refused"), config.MIGStrategyNone)
	if diff := cmp.Diff(want, goal.Targets); goal.Kind != decide.Undo || diff != "" {
		t.Errorf("kind %d, back to (-want +got):\n%s", goal.Kind, diff)
	}
}

// A change may wait for days. What an earlier agent has left goes first, but a cordon that a user may have put there stays.
func TestWhatAnEarlierAgentHasLeftGoesWhileAChangeWaits(t *testing.T) {
	t.Parallel()
	waits := &outcome.Waiting{Reason: config.ReasonAwaitingWindow}
	cordonedBy := func(manager string) func(*state.Observed) {
		return func(seen *state.Observed) {
			seen.Node.Spec.Unschedulable = true
			if manager != "" {
				seen.Node.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: manager, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`)}}
			}
		}
	}
	fenced := func(seen *state.Observed) { seen.Marks.Fenced = true }
	orphan := func(seen *state.Observed) { seen.Leftovers.Orphan.Kept = []string{"x"} }
	running := func(seen *state.Observed) { seen.Journal = &journal.Journal{} }
	for name, row := range map[string]struct {
		left []func(*state.Observed)
		err  error
		goes bool
	}{
		"nothing":                                  {err: waits},
		"an annotation":                            {left: []func(*state.Observed){orphan}, err: waits, goes: true},
		"an annotation, and the node is held":      {left: []func(*state.Observed){orphan}, err: &outcome.Waiting{Reason: config.ReasonHeld}, goes: true},
		"an annotation, and the change may run":    {left: []func(*state.Observed){orphan}},
		"an annotation, and the change has failed": {left: []func(*state.Observed){orphan}, err: errors.New("no")},
		"an annotation of the change":              {left: []func(*state.Observed){orphan, running}, err: waits},
		"a taint":                                  {left: []func(*state.Observed){fenced}, err: waits, goes: true},
		"a taint, and a user's cordon":             {left: []func(*state.Observed){fenced, cordonedBy("kubectl")}, err: waits, goes: true},
		"a taint, and an unknown cordon":           {left: []func(*state.Observed){fenced, cordonedBy("")}, err: waits},
		"a user's cordon":                          {left: []func(*state.Observed){cordonedBy("kubectl")}, err: waits},
		"a taint of the change":                    {left: []func(*state.Observed){fenced, running}, err: waits},
	} {
		seen := &state.Observed{Node: &corev1.Node{}}
		for _, leave := range row.left {
			leave(seen)
		}
		if goes := decide.CleansUpWhileWaiting(seen, row.err); goes != row.goes {
			t.Errorf("%s: it goes: %t, want %t", name, goes, row.goes)
		}
	}
}

// Who has uncordoned the node is mostly not known: kubectl leaves no name. A manager is named that owns the field since then.
func TestAChangeThatWasCancelledNamesWhoMayHaveUncordonedTheNode(t *testing.T) {
	t.Parallel()
	at := metav1.NewTime(time.Unix(1e9, 0))
	taints := metav1.ManagedFieldsEntry{Manager: "kube-controller-manager", Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:taints":{}}}`)}
	const when, unknown, who = " at 2001-09-09 01:46:40Z", " (the node does not show who)", " (autoscaler)"
	for name, row := range map[string]struct {
		fields []metav1.ManagedFieldsEntry
		says   string
	}{
		"nothing shows it":           {says: unknown},
		"the time is known":          {fields: []metav1.ManagedFieldsEntry{taints}, says: when + unknown},
		"another wrote at that time": {fields: []metav1.ManagedFieldsEntry{taints, {Manager: "kubectl-gpuslice", Time: &at}}, says: when + unknown},
		"another applied the field": {
			fields: []metav1.ManagedFieldsEntry{taints, {Manager: "autoscaler", Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:unschedulable":{}}}`)}}, says: when + who,
		},
	} {
		seen := &state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{ManagedFields: row.fields}}, Journal: &journal.Journal{Target: "mine", Cordoned: true}}
		want := state.Desired{Name: "mine", Fingerprint: "asked"}
		goal := decide.GoalOf(seen, want, nil, config.MIGStrategyNone).Revised(seen, want, []plan.Step{{Kind: plan.Evict}}, config.UncordonCancel, config.MIGStrategyNone)
		if text := "a user or tool uncordoned the node" + row.says + " during the change"; goal.Kind != decide.Cancel || !strings.HasPrefix(goal.Why.Error(), text) {
			t.Errorf("%s: kind %d: %v, want %q", name, goal.Kind, goal.Why, text)
		}
		if failure, is := errors.AsType[*api.Failure](goal.Why); !is || !failure.Cancelled || failure.Later {
			t.Errorf("%s: %+v, which would count as a failure of the pool", name, goal.Why)
		}
	}
}
