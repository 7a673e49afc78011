package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// one is the limit of a pool that lets one node at a time be unavailable.
const one = ", maxUnavailable: 1"

// disk has the record of a host.
type disk struct{ record *journal.Record }

func (d *disk) Read(context.Context) (*journal.Record, error) { return d.record, nil }

func (d *disk) Write(_ context.Context, r journal.Record) error { d.record = &r; return nil }

func (*disk) Try(context.Context, journal.Record) error { return nil }

func (*disk) SetAside(context.Context) (string, error) { return "", nil }

// recordOnDisk writes the record of a host.
func recordOnDisk() *journal.Writer {
	c := monotonic.New(testclock.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)))
	return &journal.Writer{Record: &journal.Keeper{Store: &disk{}, Log: zap.NewNop()}, Clock: c}
}

// member is a node of a pool, and its turn in that pool.
type member struct {
	turn *fleet.Slot
	seen func() *state.Observed
}

func newMember(t *testing.T, client *fake.Clientset, clock *monotonic.Clock, name, limit string) member {
	t.Helper()
	file, err := maintenance.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1m\npools: [{name: a, selector: pool=a" + limit + "}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-of-" + name), Labels: map[string]string{"pool": "a"}},
		Status:     corev1.NodeStatus{Capacity: oneGPU, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	m := member{turn: &fleet.Slot{
		Slots:   &fleet.Leases{Client: clientset.Of(client), Namespace: "gpuslice", Clock: clock, Log: zap.NewNop()},
		Journal: recordOnDisk(), Namespace: "gpuslice", Clock: clock, Log: zap.NewNop(),
	}}
	m.seen = func() *state.Observed {
		seen := &state.Observed{Node: node}
		seen.Pool.File, seen.Pool.Pool = file, file.For(node)
		m.turn.Observe(t.Context(), seen, true)
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
		"it waits for the pool":                    {acquire, &outcome.Waiting{For: outcome.ForSlot}, nil, true},
		"the pool could not be asked":              {acquire, errors.New("the API server is away"), nil, true},
		"it waits in the middle of the change":     {raise, &outcome.Waiting{For: outcome.ForRoom}, fenced, true},
		"a step fails in the middle of the change": {raise, errors.New("the driver failed"), fenced, true},
		"it waits for room in a budget":            {raise, &outcome.Waiting{For: outcome.ForRoom}, nil, false},
		"it waits for room before it has asked":    {acquire, &outcome.Waiting{For: outcome.ForRoom}, nil, false},
		"it waits for a window":                    {raise, &outcome.Waiting{Reason: config.ReasonAwaitingWindow}, nil, false},
		"the fence fails":                          {raise, errors.New("the API server refuses the patch"), nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			client, clock := fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
			m, other := newMember(t, client, clock, "gpu-1", one), newMember(t, client, clock, "gpu-2", one)
			if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
				t.Fatal(err)
			}
			seen := m.seen()
			seen.Journal = row.journal
			m.turn.Yield(t.Context(), seen, row.step, row.err)
			if held := m.seen().Pool.Slot.Held; held != row.keeps {
				t.Errorf("the node has a slot: %t, want %t", held, row.keeps)
			}
			if err := other.turn.Take(t.Context(), act.Input{Seen: other.seen()}); (err == nil) == row.keeps {
				t.Errorf("the other node asks for a slot and gets %v", err)
			}
		})
	}
}

// Promise 11. Right before the fence the node asks once more: it may have lost its slot since its observation.
func TestASlotThatAnotherNodeHasTakenIsNotConfirmed(t *testing.T) {
	t.Parallel()
	client, clock := fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
	m, other := newMember(t, client, clock, "gpu-1", one), newMember(t, client, clock, "gpu-2", one)
	if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
		t.Fatal(err)
	}
	seen := m.seen()
	if err := m.turn.Confirm(t.Context(), act.Input{Seen: seen}); err != nil {
		t.Errorf("the node has the slot, and gets %v", err)
	}
	if err := client.CoordinationV1().Leases("gpuslice").Delete(t.Context(), config.LeasePrefix+"a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := other.turn.Take(t.Context(), act.Input{Seen: other.seen()}); err != nil {
		t.Fatal(err)
	}
	var wait *outcome.Waiting
	if err := m.turn.Confirm(t.Context(), act.Input{Seen: seen}); !errors.As(err, &wait) || wait.Reason != config.ReasonAwaitingSlot {
		t.Errorf("another node has the slot, and this one gets %v", err)
	}
}

// Where no node may be unavailable the wait ends only by a user, so the message begins with what to do.
func TestAWaitForASlotSaysHowToGetOne(t *testing.T) {
	t.Parallel()
	const raise = "raise maxUnavailable of pool a in the maintenance file"
	for limit, want := range map[string]string{", maxUnavailable: 0": raise + "; pool a: no node may be unavailable", one: "; to let more nodes change at once, " + raise} {
		client, clock := fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
		first, m := newMember(t, client, clock, "gpu-1", limit), newMember(t, client, clock, "gpu-2", limit)
		_ = first.turn.Take(t.Context(), act.Input{Seen: first.seen()})
		if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("with %q the wait says %v, want %q", limit, err, want)
		}
	}
}

// Each agent of the cluster may write the Lease of each pool. Three nodes find slots there that none of them has asked for.
func TestASlotThatTheNodeHasNotTakenCountsForNothing(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		limit  string
		paused string
		may    int
	}{
		"the limit holds":              {one, "", 1},
		"a limit in per cent holds":    {", maxUnavailable: 40%", "", 1},
		"no node may be unavailable":   {", maxUnavailable: 0", "", 0},
		"the pause holds":              {", maxUnavailable: 3", "an audit", 0},
		"the pause holds, limit or no": {", pauseAfter: 1", "an audit", 0},
		"each may":                     {", maxUnavailable: 3", "", 3},
	} {
		t.Run(name, func(t *testing.T) {
			client, clock := fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
			var members []member
			var slots []string
			for i := range 3 {
				name := fmt.Sprintf("gpu-%d", i)
				members = append(members, newMember(t, client, clock, name, row.limit))
				slots = append(slots, fmt.Sprintf(`{"node":%q,"uid":"uid-of-%s","operation":"x","since":"2026-01-01T00:00:00Z","renewed":1}`, name, name))
			}
			lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: config.LeasePrefix + "a", Namespace: "gpuslice", Annotations: map[string]string{
				config.AnnotationSlots: `{"version":1,"turn":9,"left":9,"holders":[` + strings.Join(slots, ",") + `]}`,
			}}}
			if row.paused != "" {
				lease.Annotations[config.AnnotationPaused] = row.paused
			}
			if _, err := client.CoordinationV1().Leases("gpuslice").Create(t.Context(), lease, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			took := 0
			for range 2 {
				took = 0
				for _, m := range members {
					if seen := m.seen(); !seen.HoldsSlot() && m.turn.Take(t.Context(), act.Input{Seen: seen}) != nil {
						continue
					}
					if m.turn.Confirm(t.Context(), act.Input{Seen: m.seen()}) == nil {
						took++
					}
				}
			}
			if took != row.may {
				t.Errorf("%d of 3 nodes may be fenced, want %d", took, row.may)
			}
		})
	}
}

// A slot that a node has lost is not its own again because another client puts it back.
func TestASlotThatTheNodeHasLostAndGetsBackCountsForNothing(t *testing.T) {
	t.Parallel()
	client, clock := fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
	m := newMember(t, client, clock, "gpu-1", one)
	if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
		t.Fatal(err)
	}
	leases := client.CoordinationV1().Leases("gpuslice")
	taken, err := leases.Get(t.Context(), config.LeasePrefix+"a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	write := func(slots string) {
		t.Helper()
		l := taken.DeepCopy()
		l.Annotations = map[string]string{config.AnnotationSlots: slots, config.AnnotationPaused: "an audit"}
		if _, err := leases.Update(t.Context(), l, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"version":1,"turn":9,"left":9}`)
	m.seen()
	write(taken.Annotations[config.AnnotationSlots])
	if m.seen().HoldsSlot() {
		t.Error("the node needs no slot")
	}
	var wait *outcome.Waiting
	if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); !errors.As(err, &wait) || wait.Reason != config.ReasonPoolPaused {
		t.Errorf("the pool is paused, and the node gets %v", err)
	}
}
