package agent

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
	"github.com/gpuslice/gpuslice/config"
)

// slotNews is the least time between two words on whom the pool does without: with hundreds of nodes that wait, each word of each
// is a write.
const slotNews = 5 * time.Minute

// turnOf is the change that the slot is for.
func (a *Agent) turnOf(s state.Observed) fleet.Change {
	return fleet.Change{Node: s.Node.Name, UID: s.Node.UID, Operation: cmp.Or(s.Operation(), a.turn.claim), Since: a.now()}
}

// observeSlot looks whether the node has a slot of its pool. That it cannot be looked at is no error: a slot is needed to begin, and
// taking it will tell.
func (a *Agent) observeSlot(ctx context.Context, seen *state.Observed) {
	if !seen.Pooled() {
		return
	}
	var err error
	if seen.Pool.Slot, err = a.turn.slots.Look(ctx, seen.PoolOf(), a.turnOf(*seen)); err != nil {
		a.log.Warn("looking at the slots of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// turn is what is known of the node's turn in its pool.
type turn struct {
	slots  *fleet.Slots
	claim  string      // operation for which a slot was taken
	full   *fleet.Full // what people were told of why the node waits for one
	fullAt time.Time   // and when
}

// Forget implements forgetter.
func (t *turn) Forget(time.Time) {
	t.full = nil
	t.slots.Forget()
}

// renewSlot says that the change is still under way. A slot that this process has taken for it and that was lost since is taken back:
// not every change has a fence by which others know of it.
func (a *Agent) renewSlot(ctx context.Context, seen state.Observed) {
	lost := seen.Pooled() && seen.DisruptionStarted() && a.turn.claim != "" && a.turn.claim == seen.Operation()
	if !lost && !a.hasSlot(seen) {
		return
	}
	if err := a.turn.slots.Renew(ctx, seen.PoolOf(), a.turnOf(seen)); err != nil {
		a.log.Warn("renewing the slot of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// hasSlot reports whether the slot is that of the change that is under way, or about to begin. One of an earlier process is taken anew.
func (a *Agent) hasSlot(s state.Observed) bool {
	operation := cmp.Or(s.Operation(), a.turn.claim)
	return s.Pool.Slot.Held && operation != "" && s.Pool.Slot.Operation == operation
}

// plannedSlot is what the planner needs of it. A change that has begun needs none: its node is one that the pool does without.
func (a *Agent) plannedSlot(s state.Observed, want state.Desired) plan.Slot {
	return plan.Slot{
		Needed: s.Pooled() && !want.Undo && !s.DisruptionStarted() && !a.hasSlot(s), Spared: s.Restores(want),
		Has: s.Pool.Slot.Held || s.Pool.Slot.Waiting,
	}
}

// takeSlot asks for the node's turn, once nothing else is in the way: who cannot be drained keeps no other node waiting.
func (a *Agent) takeSlot(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step) error {
	if err := a.preflight(ctx, seen, want, steps); err != nil {
		return err
	}
	turn := a.turnOf(seen)
	turn.Operation, turn.Since = cmp.Or(turn.Operation, uuid.NewString()), seen.Asked(want, a.now())
	if err := a.askForSlot(ctx, seen, turn); err != nil {
		return err
	}
	a.turn.claim = turn.Operation
	return nil
}

// confirmSlot makes sure right before the fence that the slot was not given to another node meanwhile.
func (a *Agent) confirmSlot(ctx context.Context, seen state.Observed, want state.Desired) error {
	if !seen.Pooled() || !a.hasSlot(seen) {
		return nil
	}
	turn := a.turnOf(seen)
	turn.Since = seen.Asked(want, a.now())
	return a.askForSlot(ctx, seen, turn)
}

func (a *Agent) askForSlot(ctx context.Context, seen state.Observed, turn fleet.Change) error {
	err := a.turn.slots.Take(ctx, seen.PoolOf(), turn)
	var full *fleet.Full
	var paused *fleet.Paused
	switch {
	case errors.As(err, &full):
		return a.awaitSlot(seen, full)
	case errors.As(err, &paused):
		wait := a.poolPaused(seen, paused.Why)
		wait.After, wait.Since = paused.Retry, seen.Since(config.ReasonPoolPaused, a.now())
		return wait
	default:
		return err
	}
}

// poolPaused says why no node of the pool begins anything.
func (a *Agent) poolPaused(s state.Observed, why string) *outcome.Waiting {
	wait := &outcome.Waiting{
		Reason: config.ReasonPoolPaused, For: outcome.ForTurn, Message: fmt.Sprintf("pool %s begins nothing: %s", s.Pool.Name, why),
		Blockers: []string{"pool " + s.Pool.Name + " is paused: " + why},
	}
	if !strings.Contains(why, config.AnnotationPaused) { // as what people write may say as well
		wait.Advice = fmt.Sprintf("to go on: kubectl -n %s annotate lease %s%s %s-",
			a.settings.Maintenance.Namespace, config.LeasePrefix, s.Pool.Name, config.AnnotationPaused)
	}
	return wait
}

// awaitSlot says whom the pool does without at present. That changes often, and is told anew now and then.
func (a *Agent) awaitSlot(seen state.Observed, full *fleet.Full) *outcome.Waiting {
	now := a.clock.Now()
	if a.turn.full == nil || now.Sub(a.turn.fullAt) >= slotNews || seen.Record.Status.Reason != config.ReasonAwaitingSlot {
		a.turn.full, a.turn.fullAt = full, now
	}
	return &outcome.Waiting{
		Reason: config.ReasonAwaitingSlot, For: outcome.ForTurn, After: full.Retry, Since: seen.Since(config.ReasonAwaitingSlot, a.now()),
		Message: a.turn.full.Error(), Blockers: a.turn.full.Unavailable,
		Advice: "the node is as it was meanwhile, and has its turn by the age of its wish",
	}
}

// yieldSlot gives the slot back if the change, before it has disturbed anything, has to wait for something other than the pool, or keeps failing.
// A change that has only failed to ask for the slot keeps its place in line.
func (a *Agent) yieldSlot(ctx context.Context, seen state.Observed, step plan.Step, err error) {
	var wait *outcome.Waiting
	waits := errors.As(err, &wait)
	switch {
	case err == nil, seen.DisruptionStarted(), apierrors.IsConflict(err):
	case waits && wait.For == outcome.ForTurn:
	case !waits && step.Kind == plan.AcquireSlot:
	default:
		a.leavePool(ctx, seen)
	}
}

// leavePool gives the slot, or the place in line, to others. If that fails, a plan of its own does it.
func (a *Agent) leavePool(ctx context.Context, seen state.Observed) {
	if err := a.returnSlot(ctx, seen); err != nil {
		a.log.Warn("giving the slot of the pool back", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// returnSlot gives back a slot, or a place in line, that nothing needs any more. What it was for counts neither as done nor as failed.
func (a *Agent) returnSlot(ctx context.Context, seen state.Observed) error {
	if !seen.Pooled() || !seen.Pool.Slot.Held && !seen.Pool.Slot.Waiting {
		return nil
	}
	if err := a.turn.slots.Leave(ctx, seen.PoolOf(), a.turnOf(seen)); err != nil {
		return err
	}
	a.turn.claim = ""
	return nil
}

// endTurn lets another node have its turn when the node is given back. Where that fails, the slot is returned by a plan of its own.
func (a *Agent) endTurn(ctx context.Context, seen state.Observed, want state.Desired) {
	a.countFailure(ctx, seen, seen.Journal.Undo)
	a.turn.claim = ""
	if want.Undo || !seen.Pooled() || !seen.Pool.Slot.Held {
		a.leavePool(ctx, seen)
		return
	}
	if err := a.turn.slots.Release(ctx, seen.PoolOf(), a.turnOf(seen)); err != nil {
		a.log.Warn("giving the slot of the pool back", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// countFailure tells the pool that the change has failed here: too many in a row, and it pauses itself. What people have called off, and
// what is only put off, has not failed.
func (a *Agent) countFailure(ctx context.Context, seen state.Observed, failure *api.Failure) {
	if failure == nil || failure.Later || failure.Cancelled || !seen.Pooled() {
		return
	}
	if err := a.turn.slots.Fail(ctx, seen.PoolOf(), a.turnOf(seen), string(failure.Reason)+": "+failure.Message); err != nil {
		a.log.Warn("telling the pool of a failure", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}
