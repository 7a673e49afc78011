// Package fleet lets the nodes of a pool agree, without a controller, how many of them are unavailable at once.
//
// A pool has one Lease. An agent that takes or returns a slot replaces it by its resourceVersion: of two agents that decide at the same time,
// one has to read it again. A slot is about concurrency alone. It does not say who owns a cordon, and an agent that loses its slot continues a
// change that has begun.
//
// Nodes that have a slot count against the limit, and so do nodes that are unavailable for any other reason, so that no change adds to an
// outage. An agent reads the nodes after the Lease, and before it writes the Lease. An agent holds its slot from before it fences its node
// until after it has removed the fence. So no agent has fenced a node without a slot in the Lease that is replaced since the nodes were read.
//
// A node that wants a slot joins the queue first. The queue is ordered by the time since when each node wants one. Only agents at the front
// read the nodes: of 400 that wait, few do. In a large pool the agent that has read them also gives the next nodes in the queue their slots.
// Agents of all nodes can write the Lease, so a slot from another agent is a hint. This node's agent first checks that the pool is not paused,
// and reads the nodes itself, once. Times from other nodes decide the order of the queue, and nothing else. An agent considers another one
// dead by its own clock, if it has not seen that one's renewals change for Duration.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/drain/kube"
)

const (
	// Duration is how long a node that does not renew its slot keeps it. It outlasts a restart of the API server, and an update
	// of the agent.
	Duration = 90 * time.Second
	// RenewAfter is a third of Duration, so that two renewals may fail.
	RenewAfter = Duration / 3
	// Patience is how long a node waits for an older one that does not take a slot, while by the Lease one is free. After that it goes
	// first. If it then counts the nodes, and finds that the pool is full of unavailable nodes without a slot, it waits again. Patience
	// is longer than the longest pause of a node that may take a free slot.
	Patience = 10 * time.Second
	// MaxNodes is how many nodes of any pool have a slot at once, and how many the queue holds. A node that finds no room in the queue
	// joins it when the queue has moved on.
	MaxNodes = 512
	// maxStateBytes bounds what holders and queue take together, whatever length their names have. The API server accepts
	// 256 KiB for all annotations of an object: the rest is for the failures, the pause and the annotations of other programs.
	maxStateBytes = 232 << 10
)

// A write that conflicts with those of other nodes' agents is repeated. Each write that succeeds costs all others under way another try. With
// a fixed pause the conflicts would grow with the square of the agents that write at once, and more so on a slow API server, which they would
// slow down further. So the pause is random. It is at most the time that the competing nodes need one after the other, at the present time per
// request. These are all nodes that have a slot, or, for a node that has to wait for one, all that the Lease names. As a new Lease names none
// yet, the pause grows with each conflict, too.
const (
	// tries is how often an agent sends the write at most. At an API server that answers at once, the pauses add up to some four seconds.
	tries = 12
	// triesToJoin is the same for a node that only joins the queue, since the pool has no room now. There may be any number of these nodes that
	// the Lease does not name yet. Such a node joins when it asks again: it has to ask anyway, and its age decides its place.
	triesToJoin  = 2
	firstPause   = 80 * time.Millisecond
	grownPause   = time.Second // to which conflicts alone let it grow, by four times each
	longestPause = 5 * time.Second
	// patience is how long an agent tries, whatever the tries: a change that is under way has other things to do.
	patience = 30 * time.Second
)

// ErrContended means that agents of other nodes have written the Lease each time. Nothing is wrong: the caller tries again soon.
var ErrContended = errors.New("other nodes' agents keep writing it; this one tries again")

// Pool is what the nodes of a pool agree on.
type Pool struct {
	Name       string                  // the Lease is config.LeasePrefix and this; never empty
	Selector   labels.Selector         // narrows down which nodes are read; nil for all
	Selects    func(*corev1.Node) bool // whether a node that fits the selector is of this pool; nil if all are
	Limit      *maintenance.Limit      // nil for no limit; agents still take slots, and heed the pause
	PauseAfter int                     // failures in a row after which the pool is paused; 0 for never
	Unnamed    bool                    // no maintenance file names it: it has a Lease only while a node has a slot or waits
}

// selects reports whether the node's labels choose the pool.
func (p Pool) selects(node *corev1.Node) bool {
	return (p.Selector == nil || p.Selector.Matches(labels.Set(node.Labels))) && (p.Selects == nil || p.Selects(node))
}

// PoolOf makes the Pool of one in the maintenance file. A node that several pools select belongs to the first of them.
func PoolOf(m maintenance.Maintenance, p maintenance.Pool) Pool {
	return Pool{
		Name: p.Name, Selector: p.Selector, Limit: p.MaxUnavailable, PauseAfter: p.PauseAfter, Unnamed: p.ForEvictions,
		Selects: func(node *corev1.Node) bool { return m.For(node).Name == p.Name },
	}
}

// Change is what a node wants a slot for.
type Change struct {
	Node      string
	UID       types.UID // of the node: a node created again has the same name and another UID
	Operation string    // identifies the change: a slot is the node's own only for it, and its failure is counted once
	Since     time.Time // since when the node wants the slot; the node with the earliest time goes first
}

// Leases is one node's view of the slots. Its methods are for one goroutine at a time. Each may be repeated: if the answer of the API
// server got lost, the repetition finds the write done.
type Leases struct {
	Client    kube.Interface
	Namespace string             // of the Leases
	Clock     clock.PassiveClock // measures how long other nodes have not renewed; also for the times that users read
	Timeout   time.Duration      // of each request; 0 for that of the context alone
	Log       *zap.Logger
	Startup   config.StartupTaints // that make a node not yet available

	views map[string]*view // of the pools, by name
}

// Forget drops everything that this process has seen of other nodes, as a restart does. Call it when the clock was set.
func (s *Leases) Forget() { s.views = nil }

// Read reads what the Lease says of the node. It writes no Lease. It remembers which nodes have renewed their slots: the earlier and the
// more often a node reads, the sooner it finds out that the holder of a slot is gone.
func (s *Leases) Read(ctx context.Context, pool Pool, c Change) (state.Slot, error) {
	r, err := s.read(ctx, pool)
	if err != nil {
		return state.Slot{}, err
	}
	seen := state.Slot{Waiting: r.state.waits(c.UID), Paused: r.paused()}
	if h := r.state.holder(c.UID); h != nil {
		seen.Held, seen.Operation = true, h.Operation
	}
	if seen.Held || seen.Waiting { // even after it has left: the Lease may come from a backup
		s.view(pool).returned = false
	}
	return seen, nil
}

// Take asks for a slot. It returns nil if the node has one. A node that has taken one for this change keeps it, even if the pool is paused or
// full. Any other slot that the Lease has for the node counts for nothing: agents of all nodes write the Lease. *Full and *Paused say why the
// node has no slot, and when to ask again.
//
// Call Take once more right before the fence: the node may have lost its slot if its agent was stopped for long. The context should cover the
// fence too, and end well before Duration has passed. Then an agent that was stopped in between does not fence with a slot that it has lost.
func (s *Leases) Take(ctx context.Context, pool Pool, c Change) error {
	t := acquisition{slots: s, pool: pool, change: c, view: s.view(pool)}
	t.view.returned = false
	for {
		began := s.Clock.Now()
		err := s.settle(ctx, pool, t.decide)
		if errors.Is(err, errQueued) {
			t.queued = true // so that decide goes on next time
			continue
		}
		if errors.Is(err, errCounted) {
			continue
		}
		if err == nil && t.renews {
			t.view.renewed = began
		}
		return err
	}
}

// Foresee returns what Take would return now. It writes no Lease and remembers nothing: it counts all nodes that have waited longer.
func (s *Leases) Foresee(ctx context.Context, pool Pool, c Change) error {
	seen := *s.view(pool)
	seen.passed = nil
	t := acquisition{slots: s, pool: pool, change: c, view: &seen, foresees: true}
	for {
		r, err := s.read(ctx, pool)
		if err != nil {
			return err
		}
		seen.renewals = s.view(pool).renewals
		_, err = t.decide(ctx, r)
		switch {
		case errors.Is(err, errQueued):
			t.queued = true
		case !errors.Is(err, errCounted):
			return err
		}
	}
}

// Renew renews the slot, since the change is still under way. It sends no request until RenewAfter has passed since the last one. If
// the node has lost its slot since then, Renew takes one whether there is room or not: the node is being changed, and other nodes'
// agents have to count it. So call it only for a node that is fenced.
func (s *Leases) Renew(ctx context.Context, pool Pool, c Change) error {
	v := s.view(pool)
	if !s.renewalDue(v) {
		return nil
	}
	v.returned = false
	began := s.Clock.Now()
	err := s.settle(ctx, pool, func(_ context.Context, r *record) (bool, error) {
		r.state.hold(c, s.Clock.Now())
		return true, nil
	})
	if err == nil {
		v.renewed = began
	}
	return err
}

// Release returns the slot at the end of a change. Unless Fail was called for that change, it counts as a success, which ends the
// failures in a row. The node also leaves the queue. It is no error if the node has no slot.
func (s *Leases) Release(ctx context.Context, pool Pool, c Change) error {
	return s.leave(ctx, pool, c, true)
}

// Leave removes the node from the queue, and returns the slot of a change that was postponed or cancelled: that is neither a failure nor a
// success. A node that has to wait for something else leaves, so that other nodes need not wait for Patience to pass.
func (s *Leases) Leave(ctx context.Context, pool Pool, c Change) error {
	return s.leave(ctx, pool, c, false)
}

func (s *Leases) leave(ctx context.Context, pool Pool, c Change, ended bool) error {
	v := s.view(pool)
	if v.returned {
		return nil
	}
	var last *record
	err := s.settle(ctx, pool, func(_ context.Context, r *record) (bool, error) {
		last = r
		st := &r.state
		waited := st.dropWaiters(func(w waiter) bool { return w.UID == c.UID })
		h := st.holder(c.UID)
		if h == nil {
			return waited, nil
		}
		if ended && !h.Failed {
			st.Failed, st.Failures = 0, nil
		}
		st.dropHolders(func(h holder) bool { return h.UID == c.UID })
		return true, nil
	})
	if err == nil {
		v.returned, v.renewed = true, time.Time{}
		s.remove(ctx, pool, last)
	}
	return err
}

// Fail notes that the change has failed, once for each operation, and pauses the pool after pool.PauseAfter failures in a row. Call it
// before Release. While the pool is paused, Fail counts nothing.
func (s *Leases) Fail(ctx context.Context, pool Pool, c Change, why string) error {
	return s.settle(ctx, pool, func(_ context.Context, r *record) (bool, error) {
		st := &r.state
		noted, marks := st.failed(c), false
		if h := st.holder(c.UID); h != nil && h.Failed && h.Operation == c.Operation {
			noted = true
		} else if h != nil {
			h.Operation, h.Failed, marks = c.Operation, true, true
		}
		if noted || pool.PauseAfter <= 0 || r.paused() != "" {
			return marks, nil
		}
		st.fail(c, why, s.Clock.Now())
		if st.Failed >= pool.PauseAfter {
			r.pause(st.tooMany(s.Namespace, leaseName(pool)))
			st.Failed, st.Failures = 0, nil
		}
		return true, nil
	})
}

// settle reads the Lease, lets decide change its state, and writes it if decide says so. It repeats that while agents of other nodes
// write in between. It returns the error that decide gave for the state that was written or left.
func (s *Leases) settle(ctx context.Context, pool Pool, decide func(context.Context, *record) (bool, error)) error {
	grown, began := firstPause, time.Now()
	for try := 1; ; try++ {
		r, err := s.read(ctx, pool)
		if err != nil {
			return err
		}
		write, verdict := decide(ctx, r)
		if !write {
			return verdict
		}
		sent := time.Now()
		lost, err := s.write(ctx, pool, r)
		took := 2 * time.Since(sent) // the Lease is read, too
		others := len(r.before)
		var full *Full
		if errors.As(verdict, &full) {
			others += len(r.state.Queue)
		}
		switch {
		case err != nil:
			return err
		case !lost:
			s.view(pool).misses = 0
			return verdict
		case try >= triesToJoin && full != nil:
			full.Retry = s.view(pool).missed()
			return full
		case try == tries, time.Since(began) > patience:
			return fmt.Errorf("writing Lease %s/%s of pool %s: %w", s.Namespace, leaseName(pool), pool.Name, ErrContended)
		}
		longest := max(grown, min(longestPause, took*time.Duration(others)))
		grown = min(grownPause, 4*grown)
		select {
		case <-ctx.Done():
			return fmt.Errorf("asking Lease %s/%s of pool %s: %w", s.Namespace, leaseName(pool), pool.Name, ctx.Err())
		case <-time.After(spread(longest)):
		}
	}
}

// bounded returns a context for one request.
func (s *Leases) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.Timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, s.Timeout)
}

func leaseName(pool Pool) string { return config.LeasePrefix + pool.Name }
