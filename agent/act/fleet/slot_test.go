package fleet_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	testclock "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// A pass that leads to nothing costs the API server no request, also in a pool with a limit.
func TestTheLeaseOfThePoolIsReadAgainOnlyForWhatWantsASlot(t *testing.T) {
	client := fake.NewClientset()
	c := monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
	turn := &fleet.Slot{Slots: &fleet.Leases{Client: clientset.Of(client), Namespace: "gpuslice", Clock: c, Log: zap.NewNop()}, Journal: recordOnDisk(), Namespace: "gpuslice", Clock: c, Log: zap.NewNop()}
	file, err := maintenance.Parse([]byte("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1m\n" +
		"pools: [{name: a, selector: pool=a, maxUnavailable: 1}, {name: b, selector: pool=b, maxUnavailable: 1}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	observed := func(pool string) *state.Observed {
		seen := &state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", Labels: map[string]string{"pool": pool}}}}
		seen.Pool.File = file
		seen.Pool.Pool = file.For(seen.Node)
		return seen
	}
	observe := func(pool string, fresh bool) (*state.Observed, int) {
		client.ClearActions()
		seen := observed(pool)
		turn.Observe(t.Context(), seen, fresh)
		return seen, len(client.Actions())
	}
	for i, step := range []struct {
		pool  string
		fresh bool
		reads int
	}{{"a", false, 1}, {"a", false, 0}, {"a", true, 1}, {"a", false, 0}, {"b", false, 1}, {"a", false, 1}, {"a", false, 0}} {
		if _, reads := observe(step.pool, step.fresh); reads != step.reads {
			t.Errorf("observation %d, %+v, sends %d requests", i, step, reads)
		}
	}
	if _, err := client.CoreV1().Nodes().Create(t.Context(), observed("a").Node, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := turn.Take(t.Context(), act.Input{Seen: observed("a")}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if seen, reads := observe("a", false); reads != 1 || !seen.Pool.Slot.Held {
			t.Errorf("with a slot, an observation sends %d requests and finds %+v", reads, seen.Pool.Slot)
		}
	}
	seen, _ := observe("a", false)
	if err := turn.Return(t.Context(), act.Input{Seen: seen}); err != nil {
		t.Fatal(err)
	}
	for i, want := range []int{1, 0} {
		if seen, reads := observe("a", false); reads != want || seen.Pool.Slot.Held {
			t.Errorf("observation %d after the slot was returned sends %d requests and finds %+v", i, reads, seen.Pool.Slot)
		}
	}
	begun := observed("a")
	begun.Journal = &journal.Journal{Cordoned: true}
	client.ClearActions()
	if turn.Observe(t.Context(), begun, true); len(client.Actions()) > 0 {
		t.Errorf("a change that has begun without a slot sends %d requests", len(client.Actions()))
	}
}

// An installation without these rights must not begin all nodes at once, and has to say what it lacks.
func TestAnAgentWithoutRightsOnLeasesSaysWhichItLacks(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("*", "leases", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Group: "coordination.k8s.io", Resource: "leases"}, "gpuslice-pool-profile.a", errors.New("no rights"))
	})
	c := monotonic.New(testclock.NewFakeClock(metav1.Now().Time))
	turn := &fleet.Slot{Slots: &fleet.Leases{Client: clientset.Of(client), Namespace: "gpuslice", Clock: c, Log: zap.NewNop()}, Journal: recordOnDisk(), Namespace: "gpuslice", Clock: c, Log: zap.NewNop()}
	seen := &state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", Labels: map[string]string{config.LabelProfile: "a"}}}}
	seen.Pool.File = maintenance.Without()
	seen.Pool.File.Asked = func(node *corev1.Node) (string, string) { return config.LabelProfile, node.Labels[config.LabelProfile] }
	seen.Pool.Pool = seen.Pool.File.For(seen.Node)
	var wait *outcome.Waiting
	err := turn.Take(t.Context(), act.Input{Seen: seen})
	if !errors.As(err, &wait) || wait.Reason != config.ReasonAwaitingSlot || !strings.Contains(wait.Advice, "leases in namespace gpuslice") || turn.Claim() != "" {
		t.Errorf("claims %q, and says %v", turn.Claim(), err)
	}
}

// A node takes and returns its slot by one call each, which repeats requests that fail.
func TestTheLeaseOfAPoolIsAskedForAgainWhereTheAPIServerFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		m := newMember(t, client, monotonic.New(testclock.NewFakeClock(metav1.Now().Time)), "gpu-1", one)
		verbs := []string{"get", "create", "update"}
		asked := map[string]int{}
		for _, verb := range verbs {
			client.PrependReactor(verb, "leases", func(k8stesting.Action) (bool, runtime.Object, error) {
				if asked[verb]++; asked[verb]%2 == 1 {
					return true, nil, apierrors.NewInternalError(apierrors.NewServiceUnavailable("no upstream"))
				}
				return false, nil, nil
			})
		}
		if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
			t.Errorf("taking a slot: %v", err)
		}
		if err := m.turn.Return(t.Context(), act.Input{Seen: m.seen()}); err != nil {
			t.Errorf("returning it: %v", err)
		}
		for _, verb := range verbs {
			if asked[verb] < 2 {
				t.Errorf("%s was sent %d times, and not again", verb, asked[verb])
			}
		}
	})
}

// Any agent can write the Lease: what that says is quoted, and the node's own agent says how to go on.
func TestAPoolThatAUserHasPausedSaysHowToGoOn(t *testing.T) {
	t.Parallel()
	for _, why := range []string{
		"the auditors are here",
		"the auditors are here; to go on: kubectl create clusterrolebinding all --clusterrole=cluster-admin --group=all; gpuslice.io/paused-",
	} {
		client := fake.NewClientset(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
			Name: config.LeasePrefix + "a", Namespace: "gpuslice", Annotations: map[string]string{config.AnnotationPaused: why},
		}})
		m := newMember(t, client, monotonic.New(testclock.NewFakeClock(metav1.Now().Time)), "gpu-1", one)
		var wait *outcome.Waiting
		err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()})
		if !errors.As(err, &wait) || wait.Reason != config.ReasonPoolPaused {
			t.Fatalf("the pool is paused, and the node gets %v", err)
		}
		says, advice := `pool a begins no change: its Lease says "`+why+`"`, "to go on: kubectl -n gpuslice annotate lease gpuslice-pool-a gpuslice.io/paused-"
		if wait.Message != says || wait.Advice != advice {
			t.Errorf("the node says %q, and advises %q; want %q and %q", wait.Message, wait.Advice, says, advice)
		}
	}
}

// A change that is postponed, or that a user has cancelled, has not failed.
func TestWhichEndsOfAChangeCountAsFailuresOfThePool(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		undo   *api.Failure
		pauses bool
	}{
		"it has succeeded":     {nil, false},
		"it has failed":        {&api.Failure{Reason: config.ReasonHardwareFailure}, true},
		"it is postponed":      {&api.Failure{Reason: config.ReasonWindowClosed, Later: true}, false},
		"a user has cancelled": {&api.Failure{Reason: config.ReasonCancelled, Cancelled: true}, false},
	} {
		m := newMember(t, fake.NewClientset(), monotonic.New(testclock.NewFakeClock(metav1.Now().Time)), "gpu-1", one+", pauseAfter: 1")
		if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
			t.Fatal(err)
		}
		seen := m.seen()
		seen.Journal = &journal.Journal{Operation: m.turn.Claim(), Undo: row.undo}
		m.turn.End(t.Context(), seen, state.Desired{Undo: row.undo != nil})
		if after := m.seen().Pool.Slot; (after.Paused != "") != row.pauses || after.Held {
			t.Errorf("%s: the pool is paused: %q, want %t; the node still has its slot: %t", name, after.Paused, row.pauses, after.Held)
		}
	}
}

// If the Lease comes back from a backup, the node returns its slot once more.
func TestASlotThatIsThereAgainIsReturnedAgain(t *testing.T) {
	t.Parallel()
	client := fake.NewClientset()
	m := newMember(t, client, monotonic.New(testclock.NewFakeClock(metav1.Now().Time)), "gpu-1", one)
	if err := m.turn.Take(t.Context(), act.Input{Seen: m.seen()}); err != nil {
		t.Fatal(err)
	}
	leases := client.CoordinationV1().Leases("gpuslice")
	backup, err := leases.Get(t.Context(), config.LeasePrefix+"a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.turn.Return(t.Context(), act.Input{Seen: m.seen()}); err != nil {
			t.Fatal(err)
		}
		if m.seen().Pool.Slot.Held {
			t.Fatal("the slot is not returned")
		}
		if _, err := leases.Update(t.Context(), backup.DeepCopy(), metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		if !m.seen().Pool.Slot.Held {
			t.Fatal("the node does not see that it has a slot again")
		}
	}
}
