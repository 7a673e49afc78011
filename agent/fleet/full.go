package fleet

import (
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
)

// Pauses until the next Take. The first in line asks soon. All that a slot may be for come back before others lose patience with
// them, and those far behind rarely.
const (
	soonest = 2 * time.Second
	timely  = 8 * time.Second
	longest = 30 * time.Second
)

// untilNext is when to ask again, with so many ahead and so many slots in all.
func untilNext(ahead, limit int) time.Duration {
	switch after := soonest * time.Duration(1+ahead); {
	case limit <= 0:
		return longest
	case ahead < limit:
		return min(after, timely)
	default:
		return min(after, longest)
	}
}

// pause is a moment in the last third of the time, so that nodes that were told the same do not come back together.
func pause(d time.Duration) time.Duration { return wait.Jitter(d*2/3, 0.5) }

// Full says that there is no slot for the node now.
type Full struct {
	Pool        string
	Limit       int           // nodes that may be unavailable at once
	Unavailable []string      // "gpu-9: cordoned": who is in the way, and why
	Ahead       int           // nodes that wait longer
	Retry       time.Duration // after this
}

// What a message names. It is written to each node that waits; those far behind would get another one with each node that
// comes or goes.
const (
	aheadCounted = 10
	awayNamed    = 6
)

// Error says who is in the way. Far behind it names nobody, so that it stays as it is.
func (f *Full) Error() string {
	text := fmt.Sprintf("pool %s: %d %s may be unavailable at once", f.Pool, f.Limit, plural(f.Limit, "node"))
	if f.Limit <= 0 {
		return fmt.Sprintf("pool %s: no node may be unavailable, its maxUnavailable is 0", f.Pool)
	}
	if f.Ahead > aheadCounted {
		return fmt.Sprintf("%s; more than %d nodes wait longer", text, aheadCounted)
	}
	if len(f.Unavailable) > 0 {
		named := f.Unavailable[:min(len(f.Unavailable), awayNamed)]
		text += "; " + strings.Join(named, ", ")
		if more := len(f.Unavailable) - len(named); more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
	}
	if f.Ahead > 0 {
		text += fmt.Sprintf("; %d %s longer", f.Ahead, plural(f.Ahead, "node waits", "nodes wait"))
	}
	return text
}

// Paused says that the pool begins no change until people take an annotation off its Lease.
type Paused struct {
	Pool  string
	Why   string        // as the annotation says it
	Retry time.Duration // after this
}

// Error says why.
func (p *Paused) Error() string { return fmt.Sprintf("pool %s is paused: %s", p.Pool, p.Why) }

// Unreadable says that nobody knows who has a slot. It is never overwritten: whoever has edited it may still need what it says.
type Unreadable struct {
	Pool      string
	Namespace string
	Lease     string
	Err       error
}

// Error says how to mend it.
func (u *Unreadable) Error() string {
	return fmt.Sprintf("reading who has a slot of pool %s, from annotation %s of Lease %s/%s: %v; no node begins a change until it is "+
		"mended, or taken away: kubectl -n %s annotate lease %s %s- (nodes that are at a change note themselves again)",
		u.Pool, config.AnnotationSlots, u.Namespace, u.Lease, u.Err, u.Namespace, u.Lease, config.AnnotationSlots)
}

// Unwrap is what is wrong with it.
func (u *Unreadable) Unwrap() error { return u.Err }

// plural is the word for so many, which is the first with an s unless it is given.
func plural(n int, one string, more ...string) string {
	switch {
	case n == 1:
		return one
	case len(more) > 0:
		return more[0]
	}
	return one + "s"
}
