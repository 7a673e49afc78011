package slot_test

import (
	"errors"
	"testing"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/slot"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// member is a node of a pool that lets one node at a time be unavailable, and its turn in that pool.
type member struct {
	turn *slot.Turn
	seen func() state.Observed
}

func newMember(t *testing.T, client *fake.Clientset, clock *steady.Clock, name string) member {
	t.Helper()
	file, err := config.ParseMaintenance([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1m\npools: [{name: a, selector: pool=a, maxUnavailable: 1}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-of-" + name), Labels: map[string]string{"pool": "a"}},
		Status:     corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	m := member{turn: &slot.Turn{
		Slots:     &fleet.Slots{Client: clientset.Of(client), Namespace: "gpuslice", Clock: clock, Log: zap.NewNop()},
		Namespace: "gpuslice", Clock: clock, Log: zap.NewNop(),
	}}
	m.seen = func() state.Observed {
		seen := state.Observed{Node: node}
		seen.Pool.File, seen.Pool.Pool = file, file.For(node)
		m.turn.Observe(t.Context(), &seen, true)
		return seen
	}
	return m
}

// Promise 11. A node that waits for something else, or that keeps failing, keeps no other node of its pool waiting.
func TestANodeKeepsItsSlotOnlyForWhatItDoesOrForThePool(t *testing.T) {
	t.Parallel()
	fenced := &journal.Journal{Cordoned: true}
	acquire, raise := plan.Step{Kind: plan.AcquireSlot}, plan.Step{Kind: plan.Fence}
	conflict := apierrors.NewConflict(corev1.Resource("nodes"), "gpu-1", errors.New("it has changed"))
	for name, row := range map[string]struct {
		step    plan.Step
		err     error
		journal *journal.Journal
		keeps   bool
	}{
		"the step is done":                         {acquire, nil, nil, true},
		"the node object has changed":              {raise, conflict, nil, true},
		"it waits for the pool":                    {acquire, &outcome.Waiting{For: outcome.ForTurn}, nil, true},
		"the pool could not be asked":              {acquire, errors.New("the API server is away"), nil, true},
		"it waits in the middle of the change":     {raise, &outcome.Waiting{For: outcome.ForRoom}, fenced, true},
		"a step fails in the middle of the change": {raise, errors.New("the driver failed"), fenced, true},
		"it waits for room in a budget":            {raise, &outcome.Waiting{For: outcome.ForRoom}, nil, false},
		"it waits for room before it has asked":    {acquire, &outcome.Waiting{For: outcome.ForRoom}, nil, false},
		"it waits for a window":                    {raise, &outcome.Waiting{Reason: config.ReasonAwaitingWindow}, nil, false},
		"the fence fails":                          {raise, errors.New("the API server refuses the patch"), nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			client, clock := fake.NewClientset(), steady.New(testclock.NewFakeClock(metav1.Now().Time))
			m, other := newMember(t, client, clock, "gpu-1"), newMember(t, client, clock, "gpu-2")
			if err := m.turn.Take(t.Context(), m.seen(), state.Desired{}); err != nil {
				t.Fatal(err)
			}
			seen := m.seen()
			seen.Journal = row.journal
			m.turn.Yield(t.Context(), seen, row.step, row.err)
			if held := m.seen().Pool.Slot.Held; held != row.keeps {
				t.Errorf("the node has a slot: %t, want %t", held, row.keeps)
			}
			if err := other.turn.Take(t.Context(), other.seen(), state.Desired{}); (err == nil) == row.keeps {
				t.Errorf("the other node asks for a slot and gets %v", err)
			}
		})
	}
}

// Promise 11. Right before the fence the node asks once more: it may have lost its slot since it has looked.
func TestASlotThatAnotherNodeHasTakenIsNotConfirmed(t *testing.T) {
	t.Parallel()
	client, clock := fake.NewClientset(), steady.New(testclock.NewFakeClock(metav1.Now().Time))
	m, other := newMember(t, client, clock, "gpu-1"), newMember(t, client, clock, "gpu-2")
	if err := m.turn.Take(t.Context(), m.seen(), state.Desired{}); err != nil {
		t.Fatal(err)
	}
	seen := m.seen()
	if err := m.turn.Confirm(t.Context(), seen, state.Desired{}); err != nil {
		t.Errorf("the node has the slot, and gets %v", err)
	}
	if err := client.CoordinationV1().Leases("gpuslice").Delete(t.Context(), config.LeasePrefix+"a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := other.turn.Take(t.Context(), other.seen(), state.Desired{}); err != nil {
		t.Fatal(err)
	}
	var wait *outcome.Waiting
	if err := m.turn.Confirm(t.Context(), seen, state.Desired{}); !errors.As(err, &wait) || wait.Reason != config.ReasonAwaitingSlot {
		t.Errorf("another node has the slot, and this one gets %v", err)
	}
}
