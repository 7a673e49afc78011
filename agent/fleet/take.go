package fleet

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// errLinedUp says that the node got in line at its front, and may now look whether there is room.
var errLinedUp = errors.New("the node is in line")

// view is what this node has seen of a pool, by its own clock.
type view struct {
	renewals map[types.UID]sighting  // of those who have a slot
	passed   map[types.UID]time.Time // since when somebody in line passes by a free slot
	renewed  time.Time               // when this node has last renewed its own slot; zero if that is not known
	out      bool                    // this node has given back all that it had
}

// sighting is when a renewal was first seen.
type sighting struct {
	turn int64
	at   time.Time
}

func (s *Slots) view(pool Pool) *view {
	if s.views == nil {
		s.views = map[string]*view{}
	}
	if s.views[pool.Name] == nil {
		s.views[pool.Name] = &view{}
	}
	return s.views[pool.Name]
}

// renewalDue reports whether the node's own slot has to be renewed.
func (s *Slots) renewalDue(v *view) bool {
	return v.renewed.IsZero() || s.Clock.Since(v.renewed) >= RenewAfter
}

// noteRenewals takes down who has renewed since the last look.
func (v *view) noteRenewals(holders []holder, now time.Time) {
	old := v.renewals
	v.renewals = make(map[types.UID]sighting, len(holders))
	for _, h := range holders {
		seen, known := old[h.UID]
		if !known || seen.turn != h.Renewed {
			seen = sighting{turn: h.Renewed, at: now}
		}
		v.renewals[h.UID] = seen
	}
}

// renewalOverdue reports whether the node has been seen for long without a renewal.
func (v *view) renewalOverdue(h holder, now time.Time) bool {
	return now.Sub(v.renewals[h.UID].at) >= Duration
}

// rank is how many of the nodes ahead go first, with room for so many. One that has let a free slot pass for long does not: it
// may be dead, or held back by something that it does not know of.
func (v *view) rank(ahead []waiter, room int, now time.Time) int {
	old := v.passed
	v.passed = map[types.UID]time.Time{}
	rank := 0
	for _, w := range ahead {
		if rank >= room {
			rank++ // it has to wait itself
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

// goesFirst reports whether the node goes before this one although it is younger.
func (v *view) goesFirst(w waiter, now time.Time) bool {
	since, passes := v.passed[w.UID]
	return passes && now.Sub(since) >= Patience
}

// taking is one call of Take.
type taking struct {
	slots  *Slots
	pool   Pool
	change Change
	view   *view

	nodes  *census // that were read for an earlier decision
	lined  bool    // the node has got in line by this call
	renews bool    // the decision renews the node's slot
}

// decide is whether the Lease has to be written, and what the answer is then.
func (t *taking) decide(ctx context.Context, r *record) (bool, error) {
	st, now := &r.state, t.slots.Clock.Now()
	t.renews = false
	if h := st.holder(t.change.UID); h != nil {
		if h.Operation == t.change.Operation && !t.slots.renewalDue(t.view) {
			return false, nil
		}
		return t.hold(st, now)
	}
	if why := r.paused(); why != "" {
		t.view.passed = nil // nobody lets anything pass
		return false, &Paused{Pool: t.pool.Name, Why: why, Retry: pause(longest)}
	}
	changed := st.dropHolders(func(h holder) bool { return h.Node == t.change.Node || t.view.renewalOverdue(h, now) })
	enters := st.lineUp(t.change)
	gone, err := t.probe(ctx, st)
	if err != nil {
		return false, err
	}
	changed = changed || gone
	limit, room := t.expected(st)
	ahead := st.ahead(t.change)
	if rank := t.view.rank(ahead, room, now); rank >= room {
		return changed || enters, t.full(limit, rank, st, nil)
	}
	if t.pool.Limit == nil {
		return t.hold(st, now)
	}
	// Nodes that come all at once would each read all nodes. So they get in line first, and all but the front find no room.
	if enters && !t.lined {
		return true, errLinedUp
	}
	return t.count(ctx, r, changed || enters)
}

// Who is at the front of a line without room asks for the nodes of some that have a slot, so that one whose node was deleted is
// not waited for until it is stale. One request for each is less than reading all nodes.
const (
	probers = 3 // nodes of the line that ask; the first may itself be gone
	probed  = 4 // nodes that each asks for, at each time
)

// probe drops those whose node is gone, of the ones that have not renewed for the longest, where it is this node's turn to ask. It
// reports whether there are any.
func (t *taking) probe(ctx context.Context, st *state) (bool, error) {
	if _, room := t.expected(st); room > 0 || len(st.ahead(t.change)) >= probers {
		return false, nil
	}
	suspects := slices.Clone(st.Holders)
	slices.SortStableFunc(suspects, func(a, b holder) int {
		return t.view.renewals[a.UID].at.Compare(t.view.renewals[b.UID].at)
	})
	gone, err := t.slots.deletedNodes(ctx, t.pool, nil, suspects[:min(len(suspects), probed)])
	if err != nil {
		return false, err
	}
	return st.dropHolders(func(h holder) bool { return slices.Contains(gone, h.UID) }), nil
}

// hold gives the node its slot, and takes out of the line whom it was tired of waiting for. Who lives gets in again, with the
// age that it had.
func (t *taking) hold(st *state, now time.Time) (bool, error) {
	st.dropWaiters(func(w waiter) bool { return t.view.goesFirst(w, now) })
	st.hold(t.change, now)
	t.renews = true
	return true, nil
}

// expected is the limit and how many more may have a slot, as far as the Lease tells: nodes that are unavailable without a slot
// come off it. A percentage is one of the nodes that somebody counted last; the first in line always counts them anew.
func (t *taking) expected(st *state) (limit, room int) {
	switch l := t.pool.Limit; {
	case l == nil:
		return Most, Most - len(st.Holders)
	case l.Percent == 0:
		limit = min(l.Nodes, Most)
		return limit, limit - len(st.Holders)
	default:
		limit = min(l.Of(st.Nodes), Most)
		return limit, max(1, limit-len(st.Holders))
	}
}

// count decides by the nodes of the pool. What was counted before somebody else wrote is good as long as nobody has left: each
// node that an agent can have made unavailable since then is among the holders.
func (t *taking) count(ctx context.Context, r *record, changed bool) (bool, error) {
	st := &r.state
	if t.nodes == nil || t.nodes.left != st.Left {
		nodes, err := t.slots.census(ctx, t.pool)
		if err != nil {
			return false, err
		}
		nodes.left = st.Left
		t.nodes = nodes
	}
	if err := t.nodes.mustHave(t.change, t.pool); err != nil {
		return false, err
	}
	gone, err := t.slots.deletedNodes(ctx, t.pool, t.nodes.all, st.Holders)
	if err != nil {
		return false, err
	}
	now := t.slots.Clock.Now()
	changed = st.dropHolders(func(h holder) bool { return slices.Contains(gone, h.UID) }) || changed
	changed = st.dropWaiters(func(w waiter) bool { return !t.nodes.has(w.Node, w.UID) }) || changed
	if t.pool.Limit.Percent > 0 && st.Nodes != len(t.nodes.members) {
		st.Nodes, changed = len(t.nodes.members), true
	}
	limit := min(t.pool.Limit.Of(len(t.nodes.members)), Most)
	away := t.nodes.unavailableNodes(st.Holders, t.change)
	room := limit - len(away)
	rank := t.view.rank(st.ahead(t.change), room, now)
	if rank < room {
		return t.hold(st, now)
	}
	return changed, t.full(limit, rank, st, away)
}

// full says what is in the way. Away is nil where the nodes were not counted.
func (t *taking) full(limit, rank int, st *state, away []string) *Full {
	if away == nil {
		for _, h := range st.Holders {
			away = append(away, h.Node+": "+changing)
		}
	}
	now := t.slots.Clock.Now()
	for _, w := range st.ahead(t.change) {
		if _, may := t.view.passed[w.UID]; may && !t.view.goesFirst(w, now) {
			away = append(away, w.Node+": waits longer")
		}
	}
	return &Full{Pool: t.pool.Name, Limit: limit, Unavailable: away, Ahead: rank, Retry: pause(untilNext(rank, limit))}
}
