// Package slot has the node wait for its turn in its pool: a change that takes capacity away begins with a slot of the pool, and gives it back in the end.
package slot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
)

// Turn is the node's in its pool, and what is known of it.
type Turn struct {
	Slots     *fleet.Slots
	Namespace string // of the pools' Leases
	Clock     *steady.Clock
	Log       *zap.Logger

	claim  string      // operation for which a slot was taken
	full   *fleet.Full // what people were told of why the node waits for one
	fullAt time.Time   // and when
}

// Claim is the operation for which this process has taken a slot; empty if it has taken none.
func (t *Turn) Claim() string { return t.claim }

// Forget drops what depends on times that the clock gave.
func (t *Turn) Forget(time.Time) {
	t.full = nil
	t.Slots.Forget()
}

// slotNews is the least time between two words on whom the pool does without: with hundreds of nodes that wait, each word of each
// is a write.
const slotNews = 5 * time.Minute

// change is the change that the slot is for.
func (t *Turn) change(s state.Observed) fleet.Change {
	return fleet.Change{Node: s.Node.Name, UID: s.Node.UID, Operation: cmp.Or(s.Operation(), t.claim), Since: t.Clock.Stamp()}
}

// Observe looks whether the node has a slot of its pool. That it cannot be looked at is no error: a slot is needed to begin, and
// taking it will tell.
func (t *Turn) Observe(ctx context.Context, seen *state.Observed) {
	if !seen.InLimitedPool() {
		return
	}
	var err error
	if seen.Pool.Slot, err = t.Slots.Look(ctx, seen.PoolOf(), t.change(*seen)); err != nil {
		t.Log.Warn("looking at the slots of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// Renew says that the change is still under way. A slot that this process has taken for it and that was lost since is taken back:
// not every change has a fence by which others know of it.
func (t *Turn) Renew(ctx context.Context, seen state.Observed) {
	lost := seen.InLimitedPool() && seen.DisruptionStarted() && t.claim != "" && t.claim == seen.Operation()
	if !lost && !t.holds(seen) {
		return
	}
	if err := t.Slots.Renew(ctx, seen.PoolOf(), t.change(seen)); err != nil {
		t.Log.Warn("renewing the slot of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// holds reports whether the slot is that of the change that is under way, or about to begin. One of an earlier process is taken anew.
func (t *Turn) holds(s state.Observed) bool {
	operation := cmp.Or(s.Operation(), t.claim)
	return s.Pool.Slot.Held && operation != "" && s.Pool.Slot.Operation == operation
}

// Planned is what the planner needs of it. A change that has begun needs none: its node is one that the pool does without.
func (t *Turn) Planned(s state.Observed, want state.Desired) plan.Slot {
	return plan.Slot{
		Needed: s.InLimitedPool() && !want.Undo && !s.DisruptionStarted() && !t.holds(s), Spared: s.Restores(want),
		Has: s.Pool.Slot.Held || s.Pool.Slot.Waiting,
	}
}

// Take asks for the node's turn, once nothing else is in the way: who cannot be drained keeps no other node waiting.
func (t *Turn) Take(ctx context.Context, seen state.Observed, want state.Desired) error {
	turn := t.change(seen)
	turn.Operation, turn.Since = cmp.Or(turn.Operation, uuid.NewString()), seen.AskedSince(want, t.Clock.Stamp())
	if err := t.ask(ctx, seen, turn); err != nil {
		return err
	}
	t.claim = turn.Operation
	return nil
}

// Confirm makes sure right before the fence that the slot was not given to another node meanwhile.
func (t *Turn) Confirm(ctx context.Context, seen state.Observed, want state.Desired) error {
	if !seen.InLimitedPool() || !t.holds(seen) {
		return nil
	}
	turn := t.change(seen)
	turn.Since = seen.AskedSince(want, t.Clock.Stamp())
	return t.ask(ctx, seen, turn)
}

func (t *Turn) ask(ctx context.Context, seen state.Observed, turn fleet.Change) error {
	err := t.Slots.Take(ctx, seen.PoolOf(), turn)
	var full *fleet.Full
	var paused *fleet.Paused
	switch {
	case errors.As(err, &full):
		return t.await(seen, full)
	case errors.As(err, &paused):
		wait := t.Paused(seen, paused.Why)
		wait.After, wait.Since = paused.Retry, seen.Since(config.ReasonPoolPaused, t.Clock.Stamp())
		return wait
	default:
		return err
	}
}

// Paused says why no node of the pool begins anything.
func (t *Turn) Paused(s state.Observed, why string) *outcome.Waiting {
	wait := &outcome.Waiting{
		Reason: config.ReasonPoolPaused, For: outcome.ForTurn, Message: fmt.Sprintf("pool %s begins nothing: %s", s.Pool.Name, why),
		Blockers: []string{"pool " + s.Pool.Name + " is paused: " + why},
	}
	if !strings.Contains(why, config.AnnotationPaused) { // as what people write may say as well
		wait.Advice = fmt.Sprintf("to go on: kubectl -n %s annotate lease %s%s %s-",
			t.Namespace, config.LeasePrefix, s.Pool.Name, config.AnnotationPaused)
	}
	return wait
}

// await says whom the pool does without at present. That changes often, and is told anew now and then.
func (t *Turn) await(seen state.Observed, full *fleet.Full) *outcome.Waiting {
	now := t.Clock.Now()
	if t.full == nil || now.Sub(t.fullAt) >= slotNews || seen.Record.Status.Reason != config.ReasonAwaitingSlot {
		t.full, t.fullAt = full, now
	}
	return &outcome.Waiting{
		Reason: config.ReasonAwaitingSlot, For: outcome.ForTurn, After: full.Retry, Since: seen.Since(config.ReasonAwaitingSlot, t.Clock.Stamp()),
		Message: t.full.Error(), Blockers: t.full.Unavailable,
		Advice: "the node is as it was meanwhile, and has its turn by the age of its wish",
	}
}

// Yield gives the slot back if the change, before it has disturbed anything, has to wait for something other than the pool, or keeps failing.
// A change that has only failed to ask for the slot keeps its place in line.
func (t *Turn) Yield(ctx context.Context, seen state.Observed, step plan.Step, err error) {
	var wait *outcome.Waiting
	waits := errors.As(err, &wait)
	switch {
	case err == nil, seen.DisruptionStarted(), apierrors.IsConflict(err):
	case waits && wait.For == outcome.ForTurn:
	case !waits && step.Kind == plan.AcquireSlot:
	default:
		t.Leave(ctx, seen)
	}
}

// Leave gives the slot, or the place in line, to others. If that fails, a plan of its own does it.
func (t *Turn) Leave(ctx context.Context, seen state.Observed) {
	if err := t.Return(ctx, seen); err != nil {
		t.Log.Warn("giving the slot of the pool back", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// Return gives back a slot, or a place in line, that nothing needs any more. What it was for counts neither as done nor as failed.
func (t *Turn) Return(ctx context.Context, seen state.Observed) error {
	if !seen.InLimitedPool() || !seen.Pool.Slot.Held && !seen.Pool.Slot.Waiting {
		return nil
	}
	if err := t.Slots.Leave(ctx, seen.PoolOf(), t.change(seen)); err != nil {
		return err
	}
	t.claim = ""
	return nil
}

// End lets another node have its turn when the node is given back. Where that fails, the slot is returned by a plan of its own.
func (t *Turn) End(ctx context.Context, seen state.Observed, want state.Desired) {
	t.CountFailure(ctx, seen, seen.Journal.Undo)
	t.claim = ""
	if want.Undo || !seen.InLimitedPool() || !seen.Pool.Slot.Held {
		t.Leave(ctx, seen)
		return
	}
	if err := t.Slots.Release(ctx, seen.PoolOf(), t.change(seen)); err != nil {
		t.Log.Warn("giving the slot of the pool back", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// CountFailure tells the pool that the change has failed here: too many in a row, and it pauses itself. What people have called off, and
// what is only put off, has not failed.
func (t *Turn) CountFailure(ctx context.Context, seen state.Observed, failure *api.Failure) {
	if failure == nil || failure.Later || failure.Cancelled || !seen.InLimitedPool() {
		return
	}
	if err := t.Slots.Fail(ctx, seen.PoolOf(), t.change(seen), string(failure.Reason)+": "+failure.Message); err != nil {
		t.Log.Warn("telling the pool of a failure", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}
