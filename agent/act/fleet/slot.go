package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// Slot takes, renews and returns the node's slot in its pool: slots enforce maxUnavailable. Leases has the protocol between the nodes.
type Slot struct {
	Slots     *Leases
	Journal   *journal.Writer
	Namespace string // of the pools' Leases
	Clock     *monotonic.Clock
	Log       *zap.Logger

	claim     string    // operation that this process has taken a slot for
	full      *Full     // the last reported reason why the node waits for a slot
	fullAt    time.Time // when the agent has reported it
	notQueued notQueued // last read: this node neither holds a slot nor waits; zero if that is not known
}

// notQueued is a node in a pool that neither has a slot nor waits for one.
type notQueued struct {
	pool string
	node types.UID
}

// slots returns the Leases for a call that may change whether this node holds a slot or waits.
func (s *Slot) slots() *Leases {
	s.notQueued = notQueued{}
	return s.Slots
}

// Claim returns the operation that this process has taken a slot for; empty if it has taken none.
func (s *Slot) Claim() string { return s.claim }

// Forget drops what was computed from earlier times of the clock.
func (s *Slot) Forget(time.Time) {
	s.full = nil
	s.slots().Forget()
}

// slotNews is the least time between two reports of the nodes that are in the way: with hundreds of nodes that wait, each report of each
// is a write.
const slotNews = 5 * time.Minute

// change is the change that the slot is for.
func (s *Slot) change(seen *state.Observed) Change {
	return Change{Node: seen.Node.Name, UID: seen.Node.UID, Operation: cmp.Or(seen.Operation(), s.claim), Since: s.Clock.Stamp()}
}

// poolOf returns the node's pool.
func poolOf(s *state.Observed) Pool { return PoolOf(s.Pool.File, s.Pool.Pool) }

// Observe reads whether the node has a slot of its pool. If it cannot, it returns no error: a change needs a slot to begin, and Take will
// return the error.
//
// Only the node's own agent adds it to the queue, and other agents give slots only to nodes in the queue. So if the node neither held a slot
// nor waited, only a fresh observation reads the Lease again. Otherwise each event on any node of a large pool at rest would cost the API
// server a request. Nor does a change that has begun without a slot to remove something request one later.
func (s *Slot) Observe(ctx context.Context, seen *state.Observed, fresh bool) {
	seen.Pool.Claim = s.claim
	if !seen.Pool.HasLimit() {
		return
	}
	apart := notQueued{pool: seen.Pool.Name, node: seen.Node.UID}
	if s.notQueued == apart && (!fresh || seen.DisruptionStarted()) {
		return
	}
	var err error
	if seen.Pool.Slot, err = s.slots().Read(ctx, poolOf(seen), s.change(seen)); err != nil {
		s.Log.Warn("observing the slots of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
		return
	}
	if !seen.DisruptionStarted() && !seen.HoldsSlot() { // a node that has lost its slot asks for another: any agent may have written one that reappears
		s.claim, seen.Pool.Claim = "", ""
	}
	if seen.Pool.Slot == (state.Slot{}) && s.claim == "" {
		s.notQueued = apart
	}
}

// Renew renews the slot of a change that is under way. It takes a slot that this or an earlier process has lost again: not every change has a fence that
// other nodes' agents see, and the node's labels may no longer choose the pool.
func (s *Slot) Renew(ctx context.Context, seen *state.Observed) {
	lost := seen.Pool.HasLimit() && seen.DisruptionStarted() && seen.Record.Learnt.Pool != nil
	if !lost && !seen.HoldsSlot() {
		return
	}
	if err := s.slots().Renew(ctx, poolOf(seen), s.change(seen)); err != nil {
		s.Log.Warn("renewing the slot of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// Take asks the pool for a slot, once nothing else is in the way: a node that cannot be drained keeps no other node waiting.
func (s *Slot) Take(ctx context.Context, in act.Input) error {
	c := s.change(in.Seen)
	c.Operation, c.Since = cmp.Or(c.Operation, uuid.NewString()), in.Seen.AskedSince(in.Want, s.Clock.Stamp())
	if err := s.join(ctx, in); err != nil {
		return err
	}
	if err := s.ask(ctx, in.Seen, c); err != nil {
		return err
	}
	s.claim = c.Operation
	return nil
}

// join notes the pool before its Lease has anything of the node.
func (s *Slot) join(ctx context.Context, in act.Input) error {
	p := in.Seen.Pool.Pool
	if former := in.Seen.Record.Learnt.Pool; former != nil && former.Name != p.Name {
		return fmt.Errorf("node %s has not left pool %s yet, see the agent's log: it asks pool %s for a slot after that", in.Seen.Node.Name, former.Name, p.Name)
	}
	pool := journal.Pool{Name: p.Name}
	if named := in.Seen.Pool.File.Named(p.Name, ""); named.Selector == nil && p.Selector != nil {
		pool.Selector = p.Selector.String()
	}
	return s.Journal.JoinPool(ctx, in.Seen.Writing(in.Want, plan.AcquireSlot), pool)
}

// LeaveFormer returns what the node has in a pool that its labels chose before. A change that disturbs the node stays in its pool, see ChoosePool.
func (s *Slot) LeaveFormer(ctx context.Context, seen *state.Observed) {
	former := seen.Record.Learnt.Pool
	if former == nil || seen.Pool.Err != nil || former.Name == seen.Pool.Name {
		return
	}
	pool := PoolOf(seen.Pool.File, seen.Pool.File.Named(former.Name, former.Selector))
	err := s.slots().Leave(ctx, pool, s.change(seen))
	// A Lease that agents cannot read holds up no node. When a user repairs it, the slot runs out.
	var unreadable *Unreadable
	if err != nil && !errors.As(err, &unreadable) {
		s.Log.Warn("returning the slot of the former pool", zap.String("pool", former.Name), zap.Error(err))
		return
	}
	s.claim, seen.Pool.Claim, seen.Record.Learnt.Pool = "", "", nil
	s.Journal.LeavePool(ctx)
}

// Foresee returns what Take would, and writes and remembers nothing.
func (s *Slot) Foresee(ctx context.Context, in act.Input) error {
	c := s.change(in.Seen)
	c.Since = in.Seen.AskedSince(in.Want, s.Clock.Stamp())
	return s.explain(in.Seen, s.Slots.Foresee(ctx, poolOf(in.Seen), c), (*Slot).waitFor)
}

// Confirm makes sure right before the fence that the node still has its slot.
func (s *Slot) Confirm(ctx context.Context, in act.Input) error {
	if !in.Seen.Pool.HasLimit() || !in.Seen.HoldsSlot() {
		return nil
	}
	c := s.change(in.Seen)
	c.Since = in.Seen.AskedSince(in.Want, s.Clock.Stamp())
	return s.ask(ctx, in.Seen, c)
}

func (s *Slot) ask(ctx context.Context, seen *state.Observed, c Change) error {
	return s.explain(seen, s.slots().Take(ctx, poolOf(seen), c), (*Slot).await)
}

// explain turns the answer of the pool into a wait.
func (s *Slot) explain(seen *state.Observed, err error, await func(*Slot, *state.Observed, *Full) error) error {
	var full *Full
	var paused *Paused
	switch {
	case errors.As(err, &full):
		return await(s, seen, full)
	case errors.As(err, &paused):
		wait := s.Paused(seen, paused.Why)
		wait.After, wait.Since = paused.Retry, seen.Since(config.ReasonPoolPaused, s.Clock.Stamp())
		return wait
	case apierrors.IsForbidden(err):
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingSlot, For: outcome.ForSlot, After: slotNews, Since: seen.Since(config.ReasonAwaitingSlot, s.Clock.Stamp()),
			Message: fmt.Sprintf("the agent may not use the Lease with the slots of pool %s: %v", seen.Pool.Name, err),
			Advice: fmt.Sprintf("let the agent get, create and update leases in namespace %s, as deploy/base does, or write maxUnavailable: none into the maintenance file",
				s.Namespace),
		}
	default:
		return err
	}
}

// Paused returns why no node of the pool begins a change.
func (s *Slot) Paused(seen *state.Observed, why string) *outcome.Waiting {
	said := fmt.Sprintf("its Lease says %q", why) // agents of all nodes write it: what it advises is not this agent's advice
	return &outcome.Waiting{
		Reason: config.ReasonPoolPaused, For: outcome.ForSlot, Message: fmt.Sprintf("pool %s begins no change: %s", seen.Pool.Name, said),
		Blockers: []string{"pool " + seen.Pool.Name + " is paused: " + said},
		Advice:   fmt.Sprintf("to go on: kubectl -n %s annotate lease %s%s %s-", s.Namespace, config.LeasePrefix, seen.Pool.Name, config.AnnotationPaused),
	}
}

// await returns which nodes are in the way. These change often, so the agent reports them again only now and then.
func (s *Slot) await(seen *state.Observed, full *Full) error {
	now, since := s.Clock.Now(), seen.Since(config.ReasonAwaitingSlot, s.Clock.Stamp())
	if s.full == nil || now.Sub(s.fullAt) >= slotNews || s.fullAt.Before(since) { // of this wait, not of an earlier one
		s.full, s.fullAt = full, now
	}
	said := *s.full
	said.Retry = full.Retry
	return s.waitFor(seen, &said)
}

// waitFor is the wait for the nodes that are in the way.
func (s *Slot) waitFor(seen *state.Observed, full *Full) error {
	raise, stuck := "raise maxUnavailable of pool "+full.Pool+" in the maintenance file", ""
	advice, more := "", "; to let more nodes change at once, "+raise
	if full.Limit <= 0 { // this wait does not end by itself
		advice, more = raise, ""
	}
	if full.Stuck != "" {
		stuck = "; " + full.Stuck + " counts until it is available, or you delete its node object or take it out of the pool by its labels"
	}
	return &outcome.Waiting{
		Reason: config.ReasonAwaitingSlot, For: outcome.ForSlot, After: full.Retry, Since: seen.Since(config.ReasonAwaitingSlot, s.Clock.Stamp()),
		Message: full.Error(), Blockers: full.Unavailable, Advice: advice,
		Else: "changes nothing until then; the node that has waited longest goes first" + more + stuck,
	}
}

// Yield returns the slot if the change, before it has disturbed anything, has to wait for something other than the pool, or keeps failing.
// A change that has only failed to ask for the slot keeps its place in the queue.
func (s *Slot) Yield(ctx context.Context, seen *state.Observed, step plan.Step, err error) {
	var wait *outcome.Waiting
	waits := errors.As(err, &wait)
	switch {
	case err == nil, seen.DisruptionStarted(), apierrors.IsConflict(err):
	case waits && wait.For == outcome.ForSlot:
	case !waits && step.Kind == plan.AcquireSlot:
	default:
		s.Leave(ctx, seen)
	}
}

// Leave returns the slot, or the place in the queue. If that fails, the next plan does it.
func (s *Slot) Leave(ctx context.Context, seen *state.Observed) {
	if err := s.Return(ctx, act.Input{Seen: seen}); err != nil {
		s.Log.Warn("returning the slot of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}

// Return returns a slot, or a place in the queue, that no change needs any more. The change that it was for counts neither as a success nor as
// a failure.
func (s *Slot) Return(ctx context.Context, in act.Input) error {
	if !in.Seen.Pool.HasLimit() || !in.Seen.Pool.Slot.Held && !in.Seen.Pool.Slot.Waiting {
		return nil
	}
	if err := s.slots().Leave(ctx, poolOf(in.Seen), s.change(in.Seen)); err != nil {
		return err
	}
	s.claim = ""
	s.Journal.LeavePool(ctx)
	return nil
}

// End returns the slot when the node is restored. If that fails, the next plan does it.
func (s *Slot) End(ctx context.Context, seen *state.Observed, want state.Desired) {
	s.CountFailure(ctx, seen, seen.Journal.Undo)
	s.claim = ""
	if want.Undo || !seen.Pool.HasLimit() || !seen.Pool.Slot.Held {
		s.Leave(ctx, seen)
		return
	}
	if err := s.slots().Release(ctx, poolOf(seen), s.change(seen)); err != nil {
		s.Log.Warn("returning the slot of the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
		return
	}
	s.Journal.LeavePool(ctx)
}

// CountFailure counts the change as failed in the pool, which pauses itself after too many failures in a row. A change that a user has
// cancelled, or that is only postponed, has not failed.
func (s *Slot) CountFailure(ctx context.Context, seen *state.Observed, failure *api.Failure) {
	if failure == nil || failure.Later || failure.Cancelled || !seen.Pool.HasLimit() {
		return
	}
	if err := s.slots().Fail(ctx, poolOf(seen), s.change(seen), string(failure.Reason)+": "+failure.Message); err != nil {
		s.Log.Warn("reporting a failure to the pool", zap.String("pool", seen.Pool.Name), zap.Error(err))
	}
}
