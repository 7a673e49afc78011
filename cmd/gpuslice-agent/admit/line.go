package admit

import (
	"context"
	"slices"
	"sync"
	"time"
)

// mostRefused bounds how many addresses are remembered that were refused. Of more all are forgotten.
const mostRefused = 1024

// line lets one request at a time have its review. The next is from the address that was refused least recently, or never. So a client with many
// made-up tokens and few addresses does not hold up others.
type line struct {
	mu      sync.Mutex
	busy    bool
	waiting []*waiter // in the order in which they came
	refused map[string]time.Time
}

type waiter struct {
	peer string
	turn chan struct{} // closed when it is its turn
}

// enter waits for the turn of a request from the address.
func (l *line) enter(ctx context.Context, peer string) error {
	l.mu.Lock()
	if !l.busy {
		l.busy = true
		l.mu.Unlock()
		return nil
	}
	w := &waiter{peer, make(chan struct{})}
	l.waiting = append(l.waiting, w)
	l.mu.Unlock()
	select {
	case <-w.turn:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if at := slices.Index(l.waiting, w); at >= 0 {
		l.waiting = slices.Delete(l.waiting, at, at+1)
	} else { // its turn came at the same moment
		l.next()
	}
	return errTooMany
}

// leave lets the next request have its turn.
func (l *line) leave(peer string, refused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if refused {
		if l.refused == nil || len(l.refused) >= mostRefused {
			l.refused = map[string]time.Time{}
		}
		l.refused[peer] = time.Now()
	}
	l.next()
}

// next hands the turn on. The caller holds mu.
func (l *line) next() {
	if len(l.waiting) == 0 {
		l.busy = false
		return
	}
	first := slices.MinFunc(l.waiting, func(a, b *waiter) int { return l.refused[a.peer].Compare(l.refused[b.peer]) }) // of equals the first
	l.waiting = slices.DeleteFunc(l.waiting, func(w *waiter) bool { return w == first })
	close(first.turn)
}
