package fleet

import (
	"fmt"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Pauses until the next Take. The node at the front of the queue asks soon. Nodes that may get the next free slots ask before Patience
// has passed, and nodes far behind ask rarely: the more rarely, the more changes have to end before theirs. So an agent hardly asks more often
// in a larger pool, and yet in time: hardly any change takes less than quickest.
const (
	soonest  = 2 * time.Second
	timely   = 8 * time.Second
	quickest = 5 * time.Second
	longest  = 30 * time.Second
	// crowded is the shortest pause of a node that finds no room in the queue.
	crowded = 2 * time.Minute
	// distant is the longest pause of any node: nodes ahead of it may all withdraw, and then it is the next.
	distant = 10 * time.Minute
)

// retryAfter returns when a node asks again that has so many nodes ahead of it, in a pool with that limit.
func retryAfter(ahead, limit int) time.Duration {
	after := soonest * time.Duration(1+ahead)
	switch {
	case limit <= 0:
		return longest
	case ahead < limit:
		return min(after, timely)
	default:
		return max(min(after, longest), min(distant, quickest*time.Duration(ahead/limit)))
	}
}

// pause returns a random moment in the last third of d, so that nodes that wait for the same do not ask at once.
func pause(d time.Duration) time.Duration { return wait.Jitter(d*2/3, 0.5) }

// spread returns a random moment in all of d, so that few of many agents ask at once.
func spread(d time.Duration) time.Duration { return rand.N(d) }

// Full says that there is no slot for the node now.
type Full struct {
	Pool        string
	Limit       int           // nodes that may be unavailable at once
	Unavailable []string      // nodes that are in the way, with the reason: "gpu-9: cordoned"
	Stuck       string        // the first of these nodes that no agent changes, by the count of the nodes; empty if there is none
	Ahead       int           // nodes that have waited longer
	Retry       time.Duration // when to ask again
}

// aheadCounted bounds a message. The agent writes it into the condition of its node, and for a node far behind it would change with each node
// that joins or leaves.
const aheadCounted = 10

// Error names the nodes that are in the way. The message of a node far behind names none, so that it does not change.
func (f *Full) Error() string {
	text := fmt.Sprintf("pool %s: %d %s may be unavailable at once", f.Pool, f.Limit, plural(f.Limit, "node"))
	if f.Limit <= 0 {
		return fmt.Sprintf("pool %s: no node may be unavailable, its maxUnavailable is 0", f.Pool)
	}
	if f.Ahead > aheadCounted {
		return fmt.Sprintf("%s; more than %d nodes wait longer", text, aheadCounted)
	}
	if len(f.Unavailable) > 0 {
		text += "; " + sanitize.Names(f.Unavailable)
	}
	if f.Ahead > 0 {
		text += fmt.Sprintf("; %d %s longer", f.Ahead, plural(f.Ahead, "node waits", "nodes wait"))
	}
	return text
}

// Paused says that the pool begins no change until a user removes an annotation from its Lease.
type Paused struct {
	Pool  string
	Why   string        // the annotation's value
	Retry time.Duration // when to ask again
}

// Error says why the pool is paused.
func (p *Paused) Error() string { return fmt.Sprintf("pool %s is paused: %s", p.Pool, p.Why) }

// Unreadable says that the agent cannot read the Lease's annotation of slots. No agent overwrites it: a user who has edited it may still
// need its text.
type Unreadable struct {
	Pool      string
	Namespace string
	Lease     string
	Err       error
}

// Error says how a user mends the annotation.
func (u *Unreadable) Error() string {
	return fmt.Sprintf("cannot read the slots of pool %s from annotation %s of Lease %s/%s: %v; no node begins a change until you "+
		"repair or remove it: kubectl -n %s annotate lease %s %s- (nodes in the middle of a change note themselves again)",
		u.Pool, config.AnnotationSlots, u.Namespace, u.Lease, u.Err, u.Namespace, u.Lease, config.AnnotationSlots)
}

// Unwrap returns what is wrong with the annotation.
func (u *Unreadable) Unwrap() error { return u.Err }

// plural returns the word for n things: one, or the word given as more, or one with an s.
func plural(n int, one string, more ...string) string {
	switch {
	case n == 1:
		return one
	case len(more) > 0:
		return more[0]
	}
	return one + "s"
}
