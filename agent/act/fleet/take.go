package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/managed"
)

// errQueued means that the node has joined the queue at its front, and may now count the nodes.
var errQueued = errors.New("the node is in line")

// errCounted means that the node has counted a large pool. That takes so long that the Lease which it read before is old.
var errCounted = errors.New("the nodes are counted")

// view is what this node has seen of a pool, by its own clock.
type view struct {
	renewals map[types.UID]sighting  // the last renewal of each holder of a slot
	passed   map[types.UID]time.Time // since when a waiting node has not taken a slot that is free
	renewed  time.Time               // when this node has last renewed its own slot; zero if that is not known
	returned bool                    // this node has returned its slot and left the queue
	counted  time.Time               // when this node has last counted the nodes
	misses   int                     // calls of Take in a row by which this node has not joined the queue, since others wrote at that moment
}

// sighting is the number of a renewal, and when this node first saw it.
type sighting struct {
	renewal int64
	at      time.Time
}

func (s *Leases) view(pool Pool) *view {
	if s.views == nil {
		s.views = map[string]*view{}
	}
	if s.views[pool.Name] == nil {
		s.views[pool.Name] = &view{}
	}
	return s.views[pool.Name]
}

// renewalDue reports whether the node's own slot has to be renewed.
func (s *Leases) renewalDue(v *view) bool {
	return v.renewed.IsZero() || s.Clock.Since(v.renewed) >= RenewAfter
}

// missed returns when a node asks again that has not joined the queue, since others wrote at that moment. Agents of all nodes may be in that
// case: the more often it is, the longer is the time over which they spread.
func (v *view) missed() time.Duration {
	v.misses++
	return spread(longest << min(v.misses-1, 2))
}

// noteRenewals remembers which holders have renewed their slots since the last observation.
func (v *view) noteRenewals(holders []holder, now time.Time) {
	old := v.renewals
	v.renewals = make(map[types.UID]sighting, len(holders))
	for _, h := range holders {
		seen, known := old[h.UID]
		if !known || seen.renewal != h.Renewed {
			seen = sighting{renewal: h.Renewed, at: now}
		}
		v.renewals[h.UID] = seen
	}
}

// renewalOverdue reports whether this node has seen no renewal of the holder for Duration.
func (v *view) renewalOverdue(h holder, now time.Time) bool {
	return now.Sub(v.renewals[h.UID].at) >= Duration
}

// rank returns how many of the nodes ahead get a slot before this one, if so many slots are free. A node that has not taken a free slot
// for Patience does not count: its agent may be dead, or wait for something that the Lease does not show.
func (v *view) rank(ahead []waiter, room int, now time.Time) int {
	old := v.passed
	v.passed = map[types.UID]time.Time{}
	rank := 0
	for _, w := range ahead {
		if rank >= room {
			rank++ // there is no free slot for that node
			continue
		}
		since, known := old[w.UID]
		if !known {
			since = now
		}
		v.passed[w.UID] = since
		if now.Sub(since) < Patience {
			rank++
		}
	}
	return rank
}

// goesFirst reports whether this node goes before w, although w has waited longer.
func (v *view) goesFirst(w waiter, now time.Time) bool {
	since, passes := v.passed[w.UID]
	return passes && now.Sub(since) >= Patience
}

// acquisition is one call of Take.
type acquisition struct {
	slots  *Leases
	pool   Pool
	change Change
	view   *view

	nodes   *census // read for an earlier decision of this call, or nil
	given   bool    // the Lease has a slot for the node that it has not taken for this change
	queued  bool    // this call has put the node into the queue
	counted bool    // it has counted a large pool
	renews  bool    // the decision renews the node's slot

	foresees bool // no label need ask for the change yet, so that the node need not be of the pool
}

// decide returns whether the agent has to write the Lease, and what Take returns then.
func (a *acquisition) decide(ctx context.Context, r *record) (bool, error) {
	st, now := &r.state, a.slots.Clock.Now()
	a.renews = false
	h := st.holder(a.change.UID)
	if h != nil && h.Operation == a.change.Operation {
		if !a.slots.renewalDue(a.view) {
			return false, nil
		}
		return a.hold(st, now)
	}
	a.given = h != nil
	if why := r.paused(); why != "" {
		a.view.passed = nil // in a paused pool no node may take a free slot
		return false, &Paused{Pool: a.pool.Name, Why: why, Retry: pause(longest)}
	}
	enters := st.enqueue(a.change)
	changed, err := a.drop(ctx, st, now)
	if err != nil {
		return false, err
	}
	limit, room := a.expected(st)
	ahead := st.ahead(a.change)
	if rank := a.view.rank(ahead, room, now); rank >= room {
		return changed || enters, a.full(limit, rank, st, nil)
	}
	if a.pool.Limit == nil {
		return a.hold(st, now)
	}
	// If many agents ask at once, each would read all nodes. So they join the queue first, and only those at its front find room. A node that
	// was given a slot has waited there.
	if enters && !a.queued && !a.given {
		return true, errQueued
	}
	return a.count(ctx, r, changed || enters)
}

// drop drops the node's own slot, and the slots that other nodes have lost. It reports whether it has dropped any.
func (a *acquisition) drop(ctx context.Context, st *leaseState, now time.Time) (bool, error) {
	overdue, err := a.overdue(ctx, st, now)
	if err != nil {
		return false, err
	}
	dropped := st.dropHolders(func(h holder) bool { return h.Node == a.change.Node || slices.Contains(overdue, h.UID) })
	gone, err := a.probe(ctx, st)
	return dropped || gone, err
}

// overdue returns the holders that lose their slots, since they have not renewed them for Duration. A fenced node goes on counting as a node of the pool. If
// its labels no longer choose the pool, it keeps the slot instead: nothing else would count it. Nodes that a Lease names beyond the first few of these wait
// for the next call.
func (a *acquisition) overdue(ctx context.Context, st *leaseState, now time.Time) ([]types.UID, error) {
	silent := slices.DeleteFunc(slices.Clone(st.Holders), func(h holder) bool { return !a.view.renewalOverdue(h, now) })
	var lose []types.UID
	for _, h := range silent[:min(len(silent), reviewed)] {
		node, err := a.slots.node(ctx, h.Node)
		if err != nil {
			return nil, fmt.Errorf("reading node %s, which has not renewed its slot of pool %s: %w", h.Node, a.pool.Name, err)
		}
		if node == nil || node.UID != h.UID || !fenced(node) || a.pool.selects(node) {
			lose = append(lose, h.UID)
		}
	}
	return lose, nil
}

// Agents at the front of a queue without room ask whether some nodes that have a slot still exist. Otherwise they would wait for Duration
// until a deleted node loses its slot. One request for each of those is less than reading all nodes.
const (
	probers = 3 // nodes at the front of the queue that ask; the first may itself be gone
	probed  = 4 // holders that each of them asks for at a time
)

// probe drops holders with a deleted node, if this node is one of the probers. It asks for those that have not renewed for the longest. It
// reports whether it has dropped any.
func (a *acquisition) probe(ctx context.Context, st *leaseState) (bool, error) {
	if _, room := a.expected(st); room > 0 || len(st.ahead(a.change)) >= probers {
		return false, nil
	}
	suspects := slices.Clone(st.Holders)
	slices.SortStableFunc(suspects, func(x, b holder) int {
		return a.view.renewals[x.UID].at.Compare(a.view.renewals[b.UID].at)
	})
	gone, err := a.slots.deletedNodes(ctx, a.pool, nil, suspects[:min(len(suspects), probed)])
	if err != nil {
		return false, err
	}
	return st.dropHolders(func(h holder) bool { return slices.Contains(gone, h.UID) }), nil
}

// hold gives the node its slot, and removes from the queue the nodes that it has passed over. If their agents live, they join the queue again,
// with the time that they had.
func (a *acquisition) hold(st *leaseState, now time.Time) (bool, error) {
	st.dropWaiters(func(w waiter) bool { return a.view.goesFirst(w, now) })
	st.hold(a.change, now)
	a.renews = true
	return true, nil
}

// expected returns the limit, and how many more nodes may have a slot by the Lease alone, which does not show the nodes that are unavailable
// without a slot. A percentage refers to the nodes that an agent counted last. The first node in the queue counts them again: always in a
// small pool, and now and then in a large one.
func (a *acquisition) expected(st *leaseState) (limit, room int) {
	switch l := a.pool.Limit; {
	case l == nil:
		return MaxNodes, MaxNodes - len(st.Holders)
	case l.Percent == 0:
		limit = min(l.Nodes, MaxNodes)
		return limit, limit - len(st.Holders)
	default:
		limit = min(l.Of(st.Nodes), MaxNodes)
		room = limit - len(st.Holders)
		if st.Nodes <= page || a.slots.Clock.Since(a.view.counted) >= longest {
			room = max(1, room)
		}
		return limit, room
	}
}

// takeCensus reads the nodes of the pool, unless those of an earlier decision are still good. A census from before another agent's write is
// good once the nodes that have lost or returned their slots are read again. Each other node that an agent can have made unavailable since
// then is among the holders.
func (a *acquisition) takeCensus(ctx context.Context, r *record) error {
	if a.nodes != nil {
		if err := a.slots.review(ctx, a.pool, a.nodes, r); err != nil {
			return err
		}
	}
	if a.nodes == nil || a.nodes.left != r.state.Left {
		nodes, err := a.slots.census(ctx, a.pool, a.change.UID)
		if err != nil {
			return err
		}
		nodes.left = r.state.Left
		a.nodes, a.view.counted = nodes, a.slots.Clock.Now()
		a.nodes.holders = r.before
		if len(nodes.all) > page && !a.counted {
			a.counted = true
			return errCounted
		}
	}
	a.nodes.holders = r.before
	return nil
}

// count decides by the nodes of the pool.
func (a *acquisition) count(ctx context.Context, r *record, changed bool) (bool, error) {
	st := &r.state
	if err := a.takeCensus(ctx, r); err != nil {
		return false, err
	}
	if err := a.nodes.mustHave(a.change, a.pool); err != nil && !a.foresees {
		return false, err
	}
	gone, err := a.slots.deletedNodes(ctx, a.pool, a.nodes.all, st.Holders)
	if err != nil {
		return false, err
	}
	now := a.slots.Clock.Now()
	changed = st.dropHolders(func(h holder) bool { return slices.Contains(gone, h.UID) }) || changed
	changed = st.dropWaiters(func(w waiter) bool { return !a.nodes.has(w.Node, w.UID) }) || changed
	if a.pool.Limit.Percent > 0 && st.Nodes != len(a.nodes.members) {
		st.Nodes, changed = len(a.nodes.members), true
	}
	limit := min(a.pool.Limit.Of(len(a.nodes.members)), MaxNodes)
	unavailable, stuck := a.nodes.unavailableNodes(st.Holders, a.change)
	room := limit - len(unavailable)
	rank := a.view.rank(st.ahead(a.change), room, now)
	if rank < room {
		took, err := a.hold(st, now)
		a.grant(st, room-1)
		return took, err
	}
	full := a.full(limit, rank, st, unavailable)
	full.Stuck = stuck
	return changed, full
}

// grant gives the slots that are free by this count to the next nodes in the queue, so that no others take them first. Such a node finds its slot at its
// next Take, and counts the nodes itself before it uses the slot: any agent can write the Lease. If it wants none any more it returns the slot, and if its
// agent is dead it loses the slot after Duration, like any other.
func (a *acquisition) grant(st *leaseState, room int) {
	if len(a.nodes.all) <= page {
		return
	}
	for _, w := range slices.Clone(st.Queue[:min(len(st.Queue), max(0, room))]) {
		st.hold(Change{Node: w.Node, UID: w.UID}, a.slots.Clock.Now())
	}
}

// full returns what is in the way. Unavailable is nil if the agent has not counted the nodes.
func (a *acquisition) full(limit, rank int, st *leaseState, unavailable []string) *Full {
	if unavailable == nil {
		for _, h := range st.Holders {
			unavailable = append(unavailable, h.Node+": "+managed.Changing)
		}
	}
	now := a.slots.Clock.Now()
	for _, w := range st.ahead(a.change) {
		if _, may := a.view.passed[w.UID]; may && !a.view.goesFirst(w, now) {
			unavailable = append(unavailable, w.Node+": waits longer")
		}
	}
	after := retryAfter(rank, limit)
	switch {
	case !st.waits(a.change.UID):
		after = max(after, crowded)
	case a.pool.Limit != nil && a.pool.Limit.Percent > 0 && st.Nodes == 0: // no agent has counted them yet: there may be room for many
		after = timely
	}
	return &Full{Pool: a.pool.Name, Limit: limit, Unavailable: unavailable, Ahead: rank, Retry: pause(after)}
}
