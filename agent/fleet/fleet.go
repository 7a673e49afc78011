// Package fleet lets the nodes of a pool agree, without a controller, how many of them are unavailable at once.
//
// A pool has one Lease, which every change of who has a slot replaces by its resourceVersion: of two nodes that decide at the
// same time, one has to look again. A slot is about concurrency alone. It says nothing of who owns a cordon, and losing it ends
// no change that has begun.
//
// What counts are the nodes that have a slot and those that are unavailable for whatever reason, so that no change adds to an
// outage. The nodes are read after the Lease and before it is written. A node that is fenced has a slot from before its fence to
// after the end of it; so whoever is not among the holders of the Lease that is replaced is as it was read, as far as agents go.
//
// Who wants a slot gets in line first, oldest wish first, and only who is at the front reads the nodes: of 400 that wait, few do.
// Times of other nodes decide nothing but that order. Whether somebody is still there is judged by what the observer has seen to
// change, on its own clock.
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
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/config"
)

const (
	// Duration is how long a slot is kept for a node that does not renew it. It outlasts an API server that restarts, and an agent
	// that is updated.
	Duration = 90 * time.Second
	// RenewAfter is a third of it, so that two renewals may fail.
	RenewAfter = Duration / 3
	// Patience is how long a node that waits lets an older one pass by a free slot before it goes first, where the Lease looks as if
	// one were free: that nodes without a slot fill the pool it finds out then, and begins anew. It is more than the longest pause
	// of those that a free slot may be for.
	Patience = 10 * time.Second
	// Most is how many nodes have a slot at once, and how many wait in line, in any pool. A node beyond the line's end gets in
	// when the line has moved on.
	Most = 512
	// mostBytes bounds what those with a slot and the line take together, whatever length their names have. The API server takes
	// 256 KiB for all annotations of an object: the rest is left for the failures, the pause and the annotations of others.
	mostBytes = 232 << 10
)

// contention is how often a write is tried that others come before, with pauses that add up to some four seconds.
var contention = wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.4, Jitter: 1, Steps: 14}

// ErrContended is returned when others have written the Lease each time. Nothing is wrong, the caller tries again soon.
var ErrContended = errors.New("others write it all the time; it is tried again")

// Pool is what the nodes of a pool agree on.
type Pool struct {
	Name       string                  // the Lease is config.LeasePrefix and this; never empty
	Selector   labels.Selector         // narrows down which nodes are read; nil for all
	Selects    func(*corev1.Node) bool // whether one that fits is of this pool; nil if all are
	Limit      *config.Limit           // nil for no limit; slots are taken all the same, and the pause counts
	PauseAfter int                     // failures in a row after which nobody begins; 0 for never
}

// PoolOf is a pool of the maintenance file. Of pools that select the same node, the first has it.
func PoolOf(m config.Maintenance, p config.Pool) Pool {
	return Pool{
		Name: p.Name, Selector: p.Selector, Limit: p.MaxUnavailable, PauseAfter: p.PauseAfter,
		Selects: func(node *corev1.Node) bool { return m.For(node).Name == p.Name },
	}
}

// Change is what a node wants a slot for.
type Change struct {
	Node      string
	UID       types.UID // of the node: another of its name is another node
	Operation string    // identifies the change; one that fails is counted once
	Since     time.Time // since when the node wants it; who wants it longest goes first
}

// Slots is one node's view of the slots. Its methods are for one goroutine at a time. Each bears to be repeated: what an answer
// that got lost had done is found done.
type Slots struct {
	Client    kubernetes.Interface
	Namespace string             // of the Leases
	Clock     clock.PassiveClock // tells how long something has been seen, and times for people to read
	Timeout   time.Duration      // of each request; 0 for that of the context alone
	Log       *zap.Logger

	views map[string]*view // of the pools, by name
}

// Forget drops all that was seen of the others, as by a new process: for when the clock was set.
func (s *Slots) Forget() { s.views = nil }

// State is what the Lease of a pool says of a node.
type State struct {
	Held      bool   // the node has a slot
	Operation string // for this change
	Failed    bool   // which has failed
	Waiting   bool   // the node is in line
	Paused    string // why nobody begins; empty if they do
}

// Look reads where the node stands. It changes nothing, but takes note of who has renewed: the earlier and the more often a
// node looks, the sooner it knows of a slot whose node is gone.
func (s *Slots) Look(ctx context.Context, pool Pool, c Change) (State, error) {
	r, err := s.read(ctx, pool)
	if err != nil {
		return State{}, err
	}
	seen := State{Waiting: r.state.waits(c.UID), Paused: r.paused()}
	if h := r.state.holder(c.UID); h != nil {
		seen.Held, seen.Operation, seen.Failed = true, h.Operation, h.Failed
	}
	if seen.Held || seen.Waiting { // perhaps again, as from a backup
		s.view(pool).out = false
	}
	return seen, nil
}

// Take asks for a slot. Nil means that the node has one, be it from before: then the operation becomes that of the change, and a
// pool that is paused or full keeps nobody. *Full and *Paused say why it has none, and when to ask again.
//
// Ask once more right before the fence: a node that was away for long may have lost its slot. The context should end well before
// Duration has passed, and cover the fence too, so that an agent that was stopped in between does not fence with a slot of old.
func (s *Slots) Take(ctx context.Context, pool Pool, c Change) error {
	t := taking{slots: s, pool: pool, change: c, view: s.view(pool)}
	t.view.out = false
	for {
		began := s.Clock.Now()
		err := s.settle(ctx, pool, t.decide)
		if errors.Is(err, errLinedUp) {
			t.lined = true // so that this is not said again
			continue
		}
		if err == nil && t.renews {
			t.view.renewed = began
		}
		return err
	}
}

// Renew says that the change is still under way. It asks nobody until a third of Duration has passed since it last did. A slot
// that was lost meanwhile is taken back, whether there is room or not: the node is being changed, and others have to know. So it
// is for nodes whose fence stands.
func (s *Slots) Renew(ctx context.Context, pool Pool, c Change) error {
	v := s.view(pool)
	if !s.renewalDue(v) {
		return nil
	}
	v.out = false
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

// Release gives the slot back at the end of a change. Unless Fail was noted for it, it was a success, and the failures in a row
// are over. The node also leaves the line. Nothing to give back is no error.
func (s *Slots) Release(ctx context.Context, pool Pool, c Change) error {
	return s.leave(ctx, pool, c, true)
}

// Leave takes the node out of the line, and gives back a slot whose change was put off or called off: that is neither a failure
// nor a success. A node that is held back by something else leaves, so that others need not wait until they lose patience.
func (s *Slots) Leave(ctx context.Context, pool Pool, c Change) error {
	return s.leave(ctx, pool, c, false)
}

func (s *Slots) leave(ctx context.Context, pool Pool, c Change, ended bool) error {
	v := s.view(pool)
	if v.out {
		return nil
	}
	err := s.settle(ctx, pool, func(_ context.Context, r *record) (bool, error) {
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
		v.out, v.renewed = true, time.Time{}
	}
	return err
}

// Fail notes that the change has failed, once for each operation, and pauses the pool with as many failures in a row as are too
// many. It is called before Release. While the pool is paused nothing is counted.
func (s *Slots) Fail(ctx context.Context, pool Pool, c Change, why string) error {
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

// settle reads the Lease, lets decide change its state, and writes it if decide says so, until nobody else has written in
// between. It returns what decide has said of the state that stands.
func (s *Slots) settle(ctx context.Context, pool Pool, decide func(context.Context, *record) (bool, error)) error {
	var verdict error
	lost := false
	err := wait.ExponentialBackoffWithContext(ctx, contention, func(ctx context.Context) (bool, error) {
		lost = false
		r, err := s.read(ctx, pool)
		if err != nil {
			return false, err
		}
		var write bool
		if write, verdict = decide(ctx, r); !write {
			return true, nil
		}
		lost, err = s.write(ctx, pool, r)
		return !lost, err
	})
	var full *Full
	switch {
	case err == nil:
		return verdict
	case ctx.Err() != nil:
		return fmt.Errorf("asking Lease %s/%s of pool %s: %w", s.Namespace, leaseName(pool), pool.Name, err)
	case !lost:
		return err
	case errors.As(verdict, &full):
		return verdict // it is not in line, which it will be next time
	}
	return fmt.Errorf("writing Lease %s/%s of pool %s: %w", s.Namespace, leaseName(pool), pool.Name, ErrContended)
}

// bounded is a context for one request.
func (s *Slots) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if s.Timeout <= 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, s.Timeout)
}

func leaseName(pool Pool) string { return config.LeasePrefix + pool.Name }
